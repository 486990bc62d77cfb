"""What an attempt used and when, including its changes in place: the prices of its bill.

Pure except for the clouds' billing rules.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from envscaler_airflow.clouds import tariffs
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import AttemptState, Handle
from envscaler_airflow.run.cost import UsageInterval, Use, spent_usd

_APART_S = 600.0
"""How much earlier than the owner saw it a node may have started, seconds. Chosen: the longest wait for a
change in place."""


@dataclass(frozen=True, slots=True)
class Span(Record):
    """The allocation of an attempt from a number of seconds after its start.

    The offset is a difference of the owner's times, so it can be applied to the provider's times, which come
    from another clock. ``step``: the last one seen by then; None when unknown.
    """

    from_s: float
    allocation: Allocation
    step: int | None = None


def spans_of(attempt: AttemptState) -> tuple[Span, ...]:
    """Return one span, plus one for each change in place of a node's price; a rescale changes no price."""
    started = attempt.started_at if attempt.started_at is not None else attempt.intended_at
    held = [*(before.allocation for before in attempt.earlier), attempt.allocation]
    found = [Span(0.0, held[0])]
    for before, allocation in zip(attempt.earlier, held[1:], strict=True):
        if allocation.offer == found[-1].allocation.offer:
            found[-1] = replace(found[-1], allocation=allocation)
        else:
            found.append(Span(max(0.0, before.until - started), allocation, before.step))
    return tuple(found)


def made_at(handle: Handle | None) -> float | None:
    """When an attempt was created, by the clock of its usage; None if its handle does not report it.

    A node may start hours later: from a queue, or on a machine that is added. This time aligns the two
    clocks, and the wait is not billed.
    """
    text = None if handle is None else handle.details.get("created")
    try:
        at = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None


def begun_at(intervals: Iterable[UsageInterval], handle: Handle | None) -> float:
    """Provider's time that matches the owner's time of the start: its creation, or its first node's start."""
    first, made = min(item.start for item in intervals), made_at(handle)
    return first if made is None else min(made, first)


def until_now(
    intervals: Iterable[UsageInterval],
    *,
    started_at: float | None,
    handle: Handle | None,
    now: float,
) -> tuple[UsageInterval, ...]:
    """Return *intervals* with the open ones ended at the provider's own now: the same clock as their start.

    If the provider does not report its time, they end as long after the attempt's creation as the store's
    clock has counted since the start was recorded: times of two clocks are never subtracted.

    Args:
        intervals: By the provider's clock.
        started_at: When the start was recorded, by the store's clock; None if it was not.
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
    """Return *intervals* plus those of nodes that were removed when the attempt shrank in place.

    A provider reports only what exists: only the owner has recorded when a deleted pod's node was present.
    A node that the provider still reports is not added.
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
    """Return True for an interval of the same node that begins before *past* ends: it is the same one."""
    assert past.end is not None
    return item.node == past.node and past.start - _APART_S <= item.start < past.end


def by_span(
    held: Iterable[UsageInterval], spans: Sequence[Span], *, began: float | None = None
) -> list[tuple[Allocation, tuple[UsageInterval, ...]]]:
    """Split billed time by *spans*, which count from *began*, or else from the first billed interval."""
    all_held = tuple(held)
    if began is None:
        began = min((item.start for item in all_held), default=0.0)
    ends: list[float | None] = [began + span.from_s for span in spans[1:]]
    found = []
    for span, end in zip(spans, [*ends, None], strict=True):
        cut = (_within(item, began + span.from_s, end) for item in all_held)
        found.append((span.allocation, tuple(item for item in cut if item is not None)))
    return found


def _within(held: UsageInterval, start: float, end: float | None) -> UsageInterval | None:
    """Return the part of an interval from *start* to *end*; None if it is empty."""
    first = max(held.start, start)
    last = held.end if end is None else end if held.end is None else min(held.end, end)
    if last is not None and last <= first:
        return None
    return UsageInterval(held.node, first, last, before_s=first - held.start or None)


def cost_usd(
    spans: Sequence[Span], intervals: Iterable[UsageInterval], *, began: float | None = None
) -> float | None:
    """Cost of closed *intervals*, each node at the price of its offer; None if a price is unknown."""
    held = tuple(intervals)
    uses = [Use(0, 0, allocation, usage=part) for allocation, part in by_span(held, spans, began=began)]
    now = max((one.end for one in held if one.end is not None), default=0.0)
    return spent_usd(uses, now=now, tariffs=tariffs())


def billed_usd(
    spans: Sequence[Span],
    intervals: Iterable[UsageInterval],
    *,
    started_at: float | None,
    handle: Handle | None,
    now: float,
) -> float | None:
    """Cost of *intervals* so far, see :func:`until_now`; None if a price is unknown."""
    closed = until_now(intervals, started_at=started_at, handle=handle, now=now)
    return cost_usd(spans, closed, began=begun_at(closed, handle) if closed else None)
