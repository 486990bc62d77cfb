"""Nodes of a Kubernetes cluster as offers: a pure function of node objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.catalog.accelerators import (
    GPU_PRODUCT,
    Accelerator,
    accelerators,
    first_label,
    unit_name,
)
from envscaler_airflow.clouds import all_clouds
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.offers import CapacityType, Offer
from envscaler_airflow.planning.requirements import Requirements
from envscaler_airflow.planning.table import OfferTable

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
"""Labels that mark spot nodes. Source: documentation of EKS, Karpenter, GKE, AKS; the last is ours."""

_ARCHES = {"amd64": "x86_64", "arm64": "arm64"}
GPU_TAINTS: tuple[tuple[str, str | None], ...] = (
    ("nvidia.com/gpu", None),
    ("amd.com/gpu", None),
    ("sku", "gpu"),
)
"""Taints that keep other pods off GPU nodes: of GKE and the GPU operator, of AMD, and as AKS documents."""
SPOT_TAINTED = ("gke", "aks")
"""Conventions of :data:`SPOT_LABELS` that also put a taint of the same name on spot nodes. Source: GKE,
AKS.
"""
_VIRTUAL = (("type", "virtual-kubelet"), ("eks.amazonaws.com/compute-type", "fargate"))
"""Labels of virtual nodes. Source: Virtual Kubelet; EKS Fargate."""

_MOST = 2.0**60
"""Amounts from here on are not valid for a node. Chosen: an exbibyte, in bytes."""

Price = tuple[float | None, str]
"""USD an hour of a whole node, None if unknown; and the source."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)\Z")
_SUFFIXES = {
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate(("n", "u", "m"), start=-3)},
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", start=1)},
}


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """The facts of a node object that matter for scheduling pods on it.

    Attributes:
        name: Name of the node.
        vcpus, memory_gib: Allocatable amounts; 0 if absent or not parseable.
        is_usable: The node accepts pods: it is not cordoned and not reported as unready.
        capacity_type: Capacity type, from the labels of any convention.
        instance_type, region, zone, pool: None without a label for it.
        cloud: The catalog's name of the node's provider; None if unknown or absent.
        arch: Architecture, as in offers.
        gpus: GPUs by resource, whole ones first; () without GPUs.
        gpu_product: Product name that GPU feature discovery reports.
        runs_linux: False for another operating system or architecture, and for a virtual node.
    """

    name: str
    vcpus: float
    memory_gib: float
    is_usable: bool
    capacity_type: CapacityType
    instance_type: str | None = None
    region: str | None = None
    zone: str | None = None
    pool: str | None = None
    cloud: str | None = None
    arch: str | None = None
    gpus: tuple[Accelerator, ...] = ()
    gpu_product: str | None = None
    runs_linux: bool = True


def quantity(text: str) -> float:
    """Value of a Kubernetes quantity as the API server writes it: ``3920m``, ``16Gi``, ``8``.

    Raises:
        ValueError: *text* is not a quantity.

    Source: Kubernetes API reference, Quantity.
    """
    found = _QUANTITY.match(text)
    if found is None:
        raise ValueError(f"{text!r:.60} is not a quantity")
    number, exponent, suffix = found.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _SUFFIXES.get(suffix, 1.0))


def read_node(node: Mapping[str, Any]) -> ClusterNode:
    """Extract the facts of *node*, an object of the API server."""
    meta, spec, status = (node.get(part) or {} for part in ("metadata", "spec", "status"))
    found, labels = status.get("allocatable") or {}, meta.get("labels") or {}
    gpus = accelerators(labels, found, _amount)
    conditions = status.get("conditions") or ()
    ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "True")
    return ClusterNode(
        name=str(meta.get("name", "")),
        vcpus=_amount(found.get("cpu")),
        memory_gib=_amount(found.get("memory")) / GIB,
        is_usable=ready == "True" and not spec.get("unschedulable"),
        capacity_type="spot" if _is_spot(labels) else "on-demand",
        instance_type=first_label(labels, _TYPE),
        region=first_label(labels, _REGION),
        zone=first_label(labels, _ZONE),
        pool=first_label(labels, _POOL),
        cloud=_cloud_of(str(spec.get("providerID", ""))),
        arch=_ARCHES.get(labels.get("kubernetes.io/arch", "")),
        gpus=gpus,
        gpu_product=labels.get(GPU_PRODUCT) if gpus else None,
        runs_linux=_runs_linux(labels, found),
    )


def _cloud_of(provider_id: str) -> str | None:
    """The catalog's name of a provider: ``gcp`` for ``gce://project/us-central1-a/vm``."""
    scheme = provider_id.partition(":")[0]
    return next((name for name, one in all_clouds().items() if scheme and one.provider_id == scheme), None)


def keeps_off(item: Mapping[str, Any]) -> str | None:
    """Why the node accepts no pod of a stage: ``has the taint dedicated=web``; None if it accepts them."""
    node = read_node(item)
    if not node.runs_linux:
        return "is not a Linux machine of a known architecture that takes pods"
    if not node.is_usable:
        return "is cordoned or not ready"
    for taint in (item.get("spec") or {}).get("taints") or ():
        if not tolerates(taint, node):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"has the taint {taint.get('key')}{value}"
    return None if node.vcpus and node.memory_gib else "does not say which CPUs and memory it has"


def tolerates(taint: Mapping[str, Any], node: ClusterNode) -> bool:
    """True when our pods that fit *node* tolerate its taint, or the taint does not repel pods."""
    if taint.get("effect") not in ("NoSchedule", "NoExecute"):
        return True
    key, value = taint.get("key"), taint.get("value")
    tolerated = list(GPU_TAINTS) if node.gpus else []
    if node.capacity_type == "spot":
        tolerated += [SPOT_LABELS[name] for name in SPOT_TAINTED]
    return any(key == one and (wanted is None or value == wanted) for one, wanted in tolerated)


def _runs_linux(labels: Mapping[str, str], allocatable: Mapping[str, Any]) -> bool:
    """True if the node may run Linux pods on a supported architecture, as far as it reports this."""
    arch = labels.get("kubernetes.io/arch", "")
    is_ours = labels.get("kubernetes.io/os", "linux") == "linux" and (not arch or arch in _ARCHES)
    is_virtual = any(labels.get(key) == value for key, value in _VIRTUAL)
    return is_ours and not is_virtual and str(allocatable.get("pods", "")) != "0"


def node_offers(
    nodes: Iterable[Mapping[str, Any]],
    *,
    prices: OfferTable | None = None,
    cluster_prices: Mapping[str, float] | None = None,
) -> list[Offer]:
    """Nodes of the same place, type, capacity type and GPU as one offer: the smallest of them.

    Args:
        nodes: Node objects of the API server. Nodes that are cordoned or not ready are skipped. So are nodes
            whose taints, operating system or architecture exclude our pods.
        prices: Offers of clouds: the price of a node of the same instance type, region and capacity type.
        cluster_prices: USD an hour of a node by pool, instance type or ``*``: what you pay yourself. These
            take precedence over the clouds' prices.

    Returns:
        Offers by name. A price in neither source is unknown.
    """
    alike: dict[tuple[str, str | None], list[tuple[Offer, ClusterNode]]] = {}
    for item in nodes:
        if keeps_off(item) is not None:
            continue
        node = read_node(item)
        for offer in [_offer(node, gpu) for gpu in node.gpus] or [_offer(node, None)]:
            alike.setdefault((offer.name, offer.gpu_name), []).append((offer, node))
    with_gpus = {_offer(node, None).name for found in alike.values() for _, node in found if node.gpus}
    offers = []
    for (name, gpu_name), found in alike.items():
        if gpu_name is None and name in with_gpus:
            continue  # the device plugin is not up yet; other nodes of this type report more
        usd, source = _price_of((node for _, node in found), prices, cluster_prices or {})
        offers.append(
            replace(
                found[0][0],
                vcpus=min(one.vcpus for one, _ in found),
                memory_gib=min(one.memory_gib for one, _ in found),
                gpus=min(one.gpus for one, _ in found),
                usd_per_hour=usd,
                price_source=source,
            )
        )
    return sorted(offers, key=lambda offer: offer.name)


def _price_of(
    nodes: Iterable[ClusterNode], prices: OfferTable | None, cluster_prices: Mapping[str, float]
) -> Price:
    alike = {
        replace(node, name="", vcpus=0.0, memory_gib=0.0) if node.instance_type else node for node in nodes
    }
    return highest(node_price(node, prices=prices, cluster_prices=cluster_prices) for node in alike)


def highest(prices: Iterable[Price]) -> Price:
    """The price of equivalent nodes, which may be in several pools: the highest, or unknown if one is."""
    return max(prices, key=lambda price: (price[0] is None, price[0] or 0.0, price[1]))


def _offer(node: ClusterNode, gpu: Accelerator | None) -> Offer:
    """All of one node with its GPUs of one resource, without a price."""
    unit = "" if gpu is None or gpu.is_plain else f":{unit_name(gpu.resource)}"
    return Offer(
        cloud="kubernetes",
        region=node.region or "",
        instance_type=_type_of(node) + unit,
        capacity_type=node.capacity_type,
        vcpus=node.vcpus,
        memory_gib=node.memory_gib,
        zone=node.zone,
        gpu_name=None if gpu is None else gpu.name,
        gpus=0 if gpu is None else gpu.per_pod,
        gpu_memory_gb=None if gpu is None else gpu.memory_gb,
        arch=node.arch,
    )


def _type_of(node: ClusterNode) -> str:
    return node.instance_type or f"node-{round(node.vcpus)}cpu-{round(node.memory_gib)}gib"


def node_price(node: ClusterNode, *, prices: OfferTable | None, cluster_prices: Mapping[str, float]) -> Price:
    """USD an hour of all of *node*, and the source; None if neither source has a price.

    Args:
        node: The node.
        prices: Offers of clouds: the price of the same instance type, place and capacity type.
        cluster_prices: The owner's prices, by pool, instance type or ``*``; these take precedence.
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


def _amount(value: object) -> float:
    """The allocatable amount; 0 if absent or not parseable."""
    try:
        found = quantity(str(value))
    except ValueError:
        return 0.0
    return found if found < _MOST else 0.0
