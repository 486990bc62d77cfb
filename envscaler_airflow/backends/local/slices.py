"""Offers of this machine, and what a spec asks beyond it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envscaler_airflow.backends.local.machine import GIB, Gpu, Machine
from envscaler_airflow.catalog import scaled_price, shadow_offer
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.spec.quantities import cpu_cores, gpu_memory_gb, memory_bytes

SHARED_SUFFIX = "-shared"
"""An offer of this kind is not counted: it shares the machine with whatever else runs."""


def is_shared(offer: Offer) -> bool:
    """True for an offer that says itself that it shares."""
    return offer.instance_type.endswith(SHARED_SUFFIX)


def slice_offers(machine: Machine, prices: Mapping[str, float] | None = None) -> tuple[Offer, ...]:
    """``local/cpu-1``, ``local/cpu-2``, ... up to all CPUs; ``local/gpu-1``, ... where there are GPUs.

    Counts are powers of two and the full count. Memory, and CPUs of a GPU slice, are in proportion.
    The price is a shadow price: that of the nearest published cloud type, by the slice's share of it;
    *prices* (USD per hour by name, such as ``cpu-2``) stand in its place.
    """
    cpus, usable_gib = len(machine.cpus), machine.usable_memory_bytes / GIB
    shadow = shadow_offer(cpus, machine.memory_bytes / GIB, arch=machine.arch)
    offers = [
        _offer(f"cpu-{count}", count, usable_gib * count / cpus, shadow=shadow) for count in _counts(cpus)
    ]
    for name in sorted({gpu.name for gpu in machine.gpus}):
        offers += _gpu_offers(machine, name)
    return tuple(_priced(offer, prices or {}) for offer in offers)


def _priced(offer: Offer, prices: Mapping[str, float]) -> Offer:
    if offer.instance_type not in prices:
        return offer
    return replace(offer, usd_per_hour=prices[offer.instance_type], price_source="set in the configuration")


def _gpu_offers(machine: Machine, name: str) -> list[Offer]:
    ours = [gpu for gpu in machine.gpus if gpu.name == name]
    cpus, usable_gib = len(machine.cpus), machine.usable_memory_bytes / GIB
    shadow = shadow_offer(cpus, machine.memory_bytes / GIB, gpu_name=name, gpus=len(ours), arch=machine.arch)
    kinds = len({gpu.name for gpu in machine.gpus})
    suffix = "" if kinds == 1 else "-" + name.lower().replace(" ", "-")
    offers = []
    for count in _counts(len(ours)):
        share = count / len(machine.gpus)
        vcpus = max(1, math.floor(cpus * share))
        offers.append(
            _offer(f"gpu-{count}{suffix}", vcpus, usable_gib * share, shadow=shadow, gpus=ours[:count])
        )
    return offers


def _counts(full: int) -> list[int]:
    powers = [2**exponent for exponent in range(full.bit_length()) if 2**exponent <= full]
    return powers if full in powers else [*powers, full]


def _offer(
    name: str, vcpus: float, memory_gib: float, *, shadow: Offer | None, gpus: Sequence[Gpu] = ()
) -> Offer:
    price = scaled_price(shadow, vcpus=vcpus, gpus=len(gpus)) if shadow else None
    source = "no published type has this GPU"
    if shadow:
        kind = f"{shadow.cloud} {shadow.instance_type} {shadow.capacity_type} {shadow.region}"
        source = f"shadow price: {kind}, {shadow.price_source}"
    return Offer(
        cloud="local",
        region="",
        instance_type=name,
        capacity_type="on-demand",
        vcpus=float(vcpus),
        memory_gib=math.floor(memory_gib * 100) / 100,
        gpu_name=gpus[0].name if gpus else None,
        gpus=len(gpus),
        gpu_memory_gb=gpus[0].memory_gb if gpus else None,
        usd_per_hour=price,
        price_source=source,
    )


def shortfalls(spec: Mapping[str, Any], machine: Machine) -> list[str]:
    """What *spec* asks for and *machine* can never give; one sentence each, [] when it fits.

    Of alternatives (``any_of``, ``ordered``) one that fits is enough; when none does, the one that
    misses least is told.

    Args:
        spec: Resolved spec as JSON.
        machine: This machine, when nothing else runs on it.
    """
    resources = spec.get("resources") or {}
    alternatives = resources.get("any_of") or resources.get("ordered") or [resources]
    return min((_missing(one, machine) for one in alternatives), key=len)


def _missing(resources: Mapping[str, Any], machine: Machine) -> list[str]:
    requests = resources.get("requests") or {}
    missing = []
    cpu = requests.get("cpu")
    if cpu is not None and cpu_cores(cpu) > len(machine.cpus):
        missing.append(f"cpu: {cpu_cores(cpu):g} asked, this machine has {len(machine.cpus)}")
    memory = asked_memory(requests)
    if memory is not None and memory > machine.usable_memory_bytes:
        has = machine.usable_memory_bytes / GIB
        missing.append(f"memory: {memory / GIB:.4g}Gi asked, this machine can give {has:.4g}Gi")
    gpu = None if resources.get("cpu_fallback") else requests.get("gpu")
    return missing + _gpu_shortfalls(gpu, machine)


def asked_memory(quantities: Mapping[str, Any]) -> int | None:
    """Bytes of ``memory`` in *quantities*: a Kubernetes quantity or a number of bytes; None when absent."""
    value = quantities.get("memory")
    if value is None or isinstance(value, int):
        return value
    return memory_bytes(value)


def _gpu_shortfalls(gpu: Mapping[str, Any] | None, machine: Machine) -> list[str]:
    count = int(gpu.get("count") or 0) if gpu else 0
    if gpu is None or not count:
        return []
    types = gpu.get("type") or []
    wanted = [types] if isinstance(types, str) else [str(kind) for kind in types]
    least_gb = gpu_memory_gb(gpu["memory"]) if gpu.get("memory") else 0.0
    named = [one for one in machine.gpus if not wanted or one.name in wanted]
    fitting = [one for one in named if one.memory_gb >= least_gb]
    if len(fitting) >= count:
        return []
    kind = " or ".join(wanted) if wanted else "any type"
    size = f" with {least_gb:g} GB" if least_gb else ""
    return [f"gpu: {count} of {kind}{size} asked, this machine has {len(fitting)}"]


def allocation_shortfalls(allocation: Allocation, machine: Machine) -> list[str]:
    """What all nodes of *allocation* take together beyond the whole machine; [] when it fits."""
    offer, nodes = allocation.offer, allocation.nodes
    if is_shared(offer):
        return []
    missing = []
    if offer.vcpus * nodes > len(machine.cpus):
        missing.append(f"cpu: {offer.vcpus * nodes:g} asked, this machine has {len(machine.cpus)}")
    if offer.memory_gib * nodes > machine.usable_memory_bytes / GIB:
        has = machine.usable_memory_bytes / GIB
        missing.append(f"memory: {offer.memory_gib * nodes:.4g}Gi asked, this machine can give {has:.4g}Gi")
    have = sum(gpu.name == offer.gpu_name for gpu in machine.gpus)
    if offer.gpus * nodes > have:
        missing.append(f"gpu: {offer.gpus * nodes} of {offer.gpu_name} asked, this machine has {have}")
    return missing
