"""Mixed fleets: a core that stays, on demand, and the rest on spot of the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envscaler_airflow.planning.objective import Estimate, estimate
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.planning.planner import Candidate, Goal, Work
from envscaler_airflow.planning.record import Record


@dataclass(frozen=True, slots=True)
class Fleet(Record):
    """Nodes of one instance type and region, of two capacity types.

    Attributes:
        core: On demand: rank 0 and the stage's least number of nodes.
        rest: Spot, as many more.
        usd_per_hour: Of all.
        estimate: None when speed or work is unknown.
    """

    core: Allocation
    rest: Allocation
    usd_per_hour: float
    estimate: Estimate | None = None


def mixed_fleets(
    candidates: Sequence[Candidate],
    *,
    min_nodes: int,
    work: Work,
    goal: Goal,
    hour_usd: float,
) -> list[Fleet]:
    """Fleets that the candidates of one plan can be joined to, the best first.

    For each on-demand candidate of more nodes than *min_nodes*, the cheapest spot offer of the same type in
    the same region takes the nodes above it. A lost spot node restarts the stage from its last checkpoint, so
    interruptions are those of the spot nodes together.
    """
    spot: dict[tuple[object, ...], Candidate] = {}
    for item in candidates:
        offer, usd = item.allocation.offer, item.allocation.offer.usd_per_hour
        if offer.capacity_type != "spot" or usd is None:
            continue
        key = _type_of(offer)
        best = spot.get(key)
        if best is None or usd < (best.allocation.offer.usd_per_hour or usd):
            spot[key] = item
    found = []
    for item in candidates:
        offer = item.allocation.offer
        partner = spot.get(_type_of(offer))
        if offer.capacity_type == "on-demand" and partner is not None and item.allocation.nodes > min_nodes:
            fleet = _join(item, partner, min_nodes, work, hour_usd)
            if fleet is not None:
                found.append(fleet)
    return sorted(found, key=lambda fleet: _rank(fleet, goal))


def _type_of(offer: Offer) -> tuple[object, ...]:
    return offer.cloud, offer.region, offer.instance_type, offer.gpu_name, offer.gpus


def _join(whole: Candidate, spot: Candidate, min_nodes: int, work: Work, hour_usd: float) -> Fleet | None:
    core = Allocation(whole.allocation.offer, min_nodes)
    rest = Allocation(spot.allocation.offer, whole.allocation.nodes - min_nodes)
    if core.usd_per_hour is None or rest.usd_per_hour is None:
        return None
    usd = core.usd_per_hour + rest.usd_per_hour
    if whole.speed is None or work.units is None:
        return Fleet(core, rest, usd)
    rate = work.interruptions_per_hour.get(rest.offer.name, 0.0) * rest.nodes
    expected = estimate(
        work.units,
        whole.speed,
        usd_per_hour=usd,
        value_of_hour=hour_usd,
        overheads=work.overheads,
        interruptions_per_hour=rate,
    )
    return Fleet(core, rest, usd, expected)


def _rank(fleet: Fleet, goal: Goal) -> tuple[bool, bool, float, str]:
    expected = fleet.estimate
    late = (
        expected is not None and goal.deadline_s is not None and expected.hours_high * 3600 > goal.deadline_s
    )
    worth = fleet.usd_per_hour if expected is None else expected.objective or 0.0
    return expected is None, late, worth, f"{fleet.core.name} + {fleet.rest.name}"
