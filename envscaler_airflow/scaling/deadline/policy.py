"""Use spot while it is safe, over one or several zones, by expected cost to finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from envscaler_airflow.scaling.deadline.risk import Hazard, Risk, age_bin
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    may_ask,
    slack_s,
)
from envscaler_airflow.scaling.deadline.tables import (
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
