"""Metrics of rules with a query, as samples of one check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.errors import BackendError, EnvScalerError
from envscaler_airflow.scaling.decision import Policy
from envscaler_airflow.scaling.observation import Sample
from envscaler_airflow.scaling.threshold import queried

Ask = Callable[[str], Sequence[float]]
"""Values now of every series that a query selects; raises an EnvScalerError where none can be told."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the rules' queries came to.

    Attributes:
        samples: One of each query that was answered.
        unknown: Why a query has no value, by the name that its sample would have.
    """

    samples: tuple[Sample, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


def ask_rules(policy: Policy, ask: Ask, *, at_s: float) -> Answers:
    """Ask for the metric of each rule of *policy* that has a query, each query once.

    A server that cannot be asked is not waited for a second time in the same check.
    """
    samples: list[Sample] = []
    unknown: dict[str, str] = {}
    values: dict[str, Sequence[float]] = {}
    refused: dict[str, str] = {}
    away = ""
    for rule in policy.rules:
        if (query := rule.query) is None:
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
        found = queried(at_s, rule, values.get(query, ()))
        if not found:
            why = refused.get(query, "it answers no finite number")
            unknown[rule.sampled_as] = f"query {query!r:.200}: {why}"
        elif all(item.metric != rule.sampled_as for item in samples):
            samples += found
    return Answers(tuple(samples), unknown)
