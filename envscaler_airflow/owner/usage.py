"""What an attempt held and when, where it was changed in place: the prices of its bill.

Pure but for what clouds bill.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.backends.base import UsageInterval
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import AttemptState
from envscaler_airflow.run.cost import Held, Use, spent_usd

_APART_S = 600.0
"""How much earlier than the owner saw it a node may have come, seconds. Chosen: as long as a change in place
is awaited."""


@dataclass(frozen=True, slots=True)
class Span(Record):
    """From so many seconds after its start an attempt had this allocation.

    A difference of the owner's times, so that it can be laid over the provider's, whose clock is another.
    ``step``: the last one seen by then; None when unknown.
    """

    from_s: float
    allocation: Allocation
    step: int | None = None


def spans_of(attempt: AttemptState) -> tuple[Span, ...]:
    """One, or one more for each change in place of what a node costs; their number changes no price."""
    started = attempt.started_at if attempt.started_at is not None else attempt.intended_at
    held = [*(before.allocation for before in attempt.earlier), attempt.allocation]
    found = [Span(0.0, held[0])]
    for before, allocation in zip(attempt.earlier, held[1:], strict=True):
        if allocation.offer == found[-1].allocation.offer:
            found[-1] = replace(found[-1], allocation=allocation)
        else:
            found.append(Span(max(0.0, before.until - started), allocation, before.step))
    return tuple(found)


def made_at(handle: Mapping[str, Any] | None) -> float | None:
    """When an attempt was made, by the clock that its usage is told by; None where its handle does not say.

    A node may come hours later: out of a queue, or on a machine that is added. By this the two clocks are
    laid over each other, and the wait is not billed.
    """
    text = ((handle or {}).get("details") or {}).get("created")
    try:
        at = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None


def begun_at(intervals: Iterable[UsageInterval | Held], handle: Mapping[str, Any] | None) -> float:
    """The provider's time that is the owner's time of the start: when it was made, else its first node's."""
    first, made = min(item.start for item in intervals), made_at(handle)
    return first if made is None else min(made, first)


def until_now(
    intervals: Iterable[UsageInterval],
    *,
    started_at: float | None,
    handle: Mapping[str, Any] | None,
    now: float,
) -> tuple[UsageInterval, ...]:
    """*intervals*, those still open ended at the provider's own now: the same clock as their start.

    Where the provider does not report its time, as long after the attempt was made as the store's clock
    counted since the start was recorded: two clocks are never subtracted.

    Args:
        intervals: By the provider's clock.
        started_at: When the start was recorded, by the store's clock; None when it was not.
        handle: Of the attempt.
        now: The store's time.
    """
    known = tuple(intervals)
    if not known:
        return ()
    counted = now if started_at is None else begun_at(known, handle) + max(0.0, now - started_at)
    ends = (counted if one.now is None else one.now for one in known)
    return tuple(
        one if one.end is not None else replace(one, end=max(one.start, end))
        for one, end in zip(known, ends, strict=True)
    )


def with_removed(intervals: Iterable[UsageInterval], attempt: AttemptState) -> tuple[UsageInterval, ...]:
    """*intervals*, and those of nodes that went when the attempt became smaller in place.

    A provider shows what is there: of a pod that is gone nobody wrote down more than the owner, who knows
    when the node was there and when it was not. One that is still shown is not added.
    """
    known = tuple(intervals)
    if not attempt.earlier or not known:
        return known
    started = attempt.started_at if attempt.started_at is not None else attempt.intended_at
    off_s = begun_at(known, attempt.handle) - started
    counts = [*(before.allocation.nodes for before in attempt.earlier), attempt.allocation.nodes]
    came = [min(item.start for item in known) - off_s] * counts[0]
    gone: list[UsageInterval] = []
    for before, count in zip(attempt.earlier, counts[1:], strict=True):
        gone += [
            UsageInterval(node, came[node] + off_s, max(came[node], before.until) + off_s)
            for node in range(count, len(came))
        ]
        came = [*came[:count], *([before.until] * (count - len(came)))]
    shown = {(item.node, end.end) for end in gone for item in known if _began_within(item, end)}
    missing = tuple(item for item in gone if (item.node, item.end) not in shown)
    return tuple(sorted((*known, *missing), key=lambda item: (item.node, item.start))) if missing else known


def _began_within(item: UsageInterval, past: UsageInterval) -> bool:
    """True for an interval of the same node that begins before *past* ends: it is that one."""
    assert past.end is not None
    return item.node == past.node and past.start - _APART_S <= item.start < past.end


def by_span(
    held: Iterable[Held], spans: Sequence[Span], *, began: float | None = None
) -> list[tuple[Allocation, tuple[Held, ...]]]:
    """What was held under each of *spans*, which count from *began*, else from the first that was held."""
    all_held = tuple(held)
    if began is None:
        began = min((item.start for item in all_held), default=0.0)
    ends: list[float | None] = [began + span.from_s for span in spans[1:]]
    found = []
    for span, end in zip(spans, [*ends, None], strict=True):
        cut = (_within(item, began + span.from_s, end) for item in all_held)
        found.append((span.allocation, tuple(item for item in cut if item is not None)))
    return found


def _within(held: Held, start: float, end: float | None) -> Held | None:
    """The part of *held* from *start* to *end*; None when there is none."""
    first = max(held.start, start)
    last = held.end if end is None else end if held.end is None else min(held.end, end)
    return None if last is not None and last <= first else Held(held.node, first, last)


def cost_usd(
    spans: Sequence[Span], intervals: Iterable[UsageInterval], *, began: float | None = None
) -> float | None:
    """Closed *intervals*, each node at the price of its offer; None when a price is unknown."""
    held = [Held(item.node, item.start, item.end) for item in intervals]
    uses = [Use(0, 0, allocation, held=part) for allocation, part in by_span(held, spans, began=began)]
    now = max((one.end for one in held if one.end is not None), default=0.0)
    return spent_usd(uses, now=now, tariffs=tariffs())


def billed_usd(
    spans: Sequence[Span],
    intervals: Iterable[UsageInterval],
    *,
    started_at: float | None,
    handle: Mapping[str, Any] | None,
    now: float,
) -> float | None:
    """Cost so far of what was held in *intervals*, see :func:`until_now`; None when a price is unknown."""
    closed = until_now(intervals, started_at=started_at, handle=handle, now=now)
    return cost_usd(spans, closed, began=begun_at(closed, handle) if closed else None)
