"""Own a run from a waiting process, or end one whose task is over. No Airflow."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.backoff import wait_s
from envscaler_airflow.errors import BackendError, BudgetError, ProtocolError, RunFailedError, StoreError
from envscaler_airflow.owner.facts import spent_usd
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import accept_delivery, owns
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    StoppedError,
    SupersededError,
    Waiting,
    Wake,
    Watching,
)
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.run import Action, Actor, RunState, outcome_of
from envscaler_airflow.run.event_bodies import StopRequested
from envscaler_airflow.store.lease import RENEW_EVERY_S
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)

POLL_S = 2.0
"""How often a waiting process polls, seconds. Chosen: a person who waits notices no delay."""
GIVE_UP_S = 3600.0
"""Longest time without an answer from store or machines, seconds. Chosen: the default ``orphan_after`` plus
half an hour: by then an attempt without an owner has saved and ended."""


@dataclass(slots=True)
class ForegroundOwner:
    """Enters a run and stays its owner until it ends.

    Attributes:
        owner: Acts on the run.
        on_wait: Called with the reason for the wait whenever it changes.
        on_poll: Called at every poll with the watch, to show logs and progress.
        on_trouble: Called with each error of the store while it waits.
        sleep, monotonic: Time.
    """

    owner: Owner
    on_wait: Callable[[Waiting], None] = lambda _waiting: None
    on_poll: Callable[[AttemptWatcher], None] = lambda _watch: None
    on_trouble: Callable[[Exception], None] = lambda _err: None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic

    def own(self) -> Delivered:
        """Own the run until it is delivered. Raises as :meth:`Owner.enter`.

        Once this process has begun an attempt, a missing answer ends nothing: the attempt may be running.
        """
        try:
            result = self.owner.enter()
        except BackendError as err:
            if not err.transient or not self._may_run():
                raise
            self.on_wait(Waiting(Watching(0, 0), f"no answer, tried again: {err}"))
            result = self._resume(Wake("entry"), Watching(0, 0))
        return self._until_delivered(result)

    def is_ours(self) -> bool:
        """Return True once this process owns the run; before that another may own it. Raises StoreError."""
        owned = self.owner.owned
        return owned.is_ours(owned.run.events.load())

    def _may_run(self) -> bool:
        state = self.owner.owned.run.events.load()
        return self.owner.owned.is_ours(state) and state.live is not None

    def resume(self) -> Delivered:
        """Continue a run that this process has entered before. Otherwise as :meth:`own`."""
        return self._until_delivered(self._resume(Wake("request"), Watching(0, 0)))

    def _until_delivered(self, result: Waiting | Delivered) -> Delivered:
        while isinstance(result, Waiting):
            self.on_wait(result)
            result = self._resume(self._wait(result), result.watching)
        with contextlib.suppress(StoreError):  # then the same name delivers the same result again
            accept_delivery(self.owner.owned.run, self.owner.owned.actor)
        return result

    def _resume(self, wake: Wake, watching: Watching) -> Waiting | Delivered:
        """Run one execution; without an answer from store or machines, report it, keep the run and retry."""
        failures, renewed = 0, self.monotonic()
        began = renewed
        while True:
            try:
                if self.monotonic() - renewed >= RENEW_EVERY_S:
                    self.owner.owned.run.lease.renew(holder=self.owner.owned.actor.ti_id)
                    renewed = self.monotonic()
                return self.owner.resume(wake)
            except BackendError as err:
                if not (err.transient or isinstance(err, StoreError)):
                    raise
                if self.monotonic() - began >= GIVE_UP_S:
                    raise
                failures += 1
                pause_s = wait_s(failures, first_s=POLL_S, most_s=RENEW_EVERY_S)
                self.on_wait(Waiting(watching, f"no answer, tried again in {pause_s:.0f} s: {err}"))
            self.sleep(pause_s)

    def _wait(self, waiting: Waiting) -> Wake:
        owned = self.owner.owned
        watch = AttemptWatcher(
            run=owned.run, backend=owned.backend, watching=waiting.watching, monotonic=self.monotonic
        )
        lease = _Renewal(owned, watch, self.monotonic)
        answered = self.monotonic()
        while True:
            wake, trouble = None, lease.renew()
            try:
                wake = watch.poll()
                if wake is not None:
                    trouble = lease.hand_on() or trouble
                self.on_poll(watch)
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

    def __init__(self, owned: OwnedRun, watch: AttemptWatcher, monotonic: Callable[[], float]) -> None:
        self._owned, self._watch, self._monotonic = owned, watch, monotonic
        self._renewed = monotonic()
        self._written: str | None = None

    def renew(self) -> Exception | None:
        """Renew the lease if it is due, or if the reason to wait changed; return the error, if any."""
        observed = self._watch.observed
        waits = "" if observed is None else observed.waits
        is_due = self._monotonic() - self._renewed >= RENEW_EVERY_S
        if waits == self._written and not is_due:
            return None
        ages = None if self._written is None else self._watch.ages()  # nothing is known before the first poll
        err = self._write(waits=waits, ages=ages)
        if err is None:
            self._renewed, self._written = self._monotonic(), waits
        return err

    def hand_on(self) -> Exception | None:
        """Record how long conditions have lasted, for the next watcher."""
        ages = self._watch.ages()
        return self._write(ages=ages) if ages else None

    def _write(self, **fields: Any) -> Exception | None:
        try:
            self._owned.run.lease.renew(holder=self._owned.actor.ti_id, **fields)
        except (StoreError, ProtocolError) as err:
            return err
        return None


class _Over(Exception):  # noqa: N818  (a way out, not a fault)
    """Nothing more needs to be recorded."""


def _only_end(action: Action) -> None:
    """Let an owner end what runs; it starts nothing, moves nothing, and delivers no result."""
    if action.kind in ("start", "carry-out", "deliver"):
        raise _Over


def _not(seconds: float) -> NoReturn:
    del seconds
    raise _Over


def close(
    run: Run,
    backend: Backend,
    *,
    ti_id: str,
    try_number: int | None = None,
    waits: bool = True,
) -> RunState:
    """Wait until what was asked to stop has ended, and record its end, its cost, and that the run stopped.

    Acts as the try (*ti_id*, *try_number*), whose task is over, and only while no other try owns the run: a
    new try may take it over at any moment. What the attempt used is released. With *waits* False only what
    has ended by now is recorded.

    Raises:
        StoreError, BackendError: No answer for an hour.
        ProtocolError: The run's events cannot be read.
    """
    actor = _asked(run, ti_id, try_number)
    if actor is None:
        return run.events.load()
    stage = Stage(spec=None, spec_source="")
    run.key()  # a run without a readable key is not closed
    owner = Owner(run=run, backend=backend, actor=actor, stage=stage, before=_only_end)
    foreground = ForegroundOwner(owner, sleep=time.sleep if waits else _not)
    with suppress(_Over, StoppedError, RunFailedError, BudgetError, SupersededError):
        foreground.resume()
    return run.events.load()


def _asked(run: Run, ti_id: str, try_number: int | None) -> Actor | None:
    """Return the owner if a stop of its run is requested; None without one, or if another owns the run."""
    while True:
        state = run.events.load()
        owner = state.owner
        if not owns(owner, ti_id, try_number) or state.status != "active" or state.unknown:
            return None
        if state.live is not None and outcome_of(state.live.stop_reason).is_final:
            return owner
        if any(isinstance(request.body, StopRequested) for request in state.pending):
            return owner
        stop = StopRequested(reason="its task is over", by=f"ti {ti_id}", ti_id=ti_id)
        if run.events.append(state.number, stop, actor=None) is not None:
            return owner


def close_behind(run: Run, backend: Backend, *, ti_id: str, try_number: int | None = None) -> None:
    """Run :func:`close` in a background thread that ends with this process; ``reap`` does the rest later."""

    def follow() -> None:
        try:
            state = close(run, backend, ti_id=ti_id, try_number=try_number)
        except (BackendError, ProtocolError) as err:
            log.warning("run=%s its end is not recorded: %s; `envscaler reap` does it", run.prefix, err)
            return
        usd = spent_usd(state, backend, now=run.now())
        cost = "unknown" if usd is None else usd_text(usd)
        log.info("run=%s %s after its task was ended; cost %s", run.prefix, state.status, cost)

    threading.Thread(target=follow, name=f"envscaler-close-{run.prefix}", daemon=True).start()
