"""Choose from very many offers while examining only a few.

This is the same planner as :func:`~envscaler_airflow.planning.planner.plan`, with the same formula, ranks and
reasons. The search examines kinds in the order of a bound on their best offer. It ends when no bound is
better than the worst candidate kept.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.planning.knowledge import Knowledge
from envscaler_airflow.planning.near_misses import nearest_misses
from envscaler_airflow.planning.objective import estimate, value_of_hour
from envscaler_airflow.planning.offers import (
    Allocation,
    CapacityType,
    InstanceType,
    Offer,
    losses_per_hour,
    mixed_allocations,
)
from envscaler_airflow.planning.performance import Speed
from envscaler_airflow.planning.planner import (
    Candidate,
    Goal,
    Plan,
    Rejected,
    candidate_of,
    goal_misfits,
    is_safe,
    known_first,
    notes_of,
    rank_of,
    risk_notes,
    usd_per_unit,
    with_fleets,
)
from envscaler_airflow.planning.requirements import Misfit, Requirements, fits_node, fits_place, node_counts
from envscaler_airflow.planning.table import ANY_RATE_PER_HOUR, CAPACITIES, UNKNOWN, OfferTable

SpeedOf = Callable[[InstanceType, int], Speed | None]
"""Speed of a stage on a number of nodes of a kind; None is unknown."""

MisfitOf = Callable[[InstanceType, int], Misfit | None]
"""Why a stage cannot run on a number of nodes of a kind; None when it can."""

FLEET_TYPES, FLEET_LIMIT = 4, 60
"""Number of types to build mixed fleets of, and candidates of each. Chosen: the best ones, in a few zones."""

Rank = tuple[Any, ...]
_Found = tuple[Rank, int, Candidate]


@dataclass(frozen=True, slots=True)
class Scope:
    """Where the search may look.

    Attributes:
        clouds: Names; None: all.
        regions: By cloud; all regions of a cloud that is missing here. None: all.
    """

    clouds: Collection[str] | None = None
    regions: Mapping[str, Collection[str]] | None = None

    def has(self, cloud: str, region: str) -> bool:
        """True when the region is in scope."""
        if self.clouds is not None and cloud not in self.clouds:
            return False
        regions = (self.regions or {}).get(cloud)
        return regions is None or region in regions


@dataclass(frozen=True, slots=True)
class Search:
    """How to search.

    Attributes:
        scope: Where.
        speed_of: Prior of the speed where nothing else is known, in the unit of the work; None: no prior.
        misfit_of: Why the stage cannot run on a number of nodes of a kind, such as a model that is larger
            than the memory of its GPUs; None: no such reasons are known.
        avoid: Reason to skip an offer, such as a recent stock-out; None: no such reasons.
        limit: Maximum number of candidates kept, and of misses named.
        explain: Name the nearest misses even if something was found.
        is_mixed: Also consider fleets that combine on-demand and spot, of the best types.
    """

    scope: Scope = field(default_factory=Scope)
    speed_of: SpeedOf | None = None
    misfit_of: MisfitOf | None = None
    avoid: Callable[[Offer], str | None] | None = None
    limit: int = 20
    explain: bool = False
    is_mixed: bool = False

    def __post_init__(self) -> None:
        """Reject a search that keeps nothing."""
        if self.limit < 1:
            raise ValueError(f"limit must be >= 1, got {self.limit!r}")


def search(
    requirements: Requirements | Sequence[Requirements],
    table: OfferTable,
    *,
    goal: Goal | None = None,
    knowledge: Knowledge | None = None,
    how: Search | None = None,
    is_ordered: bool = False,
) -> Plan:
    """The best *limit* candidates of *table*, in the order in which :func:`plan` would rank them all.

    Args:
        requirements: One, or several alternatives: an offer that meets any of them qualifies.
        table: Offers.
        goal: By default least cost.
        knowledge: What is known of the stage. Only speeds by machine are used, not those of one place.
        how: Scope, speeds, what to avoid, how many to keep.
        is_ordered: The first alternative that any offer meets is used, regardless of its cost.
    """
    needs = (requirements,) if isinstance(requirements, Requirements) else tuple(requirements)
    if not needs:
        raise ValueError("requirements: none given")
    how, goal, known = how or Search(), goal or Goal(), knowledge or Knowledge()
    if not is_ordered:
        return _look(needs, table, how, goal, known)
    first = None
    for need in needs:
        got = _look((need,), table, how, goal, known)
        if got.chosen is not None:
            return got
        first = first or got
    return first or Plan(None)


def _look(
    needs: Sequence[Requirements], table: OfferTable, how: Search, goal: Goal, known: Knowledge
) -> Plan:
    """One search; where data are bound to a place, a note names what that excluded."""
    got = _Searcher(table, how, goal, known).find(needs)
    if how.is_mixed:
        found = _fleets(got.value_of_hour_usd or 0.0, needs, table, how=how, goal=goal, known=known)
        got = with_fleets(got, found, goal, limit=how.limit)
    bound = [item for item in known.data if item.is_bound]
    if not bound:
        return got
    free = replace(known, data=tuple(replace(item, is_bound=False) for item in known.data))
    one = replace(how, limit=1, explain=False, is_mixed=False)
    other = _Searcher(table, one, goal, free).find(needs).chosen
    if other is None or (got.chosen is not None and other.allocation == got.chosen.allocation):
        return got
    names = ", ".join(f"{item.name} ({item.place})" for item in bound)
    price = "?" if other.usd_per_hour is None else f"{other.usd_per_hour:.4f}"
    note = f"data that can be used in one place alone exclude {other.allocation.name} at ${price}/h: {names}"
    return replace(got, notes=(*got.notes, note))


def _fleets(
    hour_usd: float,
    needs: Sequence[Requirements],
    table: OfferTable,
    *,
    how: Search,
    goal: Goal,
    known: Knowledge,
) -> Iterator[tuple[Requirements, Candidate]]:
    """Mixed fleets of the best types, if the stage can lose a node and may have more than it needs."""
    # Limits are checked on the fleet: one that is too expensive on demand alone may be affordable with spot.
    free = replace(goal, budget_usd=None, deadline_s=None, value_of_hour_usd=hour_usd)
    some = replace(how, limit=FLEET_LIMIT, explain=False, is_mixed=False)
    for need in needs:
        if need.capacity != "auto" or not need.can_checkpoint or need.max_nodes == need.min_nodes:
            continue
        wide = replace(need, max_usd_per_hour=None)
        for cloud, region, name in _best_types(wide, table, some, free, known):
            here = replace(wide, cloud=cloud, region=region, instance_type=name)
            found = _Searcher(table, some, free, known).find((here,)).candidates
            speeds = {item.allocation: item.speed for item in found}
            for allocation in mixed_allocations(speeds, min_nodes=need.min_nodes):
                candidate = candidate_of(
                    allocation,
                    speeds[Allocation(allocation.offer, allocation.nodes)],
                    known,
                    goal,
                    hour_usd=hour_usd,
                    losses_per_hour=losses_per_hour(allocation, table.rates_of(allocation)),
                    disk_gib=need.disk_gib,
                )
                yield need, candidate


def _best_types(
    need: Requirements, table: OfferTable, how: Search, goal: Goal, known: Knowledge
) -> list[tuple[str, str, str]]:
    """Cloud, region and type of the few best candidates."""
    offers = [item.allocation.offer for item in _Searcher(table, how, goal, known).find((need,)).candidates]
    found = dict.fromkeys((offer.cloud, offer.region, offer.instance_type) for offer in offers)
    return list(found)[:FLEET_TYPES]


class _Group(NamedTuple):
    """Rows of one kind and capacity type, and the possible numbers of nodes, each with its speed."""

    bound: Rank
    kind: int
    capacity: CapacityType
    runs: tuple[tuple[int, Speed | None], ...]
    need: Requirements
    is_allowed: Sequence[bool]


class _Searcher:
    """One search: collects the best candidates and the allocations that the goal rules out."""

    def __init__(self, table: OfferTable, how: Search, goal: Goal, known: Knowledge) -> None:
        self.table, self.how, self.goal, self.known = table, how, goal, known
        self.best: list[_Found] = []
        self.names: set[str] = set()
        self.refused: dict[str, Rejected] = {}
        self.hour: float | None = None
        self.is_in = [how.scope.has(cloud, region) for cloud, region, _ in table.places]
        self.has_speeds = how.speed_of is not None or bool(known.speeds)
        self.is_timed = self.has_speeds and known.units is not None

    def find(self, needs: Sequence[Requirements]) -> Plan:
        fitting = [(need, *self._fitting(need)) for need in needs]
        self.hour = self._value_of_hour(fitting)
        streams = [self._groups(*item) for item in fitting]
        for group in heapq.merge(*streams, key=lambda group: group.bound):
            if len(self.best) >= self.how.limit and group.bound > self.best[-1][0]:
                break
            self._take(group)
        return self._plan(needs)

    def _fitting(self, need: Requirements) -> tuple[list[bool], list[bool]]:
        """Whether each place is allowed, and whether one node of each kind meets *need*."""
        table = self.table
        is_allowed = [
            is_in
            and fits_place(need, *place)
            and (not self.known.data or all(item.allows(*place) for item in self.known.data))
            for is_in, place in zip(self.is_in, table.places, strict=True)
        ]
        fits = [False] * len(table.kinds)
        for number in self._pool(need):
            kind = table.kinds[number]
            if kind.vcpus >= need.vcpus and kind.memory_gib >= need.memory_gib:
                fits[number] = fits_node(need, kind)
        return is_allowed, fits

    def _pool(self, need: Requirements) -> Sequence[int]:
        if need.gpus == 0 or not need.gpu_types:
            return range(len(self.table.kinds))
        return [number for name in need.gpu_types for number in self.table.of_gpu(name)]

    def _value_of_hour(self, fitting: Sequence[tuple[Requirements, list[bool], list[bool]]]) -> float | None:
        cheapest = (
            Allocation(self.table.offer(kind, row, "on-demand"), counts[0])
            for need, is_allowed, fits in fitting
            if need.capacity != "spot"
            for kind, row, counts in self._cheapest_on_demand(need, is_allowed, fits)
        )
        return value_of_hour(self.goal.strategy, cheapest, stated_usd=self.goal.value_of_hour_usd)

    def _cheapest_on_demand(
        self, need: Requirements, is_allowed: list[bool], fits: list[bool]
    ) -> Iterator[tuple[int, int, Sequence[int]]]:
        table, best = self.table, UNKNOWN
        for kind in table.order("on-demand"):
            if not fits[kind]:
                continue
            counts = self._holding(kind, need)
            if (table.least_usd(kind, "on-demand") or 0.0) * need.min_nodes >= best:
                return
            if not counts:
                continue
            for row in table.rows_of(kind, "on-demand"):
                if is_allowed[table.place[row]]:
                    if table.usd[row] * counts[0] < best:
                        best = table.usd[row] * counts[0]
                        yield kind, row, counts
                    break

    def _groups(self, need: Requirements, is_allowed: list[bool], fits: list[bool]) -> Iterator[_Group]:
        capacities = [name for name in CAPACITIES if need.capacity in ("auto", name)]
        streams = [self._groups_of(need, is_allowed, fits, capacity) for capacity in capacities]
        return heapq.merge(*streams, key=lambda group: group.bound)

    def _groups_of(
        self, need: Requirements, is_allowed: list[bool], fits: list[bool], capacity: CapacityType
    ) -> Iterator[_Group]:
        """Kinds by bound: in order of price while no speed is known, otherwise sorted by the objective."""
        kinds = (kind for kind in self.table.order(capacity) if fits[kind])
        groups = (group for kind in kinds for group in self._group(kind, capacity, need, is_allowed))
        return iter(sorted(groups, key=lambda group: group.bound)) if self.has_speeds else groups

    def _group(
        self, kind: int, capacity: CapacityType, need: Requirements, is_allowed: list[bool]
    ) -> Iterator[_Group]:
        usd = self.table.least_usd(kind, capacity)
        if usd is None:
            return
        counts = self._counts(kind, capacity, need, is_allowed)
        if not self.has_speeds:
            if counts:
                runs = tuple((nodes, None) for nodes in counts)
                bound = (usd == UNKNOWN, 3, usd * need.min_nodes)
                yield _Group(bound, kind, capacity, runs, need, is_allowed)
            return
        for nodes in counts:
            speed = self._speed(self.table.kinds[kind], nodes)
            bound = self._bound(usd * nodes, speed)
            yield _Group(bound, kind, capacity, ((nodes, speed),), need, is_allowed)

    def _speed(self, kind: InstanceType, nodes: int) -> Speed | None:
        known = self.known.speed_on(kind, nodes)
        return self.how.speed_of(kind, nodes) if known is None and self.how.speed_of is not None else known

    def _holding(self, kind: int, need: Requirements) -> Sequence[int]:
        counts = node_counts(need, int(self.table.kinds[kind].gpus))
        if self.how.misfit_of is None:
            return counts
        return [nodes for nodes in counts if self.how.misfit_of(self.table.kinds[kind], nodes) is None]

    def _counts(
        self, kind: int, capacity: CapacityType, need: Requirements, is_allowed: list[bool]
    ) -> Sequence[int]:
        """Numbers of nodes that fit the job; the others are rejected at the first place."""
        counts = node_counts(need, int(self.table.kinds[kind].gpus))
        if self.how.misfit_of is None:
            return counts
        found = [(nodes, self.how.misfit_of(self.table.kinds[kind], nodes)) for nodes in counts]
        against = next((misfit for _, misfit in found if misfit is not None), None)
        rows = self.table.rows_of(kind, capacity) if against is not None else ()
        row = next((row for row in rows if is_allowed[self.table.place[row]]), None)
        if against is not None and row is not None:
            offer = self.table.offer(kind, row, capacity)
            nodes = next(nodes for nodes, misfit in found if misfit is not None)
            self._refuse(Rejected(Allocation(offer, nodes), (against,)))
        return [nodes for nodes, misfit in found if misfit is None]

    def _bound(self, usd: float, speed: Speed | None) -> Rank:
        """Best possible rank of an offer with this speed that costs *usd* per hour or more."""
        is_unknown = usd == UNKNOWN
        if speed is None or (self.known.units is None and is_unknown):
            return (is_unknown, 3, usd)
        if self.known.units is None:
            return (is_unknown, 2, usd_per_unit(usd, self.hour or 0.0, speed))
        least = estimate(
            self.known.units,
            speed,
            usd_per_hour=None if is_unknown else usd,
            value_of_hour=self.hour or 0.0,
            overheads=self.known.overheads,
        )
        worth = UNKNOWN if least.objective is None else least.objective
        if is_safe(least, self.goal):
            return (is_unknown, 0, worth)
        return (is_unknown, 1, least.hours if self.goal.deadline_s is not None else worth)

    def _take(self, group: _Group) -> None:
        table, is_spot = self.table, group.capacity == "spot"
        prices = table.spot_usd if is_spot else table.usd
        rows = [
            row for row in table.rows_of(group.kind, group.capacity) if group.is_allowed[table.place[row]]
        ]
        for nodes, speed in group.runs:
            refused_rate = UNKNOWN
            for row in rows:
                if len(self.best) >= self.how.limit:
                    worst = self.best[-1][0]
                    bound = self._bound(prices[row] * nodes, speed)
                    if bound > worst:
                        break
                    if speed is None and (*bound, 0.0, self._name(group, row, nodes)) > worst:
                        continue  # one of many at the same price, or at an unknown one
                rate = self._rate(row) if is_spot else 0.0
                # Money, time and risk grow with price and rate, so a limit that was broken before is broken
                # here too.
                if rate < refused_rate and not self._judge(group, row, nodes, speed, rate):
                    refused_rate = rate

    def _name(self, group: _Group, row: int, nodes: int) -> str:
        """``Allocation.name`` without creating the allocation."""
        kind, (cloud, region, zone) = self.table.kinds[group.kind], self.table.places[self.table.place[row]]
        attached = f"+{kind.gpu_name}:{int(kind.gpus)}" if kind.is_attached else ""
        parts = [
            cloud,
            region,
            zone,
            kind.instance_type + attached,
            "" if cloud == "local" else group.capacity,
        ]
        name = "/".join(part for part in parts if part)
        return name if nodes == 1 else f"{nodes} x {name}"

    def _rate(self, row: int) -> float:
        known = self.table.rate_per_hour(row)
        return ANY_RATE_PER_HOUR if known is None else known

    def _judge(self, group: _Group, row: int, nodes: int, speed: Speed | None, rate: float) -> bool:
        """Return False if it breaks a limit; otherwise add it to the candidates if it is good enough."""
        allocation = Allocation(self.table.offer(group.kind, row, group.capacity), nodes)
        name, offer = allocation.name, allocation.offer
        if name in self.names:
            return True
        avoided = self.how.avoid(offer) if self.how.avoid is not None else None
        if avoided is not None:
            self._refuse(Rejected(allocation, (Misfit("capacity", avoided),)))
            return True
        candidate = candidate_of(
            allocation,
            speed,
            self.known,
            self.goal,
            hour_usd=self.hour or 0.0,
            losses_per_hour=rate * nodes,
            disk_gib=group.need.disk_gib,
        )
        found = goal_misfits(group.need, candidate, self.goal)
        if found:
            self._refuse(Rejected(allocation, found, candidate.estimate))
            return False
        self.names.add(name)
        self.refused.pop(name, None)
        insort(self.best, (rank_of(candidate, self.goal), len(self.names), candidate))
        del self.best[self.how.limit :]
        return True

    def _refuse(self, rejected: Rejected) -> None:
        if len(self.refused) < 10 * self.how.limit:
            self.refused.setdefault(rejected.allocation.name, rejected)

    def _plan(self, needs: Sequence[Requirements]) -> Plan:
        candidates, unknown = known_first([found for _, _, found in self.best], self.refused.values())
        rejected = [*self.refused.values(), *unknown]
        if self.how.explain or not candidates:
            rejected += nearest_misses(needs, self.table, self.is_in, limit=self.how.limit)
        rejected.sort(key=lambda item: item.distance)
        notes = self._notes(candidates, needs)
        return Plan(
            chosen=candidates[0] if candidates else None,
            candidates=tuple(candidates),
            rejected=tuple(rejected[: self.how.limit]),
            value_of_hour_usd=self.hour,
            notes=tuple(notes),
        )

    def _notes(self, candidates: Sequence[Candidate], needs: Sequence[Requirements]) -> list[str]:
        spot = {
            item.allocation.offer.name for item in candidates if item.allocation.offer.capacity_type == "spot"
        }
        rated = replace(self.known, interruptions_per_hour=dict.fromkeys(spot, 0.0))
        notes = [*notes_of(candidates, rated, self.goal, self.hour), *risk_notes(needs)]
        notes += _data_notes(candidates, self.known, is_timed=self.is_timed)
        clouds = {item.allocation.offer.cloud for item in candidates}
        clouds = {
            name for name in clouds if self.known.tariffs.get(name, UNKNOWN_TARIFF).usd_per_gib_month is None
        }
        if any(need.disk_gib for need in needs) and clouds and self.is_timed:
            notes.append(f"what disks cost on {', '.join(sorted(clouds))} is unknown and counted as nothing")
        if self.table.label:
            notes.append(f"prices: {self.table.label}")
        return notes


def _data_notes(candidates: Sequence[Candidate], known: Knowledge, *, is_timed: bool) -> list[str]:
    """Notes on copies of data that no price includes."""
    notes = []
    for item in known.data:
        usds = [item.usd_to(*_place(found), known.tariffs) for found in candidates]
        if None in usds and item.gib is None:
            notes.append(
                f"the size of {item.name} is unknown, and copying it counted as nothing: write its size"
            )
        elif None in usds:
            left = item.cloud or item.place  # the user's own cluster is in no cloud
            notes.append(f"what {item.name} costs to leave {left} is unknown and counted as nothing")
        if not is_timed and any(usds):
            notes.append(
                f"no speed is known, so copying {item.name} is in no price: up to {usd_text(_most(usds))}"
            )
    return notes


def _most(usds: Sequence[float | None]) -> float:
    return max(usd for usd in usds if usd is not None)


def _place(candidate: Candidate) -> tuple[str, str]:
    return candidate.allocation.offer.cloud, candidate.allocation.offer.region
