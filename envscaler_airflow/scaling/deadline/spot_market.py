"""The one decision of a stage with a deadline: launch spot in a zone, run on-demand, or wait.

:func:`decide_market` is a pure function of a view of the market. It serves the sensor while an attempt runs,
the owner between two attempts, and the simulator. Its guard stands outside the expected costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from envscaler_airflow.planning.record import NotNegative, Positive, Record
from envscaler_airflow.scaling.deadline.cost_table import (
    BUY,
    DOWN_IDLE,
    DOWN_ON_DEMAND,
    SPOT,
    UP_IDLE,
    UP_ON_DEMAND,
    WAIT,
    Table,
)
from envscaler_airflow.scaling.deadline.risk import Hazard, Zone
from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND

TICK_S = 600.0
"""Seconds of a tick of the tables. Chosen: that of the traces used for the fit."""
LOOK_S = 60.0
"""Until the next check at what runs, seconds. Chosen: two checks of the sensor."""
IDLE_LOOK_S = 120.0
"""Until the next check at the market while nothing runs, seconds. Chosen: some seconds of a worker each."""
_NEAR_S = 1e-6
"""Difference of two sums of seconds that are equal. Chosen: a microsecond."""


@dataclass(frozen=True, slots=True)
class MarketView(Record):
    """Everything that the decision depends on.

    Attributes:
        zones: Zones in which spot can be launched.
        on_demand_usd: $/h on demand, of all nodes.
        left_s: Time to the deadline.
        work_s: Work left, 90th percentile of the measured speed, without losses; None before it is measured.
        start_s: From a decision to the first work on another machine.
        running: ``on-demand``, the zone that runs, or None.
        owed_s: Part of *start_s* that what runs still has to come.
        unsaved_s: Work that a loss of what runs would lose.
        look_s: Until the next check at what runs, or at the market while nothing runs.
        wait_s: How much longer than *start_s* a machine may take to come.
        blind_s: How long a launch cannot be left again.
        sure_s: How long a zone that is up is certain to stay so: a whole tick of the simulator.
        fresh_s: How long a sample of a zone counts; after that, only a request shows its state.
        ask_s: How long a request takes to be refused.
        asked_s: Part of the present tick that requests took.
        is_held: On-demand runs on while a zone is requested.
        tick_s: Seconds of a tick of the table.
    """

    zones: tuple[Zone, ...]
    on_demand_usd: NotNegative[float]
    left_s: float
    work_s: NotNegative[float] | None
    start_s: NotNegative[float]
    running: str | None = None
    owed_s: NotNegative[float] = 0.0
    unsaved_s: NotNegative[float] = 0.0
    look_s: NotNegative[float] = 0.0
    wait_s: NotNegative[float] = 0.0
    blind_s: NotNegative[float] = 0.0
    sure_s: NotNegative[float] = 0.0
    fresh_s: Positive[float] = TICK_S
    ask_s: NotNegative[float] = 0.0
    asked_s: NotNegative[float] = 0.0
    is_held: bool = True
    tick_s: Positive[float] = TICK_S

    @property
    def slack_s(self) -> float:
        """Seconds that may still be lost: time left - work left - one start on on-demand."""
        return self.left_s - self.asked_s - (self.work_s or 0.0) - self.start_s

    @property
    def is_on_spot(self) -> bool:
        """True while a zone runs."""
        return self.running not in (None, ON_DEMAND)

    def is_fresh(self, zone: Zone) -> bool:
        """True if the last sample of *zone* still counts."""
        return zone.is_up is not None and zone.unseen_s < self.fresh_s


@dataclass(frozen=True, slots=True)
class Market(Record):
    """What a run knows of its market: input of a check, besides what every policy gets.

    Attributes:
        zones: Spot offers of the machine that the stage uses, by the name of their allocation.
        start_s: Seconds of a start, as measured in this generation; None before the first.
        wait_s: How much longer than that one took.
        unsaved_s: Work since the last checkpoint, seconds.
        is_held: On-demand runs on while a zone is requested.
    """

    zones: tuple[Zone, ...] = ()
    start_s: NotNegative[float] | None = None
    wait_s: NotNegative[float] = 0.0
    unsaved_s: NotNegative[float] = 0.0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class MarketDecision(Record):
    """What to run.

    Attributes:
        action: ``launch`` spot in *zone* (also if that runs already), ``on-demand``, or ``wait``.
        zone: Its name; "" otherwise.
        is_request: True if only the launch itself will show whether the zone is up.
        wait_s: Until the market is looked at again.
        reason: Shown to the user unchanged.
        costs: Expected cost to finish of each answer, in ticks of on-demand, as far as it is possible.
    """

    action: Literal["launch", "on-demand", "wait"]
    zone: str = ""
    is_request: bool = False
    wait_s: NotNegative[float] = 0.0
    reason: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)


def decide_market(
    view: MarketView, table: Table | None = None, hazard: Hazard | None = None
) -> MarketDecision:
    """Decide what runs next.

    Spot that runs is kept as long as the guard allows it, unless a cheaper zone pays for a launch
    (:func:`saved_usd`) and there is slack for two. Otherwise the answer with the lowest expected cost
    by *table* is taken among those that the guard allows; without a table, spot is taken if two starts and a
    look fit into the slack, as Uniform Progress requires. On-demand that runs is never left to wait.
    """
    model = hazard or Hazard()
    if view.work_s is None:
        return _unmeasured(view, model)
    if view.is_on_spot and _is_safe(view, str(view.running)):
        cheaper = _cheaper(view, model)
        if cheaper is not None:
            return cheaper
        return MarketDecision("launch", str(view.running), reason=f"{view.slack_s:.0f} s may still be lost")
    costs, zone, is_request = _costs(view, table, model)
    told, known = f"{view.slack_s:.0f} s may still be lost", {} if table is None else costs
    if known:
        words = ", ".join(f"{_WORDS[answer]} {cost:.4g}" for answer, cost in costs.items())
        told = f"{told}; expected: {words} ticks of on-demand"
    for answer in sorted(costs, key=lambda one: (costs[one], _ORDER.index(one))):
        if answer == "launch" and zone is not None and _may_launch(view, zone, is_request=is_request):
            return MarketDecision("launch", zone.name, is_request, 0.0, told, known)
        if answer == "wait" and _is_safe(view, None):
            return MarketDecision("wait", "", False, view.look_s, told, known)
        if answer == "on-demand":
            return MarketDecision("on-demand", reason=told, costs=known)
    return MarketDecision("on-demand", reason=told, costs=known)


def _cheaper(view: MarketView, hazard: Hazard) -> MarketDecision | None:
    """A launch in the zone that saves the most over the one that runs; None if none pays for it.

    Without slack for two launches beyond the guard, the zone that runs is kept: one to go there, one if the
    new zone is lost.
    """
    here = next((zone for zone in view.zones if zone.name == view.running), None)
    if here is None:
        return None
    below_usd = min(here.usd, view.on_demand_usd)
    after = replace(view, left_s=view.left_s - 2 * view.start_s)
    saved = {
        zone.name: saved_usd(view, here, zone, hazard)
        for zone in view.zones
        if zone.usd < below_usd and zone.is_up and view.is_fresh(zone) and _is_safe(after, zone.name)
    }
    best = max(saved, key=lambda name: (saved[name], name), default=None)
    if best is None or saved[best] <= 0:
        return None
    usd = next(zone.usd for zone in view.zones if zone.name == best)
    told = (
        f"{best} costs {usd:.4g} $/h instead of {here.usd:.4g} $/h: ${saved[best]:.4g} less with its launch"
    )
    return MarketDecision("launch", best, reason=told)


def saved_usd(view: MarketView, here: Zone, there: Zone, hazard: Hazard) -> float:
    """USD saved by leaving *here*, which runs, for *there*, which is up.

    Price difference x min(expected stay there, work left) - one launch - difference of losses in that time x
    launch. A launch takes slack that on-demand may have to replace, so it is worth its time on on-demand.
    """
    there_s, here_s = there.stays_s(hazard), here.stays_s(hazard)
    for_s, launch_usd = min(there_s, view.work_s or 0.0), view.start_s * view.on_demand_usd
    losses = for_s / there_s - for_s / here_s if for_s and here_s else 0.0
    return ((here.usd - there.usd) * for_s - launch_usd - losses * launch_usd) / 3600


_ORDER = ("launch", "wait", "on-demand")
"""Which answer is taken of those that are expected to cost the same."""
_WORDS = {"launch": "spot", "wait": "nothing", "on-demand": "on-demand"}


def _is_safe(view: MarketView, zone: str | None) -> bool:
    """The guard: True if *zone*, or nothing, until the next check leaves time for an on-demand start."""
    done = look = 0.0
    work = view.work_s or 0.0
    if zone is None:
        look = view.look_s
    elif zone == view.running:
        done, look = max(0.0, view.sure_s - view.owed_s), view.look_s + view.unsaved_s
    else:
        done, look = max(0.0, view.sure_s - view.start_s - view.owed_s), max(view.look_s, view.blind_s)
    if work <= done:
        return True
    return view.slack_s + done >= look + view.wait_s - _NEAR_S


def _may_launch(view: MarketView, zone: Zone, *, is_request: bool) -> bool:
    if not is_request:
        return _is_safe(view, zone.name)
    if view.running == ON_DEMAND and view.is_held:
        return True
    return view.slack_s >= view.ask_s + (0.0 if view.running is None else view.start_s) - _NEAR_S


def _unmeasured(view: MarketView, hazard: Hazard) -> MarketDecision:
    """The time that may be lost is unknown: spot that is known to be up, or on-demand."""
    up = [zone for zone in view.zones if zone.is_up and view.is_fresh(zone) and zone.usd < view.on_demand_usd]
    best = _best(view, up, hazard)
    reason = "the work left is not measured yet"
    if best is None or view.running == ON_DEMAND:
        return MarketDecision("on-demand", reason=reason)
    return MarketDecision("launch", str(view.running) if view.is_on_spot else best.name, reason=reason)


def _best(view: MarketView, zones: Iterable[Zone], hazard: Hazard) -> Zone | None:
    """The zone with the lowest $ per tick, with the expected overhead of a loss."""

    def score(zone: Zone) -> tuple[float, str]:
        lost = zone.chance(hazard, view.tick_s) * view.start_s * (zone.usd + view.on_demand_usd)
        return zone.usd * view.tick_s + lost, zone.name

    found = list(zones)
    return min(found, key=score) if len(found) > 1 else next(iter(found), None)


def _costs(
    view: MarketView, table: Table | None, hazard: Hazard
) -> tuple[dict[str, float], Zone | None, bool]:
    """Expected cost of each answer, the zone that a launch is meant in, and whether it must be requested."""
    zones = [zone for zone in view.zones if zone.usd < view.on_demand_usd and zone.name != view.running]
    up = _best(view, (zone for zone in zones if zone.is_up and view.is_fresh(zone)), hazard)
    unknown = [zone for zone in zones if not view.is_fresh(zone)]
    if table is None:
        return _by_rule(view, up, unknown, hazard)
    is_bought = view.running == ON_DEMAND
    if up is None and unknown:
        zone = max(unknown, key=lambda one: (one.up_chance(hazard), one.name))
        return _costs_of_asking(view, table, zone, hazard), zone, True
    seen = up or (zones[0] if len(zones) == 1 else None)
    if seen is None:
        seen = min(zones, key=lambda one: (-one.chance(hazard, view.tick_s), one.name), default=None)
    if seen is None:
        return {"on-demand": view.left_s / view.tick_s}, None, False
    situation = (UP_ON_DEMAND if is_bought else UP_IDLE) if up else DOWN_ON_DEMAND if is_bought else DOWN_IDLE
    found = table.look_up(view.left_s / view.tick_s, view.slack_s, seen.bin, situation, seen.belief)
    costs = {"wait": found[WAIT], "on-demand": found[BUY]}
    if up:
        costs["launch"] = found[SPOT]
    if is_bought:
        del costs["wait"]
    return costs, up, False


def _costs_of_asking(view: MarketView, table: Table, zone: Zone, hazard: Hazard) -> dict[str, float]:
    """Expected costs if no zone is known to be up and *zone*, the likeliest one, may be requested.

    Each answer is weighed by the chance that the zone is up: also without a request, that will be seen later.
    A request that is refused delays the answer that follows, except for waiting, which it is part of.
    """
    is_bought, left = view.running == ON_DEMAND, view.left_s / view.tick_s
    away, there = (DOWN_ON_DEMAND, UP_ON_DEMAND) if is_bought else (DOWN_IDLE, UP_IDLE)
    lost = 0.0 if is_bought and view.is_held else view.ask_s + (view.start_s if is_bought else 0.0)
    left_again = there if view.is_held or not is_bought else UP_IDLE
    down_again = away if view.is_held or not is_bought else DOWN_IDLE
    chance, later = zone.up_chance(hazard), view.slack_s - lost
    up_bin = zone.bin if zone.is_up else _AGE_BIN

    def at(slack_s: float, situation: int) -> tuple[float, float, float]:
        bin_ = up_bin if situation in (UP_IDLE, UP_ON_DEMAND) else zone.bin
        return table.look_up(left, slack_s, bin_, situation, zone.belief)

    up, down = at(view.slack_s, there), at(view.slack_s, away)
    came, refused = at(later, left_again), at(later, down_again)
    best = min(came[SPOT], came[BUY])
    worst = refused[BUY] if is_bought else min(down[WAIT], refused[BUY])
    costs = {
        "launch": chance * best + (1 - chance) * worst,
        "on-demand": chance * up[BUY] + (1 - chance) * down[BUY],
    }
    return costs if is_bought else {**costs, "wait": chance * came[WAIT] + (1 - chance) * down[WAIT]}


_AGE_BIN = 4
"""Age bin of a zone that turns out to be up when it is requested. Chosen: an hour."""


def _by_rule(
    view: MarketView, up: Zone | None, unknown: list[Zone], hazard: Hazard
) -> tuple[dict[str, float], Zone | None, bool]:
    """Without a table: an order of the answers, as numbers."""
    zone = up or max(unknown, key=lambda one: (one.up_chance(hazard), one.name), default=None)
    needs = 2 * view.start_s + view.look_s if view.running == ON_DEMAND else view.start_s + view.look_s
    is_rich = view.slack_s >= needs + (view.ask_s if up is None else 0.0)
    costs = {"on-demand": 1.0} | ({"wait": 0.5 if is_rich else 2.0} if view.running is None else {})
    return costs | ({} if zone is None else {"launch": 0.0 if is_rich else 3.0}), zone, up is None
