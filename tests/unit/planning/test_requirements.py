"""What a spec requires from a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.planning import (
    Allocation,
    Offer,
    Requirements,
    feasible,
    is_ordered,
    misfits,
    plan,
    requirements_of,
)

A100 = Offer("aws", "us-east-1", "p4de", "on-demand", 12, 85, "us-east-1a", "A100-80GB", 1, 80, 4.0)
T4 = Offer("aws", "us-east-1", "g4dn", "on-demand", 4, 16, None, "T4", 1, 16, 0.5)
CPU = Offer("local", "", "cpu-1", "on-demand", 1, 4, usd_per_hour=0.1)


def spec(resources: dict[str, Any], **fields: Any) -> EnvSpec:
    """A spec with these resources."""
    return EnvSpec.model_validate(
        {"version": "v1", "name": "train", "entrypoint": ["train"], "resources": resources, **fields}
    )


def test_every_need_arrives():
    """Quantities are numbers, and missing fields require nothing."""
    gpu = {"count": 2, "type": ["A100-80GB"], "memory": "80Gi", "memory_max": "100GB"}
    got = spec(
        {
            "requests": {"cpu": "500m", "memory": "32Gi", "gpu": gpu},
            "cloud": "aws",
            "region": "us-east-1",
            "capacity": "spot",
        },
        num_nodes="1..4",
        checkpoint={"path": "/out"},
        distributed={"model_parallel": 4},
    )

    assert requirements_of(got) == (
        Requirements(
            vcpus=0.5,
            memory_gib=32,
            gpus=2,
            gpu_types=("A100-80GB",),
            gpu_memory_gb=80,
            gpu_memory_max_gb=100,
            cloud="aws",
            region="us-east-1",
            max_nodes=4,
            capacity="spot",
            model_parallel=4,
        ),
    )
    assert requirements_of(spec({})) == (Requirements(can_checkpoint=False),)


def test_alternatives_are_each_complete():
    """Two alternatives give two requirements, without order."""
    got = spec({"any_of": [{"requests": {"cpu": 4}}, {"requests": {"cpu": 8}, "cloud": "gcp"}]})

    assert [(item.vcpus, item.cloud) for item in requirements_of(got)] == [(4, None), (8, "gcp")]
    assert not is_ordered(got)


def test_a_cpu_will_do_when_no_gpu_can_be_had():
    """cpu_fallback is a second choice, not a cheaper one."""
    got = spec({"requests": {"gpu": {"count": 1, "type": "T4"}}, "cpu_fallback": True})
    needs = requirements_of(got)

    assert [item.gpus for item in needs] == [1, 0]
    assert is_ordered(got)
    assert plan(needs, [CPU, T4], is_ordered=True).pick().offer == T4
    assert plan(needs, [CPU], is_ordered=True).pick().offer == CPU


def test_an_offer_that_meets_any_alternative_will_do():
    """A small T4 or a large A100."""
    needs = (Requirements(gpus=1, gpu_types=("A100-80GB",)), Requirements(gpus=1, gpu_types=("T4",)))

    assert [item.allocation.offer for item in plan(needs, [CPU, A100, T4]).candidates] == [T4, A100]
    assert plan(needs, [CPU]).rejected[0].reason == "has 0 GPUs, 1 asked"
    assert plan(needs, [CPU], is_ordered=True).chosen is None
    with pytest.raises(ValueError, match="none given"):
        plan((), [CPU])


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"cloud": "gcp"}, "cloud is aws, gcp asked"),
        ({"region": "eu-west-1"}, "region is us-east-1, eu-west-1 asked"),
        ({"zone": "us-east-1b"}, "zone is us-east-1a, us-east-1b asked"),
        ({"instance_type": "p5"}, "instance_type is p4de, p5 asked"),
    ],
)
def test_a_place_is_a_need(place, reason):
    """A named place is the only one allowed."""
    assert [item.reason for item in misfits(Requirements(**place), A100)] == [reason]


def test_an_offer_without_a_zone_can_be_had_in_any():
    """The provider chooses the zone, or we do."""
    assert misfits(Requirements(zone="us-east-1b"), T4) == ()


def test_gpu_memory_has_an_upper_bound_too():
    """At most 24 GB: no A100."""
    needs = Requirements(gpus=1, gpu_memory_max_gb=24)

    assert misfits(needs, T4) == ()
    assert misfits(needs, A100)[0].reason == "has 80 GB of GPU memory, at most 24 asked"
    assert "unknown, at most 24 GB asked" in misfits(needs, replace(A100, gpu_memory_gb=None))[0].reason


def test_only_whole_model_parallel_groups_are_candidates():
    """A model on two GPUs: two or four single-GPU nodes, not one or three."""
    got = plan(Requirements(gpus=1, max_nodes=4, model_parallel=2), [T4])

    assert [item.allocation.nodes for item in got.candidates] == [2, 4]
    alone = plan(Requirements(gpus=1, model_parallel=2), [T4])
    assert alone.rejected[0].reason == "no number of nodes makes up complete model-parallel groups of 2 GPUs"


def test_while_running_the_nodes_are_those_of_scaling():
    """It starts on one node, and may move to two or three."""
    got = spec({}, num_nodes=1, scaling={"max_nodes": 3})

    assert feasible(requirements_of(got), [CPU]) == (Allocation(CPU, 1),)
    assert [item.nodes for item in feasible(requirements_of(got, while_running=True), [CPU])] == [1, 2, 3]
