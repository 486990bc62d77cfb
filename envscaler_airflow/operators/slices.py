"""One slice of a task on a worker: the run's store, key, backend and controller."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.again import is_passing, watched_now
from envscaler_airflow.controller.again import postponed as again
from envscaler_airflow.controller.request import accept_delivery
from envscaler_airflow.controller.stage import Delivered, Stage, SupersededError, Waiting, Wake, Watching
from envscaler_airflow.errors import EnvScalerError, ProtocolError, StoreError
from envscaler_airflow.hooks.compute import open_backend
from envscaler_airflow.hooks.settings import store_place
from envscaler_airflow.hooks.states import task_state
from envscaler_airflow.lifecycle import Actor, RunState
from envscaler_airflow.operators.transcript import Transcript
from envscaler_airflow.store import EventLog, RunKey, Store, check_store
from envscaler_airflow.triggers.stage import settle_s

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

LIFE_KEY = "envscaler_life"
"""Key in Airflow's task state store under which a task keeps the uuid of its DAG run."""
_METASTORE = "airflow.state.metastore.MetastoreBackend"
"""Source: the default of ``[state_store] backend``, Airflow 3.3.2."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one slice works with."""

    store: Store
    key: RunKey
    backend: Backend
    actor: Actor

    @classmethod
    def open(
        cls, context: Context, *, compute: str, store_url: str | None, store_conn_id: str | None
    ) -> Slice:
        """Open the run of the task in *context*.

        Raises:
            SpecError: No store, no deployment, or no such backend.
            SupersededError: Airflow no longer knows this try.
        """
        ti = context["ti"]
        actor = Actor(str(ti.id), ti.try_number, ti.max_tries, life_of(context))
        place = store_place(store_url, store_conn_id)
        store = place.open()
        key = run_key(context, place.deployment(store))
        return cls(store, key, open_backend(compute), actor)

    @property
    def prefix(self) -> str:
        """The run's folder in the store."""
        return self.key.prefix

    @property
    def run_url(self) -> str:
        """The same, as people write it."""
        return self.store.uri(self.prefix)

    def begun(self) -> Mapping[str, Any]:
        """What the generation was begun with. Raises StoreError."""
        return EventLog(self.store, self.prefix).load().begun

    def state(self) -> RunState | None:
        """Fold of the run's events; None when the store does not answer."""
        try:
            return EventLog(self.store, self.prefix, snapshots=False).load()
        except (StoreError, ProtocolError):
            return None

    def advance(self, stage: Stage, event: Mapping[str, Any] | None) -> Waiting | Delivered:
        """Act as far as possible; *event* is what a trigger saw, None for ``execute``."""
        controller = self._controller(stage)
        if event is None:
            try:
                controller.check_newest()
            except StoreError:  # a folder that no run has written to is made by the check; no try owns it
                check_store(self.store, self.prefix)
                controller.check_newest()
            else:
                check_store(self.store, self.prefix)
            return controller.enter()
        return controller.resume(Wake.from_dict(event))

    def time_out(self, stage: Stage, reason: str) -> None:
        """Ask the attempt to save and go."""
        self._controller(stage).time_out(reason)

    def write_log(self, say: Callable[..., object], *, goes_on: bool) -> None:
        """Write into the task's log what it lacks of the run; *goes_on*: the task defers again."""
        Transcript(self.store, self.prefix, lambda line: say("%s", line)).write(goes_on=goes_on)

    def accept_delivery(self) -> str | None:
        """Record that Airflow took the result; says why it is not recorded, None when it is.

        A success callback runs also where Airflow refused the success, so Airflow is asked.

        Raises:
            StoreError, ProtocolError: The store does not answer; a clear then delivers the result again.
        """
        key = self.key
        try:
            state = task_state(key.dag_id, key.run_id, key.task_id, key.map_index)
        except (AirflowRuntimeError, OSError):
            state = "success"  # no answer: the callback itself says so
        if state != "success":
            return f"Airflow has the task as {state}"
        is_recorded = accept_delivery(self.store, self.prefix, self.actor)
        return None if is_recorded else "a newer try owns the run"

    def _controller(self, stage: Stage) -> Controller:
        return Controller(store=self.store, key=self.key, backend=self.backend, actor=self.actor, stage=stage)


def life_of(context: Context) -> str | None:
    """Uuid of the DAG run of the task in *context*, written by its first execution; None where unreadable.

    Airflow keeps it over retries and clears, and deletes it with the DAG run. Nothing is read from a custom
    backend, which may keep it longer, and where Airflow deletes it at a success.

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
    part: Slice | None,
    event: Mapping[str, Any] | None,
    watched: Mapping[str, Any] | None,
) -> tuple[str, Watching] | None:
    """The run and what to watch until *err* has passed; None where it is Airflow's to retry.

    Args:
        err: What ended the execution.
        part: The execution; None where it could not open the store.
        event: What it was for; None for ``execute``.
        watched: What its trigger watched, ``prefix``, ``watching`` and ``watched_s``; None where none did.
    """
    if not is_passing(err):
        return None
    if watched is not None:
        known, prefix = Watching.from_dict(watched["watching"]), str(watched["prefix"])
    elif part is not None and (state := part.state()) is not None:
        found = watched_now(state, part.actor)
        if found is None:
            return None
        known, prefix = found, part.prefix
    else:
        return None  # no attempt was begun, as far as is known: an ordinary retry
    wake = Wake() if event is None else Wake.from_dict(event)
    watched_s = float((watched or {}).get("watched_s", 0.0))
    after = again(known, wake, watched_s=watched_s, least_s=settle_s())
    return None if after is None else (prefix, after)


def run_key(context: Context, deployment: str, *, task_id: str | None = None) -> RunKey:
    """Key of the run of the task in *context*, or of another task of its DAG run."""
    ti = context["ti"]
    map_index = ti.map_index if ti.map_index is not None else -1
    team = getattr(context["dag_run"], "team_name", None)
    return RunKey(deployment, ti.dag_id, ti.run_id, task_id or ti.task_id, map_index, team)
