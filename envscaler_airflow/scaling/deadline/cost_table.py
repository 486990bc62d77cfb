"""Expected cost of every answer, built once at submit and read at every check without numpy.

An undiscounted Markov decision process, solved backward. Its state has the ticks left, the seconds that may
still be lost (slack), the market with the remaining overhead of its launch, the age and kind of availability,
and the regime of the zone. The table knows the regime, but a check has only a belief (QMDP: Littman,
Cassandra and Kaelbling, ICML 1995).
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from operator import mul
from typing import TYPE_CHECKING, Any

from envscaler_airflow.scaling.deadline.risk import AGE_EDGES_H, BINS, Hazard
from envscaler_airflow.scaling.deadline.spot_job import SpotJob

if TYPE_CHECKING:
    import numpy as np

    _Array = np.ndarray[Any, np.dtype[Any]]

UP_IDLE, UP_ON_DEMAND, DOWN_IDLE, DOWN_ON_DEMAND = range(4)
"""Situations: spot is up or not, and either nothing runs (also after a loss) or on-demand does."""
SPOT, BUY, WAIT = range(3)
"""Answers: launch spot, run on-demand, run nothing."""
FASTER = 1.0
"""Factor on the fitted rates of losses and returns in the tables. Made by ``benchmarks/policies/tune.py``."""
_ROW = BINS * 4 * 3
MAX_UNPACKED = 1 << 28
"""Maximum bytes that a table unpacks to. Chosen: ten times that of the longest deadline."""
_AGAIN = 4
"""Age bin of another zone when it is launched after a loss. Chosen: an hour."""


@dataclass(frozen=True, slots=True)
class Table:
    """Expected cost to finish, in ticks of on-demand.

    Attributes:
        ticks: Knots of ticks left, rising.
        slack_s: Knots of slack, rising from 0.
        regimes: Number of regimes.
        costs: ``[ticks][slack][bin][situation][answer][regime]``, flat.
    """

    ticks: tuple[int, ...]
    slack_s: tuple[float, ...]
    regimes: int
    costs: array[float]

    def look_up(
        self, ticks_left: float, slack: float, bin_: int, situation: int, belief: Sequence[float]
    ) -> tuple[float, float, float]:
        """Expected costs of spot, on-demand and none; linear between knots."""
        i, by_tick = _between(self.ticks, ticks_left)
        j, by_slack = _between(self.slack_s, slack)
        size, costs = self.regimes, self.costs
        found = [0.0, 0.0, 0.0]
        for tick, tick_weight in ((i, 1 - by_tick), (i + 1, by_tick)):
            for row, row_weight in ((j, 1 - by_slack), (j + 1, by_slack)):
                weight = tick_weight * row_weight
                if weight == 0:
                    continue
                at = ((tick * len(self.slack_s) + row) * _ROW + (bin_ * 4 + situation) * 3) * size
                for answer in range(3):
                    part = costs[at + answer * size : at + answer * size + size]
                    found[answer] += weight * sum(map(mul, part, belief))
        return found[0], found[1], found[2]

    def to_bytes(self) -> bytes:
        """Packed and compressed bytes for the store."""
        head = struct.pack("<III", len(self.ticks), len(self.slack_s), self.regimes)
        knots = struct.pack(f"<{len(self.ticks)}I{len(self.slack_s)}d", *self.ticks, *self.slack_s)
        return zlib.compress(head + knots + self.costs.tobytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Table:
        """What :meth:`to_bytes` wrote.

        Raises:
            ValueError: The bytes are torn, of another version, or more than any of our tables has.
        """
        try:
            body = _unpacked(data)
            count, rows, regimes = struct.unpack_from("<III", body)
            knots = struct.unpack_from(f"<{count}I{rows}d", body, 12)
            costs = array("f")
            costs.frombytes(body[12 + 4 * count + 8 * rows :])
        except (zlib.error, struct.error, ValueError) as err:
            raise ValueError(f"the table of a deadline cannot be read: {err}") from err
        if len(costs) != count * rows * regimes * _ROW:
            raise ValueError(
                f"the table of a deadline has {len(costs)} costs, not {count * rows * regimes * _ROW}"
            )
        ticks, slacks = knots[:count], knots[count:]
        if not regimes or not all(map(_is_rising, (ticks, slacks))) or not all(map(isfinite, costs)):
            raise ValueError(
                "the table of a deadline has no regime, unsorted knots or a cost that is not finite"
            )
        return cls(ticks, slacks, regimes, costs)


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    body = unpacker.decompress(data, MAX_UNPACKED)
    if not unpacker.eof:
        raise ValueError(f"it is torn, or has more than {MAX_UNPACKED} bytes")
    return body


def _is_rising(knots: Sequence[float]) -> bool:
    """True for two or more values, each larger than the one before; never with NaN."""
    return len(knots) > 1 and all(one < other for one, other in pairwise(knots)) and isfinite(knots[-1])


def _between(knots: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the knot below and the weight of the one above; clamped at both ends."""
    i = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return i, min(1.0, max(0.0, (value - knots[i]) / (knots[i + 1] - knots[i])))


def slack_knots(job: SpotJob, *, fine_s: float = 120.0) -> tuple[float, ...]:
    """Slack from 0 to the maximum: fine where the last tick matters, then growing by 4 % (chosen)."""
    last = max(job.ticks * job.gap_s - job.work_s - job.overhead_s, job.gap_s)
    knots, step = [0.0], fine_s
    while knots[-1] < last:
        knots.append(knots[-1] + step)
        if knots[-1] > 2 * 3600:
            step = max(step, min(0.04 * knots[-1], 3600.0))
    return tuple(knots)


@dataclass(frozen=True, slots=True)
class Others:
    """Additional zones for failover, as the table sees them.

    Attributes:
        zones: Number of zones in total.
        up: Probability that another one is up when the running one is lost.
    """

    zones: int = 1
    up: float = 0.0


def build_table(
    job: SpotJob, hazard: Hazard | None = None, *, others: Others = Others(), every: int = 4
) -> Table:
    """Solve the decision process of *job* with numpy; takes a fraction of a second to a few seconds.

    Args:
        job: Its geometry and prices.
        hazard: Rates by age; None: the fitted ones.
        others: Zones for failover.
        every: Store every n-th tick; a check interpolates between them.
    """
    solver = _Solver(job, hazard or Hazard(), others)
    kept: list[tuple[int, bytes]] = []
    for left in range(1, job.ticks + 1):
        costs = solver.step(left)
        if left % every == 0 or left in (1, job.ticks):
            kept.append((left, costs.tobytes()))
    costs_kept = array("f")
    for _, row in kept:
        costs_kept.frombytes(row)
    return Table(tuple(left for left, _ in kept), solver.knots, len(solver.drawn), costs_kept)


class _Solver:
    """Solves from the deadline backward, one tick at a time."""

    def __init__(self, job: SpotJob, hazard: Hazard, others: Others) -> None:
        import numpy as np  # noqa: PLC0415  # checks do without

        self.np = np
        self.job = job
        self.knots = slack_knots(job)
        self.slack = np.array(self.knots, dtype=np.float64)
        overhead, gap = job.overhead_s, job.gap_s
        rest = [min(gap, overhead - start) for start in np.arange(0.0, overhead, gap)] or [0.0]
        self.pays = [0.0, *reversed(rest)]
        self.price = job.spot_usd / job.on_demand_usd
        self.drawn = np.array(hazard.regimes, dtype=np.float32)
        self.fresh = np.float32(hazard.redrawn(gap))
        self.lose, self.gain = (
            np.array(
                [hazard.chances(is_up=is_up, bin_=b, gap_s=gap * FASTER) for b in range(BINS)],
                dtype=np.float32,
            ).T
            for is_up in (True, False)
        )
        self.others = np.float32(others.up)
        self.gain = 1 - (1 - self.gain) ** others.zones
        widths_s = [3600 * (high - low) for low, high in pairwise(AGE_EDGES_H)]
        self.older = np.array([min(1.0, gap / width) for width in widths_s] + [0.0], dtype=np.float32)
        shape = (len(self.knots), len(self.drawn), 2 * BINS)
        self.idle = np.zeros(shape, dtype=np.float32)
        self.bought = np.zeros(shape, dtype=np.float32)
        self.spot = [np.zeros(shape, dtype=np.float32) for _ in self.pays[:-1]]
        self.shifts = {pay: self._shift(pay) for pay in {*self.pays, gap, overhead, 0.0}}

    def _shift(self, pay: float) -> tuple[Any, Any, Any]:
        np = self.np
        wanted = self.slack - pay
        at = np.clip(np.searchsorted(self.slack, wanted + 1e-6, side="right") - 1, 0, len(self.slack) - 2)
        weight = (wanted - self.slack[at]) / (self.slack[at + 1] - self.slack[at])
        return (
            at,
            np.clip(weight, 0, 1).astype(np.float32)[:, None, None],
            (wanted < -1e-6)[:, None, None],
        )

    def _less(self, costs: _Array, pay: float) -> _Array:
        """Costs with *pay* seconds less of slack; infinite where the guard forbids it."""
        if pay == 0:
            return costs
        at, weight, is_forbidden = self.shifts[pay]
        moved = costs[at] * (1 - weight) + costs[at + 1] * weight
        allowed: _Array = self.np.where(is_forbidden, self.np.float32(1e9), moved)
        return allowed

    def _expected(self, costs: _Array, *, is_spot: bool = False) -> _Array:
        """Expected cost over the next tick's availability; if other zones are up, a loss is a new launch."""
        up, down = costs[..., :BINS], costs[..., BINS:]
        out = self.np.empty_like(costs)
        again = self.idle[..., _AGAIN : _AGAIN + 1]
        lost = down[..., :1] + self.others * (again - down[..., :1]) if is_spot else down[..., :1]
        lose = self.lose if is_spot else self.lose * (1 - self.others)
        for part, other, ends, at in ((up, lost, lose, 0), (down, up, self.gain, BINS)):
            older = self.np.concatenate((part[..., 1:], part[..., -1:]), axis=-1)
            stays = part + self.older * (older - part)
            out[..., at : at + BINS] = stays + ends * (other[..., :1] - stays)
        mixed = self.np.einsum("skb,k->sb", out, self.drawn)[:, None, :]
        expected: _Array = out + self.fresh * (mixed - out)
        return expected

    def step(self, left: int) -> _Array:
        """Costs of the answers with *left* ticks to go: ``[slack][bin][situation][answer][regime]``."""
        np = self.np
        gap, overhead = self.job.gap_s, self.job.overhead_s
        idle, bought = self._expected(self.idle), self._expected(self.bought)
        spot = [self._expected(rows, is_spot=True) for rows in self.spot]
        wait = self._less(idle, gap)
        work = left * gap - self.slack - overhead
        alone = np.ceil(np.maximum(work + overhead, 0) / gap - 1e-6).astype(np.float32)[:, None, None]
        is_last = (self.slack - overhead < -1e-6)[:, None, None]
        buy = np.where(is_last, alone, 1 + self._less(bought, overhead))
        keep = 1 + bought
        launch = self.price + self._less(spot[-1], self.pays[-1])
        answers = np.full((len(self.slack), len(self.drawn), BINS, 4, 3), np.float32(1e9))
        for at, first, wait_at in ((UP_IDLE, launch, 0), (UP_ON_DEMAND, launch, 0)):
            answers[..., at, SPOT] = first[..., :BINS]
            answers[..., at, BUY] = (buy if at == UP_IDLE else keep)[..., :BINS]
            answers[..., at, WAIT] = wait[..., wait_at : wait_at + BINS]
        for at, second in ((DOWN_IDLE, buy), (DOWN_ON_DEMAND, keep)):
            answers[..., at, BUY] = second[..., BINS:]
            answers[..., at, WAIT] = wait[..., BINS:]
        best = answers.min(axis=-1)
        is_done = (work <= 1e-6)[:, None, None]
        self.idle = self._done(is_done, best[..., UP_IDLE], best[..., DOWN_IDLE])
        self.bought = self._done(is_done, best[..., UP_ON_DEMAND], best[..., DOWN_ON_DEMAND])
        self.spot = [
            self._done(
                is_done,
                np.minimum((self.price + self._less(spot[max(0, i - 1)], pay))[..., :BINS], buy[..., :BINS]),
                best[..., DOWN_IDLE],
            )
            for i, pay in enumerate(self.pays[:-1])
        ]
        costs: _Array = np.ascontiguousarray(np.transpose(answers, (0, 2, 3, 4, 1)))
        return costs

    def _done(self, is_done: _Array, up: _Array, down: _Array) -> _Array:
        both = self.np.concatenate((up, down), axis=-1)
        costs: _Array = self.np.where(is_done, self.np.float32(0), both)
        return costs
