"""The policy ``cost-to-finish`` on the elastic model: the learner and the probes of a live stage."""

from __future__ import annotations

from envscaler_airflow.scaling.explore import Learner, Measured, Prior, Shape, Stakes, foreseen, probes
from envscaler_airflow.simulate.elastic import Config
from envscaler_airflow.simulate.elastic_run import ElasticJob, ElasticView

BANDWIDTH_GBS = {"T4": 320.0, "V100-32GB": 900.0, "A100-40GB": 1555.0}
"""Memory bandwidth, GB/s: how types compare before they are tried. Source: vendor datasheets."""
MEMORY_GB = {"T4": 16.0, "V100-32GB": 32.0, "A100-40GB": 40.0}
"""Source: vendor datasheets."""
SETTLE = 3
"""Decisions on a new configuration before the next move. Chosen: three minutes of steps."""
TOLERANCE_GROWS = 0.5
"""Each move makes the next one ask for this much more of the tolerance. Chosen: an end to see-saws."""
LOOK_AGAIN_S = 600.0
"""Between looks once settled. Chosen."""


class CostToFinish:
    """Least expected cost + value of time, learning as it goes."""

    def __init__(self, *, tolerance: float = 0.02, prior: Prior | None = None) -> None:
        """*tolerance*: part of the objective that a move must save."""
        self._tolerance = tolerance
        self._prior = prior or Prior()

    def begin(self, job: ElasticJob) -> None:
        """Forget."""
        self._job = job
        self._learner = Learner(
            job.model.init_batch, job.model.max_batch, BANDWIDTH_GBS, MEMORY_GB, self._prior
        )
        self._shapes = {Shape(c.gpu, c.nodes, c.gpus): c for c in job.configs}
        self._since: list[ElasticView] = []
        self._looked_s = -LOOK_AGAIN_S
        self._moves = 0
        self._settle = SETTLE

    def choose(self, view: ElasticView) -> Config:
        """Stay, or move where the expected objective is least."""
        if self._since and self._since[-1].config != view.config:
            self._since, self._looked_s = [], -LOOK_AGAIN_S
        self._since = [*self._since[-9:], view]
        if len(self._since) < self._settle or view.elapsed_s - self._looked_s < LOOK_AGAIN_S:
            return view.config
        self._looked_s = view.elapsed_s
        here = Shape(view.config.gpu, view.config.nodes, view.config.gpus)
        same = [item for item in self._since if item.batch == view.batch]
        mean = sum(item.step_s for item in same) / len(same)
        sync = sum(item.sync_s for item in same) / len(same)
        self._learner.learn(here, Measured(view.batch, mean, sync, view.noise_scale))
        job = self._job
        stakes = Stakes(
            work_left=view.work_left,
            here=here,
            restart_s=job.model.restart_s,
            probe_s=self._settle * 60.0,
            noise_scale=foreseen(view.noise_scale, view.work_done / (view.work_done + view.work_left)),
            usd_per_hour=lambda shape: job.usd_per_hour(self._shapes[shape]) + job.value_of_hour,
        )
        staying, found = probes(self._learner, stakes, list(self._shapes))
        tolerance = self._tolerance * (1 + TOLERANCE_GROWS * self._moves)
        if found and found[0].objective < staying * (1 - tolerance):
            self._moves += 1
            return self._shapes[found[0].shape]
        return view.config
