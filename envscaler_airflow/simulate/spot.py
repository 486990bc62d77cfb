"""The spot model, tick by tick, with the guard and the answers of a running stage; traces that it runs on."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from envscaler_airflow.errors import SpecError
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


@dataclass(frozen=True, slots=True)
class Traces:
    """Availability by zone: above 0 spot is available for the whole tick, 0 unavailable, -1 unknown.

    Attributes:
        first: Number of the first tick in the file.
        zones: Rows in the order of the file's columns.
    """

    first: int
    zones: dict[str, tuple[int, ...]]

    def since(self, tick: int, zone: str) -> tuple[int, ...]:
        """Ticks of *zone* from *tick* on."""
        return self.zones[zone][tick - self.first :]

    def before(self, tick: int, zone: str) -> tuple[int, ...]:
        """Ticks of *zone* before *tick*."""
        return self.zones[zone][: max(0, tick - self.first)]


@dataclass(frozen=True, slots=True)
class Window:
    """A start time and length to simulate."""

    dataset: str
    zone: str
    start_tick: int
    n_ticks: int
    gap_s: float

    def __post_init__(self) -> None:
        """Reject a tick without a length."""
        if not 0 < self.gap_s < math.inf:
            raise ValueError(f"gap_seconds must be finite and > 0, got {self.gap_s!r}")


def read_traces(path: Path) -> Traces:
    """Traces of one data set: column ``tick``, then one for each zone. An empty cell and NaN are unknown.

    Raises:
        SpecError: The file has another form; the message names the place.
    """
    rows = _rows(path, ("tick",))
    zones = [name for name in rows[0] if name != "tick"]
    if ON_DEMAND in zones:
        raise SpecError(f"{path}: a column is called {ON_DEMAND}, which is not a zone")
    if not zones:
        raise SpecError(f"{path}: has no column of a zone beside tick")
    try:
        ticks = [int(row["tick"]) for row in rows]
        values = {zone: tuple(_instances(row[zone]) for row in rows) for zone in zones}
    except (TypeError, ValueError, OverflowError) as err:
        raise SpecError(f"{path}: every cell must be a whole number: {err}") from err
    if ticks != list(range(ticks[0], ticks[0] + len(ticks))):
        raise SpecError(f"{path}: ticks must rise by 1 from row to row")
    return Traces(ticks[0], values)


def _instances(cell: str) -> int:
    return -1 if cell.strip().lower() in ("", "nan") else int(float(cell))


def read_windows(path: Path) -> list[Window]:
    """Windows: ``dataset, zone, start_tick, n_ticks, gap_seconds``.

    Raises:
        SpecError: The file has another form.
    """
    rows = _rows(path, ("dataset", "zone", "start_tick", "n_ticks", "gap_seconds"))
    try:
        return [
            Window(
                row["dataset"],
                row["zone"],
                int(row["start_tick"]),
                int(row["n_ticks"]),
                float(row["gap_seconds"]),
            )
            for row in rows
        ]
    except (TypeError, ValueError) as err:
        raise SpecError(f"{path}: {err}") from err


def of_dataset(windows: Sequence[Window], traces: Path, dataset: str | None = None) -> list[Window]:
    """Windows of *dataset*; by default the one that the name of the traces' file begins with, or all."""
    names = {window.dataset for window in windows}
    if dataset is None:
        begun = [name for name in names if traces.name.startswith(name)]
        dataset = max(begun, key=len, default=None)
    elif dataset not in names:
        raise SpecError(f"no window is of data set {dataset!r}; there are {', '.join(sorted(names))}")
    return [window for window in windows if dataset is None or window.dataset == dataset]


def read_price_changes(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Spot $/h by zone: ``zone, tick, spot_usd_per_h``, a row at each change, in any order.

    Raises:
        SpecError: The file has another form, or a price is not valid.
    """
    changes: dict[str, list[tuple[int, float]]] = {}
    for at, row in enumerate(_rows(path, ("zone", "tick", "spot_usd_per_h"))):
        try:
            tick, price = int(row["tick"]), float(row["spot_usd_per_h"])
        except ValueError as err:
            raise SpecError(f"{path}:{at + 2}: {err}") from err
        if not 0 <= price < math.inf:
            raise SpecError(f"{path}:{at + 2}: spot_usd_per_h must be finite and >= 0, got {price}")
        changes.setdefault(row["zone"], []).append((tick, price))
    return {zone: sorted(rows) for zone, rows in changes.items()}


def prices_since(changes: Sequence[tuple[int, float]], start: int, ticks: int) -> list[float]:
    """Price in each of *ticks* ticks from *start*; before the first change, the first price."""
    at, price, out = 0, changes[0][1], []
    for tick in range(start, start + ticks):
        while at < len(changes) and changes[at][0] <= tick:
            price, at = changes[at][1], at + 1
        out.append(price)
    return out


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise SpecError(f"{path}: cannot be read: {err}") from err
    if not rows:
        raise SpecError(f"{path}: has no rows")
    named = [name for name in table.fieldnames or () if name]
    if len(set(named)) < len(named):
        raise SpecError(f"{path}: names a column twice")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise SpecError(f"{path}: has no column {', '.join(missing)}")
    for at, row in enumerate(rows):
        if None in row or None in row.values():
            raise SpecError(f"{path}:{at + 2}: has another number of cells than there are columns")
    return rows


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The conditions of one job, by zone.

    Attributes:
        zones: Availability from its start on, a value for each tick.
        past: The same before its start, oldest first.
        prices: Spot USD per hour at each tick, for zones whose price changes are known.
    """

    zones: Mapping[str, Sequence[int]]
    past: Mapping[str, Sequence[int]]
    prices: Mapping[str, Sequence[float]]


def excerpt(
    traces: Traces,
    names: Sequence[str],
    start: int,
    ticks: int,
    *,
    earlier: Traces | None = None,
    price_changes: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Excerpt:
    """*ticks* ticks of the zones *names* from tick *start* on; *earlier* traces end where *traces* begin."""
    changes = price_changes or {}
    return Excerpt(
        zones={name: traces.since(start, name)[:ticks] for name in names},
        past={
            name: ((earlier.zones.get(name, ()) if earlier else ()) + traces.before(start, name))
            for name in names
        },
        prices={name: prices_since(changes[name], start, ticks) for name in names if name in changes},
    )
