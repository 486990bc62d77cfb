"""Metrics that a policy needs at each check, and the answers to those that have a query."""

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
