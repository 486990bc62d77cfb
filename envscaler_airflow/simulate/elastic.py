"""The elastic model: measured step times and statistical efficiency, without any fit; jobs that run on it."""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.record import check_finite

START_TYPE = "T4"
SHEETS = {"T4": (320.0, 16.0), "V100-32GB": (900.0, 32.0), "A100-40GB": (1555.0, 40.0)}
"""GB/s and GB of memory by type, to compare types before they are measured. Source: vendor datasheets."""
GPU_HOUR_USD = {"T4": 0.978, "V100-32GB": 3.06, "A100-40GB": 2.7447}
"""$ per GPU-hour in the comparison. Source: AWS on-demand list, g4dn.12xlarge, p3.8xlarge, p4d.24xlarge."""


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """A configuration that a job may run on.

    Attributes:
        gpu: Type.
        nodes, gpus: Packed: the fewest nodes that fit the GPUs.
    """

    gpu: str
    nodes: int
    gpus: int

    @property
    def name(self) -> str:
        """``4xT4``."""
        return f"{self.gpus}x{self.gpu}"


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step: global batch, seconds, and the part that is synchronization."""

    batch: int
    step_s: float
    sync_s: float
    micro_batches: int = 1

    def __post_init__(self) -> None:
        """Reject a step that takes no time."""
        if not 0 < self.step_s < math.inf or not 0 <= self.sync_s < math.inf:
            raise ValueError(f"step_time must be > 0 and sync_time >= 0, got {self.step_s}, {self.sync_s}")


@dataclass(frozen=True, slots=True)
class Model:
    """The measurements of one training.

    Attributes:
        name: Key of ``models.json``.
        init_batch, max_batch: Bounds of the global batch.
        restart_s: Seconds that a start or a switch takes.
        steps: By configuration, in ascending order of the batch.
        epochs: Progress at the end of each epoch, in iterations at *init_batch*.
        noise: By batch of ``stat_efficiency.csv``: gradient noise scale (variance over square) by epoch.
        bandwidth_gbs, memory_gb: Of a GPU by type, from datasheets.
        unknown_noise: Rows with ``grad_sqr`` 0, whose noise is that of their neighbors.
    """

    name: str
    init_batch: int
    max_batch: int
    restart_s: float
    steps: Mapping[Config, tuple[Step, ...]]
    epochs: tuple[float, ...]
    noise: Mapping[int, tuple[float, ...]]
    bandwidth_gbs: Mapping[str, float] = field(default_factory=dict)
    memory_gb: Mapping[str, float] = field(default_factory=dict)
    unknown_noise: int = 0

    def __post_init__(self) -> None:
        """Reject invalid bounds and an invalid restart."""
        if not 0 < self.init_batch <= self.max_batch:
            raise ValueError(f"init_batch must be > 0 and <= max_batch, got {self.init_batch}")
        if not 0 <= self.restart_s < math.inf:
            raise ValueError(f"restart_s must be finite and >= 0, got {self.restart_s}")

    def kept(self) -> Model:
        """The same training with one global batch, which a stage keeps wherever it runs.

        It is the geometric mean of the bounds (chosen: there is room for many GPUs). Work is counted in steps
        at that batch. A GPU accumulates what does not fit at once and synchronizes once a step. Seconds of a
        step are linear between measured batches; configurations whose part of the batch is below the smallest
        measured one are left out.
        """
        batch = round(math.sqrt(self.init_batch * self.max_batch))
        made = {config: _accumulated(steps, batch) for config, steps in self.steps.items()}
        done, before, epochs = 0.0, 0.0, []
        for epoch, end in enumerate(self.epochs):
            done += (end - before) / self.gain(batch, epoch)
            before = end
            epochs.append(done)
        return replace(
            self,
            init_batch=batch,
            max_batch=batch,
            steps={config: (step,) for config, step in made.items() if step is not None},
            epochs=tuple(epochs),
        )

    def noise_at(self, batch: int, epoch: int) -> float:
        """Noise scale at *batch*: linear in log batch between the measured ones; constant after the end."""
        batches = sorted(self.noise)
        at = bisect_left(batches, batch)
        if at == 0 or at == len(batches):
            return self._noise_of(batches[min(at, len(batches) - 1)], epoch)
        low, high = batches[at - 1], batches[at]
        share = math.log(batch / low) / math.log(high / low)
        return self._noise_of(low, epoch) * (1 - share) + self._noise_of(high, epoch) * share

    def _noise_of(self, batch: int, epoch: int) -> float:
        rows = self.noise[batch]
        return rows[min(epoch, len(rows) - 1)]

    def gain(self, batch: int, epoch: int) -> float:
        """Progress of one step at *batch*: ``(var + sqr) / (var / s + sqr)``, ``s = batch / init_batch``.

        Source: Qiao et al., Pollux, OSDI 2021, equation 7.
        """
        noise = self.noise_at(batch, epoch)
        return (noise + 1) / (noise * self.init_batch / batch + 1)

    def best(self, config: Config, epoch: int) -> tuple[Step, float]:
        """The feasible batch with the most progress per second, and that rate."""
        return max(
            ((step, self.gain(step.batch, epoch) / step.step_s) for step in self.steps[config]),
            key=lambda pair: pair[1],
        )


def _accumulated(steps: Sequence[Step], batch: int) -> Step | None:
    """A step of *batch* in as few equal parts as fit; None: they are smaller than what was measured."""
    times = math.ceil(batch / steps[-1].batch)
    part = batch / times
    if part < steps[0].batch:
        return None
    at = min(bisect_left(steps, part, key=lambda step: step.batch), len(steps) - 1)
    high, low = steps[at], steps[max(at - 1, 0)]
    share = 1.0 if high == low else (part - low.batch) / (high.batch - low.batch)
    step_s = low.step_s + share * (high.step_s - low.step_s)
    sync_s = min(low.sync_s + share * (high.sync_s - low.sync_s), step_s)
    return Step(batch, times * (step_s - sync_s) + sync_s, sync_s, times)


def load_models(folder: Path, types: Sequence[str]) -> dict[str, Model]:
    """Read ``models.json``, ``stat_efficiency.csv`` and every ``throughput_*.csv`` of the same columns.

    Raises:
        SpecError: A file is missing or has another form.
    """
    try:
        facts = json.loads((folder / "models.json").read_text(encoding="utf-8"))
        statistics = _read(folder / "stat_efficiency.csv")
        throughputs = [row for path in sorted(folder.glob("throughput_*.csv")) for row in _read(path)]
        sheets = _sheets(folder / "gpus.csv")
    except (OSError, ValueError, RecursionError, csv.Error) as err:
        raise SpecError(f"{folder}: profiles cannot be read: {err}") from err
    measured = [row for row in throughputs if "local_bsz" in row and row["gpu_type"] in types]
    models, name = {}, ""
    try:
        per_node = {name: int(item["gpus_per_node"]) for name, item in facts["gpu_types"].items()}
        for name, item in facts["models"].items():
            mine = [row for row in statistics if row["model"] == name]
            if mine and any(row["model"] == name and _is_measured(row) for row in measured):
                models[name] = _model(name, item, measured, mine, per_node, sheets)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as err:
        what = f"has no {err}" if isinstance(err, KeyError) else str(err)
        raise SpecError(f"{folder}: {name or 'models.json'}: {what}") from err
    return models


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    for at, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(f"{path.name}:{at + 2}: has another number of cells than there are columns")
    return rows


def _sheets(path: Path) -> dict[str, tuple[float, float]]:
    """Bandwidth and memory by type: the known ones, updated from the file ``gpus.csv``."""
    found = dict(SHEETS)
    for row in _read(path) if path.exists() else ():
        if row.get("mem_bw_gbs") and row.get("mem_gb"):
            found[row["gpu"]] = (float(row["mem_bw_gbs"]), float(row["mem_gb"]))
    return found


def _is_measured(row: Mapping[str, str]) -> bool:
    """False for an empty or NaN time, which was not measured."""
    return row["step_time"].strip().lower() not in ("", "nan")


def _model(
    name: str,
    facts: Mapping[str, Any],
    measured: Sequence[Mapping[str, str]],
    statistics: Sequence[Mapping[str, str]],
    per_node: Mapping[str, int],
    sheets: Mapping[str, tuple[float, float]],
) -> Model:
    rows = [row for row in measured if row["model"] == name and _is_measured(row)]
    found: dict[Config, dict[int, Step]] = {}
    for is_exact in (False, True):  # exact placements replace those given as a number of nodes
        for row in rows:
            config = Config(row["gpu_type"], int(row["num_nodes"]), int(row["num_replicas"]))
            if not _is_packed(row["placement"], config, per_node, is_exact=is_exact):
                continue
            batch = int(row["local_bsz"]) * config.gpus
            if facts["init_batch"] <= batch <= facts["max_batch"]:
                step = Step(batch, float(row["step_time"]), float(row["sync_time"]))
                found.setdefault(config, {})[batch] = step
    by_batch, unknown = _statistics(statistics)
    init = by_batch[min(by_batch)]
    return Model(
        name=name,
        init_batch=int(facts["init_batch"]),
        max_batch=int(facts["max_batch"]),
        restart_s=float(facts["restart_s"]),
        steps={c: tuple(s for _, s in sorted(steps.items())) for c, steps in sorted(found.items())},
        epochs=tuple(progress for progress, _ in init),
        noise={batch: tuple(noise for _, noise in rows) for batch, rows in by_batch.items()},
        unknown_noise=unknown,
        bandwidth_gbs={gpu: sheet[0] for gpu, sheet in sheets.items()},
        memory_gb={gpu: sheet[1] for gpu, sheet in sheets.items()},
    )


def _statistics(rows: Sequence[Mapping[str, str]]) -> tuple[dict[int, list[tuple[float, float]]], int]:
    """Progress and noise of each epoch by batch, and how many rows have no noise of their own.

    Where the square of the gradient was measured as 0, the noise is unknown: it is the mean of the nearest
    earlier and later epochs at that batch.
    """
    found: dict[int, dict[int, tuple[float, float | None]]] = {}
    for row in rows:
        var, sqr, progress = (float(row[name]) for name in ("grad_var", "grad_sqr", "progress"))
        noise = None if sqr == 0 else var / sqr
        if not (0 <= var < math.inf and 0 <= sqr < math.inf and (noise or 0.0) < math.inf):
            raise ValueError(f"grad_var / grad_sqr must be finite and >= 0, got {var} / {sqr}")
        if not 0 < progress < math.inf:
            raise ValueError(f"progress must be finite and > 0, got {progress}")
        epochs = found.setdefault(int(row["batch_size"]), {})
        if int(row["epoch"]) in epochs:
            raise ValueError(f"batch_size {row['batch_size']} has epoch {row['epoch']} twice")
        epochs[int(row["epoch"])] = (progress, noise)
    known = {}
    for batch, epochs in found.items():
        ends = [epochs[epoch] for epoch in sorted(epochs)]
        if any(later[0] < earlier[0] for earlier, later in pairwise(ends)):
            raise ValueError(f"progress must not fall from epoch to epoch, as at batch_size {batch}")
        noises = _filled([noise for _, noise in ends], batch)
        known[batch] = [(progress, noise) for (progress, _), noise in zip(ends, noises, strict=True)]
    return known, sum(noise is None for epochs in found.values() for _, noise in epochs.values())


def _filled(noises: Sequence[float | None], batch: int) -> list[float]:
    if all(noise is None for noise in noises):
        raise ValueError(f"grad_sqr must be > 0 in one epoch at least, and is 0 in all of batch_size {batch}")
    filled = []
    for at, noise in enumerate(noises):
        before = next((one for one in reversed(noises[:at]) if one is not None), None)
        after = next((one for one in noises[at:] if one is not None), None)
        near = [one for one in (before, after) if one is not None]
        filled.append(sum(near) / len(near) if noise is None else noise)
    return filled


def _is_packed(placement: str, config: Config, per_node: Mapping[str, int], *, is_exact: bool) -> bool:
    whole = per_node[config.gpu]
    if config.nodes != math.ceil(config.gpus / whole):
        return False
    if not placement or not is_exact:
        return not placement and not is_exact
    full, rest = divmod(config.gpus, whole)
    return sorted(placement) == sorted([str(whole)] * full + ([str(rest)] if rest else []))


def gpu_prices(path: Path | None, types: Sequence[str]) -> dict[str, float]:
    """$ per GPU-hour by type: those of the comparison, otherwise from the file's row with the most GPUs.

    Raises:
        SpecError: A type has no price, or the file cannot be read.
    """
    try:
        return _gpu_prices(path, types)
    except (OSError, ValueError, csv.Error) as err:
        raise SpecError(f"{path}: prices cannot be read: {err}") from err


def _gpu_prices(path: Path | None, types: Sequence[str]) -> dict[str, float]:
    rows = [] if path is None else _read(path)
    prices = {}
    for name in types:
        named = [row for row in rows if row.get("gpu") == name and row.get("usd_per_gpu_hour")]
        if name in GPU_HOUR_USD:
            prices[name] = GPU_HOUR_USD[name]
        elif named:
            most = max(named, key=lambda row: int(row.get("gpus") or 1))
            prices[name] = float(most["usd_per_gpu_hour"])
            check_finite(usd_per_gpu_hour=prices[name])
        else:
            raise SpecError(f"{path}: no price for {name}: a row with gpu and usd_per_gpu_hour is needed")
    return prices


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
    """What a policy sees every 60 s: its own measurements, and nothing about places that it has not used.

    *began_s* and *began_with*: when it began to train on *config*, and with what work done.
    """

    elapsed_s: float
    config: Config
    batch: int
    step_s: float
    sync_s: float
    noise_scale: float
    work_done: float
    work_left: float
    epoch: int
    began_s: float
    began_with: float
    micro_batches: int = 1


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
        self._began = (self.time_s, self.done)

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
        self._began = (self.time_s, self.done)

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
            *self._began,
            step.micro_batches,
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
