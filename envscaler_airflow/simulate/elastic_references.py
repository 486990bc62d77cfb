"""Elastic policies to compare with, written from their papers, not from anyone's code."""

from __future__ import annotations

from envscaler_airflow.scaling.explore import Learner, Measured, Shape
from envscaler_airflow.simulate.elastic import Config
from envscaler_airflow.simulate.elastic_run import ElasticJob, ElasticView


class Stay:
    """Never moves."""

    def begin(self, job: ElasticJob) -> None:
        """Nothing to remember."""

    def choose(self, view: ElasticView) -> Config:
        """Here."""
        return view.config


class _Ladder:
    """Counts of the type that the job runs on, rising."""

    def begin(self, job: ElasticJob) -> None:
        """Forget the last job."""
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
    """Out above 80 % of utilisation, in below 40 %, three looks in a row, five minutes between moves.

    Utilisation is the part of a step that is not synchronisation.

    Source: kubernetes.io, Horizontal Pod Autoscaling; thresholds chosen as those of the policy ``threshold``.
    """

    def choose(self, view: ElasticView) -> Config:
        """By utilisation alone."""
        used = 1 - view.sync_s / view.step_s
        wish = 1 if used > 0.8 else -1 if used < 0.4 else 0
        is_new = self._is_new(view)
        self._agree = self._agree + wish if wish and wish * self._agree >= 0 else wish
        if is_new or abs(self._agree) < 3:
            return view.config
        return self._other(view.config, wish)


class OrEtAl(_Ladder):
    """Add workers while the last ones added a fair part of what linear scaling would have.

    Source: Or, Zhang and Freedman, Resource Elasticity in Distributed Deep Learning, MLSys 2020, section 4:
    throughput scaling efficiency, here with a threshold of one half.
    """

    def choose(self, view: ElasticView) -> Config:
        """Up while it scales; back once when it does not."""
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
    """As many GPUs as keep the speed-up per GPU within a band, by a fitted goodput model.

    Source: Qiao et al., Pollux, OSDI 2021, section 4.2.3 (cloud auto-scaling), with a band of 0.55 to 0.75.
    """

    def begin(self, job: ElasticJob) -> None:
        """Forget the last job."""
        super().begin(job)
        model = job.model
        self._learner = Learner(model.init_batch, model.max_batch, model.bandwidth_gbs, model.memory_gb)

    def choose(self, view: ElasticView) -> Config:
        """The largest count inside the band."""
        here = Shape(view.config.gpu, view.config.nodes, view.config.gpus)
        self._learner.learn(here, Measured(view.batch, view.step_s, view.sync_s, view.noise_scale))
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
