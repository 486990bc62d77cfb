"""The events of a run as human-readable lines, read from its store as they happen."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from envscaler_agent.protocol import Status
from envscaler_airflow.errors import StoreError
from envscaler_airflow.owner.report import why_ended
from envscaler_airflow.run import AttemptState, RunState, fold
from envscaler_airflow.run.narration import describe, resumed
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run

_MAX_OUTPUT_BYTES = 1 << 20
"""Largest JSON file of an output that is read. Chosen: summaries are a few kilobytes."""


class StageStory:
    """Follows one run; tells each fact once.

    Attributes:
        name: The stage's human-readable name.
        state: Fold of the events reported so far.
        status: The last status of node 0 of the current attempt; None before the first.
    """

    def __init__(self, run: Run, name: str) -> None:
        """Begin before the first event of *run*; *name* is its stage's."""
        self.name, self._run = name, run
        self.state = RunState()
        self.status: Status | None = None
        self._resumed: dict[tuple[int, int], int] = {}
        self._cursors: dict[tuple[int, int], tuple[int, int]] = {}

    def now(self) -> float:
        """The run's time, which is its store's."""
        return self._run.now()

    def look(self) -> list[str]:
        """Lines about what is new since the previous call; none if the store cannot be read now."""
        lines = self.news()
        try:
            return lines + list(self._output())
        except StoreError:
            return lines

    def skip(self) -> None:
        """Leave out what has happened so far.

        Raises:
            StoreError: The store cannot be read.
        """
        self.state = fold(self._run.events.read(after=self.state.number), self.state)

    def news(self) -> list[str]:
        """The same without what the training printed."""
        lines: list[str] = []
        try:
            lines += self._events()
            self.status = self._current_status()
            lines += self._resume()
        except StoreError:
            pass
        return lines

    def marks(self) -> tuple[object, ...]:
        """What changes whenever the run goes on: events, phase, step, checkpoint, bytes moved, and output."""
        status = self.status
        said = () if status is None else (status.phase, status.progress.step, status.last_checkpoint_step)
        moved = () if status is None or status.transfer is None else (status.transfer.done_bytes,)
        return (self.state.number, *said, *moved, *sorted(self._cursors.items()))

    def attempt(self) -> AttemptState | None:
        """The current attempt, while it runs and was not asked to stop."""
        live = self.state.live
        return live if live is not None and live.phase == "started" else None

    def value_of_hour(self) -> float | None:
        """USD that an hour was worth in the plan; None when it is not known."""
        value = self._json("plan.json").get("value_of_hour_usd")
        return float(value) if isinstance(value, int | float) else None

    def output_json(self, output: str, file: str) -> dict[str, Any]:
        """A JSON file of one of the outputs; {} when it is not there."""
        last = self.state.current
        uri = (last.end.outputs or {}).get(output, "") if last is not None else ""
        folder = uri.removeprefix(f"{self._run.url}/")
        return self._json(f"{folder}/{file}") if folder else {}

    def _json(self, name: str) -> dict[str, Any]:
        try:
            text = self._run.read(name, max_bytes=_MAX_OUTPUT_BYTES)
            body = json.loads(text or b"{}")
        except (StoreError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    def _events(self) -> Iterator[str]:
        for event in self._run.events.read(after=self.state.number):
            words = describe(event, self.state)
            self.state = fold([event], self.state)
            if words:
                yield words

    def _current_status(self) -> Status | None:
        current = self.state.current
        if current is None:
            return None
        return self._run.status(current.key)

    def _resume(self) -> Iterator[str]:
        current, status = self.state.current, self.status
        if current is None or status is None or status.start_step is None:
            return
        before = self._resumed.get(current.key)
        if before == status.start_step:
            return
        self._resumed[current.key] = status.start_step
        words = resumed(self.state, status.start_step, earlier=before)
        if words:
            yield words

    def _output(self) -> Iterator[str]:
        for attempt in self.state.attempts_of(self.state.generation):
            key = attempt.key
            data, self._cursors[key] = read_logs(
                self._run, attempt=key, node=0, cursor=self._cursors.get(key, (1, 0))
            )
            yield from (f"| {line}" for line in data.decode("utf-8", errors="replace").splitlines())


def moves(state: RunState) -> list[tuple[AttemptState, AttemptState]]:
    """Each move that was carried out: the attempt that left and the one that took over."""
    pairs = itertools.pairwise(state.attempts_of(state.generation))
    return [(left, came) for left, came in pairs if why_ended(left) == "moved"]
