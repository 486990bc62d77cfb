"""What happens to a run, as lines for people, read from its store as it happens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from envscaler_airflow.cli.tables import printable
from envscaler_airflow.controller.report import why_ended
from envscaler_airflow.controller.watch import read_status
from envscaler_airflow.errors import StoreError
from envscaler_airflow.lifecycle import AttemptState, Event, RunState, fold
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.protocol import Status
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.logs import read_logs

_MAX_OUTPUT_BYTES = 1 << 20
"""Largest JSON file of an output that is read. Chosen: summaries are a few kilobytes."""


class StageStory:
    """Follows one run; tells each fact once.

    Attributes:
        name: The stage's, for people.
        prefix: The run's folder in the store.
        state: Fold of the events told so far.
        status: What node 0 of the current attempt last said; None before it spoke.
    """

    def __init__(self, store: Store, prefix: str, name: str) -> None:
        """Begin before the first event."""
        self.name, self.prefix = name, prefix
        self.state = RunState()
        self.status: Status | None = None
        self._store = store
        self._log = EventLog(store, prefix)
        self._resumed: dict[tuple[int, int], int] = {}
        self._cursors: dict[tuple[int, int], tuple[int, int]] = {}

    def look(self) -> list[str]:
        """Lines for what is new since the last look; none when the store cannot be read now."""
        try:
            lines = list(self._events())
            self.status = self._current_status()
            return lines + list(self._resume()) + list(self._output())
        except StoreError:
            return []

    def attempt(self) -> AttemptState | None:
        """The current attempt, while it runs and nobody has asked it to go."""
        live = self.state.live
        return live if live is not None and live.phase == "started" else None

    def value_of_hour(self) -> float | None:
        """USD that an hour was worth in the plan; None when it is not known."""
        value = self._json("plan.json").get("value_of_hour_usd")
        return float(value) if isinstance(value, int | float) else None

    def output_json(self, output: str, file: str) -> dict[str, Any]:
        """A JSON file of one of the outputs; {} when it is not there."""
        return self._json(f"outputs/g{self.state.generation}/{output}/{file}")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            text = self._store.read(f"{self.prefix}/{name}", max_bytes=_MAX_OUTPUT_BYTES)
            body = json.loads(text or b"{}")
        except (StoreError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    def _events(self) -> Iterator[str]:
        for event in self._log.read(after=self.state.number):
            words = describe(event, self.state)
            self.state = fold([event], self.state)
            if words:
                yield words

    def _current_status(self) -> Status | None:
        current = self.state.current
        if current is None:
            return None
        return read_status(self._store, self.prefix, attempt=(current.generation, current.number), node=0)

    def _resume(self) -> Iterator[str]:
        current, status = self.state.current, self.status
        if current is None or status is None or status.start_step is None:
            return
        key = (current.generation, current.number)
        before = self._resumed.get(key)
        if before == status.start_step:
            return
        self._resumed[key] = status.start_step
        if before is not None:
            yield f"attempt {current.number} was made again, and goes on from step {status.start_step}"
        elif status.start_step:
            yield f"attempt {current.number} goes on from step {status.start_step}{self._again(status)}"

    def _again(self, status: Status) -> str:
        before = self.state.attempts_of(self.state.generation)[:-1]
        reached = before[-1].step if before else None
        if reached is None or status.start_step is None:
            return ""
        lost = max(0, reached - status.start_step)
        return f", {lost} steps to do again" if lost else ", nothing to do again"

    def _output(self) -> Iterator[str]:
        for attempt in self.state.attempts_of(self.state.generation):
            key = (attempt.generation, attempt.number)
            data, self._cursors[key] = read_logs(
                self._store, self.prefix, attempt=key, node=0, cursor=self._cursors.get(key, (1, 0))
            )
            yield from (f"| {line}" for line in data.decode("utf-8", errors="replace").splitlines())


def describe(event: Event, before: RunState) -> str | None:
    """One line for *event*, which follows *before*; None for what only machines care about."""
    tell = _TELL.get(event.type)
    return printable(tell(event.body, before)) if tell else None


def _target(body: Mapping[str, Any]) -> str:
    try:
        return Allocation.from_dict(body["target"]).name
    except (KeyError, TypeError, ValueError):
        return "another machine"


def _intended(body: Mapping[str, Any], _before: RunState) -> str:
    allocation = Allocation.from_dict(body["allocation"])
    price = allocation.usd_per_hour
    cost = "price unknown" if price is None else f"${price:.4f}/h"
    return f"attempt {body['attempt']} on {allocation.name} ({cost}): {body.get('reason', '')}"


def _move_requested(body: Mapping[str, Any], _before: RunState) -> str:
    return f"asked for a move to {_target(body)}: {body.get('reason', '')}"


def _move_accepted(body: Mapping[str, Any], _before: RunState) -> str:
    when = "at the end of an epoch" if body.get("align") == "epoch" else "now"
    return (
        f"move to {_target(body)} accepted: {body.get('reason', '')}; attempt {body['attempt']} saves {when}"
    )


def _move_refused(body: Mapping[str, Any], _before: RunState) -> str:
    return f"move refused: {body.get('reason', '')}"


def _move_deferred(body: Mapping[str, Any], _before: RunState) -> str:
    return f"the next attempt gets {_target(body)}: {body.get('reason', '')}"


def _change_intended(body: Mapping[str, Any], _before: RunState) -> str:
    return f"attempt {body['attempt']} is changed in place to {_target(body)}: {body.get('reason', '')}"


def _changed(body: Mapping[str, Any], _before: RunState) -> str:
    step = f" at step {body['step']}" if isinstance(body.get("step"), int) else ""
    return f"attempt {body['attempt']} has {_target(body)}{step}, without a restart"


def _change_undone(body: Mapping[str, Any], _before: RunState) -> str:
    return f"attempt {body['attempt']} stays as it was: {body.get('reason', '')}"


def _stopping(body: Mapping[str, Any], _before: RunState) -> str:
    return f"attempt {body['attempt']} is asked to go: {body.get('reason') or body.get('why', '')}"


def _ended(body: Mapping[str, Any], before: RunState) -> str:
    attempt = before.live
    number = int(body["attempt"])
    moved = attempt is not None and attempt.stop_why == "move" and body.get("outcome") == "left"
    outcome = "moved" if moved else str(body.get("outcome", "ended"))
    step = f" at step {body['step']}" if isinstance(body.get("step"), int) else ""
    saved = body.get("checkpoint_step")
    kept = f"; last checkpoint at step {saved}" if isinstance(saved, int) and outcome != "succeeded" else ""
    detail = f": {body['detail']}" if body.get("detail") else ""
    return f"attempt {number} {outcome}{step}{kept}{detail}"


def _failed(body: Mapping[str, Any], _before: RunState) -> str:
    return f"failed: {body.get('reason', '')}"


def _stopped(body: Mapping[str, Any], _before: RunState) -> str:
    return f"stopped: {body.get('reason', '')}"


_TELL: Mapping[str, Callable[[Mapping[str, Any], RunState], str]] = {
    "attempt-intended": _intended,
    "attempt-stopping": _stopping,
    "attempt-ended": _ended,
    "move-requested": _move_requested,
    "move-accepted": _move_accepted,
    "move-refused": _move_refused,
    "move-deferred": _move_deferred,
    "change-intended": _change_intended,
    "changed": _changed,
    "change-undone": _change_undone,
    "failed": _failed,
    "stopped": _stopped,
}


def moves(state: RunState) -> list[tuple[AttemptState, AttemptState]]:
    """Each move that was carried out: the attempt that left and the one that took over."""
    pairs = itertools.pairwise(state.attempts_of(state.generation))
    return [(left, came) for left, came in pairs if why_ended(left) == "moved"]
