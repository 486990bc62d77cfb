"""Lost parts of an attempt: make its Jobs recreate pods, and find Jobs that need not run without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from envscaler_airflow.backends.base import QUIET_S, AttemptStatus
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Cluster, RefusedError
from envscaler_airflow.backends.kubernetes.failures import (
    LOST_AFTER_S,
    is_silent,
    read_attempt,
    silent_for,
)
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    Seen,
    condition,
    index_of,
    job_end,
    stop_asked,
)
from envscaler_airflow.run import outcome_of

_NOTE = "its node does not answer, and it is overdue; given up by envscaler"


def free_lost(cluster: Cluster, seen: Seen, *, first: int, quiet_s: Mapping[int, float]) -> tuple[str, ...]:
    """Set the phase of each overdue pod to Failed; returns the names of these pods.

    Its containers may keep running while its kubelet is silent: a pod whose status in the store changes is
    kept.

    With a podFailurePolicy such a pod stays Running for as long as its node is silent, and a forced delete
    does not remove it because of the Job's finalizer (recorded, scenario 08b).
    """
    freed = []
    for pod in seen.pods:
        silence = silent_for(pod, seen)
        if silence is None or silence < LOST_AFTER_S or not is_silent(pod, seen):
            continue
        index = index_of(pod)
        if index is None or quiet_s.get(first + index, 0.0) < QUIET_S:
            continue
        metadata = pod["metadata"]
        body = {
            "metadata": {"uid": metadata["uid"]},
            "status": {"phase": "Failed", "reason": "NodeLost", "message": _NOTE},
        }
        try:
            cluster.patch(names.pods(metadata["namespace"], metadata["name"], "status"), body)
        except RefusedError as err:
            if err.status in (403, 404, 409):
                continue
            raise
        freed.append(str(metadata["name"]))
    return tuple(freed)


def unneeded(found: Sequence[tuple[Part, Seen]]) -> list[tuple[Part, Seen]]:
    """Jobs of a mixed attempt that still run although another of it has failed or is gone.

    Nodes that stop on request also end their Job; the other Jobs then continue to their own end.
    """
    if not any(_has_broken(part, seen) for part, seen in found):
        return []
    return [(part, seen) for part, seen in found if seen.job is not None and job_end(seen.job) is None]


def _has_broken(part: Part, seen: Seen) -> bool:
    if seen.job is not None and condition(seen.job, "Failed") is None:
        return False
    nodes = read_attempt(seen, part.nodes).nodes
    return any(not outcome_of(node.reason).is_orderly for node in nodes)


def status_of(found: Sequence[tuple[Part, Seen]]) -> AttemptStatus:
    """The status of all nodes of an attempt, from the state of its Jobs."""
    rest = {part.name for part, seen in unneeded(found) if seen.job and stop_asked(seen.job) is None}
    nodes = []
    for part, seen in found:
        for node in read_attempt(seen, part.nodes, first=part.first).nodes:
            is_unneeded = part.name in rest and node.state not in ("ended", "lost")
            nodes.append(replace(node, reason="unneeded") if is_unneeded else node)
    return AttemptStatus(tuple(nodes))
