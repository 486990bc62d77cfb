"""Place the marks of a chart: numbers in, coordinates out. Pure; the template draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from envscaler_airflow.owner.report import outcome_text
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.plugin.page_facts import Rate
from envscaler_airflow.run import AttemptState, outcome_of

WIDTH = 960.0
"""Width of all charts, in units of their viewBox; they shrink with the page. Chosen."""
LEFT = 150.0
"""Space for labels at the left. Chosen: twenty letters."""
LANE = 26.0
"""Height of an allocation's lane. Chosen."""
MOST_LANES = 12
"""Allocations with a lane of their own; the rest share the last one. Chosen: a screen."""
TOP, HEIGHT = 8.0, 140.0
_STEPS = (1.0, 2.0, 5.0, 10.0)
_PERIODS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """Time from left to right.

    Attributes:
        start, end: Seconds since the epoch; ``end > start``.
    """

    start: float
    end: float

    def x(self, at: float) -> float:
        """Return the position of a moment; one outside the axis is placed at its edge."""
        part = (at - self.start) / (self.end - self.start)
        return round(LEFT + min(1.0, max(0.0, part)) * (WIDTH - LEFT), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels: time since the start, in round numbers."""
        whole = self.end - self.start
        days = math.ceil(whole / _TICKS / _PERIODS[-1]) * _PERIODS[-1]
        every = next((period for period in _PERIODS if whole / period <= _TICKS), days)
        return [
            (self.x(self.start + number * every), duration_text(number * every))
            for number in range(int(whole // every) + 1)
        ]


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt in its lane, until its end or a change in place.

    Attributes:
        waits_x, x, end_x: Positions of the decision to begin it, its start and its end.
        lane: From 0.
        kind: ``good``, ``moved``, ``bad`` or ``live``.
        text: What it was and how it ended.
    """

    number: int
    waits_x: float
    x: float
    end_x: float
    lane: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """Allocation over time."""

    names: tuple[str, ...]
    bars: tuple[Bar, ...]

    @property
    def height(self) -> float:
        """Return the height of all lanes."""
        return LANE * len(self.names)


@dataclass(frozen=True, slots=True)
class Curve:
    """Speed over time.

    Attributes:
        lines: Points of one line for each attempt, as SVG writes them.
        ticks: Heights and labels.
    """

    lines: tuple[str, ...]
    ticks: tuple[tuple[float, str], ...]


def time_axis(attempts: Sequence[AttemptState], *, now: float) -> Axis | None:
    """Axis from the first intent to the last end, or to *now* while one lives; None without attempts."""
    if not attempts:
        return None
    start = min(item.intended_at for item in attempts)
    ends = [now if item.ended_at is None else item.ended_at for item in attempts]
    return Axis(start, max(*ends, start + 1.0))


def lanes(attempts: Sequence[AttemptState], axis: Axis, *, now: float) -> Lanes:
    """Return one lane for each allocation, in the order of their first use."""
    names = list(dict.fromkeys(held.name for item in attempts for held in held_by(item)))
    if len(names) > MOST_LANES:
        names = [*names[: MOST_LANES - 1], "others"]
    return Lanes(tuple(names), tuple(bar for item in attempts for bar in _bars(item, names, axis, now)))


def held_by(attempt: AttemptState) -> tuple[Allocation, ...]:
    """Return what an attempt used: one allocation, plus one for each change in place."""
    return (*(before.allocation for before in attempt.earlier), attempt.allocation)


def _bars(attempt: AttemptState, names: list[str], axis: Axis, now: float) -> Iterator[Bar]:
    """Yield one bar, plus one for each change in place."""
    end = now if attempt.ended_at is None else attempt.ended_at
    begun = end if attempt.started_at is None else attempt.started_at
    starts = [begun, *(before.until for before in attempt.earlier)]
    ended = outcome_text(attempt)
    for index, (held, start, until) in enumerate(
        zip(held_by(attempt), starts, [*starts[1:], end], strict=True)
    ):
        is_last = index == len(attempt.earlier)
        yield Bar(
            number=attempt.number,
            waits_x=axis.x(start if index else attempt.intended_at),
            x=axis.x(start),
            end_x=axis.x(until),
            lane=names.index(held.name) if held.name in names else len(names) - 1,
            kind=kind_of(ended) if is_last else "moved",
            text=f"attempt {attempt.number} on {held.name}: "
            f"{ended or attempt.phase if is_last else 'changed in place'}",
        )


def kind_of(ended: str) -> str:
    """Return the class of an end, which sets its color; ``live`` for none."""
    recovery = outcome_of("drained" if ended == "moved" else ended).recovery
    return {"none": "good", "as-requested": "moved"}.get(recovery, "bad") if ended else "live"


def curve(rates: Iterable[Rate], axis: Axis) -> Curve | None:
    """Return a line for each attempt; None if nothing was measured."""
    known = list(rates)
    most = max((rate.per_s for rate in known), default=0.0)
    if most <= 0:
        return None
    top = _round_up(most)
    lines = []
    for _, group in groupby(known, key=lambda rate: rate.attempt):
        points = [(axis.x(rate.at), round(TOP + HEIGHT * (1 - rate.per_s / top), 1)) for rate in group]
        if len(points) == 1:  # a line of one point would not be visible
            points.append((points[0][0] + 3, points[0][1]))
        lines.append(" ".join(f"{x:g},{y:g}" for x, y in points))
    ticks = tuple((TOP + HEIGHT * (1 - part), f"{top * part:.4g}") for part in (0.0, 0.5, 1.0))
    return Curve(tuple(lines), ticks)


def _round_up(value: float) -> float:
    """Round up to the next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _STEPS if step * power >= value)
