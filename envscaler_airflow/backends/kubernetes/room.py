"""Room of a cluster: what fits on it at all, and what fits beside that which runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.kubernetes.offers import Room, is_borne, is_usable, kind_of, whole_of
from envscaler_airflow.backends.kubernetes.render import COURIER_CPUS, COURIER_MEMORY_BYTES
from envscaler_airflow.backends.kubernetes.settings import Settings
from envscaler_airflow.catalog.kubernetes import GIB, GPU_RESOURCES, quantity
from envscaler_airflow.planning.offers import AllocationPart, Offer

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Need:
    """What one pod asks a node for."""

    vcpus: float
    memory_gib: float
    gpus: int

    @classmethod
    def of(cls, pod: Json) -> Need:
        """By its spec: the containers that run together, or the largest that runs before them.

        Source: Kubernetes, sidecar containers: an init container that restarts counts as a container.
        """
        spec = pod["spec"]
        first = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") != "Always"]
        beside = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
        together = _sum([*spec["containers"], *beside])
        alone = [_sum([one]) for one in first]
        vcpus, memory, gpus = (max(values) for values in zip(together, *alone, strict=True))
        return cls(vcpus, memory / GIB, int(gpus))

    @classmethod
    def of_slice(cls, offer: Offer) -> Need:
        """A pod that takes all of the offer, with its courier."""
        memory = offer.memory_gib + COURIER_MEMORY_BYTES / GIB
        return cls(offer.vcpus + COURIER_CPUS, memory, offer.gpus)


def _sum(containers: Iterable[Json]) -> tuple[float, float, float]:
    asked = [_asked(one) for one in containers]
    vcpus, memory, gpus = (
        sum(quantity(str(one.get(name, "0"))) for one in asked for name in resources)
        for resources in (("cpu",), ("memory",), GPU_RESOURCES)
    )
    return vcpus, memory, gpus


def _asked(container: Json) -> dict[str, Any]:
    """Its requests; a limit without a request is one. Source: Kubernetes, requests and limits."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def shortfall(need: Need, part: AllocationPart, nodes: Iterable[Json]) -> str | None:
    """What the pods of *part* take beyond all nodes of its kind when they are empty; None when they fit."""
    room = sum(_room_for(need, whole_of(node)) for node in nodes if _is_for(node, part.offer))
    if room >= part.nodes:
        return None
    what = f"{need.gpus} GPUs, " if need.gpus else ""
    return (
        f"cpu: {part.nodes} pods of {what}{need.vcpus:g} CPUs and {need.memory_gib:g} GiB asked; "
        f"the cluster has room for {room}"
    )


def free_nodes(
    offers: Iterable[Offer], nodes: Iterable[Json], pods: Iterable[Json], settings: Settings
) -> dict[str, int]:
    """Pods of each offer's size that fit beside *pods*, which are all of the cluster's, by its name."""
    left = {node["metadata"]["name"]: (node, whole_of(node)) for node in nodes}
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if name in left and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            node, room = left[name]
            need = Need.of(pod)
            left[name] = (
                node,
                Room(room.vcpus - need.vcpus, room.memory_gib - need.memory_gib, room.gpus - need.gpus),
            )
    return {
        offer.name: sum(
            _room_for(Need.of_slice(offer), room)
            for node, room in left.values()
            if _is_for(node, offer) and is_borne(node, kind_of(node), settings)
        )
        for offer in offers
    }


def _is_for(node: Json, offer: Offer) -> bool:
    kind = kind_of(node)
    wanted = (offer.instance_type.partition(":")[0], offer.capacity_type)
    return (kind.instance_type, kind.capacity_type) == wanted and is_usable(node)


def _room_for(need: Need, room: Room) -> int:
    """Pods that a node with so much left takes."""
    pairs = ((room.vcpus, need.vcpus), (room.memory_gib, need.memory_gib), (room.gpus, need.gpus))
    return max(0, int(min(math.floor(has / asked + 1e-9) for has, asked in pairs if asked > 0)))
