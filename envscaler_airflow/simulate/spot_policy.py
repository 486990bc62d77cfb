"""The decision of a stage with a deadline, asked tick by tick by the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from envscaler_airflow.scaling.deadline.cost_table import Others, Table, build_table
from envscaler_airflow.scaling.deadline.risk import Hazard, Risk, Zone
from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND, SpotJob, SpotView
from envscaler_airflow.scaling.deadline.spot_market import MarketView, decide_market

PRIOR_H = 24.0
"""Weight in hours of the prior of a zone's availability, one half. Chosen: a day."""
TOGETHER = 0.7
"""Zones of one cloud fail together: the probability that another one is up is this fraction of the
independent one. Chosen among 0.5, 0.7, 0.9 and 1 on the zones of 2023 and 2025."""

Build = Callable[[SpotJob, Hazard, Others], Table]


def _build(job: SpotJob, hazard: Hazard, others: Others) -> Table:
    return build_table(job, hazard, others=others)


class DeadlinePolicy:
    """Shows each tick to :func:`~envscaler_airflow.scaling.deadline.spot_market.decide_market`."""

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
        """Return a zone, ``on-demand``, or None to wait for the next tick."""
        self._observe(view)
        found = decide_market(self.market(view), self._table_for(view), self._hazard)
        return {"launch": found.zone, "on-demand": ON_DEMAND, "wait": None}[found.action]

    def market(self, view: SpotView) -> MarketView:
        """The market at the start of a tick: an available zone stays so for the rest of it."""
        job, rest_s = self._job, max(0.0, self._job.gap_s - view.asked_s)
        return MarketView(
            zones=self.zones(view),
            on_demand_usd=job.on_demand_usd,
            left_s=view.ticks_left * job.gap_s,
            work_s=view.work_left_s,
            start_s=job.overhead_s,
            running=view.running,
            owed_s=view.owed_s if view.running is not None else 0.0,
            look_s=rest_s,
            sure_s=rest_s,
            fresh_s=job.gap_s,
            ask_s=view.ask_s,
            asked_s=min(view.asked_s, job.gap_s),
            tick_s=job.gap_s,
        )

    def zones(self, view: SpotView) -> tuple[Zone, ...]:
        """What is known of each zone; one that is requested for the first time in this tick was not seen."""
        names = dict.fromkeys((*view.up, *view.hidden))
        return tuple(self._risk(name).zone(name, view.usd.get(name, self._job.spot_usd)) for name in names)

    def _observe(self, view: SpotView) -> None:
        if view.tick != self._tick:
            for name in dict.fromkeys((*view.up, *view.hidden)):
                self._risk(name).skip()
            self._tick, self._seen = view.tick, set()
        for name, is_up in view.up.items():
            if name not in self._seen:
                self._seen.add(name)
                risk = self._risk(name)
                risk.observe(is_up=is_up, after_s=max(risk.unseen_s, self._job.gap_s))

    def _risk(self, name: str) -> Risk:
        if name not in self._risks:
            self._risks[name] = Risk(self._hazard, self._job.gap_s)
            self._risks[name].learn(self._history.get(name, ()))
        return self._risks[name]

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
