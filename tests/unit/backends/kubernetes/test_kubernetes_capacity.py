"""Unit tests of capacity on a cluster: what fits at all, what fits now, and how many pods a Job may have."""

import attempts
import pytest

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.cluster_offers import (
    Capacity,
    derived_offers,
    free_nodes,
    requested,
    shortfall,
)
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_changes import (
    is_removable,
    rescale_patch,
)
from envscaler_airflow.backends.kubernetes.job_manifest import render_attempt
from envscaler_airflow.errors import BackendError
from envscaler_airflow.planning.offers import Allocation, AllocationPart, Offer


def node(name="n", *, cpu="8100m", memory="33024Mi", gpus=0, taints=(), labels=None):
    """Return a node of 8.1 CPUs, and of 32 GiB besides a sidecar's 256 MiB."""
    room = {"cpu": cpu, "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod(cpu, memory, *, gpus=None, on=None, phase="Running"):
    """Return a pod with its sidecar; GPUs are a limit, as Kubernetes requires."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    main = {"name": "main", "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}}
    beside = {"cpu": "100m", "memory": "256Mi"}
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": beside}}
    install = {"name": "install", "resources": {"requests": {"cpu": "50m"}}}
    spec = {"containers": [main], "initContainers": [install, sidecar], "nodeName": on}
    return {"spec": spec, "status": {"phase": phase}}


def offer_of(nodes, **fields):
    """Return the only offer of *nodes* with these fields."""
    offers = derived_offers(nodes, Settings())
    [found] = [one for one in offers if all(getattr(one, name) == value for name, value in fields.items())]
    return found


def test_what_runs_before_the_training_asks_for_itself_alone():
    """The larger request counts: that of the containers that run together, or of the one before them."""
    body = pod("200m", "1Gi")
    body["spec"]["initContainers"][0]["resources"]["requests"]["cpu"] = "2"

    assert requested(body) == Capacity(vcpus=2.0, memory_gib=1.25, gpus=0)
    assert requested(pod("200m", "1Gi")).vcpus == pytest.approx(0.3)


def test_more_than_all_nodes_can_never_be_had():
    """Two nodes of 8.1 CPUs fit two pods of 4.1, one each: pod requests count, not the share."""
    nodes = [node("a"), node("b")]
    four = offer_of(nodes, vcpus=4.0)
    whole, small = pod("4", "1Gi"), pod("200m", "128Mi")

    assert shortfall(whole, AllocationPart(four, 2), nodes, Settings()) is None
    assert shortfall(whole, AllocationPart(four, 3), nodes, Settings()) == (
        "cpu: 3 pods of 4.1 CPUs and 1.25 GiB asked; the cluster has capacity for 2"
    )
    assert shortfall(small, AllocationPart(four, 54), nodes, Settings()) is None
    assert shortfall(small, AllocationPart(four, 55), nodes, Settings()) is not None


def test_gpus_are_counted_by_their_limit():
    """Two pods of two GPUs on a node of four."""
    nodes = [node(gpus=4)]
    two = pod("1", "1Gi", gpus=2)

    found = [
        shortfall(two, AllocationPart(offer_of(nodes, gpus=2), count), nodes, Settings()) for count in (2, 3)
    ]

    assert found[0] is None
    assert found[1].startswith("cpu: 3 pods of 2 GPUs, 1.1 CPUs")


def test_what_others_hold_is_not_free():
    """Eight CPUs less three and a sidecar: four of one, two of two, one of four; ended pods use nothing."""
    nodes = [node()]
    pods = [pod("3", "1Gi", on="n"), pod("4", "1Gi", on="n", phase="Failed"), pod("4", "1Gi", on="elsewhere")]

    free = free_nodes(derived_offers(nodes, Settings()), nodes, pods, Settings())

    assert free == {
        "kubernetes/node:cpu-1/on-demand": 4,
        "kubernetes/node:cpu-2/on-demand": 2,
        "kubernetes/node:cpu-4/on-demand": 1,
        "kubernetes/node:cpu-8/on-demand": 0,
    }


def test_a_full_node_has_room_for_none():
    """Also if the others request more than the node has."""
    nodes = [node(cpu="1100m")]
    free = free_nodes(derived_offers(nodes, Settings()), nodes, [pod("4", "64Gi", on="n")], Settings())

    assert set(free.values()) == {0}


@pytest.mark.parametrize(
    ("taint", "gpus", "count"),
    [
        ({"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}, 0, 0),
        ({"key": "sku", "value": "gpu", "effect": "NoSchedule"}, 1, 1),
        ({"key": "sku", "value": "web", "effect": "NoSchedule"}, 1, 0),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, 1, 1),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, 0, 0),
        ({"key": "busy", "effect": "PreferNoSchedule"}, 0, 4),
    ],
)
def test_a_node_whose_taint_no_pod_of_ours_bears_is_no_offer(taint, gpus, count):
    """The control plane's taint; taints of GPU nodes only repel pods without GPUs."""
    assert len(derived_offers([node(gpus=gpus, taints=[taint])], Settings())) == count


def test_a_share_of_a_gpu_is_all_that_a_pod_gets():
    """There is no offer of two or four of them, and a share costs its part of the node (D13)."""
    labels = {"nvidia.com/gpu.product": "Tesla-T4-SHARED", "nvidia.com/gpu.replicas": "4"}

    offers = derived_offers([node(gpus=4, labels=labels)], Settings(usd_per_hour={"*": 1.0}))

    assert [(one.gpu_name, one.gpus, one.usd_per_hour) for one in offers] == [("T4-shared", 1, 0.25)]


@pytest.mark.parametrize("trouble", ["cordoned", "silent", "tainted"])
def test_nodes_that_take_nothing_now_are_offers_for_later(trouble):
    """For a stage that waits for a node; a control plane never counts (D2)."""
    taints = [{"key": "maintenance", "effect": "NoSchedule"}] if trouble == "tainted" else []
    away = node("away", taints=taints)
    away["spec"]["unschedulable"] = trouble == "cordoned"
    away["status"]["conditions"][0]["status"] = "Unknown" if trouble == "silent" else "True"
    ours = node("master", taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}])

    now, later = (derived_offers([away, ours], Settings(), is_later=is_later) for is_later in (False, True))

    assert now == ()
    assert [one.vcpus for one in later] == [1.0, 2.0, 4.0, 8.0]


SPEC = {"distributed": {"elastic": True}, "num_nodes": {"min": 1, "max": 4}}


@pytest.mark.parametrize(
    ("spec", "bound"),
    [
        (SPEC, 4),
        ({**SPEC, "scaling": {"max_nodes": 6}}, 6),
        ({**SPEC, "num_nodes": 1}, 2),
        ({**SPEC, "distributed": {"elastic": False}}, 2),
        ({}, 2),
    ],
)
def test_only_an_elastic_launcher_lets_nodes_come(spec, bound):
    """Started on two; as many as the spec allows, and never fewer than there are."""
    request = attempts.request(
        store_url="s3://store", run_prefix="d/g/r/t/-1", run_label="g.t", generation=1, attempt=1,
        allocation=Allocation(Offer("kubernetes", "", "node:cpu-1", "on-demand", 1, 1), nodes=2),
        command=("train",), spec=spec,
    )  # fmt: skip

    job = render_attempt(request, Settings(image="train:1"))["job"]

    assert int(job["metadata"]["labels"].get(names.MAX_NODES, "2")) == bound
    assert job["spec"]["backoffLimit"] == bound


@pytest.mark.parametrize(
    ("annotations", "spec", "is_first"),
    [
        (None, None, False),
        ({names.REMOVABLE: "true"}, None, True),
        ({names.REMOVABLE: "false"}, {}, False),
        (None, {"unschedulable": True}, True),
        (None, {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, True),
        (None, {"taints": [{"key": "DeletionCandidateOfClusterAutoscaler", "effect": "x"}]}, True),
        (None, {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, True),
        (None, {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, False),
    ],
)
def test_what_is_marked_or_stands_on_a_node_that_goes_leaves_first(annotations, spec, is_first):
    """A node that RBAC hides, or a taint that only repels new pods, does not count as a mark."""
    pod = {"metadata": {"annotations": annotations}}

    assert is_removable(pod, None if spec is None else {"spec": spec}) is is_first


def test_completions_and_parallelism_change_together():
    """If only one changes, Kubernetes refuses the first and misreads the second."""
    job = {"metadata": {"name": "j", "uid": "u", "labels": {names.MAX_NODES: "4"}}}

    assert rescale_patch(job, 3) == {
        "metadata": {"uid": "u", "labels": {names.NODES: "3"}},
        "spec": {"completions": 3, "parallelism": 3},
    }
    for nodes in (0, 5):
        with pytest.raises(BackendError, match="was made for 4"):
            rescale_patch(job, nodes)
    with pytest.raises(BackendError, match="was made for a fixed number"):
        rescale_patch({"metadata": {"name": "j", "uid": "u"}}, 1)
