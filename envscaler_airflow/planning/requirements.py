"""What a stage needs of a machine, and why an offer does not meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.planning.record import Record, check_finite

Capacity = Literal["spot", "on-demand", "auto"]


@dataclass(frozen=True, slots=True)
class Requirements(Record):
    """Needs of one node, and how many nodes.

    Attributes:
        vcpus: CPUs per node, >= 0.
        memory_gib: Memory per node, GiB, >= 0.
        gpus: GPUs per node; 0: none needed.
        gpu_types: Canonical names that will do; empty: any.
        gpu_memory_gb: Nominal memory of one GPU, GB, at least; None: any.
        min_nodes, max_nodes: Nodes that the stage can start on.
        capacity: ``spot``, ``on-demand``, or ``auto`` for both.
        can_checkpoint: False: an interruption loses everything.
        tolerated_loss_h: A stage that cannot checkpoint runs on spot up to so many hours.
            Chosen: half an hour of work is lost without regret.
        max_usd_per_hour: Highest price of all nodes together; None: no limit.
    """

    vcpus: float = 0.0
    memory_gib: float = 0.0
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    gpu_memory_gb: float | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    capacity: Capacity = "auto"
    can_checkpoint: bool = True
    tolerated_loss_h: float = 0.5
    max_usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse NaN, negative needs and a range of nodes that is empty."""
        check_finite(
            vcpus=self.vcpus,
            memory_gib=self.memory_gib,
            gpus=self.gpus,
            gpu_memory_gb=self.gpu_memory_gb,
            tolerated_loss_h=self.tolerated_loss_h,
            max_usd_per_hour=self.max_usd_per_hour,
        )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 or more, min to max, got {self.min_nodes}..{self.max_nodes}")


@dataclass(frozen=True, slots=True)
class Misfit(Record):
    """One need that an offer does not meet.

    Attributes:
        need: Which: ``cpu``, ``memory``, ``gpu.count``, ``gpu.type``, ``gpu.memory``, ``capacity``, ...
        reason: For people, with both numbers.
        shortfall: Part of the need that is missing, 0 to 1; 1 for what cannot be had in part.
    """

    need: str
    reason: str
    shortfall: float = 1.0


def misfits(requirements: Requirements, offer: Offer) -> tuple[Misfit, ...]:
    """Needs that one node of *offer* does not meet, in the order in which they exclude; empty: it fits."""
    found = [
        _too_little("cpu", requirements.vcpus, offer.vcpus, "vCPUs"),
        _too_little("memory", requirements.memory_gib, offer.memory_gib, "GiB"),
        *_gpu_misfits(requirements, offer),
    ]
    if requirements.capacity not in ("auto", offer.capacity_type):
        found.append(Misfit("capacity", f"is {offer.capacity_type}, {requirements.capacity} asked"))
    return tuple(item for item in found if item is not None)


def _gpu_misfits(requirements: Requirements, offer: Offer) -> list[Misfit | None]:
    if requirements.gpus == 0:
        return []
    found: list[Misfit | None] = [_too_little("gpu.count", requirements.gpus, offer.gpus, "GPUs")]
    wanted = {name.casefold() for name in requirements.gpu_types}
    if wanted and offer.gpu_name is not None and offer.gpu_name.casefold() not in wanted:
        kinds = " or ".join(requirements.gpu_types)
        found.append(Misfit("gpu.type", f"has {offer.gpu_name}, {kinds} asked"))
    if requirements.gpu_memory_gb is not None and offer.gpus > 0:
        if offer.gpu_memory_gb is None:
            found.append(
                Misfit("gpu.memory", f"its GPU memory is unknown, {requirements.gpu_memory_gb:g} GB asked")
            )
        else:
            asked, has = requirements.gpu_memory_gb, offer.gpu_memory_gb
            found.append(_too_little("gpu.memory", asked, has, "GB of GPU memory"))
    return found


def _too_little(need: str, asked: float, has: float, unit: str) -> Misfit | None:
    if has >= asked:
        return None
    return Misfit(need, f"has {has:g} {unit}, {asked:g} asked", 1 - has / asked)
