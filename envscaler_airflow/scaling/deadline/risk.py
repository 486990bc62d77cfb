"""How likely spot is to go, and to come back: by age of the state, and by what the zone did so far.

A zone is in one of a few regimes. Each multiplies the fitted rates of loss and of return by
factors of its own, and is left now and then for one drawn anew. Which regime holds is never
seen; :class:`Risk` carries what its ticks let us believe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.planning.record import Record
from envscaler_airflow.scaling.deadline import fitted
from envscaler_airflow.scaling.deadline.ages import age_bin


@dataclass(frozen=True, slots=True)
class Hazard(Record):
    """Rates at which a state of availability ends, and the regimes that multiply them.

    Attributes:
        up: Losses an hour, by bin of age.
        down: Returns an hour, by bin of age.
        up_factors, down_factors: Of each regime.
        regimes: How often a regime is drawn; sums to 1.
        regime_h: Mean hours until one is drawn anew.
    """

    up: tuple[float, ...] = fitted.UP_PER_HOUR
    down: tuple[float, ...] = fitted.DOWN_PER_HOUR
    up_factors: tuple[float, ...] = fitted.UP_FACTORS
    down_factors: tuple[float, ...] = fitted.DOWN_FACTORS
    regimes: tuple[float, ...] = fitted.REGIMES
    regime_h: float = fitted.REGIME_H

    def chances(self, *, is_up: bool, bin_: int, gap_s: float) -> tuple[float, ...]:
        """Probability that the state ends within a tick, by regime."""
        rate = (self.up if is_up else self.down)[bin_] * gap_s / 3600
        return tuple(-math.expm1(-rate * f) for f in (self.up_factors if is_up else self.down_factors))

    def redrawn(self, gap_s: float) -> float:
        """Probability that the regime is drawn anew within a tick."""
        return -math.expm1(-gap_s / 3600 / self.regime_h)


@dataclass(slots=True)
class Risk:
    """What one zone was seen to do.

    Attributes:
        hazard: The model.
        gap_s: Seconds between two looks.
        is_up: Now; None before the first look.
        age_h: Since the state began, as far as it was seen.
        belief: Probability of each regime.
        unseen_h: Since the last look.
    """

    hazard: Hazard
    gap_s: float
    is_up: bool | None = None
    age_h: float = 0.0
    belief: list[float] = field(default_factory=list)
    unseen_h: float = 0.0
    _chances: dict[tuple[bool, int], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Believe what was fitted."""
        self.belief = list(self.hazard.regimes)

    def observe(self, *, is_up: bool) -> None:
        """One more tick."""
        gap_h, self.unseen_h = self.gap_s / 3600, 0.0
        if self.is_up is None:
            self.is_up, self.age_h = is_up, gap_h
            return
        ends = self.ends()
        changed = is_up != self.is_up
        seen = ends if changed else [1 - chance for chance in ends]
        weighed = [share * chance for share, chance in zip(self.belief, seen, strict=True)]
        total = sum(weighed) or 1.0
        fresh = self.hazard.redrawn(self.gap_s)
        self.belief = [
            (1 - fresh) * share / total + fresh * drawn
            for share, drawn in zip(weighed, self.hazard.regimes, strict=True)
        ]
        self.age_h = gap_h if changed else self.age_h + gap_h
        self.is_up = is_up

    def skip(self) -> None:
        """One more tick in which nobody looked."""
        self.unseen_h += self.gap_s / 3600

    def up_chance(self) -> float:
        """Probability that the zone is up now: as last seen, and fading with the time since.

        A chain of two states with the believed rates at an age of an hour; without a look, its stationary
        share.
        """
        rates = [
            sum(share * rate for share, rate in zip(self.belief, self._rates(is_up=is_up), strict=True))
            for is_up in (True, False)
        ]
        stays = rates[1] / sum(rates) if sum(rates) > 0 else 0.5
        if self.is_up is None:
            return stays
        return stays + (float(self.is_up) - stays) * math.exp(-sum(rates) * self.unseen_h)

    def _rates(self, *, is_up: bool) -> list[float]:
        hazard, bin_ = self.hazard, age_bin(1.0)
        rate = (hazard.up if is_up else hazard.down)[bin_]
        return [rate * factor for factor in (hazard.up_factors if is_up else hazard.down_factors)]

    def learn(self, ticks: Iterable[int]) -> None:
        """Ticks of the past, oldest first; below 0 is unknown and skipped."""
        for tick in ticks:
            if tick >= 0:
                self.observe(is_up=tick > 0)

    def ends(self) -> Sequence[float]:
        """Probability that the state ends within the next tick, by regime."""
        key = (bool(self.is_up), age_bin(self.age_h))
        if key not in self._chances:
            self._chances[key] = self.hazard.chances(is_up=key[0], bin_=key[1], gap_s=self.gap_s)
        return self._chances[key]

    def chance(self) -> float:
        """Probability that the state ends within the next tick."""
        return sum(share * end for share, end in zip(self.belief, self.ends(), strict=True))
