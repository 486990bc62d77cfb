"""Use spot while it is safe, over one or several zones, by expected cost to finish.

:class:`DeadlinePolicy` answers tick by tick for the simulator; :data:`DEADLINE` moves a running stage between
spot and on-demand, and between zones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.offers import has_spot
from envscaler_airflow.scaling.deadline.cost_table import (
    BUY,
    DOWN_IDLE,
    DOWN_ON_DEMAND,
    SPOT,
    UP_IDLE,
    UP_ON_DEMAND,
    WAIT,
    Others,
    Table,
    build_table,
)
from envscaler_airflow.scaling.deadline.risk import Hazard, Risk, age_bin
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    may_ask,
    slack_s,
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

PRIOR_H = 24.0
"""Weight in hours of the prior of a zone's availability, one half. Chosen: a day."""
TOGETHER = 0.7
"""Zones of one cloud fail together: the probability that another one is up is this fraction of the
independent one. Chosen among 0.5, 0.7, 0.9 and 1 on the zones of 2023 and 2025."""

Build = Callable[[SpotJob, Hazard, Others], Table]


def _build(job: SpotJob, hazard: Hazard, others: Others) -> Table:
    return build_table(job, hazard, others=others)


class DeadlinePolicy:
    """Lowest expected cost: the table of the job, weighted by the belief from each zone's own past."""

    def __init__(self, hazard: Hazard | None = None, *, build: Build = _build) -> None:
        """Create a policy; *build* makes the tables from :meth:`begin` on, cached by job and zones."""
        self._hazard = hazard or Hazard()
        self._build = build
        self._kept: dict[tuple[SpotJob, Others], Table] = {}

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:
        """Learn from *history*; the table is built when the zones are first seen."""
        self._job = job
        self._history = history
        self._table: Table | None = None
        self._risks: dict[str, Risk] = {}
        self._seen: set[str] = set()
        self._tick = -1

    def choose(self, view: SpotView) -> str | None:
        """The answer with the lowest expected cost that the guard allows."""
        self._observe(view)
        if view.running not in (None, ON_DEMAND) and is_safe(self._job, view, view.running):
            return view.running
        ranked = sorted(self.costs(view).items(), key=lambda item: (item[1][0], item[1][1]))
        for answer, _ in ranked:
            is_asked = answer in view.unknown()
            if may_ask(self._job, view) if is_asked else is_safe(self._job, view, answer):
                return answer
        return ON_DEMAND

    def costs(self, view: SpotView) -> dict[str | None, tuple[float, int]]:
        """Expected cost of each answer, in ticks of on-demand, with the order for ties."""
        up = [name for name, is_up in view.up.items() if is_up]
        if view.unknown() and not up:
            return self._costs_of_asking(view)
        name = min(up or view.up, key=lambda zone: (self._score(zone, view, is_up=bool(up)), zone))
        risk = self._risks[name]
        is_bought = view.running == ON_DEMAND
        situation = (
            (UP_ON_DEMAND if is_bought else UP_IDLE) if up else DOWN_ON_DEMAND if is_bought else DOWN_IDLE
        )
        found = self._table_for(view).look_up(
            view.ticks_left, slack_s(self._job, view), age_bin(risk.age_h), situation, risk.belief
        )
        costs: dict[str | None, tuple[float, int]] = {None: (found[WAIT], 1), ON_DEMAND: (found[BUY], 2)}
        if up:
            costs[name] = (found[SPOT], 0)
        return costs

    def _costs_of_asking(self, view: SpotView) -> dict[str | None, tuple[float, int]]:
        """If no zone is known to be up, request the likeliest one when that has the lowest expected cost.

        A zone that is available is launched. Otherwise the best remaining answer follows, delayed by the time
        of the request. The value of what the request reveals is ignored.
        """
        name = max(view.unknown(), key=lambda zone: (self._risks[zone].up_chance(), zone))
        risk, table, slack = self._risks[name], self._table_for(view), slack_s(self._job, view)
        later = slack - (0.0 if view.running == ON_DEMAND else view.ask_s)
        away, there = (DOWN_ON_DEMAND, UP_ON_DEMAND) if view.running == ON_DEMAND else (DOWN_IDLE, UP_IDLE)
        bin_, left = age_bin(max(risk.age_h + risk.unseen_h, self._job.gap_s / 3600)), view.ticks_left
        now = table.look_up(left, slack, bin_, away, risk.belief)
        up = table.look_up(left, later, age_bin(1.0), there, risk.belief)
        down = table.look_up(left, later, bin_, away, risk.belief)
        chance = risk.up_chance()
        asked = chance * up[SPOT] + (1 - chance) * min(down[WAIT], down[BUY])
        return {name: (asked, 0), None: (now[WAIT], 1), ON_DEMAND: (now[BUY], 2)}

    def _observe(self, view: SpotView) -> None:
        if view.tick != self._tick:
            for name in view.hidden:
                if name not in view.up:
                    self._risk(name).skip()
            self._tick, self._seen = view.tick, set()
        for name, is_up in view.up.items():
            if name not in self._seen:
                self._seen.add(name)
                self._risk(name).observe(is_up=is_up)

    def _risk(self, name: str) -> Risk:
        if name not in self._risks:
            self._risks[name] = Risk(self._hazard, self._job.gap_s)
            self._risks[name].learn(self._history.get(name, ()))
        return self._risks[name]

    def _score(self, name: str, view: SpotView, *, is_up: bool) -> float:
        """Score. Up: $ per tick with the expected overhead of a loss; down: how unlikely its return is."""
        chance = self._risks[name].chance()
        if not is_up:
            return -chance
        usd = view.usd.get(name, self._job.spot_usd)
        return usd * self._job.gap_s + chance * self._job.overhead_s * (usd + self._job.on_demand_usd)

    def _table_for(self, view: SpotView) -> Table:
        if self._table is None:
            key = (self._job, self._others(list(view.hidden or view.up)))
            if key not in self._kept:
                self._kept[key] = self._build(self._job, self._hazard, key[1])
            self._table = self._kept[key]
        return self._table

    def _others(self, names: Sequence[str]) -> Others:
        if len(names) < 2:
            return Others()
        ups = sorted(self._availability(self._history.get(name, ())) for name in names)
        down = 1.0
        for up in ups[:-1]:
            down *= 1 - up
        return Others(len(names), round(TOGETHER * (1 - down), 1))

    def _availability(self, ticks: Sequence[int]) -> float:
        known = [tick > 0 for tick in ticks if tick >= 0]
        prior = PRIOR_H * 3600 / self._job.gap_s
        return (sum(known) + prior / 2) / (len(known) + prior)


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
        why = f"{slack:.0f} s may still be lost, less than the {TICK_S:.0f} s until the next check on spot"
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
        return Proposal(reason="no cheaper spot of this machine is available", numbers=numbers)
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
    """The table of the deadline, unless the present one serves or the stage has no deadline."""
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
