"""The cost and the outcome of a run, from its events: JSON for XCom, and human-readable text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from envscaler_agent.protocol import Status
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.owner.usage import begun_at, by_span, spans_of
from envscaler_airflow.planning.amounts import rounded_money
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import AttemptState, RunState, outcome_of
from envscaler_airflow.run.cost import Bill, Pause, UsageInterval, Use, bill
from envscaler_airflow.store.run import MOST, Run


def measured(run: Run, attempt: AttemptState) -> dict[str, Any]:
    """Return the times and counts that node 0 last reported: fields of :class:`AttemptEnded`.

    Raises:
        StoreError: The store cannot be read.
    """
    status = run.status(attempt.key)
    if status is None:
        return {}
    progress = status.progress
    fields = {
        "setup_s": status.setup_s,
        "restore_s": status.restore_s,
        "checkpoint_s": status.checkpoint_s,
        "checkpoints": status.checkpoints,
        "restored_from": status.restored_from,
        "rejected": status.rejected or None,
        "cpu_seconds": status.cpu_seconds,
        "elapsed_s": progress.elapsed_s,
        "first_step_s": progress.first_step_s,
        "save_s": progress.save_s,
        "total_steps": progress.total_steps,
        "samples": progress.samples,
        "repeated_samples": progress.repeated_samples,
        "epoch": progress.epoch,
    }
    fields |= _before(run, attempt, status)
    return {name: value for name, value in fields.items() if value is not None}


def _before(run: Run, attempt: AttemptState, last: Status) -> dict[str, Any]:
    """Return what earlier pods of node 0 did within the same attempt, before the *last* one.

    ``earlier_pods_s``: seconds of training. ``repeated_steps``: steps that a later pod repeated, or the same
    after another node was replaced. ``start_step``: step at which the first of these pods began.
    """
    statuses = [run.status_of_claim(attempt.key, claim) for claim in range(1, last.claim)]
    known = [one for one in statuses if one is not None]
    regrouped = [one.resume.repeated_steps for one in (*known, last) if one.resume is not None]
    trained, repeated = 0.0, sum(max(0, steps) for steps in regrouped)
    if not known:
        return {"repeated_steps": min(repeated, MOST)} if repeated else {}
    for one, after in pairwise([*known, last]):
        done = one.progress
        trained += max(0.0, (done.elapsed_s or 0.0) - (done.first_step_s or 0.0) - (done.save_s or 0.0))
        if done.step is not None and after.start_step is not None:
            repeated += max(0, done.step - after.start_step)
    sums: dict[str, Any] = {"earlier_pods_s": min(trained, MOST), "repeated_steps": min(repeated, MOST)}
    return sums | {"start_step": known[0].start_step}


def run_bill(state: RunState, *, now: float) -> Bill:
    """Return the bill of the current generation.

    While work remains, its cost is not compared with that of all the work on one allocation.
    """
    attempts = state.attempts_of(state.generation)
    uses = [
        use for index, attempt in enumerate(attempts) for use in _uses(attempt, _next_start(attempts, index))
    ]
    came = [attempt for attempt in attempts if attempt.outcome != "not-started"]
    pauses = [_pause(before, after) for before, after in pairwise(came)]
    totals = [attempt.end.total_steps for attempt in attempts]
    known = [total for total in totals if total is not None]
    total = None if not known or _made_steps(state, uses) else known[-1]
    made = bill(uses, now=now, tariffs=tariffs(), pauses=pauses, total_steps=total)
    return made if state.status == "succeeded" else replace(made, saved_usd=None)


def _made_steps(state: RunState, uses: Sequence[Use]) -> bool:
    """Return True for a finished run whose steps are known: it may have announced more."""
    last = uses[-1] if uses else None
    return state.status == "succeeded" and last is not None and None not in (last.first_step, last.last_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport(Record):
    """How one attempt went; the fields after *reason* are those of its end."""

    attempt: int
    allocation: str
    price_source: str
    reason: str
    outcome: str | None = None
    detail: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    start_step: int | None = None
    step: int | None = None
    checkpoint: str | None = None
    restored_from: str | None = None
    rejected: tuple[str, ...] | None = None
    repeated_samples: int | None = None


@dataclass(frozen=True, slots=True)
class Report(Record):
    """The cost report of a generation; its JSON is in XCom, ``result.json`` and ``envscaler report``."""

    status: str
    generation: int
    reason: str
    bill: Bill
    attempts: tuple[AttemptReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON form, its money rounded to a nano-dollar."""
        body: dict[str, Any] = rounded_money(Record.to_dict(self))
        return body


def run_report(state: RunState, *, now: float) -> Report:
    """Return the cost report of the current generation."""
    attempts = tuple(_described(attempt) for attempt in state.attempts_of(state.generation))
    return Report(state.status, state.generation, state.reason, run_bill(state, now=now), attempts)


def _described(attempt: AttemptState) -> AttemptReport:
    end, offers = attempt.end, [part.offer for part in attempt.allocation.parts]
    return AttemptReport(
        attempt=attempt.number,
        allocation=attempt.allocation.name,
        price_source="; ".join(dict.fromkeys(offer.price_source for offer in offers)),
        reason=attempt.reason,
        outcome=end.outcome or None,
        detail=end.detail,
        exit_code=end.exit_code,
        signal=end.signal,
        start_step=end.start_step,
        step=end.step,
        checkpoint=end.checkpoint,
        restored_from=end.restored_from,
        rejected=end.rejected,
        repeated_samples=end.repeated_samples,
    )


def failure_message(state: RunState) -> str:
    """Why the run failed, with the exit code, its meaning, and the last lines of its output."""
    last = state.current
    lines = (last.end.last_lines or ()) if last else ()
    head, row = f"the stage failed: {state.reason}", outcome_of(state.failure)
    if row.severity:
        head += f"\n{row.name}: {row.text}"
    if not lines:
        return head
    many = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    return "\n".join([head, f"last {many} of attempt {last.number if last else '?'}:", *lines])


def _uses(attempt: AttemptState, kept_step: int | None) -> list[Use]:
    """Return one use, plus one for each change in place, which loses no steps and starts nothing."""
    held, spans = _held(attempt), spans_of(attempt)
    provisioning = _provisioning_s(attempt)
    steps = [attempt.end.start_step, *(span.step for span in spans[1:])]
    whole = Use(
        generation=attempt.generation,
        attempt=attempt.number,
        allocation=attempt.allocation,
        usage=held,
        outcome=outcome_text(attempt),
        provisioning_s=provisioning,
        idle_s=_idle_s(attempt, held, provisioning),
        first_step=steps[-1],
        last_step=attempt.step,
        kept_step=attempt.step if attempt.outcome == "succeeded" else kept_step,
        repeated_steps=attempt.end.repeated_steps or 0,
        is_lower_bound=attempt.end.usage_is_lower_bound is True,
    )
    if len(spans) == 1 or held is None:
        return [whole]
    is_metered = bool(held) and not attempt.is_live
    parts = by_span(held, spans, began=begun_at(held, attempt.handle) if is_metered else None)
    before = [
        replace(
            whole,
            allocation=allocation,
            usage=part,
            outcome="changed in place",
            provisioning_s=provisioning if index == 0 else 0.0,
            idle_s=_part(whole.idle_s, part, held),
            first_step=steps[index],
            last_step=steps[index + 1],
            kept_step=steps[index + 1],
        )
        for index, (allocation, part) in enumerate(parts[:-1])
    ]
    idle_s = _part(whole.idle_s, parts[-1][1], held)
    return [*before, replace(whole, usage=parts[-1][1], provisioning_s=0.0, idle_s=idle_s)]


def _part(
    seconds: float | None, part: Sequence[UsageInterval], held: Sequence[UsageInterval]
) -> float | None:
    """Return the share of *seconds* that falls within *part* of the billed time; None if unknown."""
    lasted = [[one.end - one.start for one in some if one.end is not None] for some in (part, held)]
    if seconds is None or len(lasted[0]) < len(part) or len(lasted[1]) < len(held):
        return None
    return seconds * sum(lasted[0]) / sum(lasted[1]) if sum(lasted[1]) else seconds


def outcome_text(attempt: AttemptState) -> str:
    """``moved``, ``lost``, ``succeeded``, ...; ``""`` while it is live."""
    if attempt.outcome == "drained" and attempt.stop_reason == "move":
        return "moved"
    if attempt.outcome == "deadline-exceeded" and attempt.stop_reason == "budget":
        return "budget"  # the machine's own deadline is computed from the money left
    return attempt.outcome


def _held(attempt: AttemptState) -> tuple[UsageInterval, ...] | None:
    if attempt.is_live and attempt.started_at is not None:
        return tuple(UsageInterval(node, attempt.started_at) for node in range(attempt.allocation.nodes))
    rows, at, ended_at = attempt.end.usage, attempt.end.usage_at, attempt.ended_at
    if rows is None:
        return None
    off_s = 0.0 if at is None or ended_at is None else ended_at - at
    # Intervals that were open then are billed up to the run's current time, or to the release.
    return tuple(
        UsageInterval(node, max(0.0, start + off_s), attempt.released_at)
        if end is None
        else UsageInterval(node, start, end)
        for node, start, end in rows
    )


def _next_start(attempts: Sequence[AttemptState], index: int) -> int | None:
    """Step that the next attempt to start resumed from: what was kept of this one.

    An attempt that got no machine, as after a move to an offer without capacity, resumed from nothing.
    """
    came = (one for one in attempts[index + 1 :] if one.outcome != "not-started")
    after = next(came, None)
    return attempts[index].checkpoint_step if after is None else after.end.start_step


def _provisioning_s(attempt: AttemptState) -> float | None:
    """Billed time before the first step, seconds; an attempt without a step provisioned until its end."""
    setup, first = attempt.end.setup_s, attempt.end.first_step_s
    return None if setup is None or first is None else setup + first


def _idle_s(
    attempt: AttemptState, held: tuple[UsageInterval, ...] | None, provisioning: float | None
) -> float | None:
    elapsed, first = attempt.end.elapsed_s, attempt.end.first_step_s
    mine = [one for one in held or () if one.node == 0]
    ends = [one.end for one in mine if one.end is not None]
    if not mine or len(ends) < len(mine) or provisioning is None or elapsed is None or first is None:
        return None
    saving = attempt.end.save_s
    if saving is None and attempt.checkpoint_step is not None:
        return None  # it saved, and no process reported for how long
    trained = elapsed - first - (saving or 0.0) + (attempt.end.earlier_pods_s or 0.0)
    whole = sum(ends) - sum(one.start for one in mine)
    return max(0.0, whole - provisioning - max(0.0, trained))


def _pause(before: AttemptState, after: AttemptState) -> Pause:
    left, came = _held(before), _held(after)
    came_at = came[0].start if came else None
    parts = {
        "checkpoint": before.end.checkpoint_s if before.outcome == "drained" else None,
        "noticed": _between(left[0].end if left else None, before.ended_at),
        "waited": _between(before.ended_at, after.intended_at),
        "start": _between(after.intended_at, came_at),
        "setup": after.end.setup_s,
        "first_step": after.end.first_step_s,
    }
    return Pause(
        before=before.number,
        after=after.number,
        cause=outcome_text(before),
        total_s=_pause_s(before, after, left, came_at),
        parts={name: value for name, value in parts.items() if value is not None},
    )


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds, >= 0; ``noticed`` is the trigger's poll and a worker slot, ``waited`` the back-off."""
    return None if start is None or end is None else max(0.0, end - start)


def _pause_s(
    before: AttemptState, after: AttemptState, left: tuple[UsageInterval, ...] | None, came_at: float | None
) -> float | None:
    """Seconds from the last step seen before the pause to the first one after it."""
    provisioning = _provisioning_s(after)
    setup, elapsed = before.end.setup_s, before.end.elapsed_s
    if not left or came_at is None or provisioning is None or setup is None or elapsed is None:
        return None
    return max(0.0, came_at + provisioning - (left[0].start + setup + elapsed))
