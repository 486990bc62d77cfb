"""Nodes of a Kubernetes cluster as offers: a pure function of node objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.catalog.gpus import canonical_gpu, nominal_memory_gb
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.offers import CapacityType, Offer
from envscaler_airflow.planning.requirements import Requirements
from envscaler_airflow.planning.table import OfferTable
from envscaler_airflow.spec.gpus import MEMORY_GB
from envscaler_airflow.spec.quantities import cpu_cores, memory_bytes

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
_SPOT = {
    "karpenter.sh/capacity-type": ("spot",),
    "eks.amazonaws.com/capacityType": ("SPOT",),
    "cloud.google.com/gke-spot": ("true",),
    "cloud.google.com/gke-provisioning": ("spot",),
    "cloud.google.com/gke-preemptible": ("true",),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
}
"""Labels that say spot, and the values that do. Source: documentation of Karpenter, EKS, GKE, AKS."""

_GPU_NAME = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
    "kubernetes.azure.com/accelerator-name",
)
_GPU_MIB = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_CLOUDS = {"aws": "aws", "gce": "gcp", "azure": "azure", "alicloud": "alibaba", "qcloud": "tencent"}
_ARCHES = {"amd64": "x86_64", "arm64": "arm64"}
UNNAMED_GPU = "GPU"
"""Name of a GPU that no label names: GPU feature discovery is not installed there."""


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


def node_pools(
    nodes: Iterable[Mapping[str, Any]],
    *,
    prices: OfferTable | None = None,
    cluster_prices: Mapping[str, float] | None = None,
) -> list[NodePool]:
    """Schedulable nodes by place, type, capacity type and GPU.

    Args:
        nodes: Node objects as the API server gives them. Those that are cordoned or not ready are left out.
        prices: Offers of clouds: the price of a node of the same instance type, region and capacity type.
        cluster_prices: USD an hour of a node by pool, instance type or ``*``: what one pays oneself. These
            go before the clouds'.

    Returns:
        Pools by offer name. A price that neither tells is unknown.
    """
    alike: dict[str, list[tuple[Offer, str, str | None, str]]] = {}
    for node in nodes:
        found = _read(node)
        if found is not None:
            alike.setdefault(found[0].name, []).append(found)
    pools = []
    for found_here in alike.values():
        first, _, pool, provider = found_here[0]
        offer = _smallest([item[0] for item in found_here])
        usd, source = _price(offer, pool, provider, prices, cluster_prices or {})
        priced = _with_price(offer, usd, source)
        names = tuple(sorted(item[1] for item in found_here))
        pools.append(NodePool(priced, len(names), names, pool))
        assert first.name == priced.name
    return sorted(pools, key=lambda item: item.offer.name)


def _read(node: Mapping[str, Any]) -> tuple[Offer, str, str | None, str] | None:
    """One node as (offer, name, pool, cloud); None when nothing can be put on it."""
    meta, spec, status = node.get("metadata", {}), node.get("spec", {}), node.get("status", {})
    ready = any(
        item.get("type") == "Ready" and item.get("status") == "True" for item in status.get("conditions", ())
    )
    allocatable = status.get("allocatable", {})
    cpu, memory = _cores(allocatable.get("cpu")), _bytes(allocatable.get("memory"))
    if spec.get("unschedulable") or not ready or not cpu or not memory:
        return None
    labels = meta.get("labels", {})
    gpus = sum(_count(allocatable.get(resource)) for resource in _GPUS)
    name, gpu_gb = _gpu(labels) if gpus else (None, None)
    provider = _CLOUDS.get(str(spec.get("providerID", "")).partition(":")[0], "")
    offer = Offer(
        cloud="kubernetes",
        region=_first(labels, _REGION) or "",
        instance_type=_first(labels, _TYPE) or f"node-{round(cpu)}cpu-{round(memory / GIB)}gib",
        capacity_type=_capacity(labels),
        vcpus=cpu,
        memory_gib=memory / GIB,
        zone=_first(labels, _ZONE),
        gpu_name=name,
        gpus=gpus,
        gpu_memory_gb=gpu_gb,
        arch=_ARCHES.get(labels.get("kubernetes.io/arch", "")),
    )
    return offer, str(meta.get("name", "")), _first(labels, _POOL), provider


def _smallest(offers: list[Offer]) -> Offer:
    least = offers[0]
    return Offer(
        **{
            **{name: getattr(least, name) for name in Offer.__slots__},
            "vcpus": min(offer.vcpus for offer in offers),
            "memory_gib": min(offer.memory_gib for offer in offers),
            "gpus": min(offer.gpus for offer in offers),
        }
    )


def _with_price(offer: Offer, usd: float | None, source: str) -> Offer:
    values = {name: getattr(offer, name) for name in Offer.__slots__}
    return Offer(**{**values, "usd_per_hour": usd, "price_source": source})


def _price(
    offer: Offer,
    pool: str | None,
    provider: str,
    prices: OfferTable | None,
    own: Mapping[str, float],
) -> tuple[float | None, str]:
    for key in (pool, offer.instance_type, "*"):
        if key is not None and key in own:
            return own[key], f"cluster_prices[{key}]"
    if prices is None or not provider:
        return None, "no price is known of this node"
    need = Requirements(
        cloud=provider,
        region=offer.region or None,
        zone=offer.zone,
        instance_type=offer.instance_type,
        capacity=offer.capacity_type,
    )
    chosen = search(need, prices, how=Search(limit=1)).chosen
    if chosen is None or chosen.usd_per_hour is None:
        return None, f"no price of {provider} {offer.instance_type} is known in {offer.region}"
    return chosen.usd_per_hour, f"as {provider} {offer.instance_type}: {chosen.allocation.offer.price_source}"


def _capacity(labels: Mapping[str, str]) -> CapacityType:
    is_spot = any(labels.get(label) in values for label, values in _SPOT.items())
    return "spot" if is_spot else "on-demand"


def _gpu(labels: Mapping[str, str]) -> tuple[str, float | None]:
    said, mib = _first(labels, _GPU_NAME), _first(labels, _GPU_MIB)
    # Discovery tells MiB, which for a GPU of 80 GB are about 81,000.
    measured = round(float(mib) * 1.048576 / 1000, 1) if mib and re.fullmatch(r"\d+", mib) else None
    if said is None:
        return UNNAMED_GPU, measured
    name = canonical_gpu(re.sub(r"-SHARED$", "", said), measured)
    if measured is None:
        return name, MEMORY_GB.get(name)
    return name, nominal_memory_gb(name, measured)


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _cores(value: object) -> float | None:
    try:
        return cpu_cores(str(value))
    except ValueError:
        return None


def _bytes(value: object) -> float | None:
    """A quantity of the API server, which also writes bytes without a unit."""
    text = str(value)
    if re.fullmatch(r"\d+", text):
        return float(text)
    if re.fullmatch(r"\d+m", text):
        return float(text[:-1]) / 1000
    try:
        return float(memory_bytes(text))
    except ValueError:
        return None


def _count(value: object) -> int:
    text = str(value if value is not None else 0)
    return int(text) if text.isdigit() else 0
