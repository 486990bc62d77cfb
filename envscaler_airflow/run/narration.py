"""What happens to a run, one human-readable line per event. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from envscaler_agent.protocol import Status
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.amounts import (
    SAME,
    bytes_text,
    duration_less,
    duration_text,
    usd_less,
    usd_text,
)
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run.events import Event
from envscaler_airflow.run.state import AttemptState, RunState

MOST_NAME = 100
"""Longest name shown for a node's transfer, letters. Chosen: with its percentage it is one line."""


def describe(event: Event, state: RunState) -> str | None:
    """Return one line for *event*; None for events that only machines need.

    An event with fields of unexpected types is described by its number and type.

    Args:
        event: What happened.
        state: Before the event or at any time after it: only its attempts are used.
    """
    words = _WORDS.get(event.type)
    if words is None:
        return None
    try:
        return printable(words(event.body, state))
    except (AttributeError, KeyError, TypeError, ValueError, ProtocolError):
        return f"event {event.number}: {printable(event.type)}"


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
    what = printable(f"{moving.doing} {moving.name}"[:MOST_NAME])
    return f"{what}: {percent} % of {bytes_text(moving.total_bytes)}"


def printable(text: str) -> str:
    """Return *text* on one line without terminal control characters: parts come from the training's side."""
    return "".join(char if char.isprintable() else " " for char in text)


def totals(bill: Mapping[str, Any]) -> list[str]:
    """Sum up *bill*, ``Bill.to_dict()``: what the run cost, and what a static plan would have cost."""
    split = bill.get("usd_split") or {}
    names = {"compute": "compute", "provisioning": "provisioning", "lost": "lost work", "idle": "idle"}
    parts = [
        f"{label} {usd_text(split[name])}" for name, label in names.items() if split.get(name) is not None
    ]
    where = f" ({', '.join(parts)})" if parts else ""
    usd, known = bill.get("usd"), bill.get("known_usd")
    total = f"at least {usd_text(known)}" if usd is None and known else _usd(usd)
    lines = [f"total {total} in {_duration(bill.get('wall_s'))}{where}"]
    static = bill.get("static")
    if static and static.get("usd") is not None:
        hours = static.get("hours")
        time = _duration(None if hours is None else hours * 3600)
        plan = allocation_name(static["allocation"])
        lines.append(
            f"static plan ({plan} throughout): {usd_text(static['usd'])} in {time}{_against_static(bill)}"
        )
    return lines


def allocation_name(allocation: Mapping[str, Any]) -> str:
    """Return the name for ``Allocation.to_dict()``: ``2 x aws/us-east-1/p5.48xlarge``."""
    if allocation.get("rest"):
        return Allocation.from_dict(allocation).name  # its parts differ only by capacity type
    offer, nodes = allocation["offer"], allocation.get("nodes", 1)
    parts = [offer["cloud"], offer.get("region"), offer.get("zone"), offer["instance_type"]]
    name = "/".join(part for part in parts if part)
    return name if nodes == 1 else f"{nodes} x {name}"


def _against_static(bill: Mapping[str, Any]) -> str:
    """Return ``; this run cost $0.0008 more and took 20 s less``, or ``, the same as this run``."""
    saved, wall_s, hours = bill.get("saved_usd"), bill.get("wall_s"), bill["static"].get("hours")
    if saved is None:
        return ""
    usd = usd_less(saved, of=bill["static"]["usd"])
    if wall_s is None or hours is None:
        return f"; this run cost {usd}"
    time = duration_less(hours * 3600 - wall_s)
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


def _target(body: Mapping[str, Any]) -> str:
    try:
        return Allocation.from_dict(body["target"]).name
    except (KeyError, TypeError, ValueError):
        return "another machine"


def _to_target(body: Mapping[str, Any]) -> str:
    """``local/cpu-2: saves $0.48 of $1.36``: a policy's reason starts with the target; say it only once."""
    target = _target(body)
    return f"{target}: {str(body.get('reason', '')).removeprefix(f'{target} ')}"


def _with_reason(words: str) -> Callable[[Mapping[str, Any], RunState], str]:
    """Return a function that describes an event by *words* and the reason in its body."""
    return lambda body, _state: f"{words}: {body.get('reason', '')}"


def _generation(body: Mapping[str, Any], _state: RunState) -> str:
    return f"generation {body.get('generation', '?')} begins: {body.get('reason', '')}"


def _owner(body: Mapping[str, Any], state: RunState) -> str:
    live = state.live
    where = f"; {whereabouts(live)} goes on" if live is not None else ""
    return f"this try owns the run now: {body.get('reason', '')}{where}"


def _intended(body: Mapping[str, Any], _state: RunState) -> str:
    allocation = Allocation.from_dict(body["allocation"])
    attempt = AttemptState(int(body["generation"]), int(body["attempt"]), allocation)
    return f"{whereabouts(attempt)}: {body.get('reason', '')}"


def _started(body: Mapping[str, Any], _state: RunState) -> str:
    handle = body["handle"]
    namespace = (handle.get("details") or {}).get("namespace")
    return f"attempt {body['attempt']} runs as {f'{namespace}/' if namespace else ''}{handle['name']}"


def _move_requested(body: Mapping[str, Any], _state: RunState) -> str:
    return f"the sensor requests a move to {_to_target(body)}"


def _move_accepted(body: Mapping[str, Any], _state: RunState) -> str:
    when = "at the end of the epoch" if body.get("align") == "epoch" else "now"
    return f"attempt {body['attempt']} saves {when} and moves to {_to_target(body)}"


def _move_deferred(body: Mapping[str, Any], _state: RunState) -> str:
    return f"the next attempt runs on {_to_target(body)}"


def _change_intended(body: Mapping[str, Any], _state: RunState) -> str:
    return f"attempt {body['attempt']} changes in place to {_to_target(body)}"


def _changed(body: Mapping[str, Any], _state: RunState) -> str:
    step = f" at step {body['step']}" if isinstance(body.get("step"), int) else ""
    return f"attempt {body['attempt']} has {_target(body)}{step}, without a restart"


def _change_undone(body: Mapping[str, Any], _state: RunState) -> str:
    return f"attempt {body['attempt']} stays as it was: {body.get('reason', '')}"


def _stopping(body: Mapping[str, Any], _state: RunState) -> str:
    return f"attempt {body['attempt']} saves and stops: {body.get('reason') or body.get('why', '')}"


def _ended(body: Mapping[str, Any], state: RunState) -> str:
    number = int(body["attempt"])
    attempts = (one for one in state.attempts if (one.generation, one.number) == (body["generation"], number))
    attempt = next(attempts, None)
    moved = attempt is not None and attempt.stop_why == "move" and body.get("outcome") == "left"
    outcome = "moved" if moved else str(body.get("outcome", "ended"))
    step = f" at step {body['step']}" if isinstance(body.get("step"), int) else ""
    saved = body.get("checkpoint_step")
    kept = f"; last checkpoint at step {saved}" if isinstance(saved, int) and outcome != "succeeded" else ""
    detail = f": {body['detail']}" if body.get("detail") else ""
    return f"attempt {number} {outcome}{step}{kept}{detail}"


def _succeeded(body: Mapping[str, Any], _state: RunState) -> str:
    outputs = body.get("outputs") or {}
    return "".join(
        ["the stage succeeded", *(f"; output {name}: {outputs[name]}" for name in sorted(outputs))]
    )


def _release_failed(body: Mapping[str, Any], _state: RunState) -> str:
    return f"attempt {body['attempt']} is not released, and is tried again: {body.get('detail', '')}"


def _released(body: Mapping[str, Any], _state: RunState) -> str:
    usd = body.get("usd")
    cost = "" if not usd else f"; it cost {usd_text(usd)} in all"
    return f"attempt {body['attempt']} is released{cost}"


_WORDS: Mapping[str, Callable[[Mapping[str, Any], RunState], str]] = {
    "generation": _generation,
    "owner": _owner,
    "attempt-intended": _intended,
    "attempt-started": _started,
    "attempt-stopping": _stopping,
    "attempt-ended": _ended,
    "release-failed": _release_failed,
    "attempt-released": _released,
    "move-requested": _move_requested,
    "move-accepted": _move_accepted,
    "move-refused": _with_reason("move refused"),
    "move-deferred": _move_deferred,
    "change-intended": _change_intended,
    "changed": _changed,
    "change-undone": _change_undone,
    "stop-requested": _with_reason("a stop is requested"),
    "succeeded": _succeeded,
    "failed": _with_reason("the stage failed"),
    "stopped": _with_reason("the run stopped"),
}
