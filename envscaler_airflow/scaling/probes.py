"""Whether a place is worth a move, where its speed may not be known: the value of trying against its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SETTLE = 2
"""Samples of a new place before the next move. Chosen: two, so that one odd step moves nothing."""
SHORT_RESTARTS = 100.0
"""A job with less time left than this many restarts is short: one sample is enough, and type and count may
change at once. Chosen."""
PROBE_S = 120.0
"""Seconds until a new place is measured. Chosen: as many looks of a sensor as a move needs, twice."""
KNOWN, NEW = 0.03, 0.07
"""Fraction of the objective of staying that a move must save, to a known place and to a new one, unless the
author states a tolerance. The expected objective of a new place already includes the risk that it
disappoints. Chosen."""
BAR_GROWS, BAR_POWER = 0.7, 1.5
"""After n disappointments a probe must save ``1 + grows * n ** power`` times as much as the first. Chosen."""
AGAIN_POWER = 2.0
"""A place that disappointed n times must save ``(1 + n) ** power`` times the tolerance. Chosen: no
oscillation."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere that the stage may run.

    Attributes:
        name: Of the allocation.
        objective: Cost + value of the time to finish there, from the first step, at the median of its speed.
        stdev: Standard deviation of the logarithm of its speed.
        per_s: Cost + value of a second there.
        is_known: Its speed was measured.
    """

    name: str
    objective: float
    stdev: float
    per_s: float
    is_known: bool


def expected_objectives(places: Sequence[Place], staying: Place, *, restart_s: float) -> Mapping[str, float]:
    """Expected objective of moving to each of *places*, by name, the restart inside.

    A move to an unmeasured place is worth ``E[min(its objective, the best known one after the way back)]``
    plus its restart: the value of the information against its cost.
    """
    back = min(place.objective + place.per_s * restart_s for place in (staying, *places) if place.is_known)
    return {
        place.name: _expected_min(place.objective, place.stdev, back + place.per_s * PROBE_S)
        + place.per_s * restart_s
        for place in places
    }


def must_save(
    place: Place, disappointed: Mapping[str, float], tolerances: tuple[float, float] = (KNOWN, NEW)
) -> float:
    """Fraction of the objective of staying that a move to *place* must save."""
    known, new = tolerances
    if place.is_known:
        return known * math.pow(1 + disappointed.get(place.name, 0.0), AGAIN_POWER)
    return new * (1 + BAR_GROWS * math.pow(sum(disappointed.values()), BAR_POWER))


def _expected_min(median: float, stdev: float, bound: float) -> float:
    """``E[min(X, bound)]`` of a log-normal X."""
    if stdev < 1e-6 or median <= 0 or bound <= 0:
        return min(median, bound)
    z = (math.log(bound) - math.log(median)) / stdev
    below = median * math.exp(stdev**2 / 2) * _phi(z - stdev)
    return below + bound * (1 - _phi(z))


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
