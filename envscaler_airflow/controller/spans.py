"""What an attempt held and when, where it was changed in place: the prices of its bill. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from envscaler_airflow.backends.base import UsageInterval
from envscaler_airflow.cost import Held, Use, spent_usd
from envscaler_airflow.lifecycle import AttemptState
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import Record


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


def by_span(held: Iterable[Held], spans: Sequence[Span]) -> list[tuple[Allocation, tuple[Held, ...]]]:
    """What was held under each of *spans*; times are the provider's."""
    all_held = tuple(held)
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


def cost_usd(spans: Sequence[Span], intervals: Iterable[UsageInterval], *, now: float) -> float | None:
    """Each node at the price of its offer, those still held up to *now*; None when a price is unknown."""
    held = (Held(item.node, item.start, item.end) for item in intervals)
    uses = [Use(0, 0, allocation, held=part) for allocation, part in by_span(held, spans)]
    return spent_usd(uses, now=now)
