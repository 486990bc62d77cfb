"""End and remove orphaned attempts: for a shell, and for an Airflow task that runs from time to time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envscaler_airflow.backends.base import Backend, Leftover, ListsLeftovers
from envscaler_airflow.errors import BackendError, ProtocolError, SpecError
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.foreground import close
from envscaler_airflow.owner.owned_run import OwnedRun
from envscaler_airflow.owner.owner import Releaser
from envscaler_airflow.owner.request import kill_quietly
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.run import AttemptState, Handle, RunState
from envscaler_airflow.run.event_bodies import StopRequested
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store

log = logging.getLogger(__name__)

YOUNG_S = 900.0
"""Minimum age of an orphan, seconds. Chosen: an owner records a new attempt within one execution."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A part of an attempt without an owner.

    Attributes:
        part: As the backend lists it.
        reason: Human-readable reason.
        is_live: True for the live attempt of its run, whose owner has ended: it may still save.
    """

    part: Leftover
    reason: str
    is_live: bool = False

    @property
    def handle(self) -> Handle:
        """Handle of the part."""
        return self.part.handle

    @property
    def prefix(self) -> str:
        """Folder of its run in the store."""
        return self.part.prefix


def reap(
    store: Store,
    backend: Backend,
    *,
    task_is_over: Callable[[RunKey], str | None] = lambda _key: None,
    grace_s: float = 30.0,
    dry_run: bool = False,
) -> Iterator[Orphan]:
    """Remove what runs on *backend* and no live run of *store* owns; yields each.

    It is left alone for its first 15 minutes, if it belongs to another store, and if its run cannot be
    identified. If the task of a live attempt is over, the attempt is asked to save and stop, as by a kill; a
    later call removes it. One that cannot be judged, ended or released is logged, the others are still
    removed, and the next call repeats it.

    Args:
        store: Run store.
        backend: Of the runs.
        task_is_over: Why the task of a run will not return to it; None if it may. Raises BackendError if that
            is not known now.
        grace_s: Seconds that nodes may take to end.
        dry_run: If True, only yield the orphans.

    Raises:
        SpecError: The backend cannot list what runs on it.
        StoreError, BackendError: The backend cannot list what runs there or does not report the time; or
            some were left alone, after all others: the first error.
    """
    if not isinstance(backend, ListsLeftovers):
        raise SpecError(f"compute={backend.name!r}: it cannot list what runs there, so nothing can be reaped")
    faults = []
    for part in backend.leftovers(store.url):
        try:
            orphan = _judged(store, part, task_is_over) if part.age_s >= YOUNG_S else None
            if orphan is not None and not dry_run:
                _end(Run(store, orphan.prefix), backend, orphan, grace_s)
        except (BackendError, ProtocolError) as err:
            log.warning("attempt=%s left alone: %s", part.handle.name, err)
            faults.append(err)
            continue
        if orphan is not None:
            yield orphan
    if faults:
        raise faults[0]


def _judged(store: Store, part: Leftover, task_is_over: Callable[[RunKey], str | None]) -> Orphan | None:
    """The orphan that *part* is; None if its run owns it, or that is unknown."""
    try:
        reason = _why(part, _state(Run(store, part.prefix)))
    except ProtocolError as err:
        log.warning("attempt=%s left alone: %s", part.handle.name, err)
        return None
    if reason is not None:
        return Orphan(part, reason)
    try:
        reason = task_is_over(Run(store, part.prefix).key())
    except ProtocolError:  # the folder contains no key, or another run's
        return None
    return None if reason is None else Orphan(part, reason, is_live=True)


def _why(part: Leftover, state: RunState | None) -> str | None:
    """Why *part* is orphaned; None when it is of the live attempt of its run."""
    if state is None or not state.generation:
        return "its run is not in the store"
    live = state.live
    if live is None:
        return f"its run has no live attempt ({state.status})"
    if (live.generation, live.number) != (part.generation, part.attempt):
        return f"its run goes on with attempt {live.number} of generation {live.generation}"
    return None


def _state(run: Run) -> RunState | None:
    """Fold of a run's events; None if the run does not exist.

    Raises:
        ProtocolError: That cannot be determined: a newer version wrote the events, or this is another store.
    """
    state = run.events.load()
    if state.unknown:
        raise ProtocolError(f"run {run.prefix}, event {state.unknown[-1]}: a newer version wrote it")
    if state.number:
        return state
    deployment = run.prefix.partition("/")[0]
    if not run.store.children(deployment):  # not mounted here, or another store behind the same URL
        raise ProtocolError(f"store {run.store.url} has nothing of the deployment {deployment}")
    return None


def _end(run: Run, backend: Backend, orphan: Orphan, grace_s: float) -> None:
    """End what still runs of an orphan; remove one that has ended, once the run's events record it."""
    assert isinstance(backend, ListsLeftovers)
    part = orphan.part
    if orphan.is_live and part.runs:
        state = _state(run)
        owner = state.owner.ti_id if state is not None and state.owner is not None else ""
        asked = kill_quietly(run, backend, ti_id=owner, reason=orphan.reason)
        if asked and state is not None and state.live is not None and state.live.handle is None:
            backend.stop(orphan.handle, grace_s=grace_s)  # its owner died before it could record the start
        return
    if part.runs:
        backend.stop(orphan.handle, grace_s=grace_s)
        if _unreleased(_state(run), part) is not None:
            return  # its bill is complete once it has ended: a later call records and removes it
    else:
        _record(run, backend, orphan)
    backend.remove(orphan.handle)


def _record(run: Run, backend: Backend, orphan: Orphan) -> None:
    """Record how the attempt ended, what it cost, and that it is released, before it is removed."""
    if orphan.is_live or _is_stopped_between_attempts(run):
        _close(run, backend)
    if _record_release(run, backend, orphan.part) and _is_stopped_between_attempts(run):
        _close(run, backend)  # it waited for the release


def _is_stopped_between_attempts(run: Run) -> bool:
    """True if a stop of the run is requested, and no execution has recorded its end."""
    state = _state(run)
    if state is None or state.live is not None or state.status != "active":
        return False
    return any(isinstance(one.body, StopRequested) for one in state.pending)


def _close(run: Run, backend: Backend) -> None:
    state = _state(run)
    owner = state.owner if state is not None else None
    if owner is None:
        return
    try:
        close(run, backend, ti_id=owner.ti_id, waits=False)
    except ProtocolError as err:
        log.warning("run=%s its end is not recorded: %s", run.prefix, err)


def _record_release(run: Run, backend: Backend, part: Leftover) -> bool:
    """Record the release of an ended attempt that its owner could not release; True if it is news.

    Raises:
        BackendError: Other parts of it still run and are stopped, or the backend does not report its bill.
    """
    state = _state(run)
    held = _unreleased(state, part)
    if state is None or state.owner is None or held is None:
        return False
    Releaser(OwnedRun(run, backend, state.owner, Stage(spec=None, spec_source=""))).record(state, held)
    return True


def _unreleased(state: RunState | None, part: Leftover) -> AttemptState | None:
    """The ended attempt of *part*, if its owner could not release it; None if nothing is known of that."""
    attempts = () if state is None else state.attempts
    key = (part.generation, part.attempt)
    return next((one for one in attempts if one.key == key and facts.is_unreleased(one)), None)
