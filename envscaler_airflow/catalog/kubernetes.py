"""Nodes of a Kubernetes cluster as offers: a pure function of node objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.catalog.gpus import canonical_gpu, nominal_memory_gb
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.offers import CapacityType, Offer
from envscaler_airflow.planning.requirements import Requirements
from envscaler_airflow.planning.table import OfferTable
from envscaler_airflow.spec.gpus import MEMORY_GB

GIB = 2**30
_TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_REGION = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
_ZONE = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
_POOL = (
    "karpenter.sh/nodepool",
    "eks.amazonaws.com/nodegroup",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
)
SPOT_LABELS: Mapping[str, tuple[str, str]] = {
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "gke": ("cloud.google.com/gke-spot", "true"),
    "gke-provisioning": ("cloud.google.com/gke-provisioning", "spot"),
    "gke-preemptible": ("cloud.google.com/gke-preemptible", "true"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
    "plain": ("envscaler.io/capacity-type", "spot"),
}
"""Labels that say spot. Source: documentation of EKS, Karpenter, GKE, AKS; the last is ours."""

GPU_PRODUCT = "nvidia.com/gpu.product"
"""Source: NVIDIA GPU feature discovery."""
_GPU_NAME = (
    GPU_PRODUCT,
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
    "kubernetes.azure.com/accelerator-name",
)
_GPU_MIB = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_CLOUDS = {"aws": "aws", "gce": "gcp", "azure": "azure", "alicloud": "alibaba", "qcloud": "tencent"}
_ARCHES = {"amd64": "x86_64", "arm64": "arm64"}
UNNAMED_GPU = "GPU"
"""Name of a GPU that no label names: GPU feature discovery is not installed there."""

GPU_TAINTS: tuple[tuple[str, str | None], ...] = (
    ("nvidia.com/gpu", None),
    ("amd.com/gpu", None),
    ("sku", "gpu"),
)
"""Taints that keep other pods off GPU nodes: GKE and the GPU operator, AMD's, AKS' documented one."""
SPOT_TAINTED = ("gke", "aks")
"""Conventions of :data:`SPOT_LABELS` by which spot nodes bear the same as a taint. Source: GKE, AKS."""
_SHARED = "-SHARED"
_STRATEGY = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")
_SHARES = ("nvidia.com/gpu.replicas", "cloud.google.com/gke-max-shared-clients-per-gpu")
"""How a device plugin offers one GPU to several pods: time slicing or MPS, and to how many.

Source: NVIDIA device plugin for Kubernetes, "Shared access to GPUs", and GPU feature discovery; GKE, "Share
GPUs with multiple workloads". A pod gets one share, whatever it asks for: more is refused, or no more time.
"""
_REAL_GPUS = (
    "nvidia.com/gpu.count",
    "karpenter.k8s.aws/instance-gpu-count",
    "eks.amazonaws.com/instance-gpu-count",
    "cloud.google.com/gke-accelerator-count",
)
"""GPUs that the machine has, whatever its device plugin counts. Of MIG slices the first counts the slices."""
_PARTITION = "cloud.google.com/gke-gpu-partition-size"
_MIG = re.compile(r"\d+g\.(\d+)gb", re.IGNORECASE)
"""A MIG profile: slices of compute and GB. Source: NVIDIA Multi-Instance GPU user guide."""
_VIRTUAL = (("type", "virtual-kubelet"), ("eks.amazonaws.com/compute-type", "fargate"))
"""Labels of nodes that are not machines. Source: Virtual Kubelet; EKS Fargate."""

_MOST = 2.0**60
"""Amounts from here on are none of a node. Chosen: an exbibyte, in bytes."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)\Z")
_SUFFIXES = {
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate(("n", "u", "m"), start=-3)},
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", start=1)},
}


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """What a node object says that counts for whoever puts pods there.

    Attributes:
        name: Of the node.
        vcpus, memory_gib, gpus: What can be allocated; 0 where the object does not say it readably.
        is_usable: It takes pods: not cordoned, and not said to be unready.
        capacity_type: By the labels of any convention.
        instance_type, region, zone, pool: None where no label says it.
        cloud: As the catalog names it, by the node's provider; None for another, or none.
        arch: As an offer names it.
        gpu_name: Canonical; :data:`UNNAMED_GPU` where no label names it; None without GPU.
        gpu_product: As feature discovery says it.
        gpu_memory_gb: Nominal; of a shared GPU the part of one share.
        gpu_shares: Pods that a GPU is shared by; 1 for none.
        runs_linux: False for a node of another system or architecture, and for a virtual node.
    """

    name: str
    vcpus: float
    memory_gib: float
    gpus: int
    is_usable: bool
    capacity_type: CapacityType
    instance_type: str | None = None
    region: str | None = None
    zone: str | None = None
    pool: str | None = None
    cloud: str | None = None
    arch: str | None = None
    gpu_name: str | None = None
    gpu_product: str | None = None
    gpu_memory_gb: float | None = None
    gpu_shares: int = 1
    runs_linux: bool = True

    @property
    def pod_gpus(self) -> int:
        """GPUs, or the one share, that a pod of ours gets at most."""
        return min(1, self.gpus) if self.gpu_shares > 1 else self.gpus


@dataclass(frozen=True, slots=True)
class NodePool:
    """Nodes that are alike.

    Attributes:
        offer: One of them: what can be allocated on the smallest, at the owner's or the cloud's price.
        nodes: How many there are.
        names: Of the nodes.
        pool: Name of the node pool, where a label says it.
    """

    offer: Offer
    nodes: int
    names: tuple[str, ...]
    pool: str | None = None


def quantity(text: str) -> float:
    """Value of a Kubernetes quantity as a server writes it: ``3920m``, ``16Gi``, ``8``.

    Raises:
        ValueError: It is none.

    Source: Kubernetes API reference, Quantity.
    """
    found = _QUANTITY.match(text)
    if found is None:
        raise ValueError(f"{text!r:.60} is no quantity")
    number, exponent, suffix = found.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _SUFFIXES.get(suffix, 1.0))


def read_node(node: Mapping[str, Any]) -> ClusterNode:
    """What *node* says, as the API server gives it."""
    meta, spec, status = (node.get(part) or {} for part in ("metadata", "spec", "status"))
    found, labels = status.get("allocatable") or {}, meta.get("labels") or {}
    gpus = int(sum(_amount(found.get(resource)) for resource in GPU_RESOURCES))
    shares = _shares(labels, gpus)
    name, gpu_gb = _gpu(labels, shares) if gpus else (None, None)
    conditions = status.get("conditions") or ()
    ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "True")
    return ClusterNode(
        name=str(meta.get("name", "")),
        vcpus=_amount(found.get("cpu")),
        memory_gib=_amount(found.get("memory")) / GIB,
        gpus=gpus,
        is_usable=ready == "True" and not spec.get("unschedulable"),
        capacity_type="spot" if _is_spot(labels) else "on-demand",
        instance_type=_first(labels, _TYPE),
        region=_first(labels, _REGION),
        zone=_first(labels, _ZONE),
        pool=_first(labels, _POOL),
        cloud=_CLOUDS.get(str(spec.get("providerID", "")).partition(":")[0]),
        arch=_ARCHES.get(labels.get("kubernetes.io/arch", "")),
        gpu_name=name,
        gpu_product=labels.get(GPU_PRODUCT) if gpus else None,
        gpu_memory_gb=gpu_gb,
        gpu_shares=shares,
        runs_linux=_runs_linux(labels, found),
    )


def bears(taint: Mapping[str, Any], node: ClusterNode) -> bool:
    """True when pods of ours that suit *node* bear that taint of it, or it keeps none off."""
    if taint.get("effect") not in ("NoSchedule", "NoExecute"):
        return True
    key, value = taint.get("key"), taint.get("value")
    borne = list(GPU_TAINTS) if node.gpus else []
    if node.capacity_type == "spot":
        borne += [SPOT_LABELS[name] for name in SPOT_TAINTED]
    return any(key == one and (wanted is None or value == wanted) for one, wanted in borne)


def _runs_linux(labels: Mapping[str, str], allocatable: Mapping[str, Any]) -> bool:
    """True for a machine with Linux on an architecture of ours that may hold a pod; as far as it says."""
    arch = labels.get("kubernetes.io/arch", "")
    is_ours = labels.get("kubernetes.io/os", "linux") == "linux" and (not arch or arch in _ARCHES)
    is_virtual = any(labels.get(key) == value for key, value in _VIRTUAL)
    return is_ours and not is_virtual and str(allocatable.get("pods", "")) != "0"


def _shares(labels: Mapping[str, str], gpus: int) -> int:
    """Pods that each GPU of the node is shared by."""
    told = int(text) if (text := _first(labels, _SHARES)) and text.isdigit() else 1
    strategy = _first(labels, _STRATEGY)
    real = int(text) if (text := _first(labels, _REAL_GPUS)) and text.isdigit() else None
    product = labels.get(GPU_PRODUCT, "")
    is_shared = product.endswith(_SHARED) or strategy in ("time-slicing", "time-sharing", "mps")
    is_more = real is not None and gpus > real > 0 and "-MIG-" not in product and _PARTITION not in labels
    if not is_shared and not is_more:
        return max(1, told)
    by_count = gpus // real if real and gpus > real else 2
    return told if told > 1 else by_count


def node_pools(
    nodes: Iterable[Mapping[str, Any]],
    *,
    prices: OfferTable | None = None,
    cluster_prices: Mapping[str, float] | None = None,
) -> list[NodePool]:
    """Schedulable nodes by place, type, capacity type and GPU.

    Args:
        nodes: Node objects as the API server gives them. Those that are cordoned or not ready are left out,
            and those on which no pod of ours would run: for their taints, system or architecture.
        prices: Offers of clouds: the price of a node of the same instance type, region and capacity type.
        cluster_prices: USD an hour of a node by pool, instance type or ``*``: what one pays oneself. These
            go before the clouds'.

    Returns:
        Pools by offer name. A price that neither tells is unknown.
    """
    alike: dict[tuple[str, str | None], list[tuple[Offer, ClusterNode]]] = {}
    for item in nodes:
        node = read_node(item)
        taints = (item.get("spec") or {}).get("taints") or ()
        if not node.runs_linux or not all(bears(taint, node) for taint in taints):
            continue
        if node.is_usable and node.vcpus and node.memory_gib:
            offer = _offer(node)
            alike.setdefault((offer.name, offer.gpu_name), []).append((offer, node))
    with_gpus = {name for name, gpu in alike if gpu is not None}
    pools = []
    for (name, gpu), found in alike.items():
        if gpu is None and name in with_gpus:
            continue  # nodes whose device plugin is not up yet: what the others of their type have tells more
        usd, source = _dearest((node for _, node in found), prices, cluster_prices or {})
        offer = replace(
            found[0][0],
            vcpus=min(one.vcpus for one, _ in found),
            memory_gib=min(one.memory_gib for one, _ in found),
            gpus=min(one.gpus for one, _ in found),
            usd_per_hour=usd,
            price_source=source,
        )
        names = tuple(sorted(node.name for _, node in found))
        pools.append(NodePool(offer, len(names), names, found[0][1].pool))
    return sorted(pools, key=lambda item: item.offer.name)


def _dearest(
    nodes: Iterable[ClusterNode], prices: OfferTable | None, cluster_prices: Mapping[str, float]
) -> tuple[float | None, str]:
    """The highest price of alike nodes, which may be of several pools; unknown where that of one is."""
    alike = {
        replace(node, name="", vcpus=0.0, memory_gib=0.0) if node.instance_type else node for node in nodes
    }
    found = [node_price(node, prices=prices, cluster_prices=cluster_prices) for node in alike]
    return max(found, key=lambda price: (price[0] is None, price[0] or 0.0, price[1]))


def _offer(node: ClusterNode) -> Offer:
    """All of one node, without a price."""
    return Offer(
        cloud="kubernetes",
        region=node.region or "",
        instance_type=_type_of(node),
        capacity_type=node.capacity_type,
        vcpus=node.vcpus,
        memory_gib=node.memory_gib,
        zone=node.zone,
        gpu_name=node.gpu_name,
        gpus=node.pod_gpus,
        gpu_memory_gb=node.gpu_memory_gb,
        arch=node.arch,
    )


def _type_of(node: ClusterNode) -> str:
    return node.instance_type or f"node-{round(node.vcpus)}cpu-{round(node.memory_gib)}gib"


def node_price(
    node: ClusterNode, *, prices: OfferTable | None, cluster_prices: Mapping[str, float]
) -> tuple[float | None, str]:
    """USD an hour of all of *node*, and where that is from; None where neither tells it.

    Args:
        node: The node.
        prices: Offers of clouds: the price of the same instance type, place and capacity type.
        cluster_prices: The owner's, by pool, instance type or ``*``; these go before the clouds'.
    """
    for key in (node.pool, _type_of(node), "*"):
        if key is not None and key in cluster_prices:
            return cluster_prices[key], f"cluster_prices[{key}]"
    if prices is None or None in (node.cloud, node.region, node.instance_type):
        return None, "no price is known of this node"
    need = Requirements(
        cloud=node.cloud,
        region=node.region,
        zone=node.zone,
        instance_type=node.instance_type,
        capacity=node.capacity_type,
    )
    chosen = search(need, prices, how=Search(limit=1)).chosen
    if chosen is None or chosen.usd_per_hour is None:
        return None, f"no price of {node.cloud} {node.instance_type} is known in {node.region}"
    return (
        chosen.usd_per_hour,
        f"as {node.cloud} {node.instance_type}: {chosen.allocation.offer.price_source}",
    )


def _is_spot(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key) == value for key, value in SPOT_LABELS.values())


def _gpu(labels: Mapping[str, str], shares: int) -> tuple[str, float | None]:
    """Name and memory of what a pod gets as one GPU: of a share, and of a MIG slice, names of their own."""
    name, memory = _whole_gpu(labels)
    partition = labels.get(_PARTITION)
    if partition and "MIG" not in name:
        name = f"{name}-MIG-{partition}"
    slice_gb = _MIG.search(name)
    if slice_gb is not None and "MIG" in name:
        memory = float(slice_gb.group(1))
    if shares == 1:
        return name, memory
    return f"{name}-shared", None if memory is None else round(memory / shares, 2)


def _whole_gpu(labels: Mapping[str, str]) -> tuple[str, float | None]:
    said, mib = _first(labels, _GPU_NAME), _first(labels, _GPU_MIB)
    # Discovery tells MiB, which for a GPU of 80 GB are about 81,000.
    measured = round(float(mib) * 1.048576 / 1000, 1) if mib and re.fullmatch(r"\d+", mib) else None
    if said is None:
        return UNNAMED_GPU, measured
    name = canonical_gpu(said.removesuffix(_SHARED), measured)
    if measured is None:
        return name, MEMORY_GB.get(name)
    return name, nominal_memory_gb(name, measured)


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _amount(value: object) -> float:
    """What can be allocated; 0 when it is not said, or not readably."""
    try:
        found = quantity(str(value))
    except ValueError:
        return 0.0
    return found if found < _MOST else 0.0
