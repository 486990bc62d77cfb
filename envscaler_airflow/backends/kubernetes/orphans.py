"""Orphaned Jobs: their run has moved on, has ended, or cannot be found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.backend import KubernetesBackend
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.job_snapshot import job_end, timestamp
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run import Handle, RunState

log = logging.getLogger(__name__)

YOUNG_S = 900.0
"""Minimum age of an orphaned Job, seconds. Chosen: an owner records a new Job within one execution."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A Job without an owner.

    Attributes:
        handle: Handle of the attempt.
        prefix: Folder of its run in the store.
        reason: Human-readable reason.
        runs: True when pods of it may still run.
        is_live: True for the live attempt of its run, whose owner has ended: it may still save.
    """

    handle: Handle
    prefix: str
    reason: str
    runs: bool
    is_live: bool = False


def orphans(
    backend: KubernetesBackend,
    store_url: str,
    state_of: Callable[[str], RunState | None],
    *,
    server_time: float,
    ownerless: Callable[[str], str | None] = lambda _prefix: None,
) -> Iterator[Orphan]:
    """Jobs of the namespace that are not the live attempt of their run in this store.

    Args:
        backend: Backend of the namespace.
        store_url: Jobs of other stores are skipped: their runs cannot be read here.
        state_of: Fold of a run's events by its folder; None when there is no such run. It raises
            ProtocolError when the state is unknown; the Job is then skipped.
        server_time: Clock of the API server, seconds since the epoch.
        ownerless: Why the live attempt of a run is orphaned, when its events do not show it; None when it has
            an owner.
    """
    for job in backend.jobs():
        metadata = job["metadata"]
        annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
        if annotations.get(names.STORE) != store_url or labels.get(names.RELEASED) == "true":
            continue
        born = timestamp(metadata["creationTimestamp"])
        if born is None or server_time - born < YOUNG_S:
            continue
        prefix = str(annotations.get(names.PREFIX))
        try:
            reason = _why(job, state_of(prefix))
        except ProtocolError as err:
            log.warning("job=%s left alone: %s", metadata["name"], err)
            continue
        is_live = reason is None
        if is_live:
            reason = ownerless(prefix)
        if reason is not None:
            yield Orphan(handle_of([job]), prefix, reason, job_end(job) is None, is_live)


def _why(job: dict[str, Any], state: RunState | None) -> str | None:
    """Why the Job is orphaned; None when it is the live attempt of its run."""
    if state is None or not state.generation:
        return "its run is not in the store"
    labels = job["metadata"]["labels"]
    key = (int(labels[names.GENERATION]), int(labels[names.ATTEMPT]))
    live = state.live
    if live is None:
        return f"its run has no live attempt ({state.status})"
    if (live.generation, live.number) != key:
        return f"its run goes on with attempt {live.number} of generation {live.generation}"
    return None
