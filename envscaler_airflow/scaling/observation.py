"""The observation of one scaling check: everything that a decision depends on, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from envscaler_agent.protocol import Progress
from envscaler_airflow.errors import BackendError, EnvScalerError
from envscaler_airflow.planning import Allocation, Overheads, Speed, Speedup
from envscaler_airflow.planning.record import MOST_VALUE, NotNegative, Record
from envscaler_airflow.scaling.deadline.spot_market import Market
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.history import History

Health = Literal["ok", "stalled", "unknown"]


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """One metric of one node at one check.

    Attributes:
        at_s: ``Observation.elapsed_s`` of the check that read it.
        node: Index of the node.
        metric: Name, as in ``Status.usage``.
        value: Finite.
    """

    at_s: NotNegative[float]
    node: int
    metric: str
    value: float

    def __post_init__(self) -> None:
        """Reject NaN and infinity: an unknown metric is omitted."""
        Record.__post_init__(self)
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, got {self.value!r}")


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """Consecutive refusals by the owner of moves of the running attempt to one target.

    Attributes:
        times: Number of refusals.
        ago_s: Seconds since the last one.
    """

    times: NotNegative[int]
    ago_s: NotNegative[float]


@dataclass(frozen=True, slots=True)
class Observation(Record):
    """Facts of one check. None is unknown, never 0.

    Attributes:
        current: What the stage runs on.
        candidates: What it might run on; may include *current*, in any order.
        elsewhere: Other places that it might run on later, which this check does not propose.
        elapsed_s: Seconds on the observer's own clock, which continues from the last recorded value after a
            restart. Only differences count.
        generation, attempt: Which attempt these facts describe.
        health: ``unknown`` when no status is recent enough.
        phase: Phase of the attempt, as in protocol.PHASES; only ``running`` can be moved.
        unit: Unit of work: ``steps``, ``epochs``, ``samples`` or ``tokens``.
        units_done, units_total: Work done in this generation, and the total.
        epoch: Epochs finished.
        speeds: Measured in this generation, by allocation name, in units per second.
        measured: Steps by allocation name, of this generation, oldest place first; input of the model of
            speeds.
        history: What the stage has tried in this generation, this check included.
        batches: Bounds within which the training chooses its global batch, work being counted in steps at the
            lower one; None: it keeps its batch.
        uneven: GPUs in total of an allocation whose nodes do not all have the same number, by its name.
        gpu_speeds: Relative speeds of GPUs before they are measured, by canonical name, in any unit.
        speedups: Stated in the spec.
        overheads: Overheads of a move and of checkpoints.
        interruptions_per_hour: Losses of one node per hour, by offer name; a missing one is unknown.
        samples: Recent metrics of the current attempt.
        unknown: Why the query of a metric has no value now, by the name of its samples.
        spent_usd, budget_usd: Of this generation; None: there is no budget.
        deadline_table: Name of the table that the policy (any policy, not only ``deadline``) reads; None:
            there is none.
        deadline_left_s: Seconds to the deadline, below 0 when it has passed; None: there is none.
        since_move_s, since_move_epochs: Since the last move was carried out; None: never or unknown.
        moves: Moves carried out in this generation.
        pending: A human-readable description of what is in progress (an unanswered request, a move).
        free_nodes: Nodes available in addition to the allocated ones, by offer name; a missing one is
            unknown.
        training_phase: As the training announced it: ``loading``, ``training``, ``evaluation`` or its own.
        next_phase, next_phase_in_s: Next phase and when it begins, forecast from earlier runs.
        phase_lasts_s: Duration of each phase, from earlier runs.
        wanted: Since when (``elapsed_s``) each allocation has been wanted without a break.
        refused: The owner's recent refusals, by allocation name.
        market: Samples of spot, for a policy that needs them; None: no policy needs them.
    """

    current: Allocation
    candidates: tuple[Allocation, ...] = ()
    elsewhere: tuple[Allocation, ...] = ()
    elapsed_s: NotNegative[float] = 0.0
    generation: int = 1
    attempt: int = 1
    health: Health = "ok"
    phase: str = "running"
    unit: str = "steps"
    units_done: NotNegative[float] | None = None
    units_total: NotNegative[float] | None = None
    epoch: NotNegative[int] | None = None
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    measured: Mapping[str, Measured] = field(default_factory=dict)
    history: History = field(default_factory=History)
    batches: tuple[int, int] | None = None
    uneven: Mapping[str, int] = field(default_factory=dict)
    gpu_speeds: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    speedups: tuple[Speedup, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)
    interruptions_per_hour: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    spent_usd: NotNegative[float] | None = None
    budget_usd: NotNegative[float] | None = None
    deadline_table: str | None = None
    deadline_left_s: float | None = None
    since_move_s: NotNegative[float] | None = None
    since_move_epochs: NotNegative[int] | None = None
    moves: NotNegative[int] = 0
    pending: str | None = None
    free_nodes: Mapping[str, int] = field(default_factory=dict)
    training_phase: str | None = None
    next_phase: str | None = None
    next_phase_in_s: NotNegative[float] | None = None
    phase_lasts_s: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    wanted: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    market: Market | None = None

    def __post_init__(self) -> None:
        """Reject NaN and negative amounts, so that no later comparison gives a wrong result."""
        Record.__post_init__(self)
        if self.deadline_left_s is not None and not math.isfinite(self.deadline_left_s):
            raise ValueError(f"deadline_left_s must be finite, got {self.deadline_left_s!r}")

    @property
    def units_left(self) -> float | None:
        """Work left, >= 0; None when unknown."""
        if self.units_done is None or self.units_total is None:
            return None
        return max(0.0, self.units_total - self.units_done)

    def places(self) -> dict[str, Allocation]:
        """Every place that the check knows, by name: where it runs, might move to now, or later."""
        known = (*self.elsewhere, *self.candidates, self.current)
        return {item.name: item for item in sorted(known, key=lambda item: item.name)}

    def others(self) -> tuple[Allocation, ...]:
        """Candidates other than the current one, each name once, by name."""
        by_name = {item.name: item for item in self.candidates if item.name != self.current.name}
        return tuple(by_name[name] for name in sorted(by_name))


@dataclass(frozen=True, slots=True)
class Done(Record):
    """Work as a training reports it, in the best unit that it reports.

    Attributes:
        unit: ``steps``, or ``epochs`` when only their total is known.
        done, total: None when unknown.
    """

    unit: str
    done: float | None
    total: float | None


def work_of(progress: Progress) -> Done:
    """Work done and its total: in steps when their total is reported, otherwise in finished epochs.

    A speed uses the same unit: for ``epochs`` it is measured between ends of epochs.
    """
    step, epoch, epochs = progress.step, progress.epoch, progress.epochs
    if step is not None and progress.total_steps is not None:
        return Done("steps", float(step), float(progress.total_steps))
    if epoch is not None and epochs is not None:
        return Done("epochs", float(epoch), float(epochs))
    return Done("steps", None if step is None else float(step), None)


def usage_samples(at_s: float, node: int, usage: Mapping[str, float | None]) -> tuple[Sample, ...]:
    """Samples from one node's status, without invalid measurements, which count as missing.

    ``memory_utilization`` (percent of the limit) is added where both parts are known. Use each status once:
    reading it again does not give a second sample.
    """
    known = {name: value for name, value in usage.items() if value is not None}
    limit = known.get("memory_limit_bytes")
    if limit and "memory_bytes" in known:
        known["memory_utilization"] = 100 * known["memory_bytes"] / limit
    return tuple(
        Sample(at_s, node, name, value) for name, value in sorted(known.items()) if is_measured(value)
    )


def is_measured(value: float) -> bool:
    """True for a valid value of a metric: not NaN, not infinite, at most :data:`MOST_VALUE`."""
    return abs(value) <= MOST_VALUE


def recent(samples: Iterable[Sample], *, now_s: float, window_s: float) -> tuple[Sample, ...]:
    """Samples not older than *window_s*: the ones that an observation needs."""
    return tuple(item for item in samples if now_s - item.at_s <= window_s)


Across = Literal["mean", "max", "min", "p50", "p90", "p95", "p99"]

Ask = Callable[[str], Sequence[float]]
"""Current values of every series that a query selects; raises an EnvScalerError where none is available."""

CPU_UTILIZATION = "cpu_utilization"
"""``cpu_percent``, which is 100 for each busy core, over the cores of a node."""


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of one or more values."""
    return math.fsum(values) / len(values)


def _percentile(part: float) -> Callable[[Sequence[float]], float]:
    """Percentile by nearest rank."""
    return lambda values: sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


ACROSS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "max": max,
    "min": min,
    "p50": _percentile(0.5),
    "p90": _percentile(0.9),
    "p95": _percentile(0.95),
    "p99": _percentile(0.99),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that a policy needs at each check.

    Attributes:
        name: Name of its samples. Without a query: a name that nodes report, or a shell pattern of it;
            ``gpu_utilization`` covers every GPU of a node, and ``cpu_utilization`` is ``cpu_percent``.
        query: The sensor sends it to Prometheus, and the sample counts for the whole stage (node 0); None:
            every node reports the metric.
        across: How the series of a query are reduced to one value.
    """

    name: str
    query: str | None = None
    across: Across = "mean"

    def matches(self, sampled: str) -> bool:
        """True when samples called *sampled* are of this metric."""
        if self.query is not None:
            return sampled == self.name
        if self.name == CPU_UTILIZATION:
            return sampled == "cpu_percent"
        general = re.sub(r"\Agpu\d+_", "gpu_", sampled)
        return general.removesuffix("_percent") == self.name or fnmatchcase(sampled, self.name)

    def sample(self, at_s: float, values: Iterable[float]) -> tuple[Sample, ...]:
        """One sample from the answer to the query, without NaN and infinities; None without a value."""
        known = [value for value in values if is_measured(value)]
        return (Sample(at_s, 0, self.name, ACROSS[self.across](known)),) if known else ()


@dataclass(frozen=True, slots=True)
class Answers:
    """Results of the queries of metrics.

    Attributes:
        samples: One for each query that was answered.
        unknown: Why a query has no value, by the name that its sample would have.
    """

    samples: tuple[Sample, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


def ask_metrics(metrics: Iterable[Metric], ask: Ask, *, at_s: float) -> Answers:
    """Run the query of each of *metrics* that has one, each query once.

    After a server fails to answer, the same check does not wait for it again.
    """
    samples: list[Sample] = []
    unknown: dict[str, str] = {}
    values: dict[str, Sequence[float]] = {}
    refused: dict[str, str] = {}
    away = ""
    for metric in metrics:
        if (query := metric.query) is None:
            continue
        if query not in values and query not in refused:
            try:
                if away:
                    refused[query] = away
                else:
                    values[query] = ask(query)
            except EnvScalerError as err:
                refused[query] = str(err)
                away = str(err) if isinstance(err, BackendError) and err.transient else ""
        found = metric.sample(at_s, values.get(query, ()))
        if not found:
            why = refused.get(query, "it answers no finite number")
            unknown[metric.name] = f"query {query!r:.200}: {why}"
        elif all(item.metric != metric.name for item in samples):
            samples += found
    return Answers(tuple(samples), unknown)
