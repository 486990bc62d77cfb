"""Own a run from a waiting process: a shell, or a test. No Airflow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import BackendError, ProtocolError, StoreError
from envscaler_airflow.owner.act import Controller
from envscaler_airflow.owner.request import accept_delivery
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Delivered, Waiting, Wake, Watching
from envscaler_airflow.run import Actor, RunState
from envscaler_airflow.store.lease import RENEW_EVERY_S
from envscaler_airflow.store.run import Run

POLL_S = 2.0
"""How often a waiting process polls, seconds. Chosen: a person who waits notices no delay."""
GIVE_UP_S = 3600.0
"""Longest time without an answer from store or machines, seconds. Chosen: the default ``orphan_after`` plus
half an hour: by then an attempt without an owner has saved and ended."""


@dataclass(slots=True)
class Holder:
    """Enters a run and stays its owner until it ends.

    Attributes:
        controller: Acts.
        run, backend, actor: For watching and the lease.
        on_wait: Called with the reason for the wait whenever it changes.
        on_look: Called at every poll with the watch, to show logs and progress.
        on_trouble: Called with each error of the store while it waits.
        sleep, monotonic: Time.
    """

    controller: Controller
    run: Run
    backend: Backend
    actor: Actor
    on_wait: Callable[[Waiting], None] = lambda _waiting: None
    on_look: Callable[[AttemptWatcher], None] = lambda _watch: None
    on_trouble: Callable[[Exception], None] = lambda _err: None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic

    def hold(self) -> Delivered:
        """Own the run until it is delivered. Raises as :meth:`Controller.enter`.

        Once this holder has begun an attempt, a missing answer ends nothing: the attempt may be running.
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
        """Return True once this holder owns the run; before that another may own it. Raises StoreError."""
        owner = self._state().owner
        return self.actor.is_try_of(owner)

    def _may_run(self) -> bool:
        return self.is_ours() and self._state().live is not None

    def _state(self) -> RunState:
        return self.run.events.load()

    def go_on(self) -> Delivered:
        """Continue a run that this holder has entered before. Otherwise as :meth:`hold`."""
        return self._until_delivered(self._resume(Wake("request"), Watching(0, 0)))

    def _until_delivered(self, result: Waiting | Delivered) -> Delivered:
        while isinstance(result, Waiting):
            self.on_wait(result)
            result = self._resume(self._wait(result), result.watching)
        with contextlib.suppress(StoreError):  # then the same name delivers the same result again
            accept_delivery(self.run, self.actor)
        return result

    def _resume(self, wake: Wake, watching: Watching) -> Waiting | Delivered:
        """Run one execution; without an answer from store or machines, report it, keep the run and retry."""
        wait_s, renewed = POLL_S, self.monotonic()
        began = renewed
        while True:
            try:
                if self.monotonic() - renewed >= RENEW_EVERY_S:
                    self.run.lease.renew(holder=self.actor.ti_id)
                    renewed = self.monotonic()
                return self.controller.resume(wake)
            except BackendError as err:
                if not (err.transient or isinstance(err, StoreError)):
                    raise
                if self.monotonic() - began >= GIVE_UP_S:
                    raise
                self.on_wait(Waiting(watching, f"no answer, tried again in {wait_s:.0f} s: {err}"))
            self.sleep(wait_s)
            wait_s = min(2 * wait_s, RENEW_EVERY_S)

    def _wait(self, waiting: Waiting) -> Wake:
        watch = AttemptWatcher(
            run=self.run,
            backend=self.backend,
            watching=waiting.watching,
            monotonic=self.monotonic,
        )
        lease = _Renewal(self, watch)
        answered = self.monotonic()
        while True:
            wake, trouble = None, lease.renew()
            try:
                wake = watch.poll()
                if wake is not None:
                    trouble = lease.hand_on() or trouble
                self.on_look(watch)
            except (StoreError, ProtocolError) as err:
                trouble = err  # unknown is not dead: poll again
            if wake is not None:
                return wake
            if trouble is None:
                answered = self.monotonic()
            else:
                self.on_trouble(trouble)
                if self.monotonic() - answered >= GIVE_UP_S:
                    raise trouble
            self.sleep(POLL_S)


class _Renewal:
    """Renews the lease of a watched run; a store that refuses writes hides no other error."""

    def __init__(self, holder: Holder, watch: AttemptWatcher) -> None:
        self._holder, self._watch = holder, watch
        self._renewed = holder.monotonic()
        self._told: str | None = None

    def renew(self) -> Exception | None:
        """Renew the lease if it is due, or if the reason to wait changed; return the error, if any."""
        observed = self._watch.observed
        waits = "" if observed is None else observed.waits
        is_due = self._holder.monotonic() - self._renewed >= RENEW_EVERY_S
        if waits == self._told and not is_due:
            return None
        ages = None if self._told is None else self._watch.ages()  # nothing is known before the first poll
        err = self._write(waits=waits, ages=ages)
        if err is None:
            self._renewed, self._told = self._holder.monotonic(), waits
        return err

    def hand_on(self) -> Exception | None:
        """Record how long conditions have lasted, for the next watcher."""
        ages = self._watch.ages()
        return self._write(ages=ages) if ages else None

    def _write(self, **said: Any) -> Exception | None:
        try:
            self._holder.run.lease.renew(holder=self._holder.actor.ti_id, **said)
        except (StoreError, ProtocolError) as err:
            return err
        return None
