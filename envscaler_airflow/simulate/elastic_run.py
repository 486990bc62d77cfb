"""Run a job of the elastic model under a policy, and compute its exact optimum."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.simulate.elastic import Config, Model, Step

DECISION_S = 60.0
"""Seconds between two calls of a policy. Chosen: every other check of a sensor."""
NOISE = 0.03
"""Standard deviation of the logarithm of a measured step. Chosen: no single measurement is reliable."""


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """One job.

    Attributes:
        model: The training.
        configs: The configurations that it may run on.
        usd_per_gpu_hour: By type.
        value_of_hour: USD.
        factor: Its work, as a multiple of the original.
        start: Where it starts.
    """

    model: Model
    configs: tuple[Config, ...]
    usd_per_gpu_hour: Mapping[str, float]
    value_of_hour: float
    factor: float
    start: Config

    def usd_per_hour(self, config: Config) -> float:
        """Price of all GPUs."""
        return self.usd_per_gpu_hour[config.gpu] * config.gpus

    def objective_per_s(self, config: Config) -> float:
        """Cost + value of time, per second."""
        return (self.usd_per_hour(config) + self.value_of_hour) / SECONDS_PER_HOUR


@dataclass(slots=True)
class ElasticView:
    """What a policy sees every 60 s: its own measurements, and nothing about places that it has not used."""

    elapsed_s: float
    config: Config
    batch: int
    step_s: float
    sync_s: float
    noise_scale: float
    work_done: float
    work_left: float
    epoch: int


class ElasticPolicy(Protocol):
    """Returns a configuration every 60 s."""

    def begin(self, job: ElasticJob) -> None:
        """Forget the previous job.

        Of *job*, a policy may use only what a running stage knows: bounds of the batch, configurations and
        prices, restart seconds, and the value of an hour; never its steps.
        """

    def choose(self, view: ElasticView) -> Config:
        """Where to run."""


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """One simulated job: cost, time, and the configurations that it used."""

    cost_usd: float
    time_h: float
    restarts: int
    objective: float
    path: tuple[tuple[float, str], ...] = ()


class ElasticTraining:
    """A running job, one minute at a time. The start and each switch are restarts, and both are billed.

    Attributes:
        job: The job.
        config: Where it runs.
        done, time_s, usd, restarts: So far.
        path: Where it ran, and since when.
    """

    def __init__(self, job: ElasticJob, *, seed: int) -> None:
        """Restart on the job's start configuration."""
        self._random = Random(seed)  # noqa: S311  # noise, not secrets
        self._truth = _Truth(job)
        self._total = self._truth.ends[-1]
        self.job, self.config = job, job.start
        self.done, self.time_s, self.usd, self.restarts = 0.0, 0.0, 0.0, 0
        self.path = [(0.0, job.start.name)]
        self._pass(job.model.restart_s)

    @property
    def is_done(self) -> bool:
        """True when no work is left."""
        return self.done >= self._total - 1e-9

    @property
    def objective(self) -> float:
        """Cost plus the value of the time so far."""
        return self.usd + self.job.value_of_hour * self.time_s / SECONDS_PER_HOUR

    def advance(self) -> None:
        """Train for a minute, or to the end."""
        took, self.done = self._truth.advance(self.config, self.done, DECISION_S)
        self._pass(took)

    def switch(self, config: Config) -> None:
        """Restart on *config*; no effect if it already runs there."""
        if config == self.config:
            return
        self.config, self.restarts = config, self.restarts + 1
        self.path.append((self.time_s, config.name))
        self._pass(self.job.model.restart_s)

    def view(self) -> ElasticView:
        """What a policy sees; draws noise."""
        epoch = self._truth.epoch(self.done)
        step, _ = self._truth.best(self.config, epoch)
        noise = math.exp(self._random.gauss(0, NOISE))
        return ElasticView(
            self.time_s,
            self.config,
            step.batch,
            step.step_s * noise,
            step.sync_s * noise,
            self.job.model.noise_at(step.batch, epoch),
            self.done,
            self._total - self.done,
            epoch,
        )

    def _pass(self, seconds: float) -> None:
        self.time_s += seconds
        self.usd += self.job.usd_per_hour(self.config) * seconds / SECONDS_PER_HOUR


def simulate_elastic(job: ElasticJob, policy: ElasticPolicy, *, seed: int) -> ElasticRun:
    """Run *job* to its end under *policy*, which is called every minute."""
    training = ElasticTraining(job, seed=seed)
    policy.begin(job)
    training.advance()
    while not training.is_done:
        training.switch(policy.choose(training.view()))
        training.advance()
    hours = training.time_s / SECONDS_PER_HOUR
    return ElasticRun(training.usd, hours, training.restarts, training.objective, tuple(training.path))


def elastic_optimum(job: ElasticJob) -> float:
    """Lowest objective of any schedule that switches at epoch ends, including the restart at the start."""
    truth = _Truth(job)
    rate = [{c: truth.best(c, e)[1] for c in job.configs} for e in range(len(truth.ends))]
    after = dict.fromkeys(job.configs, 0.0)
    for epoch in range(len(truth.ends) - 1, -1, -1):
        work = truth.ends[epoch] - (truth.ends[epoch - 1] if epoch else 0.0)
        on = {c: job.objective_per_s(c) * work / rate[epoch][c] + after[c] for c in job.configs}
        moved = min(on[c] + job.objective_per_s(c) * job.model.restart_s for c in job.configs)
        after = {c: min(on[c], moved) for c in job.configs}
    return after[job.start] + job.objective_per_s(job.start) * job.model.restart_s


def best_fixed(job: ElasticJob) -> float:
    """Lowest objective of one configuration for the whole job, with one restart."""
    truth = _Truth(job)
    costs = []
    for config in job.configs:
        took, _ = truth.advance(config, 0.0, math.inf)
        costs.append(job.objective_per_s(config) * (took + job.model.restart_s))
    return min(costs)


class _Truth:
    def __init__(self, job: ElasticJob) -> None:
        self.model = job.model
        self.ends = [end * job.factor for end in job.model.epochs]
        self._best: dict[tuple[Config, int], tuple[Step, float]] = {}

    def epoch(self, done: float) -> int:
        return min(bisect_right(self.ends, done + 1e-9), len(self.ends) - 1)

    def best(self, config: Config, epoch: int) -> tuple[Step, float]:
        key = (config, epoch)
        if key not in self._best:
            self._best[key] = self.model.best(config, epoch)
        return self._best[key]

    def advance(self, config: Config, done: float, seconds: float) -> tuple[float, float]:
        took = 0.0
        while took < seconds - 1e-9 and done < self.ends[-1] - 1e-9:
            epoch = self.epoch(done)
            rate = self.best(config, epoch)[1]
            left = self.ends[epoch] - done
            need = left / rate
            if need <= seconds - took:
                took, done = took + need, self.ends[epoch]
            else:
                done, took = done + rate * (seconds - took), seconds
        return took, done
