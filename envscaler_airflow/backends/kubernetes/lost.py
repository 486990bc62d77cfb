"""Pods on nodes that went silent: what lets their Job make them again."""

from __future__ import annotations

from envscaler_airflow.backends.kubernetes import paths
from envscaler_airflow.backends.kubernetes.client import Cluster, RefusedError
from envscaler_airflow.backends.kubernetes.failures import LOST_AFTER_S, Seen, is_silent, silent_for

_NOTE = "its node does not answer, and it is overdue; given up by envscaler"


def free_lost(cluster: Cluster, seen: Seen) -> tuple[str, ...]:
    """Set the phase of each overdue pod to Failed; names of those that were.

    With a podFailurePolicy such a pod stays Running for as long as its node is silent, and a forced
    delete does not free it: the finalizer of the Job holds it (recorded, scenario 08b).
    """
    freed = []
    for pod in seen.pods:
        silence = silent_for(pod, seen)
        if silence is None or silence < LOST_AFTER_S or not is_silent(pod, seen):
            continue
        metadata = pod["metadata"]
        body = {
            "metadata": {"uid": metadata["uid"]},
            "status": {"phase": "Failed", "reason": "NodeLost", "message": _NOTE},
        }
        try:
            cluster.patch(paths.pods(metadata["namespace"], metadata["name"], "status"), body)
        except RefusedError as err:
            if err.status in (403, 404, 409):
                continue
            raise
        freed.append(str(metadata["name"]))
    return tuple(freed)
