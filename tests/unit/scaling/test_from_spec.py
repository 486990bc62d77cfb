"""The spec's scaling section as a policy."""

from __future__ import annotations

from typing import Any

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.planning import Speedup
from envscaler_airflow.scaling import Policy, ThresholdRule, policy_of
from envscaler_airflow.scaling.from_spec import speedups_of


def spec(**fields: Any) -> EnvSpec:
    """A spec with these fields."""
    return EnvSpec.model_validate({"version": "v1", "name": "train", "entrypoint": ["train"], **fields})


def test_a_spec_without_the_block_has_the_defaults():
    """One node, cost to finish, an hour between moves."""
    assert policy_of(spec(), value_of_hour=2.0) == Policy(value_of_hour=2.0)
    assert speedups_of(spec()) == ()


def test_the_bounds_are_the_spec_s():
    """num_nodes applies where the scaling section sets no limits."""
    got = policy_of(spec(num_nodes="2..4", scaling={"max_nodes": 8}, distributed={"model_parallel": 2}))

    assert (got.min_nodes, got.max_nodes, got.model_parallel) == (2, 8, 2)


def test_every_field_arrives():
    """Durations become seconds, and rules become rules."""
    block = {
        "policy": "threshold",
        "cooldown": "10m",
        "stabilization": "30s",
        "tolerance": 0.2,
        "min_epochs_between": 3,
        "max_moves": 5,
        "min_speed": 0.5,
        "recommend_only": True,
        "max_nodes": 4,
        "rules": [
            {"metric": "gpu_utilization", "above": 80, "for": "2m"},
            {"metric": "gpu_utilization", "below": 40, "for": "5 samples", "step": -2},
            {"metric": "free", "below": 10, "step": 1},
        ],
        "speedup": [
            {"offer": "local/cpu-2", "relative_to": "local/cpu-1", "mean": 1.7, "stdev": 0.2, "source": "me"}
        ],
    }
    got = spec(scaling=block)

    assert policy_of(got) == Policy(
        name="threshold",
        max_nodes=4,
        tolerance=0.2,
        stabilization_s=30,
        cooldown_s=600,
        min_epochs_between=3,
        max_moves=5,
        min_speed=0.5,
        recommend_only=True,
        rules=(
            ThresholdRule("gpu_utilization", above=80, below=None, samples=1, for_s=120),
            ThresholdRule("gpu_utilization", above=None, below=40, samples=5, step=2),
            ThresholdRule("free", above=None, below=10, step=-1),
        ),
    )
    assert speedups_of(got) == (Speedup("local/cpu-2", "local/cpu-1", 1.7, 0.2, "me"),)


def test_a_forecast_over_a_percentile_of_a_query_arrives():
    """Load above 85 for 2 m now and in 5 m, on nine of ten series, and all rules must agree."""
    rule = {
        "metric": "load",
        "prometheus": "node_load1",
        "above": 85,
        "for": "2m",
        "across": "p90",
        "ahead": "5m",
    }

    got = policy_of(spec(scaling={"policy": "threshold", "rules": [rule], "match": "all"}))

    assert got.match == "all"
    assert got.rules == (
        ThresholdRule(
            "load",
            above=85,
            below=None,
            samples=1,
            for_s=120,
            across="p90",
            ahead_s=300,
            query="node_load1",
        ),
    )
