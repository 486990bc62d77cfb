"""What ScalingTrigger does in threads: check the stage's runs and record each check."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.hooks.prometheus import asks
from envscaler_airflow.hooks.settings import open_backend, store_place, with_shared_watch
from envscaler_airflow.hooks.states import OVER
from envscaler_airflow.owner.observe import RunSnapshot, ScalingWatcher
from envscaler_airflow.run import RunState
from envscaler_airflow.scaling import Ask, Check
from envscaler_airflow.store import Run, Store
from envscaler_airflow.store.decisions import DecisionLog
from envscaler_airflow.store.lease import SensorLease

DEADLINE_MARGIN_S = 3600.0
"""How long after a stage's deadline its sensor times out, seconds. Chosen: the stage's own
last retries end before."""


@dataclass(slots=True)
class _Checked:
    """One observed run."""

    watcher: ScalingWatcher
    log: DecisionLog
    lease: SensorLease
    snapshot: RunSnapshot | None = None
    reported: str = ""


@dataclass(slots=True)
class Checks:
    """Checks all runs of one stage in one DAG run.

    Attributes:
        store, backend: Where the runs are recorded, and what they run on.
        folder: Folder of the stage's runs, ``deployment/dag/run/task``.
        map_index: Only this index; None for all existing ones.
        writer: Name of this watcher in ``decisions/``.
        ask: Answers the queries of rules.
        until: When the sensor ends, by the run's clock; None: an hour after the stage's deadline, if any.
        monotonic: For ages.
        clock: The run's; None uses the store's.
    """

    store: Store
    backend: Backend
    folder: str
    map_index: int | None
    writer: str
    ask: Ask | None = None
    until: float | None = None
    monotonic: Callable[[], float] = time.monotonic
    clock: Callable[[], float] | None = None
    _runs: dict[str, _Checked] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        map_index: int | None,
        writer: str,
        compute: str,
        store_url: str | None,
        store_conn_id: str | None,
        prometheus_conn_id: str | None = None,
        until: float | None = None,
    ) -> Checks:
        """Open the checks with settings and connections of this process."""
        store = store_place(store_url, store_conn_id).open()
        backend = with_shared_watch(open_backend(compute))
        return cls(store, backend, folder, map_index, writer, asks(prometheus_conn_id), until)

    def once(self, states: Mapping[str, str | None]) -> dict[str, Any] | None:
        """Check each run once; return why the sensor is needed, or None.

        Args:
            states: Airflow's state of the stage's task, by map index; empty when unknown.

        Raises:
            StoreError: The store cannot be read or written; nothing is known.
        """
        for name in self._names():
            if name not in self._runs:
                self._runs[name] = self._open(f"{self.folder}/{name}")
            run = self._runs[name]
            run.snapshot = run.watcher.snapshot()
            if run.snapshot.kind != "no-run":
                run.lease.renew()
            if run.snapshot.check is not None:
                run.log.add(run.snapshot.check)
        return self._ended(states) or self._timed_out() or self._wanted() or self._overdue()

    def news(self) -> list[str]:
        """Return what the last check showed of each run, if it differs from the last report."""
        lines = []
        for name, run in self._runs.items():
            words = _words(run.snapshot)
            if words != run.reported:
                run.reported = words
                lines.append(words if name == "-1" else f"[{name}] {words}")
        return lines

    def now(self) -> float:
        """The run's time, seconds since the epoch."""
        return self.store.now() if self.clock is None else self.clock()

    def close(self) -> None:
        """Write checks that are not yet written."""
        for run in self._runs.values():
            run.log.close()

    def _names(self) -> list[str]:
        if self.map_index is not None:
            return [str(self.map_index)]
        return self.store.children(self.folder)

    def _open(self, prefix: str) -> _Checked:
        run = Run(self.store, prefix, clock=self.clock)
        watcher = ScalingWatcher(run=run, backend=self.backend, ask=self.ask, monotonic=self.monotonic)
        log = DecisionLog(run, writer=self.writer, monotonic=self.monotonic)
        return _Checked(watcher, log, SensorLease(run, monotonic=self.monotonic))

    def _ended(self, states: Mapping[str, str | None]) -> dict[str, Any] | None:
        seen = {name: run.snapshot for name, run in self._runs.items() if run.snapshot is not None}
        begun = {name: snapshot for name, snapshot in seen.items() if snapshot.kind != "no-run"}
        over = bool(begun) and all(snapshot.kind == "over" for snapshot in begun.values())
        all_terminal = bool(states) and all(state in OVER for state in states.values())
        if all_terminal and not begun:
            return {"kind": "absent", "states": sorted({str(state) for state in states.values()})}
        if not (all_terminal or (over and self.map_index is not None)):
            return None
        self.close()
        runs = {name: summary(snapshot.state) for name, snapshot in begun.items()}
        return {"kind": "ended", "runs": runs}

    def _timed_out(self) -> dict[str, Any] | None:
        if self.until is None or self.now() < self.until:
            return None
        return {"kind": "timeout", "reason": "the sensor's timeout is over"}

    def _wanted(self) -> dict[str, Any] | None:
        for name, run in self._runs.items():
            check = run.snapshot.check if run.snapshot else None
            if check is not None and check.decision.action == "move":
                return _move(f"{self.folder}/{name}", check)
        return None

    def _overdue(self) -> dict[str, Any] | None:
        """Apply the sensor's default timeout: an hour after the last deadline; none if a run has none."""
        limits = [_deadline(run.snapshot.state) for run in self._runs.values() if run.snapshot]
        known = [limit for limit in limits if limit is not None]
        if not known or len(known) < len(limits) or self.now() < max(known) + DEADLINE_MARGIN_S:
            return None
        return {"kind": "timeout", "reason": "the stage's deadline is over by an hour"}


def _words(snapshot: RunSnapshot | None) -> str:
    if snapshot is None or snapshot.check is None:
        return snapshot.kind if snapshot else "not seen"
    decision = snapshot.check.decision
    target = "" if decision.action == "keep" else f" to {decision.target.name}"
    return f"{decision.action}{target}: {decision.reason}"


def summary(state: RunState) -> dict[str, Any]:
    """Summarize a run for XCom."""
    attempts = state.attempts_of(state.generation)
    return {
        "status": state.status,
        "generation": state.generation,
        "attempts": len(attempts),
        "moves": sum(attempt.stop_reason == "move" and attempt.target is not None for attempt in attempts),
        "changes": sum(len(attempt.earlier) for attempt in attempts),
        "allocations": [attempt.allocation.name for attempt in attempts],
    }


def _move(prefix: str, check: Check) -> dict[str, Any]:
    seen, decision = check.observation, check.decision
    return {
        "kind": "move",
        "prefix": prefix,
        "from_attempt": [seen.generation, seen.attempt],
        "target": decision.target.to_dict(),
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
        "check": replace(check, observation=replace(seen, samples=())).to_dict(),
    }


def _deadline(state: RunState) -> float | None:
    seconds = state.begun.deadline_s
    if seconds is None or state.begun_at is None:
        return None
    return state.begun_at + seconds
