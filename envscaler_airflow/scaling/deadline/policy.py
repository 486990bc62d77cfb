"""Use spot while it is safe, over one or several zones, by expected cost to finish.

:data:`DEADLINE` shows a running stage's market to :func:`~.spot_market.decide_market`, and proposes what that
decides. Between two attempts the owner asks the same function (``owner.resume``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from envscaler_airflow.planning import Allocation, Offer, Speed
from envscaler_airflow.planning.offers import has_spot
from envscaler_airflow.scaling.deadline.cost_table import Table, build_table
from envscaler_airflow.scaling.deadline.risk import Zone
from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND, SpotJob
from envscaler_airflow.scaling.deadline.spot_market import (
    LOOK_S,
    TICK_S,
    Market,
    MarketDecision,
    MarketView,
    decide_market,
)
from envscaler_airflow.scaling.decision import (
    Policy,
    Prepared,
    Proposal,
    ScalingPolicy,
    StartFacts,
    Want,
    table_files,
)
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import Outlook, outlook

MAX_TICKS = 6 * 24 * 60
"""Longest deadline that a table is built for: 60 days. Chosen: half a minute on a worker."""
MAX_SLACK_S = 12 * 3600.0
"""Slack in seconds above which the table needs no finer resolution. Chosen: with this much, spot is always
safe."""
ALIKE = 1.1
"""Start times and prices that differ by at most this factor need no new table. Chosen: equal to the tolerance
of a move."""
MAX_ROWS = 32
"""Ticks stored in a table. Chosen: 7 MB in the store, 18 MB in the triggerer, 2 s to build for four days."""


MEASURED_S = 600.0
"""Seconds after which a speed may make a stage leave spot. Chosen: first steps are slow, and while spot runs,
waiting loses no slack."""

VAGUE, VAGUE_S = 0.05, 3600.0
"""A speed with a larger relative stdev than this counts only after an hour. Chosen: five per cent of two days
are more than most slack."""


def meet_deadline(observation: Observation, policy: Policy, *, table: Table | None = None) -> Proposal:
    """Propose on-demand before spot could make the stage late, and spot where that is expected to cost less.

    The decision is that of :func:`decide_market`. A move to on-demand is urgent. A move back to spot has its
    costs inside, so that no cool-down delays it.
    """
    left_s = observation.deadline_left_s
    if left_s is None:
        return Proposal(reason="the deadline policy needs a deadline")
    view = outlook(observation, policy)
    work_s, unknown = work_left_s(view)
    market = market_view(view, left_s, work_s)
    numbers: dict[str, Any] = {"slack_s": market.slack_s, "start_s": market.start_s}
    if view.staying is not None:
        numbers["staying"] = view.staying.to_dict()
    if work_s is None:
        return Proposal(reason=unknown, numbers={"unit": observation.unit})
    found = decide_market(market, table)
    if found.costs:
        numbers["ticks_of_on_demand"] = {_NAMES[name]: cost for name, cost in found.costs.items()}
    return _proposal(view, market, found, numbers)


_NAMES = {"launch": "spot", "on-demand": "on_demand", "wait": "nothing"}


def _proposal(
    view: Outlook, market: MarketView, found: MarketDecision, numbers: Mapping[str, Any]
) -> Proposal:
    seen, here = view.observation, view.observation.current
    if found.action == "on-demand" and has_spot(here):
        wants = tuple(_want(view, item, found.reason, is_urgent=True) for item in _on_demand(seen))
        return Proposal(wants, "no on-demand candidate is left to be safe on", numbers)
    if found.action != "launch" or found.zone == market.running:
        is_none = not market.zones and not has_spot(here)
        reason = "no cheaper spot of this machine is available" if is_none else found.reason
        return Proposal(reason=reason, numbers=numbers)
    target = next(item for item in spot_of(here, seen.others()) if item.name == found.zone)
    return Proposal((_want(view, target, found.reason),), numbers=numbers)


def _want(view: Outlook, target: Allocation, reason: str, *, is_urgent: bool = False) -> Want:
    speed = view.slowest(target) or _same_machine(view, target)
    moving = view.moving(target, speed=speed)
    return Want(target, reason, view.staying, moving, is_urgent=is_urgent, weighs_moves=True)


def work_left_s(view: Outlook) -> tuple[float | None, str]:
    """90th percentile of the seconds of work left, without losses; None, and why, before it is measured."""
    seen = view.observation
    if seen.units_left is None:
        return None, view.unknown
    speed = view.speeds.get(seen.current.name)
    if speed is None or speed.source != "measured" or speed.seconds < MEASURED_S:
        speed = _same_machine(view, seen.current) or speed
    if speed is None or speed.source != "measured":
        return None, view.unknown or "the speed is not measured"
    is_early = has_spot(seen.current) and speed.seconds < MEASURED_S
    if is_early or (speed.relative_stdev > VAGUE and speed.seconds < VAGUE_S):
        return None, f"the speed is measured for {speed.seconds:.0f} s, +- {speed.relative_stdev:.0%}"
    return high_s(seen.units_left, speed), ""


def high_s(units: float, speed: Speed) -> float:
    """90th percentile of the seconds for *units*.

    The error of a clock and a count, of which :func:`~envscaler_airflow.planning.measure` assumes at least
    1 %, falls with the time over which they were read.
    """
    longer = min(1.0, math.sqrt(MEASURED_S / speed.seconds)) if speed.seconds > 0 else 1.0
    return Speed(speed.mean, speed.stdev * longer, speed.source, speed.seconds).seconds_range(units)[1]


def market_view(view: Outlook, left_s: float, work_s: float | None) -> MarketView:
    """The market as a check sees it; without a market in the observation, every free candidate is up."""
    seen, here = view.observation, view.observation.current
    market = seen.market or Market(tuple(_assumed(item) for item in spot_of(here, seen.others())))
    start_s = seen.overheads.start_s if market.start_s is None else market.start_s
    free = {item.name for item in spot_of(here, seen.others()) if _is_free(seen, item)}
    prices = [item.usd_per_hour for item in (here, *_on_demand(seen)) if not has_spot(item)]
    known = [price for price in prices if price is not None]
    return MarketView(
        zones=tuple(zone for zone in market.zones if zone.name in free or zone.name == here.name),
        on_demand_usd=min(known, default=0.0),
        left_s=left_s,
        work_s=work_s,
        start_s=start_s,
        running=here.name if has_spot(here) else ON_DEMAND,
        unsaved_s=market.unsaved_s if has_spot(here) else 0.0,
        look_s=LOOK_S,
        wait_s=market.wait_s,
        blind_s=start_s,
        is_held=market.is_held,
    )


def _assumed(item: Allocation) -> Zone:
    return Zone(item.name, item.usd_per_hour or 0.0, is_up=True, age_h=1.0)


def _on_demand(seen: Observation) -> list[Allocation]:
    """On-demand candidates with free nodes, cheapest first."""
    safe = [item for item in seen.others() if not has_spot(item) and _is_free(seen, item)]
    return sorted(safe, key=lambda item: (item.usd_per_hour is None, item.usd_per_hour or 0.0, item.name))


def spot_of(here: Allocation, candidates: Iterable[Allocation]) -> list[Allocation]:
    """Spot candidates with the same machine and number of nodes as *here*, and a known price."""
    return [
        item
        for item in candidates
        if item.offer.capacity_type == "spot"
        and item.rest is None
        and item.offer.instance_type == here.offer.instance_type
        and item.nodes == here.nodes
        and item.usd_per_hour is not None
    ]


def _is_free(seen: Observation, item: Allocation) -> bool:
    """True if enough nodes are free, including allocated ones of the same offer (of a mixed allocation)."""
    free = seen.free_nodes.get(item.offer.name)
    held = sum(part.nodes for part in seen.current.parts if part.offer.name == item.offer.name)
    return free is None or free + held >= item.nodes


def _same_machine(view: Outlook, target: Allocation) -> Speed | None:
    """The longest measured speed of the same instance type, which is equally fast in any zone and market."""
    seen = view.observation
    alike = [
        view.speeds[item.name]
        for item in (seen.current, *seen.candidates)
        if item.offer.instance_type == target.offer.instance_type
        and item.nodes == target.nodes
        and item.name in view.speeds
    ]
    measured = [speed for speed in alike if speed.source == "measured"]
    return view.speeds.get(target.name) if not measured else max(measured, key=lambda one: one.seconds)


def job_of(
    allocation: Allocation, offers: Iterable[Offer], *, deadline_s: float, start_s: float
) -> SpotJob | None:
    """The job as a table sees it; None if it is not available on both markets, or a price is unknown.

    Its work is unknown before it is measured, so the table covers every amount, by the slack that it leaves.

    Args:
        allocation: What the attempt starts on; only its machine matters.
        offers: All available offers.
        deadline_s: Seconds to the deadline.
        start_s: Seconds of every launch.
    """
    kind = allocation.offer.instance_type
    prices: dict[str, float] = {}
    for offer in offers:
        if offer.instance_type == kind and offer.usd_per_hour:
            known = prices.get(offer.capacity_type, math.inf)
            prices[offer.capacity_type] = min(known, offer.usd_per_hour)
    ticks = math.ceil(deadline_s / TICK_S)
    if len(prices) < 2 or not 0 < ticks <= MAX_TICKS or ticks * TICK_S <= start_s:
        return None
    return SpotJob(
        ticks=ticks,
        gap_s=TICK_S,
        work_s=max(0.0, ticks * TICK_S - start_s - MAX_SLACK_S),
        overhead_s=start_s,
        on_demand_usd=prices["on-demand"],
        spot_usd=prices["spot"],
    )


def prepare(policy: Policy, facts: StartFacts) -> Prepared:
    """The table of the deadline, unless the present one serves or the stage has no deadline."""
    left_s = facts.deadline_left_s
    if left_s is None:
        return Prepared()
    job = job_of(facts.allocation, facts.offers(), deadline_s=left_s, start_s=facts.start_s)
    if job is None or _serves(facts.present(), job):
        return Prepared()
    job = rounded(job)
    return table_files(policy.name, packed_table(job), job.to_dict())


ROUND_TICKS, ROUND_START = 12, 1.05
"""A table is built for whole multiples of two hours, and for starts in steps of 5 %. Chosen: within the
tolerance that a table serves, so that runs of the same stage build the same one."""


def rounded(job: SpotJob) -> SpotJob:
    """*job* with its time and start rounded up."""
    ticks = -(-job.ticks // ROUND_TICKS) * ROUND_TICKS
    start_s = job.overhead_s
    if start_s > 0:
        start_s = ROUND_START ** math.ceil(math.log(start_s, ROUND_START) - 1e-9)
    work_s = max(0.0, ticks * TICK_S - start_s - MAX_SLACK_S)
    return SpotJob(ticks, TICK_S, work_s, start_s, job.on_demand_usd, job.spot_usd)


@lru_cache(maxsize=2)
def packed_table(job: SpotJob) -> bytes:
    """The table of *job*, for the store."""
    return build_table(job, every=max(4, job.ticks // MAX_ROWS)).to_bytes()


@lru_cache(maxsize=2)
def opened_table(data: bytes) -> Table:
    """The table that :func:`packed_table` made; checks of one process share it.

    Raises:
        ValueError: See :meth:`Table.from_bytes`.
    """
    return Table.from_bytes(data)


def _serves(built_for: Mapping[str, Any] | None, job: SpotJob) -> bool:
    """True when the present table also fits *job*; a shorter time to the deadline needs no new table."""
    try:
        known = SpotJob.from_dict(built_for or {})
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
    if known.ticks < job.ticks:
        return False
    pairs = ((known.overhead_s, job.overhead_s), (_price(known), _price(job)))
    return all(max(one, other) <= ALIKE * min(one, other) for one, other in pairs)


def _price(job: SpotJob) -> float:
    return job.spot_usd / job.on_demand_usd


DEADLINE = ScalingPolicy(
    "deadline",
    meet_deadline,
    prepare=prepare,
    with_table=lambda data: partial(meet_deadline, table=opened_table(data)),
    needs_market=True,
)
