"""Record the end of a run whose task is over, on behalf of its owner, which will not return."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import NoReturn

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import BackendError, BudgetError, ProtocolError, RunFailedError
from envscaler_airflow.owner.act import Controller
from envscaler_airflow.owner.facts import spent_usd
from envscaler_airflow.owner.foreground import Holder
from envscaler_airflow.owner.request import owns
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    StoppedError,
    SupersededError,
    Waiting,
)
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.run import Action, Actor, RunState, outcome_of
from envscaler_airflow.run.event_bodies import StopRequested
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)


class _Over(Exception):  # noqa: N818  (a way out, not a fault)
    """Nothing more needs to be recorded."""


class _Closer(Controller):
    """Ends what runs and records it; starts nothing, moves nothing, and delivers no result."""

    def _act(self, state: RunState, action: Action) -> RunState | Waiting | Delivered:
        if action.kind in ("start", "carry-out", "deliver"):
            raise _Over
        return super()._act(state, action)


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
    closer = _Closer(run=run, backend=backend, actor=actor, stage=stage)
    holder = Holder(closer, run, backend, actor, sleep=time.sleep if waits else _not)
    with suppress(_Over, StoppedError, RunFailedError, BudgetError, SupersededError):
        holder.go_on()
    return run.events.load()


def _asked(run: Run, ti_id: str, try_number: int | None) -> Actor | None:
    """Return the owner if a stop of its run is requested; None without one, or if another owns the run."""
    while True:
        state = run.events.load()
        owner = state.owner
        if not owns(owner, ti_id, try_number) or state.status != "active" or state.unknown:
            return None
        if state.live is not None and outcome_of(state.live.stop_why).is_final:
            return owner
        if any(isinstance(request.body, StopRequested) for request in state.pending):
            return owner
        stop = StopRequested(reason="its task is over", by=f"ti {ti_id}")
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
