"""Offers and allocations: what is available, and what a stage runs on, also as a mixed fleet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Lt

from envscaler_airflow.planning.record import Record

CapacityType = Literal["spot", "on-demand"]
Size = Annotated[int | float, Lt(10**15)]
"""A number of a machine, read as it is written. Chosen: below the precision of a float."""


class InstanceType(NamedTuple):
    """A machine on offer: what is the same at every place, without capacity type and price.

    Attributes:
        gpus: Below one for a fraction of a GPU, which never meets a request for whole GPUs.
    """

    cloud: str
    instance_type: str
    vcpus: float
    memory_gib: float
    gpu_name: str | None = None
    gpus: float = 0.0
    gpu_memory_gb: float | None = None
    arch: str | None = None
    is_attached: bool = False


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """One instance type, or share of a machine, at one place and capacity type.

    Attributes:
        cloud: ``aws``, ``gcp``, ..., ``kubernetes`` or ``local``.
        region: Region; ``""`` for local.
        zone: Zone; None for any zone.
        instance_type: The provider's name; ``cpu-2`` for a local share of two cores.
        capacity_type: ``spot`` or ``on-demand``.
        vcpus: Virtual CPUs per node, > 0.
        memory_gib: Memory per node, GiB, > 0.
        gpu_name: Canonical GPU name; None without GPU.
        gpus: GPUs per node.
        gpu_memory_gb: Nominal memory of one GPU, GB; None without GPU or unknown.
        usd_per_hour: Price of one node; None is unknown, 0 is free.
        price_source: Where the price is from, with its date; it also states if this is a shadow price.
        arch: ``x86_64`` or ``arm64``; None is unknown, and meets any requirement.
        is_attached: Its GPUs are attached to a host type that is also sold without them.
    """

    cloud: str
    region: str
    instance_type: str
    capacity_type: CapacityType
    vcpus: Size
    memory_gib: Size
    zone: str | None = None
    gpu_name: str | None = None
    gpus: Annotated[int, Lt(10**15)] = 0
    gpu_memory_gb: Size | None = None
    usd_per_hour: Size | None = None
    price_source: str = ""
    arch: str | None = None
    is_attached: bool = False

    def __post_init__(self) -> None:
        """Reject NaN and values out of range, once at construction."""
        # Written out for speed: catalogs have a hundred thousand offers.
        if not (0 < self.vcpus < math.inf and 0 < self.memory_gib < math.inf):
            raise ValueError(
                f"vcpus and memory_gib must be finite and > 0, got {self.vcpus!r}, {self.memory_gib!r}"
            )
        if not 0 <= self.gpus < math.inf:
            raise ValueError(f"gpus must be finite and >= 0, got {self.gpus!r}")
        if self.usd_per_hour is not None and not 0 <= self.usd_per_hour < math.inf:
            raise ValueError(f"usd_per_hour must be finite and >= 0, got {self.usd_per_hour!r}")
        if self.gpu_memory_gb is not None and not 0 <= self.gpu_memory_gb < math.inf:
            raise ValueError(f"gpu_memory_gb must be finite and >= 0, got {self.gpu_memory_gb!r}")
        if (self.gpus > 0) != (self.gpu_name is not None):
            raise ValueError(f"gpus={self.gpus!r} does not go with gpu_name={self.gpu_name!r}")

    @property
    def name(self) -> str:
        """``aws/us-east-1/us-east-1a/g5.xlarge/spot`` without empty parts; ``local/cpu-2`` for local.

        Attached GPUs follow the host type: ``n1-standard-8+V100:1``.
        """
        attached = f"+{self.gpu_name}:{self.gpus}" if self.is_attached else ""
        parts = [self.cloud, self.region, self.zone, self.instance_type + attached]
        if self.cloud != "local":
            parts.append(self.capacity_type)
        return "/".join(part for part in parts if part)

    @property
    def machine(self) -> InstanceType:
        """The machine, regardless of place, capacity type and price."""
        return InstanceType(
            self.cloud,
            self.instance_type,
            self.vcpus,
            self.memory_gib,
            self.gpu_name,
            float(self.gpus),
            self.gpu_memory_gb,
            self.arch,
            self.is_attached,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as in events and in plan.json; only attached GPUs are marked."""
        found = Record.to_dict(self)
        if not self.is_attached:
            del found["is_attached"]
        return found


@dataclass(frozen=True, slots=True)
class AllocationPart:
    """Nodes of one offer within an allocation: ranks *first_rank* to *first_rank + nodes - 1*."""

    offer: Offer
    nodes: int
    first_rank: int = 0


@dataclass(frozen=True, slots=True)
class Allocation(Record):
    """The nodes that one attempt runs on: of one offer, or of two with the same GPUs.

    Attributes:
        offer: The offer of each node; in a mixed allocation, the offer of rank 0.
        nodes: Number of nodes in total, >= 1.
        rest: The offer of the last ``rest_nodes`` ranks, usually spot; None: all nodes are of ``offer``.
        rest_nodes: How many of ``nodes`` are of ``rest``; at least rank 0 is of ``offer``.
    """

    offer: Offer
    nodes: int = 1
    rest: Offer | None = None
    rest_nodes: int = 0

    def __post_init__(self) -> None:
        """Reject an empty allocation, and parts that one job cannot run across."""
        if self.nodes < 1:
            raise ValueError(f"nodes must be >= 1, got {self.nodes!r}")
        if not 0 <= self.rest_nodes < self.nodes:
            raise ValueError(f"rest_nodes must be >= 0 and < nodes={self.nodes}, got {self.rest_nodes!r}")
        if (self.rest is not None) != (self.rest_nodes > 0):
            raise ValueError(f"rest_nodes={self.rest_nodes!r} does not go with rest={self.rest!r}")
        if self.rest is not None and _joins(self.rest) != _joins(self.offer):
            raise ValueError(
                f"{self.offer.name} and {self.rest.name} are not of one cloud and region with the same GPUs"
            )

    @property
    def is_mixed(self) -> bool:
        """True when its nodes are of two offers."""
        return self.rest is not None

    @property
    def parts(self) -> tuple[AllocationPart, ...]:
        """Its nodes by offer, in the order of ranks; one part unless it is mixed."""
        if self.rest is None:
            return (AllocationPart(self.offer, self.nodes),)
        first = self.nodes - self.rest_nodes
        return AllocationPart(self.offer, first), AllocationPart(self.rest, self.rest_nodes, first)

    @property
    def name(self) -> str:
        """``2 x local/cpu-1``; only the offer's name for one node; ``1 x A + 3 x B`` for a mixed one."""
        if self.rest is not None:
            return " + ".join(f"{part.nodes} x {part.offer.name}" for part in self.parts)
        return self.offer.name if self.nodes == 1 else f"{self.nodes} x {self.offer.name}"

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all nodes; None when the price of any node is unknown."""
        price = self.offer.usd_per_hour
        if self.rest is None or price is None:
            return None if price is None else price * self.nodes
        other = self.rest.usd_per_hour
        return None if other is None else price * (self.nodes - self.rest_nodes) + other * self.rest_nodes

    def offer_of(self, rank: int) -> Offer:
        """The offer of node *rank*.

        Raises:
            ValueError: There is no such node.
        """
        for part in self.parts:
            if part.first_rank <= rank < part.first_rank + part.nodes:
                return part.offer
        raise ValueError(f"rank must be >= 0 and < nodes={self.nodes}, got {rank!r}")

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as in events and in plan.json; a mixed allocation has two more keys."""
        found = Record.to_dict(self)
        if not self.is_mixed:
            del found["rest_nodes"]
        return found


def _joins(offer: Offer) -> tuple[object, ...]:
    """Properties that the parts of one allocation must have in common."""
    return offer.cloud, offer.region, offer.gpu_name, offer.gpus


def mixed_allocations(allocations: Iterable[Allocation], *, min_nodes: int) -> Iterator[Allocation]:
    """On-demand *allocations* with their nodes above *min_nodes* moved to the cheapest spot of the type.

    Rank 0 and the first *min_nodes* nodes stay on demand, so that the stage can continue after losing any
    spot node. An on-demand allocation is skipped if it has no more nodes than that, or if its instance
    type has no spot offer at a known price in the same region.
    """
    known = tuple(allocations)
    spot = _cheapest_spot(item.offer for item in known)
    for item in known:
        partner = spot.get(_type_of(item.offer))
        if item.offer.capacity_type == "on-demand" and partner is not None and item.nodes > min_nodes:
            yield Allocation(item.offer, item.nodes, rest=partner, rest_nodes=item.nodes - min_nodes)


def losses_per_hour(allocation: Allocation, rates: Mapping[str, float]) -> float:
    """Losses per hour of any node of *allocation*; *rates* are per node, by offer name; 0 if missing."""
    return sum(rates.get(part.offer.name, 0.0) * part.nodes for part in allocation.parts)


def has_spot(allocation: Allocation) -> bool:
    """True when any of its nodes can be interrupted."""
    return any(part.offer.capacity_type == "spot" for part in allocation.parts)


def _cheapest_spot(offers: Iterable[Offer]) -> dict[tuple[object, ...], Offer]:
    found: dict[tuple[object, ...], tuple[float, str, Offer]] = {}
    for offer in offers:
        if offer.capacity_type == "spot" and offer.usd_per_hour is not None:
            worth = (offer.usd_per_hour, offer.name, offer)
            found[_type_of(offer)] = min(worth, found.get(_type_of(offer), worth), key=lambda item: item[:2])
    return {key: offer for key, (_, _, offer) in found.items()}


def _type_of(offer: Offer) -> tuple[object, ...]:
    return offer.cloud, offer.region, offer.instance_type, offer.gpu_name, offer.gpus
