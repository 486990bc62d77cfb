"""Mixed fleets: an on-demand core, and the remaining nodes on spot of the same instance type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from envscaler_airflow.planning.offers import Allocation, Offer


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
