"""Nodes of a cluster as offers."""

from __future__ import annotations

import copy
import json

import pytest
from click.testing import CliRunner

from envscaler_airflow.catalog.nodes import node_offers, read_node
from envscaler_airflow.catalog.packaged import packaged
from envscaler_airflow.cli import main

PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
EKS = {
    "metadata": {
        "name": "ip-10-0-1-7",
        "labels": {
            "node.kubernetes.io/instance-type": "g5.xlarge",
            "topology.kubernetes.io/region": "us-east-1",
            "topology.kubernetes.io/zone": "us-east-1a",
            "kubernetes.io/arch": "amd64",
            "eks.amazonaws.com/nodegroup": "gpu",
            "eks.amazonaws.com/capacityType": "ON_DEMAND",
            "nvidia.com/gpu.product": "NVIDIA-A10G",
            "nvidia.com/gpu.memory": "23028",
        },
    },
    "spec": {"providerID": "aws:///us-east-1a/i-0123"},
    "status": {
        "capacity": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        "allocatable": {"cpu": "3920m", "memory": "15147812Ki", "nvidia.com/gpu": "1"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def node(**changes):
    """The EKS node with other labels, allocatable or spec."""
    made = copy.deepcopy(EKS)
    made["metadata"]["labels"] |= changes.pop("labels", {})
    made["status"]["allocatable"] |= changes.pop("allocatable", {})
    made["spec"] |= changes.pop("spec", {})
    made["metadata"]["name"] = changes.pop("name", made["metadata"]["name"])
    made["status"]["conditions"][0]["status"] = changes.pop("ready", "True")
    for label in changes.pop("without", ()):
        del made["metadata"]["labels"][label]
    assert not changes
    return made


@pytest.mark.parametrize(
    ("provider_id", "cloud"),
    [
        ("aws:///us-east-1a/i-0123", "aws"),
        ("gce://project/us-central1-a/vm", "gcp"),
        ("azure:///subscriptions/s/resourceGroups/g", "azure"),
        ("alicloud://cn-beijing.i-1", "alibaba"),
        ("qcloud:///800001/ins-1", "tencent"),
        ("kind://docker/kind/kind-worker", None),
        ("", None),
    ],
)
def test_the_cloud_of_a_node_is_that_of_its_provider_id(provider_id, cloud):
    """The catalog's name of the cloud; empty for the user's own machines."""
    assert read_node(node(spec={"providerID": provider_id})).cloud == cloud


def test_a_node_is_what_can_be_allocated_on_it_at_the_clouds_price():
    """3.92 of 4 CPUs, the vendor's 24 GB, and the list price of a g5.xlarge in us-east-1."""
    (offer,) = node_offers([EKS], prices=packaged())

    assert offer.name == "kubernetes/us-east-1/us-east-1a/g5.xlarge/on-demand"
    assert read_node(EKS).pool == "gpu"
    assert (offer.vcpus, round(offer.memory_gib, 2), offer.arch) == (3.92, 14.45, "x86_64")
    assert (offer.gpu_name, offer.gpus, offer.gpu_memory_gb) == ("A10G", 1, 24)
    assert offer.usd_per_hour == 1.006
    assert offer.price_source == "as aws g5.xlarge: AWS list price of 2026-07-20"


@pytest.mark.parametrize(
    "labels",
    [
        {"eks.amazonaws.com/capacityType": "SPOT"},
        {"karpenter.sh/capacity-type": "spot"},
        {"cloud.google.com/gke-spot": "true"},
        {"cloud.google.com/gke-provisioning": "spot"},
        {"kubernetes.azure.com/scalesetpriority": "spot"},
    ],
)
def test_spot_is_told_by_every_clouds_label(labels):
    """Karpenter, EKS, GKE, AKS; an unpublished spot price is unknown, not the on-demand one."""
    (offer,) = node_offers([node(labels=labels)], prices=packaged())

    assert offer.capacity_type == "spot"
    assert offer.usd_per_hour is None


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({PRODUCT: "NVIDIA-A100-SXM4-80GB", MEMORY: "81920"}, ("A100-80GB", 80)),
        ({PRODUCT: "NVIDIA-H100-80GB-HBM3", MEMORY: "81559"}, ("H100", 80)),
        ({PRODUCT: "Tesla-T4", MEMORY: "15360"}, ("T4", 16)),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-v100"}, ("V100", 16)),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, ("L4", 24)),
        ({"karpenter.k8s.aws/instance-gpu-name": "a10g"}, ("A10G", 24)),
    ],
)  # fmt: skip
def test_gpus_are_told_by_every_convention(labels, expected):
    """Feature discovery, GKE, Karpenter."""
    other = node(without=["nvidia.com/gpu.product", "nvidia.com/gpu.memory"])
    other["metadata"]["labels"] |= labels

    (offer,) = node_offers([other])

    assert (offer.gpu_name, offer.gpu_memory_gb) == expected


def test_a_gpu_without_a_label_has_no_name_that_would_fit():
    """It counts as a GPU of unknown type."""
    (offer,) = node_offers([node(without=["nvidia.com/gpu.product", "nvidia.com/gpu.memory"])])

    assert (offer.gpu_name, offer.gpus, offer.gpu_memory_gb) == ("GPU", 1, None)


def test_nodes_that_are_alike_are_one_offer_of_the_smallest():
    """What fits on each of them."""
    (offer,) = node_offers([EKS, node(name="b", allocatable={"memory": "15000000Ki"})])

    assert round(offer.memory_gib, 2) == 14.31


def test_a_node_whose_gpus_are_not_up_yet_tells_nothing_of_its_type():
    """The device plugin starts minutes after the node; the offer is of nodes that have it."""
    fresh = node(name="fresh", without=(PRODUCT, MEMORY))
    del fresh["status"]["allocatable"]["nvidia.com/gpu"]

    for nodes in ([EKS, fresh], [fresh, EKS]):
        assert [(offer.gpu_name, offer.gpus) for offer in node_offers(nodes)] == [("A10G", 1)]
    assert [offer.gpus for offer in node_offers([fresh])] == [0]


def test_alike_nodes_of_two_pools_cost_what_the_dearer_does():
    """The node that a pod lands on is unknown; so is the price if that of one node is."""
    other = node(name="other", labels={"eks.amazonaws.com/nodegroup": "dear"})

    for nodes in ([EKS, other], [other, EKS]):
        (offer,) = node_offers(nodes, cluster_prices={"gpu": 1.0, "dear": 5.0})
        (unknown,) = node_offers(nodes, cluster_prices={"gpu": 1.0})

        assert (offer.usd_per_hour, offer.price_source) == (5.0, "cluster_prices[dear]")
        assert unknown.usd_per_hour is None


@pytest.mark.parametrize(
    "broken",
    [
        node(spec={"unschedulable": True}),
        node(ready="Unknown"),
        node(ready="False"),
        node(allocatable={"cpu": "0"}),
        node(allocatable={"memory": "lots"}),
        {"metadata": {"name": "x"}, "spec": {}, "status": {}},
        {},
    ],
)
def test_a_node_that_takes_nothing_is_no_offer(broken):
    """A node that is cordoned, not ready, or malformed."""
    assert node_offers([broken]) == []


def test_a_node_that_does_not_say_its_region_has_no_price_of_the_cloud():
    """Prices differ by region: that of the cheapest one would be a guess."""
    lost = node(without=("topology.kubernetes.io/region", "topology.kubernetes.io/zone"))

    (offer,) = node_offers([lost], prices=packaged())
    (own,) = node_offers([lost], prices=packaged(), cluster_prices={"g5.xlarge": 2.0})

    assert (offer.usd_per_hour, own.usd_per_hour) == (None, 2.0)


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "cpu", "memory"])
def test_an_amount_beyond_all_sense_is_none(resource):
    """It has more digits than a number can have."""
    found = node_offers([node(allocatable={resource: "9" * 400})])

    assert [(offer.gpus, offer.gpu_name) for offer in found] == (
        [(0, None)] if resource == "nvidia.com/gpu" else []
    )


def test_ones_own_prices_go_before_the_clouds():
    """By pool, by type, or for all; 0 is a valid price here."""
    bare = node(spec={"providerID": "kind://docker/x"}, without=["eks.amazonaws.com/nodegroup"])

    assert node_offers([EKS], prices=packaged(), cluster_prices={"gpu": 0.3})[0].usd_per_hour == 0.3
    assert node_offers([bare], cluster_prices={"g5.xlarge": 0.2})[0].usd_per_hour == 0.2
    assert node_offers([bare], cluster_prices={"*": 0.0})[0].usd_per_hour == 0.0
    assert node_offers([bare], prices=packaged())[0].usd_per_hour is None


def test_a_node_without_labels_is_named_by_its_size():
    """In the user's own cluster."""
    plain = {
        "metadata": {"name": "n"},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "64", "memory": "68719476736"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }

    (offer,) = node_offers([plain])

    assert offer.name == "kubernetes/node-64cpu-64gib/on-demand"


def shared_t4(**labels):
    """A node with one T4 that four pods share; *labels* describe how."""
    found = node(without=[PRODUCT, MEMORY], allocatable={"nvidia.com/gpu": "4"})
    found["metadata"]["labels"] |= labels
    return found


GKE = {
    "cloud.google.com/gke-accelerator": "nvidia-tesla-t4",
    "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
    "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
}
NFD = {PRODUCT: "Tesla-T4", MEMORY: "15360", "nvidia.com/gpu.count": "1"}


@pytest.mark.parametrize(
    "labels",
    [
        NFD | {PRODUCT: "Tesla-T4-SHARED", "nvidia.com/gpu.replicas": "4"},
        NFD | {"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.replicas": "4"},
        NFD,
        GKE,
        GKE | {"cloud.google.com/gke-gpu-sharing-strategy": "mps"},
        {"karpenter.k8s.aws/instance-gpu-name": "t4", "karpenter.k8s.aws/instance-gpu-count": "1"},
    ],
    ids=["time-slicing", "mps", "count-alone", "gke-time-sharing", "gke-mps", "karpenter"],
)
def test_a_shared_gpu_is_one_share_under_a_name_of_its_own(labels):
    """Four pods may use it, and none of them gets four, nor a T4 of its own (D13)."""
    (offer,) = node_offers([shared_t4(**labels)])

    assert (offer.gpu_name, offer.gpus, offer.gpu_memory_gb) == ("T4-shared", 1, 4.0)


@pytest.mark.parametrize(
    ("labels", "name", "gib"),
    [
        (
            {PRODUCT: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", MEMORY: "4864", "nvidia.com/gpu.count": "7"},
            "A100-MIG-1g.5gb",
            5.0,
        ),
        (
            {
                "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
                "cloud.google.com/gke-accelerator-count": "1",
                "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
            },
            "A100-MIG-1g.5gb",
            5.0,
        ),
    ],
    ids=["feature-discovery", "gke"],
)
def test_slices_of_a_gpu_are_none_of_the_whole_one(labels, name, gib):
    """Seven MIG devices are seven small GPUs, each with its own memory (D13)."""
    found = node(without=[PRODUCT, MEMORY], allocatable={"nvidia.com/gpu": "7"})
    found["metadata"]["labels"] |= labels

    (offer,) = node_offers([found])

    assert (offer.gpu_name, offer.gpus, offer.gpu_memory_gb) == (name, 7, gib)


TAINT = {"key": "dedicated", "value": "web", "effect": "NoSchedule"}


def tainted(key, value="", effect="NoSchedule"):
    """The spec of a node with one taint."""
    return {"taints": [{"key": key, "value": value, "effect": effect}]}


@pytest.mark.parametrize(
    "other",
    [
        {"spec": tainted("virtual-kubelet.io/provider", "azure"), "allocatable": {"cpu": "10000"}},
        {"labels": {"type": "virtual-kubelet"}, "allocatable": {"cpu": "10000"}},
        {"labels": {"eks.amazonaws.com/compute-type": "fargate"}},
        {"spec": tainted("node-role.kubernetes.io/control-plane")},
        {"spec": tainted("dedicated", "web", "NoExecute")},
        {"labels": {"kubernetes.io/os": "windows"}},
        {"labels": {"kubernetes.io/arch": "s390x"}},
        {"allocatable": {"pods": "0"}},
    ],
)
def test_a_node_that_no_pod_of_ours_runs_on_is_no_offer(other):
    """Its reported size does not matter (D13)."""
    labels = {"eks.amazonaws.com/nodegroup": "dear"} | other.pop("labels", {})
    prices = {"gpu": 1.0, "dear": 5.0}

    (offer,) = node_offers([EKS, node(name="other", labels=labels, **other)], cluster_prices=prices)

    assert offer.usd_per_hour == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        tainted("nvidia.com/gpu", "present"),
        tainted("busy", effect="PreferNoSchedule"),
    ],
)
def test_a_taint_that_our_pods_bear_keeps_no_offer_off(spec):
    """Taints of GPU nodes, and one with PreferNoSchedule."""
    assert len(node_offers([node(spec=spec)])) == 1


def test_a_stage_for_two_gpus_finds_none_on_one_that_is_shared(tmp_path, monkeypatch):
    """The plan names what is available instead (D13)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    (tmp_path / "s.yaml").write_text(
        "{version: v1, name: x, resources: {requests: {gpu: {type: T4, count: 2}}}, entrypoint: [a]}"
    )
    shared = shared_t4(**NFD, **{"nvidia.com/gpu.replicas": "4"})
    words = ["plan", "-f", str(tmp_path / "s.yaml"), "--nodes", "-", "--node-price", "*=1"]

    got = CliRunner().invoke(main, words, input=json.dumps({"items": [shared]}))

    assert got.exit_code != 0
    assert "no offer fits" in got.output
    assert "T4-shared" in got.output


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """``offers --nodes`` on the output of ``kubectl get nodes -o json``."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))

    def run(text, *more):
        return CliRunner().invoke(main, ["offers", "--nodes", "-", *more], input=text)

    return run


def test_the_shell_lists_a_clusters_nodes_at_the_clouds_price(shell):
    """The spot node has no published price; the user's own price precedes the cloud's (feature B1)."""
    spot = node(name="b", labels={"eks.amazonaws.com/capacityType": "SPOT"})
    text = json.dumps({"kind": "List", "items": [EKS, spot]})

    got = json.loads(shell(text, "--json").output)
    own = json.loads(shell(text, "--json", "--node-price", "gpu=0.25").output)

    assert [(item["capacity_type"], item["usd_per_node_hour"]) for item in got["offers"]] == [
        ("on-demand", 1.006),
        ("spot", None),
    ]
    assert got["offers"][0]["price_source"].startswith("as aws g5.xlarge: AWS list price")
    assert got["label"].startswith("nodes of a cluster")
    assert {item["usd_per_node_hour"] for item in own["offers"]} == {0.25}
    assert {item["price_source"] for item in own["offers"]} == {"cluster_prices[gpu]"}


def test_a_stage_is_planned_on_a_cluster(tmp_path, monkeypatch):
    """Allocatable resources decide: a pod of 16 GiB does not fit on a node of 16 GiB."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    (tmp_path / "s.yaml").write_text(
        "{version: v1, name: x, resources: {requests: {memory: 16Gi, gpu: {count: 1}}}, entrypoint: [a]}"
    )
    large = node(
        name="b", labels={"node.kubernetes.io/instance-type": "g5.2xlarge"}, allocatable={"memory": "30Gi"}
    )
    words = ["plan", "-f", str(tmp_path / "s.yaml"), "--nodes", "-", "--json"]

    got = CliRunner().invoke(main, words, input=json.dumps({"items": [EKS, large]}))

    body = json.loads(got.stdout)
    assert [item["instance_type"] for item in body["candidates"]] == ["g5.2xlarge"]
    assert body["rejected"][0]["reason"] == "has 14.4461 GiB, 16 asked"


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("{", (), "kubectl get nodes"),
        ("[]", (), "kubectl get nodes"),
        ('{"items": 3}', (), "kubectl get nodes"),
        ('{"items": [3]}', (), "kubectl get nodes"),
        ('{"items": []}', (), "there is no node"),
        (json.dumps(node(ready="False")), (), "1 is cordoned or not ready"),
        (
            json.dumps({"items": [node(ready="False"), node(spec={"taints": [TAINT]})]}),
            (),
            "no node there takes pods of stages: 1 is cordoned or not ready, 1 has the taint dedicated=web",
        ),
        (json.dumps(node(labels={"type": "virtual-kubelet"})), (), "1 is not a Linux machine"),
        (json.dumps(EKS), ("--node-price", "gpu"), "POOL=USD"),
        (json.dumps(EKS), ("--node-price", "gpu=nan"), "POOL=USD"),
        (json.dumps(EKS), ("--node-price", "gpu=-1"), "POOL=USD"),
        (json.dumps(EKS), ("--node-price", "gpu=1e308"), "POOL=USD"),
        (json.dumps(EKS), ("--node-price", "=1"), "POOL=USD"),
        (json.dumps(EKS), ("--node-price", "gp=1"), "no node there is of gp; there are g5.xlarge, gpu"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused(shell, text, more, words):
    """The error names what to write, and what keeps pods off the nodes there (D13)."""
    got = shell(text, *more)

    assert got.exit_code != 0
    assert words in got.output
