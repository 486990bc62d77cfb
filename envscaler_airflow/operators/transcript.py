"""What an execution writes into the task's log: what the training printed, and what happened to the run."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping

from airflow.sdk.configuration import conf

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.lifecycle import AttemptState, Event, RunState
from envscaler_airflow.lifecycle.narration import describe, totals
from envscaler_airflow.store import EventLog, Store
from envscaler_airflow.store.logs import CLAIM_CHUNKS
from envscaler_airflow.store.task_log import (
    BEGIN,
    Cursor,
    TaskLog,
    log_key,
    read_task_log,
    write_task_log,
)
from envscaler_airflow.triggers.tail import labelled, read_lines

LOG_BYTES = 8 << 20
"""Most of a training's output that one execution writes, bytes. Chosen: some seconds of a worker."""
CHUNKS = 32
"""Newest chunks of a node that one execution writes. Source: LOG_BYTES in chunks of 256 KiB (DESIGN)."""
MAX_RESULT_BYTES = 1 << 22
"""Largest ``result.json`` read, bytes. Chosen: a report of thousands of attempts."""

Say = Callable[[str], object]


class Transcript:
    """Writes what the task's log lacks, in the order in which it happened.

    Airflow drops what a trigger logged when the next one begins; it keeps what executions log. So an
    execution that defers again writes all that came since the last execution, also what the trigger showed.
    The last one writes only what the trigger did not show, where the trigger's log stays readable.
    """

    def __init__(self, store: Store, prefix: str, say: Say) -> None:
        """Write the run at *prefix* through *say*, one line at a time."""
        self._store, self._prefix, self._say = store, prefix, say
        self._budget = LOG_BYTES

    def write(self, *, goes_on: bool) -> None:
        """Write what is missing. *goes_on*: the task defers again, so the trigger's log is dropped.

        A store that cannot be read now costs nothing but a line: the next execution goes on from there.
        """
        try:
            self._write(goes_on=goes_on)
        except (StoreError, ProtocolError) as err:
            self._say(f"the training's output cannot be read now, and follows later: {err}")

    def _write(self, *, goes_on: bool) -> None:
        log = read_task_log(self._store, self._prefix)
        events = EventLog(self._store, self._prefix, snapshots=False)
        state = events.load()
        new = events.read(after=log.event) if log.event <= state.number else []
        cursors = dict(log.kept if goes_on or not _outlives(log.host) else {**log.kept, **log.shown})
        for event in new:
            self._before(event, state, cursors, log)
            words = describe(event, state)
            if words:
                self._say(words)
        newest = state.attempts[-1:]
        for attempt in newest:
            self._output(attempt, cursors, log)
        kept = _of(newest, cursors)
        done = TaskLog(shown=kept, kept=kept, host=log.host, event=max(log.event, state.number))
        write_task_log(self._store, self._prefix, done)
        if not goes_on and state.status in ("succeeded", "failed", "stopped"):
            for line in self._totals():
                self._say(line)

    def _before(self, event: Event, state: RunState, cursors: dict[str, Cursor], log: TaskLog) -> None:
        """What an attempt printed comes before its end."""
        if event.type != "attempt-ended":
            return
        key = (event.body.get("generation"), event.body.get("attempt"))
        for attempt in state.attempts:
            if (attempt.generation, attempt.number) == key:
                self._output(attempt, cursors, log)

    def _output(self, attempt: AttemptState, cursors: dict[str, Cursor], log: TaskLog) -> None:
        nodes = attempt.allocation.nodes
        for node in range(nodes):
            key = log_key((attempt.generation, attempt.number), node)
            cursor = self._skipped(node, cursors.get(key, BEGIN), log.shown.get(key, BEGIN))
            found, cursors[key], used = read_lines(
                self._store,
                self._prefix,
                attempt=(attempt.generation, attempt.number),
                node=node,
                cursor=cursor,
                budget=max(0, self._budget),
            )
            self._budget -= used
            for line in labelled(found, nodes=nodes):
                self._say(line)

    def _skipped(self, node: int, cursor: Cursor, shown: Cursor) -> Cursor:
        """*cursor*, or a later one where the trigger showed more than one execution writes."""
        first = shown[0] - CHUNKS
        is_same_claim = cursor[0] // CLAIM_CHUNKS == shown[0] // CLAIM_CHUNKS
        if cursor[0] >= first or not is_same_claim:
            return cursor
        self._say(
            f"[{first - cursor[0]} chunks of node {node}'s output are left out: `envscaler logs` shows them]"
        )
        return first, 0

    def _totals(self) -> list[str]:
        text = self._store.read(f"{self._prefix}/result.json", max_bytes=MAX_RESULT_BYTES)
        try:
            body = json.loads(text or b"{}")
            return [f"cost: {line}" for line in totals(body["report"]["bill"])]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []


def _of(attempts: Iterable[AttemptState], cursors: Mapping[str, Cursor]) -> dict[str, Cursor]:
    """The part of *cursors* that is of *attempts*: no execution writes an older one again."""
    keys = [
        log_key((attempt.generation, attempt.number), node)
        for attempt in attempts
        for node in range(attempt.allocation.nodes)
    ]
    return {key: cursors[key] for key in keys if key in cursors}


def _outlives(host: str) -> bool:
    """True when the UI still shows the log of a trigger on *host* once the task has ended.

    Airflow 3.3.2 then reads remote logs and the files beside the API server, and asks no triggerer any more.
    Those files are this machine's where LocalExecutor runs the task. Elsewhere the end may appear twice.
    """
    if conf.getboolean("logging", "remote_logging", fallback=False):
        return True
    return host == platform.node() and conf.get("core", "executor", fallback="") == "LocalExecutor"
