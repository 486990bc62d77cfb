"""The policy ``cost-to-finish`` on the elastic model: the learner and the probes of a running stage."""

from __future__ import annotations

import math

from envscaler_airflow.scaling.explore import (
    SHORT_RESTARTS,
    Learner,
    Measured,
    Prior,
    Shape,
    Stakes,
    foreseen,
    gain,
    probes,
)
from envscaler_airflow.simulate.elastic import Config
from envscaler_airflow.simulate.elastic_run import ElasticJob, ElasticView

SETTLE = 2
"""Samples of a new configuration before the next move. Chosen: two minutes of steps."""
BRIEF = 0.03
"""A place disappoints if the job leaves it before doing this fraction of the work there. Chosen."""
BAR_GROWS, BAR_POWER = 0.7, 1.5
"""After n disappointments a probe must save ``1 + grows * n ** power`` times as much as the first. Chosen."""
AGAIN_POWER = 2.0
"""A place that disappointed n times must save ``(1 + n) ** power`` times the tolerance. Chosen: no
oscillation."""
LOOKED_AT = 5
"""Number of moves that are compared with the tolerance, best first. Chosen."""
LOOK_AGAIN_S = 600.0
"""Interval between samples once settled. Chosen."""


class CostToFinish:
    """Lowest expected cost + value of time, learning during the run."""

    def __init__(self, *, tolerance: float = 0.03, probing: float = 0.07, prior: Prior | None = None) -> None:
        """Set the fractions of the objective that a move must save: to a known place, and to a new one.

        The expected objective of a new place already includes the risk of disappointment.
        """
        self._tolerance, self._probing = tolerance, probing
        self._prior = prior or Prior()

    def begin(self, job: ElasticJob) -> None:
        """Forget the previous job."""
        self._job = job
        model = job.model
        self._learner = Learner(
            model.init_batch, model.max_batch, model.bandwidth_gbs, model.memory_gb, self._prior
        )
        self._shapes = {Shape(c.gpu, c.nodes, c.gpus): c for c in job.configs}
        self._since: list[ElasticView] = []
        self._looked_s = -LOOK_AGAIN_S
        self._came_with = 0.0
        self._disappointed: dict[Shape, float] = {}
        self._noise: float | None = None

    def choose(self, view: ElasticView) -> Config:
        """Stay, or move where the expected objective is lowest."""
        if self._since and self._since[-1].config != view.config:
            self._since, self._looked_s = [], -LOOK_AGAIN_S
        self._since = [*self._since[-9:], view]
        self._forgive(view.noise_scale)
        if len(self._since) < self._looks(view) or view.elapsed_s - self._looked_s < LOOK_AGAIN_S:
            return view.config
        self._looked_s = view.elapsed_s
        here = Shape(view.config.gpu, view.config.nodes, view.config.gpus)
        self._learner.learn(here, self._measured(view))
        staying, found = probes(self._learner, self._stakes(view, here), list(self._shapes))
        for probe in found[:LOOKED_AT]:
            if probe.objective < staying * (1 - self._must_save(probe.shape)):
                self._leave(here, view)
                return self._shapes[probe.shape]
        return view.config

    def _must_save(self, shape: Shape) -> float:
        """Fraction of the objective that a move must save."""
        if shape in self._learner.seen:
            return self._tolerance * math.pow(1 + self._disappointed.get(shape, 0.0), AGAIN_POWER)
        return self._probing * (1 + BAR_GROWS * math.pow(sum(self._disappointed.values()), BAR_POWER))

    def _leave(self, here: Shape, view: ElasticView) -> None:
        """Count *here* as a disappointment if little work was done there; the start does not count."""
        is_brief = view.work_done - self._came_with < BRIEF * (view.work_done + view.work_left)
        if is_brief and self._came_with > 0:
            self._disappointed[here] = self._disappointed.get(here, 0.0) + 1
        self._came_with = view.work_done

    def _forgive(self, noise_scale: float) -> None:
        """Once the noise has doubled, forget half of the disappointments: other counts are suitable now."""
        if self._noise is None:
            self._noise = noise_scale
        if noise_scale >= 2 * max(self._noise, 0.5):
            self._noise = noise_scale
            self._disappointed = {shape: count / 2 for shape, count in self._disappointed.items()}

    def _looks(self, view: ElasticView) -> int:
        """Samples before the first move from here; one if the remaining work does not justify more."""
        model = self._job.model
        left_s = view.work_left * view.step_s / gain(view.batch, model.init_batch, view.noise_scale)
        return 1 if left_s < SHORT_RESTARTS * model.restart_s else SETTLE

    def _measured(self, view: ElasticView) -> Measured:
        same = [item for item in self._since if item.batch == view.batch]
        mean = sum(item.step_s for item in same) / len(same)
        sync = sum(item.sync_s for item in same) / len(same)
        return Measured(view.batch, mean, sync, view.noise_scale)

    def _stakes(self, view: ElasticView, here: Shape) -> Stakes:
        job = self._job
        return Stakes(
            work_left=view.work_left,
            here=here,
            restart_s=job.model.restart_s,
            probe_s=SETTLE * 60.0,
            noise_scale=foreseen(view.noise_scale),
            usd_per_hour=lambda shape: job.usd_per_hour(self._shapes[shape]) + job.value_of_hour,
        )
