"""End and remove orphaned Jobs: for a shell, and for an Airflow task that runs from time to time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from envscaler_airflow.backends.kubernetes import KubernetesBackend, names
from envscaler_airflow.backends.kubernetes.orphans import Orphan, orphans
from envscaler_airflow.errors import BackendError, ProtocolError
from envscaler_airflow.owner.foreground import close
from envscaler_airflow.owner.request import kill_quietly
from envscaler_airflow.run import RunState
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)


def reap(
    store: Store,
    backend: KubernetesBackend,
    *,
    task_is_over: Callable[[RunKey], str | None] = lambda _key: None,
    grace_s: float = 30.0,
    dry_run: bool = False,
) -> Iterator[Orphan]:
    """Remove Jobs of the backend's namespace that no live run of *store* owns; yields each.

    A Job is left alone for its first 15 minutes, if it belongs to another store, and if its run cannot be
    identified. If the task of a live attempt is over, the attempt is asked to save and stop, as by a kill; a
    later call removes its Job.

    Args:
        store: Run store.
        backend: Of the namespace.
        task_is_over: Why the task of a run will not return to it; None if it may, or if that is unknown.
        grace_s: Seconds that pods may take to end.
        dry_run: If True, only yield the orphans.

    Raises:
        StoreError: The store cannot be read.
        BackendError: The API server does not answer, or does not report the time.
    """
    answer = backend.cluster.list(names.jobs(backend.namespace), {"limit": 1})
    if answer.server_time is None:
        raise BackendError("the API server does not tell the time: ages cannot be known")

    def ownerless(prefix: str) -> str | None:
        try:
            return task_is_over(Run(store, prefix).key())
        except ProtocolError:  # the folder contains no key, or another run's
            return None

    for orphan in orphans(
        backend,
        store.url,
        lambda prefix: _state(Run(store, prefix)),
        server_time=answer.server_time,
        ownerless=ownerless,
    ):
        if not dry_run:
            _end(Run(store, orphan.prefix), backend, orphan, grace_s)
        yield orphan


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
        raise ProtocolError(f"store {run.store.url} holds nothing of the deployment {deployment}")
    return None


def _end(run: Run, backend: KubernetesBackend, orphan: Orphan, grace_s: float) -> None:
    if orphan.is_live and orphan.runs:
        state = _state(run)
        owner = state.owner.ti_id if state is not None and state.owner is not None else ""
        asked = kill_quietly(run, backend, ti_id=owner, reason=orphan.reason)
        if asked and state is not None and state.live is not None and state.live.handle is None:
            backend.stop(orphan.handle, grace_s=grace_s)  # its owner died before it could record the start
        return
    if orphan.runs:
        backend.stop(orphan.handle, grace_s=grace_s)
    elif orphan.is_live:
        _record(run, backend)
    uid = str(orphan.handle.details["uid"])
    backend.cluster.delete(names.jobs(backend.namespace, orphan.handle.name), uid=uid)


def _record(run: Run, backend: KubernetesBackend) -> None:
    """Record how the attempt ended and what it cost, before its Job is removed."""
    state = _state(run)
    owner = state.owner if state is not None else None
    if owner is None:
        return
    try:
        close(run, backend, ti_id=owner.ti_id, waits=False)
    except ProtocolError as err:
        log.warning("run=%s its end is not recorded: %s", run.prefix, err)
