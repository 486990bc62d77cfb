"""What happens to a run, one human-readable line per event. Pure."""

from __future__ import annotations

from envscaler_agent.protocol import Status
from envscaler_airflow.planning.amounts import (
    SAME,
    bytes_text,
    duration_less,
    duration_text,
    usd_less,
    usd_text,
)
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.run.cost import Bill, StaticPlan
from envscaler_airflow.run.event_bodies import Event
from envscaler_airflow.run.state import AttemptState, RunState

MOST_NAME = 100
"""Longest name shown for a node's transfer, letters. Chosen: with its percentage it is one line."""


def describe(event: Event, state: RunState) -> str | None:
    """Return one line for *event*; None for events that only machines need.

    Args:
        event: What happened.
        state: Before the event or at any time after it: only its attempts are used.
    """
    words = _words(event, state)
    return None if words is None else printable(words)


def resumed(state: RunState, start_step: int, *, earlier: int | None = None) -> str | None:
    """Say where the current attempt of *state* resumes; None for an attempt that starts at step 0.

    Args:
        state: Its current attempt reports *start_step*.
        start_step: Step at which it resumes.
        earlier: Start step that the same attempt reported before its node was replaced; None at first.
    """
    current = state.current
    if current is None:
        return None
    if earlier is not None:
        return f"attempt {current.number} lost a node and resumes from step {start_step}"
    if not start_step:
        return None
    return f"attempt {current.number} resumes from step {start_step}{_again(state, start_step)}"


def transfer_text(status: Status) -> str:
    """Return ``uploading checkpoint 440: 37 % of 1.2 GiB``; empty while the node transfers nothing."""
    moving = status.transfer
    if moving is None or moving.total_bytes <= 0:
        return ""
    percent = min(100, max(0, 100 * moving.done_bytes // moving.total_bytes))
    what = printable(f"{moving.activity} {moving.name}"[:MOST_NAME])
    return f"{what}: {percent} % of {bytes_text(moving.total_bytes)}"


def how_of(status: Status) -> str:
    """``ok``, ``stalled``, ...; how its command ended for a node that has ended, which is not ``ok``."""
    return status.health if status.ended is None else status.ended.reason


def printable(text: str) -> str:
    """Return *text* on one line without terminal control characters: parts come from the training's side."""
    return "".join(char if char.isprintable() else " " for char in text)


def totals(bill: Bill) -> list[str]:
    """Sum up *bill*: what the run cost, and what a static plan would have cost."""
    split = bill.usd_split
    named = {
        "compute": split.compute,
        "provisioning": split.provisioning,
        "lost work": split.lost,
        "idle": split.idle,
    }
    parts = [f"{label} {usd_text(usd)}" for label, usd in named.items() if usd is not None]
    where = f" ({', '.join(parts)})" if parts else ""
    is_least = bill.usd is None and bill.known_usd
    total = f"at least {usd_text(bill.known_usd)}" if is_least else _usd(bill.usd)
    lines = [f"total {total} in {_duration(bill.wall_s)}{where}"]
    static = bill.static
    if static is not None and static.usd is not None:
        time = _duration(None if static.hours is None else static.hours * 3600)
        plan = f"static plan ({allocation_name(static.allocation)} throughout): {usd_text(static.usd)}"
        lines.append(f"{plan} in {time}{_against_static(bill, static)}")
    return lines


def allocation_name(allocation: Allocation) -> str:
    """Return ``2 x aws/us-east-1/p5.48xlarge``, without the capacity type unless its parts differ by it."""
    if allocation.is_mixed:
        return allocation.name
    offer, nodes = allocation.offer, allocation.nodes
    name = "/".join(part for part in (offer.cloud, offer.region, offer.zone, offer.instance_type) if part)
    return name if nodes == 1 else f"{nodes} x {name}"


def _against_static(bill: Bill, static: StaticPlan) -> str:
    """Return ``; this run cost $0.0008 more and took 20 s less``, or ``, the same as this run``."""
    if bill.saved_usd is None or static.usd is None:
        return ""
    usd = usd_less(bill.saved_usd, of=static.usd)
    if bill.wall_s is None or static.hours is None:
        return f"; this run cost {usd}"
    time = duration_less(static.hours * 3600 - bill.wall_s)
    return ", the same as this run" if usd == time == SAME else f"; this run cost {usd} and took {time}"


def _usd(usd: float | None) -> str:
    return "$?" if usd is None else usd_text(usd)


def _duration(seconds: float | None) -> str:
    return "? s" if seconds is None else duration_text(seconds)


def _again(state: RunState, start_step: int) -> str:
    before = state.attempts_of(state.generation)[:-1]
    reached = before[-1].step if before else None
    if reached is None:
        return ""
    lost = max(0, reached - start_step)
    return f", {lost} steps again" if lost else ", no step again"


def whereabouts(attempt: AttemptState) -> str:
    """Return ``attempt 2 on aws/p5.48xlarge/spot ($37.2000/h)``."""
    usd = attempt.allocation.usd_per_hour
    price = "price unknown" if usd is None else f"${usd:.4f}/h"
    return f"attempt {attempt.number} on {attempt.allocation.name} ({price})"


def _to_target(target: Allocation | None, reason: str) -> str:
    """``local/cpu-2: saves $0.48 of $1.36``: a policy's reason starts with the target; say it only once."""
    name = _name(target)
    return f"{name}: {reason.removeprefix(f'{name} ')}"


def _name(target: Allocation | None) -> str:
    return "another machine" if target is None else target.name


def _words(  # noqa: C901 - one case for each event
    event: Event, state: RunState
) -> str | None:
    match body := event.body:
        case bodies.NewGeneration():
            return f"generation {body.generation} begins: {body.reason}"
        case bodies.NewOwner():
            where = f"; {whereabouts(state.live)} goes on" if state.live is not None else ""
            who = "shell" if event.actor is not None and event.actor.is_shell else "try"
            return f"this {who} owns the run now: {body.reason}{where}"
        case bodies.MoveRequested():
            return f"the sensor requests a move to {_to_target(body.target, body.reason)}"
        case bodies.MoveRefused():
            return f"move refused: {body.reason}"
        case bodies.StopRequested():
            return f"a stop is requested: {body.reason}"
        case bodies.Succeeded():
            outputs = (f"; output {name}: {body.outputs[name]}" for name in sorted(body.outputs))
            return "".join(["the stage succeeded", *outputs])
        case bodies.Failed():
            return f"the stage failed: {body.reason}"
        case bodies.Stopped():
            return f"the run stopped: {body.reason}"
        case bodies.PruneIntended():
            return f"the run is removed from the store: {body.reason}"
        case bodies.Delivered() | bodies.Accepted() | bodies.Unknown():
            return None
        case _:
            return _attempt_words(body, state)


def _attempt_words(  # noqa: C901 - one case for each event
    body: bodies.AttemptBody, state: RunState
) -> str:
    name = f"attempt {body.attempt}"
    match body:
        case bodies.AttemptIntended():
            attempt = AttemptState(body.generation, body.attempt, body.allocation)
            return f"{whereabouts(attempt)}: {_why_begun(body, state)}"
        case bodies.AttemptStarted():
            namespace = body.handle.details.get("namespace")
            return f"{name} runs as {f'{namespace}/' if namespace else ''}{body.handle.name}"
        case bodies.AttemptStopping():
            return f"{name} saves and stops: {body.reason or body.stop_reason}"
        case bodies.AttemptEnded():
            return f"{name} {_end_words(body, state)}"
        case bodies.ReleaseFailed():
            return f"{name} is not released, and is tried again: {body.detail}"
        case bodies.AttemptReleased():
            return f"{name} is released" + (f"; it cost {usd_text(body.usd)} in all" if body.usd else "")
        case bodies.MoveAccepted():
            when = "at the end of the epoch" if body.align == "epoch" else "now"
            return f"{name} saves {when} and moves to {_to_target(body.target, body.reason)}"
        case bodies.MoveDeferred():
            return f"the next attempt runs on {_to_target(body.target, body.reason)}"
        case bodies.ChangeIntended():
            return f"{name} changes in place to {_to_target(body.target, body.reason)}"
        case bodies.Changed():
            step = "" if body.step is None else f" at step {body.step}"
            return f"{name} has {_name(body.target)}{step}, without a restart"
        case bodies.ChangeUndone():
            return f"{name} is unchanged: {body.reason}"


def _why_begun(body: bodies.AttemptIntended, state: RunState) -> str:
    """Return why the attempt begins, without the detail that the line of the end before it contains."""
    key = (body.generation, body.attempt - 1)
    before = next((one for one in state.attempts if one.key == key), None)
    detail = None if before is None else before.end.detail
    return body.reason.removesuffix(f" ({detail})") if detail else body.reason


def _end_words(body: bodies.AttemptEnded, state: RunState) -> str:
    key = (body.generation, body.attempt)
    attempt = next((one for one in state.attempts if (one.generation, one.number) == key), None)
    moved = attempt is not None and attempt.stop_reason == "move" and body.outcome == "drained"
    step = "" if body.step is None else f" at step {body.step}"
    saved = None if body.outcome == "succeeded" else body.checkpoint_step
    kept = "" if saved is None else f"; last checkpoint at step {saved}"
    detail = f": {body.detail}" if body.detail else ""
    return f"{'moved' if moved else body.outcome}{step}{kept}{detail}"
