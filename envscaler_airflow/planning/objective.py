"""The one formula: expected cost + value_of_hour x expected time, over the work left."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from envscaler_airflow.planning.billing import Charges
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.planning.performance import Z_80, Speed
from envscaler_airflow.planning.record import NotNegative, Positive, Record, check_finite

SECONDS_PER_HOUR = 3600.0

Strategy = Literal["cost", "balanced", "performance", "deadline"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

PERFORMANCE_FACTOR = 100.0
"""``performance`` values time at this multiple of the balanced rate. Chosen: time decides unless equal."""

_LEAST_RATE = 1e-9
"""Rates of losses per hour below this count as 0. Chosen: one loss in a hundred thousand years."""

_LARGEST_EXPONENT = 50.0
"""Above this exponent an attempt without a checkpoint never finishes. Chosen: e^50 restarts never end."""


@dataclass(frozen=True, slots=True)
class Overheads(Record):
    """Billed seconds without training.

    Attributes:
        start_s: From the end of training on one allocation (or from nothing) to the first step on the next:
            save, stop, wait, provision, set up, restore.
        start_stdev_s: Standard deviation of *start_s*; 0 for a guess without one.
        checkpoint_s: Seconds that training pauses for one checkpoint.
        checkpoint_every_s: Seconds of training between two checkpoints; None: there are none.
    """

    start_s: NotNegative[float] = 0.0
    start_stdev_s: NotNegative[float] = 0.0
    checkpoint_s: NotNegative[float] = 0.0
    checkpoint_every_s: Positive[float] | None = None


@dataclass(frozen=True, slots=True)
class Estimate(Record):
    """Time and cost to finish the remaining work on one allocation.

    Attributes:
        hours, hours_low, hours_high: Expected, 10th and 90th percentile.
        start_s, train_s, checkpoint_s, interruption_s: Parts of the expected time; the last is restarts and
            lost work together.
        usd, usd_low, usd_high: Cost, with the same percentiles; None when the price is unknown.
        objective: ``usd + value_of_hour * hours``; None when the price is unknown.
        data_usd: Part of *usd*: copying the data to the machines; None: some of it is unknown, and *usd*
            includes only the known part.
        disk_usd: Part of *usd*: the disks that the stage requests; None: unknown, and not included in *usd*.
    """

    hours: float
    hours_low: float
    hours_high: float
    start_s: float
    train_s: float
    checkpoint_s: float
    interruption_s: float
    usd: float | None = None
    usd_low: float | None = None
    usd_high: float | None = None
    objective: float | None = None
    data_usd: float | None = 0.0
    disk_usd: float | None = 0.0


def estimate(
    units: float,
    speed: Speed,
    *,
    usd_per_hour: float | None,
    value_of_hour: float = 0.0,
    overheads: Overheads | None = None,
    interruptions_per_hour: float = 0.0,
    is_start: bool = True,
    charges: Charges | None = None,
) -> Estimate:
    """Expected time and cost of *units* of work at *speed*.

    Args:
        units: Work left, >= 0.
        speed: Speed on the allocation.
        usd_per_hour: Price of all its nodes; None is unknown. Start-up is billed too.
        value_of_hour: USD that an hour of waiting is worth, >= 0.
        overheads: Seconds without training; None: zero.
        interruptions_per_hour: Losses of the allocation per hour (Poisson), >= 0.
        charges: Charges besides the price; None: zero.
        is_start: False for continuing on the current allocation: no start-up, but interruptions restart.

    Raises:
        ValueError: An argument is negative or not finite.

    Source:
        J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
        dumps, FGCS 22 (2006), equation 20: ``T = M e^(R/M) (e^((tau+delta)/M) - 1) W / tau``.
    """
    check_finite(units=units, usd_per_hour=usd_per_hour)
    check_finite(value_of_hour=value_of_hour, interruptions_per_hour=interruptions_per_hour)
    extra, also = overheads or Overheads(), charges or Charges()
    start_s = extra.start_s if is_start else 0.0
    train_s = speed.seconds_for(units)
    checkpoints_s = _checkpoint_seconds(train_s, extra)
    billed = _billed_hours(units, speed, extra, interruptions_per_hour, is_start=is_start)
    money: list[float | None] = [None] * 3
    if usd_per_hour is not None:
        money = [also.usd(hours * SECONDS_PER_HOUR, usd_per_hour) for hours in billed]
    (hours, low, high), (usd, usd_low, usd_high) = billed, money
    return Estimate(
        hours=hours,
        hours_low=low,
        hours_high=high,
        start_s=start_s,
        train_s=train_s,
        checkpoint_s=checkpoints_s,
        interruption_s=max(0.0, hours * SECONDS_PER_HOUR - start_s - train_s - checkpoints_s),
        usd=usd,
        usd_low=usd_low,
        usd_high=usd_high,
        objective=None if usd is None else usd + value_of_hour * hours,
        data_usd=also.once_usd,
        disk_usd=also.disk_usd(hours * SECONDS_PER_HOUR),
    )


def _billed_hours(
    units: float, speed: Speed, overheads: Overheads, per_hour: float, *, is_start: bool
) -> tuple[float, float, float]:
    """Expected hours, and their 10th and 90th percentile."""
    start_s = overheads.start_s if is_start else 0.0
    spread_s = Z_80 * overheads.start_stdev_s if is_start else 0.0
    low_s, high_s = speed.seconds_range(units)

    def hours_of(start: float, train: float) -> float:
        return (start + _seconds_with_interruptions(train, overheads, per_hour)) / SECONDS_PER_HOUR

    hours = hours_of(start_s, speed.seconds_for(units))
    low = hours_of(max(0.0, start_s - spread_s), low_s)
    return hours, min(hours, low), max(hours, hours_of(start_s + spread_s, high_s))


def _checkpoint_seconds(train_s: float, overheads: Overheads) -> float:
    every = overheads.checkpoint_every_s
    return 0.0 if every is None else overheads.checkpoint_s * train_s / every


def _seconds_with_interruptions(train_s: float, overheads: Overheads, per_hour: float) -> float:
    if per_hour < _LEAST_RATE or train_s == 0:
        return train_s + _checkpoint_seconds(train_s, overheads)
    every = overheads.checkpoint_every_s
    segment_s = train_s if every is None else min(every, train_s)
    saving_s = _checkpoint_seconds(segment_s, overheads)
    between_s = SECONDS_PER_HOUR / per_hour
    restart = math.exp(min(overheads.start_s / between_s, _LARGEST_EXPONENT))
    segment = math.expm1(min((segment_s + saving_s) / between_s, _LARGEST_EXPONENT))
    return between_s * restart * segment * train_s / segment_s


def value_of_hour(
    strategy: str, allocations: Iterable[Allocation] = (), *, stated_usd: float | None = None
) -> float | None:
    """USD that an hour of waiting is worth under *strategy*.

    ``cost`` and ``deadline``: 0 (``deadline`` makes time a constraint instead). ``balanced``: the on-demand
    $/h of the cheapest feasible allocation. ``performance``: 100 times that. *stated_usd* (the user's
    ``value_of_hour``) takes precedence over all of these. None: no on-demand price is known.

    Raises:
        ValueError: Another strategy, or a stated value that is negative or not finite.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if stated_usd is not None:
        check_finite(value_of_hour=stated_usd)
        return stated_usd
    if strategy in ("cost", "deadline"):
        return 0.0
    prices = [
        price
        for item in allocations
        if item.offer.capacity_type == "on-demand" and (price := item.usd_per_hour) is not None
    ]
    if not prices:
        return None
    return min(prices) * (PERFORMANCE_FACTOR if strategy == "performance" else 1.0)
