"""One slice of a task on a worker: the run's store, key, backend and controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.stage import Delivered, Stage, Waiting, Wake
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.compute import open_backend
from envscaler_airflow.hooks.settings import store_place
from envscaler_airflow.lifecycle import Actor
from envscaler_airflow.operators.transcript import Transcript
from envscaler_airflow.store import EventLog, RunKey, Store, check_store

if TYPE_CHECKING:
    from airflow.sdk import Context


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
        """
        place = store_place(store_url, store_conn_id)
        store = place.open()
        key = run_key(context, place.deployment(store))
        ti, dag_run = context["ti"], context["dag_run"]
        began = getattr(dag_run, "start_date", None)
        actor = Actor(
            str(ti.id),
            ti.try_number,
            ti.max_tries,
            run_started_at=began.timestamp() if began else None,
            clears=getattr(dag_run, "clear_number", None),
        )
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

    def advance(self, stage: Stage, event: Mapping[str, Any] | None) -> Waiting | Delivered:
        """Act as far as possible; *event* is what a trigger saw, None for ``execute``."""
        controller = self._controller(stage)
        if event is None:
            check_store(self.store, self.prefix)
            return controller.enter()
        return controller.resume(Wake.from_dict(event))

    def time_out(self, stage: Stage, reason: str) -> None:
        """Ask the attempt to save and go."""
        self._controller(stage).time_out(reason)

    def write_log(self, say: Callable[..., object], *, goes_on: bool) -> None:
        """Write into the task's log what it lacks of the run; *goes_on*: the task defers again."""
        Transcript(self.store, self.prefix, lambda line: say("%s", line)).write(goes_on=goes_on)

    def _controller(self, stage: Stage) -> Controller:
        return Controller(store=self.store, key=self.key, backend=self.backend, actor=self.actor, stage=stage)


def pause_s(name: str, value: object) -> float:
    """Seconds between two looks of a trigger, as argument *name* gives them.

    Raises:
        SpecError: No number above 0: the trigger would fail, or look without a pause.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise SpecError(f"{name}: got {value!r:.40}, expected seconds above 0")


def run_key(context: Context, deployment: str, *, task_id: str | None = None) -> RunKey:
    """Key of the run of the task in *context*, or of another task of its DAG run."""
    ti = context["ti"]
    map_index = ti.map_index if ti.map_index is not None else -1
    team = getattr(context["dag_run"], "team_name", None)
    return RunKey(deployment, ti.dag_id, ti.run_id, task_id or ti.task_id, map_index, team)
