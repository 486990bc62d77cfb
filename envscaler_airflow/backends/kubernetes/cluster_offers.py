"""Offers of a cluster, shares of its nodes or configured classes, and what fits beside its pods. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.job_manifest import (
    SIDECAR_CPUS,
    SIDECAR_MEMORY_BYTES,
)
from envscaler_airflow.backends.kubernetes.job_snapshot import Json, is_pod_over
from envscaler_airflow.backends.kubernetes.scheduling import (
    BY_GPU,
    SPOT,
    UNLABELLED,
    gpu_resource,
    node_type,
    tolerated_taints,
)
from envscaler_airflow.catalog.accelerators import Accelerator, unit_name
from envscaler_airflow.catalog.nodes import GIB, ClusterNode, Price, highest, node_price, quantity, read_node
from envscaler_airflow.catalog.sources import live_catalog
from envscaler_airflow.planning.offers import AllocationPart, CapacityType, Offer

_FOR_OTHERS = ("node-role.kubernetes.io/", "virtual-kubelet.io/", "eks.amazonaws.com/compute-type")
"""Prefixes of permanent taints. Source: Kubernetes, well-known taints; Virtual Kubelet; EKS Fargate."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """What nodes have in common to which a pod of an offer may be bound.

    Attributes:
        instance_type: As in an offer.
        capacity_type: ``spot`` or ``on-demand``.
        arch: As in an offer; None is unknown.
        gpu: One GPU of a pod there, without their number; None without GPU.
        region: From its labels; None is unknown.
    """

    instance_type: str
    capacity_type: CapacityType
    arch: str | None
    gpu: Accelerator | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one node has, or what one pod requests of it.

    Attributes:
        vcpus, memory_gib: Amounts.
        gpus: Number of GPUs of one resource.
        of_gpus: These as a fraction of all GPUs of the node.
    """

    vcpus: float
    memory_gib: float
    gpus: int
    of_gpus: float = 1.0


def derived_offers(
    nodes: Iterable[Mapping[str, Any]], settings: Settings, *, is_later: bool = False
) -> tuple[Offer, ...]:
    """Shares of every kind of node, smallest first: powers of two and the whole.

    With *is_later*, only those of nodes that accept no pod of a stage now: cordoned, not ready, or tainted.

    The price of a kind is the configured one, else the catalog's price for such an instance: the
    highest of its nodes' prices, unknown if one of them is.
    """
    capacities: dict[NodeGroup, Capacity] = {}
    costs: dict[NodeGroup, list[Price]] = {}
    priced: dict[ClusterNode, Price] = {}
    for node in nodes:
        seen = read_node(node)
        if not _may_ever_run(node, seen):
            continue
        for kind, capacity in kinds_of(node).items():
            takes_now = seen.is_usable and is_tolerated(node, kind, settings)
            is_wanted = capacity.vcpus >= 1 and capacity.memory_gib > 0 and takes_now != is_later
            if not is_wanted or not _is_addressed(node, kind, settings):
                continue
            known = capacities.get(kind)
            capacities[kind] = capacity if known is None else _least(known, capacity)
            alike = replace(seen, name="", vcpus=0.0, memory_gib=0.0)
            if alike not in priced:
                priced[alike] = _price(alike, kind, settings)
            costs.setdefault(kind, []).append(priced[alike])
    offers = [
        offer
        for kind, capacity in capacities.items()
        for offer in _shares(kind, capacity, settings, price=highest(costs[kind]))
    ]
    return tuple(sorted(offers, key=lambda offer: (offer.gpus, offer.vcpus, offer.name)))


def _may_ever_run(node: Mapping[str, Any], seen: ClusterNode) -> bool:
    """False for a node that no stage's pod will ever run on: another system, no machine, a control plane."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return seen.runs_linux and not any(str(one.get("key")).startswith(_FOR_OTHERS) for one in taints)


def _price(node: ClusterNode, kind: NodeGroup, settings: Settings) -> Price:
    """From the configuration, which may also name a kind without instance type; else from the cloud."""
    named = node if node.instance_type else replace(node, instance_type=kind.instance_type)
    usd, source = node_price(named, prices=None, cluster_prices=settings.usd_per_hour)
    if usd is not None:
        return usd, "usd_per_hour of the configuration"
    if node.cloud is None or node.instance_type is None:
        return None, source
    return node_price(node, prices=live_catalog(), cluster_prices={})


def _is_addressed(node: Mapping[str, Any], kind: NodeGroup, settings: Settings) -> bool:
    """False for a spot node without the one label by which this configuration requests spot."""
    if settings.provider is None or kind.capacity_type == "on-demand":
        return True
    mark, labels = SPOT[settings.provider], (node.get("metadata") or {}).get("labels") or {}
    return bool(labels.get(mark.key) == mark.value)


def _least(one: Capacity, other: Capacity) -> Capacity:
    return Capacity(
        min(one.vcpus, other.vcpus),
        min(one.memory_gib, other.memory_gib),
        min(one.gpus, other.gpus),
        max(one.of_gpus, other.of_gpus),
    )


def kinds_of(node: Mapping[str, Any]) -> dict[NodeGroup, Capacity]:
    """The kinds of this node by GPU resource, and the capacity for a pod's training in each."""
    seen = read_node(node)
    by_gpu = BY_GPU + seen.gpu_product if seen.gpu_product else UNLABELLED
    kind = NodeGroup(seen.instance_type or by_gpu, seen.capacity_type, seen.arch, None, seen.region)
    cpus = round(seen.vcpus - SIDECAR_CPUS, 3)  # whole millicores
    memory = seen.memory_gib - SIDECAR_MEMORY_BYTES / GIB
    if not seen.gpus:
        return {kind: Capacity(cpus, memory, 0)}
    total = sum(one.count * one.of_gpu for one in seen.gpus)
    return {
        replace(kind, gpu=replace(gpu, count=0)): Capacity(
            cpus, memory, gpu.count, gpu.count * gpu.of_gpu / total
        )
        for gpu in seen.gpus
    }


def whole_of(node: Mapping[str, Any], resource: str | None) -> Capacity:
    """The capacity of this node for all pods when it is empty; *resource* is that of their GPUs."""
    seen = read_node(node)
    return Capacity(
        seen.vcpus, seen.memory_gib, sum(one.count for one in seen.gpus if one.resource == resource)
    )


def is_usable(node: Mapping[str, Any]) -> bool:
    """True when it is ready and accepts pods."""
    return read_node(node).is_usable


def is_tolerated(node: Mapping[str, Any], kind: NodeGroup, settings: Settings) -> bool:
    """True when pods of such an offer tolerate every taint that keeps others off the node."""
    ours = tolerated_taints(settings, has_gpus=kind.gpu is not None, is_spot=kind.capacity_type == "spot")
    taints = (node.get("spec") or {}).get("taints") or ()
    return all(
        any(one["key"] == taint.get("key") and one.get("value") in (None, taint.get("value")) for one in ours)
        for taint in taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    )


def _shares(kind: NodeGroup, capacity: Capacity, settings: Settings, *, price: Price) -> list[Offer]:
    gpu = kind.gpu
    full = capacity.gpus / capacity.of_gpus if gpu is not None else math.floor(capacity.vcpus)
    whole = Offer(
        cloud="kubernetes",
        region=kind.region or settings.region,
        instance_type=kind.instance_type,
        capacity_type=kind.capacity_type,
        vcpus=capacity.vcpus,
        memory_gib=capacity.memory_gib,
        gpu_name=None if gpu is None else gpu.name,
        gpus=capacity.gpus,
        gpu_memory_gb=None if gpu is None else gpu.memory_gb,
        usd_per_hour=price[0],
        price_source=price[1],
        arch=kind.arch,
    )
    unit = "cpu" if gpu is None else unit_name(gpu.resource)
    most = 1 if gpu is not None and gpu.is_single else capacity.gpus or math.floor(capacity.vcpus)
    return [_share(whole, count, full, unit) for count in _counts(most)]


def _counts(full: int) -> Sequence[int]:
    powers = [2**exponent for exponent in range(full.bit_length()) if 2**exponent <= full]
    return powers if full in powers else [*powers, full]


def _share(whole: Offer, count: int, full: float, unit: str) -> Offer:
    """A share of *count* of the *full* number of GPUs, or of CPUs, with the same part of the rest."""
    share, usd = count / full, whole.usd_per_hour
    return replace(
        whole,
        instance_type=f"{whole.instance_type}:{unit}-{count}",
        vcpus=float(max(1, math.floor(whole.vcpus * share)) if whole.gpus else count),
        memory_gib=math.floor(whole.memory_gib * share * 100) / 100,
        gpus=count if whole.gpus else 0,
        usd_per_hour=None if usd is None else usd * share,
        price_source=whole.price_source if usd is None else f"{whole.price_source}, {share:.3g} of a node",
    )


def requested(pod: Json, resource: str | None = None) -> Capacity:
    """What *pod* requests: the containers that run together, or the largest that runs before them.

    *resource* is the GPU resource that counts.

    Source: Kubernetes, sidecar containers: an init container that restarts counts as a container.
    """
    spec = pod["spec"]
    first = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") != "Always"]
    beside = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    together = _sum([*spec["containers"], *beside], resource)
    alone = [_sum([one], resource) for one in first]
    vcpus, memory, gpus = (max(values) for values in zip(together, *alone, strict=True))
    return Capacity(vcpus, memory / GIB, int(gpus))


def with_sidecar(offer: Offer) -> Capacity:
    """What a pod requests that uses all of the offer."""
    memory = offer.memory_gib + SIDECAR_MEMORY_BYTES / GIB
    return Capacity(offer.vcpus + SIDECAR_CPUS, memory, offer.gpus)


def _sum(containers: Iterable[Json], gpus: str | None) -> tuple[float, float, float]:
    asked = [_asked(one) for one in containers]
    vcpus, memory, count = (
        sum(quantity(str(one.get(name, "0"))) for one in asked) for name in ("cpu", "memory", gpus or "")
    )
    return vcpus, memory, count


def _asked(container: Json) -> dict[str, Any]:
    """Its requests; a limit without a request counts as one. Source: Kubernetes, requests and limits."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def shortfall(pod: Json, part: AllocationPart, nodes: Iterable[Json], settings: Settings) -> str | None:
    """What *part*, with pods like *pod*, needs beyond all empty nodes of its kind; None when it fits."""
    resource = gpu_resource(part.offer, settings)
    need = requested(pod, resource)
    pods = sum(
        _pods_in(need, whole_of(node, resource)) for node in nodes if _kind_for(node, part.offer, resource)
    )
    if pods >= part.nodes:
        return None
    what = f"{need.gpus} GPUs, " if need.gpus else ""
    return (
        f"cpu: {part.nodes} pods of {what}{need.vcpus:g} CPUs and {need.memory_gib:g} GiB asked; "
        f"the cluster has capacity for {pods}"
    )


def free_nodes(
    offers: Iterable[Offer], nodes: Sequence[Json], pods: Sequence[Json], settings: Settings
) -> dict[str, int]:
    """Pods of each offer's size that fit beside all *pods* of the cluster, by the offer's name."""
    by_resource: dict[str | None, list[tuple[Json, Capacity]]] = {}
    found = {}
    for offer in offers:
        resource = gpu_resource(offer, settings)
        if resource not in by_resource:
            by_resource[resource] = _left(nodes, pods, resource)
        fitting = (
            _pods_in(with_sidecar(offer), capacity)
            for node, capacity in by_resource[resource]
            if (kind := _kind_for(node, offer, resource)) and is_tolerated(node, kind, settings)
        )
        found[offer.name] = sum(fitting)
    return found


def _left(nodes: Iterable[Json], pods: Iterable[Json], resource: str | None) -> list[tuple[Json, Capacity]]:
    """Each node, and its capacity beside *pods*; GPUs are those of *resource*."""
    left = {node["metadata"]["name"]: (node, whole_of(node, resource)) for node in nodes}
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if name in left and not is_pod_over(pod):
            node, has = left[name]
            need = requested(pod, resource)
            rest = Capacity(has.vcpus - need.vcpus, has.memory_gib - need.memory_gib, has.gpus - need.gpus)
            left[name] = (node, rest)
    return list(left.values())


def _kind_for(node: Json, offer: Offer, resource: str | None) -> NodeGroup | None:
    """The kind of the node in *offer*; None if it belongs to none, or the node accepts no pods."""
    if not is_usable(node):
        return None
    for kind in kinds_of(node):
        is_alike = (kind.instance_type, kind.capacity_type) == (node_type(offer), offer.capacity_type)
        if is_alike and resource is None:
            return replace(
                kind, gpu=None
            )  # GPUs may be idle there, and a pod without GPUs tolerates no taint of them
        if is_alike and kind.gpu is not None and kind.gpu.resource == resource:
            return kind
    return None


def _pods_in(need: Capacity, has: Capacity) -> int:
    """Pods that fit on a node with this capacity left."""
    pairs = ((has.vcpus, need.vcpus), (has.memory_gib, need.memory_gib), (has.gpus, need.gpus))
    return max(0, int(min(math.floor(part / asked + 1e-9) for part, asked in pairs if asked > 0)))
