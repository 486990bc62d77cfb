"""Parts of GPUs on a cluster: which pods get them, and how a pod requests them."""

from __future__ import annotations

import pytest
from fakes.kubernetes import PODS
from integration.kubernetes.rig import running

from envscaler_airflow.errors import NoOfferError

LABELS = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960"}
RESOURCES = [
    ("nvidia.com/mig-1g.5gb", "A100-MIG-1g.5gb"),
    ("nvidia.com/gpu.shared", "A100-shared"),
]


def needing(**gpu):
    """A small stage with such a GPU."""
    return {"resources": {"requests": {"cpu": "1", "memory": "64Mi", "gpu": {"count": 1, **gpu}}}}


@pytest.mark.parametrize(("resource", "name"), RESOURCES)
def test_a_stage_that_names_a_part_of_a_gpu_gets_it(cluster, stage, resource, name):
    """Its pod requests the node's resource of that name (D13)."""
    cluster.add_node("gpus", gpus=7, gpu=resource, labels=LABELS)
    run = stage(**needing(type=[name]))

    run.begin()

    [pod] = cluster.list(PODS, "default")
    [main] = [one for one in pod["spec"]["containers"] if one["name"] == "main"]
    assert (pod["spec"]["nodeName"], main["resources"]["limits"][resource]) == ("gpus", "1")
    assert run.state.live.allocation.offer.gpu_name == name


@pytest.mark.parametrize(("resource", "name"), RESOURCES)
def test_a_stage_for_a_gpu_is_told_that_there_are_parts_alone(cluster, stage, resource, name):
    """Nothing starts, and the message names the fix (D13)."""
    cluster.add_node("gpus", gpus=7, gpu=resource, labels=LABELS)

    with pytest.raises(NoOfferError, match=f"{name} is a part of a GPU; write gpu.type: {name}"):
        stage(**needing()).owner.enter()

    assert cluster.list(PODS, "default") == []


def test_gpus_of_one_resource_take_none_of_another(cluster, stage):
    """Two whole ones are in use, and the MIG instances beside them are free (D13)."""
    node = cluster.add_node("gpus", cpu="64", memory="256Gi", gpus=2, labels=LABELS)
    slices = {"nvidia.com/mig-1g.5gb": "7"}
    node.edit(lambda body: body["status"]["allocatable"].update(slices))
    node.edit(lambda body: body["status"]["capacity"].update(slices))
    run = stage(**needing(type=["A100"]))
    run.begin()

    free = run.backend.free_nodes(run.backend.offers())

    by_gpu = {
        name.partition(":")[2].partition("/")[0]: count for name, count in free.items() if "gpu." in name
    }
    assert (by_gpu["gpu-1"], by_gpu["gpu-2"], by_gpu["mig-1g.5gb-1"]) == (1, 0, 7)
    running(run.backend, run.handle)
