"""What no live run owns: Jobs whose run has gone on, has ended, or cannot be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.base import Handle
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.backend import KubernetesBackend
from envscaler_airflow.backends.kubernetes.failures import job_end, timestamp
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.lifecycle import RunState

YOUNG_S = 900.0
"""Age up to which a Job is left alone, seconds. Chosen: an owner records within one slice what it made."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A Job that nobody needs.

    Attributes:
        handle: Of the attempt.
        reason: Why, for people.
        runs: True when pods of it may still run.
    """

    handle: Handle
    reason: str
    runs: bool


def orphans(
    backend: KubernetesBackend,
    store_url: str,
    state_of: Callable[[str], RunState | None],
    *,
    server_time: float,
) -> Iterator[Orphan]:
    """Jobs of the namespace whose run in this store does not count them as its live attempt.

    Args:
        backend: Of the namespace.
        store_url: Jobs of other stores are left alone: their runs cannot be seen from here.
        state_of: Fold of a run's events by its folder; None when there is no such run.
        server_time: Clock of the API server, seconds since the epoch.
    """
    for job in backend.jobs():
        metadata = job["metadata"]
        annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
        if annotations.get(names.STORE) != store_url or labels.get(names.RELEASED) == "true":
            continue
        born = timestamp(metadata["creationTimestamp"])
        if born is None or server_time - born < YOUNG_S:
            continue
        reason = _why(job, state_of(str(annotations.get(names.PREFIX))))
        if reason is not None:
            yield Orphan(handle_of([job]), reason, job_end(job) is None)


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
