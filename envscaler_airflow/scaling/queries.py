"""Metrics that a policy needs at each check, and the answers of those that have a query."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from envscaler_airflow.errors import BackendError, EnvScalerError
from envscaler_airflow.scaling.observation import Sample, is_measured

Across = Literal["mean", "max", "min", "p50", "p90", "p95", "p99"]

Ask = Callable[[str], Sequence[float]]
"""Values now of every series that a query selects; raises an EnvScalerError where none can be told."""

CPU_UTILIZATION = "cpu_utilization"
"""``cpu_percent``, which is 100 for each busy core, over the cores of a node."""


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of one or more values."""
    return math.fsum(values) / len(values)


def _percentile(part: float) -> Callable[[Sequence[float]], float]:
    """Nearest rank."""
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
        name: What its samples are called. Without a query: as nodes report it, or a shell pattern of that;
            ``gpu_utilization`` is that of every GPU of a node, ``cpu_utilization`` is ``cpu_percent``.
        query: The sensor asks Prometheus for it, and its sample counts for the whole stage (node 0);
            None: every node reports it.
        across: How the series of a query become one value.
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
        """One sample of what the query answered, without NaN and infinities; no value is no sample."""
        known = [value for value in values if is_measured(value)]
        return (Sample(at_s, 0, self.name, ACROSS[self.across](known)),) if known else ()


@dataclass(frozen=True, slots=True)
class Answers:
    """What the queries of metrics came to.

    Attributes:
        samples: One of each query that was answered.
        unknown: Why a query has no value, by the name that its sample would have.
    """

    samples: tuple[Sample, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


def ask_metrics(metrics: Iterable[Metric], ask: Ask, *, at_s: float) -> Answers:
    """Ask for each of *metrics* that has a query, each query once.

    A server that cannot be asked is not waited for a second time in the same check.
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
