"""Offers of a cluster: slices of its nodes, or the classes that its owner wrote down. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.kubernetes.render import COURIER_CPUS, COURIER_MEMORY_BYTES
from envscaler_airflow.backends.kubernetes.scheduling import (
    ARCH,
    BY_GPU,
    GPU_LABELS,
    GPU_PRODUCT,
    INSTANCE_TYPE,
    UNLABELLED,
    borne_taints,
    capacity_of,
)
from envscaler_airflow.backends.kubernetes.settings import Settings
from envscaler_airflow.catalog import canonical_gpu
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.spec.gpus import MEMORY_GB

GIB = 1 << 30
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_ARCHES = {"amd64": "x86_64", "arm64": "arm64"}
_SUFFIXES = {
    "": 1.0,
    "m": 0.001,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What nodes have in common that a pod may be bound to.

    Attributes:
        instance_type: As an offer names it.
        capacity_type: ``spot`` or ``on-demand``.
        arch: As an offer names it; None is unknown.
        gpu_name: Canonical; None without GPU.
    """

    instance_type: str
    capacity_type: str
    arch: str | None
    gpu_name: str | None


@dataclass(frozen=True, slots=True)
class Room:
    """What can be had of one node."""

    vcpus: float
    memory_gib: float
    gpus: int


def quantity(text: str) -> float:
    """Value of a Kubernetes quantity as a server writes it: ``3920m``, ``16Gi``, ``8``.

    Raises:
        ValueError: It is none.
    """
    number = text.rstrip("mkKMGTi")
    return float(number) * _SUFFIXES[text[len(number) :]]


def derived_offers(nodes: Iterable[Mapping[str, Any]], settings: Settings) -> tuple[Offer, ...]:
    """Slices of every kind of node, smallest first: powers of two and the whole."""
    rooms: dict[Kind, Room] = {}
    for node in nodes:
        kind, room = kind_of(node), room_of(node)
        if (
            room.vcpus < 1
            or room.memory_gib <= 0
            or not is_usable(node)
            or not is_borne(node, kind, settings)
        ):
            continue
        known = rooms.get(kind)
        rooms[kind] = room if known is None else _least(known, room)
    offers = [offer for kind, room in rooms.items() for offer in _slices(kind, room, settings)]
    return tuple(sorted(offers, key=lambda offer: (offer.gpus, offer.vcpus, offer.name)))


def _least(one: Room, other: Room) -> Room:
    return Room(min(one.vcpus, other.vcpus), min(one.memory_gib, other.memory_gib), min(one.gpus, other.gpus))


def kind_of(node: Mapping[str, Any]) -> Kind:
    """What an offer says of this node."""
    labels = node["metadata"].get("labels") or {}
    gpu_label = next((labels[key] for key in GPU_LABELS if labels.get(key)), None)
    has_gpu = room_of(node).gpus > 0
    name = (_canonical(gpu_label, labels) if gpu_label else "GPU") if has_gpu else None
    instance = labels.get(INSTANCE_TYPE)
    if instance is None:
        product = labels.get(GPU_PRODUCT) if has_gpu else None
        instance = BY_GPU + product if product else UNLABELLED
    return Kind(instance, capacity_of(labels), _ARCHES.get(labels.get(ARCH, "")), name)


def _canonical(label: str, labels: Mapping[str, str]) -> str:
    """The catalog's name of ``NVIDIA-A100-SXM4-80GB`` or ``nvidia-tesla-t4``."""
    memory = labels.get("nvidia.com/gpu.memory", "")
    measured = float(memory) * (1 << 20) / 1e9 if memory.isdigit() else None
    return canonical_gpu(label.replace("NVIDIA-", "NVIDIA ").replace("Tesla-", "Tesla "), measured)


def room_of(node: Mapping[str, Any]) -> Room:
    """What the training of one pod can have of this node when it is empty."""
    whole = whole_of(node)
    cpus = round(whole.vcpus - COURIER_CPUS, 3)  # whole millicores
    return Room(cpus, whole.memory_gib - COURIER_MEMORY_BYTES / GIB, whole.gpus)


def whole_of(node: Mapping[str, Any]) -> Room:
    """What all pods can have of this node when it is empty."""
    found = (node.get("status") or {}).get("allocatable") or {}
    gpus = sum(int(quantity(str(found.get(name, "0")))) for name in GPU_RESOURCES)
    memory = quantity(str(found.get("memory", "0")))
    return Room(quantity(str(found.get("cpu", "0"))), memory / GIB, gpus)


def is_usable(node: Mapping[str, Any]) -> bool:
    """True when it is ready and takes pods."""
    if (node.get("spec") or {}).get("unschedulable"):
        return False
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
    return bool(ready == "True")


def is_borne(node: Mapping[str, Any], kind: Kind, settings: Settings) -> bool:
    """True when pods of such an offer bear every taint that keeps others off the node."""
    ours = borne_taints(settings, has_gpus=kind.gpu_name is not None, is_spot=kind.capacity_type == "spot")
    taints = (node.get("spec") or {}).get("taints") or ()
    return all(
        any(one["key"] == taint.get("key") and one.get("value") in (None, taint.get("value")) for one in ours)
        for taint in taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    )


def _slices(kind: Kind, room: Room, settings: Settings) -> list[Offer]:
    full = room.gpus or math.floor(room.vcpus)
    return [_slice(kind, room, settings, count, full) for count in _counts(full)]


def _counts(full: int) -> Sequence[int]:
    powers = [2**exponent for exponent in range(full.bit_length()) if 2**exponent <= full]
    return powers if full in powers else [*powers, full]


def _slice(kind: Kind, room: Room, settings: Settings, count: int, full: int) -> Offer:
    share = count / full
    vcpus = max(1, math.floor(room.vcpus * share)) if room.gpus else count
    suffix = f"gpu-{count}" if room.gpus else f"cpu-{count}"
    price = settings.usd_per_hour.get(kind.instance_type)
    gpu_memory = MEMORY_GB.get(kind.gpu_name) if kind.gpu_name else None
    return Offer(
        cloud="kubernetes",
        region=settings.region,
        instance_type=f"{kind.instance_type}:{suffix}",
        capacity_type=kind.capacity_type,  # type: ignore[arg-type]  # capacity_of gives these two
        vcpus=float(vcpus),
        memory_gib=math.floor(room.memory_gib * share * 100) / 100,
        gpu_name=kind.gpu_name,
        gpus=count if room.gpus else 0,
        gpu_memory_gb=gpu_memory,
        usd_per_hour=None if price is None else price * share,
        price_source="" if price is None else f"usd_per_hour of the configuration, {share:.3g} of a node",
        arch=kind.arch,
    )
