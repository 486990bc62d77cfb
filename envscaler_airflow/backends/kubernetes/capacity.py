"""Capacity of a cluster: what fits on it at all, and what fits beside the running pods. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envscaler_airflow.backends.kubernetes.manifests import (
    SIDECAR_CPUS,
    SIDECAR_MEMORY_BYTES,
)
from envscaler_airflow.backends.kubernetes.offers import (
    Capacity,
    NodeGroup,
    is_borne,
    is_usable,
    kinds_of,
    whole_of,
)
from envscaler_airflow.backends.kubernetes.scheduling import gpu_resource, node_type
from envscaler_airflow.backends.kubernetes.settings import Settings
from envscaler_airflow.catalog.nodes import GIB, quantity
from envscaler_airflow.planning.offers import AllocationPart, Offer

Json = Mapping[str, Any]


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
    room = sum(
        _room_for(need, whole_of(node, resource)) for node in nodes if _kind_for(node, part.offer, resource)
    )
    if room >= part.nodes:
        return None
    what = f"{need.gpus} GPUs, " if need.gpus else ""
    return (
        f"cpu: {part.nodes} pods of {what}{need.vcpus:g} CPUs and {need.memory_gib:g} GiB asked; "
        f"the cluster has room for {room}"
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
            _room_for(with_sidecar(offer), room)
            for node, room in by_resource[resource]
            if (kind := _kind_for(node, offer, resource)) and is_borne(node, kind, settings)
        )
        found[offer.name] = sum(fitting)
    return found


def _left(nodes: Iterable[Json], pods: Iterable[Json], resource: str | None) -> list[tuple[Json, Capacity]]:
    """Each node, and its capacity beside *pods*; GPUs are those of *resource*."""
    left = {node["metadata"]["name"]: (node, whole_of(node, resource)) for node in nodes}
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if name in left and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            node, room = left[name]
            need = requested(pod, resource)
            rest = Capacity(room.vcpus - need.vcpus, room.memory_gib - need.memory_gib, room.gpus - need.gpus)
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


def _room_for(need: Capacity, room: Capacity) -> int:
    """Pods that fit on a node with this capacity left."""
    pairs = ((room.vcpus, need.vcpus), (room.memory_gib, need.memory_gib), (room.gpus, need.gpus))
    return max(0, int(min(math.floor(has / asked + 1e-9) for has, asked in pairs if asked > 0)))
