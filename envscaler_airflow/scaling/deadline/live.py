"""The deadline policy on a running stage: move between spot and on-demand, and between zones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.fleet import has_spot
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.deadline.risk import Hazard, age_bin
from envscaler_airflow.scaling.deadline.spot_job import SpotJob
from envscaler_airflow.scaling.deadline.tables import BUY, SPOT, UP_ON_DEMAND, Table, build_table
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

TICK_S = 600.0
"""Seconds of a tick of the tables. Chosen: that of the traces used for the fit."""
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


def meet_deadline(observation: Observation, policy: Policy, *, table: Table | None = None) -> Proposal:
    """Propose on-demand before spot could make the stage late, and spot while that is safe.

    Safe: after another tick and a start on on-demand, the work left (90th percentile) still fits. Without
    that slack, a move from spot to on-demand is urgent: no cooldown delays it. With a *table* of the job, the
    stage leaves on-demand for spot when that has a lower expected cost. Without one, it does so when two
    starts fit into the slack besides the tick, as Uniform Progress requires.
    """
    left_s = observation.deadline_left_s
    if left_s is None:
        return Proposal(reason="the deadline policy needs a deadline")
    view = outlook(observation, policy)
    if view.staying is None:
        return Proposal(reason=view.unknown, numbers={"unit": observation.unit})
    start_s = observation.overheads.start_s
    slack = left_s - view.staying.hours_high * SECONDS_PER_HOUR - start_s
    numbers: dict[str, Any] = {"slack_s": slack, "start_s": start_s, "staying": view.staying.to_dict()}
    if has_spot(observation.current):
        return _on_spot(view, slack, numbers)
    return _on_demand(view, slack, numbers, table)


def _on_spot(view: Outlook, slack: float, numbers: dict[str, Any]) -> Proposal:
    seen, here = view.observation, view.observation.current
    if slack >= TICK_S:
        why = f"{slack:.0f} s may still be lost on {here.name}"
        return _cheaper_zone(view, slack, numbers) or Proposal(reason=why, numbers=numbers)
    safe = [item for item in seen.others() if not has_spot(item) and _is_free(seen, item)]
    wants = []
    for target in safe:
        speed = view.slowest(target) or _same_machine(view, target)
        moving = view.moving(target, speed=speed)
        why = f"{slack:.0f} s may still be lost, less than the {TICK_S:.0f} s until the next look on spot"
        wants.append(Want(target, why, view.staying, moving, is_urgent=True))
    wants.sort(
        key=lambda want: (want.target.usd_per_hour is None, want.target.usd_per_hour or 0.0, want.target.name)
    )
    return Proposal(tuple(wants), "no on-demand candidate is left to be safe on", numbers)


def _cheaper_zone(view: Outlook, slack: float, numbers: dict[str, Any]) -> Proposal | None:
    """Another zone with the same machine, if it saves the tolerance after the cost of the move."""
    staying, seen = view.staying, view.observation
    if staying is None or staying.objective is None or slack < TICK_S + 2 * seen.overheads.start_s:
        return None
    wants = []
    for target in _spot(seen):
        moving = view.moving(target, speed=_same_machine(view, target))
        if moving is None or moving.objective is None:
            continue
        if moving.objective < (1 - view.policy.tolerance) * staying.objective:
            costs = usd_text(moving.objective), usd_text(staying.objective)
            why = f"{target.name} finishes for {costs[0]} instead of {costs[1]}"
            wants.append(Want(target, why, staying, moving))
    wants.sort(key=lambda want: (want.moving.objective if want.moving else None or 0.0, want.target.name))
    return Proposal(tuple(wants), numbers=numbers) if wants else None


def _on_demand(view: Outlook, slack: float, numbers: dict[str, Any], table: Table | None) -> Proposal:
    seen, here = view.observation, view.observation.current
    price = here.usd_per_hour
    spots = [item for item in _spot(seen) if price is not None and (item.usd_per_hour or price) < price]
    if not spots:
        return Proposal(reason="no cheaper spot of this machine is to be had", numbers=numbers)
    target = min(spots, key=lambda item: (item.usd_per_hour or 0.0, item.name))
    start_s = seen.overheads.start_s
    if slack < start_s + TICK_S:
        return Proposal(reason=f"{slack:.0f} s may be lost: too few to try spot", numbers=numbers)
    if table is not None:
        ticks = int((seen.deadline_left_s or 0.0) / TICK_S)
        found = table.look_up(ticks, slack, age_bin(1.0), UP_ON_DEMAND, Hazard().regimes)
        numbers = {**numbers, "ticks_of_on_demand": {"spot": found[SPOT], "on_demand": found[BUY]}}
        is_worth = found[SPOT] < found[BUY]
        why = f"spot is expected to cost {found[SPOT]:.4g}, on-demand {found[BUY]:.4g} ticks of on-demand"
    else:
        is_worth = slack >= 2 * start_s + TICK_S
        why = f"{slack:.0f} s may be lost, two starts and a look take {2 * start_s + TICK_S:.0f} s"
    if not is_worth:
        return Proposal(reason=why, numbers=numbers)
    moving = view.moving(target, speed=_same_machine(view, target))
    return Proposal((Want(target, why, view.staying, moving),), numbers=numbers)


def _spot(seen: Observation) -> list[Allocation]:
    """Available spot candidates with the same machine and number of nodes."""
    here = seen.current
    return [
        item
        for item in seen.others()
        if item.offer.capacity_type == "spot"
        and item.offer.instance_type == here.offer.instance_type
        and item.nodes == here.nodes
        and _is_free(seen, item)
    ]


def _is_free(seen: Observation, item: Allocation) -> bool:
    """True if enough nodes are free, including allocated ones of the same offer (of a mixed allocation)."""
    free = seen.free_nodes.get(item.offer.name)
    held = sum(part.nodes for part in seen.current.parts if part.offer.name == item.offer.name)
    return free is None or free + held >= item.nodes


def _same_machine(view: Outlook, target: Allocation) -> Any:
    """True for the same instance type, which is equally fast in another zone or market."""
    here = view.observation.current
    known = view.speeds.get(target.name)
    same = target.offer.instance_type == here.offer.instance_type and target.nodes == here.nodes
    return known or (view.speeds.get(here.name) if same else None)


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
    """The table of the deadline, unless the present one serves or there is no deadline."""
    left_s = facts.deadline_left_s
    if left_s is None:
        return Prepared()
    job = job_of(facts.allocation, facts.offers(), deadline_s=left_s, start_s=facts.start_s)
    if job is None or _serves(facts.present(), job):
        return Prepared()
    table = build_table(job, every=max(4, job.ticks // MAX_ROWS))
    return table_files(policy.name, table.to_bytes(), job.to_dict())


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
    with_table=lambda data: partial(meet_deadline, table=Table.from_bytes(data)),
)
