"""A job with a deadline on spot: the view of a policy at the start of a tick, and the exact guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envscaler_airflow.planning.record import NotNegative, Positive, Record

ON_DEMAND = "on-demand"
"""The name of the on-demand market, as an answer and as what runs; no zone may have this name."""


ROUNDING = 1e-9
"""Relative error from adding floats. Chosen: a microsecond in a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class SpotJob(Record):
    """Work, time and money of one job, in ticks.

    Attributes:
        ticks: Ticks from the start to the deadline.
        gap_s: Seconds of a tick; a started tick is billed in full.
        work_s: Seconds of work, on either market.
        overhead_s: Seconds of overhead of every launch before it works.
        on_demand_usd: $/h.
        spot_usd: $/h.
    """

    ticks: int
    gap_s: Positive[float]
    work_s: NotNegative[float]
    overhead_s: NotNegative[float]
    on_demand_usd: Positive[float]
    spot_usd: NotNegative[float]

    def __post_init__(self) -> None:
        """Reject NaN and a job that cannot finish even on demand."""
        Record.__post_init__(self)
        if self.ticks * self.gap_s < (self.work_s + self.overhead_s) * (1 - ROUNDING):
            hours = (self.work_s + self.overhead_s) / 3600
            raise ValueError(
                f"the deadline must leave {hours:.3g} h, got {self.ticks * self.gap_s / 3600:.3g} h"
            )


@dataclass(slots=True)
class SpotView:
    """Start of a tick.

    Attributes:
        tick: Ticks since the start.
        ticks_left: To the deadline, including this one.
        work_left_s: Work not done.
        owed_s: Remaining overhead of the current launch.
        running: ``on-demand``, the zone that runs and was not lost, or None.
        up: Whether spot is available in a zone for the whole tick; absent: not requested.
        usd: Spot $/h by zone; absent: the job's own.
        hidden: Zones whose state only a request reveals: answering one that is not in *up* requests it.
        ask_s: Duration of a request while nothing runs.
        asked_s: Time spent on requests in this tick so far.
    """

    tick: int
    ticks_left: int
    work_left_s: float
    owed_s: float
    running: str | None
    up: Mapping[str, bool]
    usd: Mapping[str, float] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    ask_s: float = 0.0
    asked_s: float = 0.0

    def unknown(self) -> list[str]:
        """Zones that can be requested."""
        return [name for name in self.hidden if name not in self.up]


def slack_s(job: SpotJob, view: SpotView) -> float:
    """Seconds that may still be lost: time left - work left - one launch of on-demand."""
    return view.ticks_left * job.gap_s - view.work_left_s - job.overhead_s - view.asked_s


def may_ask(job: SpotJob, view: SpotView) -> bool:
    """True when on-demand is still in time if the zone is unavailable; a running on-demand job continues."""
    return view.running == ON_DEMAND or slack_s(job, view) >= view.ask_s - 1e-6


def is_safe(job: SpotJob, view: SpotView, answer: str | None) -> bool:
    """The exact guard: True when *answer* leaves time for an on-demand launch and the work.

    Spot or nothing in a tick is allowed only if afterwards ``(ticks left - 1) * gap >= work left +
    overhead``. On-demand is always allowed. With this guard no job can be late.
    """
    if answer == ON_DEMAND:
        return True
    worked = 0.0
    if answer is not None:
        owed = view.owed_s if answer == view.running else job.overhead_s
        worked = max(0.0, job.gap_s - owed - view.asked_s)
    left = max(0.0, view.work_left_s - worked)
    return left <= 0 or (view.ticks_left - 1) * job.gap_s >= left + job.overhead_s - 1e-6
