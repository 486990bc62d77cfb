"""The spot model, tick by tick, with the same guard and the same answers as a running stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.deadline.spot_job import (
    ON_DEMAND,
    SpotJob,
    SpotView,
    is_safe,
    may_ask,
)


class SpotPolicy(Protocol):
    """Returns a zone, ``on-demand`` or None at the start of every tick; the guard may override it."""

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:
        """Forget the previous job; *history* has each zone's ticks before the start, oldest first."""

    def choose(self, view: SpotView) -> str | None:
        """What to run in this tick."""


@dataclass(frozen=True, slots=True)
class SpotRun:
    """One simulated job.

    Attributes:
        cost_usd: Whole ticks at the prices of their markets.
        finished_h: When the work was done.
        is_late: True when that was after the deadline; the guard makes this impossible.
        launches: Starts, on-demand and spot.
        answers: Per tick, for plots.
    """

    cost_usd: float
    finished_h: float
    is_late: bool
    launches: int
    answers: tuple[str | None, ...] = ()


def simulate_spot(
    job: SpotJob,
    zones: Mapping[str, Sequence[int]],
    policy: SpotPolicy,
    *,
    history: Mapping[str, Sequence[int]] | None = None,
    prices: Mapping[str, Sequence[float]] | None = None,
    ask_s: float | None = None,
) -> SpotRun:
    """Run *job* under *policy* on the availability of *zones* (above 0: available).

    Every launch (after a loss, after a pause, or on a switch of market or zone) adds the overhead, which uses
    up paid time. Completed work is kept. An answer that the guard rejects, or a zone that is not up, becomes
    on-demand.

    Args:
        job: Work, deadline and prices.
        zones: Ticks from the start of the job on; zones are not up after the last tick.
        policy: Receives the job and the *history* first.
        history: Ticks before the start, for policies that learn.
        prices: Spot $/h by zone and tick; the job's own where absent.
        ask_s: Partial visibility: only a request reveals whether a zone is up, which takes this many seconds
            while nothing runs; None: everything is visible.
    """
    policy.begin(job, history or {})
    state = _State(job.work_s)
    while state.work_s > 1e-6:
        tick = len(state.answers)
        up = {name: tick < len(row) and row[tick] > 0 for name, row in zones.items()}
        usd = {name: row[min(tick, len(row) - 1)] for name, row in (prices or {}).items()}
        if state.running not in (None, ON_DEMAND) and not up[str(state.running)]:
            state.running, state.owed_s = None, 0.0
        view = SpotView(tick, job.ticks - tick, state.work_s, state.owed_s, state.running, up, usd)
        answer = policy.choose(view) if ask_s is None else _ask(job, view, policy, ask_s)
        state.run(job, _allowed(job, view, answer), usd, view.asked_s)
    finished_s = max(0, len(state.answers) - 1) * job.gap_s + state.last_s
    is_late = finished_s > job.ticks * job.gap_s + 1e-6
    hours = finished_s / SECONDS_PER_HOUR
    return SpotRun(state.cost_usd, hours, is_late, state.launches, tuple(state.answers))


@dataclass(slots=True)
class _State:
    """A running job; *last_s* is how much of the last tick it used."""

    work_s: float
    owed_s: float = 0.0
    running: str | None = None
    cost_usd: float = 0.0
    launches: int = 0
    last_s: float = 0.0
    answers: list[str | None] = field(default_factory=list)

    def run(self, job: SpotJob, answer: str | None, usd: Mapping[str, float], asked_s: float) -> None:
        """Run one tick, of which requests took *asked_s*, at most the whole tick."""
        self.answers.append(answer)
        if answer is None:
            self.running, self.owed_s = None, 0.0
            return
        if answer != self.running:
            self.owed_s, self.launches = job.overhead_s, self.launches + 1
        self.running = answer
        price = job.on_demand_usd if answer == ON_DEMAND else usd.get(answer, job.spot_usd)
        self.cost_usd += price * job.gap_s / SECONDS_PER_HOUR
        left_s = max(0.0, job.gap_s - asked_s)
        paid = min(left_s, self.owed_s)
        done = min(self.work_s, left_s - paid)
        self.owed_s -= paid
        self.work_s -= done
        self.last_s = min(job.gap_s, asked_s + paid + done)


def _ask(job: SpotJob, view: SpotView, policy: SpotPolicy, ask_s: float) -> str | None:
    """The answer of *policy* if it sees only what runs and what it requests; stores the time in *view*."""
    truth, running = view.up, view.running
    known: dict[str, bool] = {running: True} if running is not None and running in truth else {}
    view.up, view.hidden, view.ask_s = known, tuple(truth), ask_s
    answer = policy.choose(view)
    while answer is not None and answer != ON_DEMAND and answer not in known:
        if answer not in truth or not may_ask(job, view):
            return ON_DEMAND
        known[answer] = truth[answer]
        view.asked_s += 0.0 if running == ON_DEMAND else ask_s
        answer = policy.choose(view)
    return answer


def _allowed(job: SpotJob, view: SpotView, answer: str | None) -> str | None:
    if answer not in (None, ON_DEMAND) and not view.up.get(answer, False):
        answer = None
    return answer if is_safe(job, view, answer) else ON_DEMAND
