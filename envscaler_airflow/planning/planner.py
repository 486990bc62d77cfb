"""Choose the offer and the number of nodes to start on, and explain why the others were not chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.errors import NoOfferError
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF, Charges
from envscaler_airflow.planning.data import MONTH_H, DataPlace
from envscaler_airflow.planning.knowledge import Knowledge
from envscaler_airflow.planning.objective import (
    SECONDS_PER_HOUR,
    Estimate,
    Strategy,
    estimate,
    value_of_hour,
)
from envscaler_airflow.planning.offers import Allocation, Offer, has_spot, losses_per_hour, mixed_allocations
from envscaler_airflow.planning.performance import Speed
from envscaler_airflow.planning.record import NotNegative, Record
from envscaler_airflow.planning.requirements import Misfit, Requirements, misfits, node_counts

_UNKNOWN_LAST = float("inf")
LIMITS = ("budget", "deadline")
"""Needs of a :class:`Misfit` that a forecast breaks."""


@dataclass(frozen=True, slots=True)
class Goal(Record):
    """The user's objective: money, time, or both.

    Attributes:
        strategy: ``cost``, ``balanced``, ``performance`` or ``deadline``.
        value_of_hour_usd: The user's own value of an hour; None: derived from the strategy.
        budget_usd: Money left for this generation; None: no limit.
        deadline_s: Seconds left to the deadline; None: none.
    """

    strategy: Strategy = "cost"
    value_of_hour_usd: NotNegative[float] | None = None
    budget_usd: NotNegative[float] | None = None
    deadline_s: NotNegative[float] | None = None


@dataclass(frozen=True, slots=True)
class Candidate(Record):
    """An allocation that fits.

    Attributes:
        allocation: Offer and nodes.
        usd_per_hour: Price of all nodes; None is unknown.
        speed: None when unknown.
        estimate: None when speed or work is unknown.
        is_safe: False when the 90th percentile of time or money is over the deadline or budget.
        usd_per_unit: Price and value of the time of one unit of work, when the amount of work is unknown.
    """

    allocation: Allocation
    usd_per_hour: float | None = None
    speed: Speed | None = None
    estimate: Estimate | None = None
    is_safe: bool = True
    usd_per_unit: float | None = None


@dataclass(frozen=True, slots=True)
class Rejected(Record):
    """An allocation that does not fit.

    Attributes:
        allocation: Offer and nodes.
        misfits: Every need that it misses; the first one excluded it.
        estimate: Time and cost to finish on it, where only limits of money and time exclude it.
    """

    allocation: Allocation
    misfits: tuple[Misfit, ...]
    estimate: Estimate | None = None

    @property
    def reason(self) -> str:
        """The first reason."""
        return self.misfits[0].reason

    @property
    def distance(self) -> tuple[int, float, str]:
        """Distance from a fit: the number of needs missed, then the sum of the shortfalls, then the name."""
        return len(self.misfits), sum(item.shortfall for item in self.misfits), self.allocation.name

    @property
    def is_over_limit(self) -> bool:
        """True when it meets every need, and its forecast breaks the budget or the deadline."""
        return self.estimate is not None and all(item.need in LIMITS for item in self.misfits)


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """Where to start the stage.

    Attributes:
        chosen: The best of candidates and fleets; None when nothing fits.
        candidates: All allocations of one offer that fit, best first.
        rejected: All allocations that do not fit, the nearest miss first.
        value_of_hour_usd: The value of an hour in the objective; None: unknown.
        notes: Human-readable notes on what is unknown or was assumed.
        fleets: Candidates that combine an on-demand and a spot offer, best first, where requested.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    value_of_hour_usd: float | None = None
    notes: tuple[str, ...] = ()
    fleets: tuple[Candidate, ...] = ()

    def pick(self) -> Allocation:
        """The chosen allocation.

        Raises:
            NoOfferError: Nothing fits; names the nearest miss.
        """
        if self.chosen is not None:
            return self.chosen.allocation
        if not self.rejected:
            raise NoOfferError("there is no offer at all to choose from: check the backend and the catalog")
        if over := [item for item in self.rejected if item.is_over_limit]:
            raise NoOfferError(_over_limits(over))
        nearest = self.rejected[0]
        reasons = "; ".join(item.reason for item in nearest.misfits)
        others = f" ({len(self.rejected)} offers looked at)" if len(self.rejected) > 1 else ""
        also = "".join(f"; {item.allocation.name}: {item.reason}" for item in self._by_other_needs())
        raise NoOfferError(
            f"no offer fits{others}; the nearest, {nearest.allocation.name}: {reasons}{also}; "
            "ask for less under resources, or look in more places"
        )

    def _by_other_needs(self) -> list[Rejected]:
        """For each need except the nearest miss's: the nearest allocation that misses only this need."""
        first: dict[str, Rejected] = {}
        for item in self.rejected:
            if len(item.misfits) == 1:
                first.setdefault(item.misfits[0].need, item)
        return [item for item in first.values() if item is not self.rejected[0]]


def _over_limits(rejected: Sequence[Rejected]) -> str:
    """The allocations that meet every need and break only limits: the fastest, and the cheapest."""
    limits = " and ".join(name for name in LIMITS if any(_misses(item, name) for item in rejected))
    known = [(item.allocation.name, item.estimate) for item in rejected if item.estimate is not None]
    fastest = min(known, key=lambda item: (item[1].hours, item[0]))
    priced = [item for item in known if item[1].usd is not None]
    cheapest = min(priced, key=lambda item: (item[1].usd or 0.0, item[0]), default=fastest)
    words = [f"the fastest, {_least(*fastest)}", f"the cheapest, {_least(*cheapest)}"]
    if cheapest == fastest:
        words = [f"the fastest and cheapest, {_least(*fastest)}"]
    count = "1 allocation meets" if len(known) == 1 else f"{len(known)} allocations meet"
    return (
        f"no offer keeps the {limits}, although {count} every need: {'; '.join(words)}; "
        f"raise the {limits}, or reduce the work"
    )


def _misses(item: Rejected, need: str) -> bool:
    return any(misfit.need == need for misfit in item.misfits)


def _least(name: str, expected: Estimate) -> str:
    """``NAME, takes 5 h (4 to 6) and costs $7.50 ($6 to $9)``."""
    text = f"{name}, takes {expected.hours:.3g} h ({expected.hours_low:.3g} to {expected.hours_high:.3g})"
    if expected.usd is None or expected.usd_low is None or expected.usd_high is None:
        return text
    low, high = usd_text(expected.usd_low), usd_text(expected.usd_high)
    return f"{text} and costs {usd_text(expected.usd)} ({low} to {high})"


def plan(
    requirements: Requirements | Sequence[Requirements],
    offers: Iterable[Offer],
    *,
    goal: Goal | None = None,
    knowledge: Knowledge | None = None,
    is_ordered: bool = False,
    is_mixed: bool = False,
) -> Plan:
    """Choose an allocation by expected cost + value_of_hour x expected time.

    If the amount of work is unknown, both are for one unit of it. Candidates without a known speed come after
    those with one, ordered by $/h; none of them is used where every known one breaks the budget or deadline.
    Candidates without a known price come last, and never count as free. Candidates whose 90th percentile
    breaks the deadline or budget come after those that meet them. Those whose 10th percentile breaks it are
    rejected. Ties are resolved by time, then by name.

    Args:
        requirements: One, or several alternatives: an offer that meets any of them qualifies.
        offers: Any order.
        goal: By default least cost.
        knowledge: What is known of the stage; by default nothing.
        is_ordered: The first alternative that any offer meets is used, regardless of its cost.
        is_mixed: Also consider fleets of on-demand and spot nodes together, if the stage may run on both.
    """
    goal, known = goal or Goal(), knowledge or Knowledge()
    needs = (requirements,) if isinstance(requirements, Requirements) else tuple(requirements)
    if not needs:
        raise ValueError("requirements: none given")
    if not is_ordered:
        return _plan(needs, offers, goal, known, is_mixed=is_mixed)
    offers, first = tuple(offers), None
    for alternative in needs:
        got = _plan((alternative,), offers, goal, known, is_mixed=is_mixed)
        if got.chosen is not None:
            return got
        first = first or got
    return first or Plan(None)


def feasible(
    requirements: Sequence[Requirements],
    offers: Iterable[Offer],
    *,
    data: Sequence[DataPlace] = (),
    is_mixed: bool = False,
) -> tuple[Allocation, ...]:
    """Every allocation that meets any of the alternatives, in the order of the offers, mixed ones last."""
    fitting, _ = _split(requirements, offers, data)
    if is_mixed:
        fitting += _mixed(fitting)
    return tuple(allocation for allocation, _ in fitting)


def _plan(
    needs: Sequence[Requirements], offers: Iterable[Offer], goal: Goal, known: Knowledge, *, is_mixed: bool
) -> Plan:
    fitting, rejected = _split(needs, offers, known.data)
    hour = value_of_hour(
        goal.strategy, [allocation for allocation, _ in fitting], stated_usd=goal.value_of_hour_usd
    )
    judged = _judged(fitting, known, goal, hour)
    for need, candidate in judged:
        if found := goal_misfits(need, candidate, goal):
            rejected.append(Rejected(candidate.allocation, found, candidate.estimate))
    candidates, unknown = known_first(_kept(judged, goal), rejected)
    rejected += unknown
    mixed = _mixed(fitting) if is_mixed else []
    made = Plan(
        chosen=candidates[0] if candidates else None,
        candidates=tuple(candidates),
        rejected=tuple(sorted(rejected, key=lambda item: item.distance)),
        value_of_hour_usd=hour,
        notes=(*notes_of(candidates, known, goal, hour), *risk_notes(needs)),
    )
    return with_fleets(made, _judged(mixed, known, goal, hour), goal)


def known_first(
    candidates: Sequence[Candidate], rejected: Iterable[Rejected]
) -> tuple[list[Candidate], list[Rejected]]:
    """*candidates*, unless all are of unknown speed and the known ones break limits: then none, rejected."""
    is_known = any(item.estimate is not None for item in candidates)
    if is_known or not candidates or not any(item.is_over_limit for item in rejected):
        return list(candidates), []
    why = Misfit("speed", "its speed is unknown, and every known one breaks the budget or deadline")
    return [], [Rejected(item.allocation, (why,)) for item in candidates]


def risk_notes(needs: Sequence[Requirements]) -> list[str]:
    """A warning where spot was requested for a stage that cannot save: what the user states wins."""
    if any(need.capacity == "spot" and not need.can_checkpoint for need in needs):
        return ["spot was requested without a checkpoint: a lost machine starts the stage from the beginning"]
    return []


def with_fleets(
    made: Plan, fleets: Iterable[tuple[Requirements, Candidate]], goal: Goal, *, limit: int | None = None
) -> Plan:
    """*made* with those of *fleets* that meet the limits; the best fleet is chosen if it is better."""
    kept = _kept(fleets, goal)[:limit]
    if not kept:
        return made
    first = made.chosen
    best = kept[0] if first is None or rank_of(kept[0], goal) < rank_of(first, goal) else first
    return replace(made, chosen=best, fleets=tuple(kept))


def _kept(judged: Iterable[tuple[Requirements, Candidate]], goal: Goal) -> list[Candidate]:
    """The candidates that break no limit, best first."""
    kept = [candidate for need, candidate in judged if not goal_misfits(need, candidate, goal)]
    return sorted(kept, key=lambda item: rank_of(item, goal))


def _judged(
    fitting: Iterable[tuple[Allocation, Requirements]], known: Knowledge, goal: Goal, hour: float | None
) -> list[tuple[Requirements, Candidate]]:
    """Time and cost to finish *work* on each allocation."""
    found = []
    for allocation, need in fitting:
        candidate = candidate_of(
            allocation,
            known.speed_of(allocation),
            known,
            goal,
            hour_usd=hour or 0.0,
            losses_per_hour=losses_per_hour(allocation, known.interruptions_per_hour),
            disk_gib=need.disk_gib,
        )
        found.append((need, candidate))
    return found


def _split(
    needs: Sequence[Requirements], offers: Iterable[Offer], data: Sequence[DataPlace]
) -> tuple[list[tuple[Allocation, Requirements]], list[Rejected]]:
    """Allocations with the alternative that they meet, and offers with the nearest one that they miss."""
    fitting, rejected = [], []
    for offer in offers:
        met: dict[int, Requirements] = {}
        missed = []
        for need in needs:
            found = (*misfits(need, offer), *data_misfits(data, offer))
            counts = () if found else node_counts(need, offer.gpus)
            met |= {nodes: need for nodes in counts if nodes not in met}
            if not counts:
                missed.append(Rejected(Allocation(offer, need.min_nodes), found or (_no_count(need),)))
        if met:
            fitting += [(Allocation(offer, nodes), need) for nodes, need in met.items()]
        else:
            rejected.append(min(missed, key=lambda item: item.distance))
    return fitting, rejected


def data_misfits(data: Sequence[DataPlace], offer: Offer) -> tuple[Misfit, ...]:
    """Volumes that a stage cannot use at the place of *offer*."""
    place = (offer.cloud, offer.region, offer.zone or "")
    return tuple(
        Misfit("data", f"{item.name} can be used in {item.place} alone")
        for item in data
        if not item.allows(*place)
    )


def _no_count(need: Requirements) -> Misfit:
    text = f"no number of nodes makes up complete model-parallel groups of {need.model_parallel} GPUs"
    return Misfit("model_parallel", text)


def _mixed(fitting: Iterable[tuple[Allocation, Requirements]]) -> list[tuple[Allocation, Requirements]]:
    """Mixed fleets for an alternative that allows both capacity types and can lose a node."""
    by_need: dict[Requirements, list[Allocation]] = {}
    for allocation, need in fitting:
        if need.capacity == "auto" and need.can_checkpoint:
            by_need.setdefault(need, []).append(allocation)
    return [
        (allocation, need)
        for need, allocations in by_need.items()
        for allocation in mixed_allocations(allocations, min_nodes=need.min_nodes)
    ]


def candidate_of(
    allocation: Allocation,
    speed: Speed | None,
    known: Knowledge,
    goal: Goal,
    *,
    hour_usd: float,
    losses_per_hour: float = 0.0,
    disk_gib: float = 0.0,
) -> Candidate:
    """*allocation* with the time and cost to finish *work* on it at *speed*, as far as these are known.

    *losses_per_hour* is the rate of losing any of its nodes; *disk_gib* is per node.
    """
    price, offer = allocation.usd_per_hour, allocation.offer
    if speed is None or known.units is None:
        each = None if speed is None or price is None else usd_per_unit(price, hour_usd, speed)
        return Candidate(allocation, price, speed, usd_per_unit=each)
    tariff, overheads = known.tariffs.get(offer.cloud, UNKNOWN_TARIFF), known.overheads
    copies = [item.usd_to(offer.cloud, offer.region, known.tariffs) for item in known.data]
    if copy_s := sum(item.seconds_to(offer.cloud, offer.region) for item in known.data):
        overheads = replace(overheads, start_s=overheads.start_s + copy_s)
    disks = (tariff.usd_per_gib_month or 0.0) * disk_gib / MONTH_H * allocation.nodes
    expected = estimate(
        known.units,
        speed,
        usd_per_hour=price,
        value_of_hour=hour_usd,
        overheads=overheads,
        interruptions_per_hour=losses_per_hour,
        charges=Charges(sum(usd or 0.0 for usd in copies), tariff.billing, disks),
    )
    if None in copies:
        expected = replace(expected, data_usd=None)
    if disk_gib and tariff.usd_per_gib_month is None:
        expected = replace(expected, disk_usd=None)
    return Candidate(allocation, price, speed, expected, is_safe=is_safe(expected, goal))


def usd_per_unit(usd_per_hour: float, hour_usd: float, speed: Speed) -> float:
    """Price and value of the time that one unit of work takes."""
    return (usd_per_hour + hour_usd) / SECONDS_PER_HOUR * speed.seconds_for(1.0)


def is_safe(expected: Estimate, goal: Goal) -> bool:
    """False when the 90th percentile of time or money is over the deadline or budget."""
    is_late = _is_over(expected.hours_high * SECONDS_PER_HOUR, goal.deadline_s)
    return not (is_late or _is_over(expected.usd_high, goal.budget_usd))


def _is_over(value: float | None, limit: float | None) -> bool:
    return limit is not None and (value is None or value > limit)


def goal_misfits(requirements: Requirements, candidate: Candidate, goal: Goal) -> tuple[Misfit, ...]:
    """Limits of money, time and risk that *candidate* certainly breaks; empty: it may fit."""
    price, expected = candidate.usd_per_hour, candidate.estimate
    found = []
    if requirements.max_usd_per_hour is not None:
        found.append(_over("max_usd_per_hour", price, requirements.max_usd_per_hour, "USD an hour"))
    if goal.budget_usd is not None and (price is None or expected is not None):
        usd = None if expected is None else expected.usd_low
        found.append(_over("budget", usd, goal.budget_usd, "USD to finish"))
    if goal.budget_usd == 0 and price:
        found.append(_over("budget", price, 0.0, "USD an hour"))
    if goal.deadline_s is not None and expected is not None:
        hours = goal.deadline_s / SECONDS_PER_HOUR
        found.append(_over("deadline", expected.hours_low, hours, "hours to finish"))
    is_stated = requirements.capacity == "spot"  # the user's statement wins; a note warns of the risk
    if has_spot(candidate.allocation) and not requirements.can_checkpoint and not is_stated:
        tolerated = requirements.tolerated_loss_h
        if expected is None or expected.hours > tolerated:
            reason = (
                f"spot may end any time, and the stage has no checkpoint and may run over {tolerated:g} h"
            )
            found.append(Misfit("checkpoint", reason))
    return tuple(item for item in found if item is not None)


def _over(need: str, value: float | None, limit: float, unit: str) -> Misfit | None:
    if value is None:
        return Misfit(need, f"its price is unknown, and {need} is {limit:g}")
    if value <= limit:
        return None
    return Misfit(need, f"takes {value:.3g} {unit} at best, {need} is {limit:.3g}", 1 - limit / value)


def rank_of(candidate: Candidate, goal: Goal) -> tuple[Any, ...]:
    """Sort key of candidates, the best first; see :func:`plan`."""
    price = _UNKNOWN_LAST if candidate.usd_per_hour is None else candidate.usd_per_hour
    name, expected = candidate.allocation.name, candidate.estimate
    if expected is None and candidate.usd_per_unit is not None:
        return (False, 2, candidate.usd_per_unit, 0.0, name)
    if expected is None:
        return (candidate.usd_per_hour is None, 3, price, 0.0, name)
    worth = _UNKNOWN_LAST if expected.objective is None else expected.objective
    if candidate.is_safe:
        return (candidate.usd_per_hour is None, 0, worth, expected.hours, name)
    by_time = expected.hours if goal.deadline_s is not None else worth
    return (candidate.usd_per_hour is None, 1, by_time, worth, name)


def notes_of(candidates: Sequence[Candidate], known: Knowledge, goal: Goal, hour: float | None) -> list[str]:
    """Human-readable notes on what is unknown about *candidates* or was assumed."""
    notes = []
    timed = [item for item in candidates if item.estimate is not None]
    if any(item.usd_per_unit is not None for item in candidates):
        notes.append("no work is known yet: ranked by USD for one unit of it, without times")
    elif candidates and not timed:
        notes.append("no speed is known yet: ranked by USD an hour, without times")
    elif len(timed) < len(candidates):
        notes.append(
            f"speed known for {len(timed)} of {len(candidates)} candidates; the others come after them"
        )
    if candidates and known.sources:
        notes.append("; ".join(f"{part}: {source}" for part, source in known.sources.items()))
    if hour is None:
        notes.append(
            f"no on-demand price is known, so an hour counts 0 USD although {goal.strategy} was asked"
        )
    unpriced = sum(item.usd_per_hour is None for item in candidates)
    if unpriced:
        notes.append(f"price unknown for {unpriced} of {len(candidates)} candidates; they come last")
    if timed and not any(item.is_safe for item in timed):
        notes.append("no candidate keeps deadline and budget for sure; the most likely one is chosen")
    if any(_has_unknown_risk(item, known) for item in timed):
        notes.append("the interruption rate of some spot offers is unknown and counted as none")
    return notes


def _has_unknown_risk(candidate: Candidate, known: Knowledge) -> bool:
    return any(
        part.offer.capacity_type == "spot" and part.offer.name not in known.interruptions_per_hour
        for part in candidate.allocation.parts
    )


@dataclass(frozen=True, slots=True)
class PlanInputs(Record):
    """Everything that a plan was made from: recorded with it, so that anyone can make the same plan again.

    Attributes:
        needs: The alternatives.
        offers: The offers compared.
        goal, knowledge, is_ordered, is_mixed: As for :func:`plan`.
        excluded: Offers that were left out before, with the reasons.
        notes: Notes that precede those of the plan.
    """

    needs: tuple[Requirements, ...]
    offers: tuple[Offer, ...]
    goal: Goal
    knowledge: Knowledge
    is_ordered: bool = False
    is_mixed: bool = False
    excluded: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    def plan(self) -> Plan:
        """Make the plan: the same inputs give an equal one."""
        made = plan(
            self.needs,
            self.offers,
            goal=self.goal,
            knowledge=self.knowledge,
            is_ordered=self.is_ordered,
            is_mixed=self.is_mixed,
        )
        rejected = sorted((*made.rejected, *self.excluded), key=lambda item: item.distance)
        return replace(made, rejected=tuple(rejected), notes=(*self.notes, *made.notes))
