"""The exact offline optimum of the spot model, by dynamic programming: what regret is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.deadline.facts import SpotJob

if TYPE_CHECKING:
    import numpy as np

    _Row = np.ndarray[Any, np.dtype[Any]]


def spot_optimum(
    job: SpotJob, zones: Mapping[str, Sequence[int]], prices: Mapping[str, Sequence[float]] | None = None
) -> float:
    """Least cost in USD of finishing by the deadline, knowing the whole trace.

    Backward over ticks; the state is the market with what its launch still owes, and the time
    that may still be lost, in the greatest unit that divides tick and overhead (whole seconds), so nothing
    is rounded.
    """
    import numpy as np  # noqa: PLC0415  # an extra

    gap, overhead, work = round(job.gap_s), round(job.overhead_s), round(job.work_s)
    unit = math.gcd(math.gcd(gap, overhead), work) or gap
    gap, overhead, work = gap // unit, overhead // unit, work // unit
    pays = _pays(gap, overhead)
    lost = np.arange(job.ticks * gap - work + 1)
    on_demand = job.on_demand_usd * job.gap_s / SECONDS_PER_HOUR
    zero = np.zeros(len(lost))
    after: dict[str | None, list[_Row]] = {
        None: [zero],
        **{name: [zero] * len(pays) for name in ("", *zones)},
    }
    for tick in range(job.ticks - 1, -1, -1):
        is_done = lost >= (job.ticks - tick) * gap
        costs = {"": on_demand}
        for name, row in zones.items():
            if tick < len(row) and row[tick] > 0:
                usd = prices[name][tick] if prices and name in prices else job.spot_usd
                costs[name] = usd * job.gap_s / SECONDS_PER_HOUR
        after = _before(after, costs, pays, gap, is_done)
    return float(after[None][0][-1])


def _pays(gap: int, overhead: int) -> list[int]:
    """Overhead paid in a tick, by state: the first is a paid-off launch, the last one a new launch."""
    rest = [min(gap, overhead - start) for start in range(0, overhead, gap)] or [0]
    return [0, *reversed(rest)]


def _before(
    after: dict[str | None, list[_Row]], costs: Mapping[str, float], pays: list[int], gap: int, is_done: _Row
) -> dict[str | None, list[_Row]]:
    import numpy as np  # noqa: PLC0415  # an extra

    def less(row: _Row, pay: int) -> _Row:
        return np.concatenate((np.full(min(pay, len(row)), np.inf), row[: max(0, len(row) - pay)]))

    def clean(row: _Row) -> _Row:
        return np.where(is_done, 0.0, row)

    running = {
        name: [cost + less(after[name][max(0, i - 1)], pay) for i, pay in enumerate(pays)]
        for name, cost in costs.items()
    }
    fresh = np.minimum.reduce([less(after[None][0], gap), *(rows[-1] for rows in running.values())])
    before: dict[str | None, list[_Row]] = {None: [clean(fresh)]}
    for name in after:
        if name is None:
            continue
        rows = running.get(name)
        before[name] = [
            clean(fresh if rows is None else np.minimum(fresh, rows[i])) for i in range(len(pays))
        ]
    return before
