"""Own a run from a process that waits: a shell, or a test. No Airflow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.controller.act import Controller
from envscaler_airflow.controller.stage import Delivered, Waiting, Wake, Watching
from envscaler_airflow.controller.watch import Watch
from envscaler_airflow.errors import BackendError, ProtocolError, StoreError
from envscaler_airflow.lifecycle import Actor, RunState
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.lease import RENEW_EVERY_S, renew_lease

POLL_S = 2.0
"""How often a waiting process looks, seconds. Chosen: a person who waits notices no delay."""


@dataclass(slots=True)
class Holder:
    """Enters a run and stays its owner until it ends.

    Attributes:
        controller: Acts.
        store, prefix, backend, actor: Of the run, for watching and the lease.
        on_wait: Told the reason whenever it changes.
        on_look: Called at every look with the watch, to show logs and progress.
        sleep, monotonic: Time.
    """

    controller: Controller
    store: Store
    prefix: str
    backend: Backend
    actor: Actor
    on_wait: Callable[[Waiting], None] = lambda _waiting: None
    on_look: Callable[[Watch], None] = lambda _watch: None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic

    def hold(self) -> Delivered:
        """Until the run is delivered. Raises as :meth:`Controller.enter`.

        Once an attempt of this holder's was begun no answer ends nothing: it may run.
        """
        try:
            result = self.controller.enter()
        except BackendError as err:
            if not err.transient or not self._may_run():
                raise
            self.on_wait(Waiting(Watching(0, 0), f"no answer, tried again: {err}"))
            result = self._resume(Wake("entry"), Watching(0, 0))
        return self._until_delivered(result)

    def is_ours(self) -> bool:
        """True once the run is this holder's: before, it may be another's. Raises StoreError."""
        owner = self._state().owner
        return owner is not None and owner.ti_id == self.actor.ti_id

    def _may_run(self) -> bool:
        return self.is_ours() and self._state().live is not None

    def _state(self) -> RunState:
        return EventLog(self.store, self.prefix, snapshots=False).load()

    def go_on(self) -> Delivered:
        """The same, for a run that this holder has entered before."""
        return self._until_delivered(self._resume(Wake("request"), Watching(0, 0)))

    def _until_delivered(self, result: Waiting | Delivered) -> Delivered:
        while isinstance(result, Waiting):
            self.on_wait(result)
            result = self._resume(self._wait(result), result.watching)
        return result

    def _resume(self, wake: Wake, watching: Watching) -> Waiting | Delivered:
        """One slice; when store or machines do not answer, say so and do it again: the run stays ours."""
        wait_s, renewed = POLL_S, self.monotonic()
        while True:
            try:
                if self.monotonic() - renewed >= RENEW_EVERY_S:
                    renew_lease(self.store, self.prefix, holder=self.actor.ti_id)
                    renewed = self.monotonic()
                return self.controller.resume(wake)
            except BackendError as err:
                if not (err.transient or isinstance(err, StoreError)):
                    raise
                self.on_wait(Waiting(watching, f"no answer, tried again in {wait_s:.0f} s: {err}"))
            self.sleep(wait_s)
            wait_s = min(2 * wait_s, RENEW_EVERY_S)

    def _wait(self, waiting: Waiting) -> Wake:
        watch = Watch(
            store=self.store,
            prefix=self.prefix,
            backend=self.backend,
            watching=waiting.watching,
            monotonic=self.monotonic,
        )
        renewed, told = self.monotonic(), None
        while True:
            try:
                waits = "" if watch.observed is None else watch.observed.waits
                ages = None if told is None else watch.ages()  # nothing is known before the first look
                if waits != told or self.monotonic() - renewed >= RENEW_EVERY_S:
                    renew_lease(self.store, self.prefix, holder=self.actor.ti_id, waits=waits, ages=ages)
                    renewed, told = self.monotonic(), waits
                wake = watch.poll()
                if wake is not None and (ages := watch.ages()):
                    renew_lease(self.store, self.prefix, holder=self.actor.ti_id, ages=ages)
                self.on_look(watch)
            except (StoreError, ProtocolError):
                wake = None  # unknown is not dead: look again
            if wake is not None:
                return wake
            self.sleep(POLL_S)
