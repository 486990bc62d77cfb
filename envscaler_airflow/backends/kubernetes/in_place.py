"""Changes of a running Job: CPU and memory in place, the number of nodes, lost pods recreated.

Pure except :func:`ask` and :func:`free_lost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envscaler_airflow.backends.base import QUIET_S, AttemptStatus, ResizeState
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Cluster, Json, RefusedError
from envscaler_airflow.backends.kubernetes.failures import (
    LOST_AFTER_S,
    MAIN,
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
from envscaler_airflow.catalog.nodes import quantity
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import outcome_of

LEAVING_TAINTS = frozenset(
    ("ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler", "karpenter.sh/disrupted")
)
"""Taints of nodes that will be removed. Source: Cluster Autoscaler FAQ; Karpenter, disruption."""


def is_removable(pod: Mapping[str, Any], node: Mapping[str, Any] | None) -> bool:
    """True for a marked pod, or one whose *node* accepts no new pods or will be removed."""
    annotations = pod["metadata"].get("annotations") or {}
    if annotations.get(names.REMOVABLE) == "true":
        return True
    spec = (node or {}).get("spec") or {}
    taints = {taint.get("key") for taint in spec.get("taints") or ()}
    return bool(spec.get("unschedulable")) or not taints.isdisjoint(LEAVING_TAINTS)


def rescale_patch(job: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """The patch that gives *job* *nodes* pods.

    Raises:
        BackendError: It was not created for this many.
    """
    metadata = job["metadata"]
    most = int((metadata.get("labels") or {}).get(names.MAX_NODES) or 0)
    if not 1 <= nodes <= most:
        raise BackendError(f"{metadata['name']}: {nodes} nodes: it was made for {most or 'a fixed number'}")
    return {
        "metadata": {"uid": metadata["uid"], "labels": {names.NODES: str(nodes)}},
        "spec": {"completions": nodes, "parallelism": nodes},
    }


MIB = 1 << 20


def patch_of(pod: Json, *, vcpus: float | None, memory_bytes: int | None) -> Json:
    """The body for the pod's resize subresource; an existing limit changes with the request."""
    [main] = [one for one in pod["spec"]["containers"] if one["name"] == MAIN]
    wanted = {}
    if vcpus is not None:
        wanted["cpu"] = f"{round(vcpus * 1000)}m"
    if memory_bytes is not None:
        wanted["memory"] = f"{memory_bytes // MIB}Mi"
    limits = (main.get("resources") or {}).get("limits") or {}
    resources: dict[str, Any] = {"requests": wanted}
    kept = {name: value for name, value in wanted.items() if name in limits}
    if kept:
        resources["limits"] = kept
    metadata = {"uid": pod["metadata"]["uid"]}
    return {"metadata": metadata, "spec": {"containers": [{"name": MAIN, "resources": resources}]}}


def ask(cluster: Cluster, pod: Json, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
    """Request other resources; ``infeasible`` if the node or the cluster can never provide them.

    Raises:
        BackendError: The API server does not answer, or the Role does not allow it.
    """
    metadata = pod["metadata"]
    path = names.pods(metadata["namespace"], metadata["name"], "resize")
    try:
        cluster.patch_strategic(path, patch_of(pod, vcpus=vcpus, memory_bytes=memory_bytes))
    except RefusedError as err:
        # 403 NodeCapacity: more than the node has; 404: the cluster has no such subresource (before 1.33);
        # 422: another quality of service, or a resource that cannot be resized.
        if err.status in (404, 422) or (err.status == 403 and "cannot" not in str(err)):
            return "infeasible"
        raise
    return "going"


def state_of(pods: tuple[Json, ...]) -> ResizeState:
    """The progress of the pods: the worst state. Source: conditions of the pod, Kubernetes 1.33 and newer."""
    states = [_state(pod) for pod in pods]
    order: tuple[ResizeState, ...] = ("infeasible", "deferred", "going")
    return next((state for state in order if state in states), "done")


def _state(pod: Json) -> ResizeState:
    pending = condition(pod, "PodResizePending")
    if pending is not None:
        return "infeasible" if pending.get("reason") == "Infeasible" else "deferred"
    going = condition(pod, "PodResizeInProgress")
    if going is not None:
        return "infeasible" if going.get("reason") == "Error" else "going"
    generation = pod["metadata"].get("generation")
    seen = (pod.get("status") or {}).get("observedGeneration")
    if generation is None or seen is None:
        return "done" if _has_what_it_asks_for(pod) else "going"
    return "going" if seen < generation else "done"


def _has_what_it_asks_for(pod: Json) -> bool:
    """Compare with the kubelet's report on the training; Kubernetes 1.33 has no generation of a pod."""
    asked, given = (
        next((one.get("resources") or {} for one in found or () if one["name"] == MAIN), {})
        for found in (pod["spec"]["containers"], (pod.get("status") or {}).get("containerStatuses"))
    )
    return all(
        quantity(str((given.get(part) or {}).get(name, "0"))) == quantity(str(amount))
        for part in ("requests", "limits")
        for name, amount in (asked.get(part) or {}).items()
        if name in ("cpu", "memory")
    )


_NOTE = "its node does not answer, and it is overdue; abandoned by envscaler"


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
