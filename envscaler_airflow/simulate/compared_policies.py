"""The policies that ours are compared with, from their papers, and the optimum of a spot job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    may_ask,
)
from envscaler_airflow.scaling.explore import Learner, Measured, Shape, prior_for
from envscaler_airflow.simulate.elastic import Config, ElasticJob, ElasticView

if TYPE_CHECKING:
    import numpy as np

    _Row = np.ndarray[Any, np.dtype[Any]]


class Stay:
    """Never moves."""

    def begin(self, job: ElasticJob) -> None:
        """Nothing to store."""

    def choose(self, view: ElasticView) -> Config:
        """Return the current configuration."""
        return view.config


class _Ladder:
    """GPU counts of the type that the job runs on, ascending."""

    def begin(self, job: ElasticJob) -> None:
        """Forget the previous job."""
        self._job = job
        self._agree = 0
        self._since_s = 0.0
        self._config: Config | None = None
        self._rates: dict[Config, float] = {}

    def _other(self, config: Config, step: int) -> Config:
        rungs = sorted((c for c in self._job.configs if c.gpu == config.gpu), key=lambda c: c.gpus)
        at = rungs.index(config) + step
        return rungs[min(max(at, 0), len(rungs) - 1)]

    def _is_new(self, view: ElasticView) -> bool:
        if view.config != self._config:
            self._config, self._since_s, self._agree = view.config, view.elapsed_s, 0
        return view.elapsed_s - self._since_s < 300.0


class Hpa(_Ladder):
    """Scale out above 80 % utilization, in below 40 %: three samples in a row, five minutes between moves.

    Utilization is the part of a step that is not synchronization.

    Source: kubernetes.io, Horizontal Pod Autoscaling; thresholds chosen as those of the policy ``threshold``.
    """

    def choose(self, view: ElasticView) -> Config:
        """Decide by utilization only."""
        used = 1 - view.sync_s / view.step_s
        wish = 1 if used > 0.8 else -1 if used < 0.4 else 0
        is_new = self._is_new(view)
        self._agree = self._agree + wish if wish and wish * self._agree >= 0 else wish
        if is_new or abs(self._agree) < 3:
            return view.config
        return self._other(view.config, wish)


class OrEtAl(_Ladder):
    """Add workers while the previous addition achieved enough of linear scaling.

    Source: Or, Zhang and Freedman, Resource Elasticity in Distributed Deep Learning, MLSys 2020, section 4:
    throughput scaling efficiency, here with a threshold of one half.
    """

    def choose(self, view: ElasticView) -> Config:
        """Scale up while it is efficient; go back once when it is not."""
        is_new = self._is_new(view)
        self._rates[view.config] = view.batch / view.step_s
        below, above = self._other(view.config, -1), self._other(view.config, 1)
        if is_new or above in self._rates:
            return view.config
        if below != view.config and below in self._rates:
            added = self._rates[view.config] - self._rates[below]
            fair = self._rates[below] / below.gpus * (view.config.gpus - below.gpus)
            if added < 0.5 * fair:
                return below
        return above


class Pollux(_Ladder):
    """Keep the speed-up per GPU within a band, by a fitted goodput model.

    Source: Qiao et al., Pollux, OSDI 2021, section 4.2.3 (cloud auto-scaling), with a band of 0.55 to 0.75.
    """

    def begin(self, job: ElasticJob) -> None:
        """Forget the previous job."""
        super().begin(job)
        model = job.model
        self._learner = Learner(
            model.init_batch,
            model.max_batch,
            model.bandwidth_gbs,
            model.memory_gb,
            prior_for(model.init_batch, model.max_batch),
        )

    def choose(self, view: ElasticView) -> Config:
        """The largest count inside the band."""
        here = Shape(view.config.gpu, view.config.nodes, view.config.gpus)
        self._learner.learn(
            here, Measured(view.batch, view.step_s, view.sync_s, view.noise_scale, view.micro_batches)
        )
        if self._is_new(view):
            return view.config
        one = self._learner.rate(Shape(view.config.gpu, 1, 1), view.noise_scale)[0]
        used = self._learner.rate(here, view.noise_scale)[0] / one / view.config.gpus
        if 0.55 <= used <= 0.75:
            return view.config
        rungs = [c for c in self._job.configs if c.gpu == view.config.gpu]
        target = 0.65
        return min(
            rungs,
            key=lambda c: abs(
                self._learner.rate(Shape(c.gpu, c.nodes, c.gpus), view.noise_scale)[0] / one / c.gpus - target
            ),
        )


def spot_optimum(
    job: SpotJob, zones: Mapping[str, Sequence[int]], prices: Mapping[str, Sequence[float]] | None = None
) -> float:
    """Lowest cost in USD of finishing by the deadline, with the whole trace known.

    Solved backward over ticks. The state is the market with the remaining overhead of its launch, and the
    time that may still be lost. Its unit is the greatest one that divides tick and overhead (whole seconds),
    so nothing is rounded.
    """
    import numpy as np  # noqa: PLC0415  # the optimum alone needs it

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
    """Overhead paid in a tick, by state: the first state is a paid-off launch, the last one a new launch."""
    rest = [min(gap, overhead - start) for start in range(0, overhead, gap)] or [0]
    return [0, *reversed(rest)]


def _before(
    after: dict[str | None, list[_Row]], costs: Mapping[str, float], pays: list[int], gap: int, is_done: _Row
) -> dict[str | None, list[_Row]]:
    import numpy as np  # noqa: PLC0415  # the optimum alone needs it

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


class OnDemand:
    """On-demand from start to end."""

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:
        """Nothing to store."""

    def choose(self, view: SpotView) -> str | None:  # noqa: ARG002  # looks at nothing
        """On-demand."""
        return ON_DEMAND


class Greedy:
    """Spot when up, otherwise wait; at the last moment the guard switches to on-demand for good."""

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002  # learns nothing
        """Store the job."""
        self._job = job

    def choose(self, view: SpotView) -> str | None:
        """The zone that runs, otherwise any that is up, otherwise none."""
        if view.running == ON_DEMAND:
            return ON_DEMAND
        return _zone(view) or next(iter(view.unknown()), None)


class UniformProgress:
    """Uniform Progress, and its failover between several zones.

    The policy follows the line ``t * W / D``. Spot up: spot. Spot down: nothing when ahead of the line,
    on-demand when behind. It returns from on-demand to spot only when progress is at or above the line at ``t
    + 2 * overhead``; when spot is down, on-demand stays. If only a request reveals whether a zone is up, it
    requests one after the other when it wants spot.

    Source:
        Wu et al., Can't Be Late: Optimizing Spot Instance Savings under Deadlines, NSDI 2024, section 4.
    """

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002  # learns nothing
        """Store the job."""
        self._job = job

    def choose(self, view: SpotView) -> str | None:
        """Decide by the line."""
        job = self._job
        progress, now_s = job.work_s - view.work_left_s, view.tick * job.gap_s
        slope = job.work_s / (job.ticks * job.gap_s)
        zone = _zone(view) or (view.unknown()[0] if view.unknown() and may_ask(job, view) else None)
        if view.running == ON_DEMAND:
            is_ahead = progress >= (now_s + 2 * job.overhead_s) * slope - 1e-6
            return zone if zone is not None and is_ahead else ON_DEMAND
        if zone is not None:
            return zone
        return None if progress >= now_s * slope - 1e-6 and is_safe(job, view, None) else ON_DEMAND


def _zone(view: SpotView) -> str | None:
    """The zone that runs, otherwise the cheapest that is up; the first one for equal prices."""
    if view.running is not None and view.running != ON_DEMAND:
        return view.running
    zones = [name for name, is_up in view.up.items() if is_up]
    return min(zones, key=lambda name: view.usd.get(name, 0.0), default=None)
