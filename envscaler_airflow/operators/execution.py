"""One execution of a task on a worker: the run, its backend and its owner."""

from __future__ import annotations

import json
import logging
import platform
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import EnvScalerError, ProtocolError, StoreError
from envscaler_airflow.hooks.settings import open_backend, store_place
from envscaler_airflow.hooks.states import task_state
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import accept_delivery
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    SupersededError,
    Waiting,
    Wake,
    Watching,
    is_transient,
    watched_now,
    watching_until_retry,
)
from envscaler_airflow.run import Actor, AttemptState, Event, RunState
from envscaler_airflow.run.cost import Bill
from envscaler_airflow.run.event_bodies import AttemptEnded, NewGeneration
from envscaler_airflow.run.narration import describe, totals
from envscaler_airflow.store import Run, RunKey, check_store
from envscaler_airflow.store.logs import (
    BEGIN,
    CLAIM_CHUNKS,
    TASK_LOG,
    Cursor,
    TaskLog,
    labelled,
    log_key,
    read_lines,
    read_task_log,
)
from envscaler_airflow.store.run import RESULT
from envscaler_airflow.triggers.stage_trigger import settle_s

if TYPE_CHECKING:
    from airflow.sdk import Context


LOG_BYTES = 8 << 20
"""Most of a training's output that one execution writes, bytes. Chosen: some seconds of a worker."""
CHUNKS = 32
"""Newest chunks of a node that one execution writes. Source: LOG_BYTES in chunks of 256 KiB (DESIGN)."""
MAX_RESULT_BYTES = 1 << 22
"""Largest ``result.json`` read, bytes. Chosen: a report of thousands of attempts."""

Say = Callable[[str], object]


class Transcript:
    """Writes what is missing in the task's log, in the order in which it happened.

    Airflow drops what a trigger logged when the next trigger begins; it keeps what executions log. So an
    execution that defers again writes everything since the last execution, even what the trigger showed.
    The last one writes only what the trigger did not show, if the trigger's log stays readable.
    """

    def __init__(self, run: Run, say: Say) -> None:
        """Write what happened to *run* through *say*, one line at a time."""
        self._run, self._say = run, say
        self._budget = LOG_BYTES

    def write(self, *, goes_on: bool) -> None:
        """Write what is missing. *goes_on*: the task defers again, so the trigger's log is dropped.

        If the store cannot be read now, only one line is written; the next execution continues from there.
        """
        try:
            self._write(goes_on=goes_on)
        except (StoreError, ProtocolError) as err:
            self._say(f"the training's output cannot be read now, and follows later: {err}")

    def _write(self, *, goes_on: bool) -> None:
        log = read_task_log(self._run)
        state = self._run.events.load()
        new = self._run.events.read(after=log.event) if log.event <= state.number else []
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
        self._run.write(TASK_LOG, done.to_json())
        if not goes_on and state.status in ("succeeded", "failed", "stopped"):
            for line in self._totals():
                self._say(line)

    def _before(self, event: Event, state: RunState, cursors: dict[str, Cursor], log: TaskLog) -> None:
        """Write what an attempt printed before its end."""
        if not isinstance(event.body, AttemptEnded):
            return
        key = (event.body.generation, event.body.attempt)
        for attempt in state.attempts:
            if attempt.key == key:
                self._output(attempt, cursors, log)

    def _output(self, attempt: AttemptState, cursors: dict[str, Cursor], log: TaskLog) -> None:
        nodes = attempt.allocation.nodes
        for node in range(nodes):
            key = log_key(attempt.key, node)
            cursor = self._skipped(node, cursors.get(key, BEGIN), log.shown.get(key, BEGIN))
            found, cursors[key], used = read_lines(
                self._run,
                attempt=attempt.key,
                node=node,
                cursor=cursor,
                budget=max(0, self._budget),
            )
            self._budget -= used
            for line in labelled(found, nodes=nodes):
                self._say(line)

    def _skipped(self, node: int, cursor: Cursor, shown: Cursor) -> Cursor:
        """Return *cursor*, or a later one if the trigger showed more than one execution writes."""
        first = shown[0] - CHUNKS
        is_same_claim = cursor[0] // CLAIM_CHUNKS == shown[0] // CLAIM_CHUNKS
        if cursor[0] >= first or not is_same_claim:
            return cursor
        self._say(
            f"[{first - cursor[0]} chunks of node {node}'s output are left out: `envscaler logs` shows them]"
        )
        return first, 0

    def _totals(self) -> list[str]:
        text = self._run.read(RESULT, max_bytes=MAX_RESULT_BYTES)
        try:
            bill = Bill.from_dict(json.loads(text or b"{}")["report"]["bill"])
            return [f"cost: {line}" for line in totals(bill)]
        except (KeyError, TypeError, ValueError, RecursionError):
            return []


def _of(attempts: Iterable[AttemptState], cursors: Mapping[str, Cursor]) -> dict[str, Cursor]:
    """Return the part of *cursors* that is of *attempts*: no execution writes an older one again."""
    keys = [log_key(attempt.key, node) for attempt in attempts for node in range(attempt.allocation.nodes)]
    return {key: cursors[key] for key in keys if key in cursors}


def _outlives(host: str) -> bool:
    """Return True if the UI still shows the log of a trigger on *host* once the task has ended.

    Airflow 3.3.2 then reads remote logs and the files beside the API server, and no longer asks a triggerer.
    These files are this machine's if LocalExecutor runs the task. On others the end may appear twice.
    """
    if conf.getboolean("logging", "remote_logging", fallback=False):
        return True
    return host == platform.node() and conf.get("core", "executor", fallback="") == "LocalExecutor"


log = logging.getLogger(__name__)

LIFE_KEY = "envscaler_life"
"""Key in Airflow's task state store under which a task keeps the uuid of its DAG run."""
_METASTORE = "airflow.state.metastore.MetastoreBackend"
"""Source: the default of ``[state_store] backend``, Airflow 3.3.2."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What one execution works with."""

    run: Run
    backend: Backend
    actor: Actor

    @classmethod
    def open(
        cls, context: Context, *, compute: str, store_url: str | None, store_conn_id: str | None
    ) -> Execution:
        """Open the run of the task in *context*.

        Raises:
            SpecError: No store, no deployment, or the backend does not exist.
            SupersededError: Airflow no longer knows this try.
        """
        ti = context["ti"]
        actor = Actor(str(ti.id), ti.try_number, ti.max_tries, life_of(context))
        place = store_place(store_url, store_conn_id)
        store = place.open()
        key = run_key(context, place.deployment(store))
        return cls(Run(store, key, snapshots=True), open_backend(compute), actor)

    def begun(self) -> NewGeneration:
        """Return what the generation was begun with. Raises StoreError."""
        return self.run.events.load().begun

    def state(self) -> RunState | None:
        """Return the fold of the run's events; None if the store does not answer."""
        try:
            return self.run.events.load()
        except (StoreError, ProtocolError):
            return None

    def advance(self, stage: Stage, event: Mapping[str, Any] | None) -> Waiting | Delivered:
        """Act as far as possible; *event* is what a trigger saw, None for ``execute``."""
        owner = self._owner(stage)
        if event is None:
            try:
                owner.check_newest()
            except StoreError:  # the check creates a folder that no run has written to; no try owns it
                check_store(self.run.store, self.run.prefix)
                owner.check_newest()
            else:
                check_store(self.run.store, self.run.prefix)
            return owner.enter()
        return owner.resume(Wake.from_dict(event))

    def time_out(self, stage: Stage, reason: str) -> None:
        """Ask the attempt to save and stop."""
        self._owner(stage).time_out(reason)

    def write_log(self, say: Callable[..., object], *, goes_on: bool) -> None:
        """Write what the task's log lacks of the run; *goes_on*: the task defers again."""
        Transcript(self.run, lambda line: say("%s", line)).write(goes_on=goes_on)

    def accept_delivery(self) -> str | None:
        """Record that Airflow accepted the result; returns why it is not recorded, None if it is.

        Airflow also runs a success callback when it has refused the success, so its task state is checked.

        Raises:
            StoreError, ProtocolError: The store does not answer; a clear then delivers the result again.
        """
        key = self.run.key()
        try:
            state = task_state(key.dag_id, key.run_id, key.task_id, key.map_index)
        except (AirflowRuntimeError, OSError):
            state = "success"  # no answer: trust the callback
        if state != "success":
            return f"Airflow has the task as {state}"
        is_recorded = accept_delivery(self.run, self.actor)
        return None if is_recorded else "a newer try owns the run"

    def _owner(self, stage: Stage) -> Owner:
        return Owner(run=self.run, backend=self.backend, actor=self.actor, stage=stage)


def life_of(context: Context) -> str | None:
    """Uuid of the DAG run of the task in *context*, written by its first execution; None if unreadable.

    Airflow keeps it over retries and clears, and deletes it with the DAG run. It is not read from a custom
    backend, which may keep it longer, nor if Airflow deletes it at a success.

    Raises:
        SupersededError: Airflow no longer knows this try.
    """
    kept = context.get("task_state_store")
    if kept is None or not _keeps_lives():
        return None
    try:
        if (found := kept.get(LIFE_KEY)) is None:
            kept.set(LIFE_KEY, str(uuid.uuid4()), retention=NEVER_EXPIRE)
            found = kept.get(LIFE_KEY)
    except AirflowRuntimeError as err:
        if (err.error.detail or {}).get("status_code") == HTTPStatus.NOT_FOUND:
            raise SupersededError("Airflow no longer knows this try: another took its place") from err
        log.warning("the life of this DAG run cannot be read: %s; its try number shows a retry", err)
        return None
    return found if isinstance(found, str) else None


def _keeps_lives() -> bool:
    backend = conf.get("state_store", "backend", fallback=_METASTORE) or _METASTORE
    is_custom = backend != _METASTORE or bool(conf.get("workers", "state_store_backend", fallback=""))
    return not is_custom and not conf.getboolean("state_store", "clear_on_success", fallback=False)


def postponed(
    err: EnvScalerError,
    execution: Execution | None,
    event: Mapping[str, Any] | None,
    watched: Mapping[str, Any] | None,
) -> tuple[str, Watching] | None:
    """Return the run and what to watch until *err* has passed; None to leave the retry to Airflow.

    Args:
        err: What ended the execution.
        execution: The execution; None if it could not open the store.
        event: Why it ran; None for ``execute``.
        watched: What its trigger watched, ``prefix``, ``watching`` and ``watched_s``; None without a trigger.
    """
    if not is_transient(err):
        return None
    if watched is not None:
        known, prefix = Watching.from_dict(watched["watching"]), str(watched["prefix"])
    elif execution is not None and (state := execution.state()) is not None:
        found = watched_now(state, execution.actor)
        if found is None:
            return None
        known, prefix = found, execution.run.prefix
    else:
        return None  # no attempt was begun, as far as is known: an ordinary retry
    wake = Wake() if event is None else Wake.from_dict(event)
    watched_s = float((watched or {}).get("watched_s", 0.0))
    after = watching_until_retry(known, wake, watched_s=watched_s, least_s=settle_s())
    return None if after is None else (prefix, after)


def run_key(context: Context, deployment: str, *, task_id: str | None = None) -> RunKey:
    """Return the key of the run of the task in *context*, or of another task of its DAG run."""
    ti = context["ti"]
    map_index = ti.map_index if ti.map_index is not None else -1
    team = getattr(context["dag_run"], "team_name", None)
    return RunKey(deployment, ti.dag_id, ti.run_id, task_id or ti.task_id, map_index, team)
