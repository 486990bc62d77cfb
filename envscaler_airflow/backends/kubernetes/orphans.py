"""What no live run owns: Jobs whose run has gone on, has ended, or cannot be found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.base import Handle
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.backend import KubernetesBackend
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.job_snapshot import job_end, timestamp
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run import RunState

log = logging.getLogger(__name__)

YOUNG_S = 900.0
"""Age up to which a Job is left alone, seconds. Chosen: an owner records within one slice what it made."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A Job that nobody needs.

    Attributes:
        handle: Of the attempt.
        prefix: Folder of its run in the store.
        reason: Why, for people.
        runs: True when pods of it may still run.
        is_live: True for the live attempt of its run, whose owner is gone: it may still save.
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
    """Jobs of the namespace whose run in this store does not count them as its live attempt.

    Args:
        backend: Of the namespace.
        store_url: Jobs of other stores are left alone: their runs cannot be seen from here.
        state_of: Fold of a run's events by its folder; None when there is no such run. A ProtocolError says
            that it cannot be told, and leaves the Job alone.
        server_time: Clock of the API server, seconds since the epoch.
        ownerless: Why nobody owns the live attempt of a run any more, though its events do not say so; None
            when somebody does.
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
    """Why the Job is nobody's; None when it is the live attempt of its run."""
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
