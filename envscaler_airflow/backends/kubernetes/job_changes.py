"""Changes of the Jobs of an attempt: other CPU, memory or nodes, lost pods recreated, stop and release."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from envscaler_airflow.backends.base import QUIET_S, AttemptStatus, Injection, NodeFault, ResizeState
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Cluster, Json, RefusedError
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.failures import (
    LOST_AFTER_S,
    is_silent,
    read_attempt,
    silent_for,
    unmet,
)
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    Seen,
    condition,
    index_of,
    indexes,
    is_pod_over,
    job_end,
    stop_asked,
)
from envscaler_airflow.backends.kubernetes.job_usage import unheld
from envscaler_airflow.backends.kubernetes.mounts import holds_s
from envscaler_airflow.catalog.nodes import quantity
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import outcome_of
from envscaler_airflow.sidecar.context import AWAY_S

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
    [main] = [one for one in pod["spec"]["containers"] if one["name"] == names.MAIN]
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
    return {"metadata": metadata, "spec": {"containers": [{"name": names.MAIN, "resources": resources}]}}


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
        next((one.get("resources") or {} for one in found or () if one["name"] == names.MAIN), {})
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


RELEASED_TTL_S = 3600
"""How long a released Job stays so that no late repeat restarts it, seconds. Chosen: longer than any
execution of an owner lasts.
"""
STOP_DEADLINE_S = 1
"""Deadline that ends a Job at once; its record stays. Source: recorded, activeDeadlineSeconds is mutable."""


def amend(cluster: Cluster, part: Part, patch: Mapping[str, Any]) -> bool:
    """Patch the Job of *part*; False when it no longer exists, and its pods neither."""
    body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": part.uid}}
    try:
        cluster.patch(names.jobs(part.namespace, part.name), body)
    except RefusedError as err:
        if err.status not in (404, 409) or err.transient:
            raise
        return False
    return True


def stop_part(cluster: Cluster, part: Part, seen: Seen, *, grace_s: float) -> None:
    """Set a deadline that ends the Job now, and give its pods *grace_s* seconds."""
    job = seen.job
    if job is not None and job_end(job) is not None:
        return
    asked = None if job is None else stop_asked(job)
    if job is not None and (asked is None or grace_s <= 0 < float(asked.get("grace_s") or 0)):
        note = _note(part, seen, asked, grace_s)
        if not amend(cluster, part, {"metadata": {"annotations": {names.STOP: json.dumps(note)}}}):
            return
    # Before the deadline, which would end the pods with the grace that they were created with; and never 0,
    # so that the kubelet sees the end. A pod that waits for a node has none: the deadline ends it.
    grace = max(1, math.ceil(grace_s))
    for pod in seen.pods:
        if is_pod_over(pod) or (job is not None and not pod["spec"].get("nodeName")):
            continue
        metadata = pod["metadata"]
        path = names.pods(metadata["namespace"], metadata["name"])
        cluster.delete(path, uid=metadata["uid"], grace_s=grace)
    if job is not None:
        amend(cluster, part, {"spec": {"activeDeadlineSeconds": STOP_DEADLINE_S}})


def _note(part: Part, seen: Seen, asked: Mapping[str, Any] | None, grace_s: float) -> Json:
    """The Job's record of the stop: what it lacked cannot be read once its pods are deleted."""
    missing = unmet(read_attempt(seen, part.nodes))
    note: Json = {**(asked or {}), "grace_s": grace_s, "at": seen.server_time}
    note |= {"unmet_kind": missing[0], "unmet": missing[1]} if missing else {}
    return note | ({"unheld": nodes} if asked is None and (nodes := unheld(seen, part)) else {})


def release_part(cluster: Cluster, part: Part, seen: Seen, settings: Settings) -> None:
    """Remove the pods of a Job that is over; the Job itself stays for a while as a tombstone."""
    job = seen.job
    if job is None:
        return
    if job_end(job) is None and (job["spec"].get("suspend") or not seen.pods) and not _has_succeeded(job):
        cluster.delete(names.jobs(part.namespace, part.name), uid=part.uid)
        return
    kept = 0 if _is_succeeding(seen, part) else _keeps(job, settings)
    patch: Json = {
        "metadata": {"labels": {names.RELEASED: "true"}},
        "spec": {"ttlSecondsAfterFinished": max(RELEASED_TTL_S, kept, holds_s(job, settings.ttl_s))},
    }
    if job_end(job) is None and not _is_succeeding(seen, part):
        patch["spec"]["activeDeadlineSeconds"] = STOP_DEADLINE_S
    if not amend(cluster, part, patch) or kept:
        return
    for pod in seen.pods:
        where = names.pods(part.namespace, pod["metadata"]["name"])
        cluster.delete(where, uid=pod["metadata"]["uid"])


def _has_succeeded(job: Mapping[str, Any]) -> bool:
    return condition(job, "SuccessCriteriaMet") is not None


def _is_succeeding(seen: Seen, part: Part) -> bool:
    """True when every node has succeeded: the Job controller will complete the Job after its pods.

    A deadline would pass before the Job controller acts, and the Job would end as failed.
    """
    if seen.job is None or _has_succeeded(seen.job):
        return seen.job is not None
    done: set[int | None] = set(indexes((seen.job.get("status") or {}).get("completedIndexes")))
    done |= {index_of(pod) for pod in seen.pods if (pod.get("status") or {}).get("phase") == "Succeeded"}
    return done >= set(range(part.nodes))


def _keeps(job: Mapping[str, Any], settings: Settings) -> int:
    """How long its pods stay for inspection, seconds."""
    if settings.keep == "never" or condition(job, "Complete") is not None:
        return 0
    return settings.ttl_s if settings.keep == "on-failure" else settings.keep


EVICTION_GRACE_S = 1
"""Seconds between SIGTERM and SIGKILL of an evicted pod. Chosen: no notice, but the kubelet still reports the
end."""
_DONE = "done:"
_BREAK = """
import os, signal, sys, time
what, most = sys.argv[1], int(sys.argv[2])
if os.readlink("/proc/self") != str(os.getpid()):
    sys.exit("/proc is that of other processes")
facts, words = {}, {}
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/%s/stat" % name) as file:
            facts[int(name)] = file.read().rpartition(")")[2].split()
        with open("/proc/%s/cmdline" % name, "rb") as file:
            words[int(name)] = file.read().split(b"\\0")
    except OSError:
        pass
def below(pid):
    for child in [one for one in facts if facts[one][1] == str(pid)]:
        yield child
        yield from below(child)
sidecar = [pid for pid in words if b"envscaler_airflow.sidecar" in words[pid]]
training = [pid for pid in below(1) if facts[pid][2] != facts[1][2]]
found = sidecar if what in ("kill-sidecar", "store-away") else training
if not found:
    sys.exit("the process does not run now")
number = {"kill-sidecar": 9, "store-away": signal.SIGUSR1, "stall": signal.SIGSTOP, "resume": signal.SIGCONT}
for pid in found:
    if what in number:
        os.kill(pid, number[what])
    else:
        with open("/proc/%d/oom_score_adj" % pid, "w") as file:
            file.write("1000")
if what == "oom" and os.fork() == 0:
    os.setsid()
    for stream in range(3):
        os.close(stream)
    blocks, until = [], time.monotonic() + 60
    while len(blocks) < most and time.monotonic() < until:
        blocks.append(b"x" * (1 << 20))
    time.sleep(10)
    os._exit(0)
print("done:", *found)
"""
"""Run by a container's own Python 3.8 or newer: PID 1 there is the wrapper, the command in a process group of
its own, or what keeps the sidecar running."""
_PARTS = {"kill-sidecar": "sidecar", "store-away": "sidecar", "stall": "training", "oom": "training"}


def is_running(pod: Json) -> bool:
    """True for a pod that runs and is not being deleted."""
    is_going = bool(pod["metadata"].get("deletionTimestamp"))
    return not is_going and (pod.get("status") or {}).get("phase") == "Running"


def running_pod(pods: Iterable[tuple[int, Json]], node: int) -> Json | None:
    """The pod of *node* that runs now; None without one."""
    return next((pod for index, pod in pods if index == node and is_running(pod)), None)


def fault_obstacle(cluster: Cluster, pod: Json | None, fault: NodeFault) -> str:
    """Why *fault* cannot be injected into *pod*; "" if it can. Raises BackendError."""
    if pod is None:
        return "it has no running pod"
    namespace = pod["metadata"]["namespace"]
    part = "eviction" if fault == "lose-node" else "exec"
    if not cluster.may("create", "pods", part, namespace):
        return f"this identity may not create pods/{part} in namespace {namespace}; drill as one that may"
    if fault == "oom" and _memory_limit(pod) is None:
        return f"pod {pod['metadata']['name']} has no memory limit"
    return ""


def break_pod(cluster: Cluster, pod: Json | None, fault: NodeFault) -> Injection:
    """Evict the pod as for a lost machine, or signal processes of one of its containers.

    Raises:
        BackendError: The cluster refused, or the pod or the process does not run now.
    """
    if pod is None:
        raise BackendError(f"{fault}: the node has no running pod")
    metadata = pod["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    if fault == "lose-node":
        options = {"gracePeriodSeconds": EVICTION_GRACE_S, "preconditions": {"uid": metadata["uid"]}}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        cluster.create(names.pods(namespace, name, "eviction"), body)
        return Injection(f"evicted pod {name} with {EVICTION_GRACE_S} s of grace")
    found = _break(cluster, pod, fault)
    did = f"{fault}: {_PARTS[fault]} of pod {name} ({found})"
    if fault != "stall":
        return Injection(did, lasts_s=AWAY_S if fault == "store-away" else 0.0)

    def resume() -> None:
        with suppress(BackendError):  # its pod was replaced meanwhile
            _break(cluster, pod, "resume")

    by_hand = f"kubectl exec -n {namespace} {name} -c {names.MAIN} -- kill -CONT {found}"
    return Injection(did, resume, by_hand)


def _break(cluster: Cluster, pod: Json, what: str) -> str:
    """The processes of the container that were signalled."""
    metadata = pod["metadata"]
    container = "sidecar" if _PARTS.get(what) == "sidecar" else names.MAIN
    most = (_memory_limit(pod) or 0) // MIB
    command = ["python3", "-c", _BREAK, what, str(most)]
    path = names.pods(metadata["namespace"], metadata["name"], "exec")
    printed = cluster.execute(path, container, command)
    if not printed.startswith(_DONE):
        raise BackendError(f"{what}: pod {metadata['name']}, container {container}: {printed.strip()[-300:]}")
    return printed.removeprefix(_DONE).strip()


def _memory_limit(pod: Json) -> int | None:
    """Bytes of memory that the training may use; None without a limit."""
    [main] = [one for one in pod["spec"]["containers"] if one["name"] == names.MAIN]
    limit = ((main.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else int(quantity(str(limit)))
