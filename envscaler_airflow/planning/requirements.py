"""What a stage needs from a machine, and why an offer does not meet it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from envscaler_airflow.envspec.gpus import is_share, vendor_of
from envscaler_airflow.planning.offers import InstanceType, Offer
from envscaler_airflow.planning.record import NotNegative, Record

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec
    from envscaler_airflow.envspec.resources import NodeRange, Resources

Capacity = Literal["spot", "on-demand", "auto"]


@dataclass(frozen=True, slots=True)
class Requirements(Record):
    """Needs of one node, and the number of nodes.

    Attributes:
        vcpus: CPUs per node, >= 0.
        memory_gib: Memory per node, GiB, >= 0.
        gpus: GPUs per node; 0: none needed.
        gpu_types: Accepted canonical names; empty: any.
        gpu_memory_gb, gpu_memory_max_gb: Minimum and maximum nominal memory of one GPU, GB; None: any.
        cloud, region, zone, instance_type: The only place or type that is allowed; None: any.
        min_nodes, max_nodes: Nodes that the stage can start on.
        capacity: ``spot``, ``on-demand``, or ``auto`` for both.
        can_checkpoint: False: an interruption loses everything.
        tolerated_loss_h: A stage that cannot checkpoint runs on spot if it takes at most this many hours.
            Chosen: losing half an hour of work is acceptable.
        arch: ``x86_64`` or ``arm64``; None: any. An offer of unknown architecture passes.
        exact_gpus: A node with more GPUs than requested does not fit.
        gpu_vendor: ``nvidia``, ``amd`` or ``intel``; None: any but Intel's.
        model_parallel: GPUs (or nodes, without GPUs) per copy of the model; only complete groups count.
        max_usd_per_hour: Highest price of all nodes together; None: no limit.
        disk_gib: Disk per node, GiB; it costs money but excludes no offer. 0: the disk included with the
            machine.
    """

    vcpus: NotNegative[float] = 0.0
    memory_gib: NotNegative[float] = 0.0
    gpus: NotNegative[int] = 0
    gpu_types: tuple[str, ...] = ()
    gpu_memory_gb: NotNegative[float] | None = None
    gpu_memory_max_gb: NotNegative[float] | None = None
    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    instance_type: str | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    capacity: Capacity = "auto"
    can_checkpoint: bool = True
    tolerated_loss_h: NotNegative[float] = 0.5
    model_parallel: int = 1
    max_usd_per_hour: NotNegative[float] | None = None
    arch: str | None = None
    gpu_vendor: str | None = None
    exact_gpus: bool = False
    disk_gib: NotNegative[float] = 0.0

    def __post_init__(self) -> None:
        """Reject NaN, negative needs and an empty range of nodes."""
        Record.__post_init__(self)
        if self.model_parallel < 1:
            raise ValueError(f"model_parallel must be >= 1, got {self.model_parallel!r}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 or more, min to max, got {self.min_nodes}..{self.max_nodes}")


@dataclass(frozen=True, slots=True)
class Misfit(Record):
    """One need that an offer does not meet.

    Attributes:
        need: Which: ``cpu``, ``memory``, ``gpu.count``, ``gpu.type``, ``gpu.memory``, ``capacity``, ...
        reason: Human-readable, with both numbers.
        shortfall: Fraction of the need that is missing, 0 to 1; 1 for a need that cannot be met in part.
    """

    need: str
    reason: str
    shortfall: float = 1.0


def misfits(requirements: Requirements, offer: Offer) -> tuple[Misfit, ...]:
    """Needs that one node of *offer* does not meet, in the order in which they exclude; empty: it fits."""
    found: list[Misfit | None] = [
        *_place_misfits(requirements, offer),
        _too_little("cpu", requirements.vcpus, offer.vcpus, "vCPUs"),
        _too_little("memory", requirements.memory_gib, offer.memory_gib, "GiB"),
        *_gpu_misfits(requirements, offer),
    ]
    if None not in (requirements.arch, offer.arch) and requirements.arch != offer.arch:
        found.append(Misfit("arch", f"is {offer.arch}, {requirements.arch} asked"))
    if requirements.capacity not in ("auto", offer.capacity_type):
        found.append(Misfit("capacity", f"is {offer.capacity_type}, {requirements.capacity} asked"))
    return tuple(item for item in found if item is not None)


def node_counts(requirements: Requirements, gpus: int) -> tuple[int, ...]:
    """Numbers of nodes of *gpus* each in range that form complete model-parallel groups; may be empty."""
    counts = range(requirements.min_nodes, requirements.max_nodes + 1)
    return tuple(count for count in counts if count * max(1, gpus) % requirements.model_parallel == 0)


def fits_node(requirements: Requirements, node: InstanceType) -> bool:
    """True when *node* meets all needs except place and capacity: a fast version of :func:`misfits`."""
    need = requirements
    if node.vcpus < need.vcpus or node.memory_gib < need.memory_gib:
        return False
    if need.instance_type not in (None, node.instance_type):
        return False
    if need.arch is not None and node.arch not in (None, need.arch):
        return False
    return need.gpus == 0 or _fits_gpus(need, node)


def fits_place(requirements: Requirements, cloud: str, region: str, zone: str) -> bool:
    """True when the place is allowed; an offer without a zone is available in every zone."""
    need = requirements
    return (
        need.cloud in (None, cloud)
        and need.region in (None, region)
        and (need.zone in (None, zone) or not zone)
    )


def _fits_gpus(need: Requirements, node: InstanceType) -> bool:
    if int(node.gpus) < need.gpus or node.gpu_name is None:
        return False
    if need.exact_gpus and int(node.gpus) != need.gpus:
        return False
    if need.gpu_types:
        if node.gpu_name.casefold() not in {name.casefold() for name in need.gpu_types}:
            return False
    elif _kind_misfit(need.gpu_vendor, node.gpu_name) is not None:
        return False
    least, most, has = need.gpu_memory_gb, need.gpu_memory_max_gb, node.gpu_memory_gb
    if has is None:
        return least is None and most is None
    return has >= (least or 0.0) and (most is None or has <= most)


def _place_misfits(requirements: Requirements, offer: Offer) -> list[Misfit | None]:
    found: list[Misfit | None] = []
    for need in ("cloud", "region", "zone", "instance_type"):
        wanted, has = getattr(requirements, need), getattr(offer, need)
        # An offer without a zone is available in every zone.
        if wanted is not None and has is not None and wanted != has:
            found.append(Misfit(need, f"{need} is {has or 'none'}, {wanted} asked"))
    return found


def _gpu_misfits(requirements: Requirements, offer: Offer) -> list[Misfit | None]:
    if requirements.gpus == 0:
        return []
    found: list[Misfit | None] = [_too_little("gpu.count", requirements.gpus, offer.gpus, "GPUs")]
    if requirements.exact_gpus and offer.gpus > requirements.gpus:
        text = f"has {offer.gpus} GPUs, exactly {requirements.gpus} asked"
        found.append(Misfit("gpu.count", text, 1 - requirements.gpus / offer.gpus))
    wanted = {name.casefold() for name in requirements.gpu_types}
    if wanted and offer.gpu_name is not None and offer.gpu_name.casefold() not in wanted:
        kinds = " or ".join(requirements.gpu_types)
        found.append(Misfit("gpu.type", f"has {offer.gpu_name}, {kinds} asked"))
    elif not wanted and offer.gpu_name is not None:
        found.append(_kind_misfit(requirements.gpu_vendor, offer.gpu_name))
    if offer.gpus > 0:
        found += _gpu_memory_misfits(requirements, offer.gpu_memory_gb)
    return found


OTHER_CHIPS = frozenset({"Gaudi", "Gaudi HL-205", "Inferentia", "Inferentia2", "Trainium", "Trainium2"})
"""Accelerators that cannot run code written for GPUs: used only when requested by name."""

VENDORS = ("nvidia", "amd", "intel")
"""Vendors that can be requested instead of a type."""


def _kind_misfit(vendor: str | None, name: str) -> Misfit | None:
    """Why *name* does not meet a request for whole GPUs of any type; None: it does."""
    if name in OTHER_CHIPS:
        return Misfit("gpu.type", f"{name} is not a GPU; request it by name")
    if is_share(name):
        return Misfit("gpu.type", f"{name} is a part of a GPU; write gpu.type: {name} to use it")
    made_by = vendor_of(name)
    if vendor is not None and vendor != made_by:
        return Misfit("gpu.vendor", f"{name} is of {made_by}, {vendor} asked")
    if vendor is None and made_by == "intel":
        return Misfit("gpu.vendor", f"{name} runs no CUDA; write gpu.vendor: intel to use it")
    return None


def _gpu_memory_misfits(requirements: Requirements, has_gb: float | None) -> list[Misfit | None]:
    least, most = requirements.gpu_memory_gb, requirements.gpu_memory_max_gb
    if least is None and most is None:
        return []
    if has_gb is None:
        bound = f"{least:g} GB" if least is not None else f"at most {most:g} GB"
        return [Misfit("gpu.memory", f"its GPU memory is unknown, {bound} asked")]
    if most is not None and has_gb > most:
        return [Misfit("gpu.memory", f"has {has_gb:g} GB of GPU memory, at most {most:g} asked")]
    return [_too_little("gpu.memory", least or 0.0, has_gb, "GB of GPU memory")]


def _too_little(need: str, wanted: float, has: float, unit: str) -> Misfit | None:
    if has >= wanted:
        return None
    return Misfit(need, f"has {has:g} {unit}, {wanted:g} asked", 1 - has / wanted)


def requirements_of(spec: EnvSpec, *, while_running: bool = False) -> tuple[Requirements, ...]:
    """Needs of *spec*: one, or one for each alternative of ``any_of`` or ``ordered``.

    With ``cpu_fallback``, the same needs without a GPU come last. The number of nodes is ``num_nodes`` at the
    start, and the range of the scaling section if *while_running*.
    """
    found = []
    nodes = spec.node_bounds if while_running else spec.num_nodes
    for resources in spec.resources.alternatives:
        found.append(_of_resources(spec, resources, nodes))
        if resources.cpu_fallback and resources.requests.gpu is not None:
            found.append(replace(found[-1], gpus=0, gpu_types=(), gpu_memory_gb=None, gpu_memory_max_gb=None))
    return tuple(found)


def is_ordered(spec: EnvSpec) -> bool:
    """True when the first available alternative is used, regardless of its cost."""
    fallback = any(item.cpu_fallback for item in spec.resources.alternatives)
    return spec.resources.is_ordered or fallback


def _of_resources(spec: EnvSpec, resources: Resources, nodes: NodeRange) -> Requirements:
    requests, gpu = resources.requests, resources.requests.gpu
    named: tuple[str, ...] = () if gpu is None else gpu.type
    types = tuple(name for name in named if name.casefold() not in VENDORS)
    vendor: str | None = None if gpu is None else gpu.vendor
    if not types and named:  # SkyPilot's "nvidia:40GB+"
        vendor = named[0].casefold()
    return Requirements(
        vcpus=requests.cpu_cores or 0.0,
        memory_gib=requests.memory_gib or 0.0,
        gpus=requests.gpu_count,
        gpu_types=types,
        gpu_memory_gb=None if gpu is None else gpu.memory_gb,
        gpu_memory_max_gb=None if gpu is None else gpu.memory_max_gb,
        gpu_vendor=vendor,
        cloud=resources.cloud,
        region=resources.region,
        zone=resources.zone,
        instance_type=resources.instance_type,
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        capacity=resources.capacity or spec.capacity,
        disk_gib=(resources.disk_bytes or 0) / 2**30,
        can_checkpoint=spec.checkpoint is not None,
        model_parallel=1 if spec.distributed is None else spec.distributed.model_parallel,
    )
