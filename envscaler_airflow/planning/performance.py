"""How fast a stage runs on an allocation, and how certain that is.

A speed is in units per second. The caller chooses the unit (steps, samples, tokens), which is the same
throughout one decision.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from envscaler_airflow.planning.record import NotNegative, Positive, Record

SpeedSource = Literal["measured", "learned", "stated", "fitted", "datasheet", "user", "bound"]
"""``learned``: by earlier runs of the stage; ``bound``: not a trusted speed, but a lower limit."""

_CAPACITY = re.compile(r"/(?:spot|on-demand)(?= \+ |\Z)")
"""The capacity type in an allocation's name, see ``Offer.name`` and ``Allocation.name``."""
Z_80 = 1.2816
"""Half-width of an 80 % range, in standard deviations. Source: standard normal table."""


@dataclass(frozen=True, slots=True)
class Speed(Record):
    """Speed on one allocation, assumed to be log-normal.

    Attributes:
        mean: Units per second, > 0.
        stdev: Uncertainty of the mean as a standard deviation, >= 0; not the variation between steps.
        source: Where it is from.
        seconds: Training seconds over which it was measured; 0 when it was not measured.
    """

    mean: Positive[float]
    stdev: NotNegative[float]
    source: SpeedSource = "measured"
    seconds: NotNegative[float] = 0.0

    @property
    def relative_stdev(self) -> float:
        """``stdev / mean``."""
        return self.stdev / self.mean

    def seconds_for(self, units: float) -> float:
        """Expected seconds for *units*: ``units / mean * (1 + (stdev / mean)^2)``.

        The second factor is exact for a log-normal speed: an uncertain speed costs time.
        """
        return units / self.mean * (1 + self.relative_stdev**2)

    def seconds_range(self, units: float) -> tuple[float, float]:
        """10th and 90th percentile of the seconds for *units* (log-normal)."""
        variance = math.log1p(self.relative_stdev**2)
        median = units / self.mean * math.exp(variance / 2)
        spread = math.exp(Z_80 * math.sqrt(variance))
        return median / spread, median * spread


@dataclass(frozen=True, slots=True)
class Speedup(Record):
    """A stated ratio: *offer* runs at *mean* times the speed of *relative_to*.

    Attributes:
        offer, relative_to: Allocation names, in the form of ``Allocation.name``.
        mean: Ratio, > 0.
        stdev: The author's uncertainty, >= 0.
        source: Who states it.
    """

    offer: str
    relative_to: str
    mean: Positive[float]
    stdev: NotNegative[float]
    source: str = ""

    def applied_to(self, base: Speed) -> Speed:
        """Speed of *offer*, computed from that of *relative_to*. Relative variances add up."""
        return self._scaled(base, self.mean)

    def inverted_on(self, base: Speed) -> Speed:
        """Speed of *relative_to*, computed from that of *offer*."""
        return self._scaled(base, 1 / self.mean)

    def _scaled(self, base: Speed, ratio: float) -> Speed:
        mean = base.mean * ratio
        return Speed(mean, mean * math.hypot(base.relative_stdev, self.stdev / self.mean), "stated")


def matched(stated: Iterable[Speedup], names: Iterable[str]) -> tuple[tuple[Speedup, ...], tuple[str, ...]]:
    """Ratios between the allocations *names*, and the names in *stated* that match none of them.

    A name without its capacity type (``kubernetes/big``) means both the spot and the on-demand offer, because
    the price of a machine does not change its speed.
    """
    ways: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        ways.setdefault(name, []).append(name)
        if (bare := _CAPACITY.sub("", name)) != name:
            ways.setdefault(bare, []).append(name)
    ratios = tuple(stated)
    used = Counter(name for item in ratios for name in (item.offer, item.relative_to))
    found = tuple(
        replace(item, offer=offer, relative_to=base)
        for item in ratios
        for offer in ways.get(item.offer, [item.offer])
        for base in ways.get(item.relative_to, [item.relative_to])
    )
    # A name in several ratios may be a step on the way from one allocation to another.
    return found, tuple(name for name, times in used.items() if times == 1 and name not in ways)


def known_speeds(
    measured: Mapping[str, Speed], stated: Iterable[Speedup] = (), *, trusted_after_s: float = 0.0
) -> dict[str, Speed]:
    """All speeds that can be derived, by allocation name.

    A speed that was measured for at least *trusted_after_s* is used unchanged and replaces a stated one. From
    these speeds, stated ratios are followed in both directions, starting with the most certain. Ratios alone
    give no speed.
    """
    known = {
        name: speed
        for name, speed in sorted(measured.items())
        if speed.source != "measured" or speed.seconds >= trusted_after_s
    }
    ratios = sorted(stated, key=lambda item: (item.offer, item.relative_to, item.mean, item.stdev))
    while found := _one_step(known, ratios):
        name, speed = min(found, key=lambda pair: (pair[1].relative_stdev, pair[0], pair[1].mean))
        known[name] = speed
    return known


def _one_step(known: Mapping[str, Speed], ratios: Iterable[Speedup]) -> list[tuple[str, Speed]]:
    found = []
    for ratio in ratios:
        if ratio.relative_to in known and ratio.offer not in known:
            found.append((ratio.offer, ratio.applied_to(known[ratio.relative_to])))
        elif ratio.offer in known and ratio.relative_to not in known:
            found.append((ratio.relative_to, ratio.inverted_on(known[ratio.offer])))
    return found


def measure(points: Sequence[tuple[float, float]]) -> Speed | None:
    """Speed from one observer's samples of one attempt: ``(seconds, units done)`` in order.

    All seconds are from one clock, the observer's or the agent's. The mean is units over seconds from the
    first point to the last. Its standard deviation is the standard error over the windows between points,
    weighted by their length. It is at least 1 % (chosen: the precision of a clock and a step count). The
    result is None with fewer than two points or without progress.
    """
    windows = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in pairwise(points)
        if after[0] > before[0] and after[1] >= before[1]
    ]
    seconds = sum(window[0] for window in windows)
    units = sum(window[1] for window in windows)
    if seconds <= 0 or units <= 0:
        return None
    mean = units / seconds
    if len(windows) == 1:
        return Speed(mean, mean * ONE_WINDOW_STDEV, "measured", seconds)
    squares = sum(took * (done / took - mean) ** 2 for took, done in windows) / seconds
    error = math.sqrt(squares / (len(windows) - 1))
    return Speed(mean, max(error, 0.01 * mean), "measured", seconds)


ONE_WINDOW_STDEV = 0.1
"""Relative stdev of a speed from a single window. Chosen: large enough to wait for a second one."""


def merged(earlier: Speed | None, later: Speed | None) -> Speed | None:
    """Combine two measurements of the same allocation, weighted by their seconds.

    A measurement replaces a stated speed. Used when a stage returns to an allocation that it has run on
    before.
    """
    if earlier is None or later is None:
        return later or earlier
    if earlier.source != "measured" or later.source != "measured":
        return later if later.source == "measured" else earlier
    seconds = earlier.seconds + later.seconds
    if seconds <= 0:
        return later
    old, new = earlier.seconds / seconds, later.seconds / seconds
    mean = old * earlier.mean + new * later.mean
    return replace(
        later, mean=mean, stdev=math.hypot(old * earlier.stdev, new * later.stdev), seconds=seconds
    )
