"""Probability of losing spot, and of its return: by age of the state and by the zone's past.

A zone is in one of a few regimes. Each multiplies the fitted rates of loss and of return by its own factors.
From time to time a new regime is drawn. The current regime is never observed; :class:`Risk` has the belief
from the ticks so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.planning.record import NotNegative, Record

AGE_EDGES_H = (0.0, 1.5 / 6, 2.5 / 6, 3.5 / 6, 5.5 / 6, 8.5 / 6, 13.5 / 6, 21.5 / 6, 41.5 / 6)
"""Lower edges of the age bins, hours. Chosen: growing, since losses become rarer with age; when a zone is
first seen for a tick of ten minutes, its age is ten minutes."""
BINS = len(AGE_EDGES_H)


def age_bin(age_h: float) -> int:
    """Index of the bin of an age."""
    return bisect_right(AGE_EDGES_H, age_h) - 1


_HOUR = age_bin(1.0)
"""Age of a state that may have begun unseen. Chosen: an hour."""
STAY_H = 168.0
"""Longest expected stay in hours. Chosen: a week, in which a new regime is likely."""


# Fitted on public traces: benchmarks/policies/fit.py writes these lines.
UP_PER_HOUR = (0.6127, 0.5348, 0.372, 0.3039, 0.2085, 0.1433, 0.0902, 0.0787, 0.0572)
DOWN_PER_HOUR = (0.7707, 0.657, 0.3894, 0.262, 0.2503, 0.1648, 0.1574, 0.1537, 0.1071)
UP_FACTORS = (0.25, 0.25, 0.25, 0.6, 1.4, 1.4, 3.3, 3.3, 3.3)
DOWN_FACTORS = (0.25, 1.4, 3.3, 3.3, 1.4, 3.3, 0.25, 1.4, 3.3)
REGIMES = (0.0195, 0.02452, 0.10074, 0.08055, 0.03868, 0.23132, 0.07643, 0.19434, 0.23393)
REGIME_H = 85.66


@dataclass(frozen=True, slots=True)
class Hazard(Record):
    """Rates at which a state of availability ends, and the regimes that multiply them.

    Attributes:
        up: Losses per hour, by bin of age.
        down: Returns per hour, by bin of age.
        up_factors, down_factors: Of each regime.
        regimes: How often a regime is drawn; sums to 1.
        regime_h: Mean hours until a new regime is drawn.
    """

    up: tuple[float, ...] = UP_PER_HOUR
    down: tuple[float, ...] = DOWN_PER_HOUR
    up_factors: tuple[float, ...] = UP_FACTORS
    down_factors: tuple[float, ...] = DOWN_FACTORS
    regimes: tuple[float, ...] = REGIMES
    regime_h: float = REGIME_H

    def chances(self, *, is_up: bool, bin_: int, gap_s: float) -> tuple[float, ...]:
        """Probability that the state ends within a tick, by regime."""
        rate = (self.up if is_up else self.down)[bin_] * gap_s / 3600
        return tuple(-math.expm1(-rate * f) for f in (self.up_factors if is_up else self.down_factors))

    def rates(self, *, is_up: bool, bin_: int) -> tuple[float, ...]:
        """How often the state ends per hour, by regime."""
        rate = (self.up if is_up else self.down)[bin_]
        return tuple(rate * factor for factor in (self.up_factors if is_up else self.down_factors))

    def redrawn(self, gap_s: float) -> float:
        """Probability that a new regime is drawn within a tick."""
        return -math.expm1(-gap_s / 3600 / self.regime_h)


@dataclass(frozen=True, slots=True)
class Zone(Record):
    """What is known of one zone: a fold of its samples.

    Attributes:
        name: Of the zone, or of its offer.
        usd: Spot $/h there, of all nodes.
        is_up: At the last sample; None before the first.
        age_h: Age of that state at the last sample, as far as it was observed.
        unseen_s: Since the last sample.
        belief: Probability of each regime at the last sample.
    """

    name: str
    usd: NotNegative[float]
    is_up: bool | None = None
    age_h: NotNegative[float] = 0.0
    unseen_s: NotNegative[float] = 0.0
    belief: tuple[float, ...] = REGIMES

    @property
    def bin(self) -> int:
        """Bin of the age of its state, if that has lasted until now."""
        return age_bin(self.age_h + self.unseen_s / 3600)

    def up_chance(self, hazard: Hazard) -> float:
        """Probability that it is up now: as last seen, decaying with the time since.

        A chain of two states with the believed rates at an age of an hour; before the first sample, its
        stationary probability.
        """
        lost, back = (
            sum(
                share * rate
                for share, rate in zip(self.belief, hazard.rates(is_up=is_up, bin_=_HOUR), strict=True)
            )
            for is_up in (True, False)
        )
        stays = back / (lost + back) if lost + back > 0 else 0.5
        if self.is_up is None:
            return stays
        return stays + (float(self.is_up) - stays) * math.exp(-(lost + back) * self.unseen_s / 3600)

    def stays_s(self, hazard: Hazard) -> float:
        """Expected seconds until its state ends, at most those of :data:`STAY_H`."""
        edges, begun = (*AGE_EDGES_H[1:], math.inf), self.age_h + self.unseen_s / 3600
        hours = 0.0
        for at, share in enumerate(self.belief):
            lasts, age, end = share, begun, begun + STAY_H
            for bin_ in range(age_bin(age), BINS):
                rate = hazard.rates(is_up=bool(self.is_up), bin_=bin_)[at]
                long_h = max(0.0, min(edges[bin_], end) - age)
                ends = -math.expm1(-rate * long_h)
                hours += lasts * (ends / rate if rate > 0 else long_h)
                lasts, age = lasts * (1 - ends), age + long_h
        return hours * 3600

    def chance(self, hazard: Hazard, gap_s: float) -> float:
        """Probability that the state ends within *gap_s* seconds."""
        ends = hazard.chances(is_up=bool(self.is_up), bin_=self.bin, gap_s=gap_s)
        return sum(share * end for share, end in zip(self.belief, ends, strict=True))


@dataclass(slots=True)
class Risk:
    """Observations of one zone, at any times.

    Attributes:
        hazard: The model.
        gap_s: Age in seconds of a state that has just been seen to begin: the tick that the rates are fitted
            to. A longer time between two samples may hide that the state ended and began again.
        is_up: At the last sample; None before the first.
        age_h: Since the state began, as far as it was observed.
        belief: Probability of each regime.
        unseen_s: Since the last sample.
    """

    hazard: Hazard
    gap_s: float
    is_up: bool | None = None
    age_h: float = 0.0
    belief: list[float] = field(default_factory=list)
    unseen_s: float = 0.0
    _chances: dict[tuple[bool, int], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with the fitted belief, unless one is given."""
        self.belief = self.belief or list(self.hazard.regimes)

    def observe(self, *, is_up: bool, after_s: float | None = None) -> None:
        """Add a sample, *after_s* seconds (None: one tick) after the one before."""
        gap_s = self.gap_s if after_s is None else after_s
        self.unseen_s = 0.0
        if self.is_up is None:
            self.is_up, self.age_h = is_up, self.gap_s / 3600
            return
        changed = is_up != self.is_up
        ends = self._ends_within(gap_s)
        seen = ends if changed else [1 - chance for chance in ends]
        weighed = [share * chance for share, chance in zip(self.belief, seen, strict=True)]
        total = sum(weighed) or 1.0
        fresh = self.hazard.redrawn(gap_s)
        self.belief = [
            (1 - fresh) * share / total + fresh * drawn
            for share, drawn in zip(weighed, self.hazard.regimes, strict=True)
        ]
        self.age_h = self.gap_s / 3600 if changed else self.age_h + gap_s / 3600
        self.is_up = is_up

    def skip(self, seconds: float | None = None) -> None:
        """Let *seconds* (None: one tick) pass without a sample."""
        self.unseen_s += self.gap_s if seconds is None else seconds

    def zone(self, name: str, usd: float) -> Zone:
        """What a decision needs to know."""
        return Zone(name, usd, self.is_up, self.age_h, self.unseen_s, tuple(self.belief))

    @classmethod
    def of(cls, zone: Zone, hazard: Hazard, gap_s: float) -> Risk:
        """Continue from what was known of *zone*."""
        return cls(hazard, gap_s, zone.is_up, zone.age_h, list(zone.belief), zone.unseen_s)

    def learn(self, ticks: Iterable[int]) -> None:
        """Add past ticks, oldest first; below 0 is unknown and skipped."""
        for tick in ticks:
            if tick >= 0:
                self.observe(is_up=tick > 0)

    def ends(self) -> Sequence[float]:
        """Probability that the state ends within the next tick, by regime."""
        key = (bool(self.is_up), age_bin(self.age_h))
        if key not in self._chances:
            self._chances[key] = self.hazard.chances(is_up=key[0], bin_=key[1], gap_s=self.gap_s)
        return self._chances[key]

    def _ends_within(self, gap_s: float) -> Sequence[float]:
        """Probability that the state is the other one after *gap_s* seconds, by regime.

        Within a tick it ends at most once. Over a longer time it may end and begin again: a chain of two
        states, with the rate of the other one at an age of an hour.
        """
        if gap_s == self.gap_s:
            return self.ends()
        is_up, bin_ = bool(self.is_up), age_bin(self.age_h)
        if gap_s < self.gap_s:
            return self.hazard.chances(is_up=is_up, bin_=bin_, gap_s=gap_s)
        leave, back = (
            self.hazard.rates(is_up=is_up, bin_=bin_),
            self.hazard.rates(is_up=not is_up, bin_=_HOUR),
        )
        return tuple(
            out / (out + home) * -math.expm1(-(out + home) * gap_s / 3600) if out + home > 0 else 0.0
            for out, home in zip(leave, back, strict=True)
        )

    def chance(self) -> float:
        """Probability that the state ends within the next tick."""
        return sum(share * end for share, end in zip(self.belief, self.ends(), strict=True))
