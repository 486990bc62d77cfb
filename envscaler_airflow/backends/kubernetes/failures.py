"""What a pod waits for, its state and its end, from Job, pods and nodes as the API server returns them. Pure.

How each failure is recognised: ``docs/reference/failures.md``.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import replace

from envscaler_agent.ending import reason_of
from envscaler_agent.protocol import END_REASONS
from envscaler_airflow.backends.base import SILENT, AttemptStatus, NodeEnd
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    MAX_DETAIL_CHARACTERS,
    Json,
    Seen,
    any_condition,
    condition,
    container,
    container_state,
    first_sentence,
    index_of,
    indexes,
    is_about,
    is_pod_over,
    job_end,
    joined,
    since,
    stop_asked,
    timestamp,
)
from envscaler_airflow.run import NodeState, NodeStatus, outcome_of

RECREATED_S = 60.0
"""A pod that is this much younger than its Job's start replaces another, seconds. Chosen: as ``usage``."""
RECREATED_WAIT_S = 180.0
"""Longest wait of a recreated pod for a node, seconds. Chosen: cluster autoscalers add a node within two
minutes or refuse; then any offer with capacity is better than the lost one.
"""

_BAD_IMAGE = (
    "InvalidImageName",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "ImageInspectError",
)
_NEVER = ("InvalidImageName", "ErrImageNeverPull")
"""Kubelet reasons that retrying does not change."""
_NOT_THERE = re.compile(
    r"code = NotFound|: not found\b|manifest unknown|pull access denied|repository does not exist"
    r"|unauthorized|401 Unauthorized|403 Forbidden|no match for platform",
    re.IGNORECASE,
)
"""The same, by the runtime's message: the registry answered that it has no such image.

Source: recorded (containerd: gRPC NotFound); OCI distribution specification, error codes; containerd's and
Docker's messages. Anything else, such as a registry that does not answer, may recover.
"""
_REFUSED_PODS = (
    ("exceeded quota", "quota"),
    ("failed quota", "refused"),
    ("violates PodSecurity", "refused"),
    (" is invalid: ", "refused"),
    (" usage per Container is ", "refused"),
    (" usage per Pod is ", "refused"),
    ("no PriorityClass with name", "refused"),
    ("denied the request", "refused"),
    ("denied request: ", "refused"),
    ("because it is being terminated", "refused"),
)
"""Why the API server accepts no pod of a Job, by its message; ``refused`` is what retrying does not change.

Source: recorded (quota); wording of the admission plugins PodSecurity, LimitRanger, ResourceQuota, Priority,
NamespaceLifecycle and ValidatingAdmissionPolicy, of webhooks that deny, and of validation.
"""
_NO_CLAIM = re.compile(r'persistentvolumeclaim "[^"]+" (not found|is being deleted)')
_UNBOUND = "unbound immediate PersistentVolumeClaims"
_VOLUME_ELSEWHERE = re.compile(
    r"volume node affinity conflict|PersistentVolume's node affinity|no available volume zone"
)
_NO_ROOM = re.compile(r"Insufficient |Too many pods|didn't satisfy|untolerated taint|unschedulable")
"""How the scheduler names claims and volumes, and a lack of capacity beside them.

Source: kube-scheduler, plugins VolumeBinding, VolumeZone, NodeResourcesFit, TaintToleration; both wordings of
the volume's node affinity (until and from 1.33).
"""
_BAD_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_UNMOUNTED = ("FailedMount", "FailedAttachVolume")


def waiting_for(pod: Json, seen: Seen) -> tuple[str, str]:
    """``(kind, detail)`` of a pod that does not run yet.

    Kinds: ``scheduling``, ``capacity`` (no node within the time given), ``placement`` (no node of the offer
    reaches its volumes, within the time given), ``gated``, ``pulling``, ``image`` (the image does not exist,
    or did not come within the time given), ``config``, ``volume``, ``refused`` (it lacks something that a
    user must provide, or that did not come within the time given), ``starting``.
    """
    scheduled = any_condition(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return _unscheduled(scheduled, pod, seen)
    if scheduled is None and not (pod.get("spec") or {}).get("nodeName"):
        return "scheduling", "waits for the scheduler"
    for one in _waiting_containers(pod):
        state = container_state(one, "waiting") or {}
        reason, message = str(state.get("reason") or ""), str(state.get("message") or "")
        if reason in _BAD_IMAGE:
            if reason == "ImagePullBackOff":  # alternates with the other: both are one wait
                reason, message = "ErrImagePull", message.rpartition("ErrImagePull: ")[2]
            detail = joined(f"{reason} of {one.get('image', '')}", message)
            is_final = reason in _NEVER or _NOT_THERE.search(message) is not None
            return ("image", detail) if is_final else _bounded("pulling", "image", detail, pod, seen)
        if reason in _BAD_CONFIG:
            return _bounded("config", "refused", joined(reason, message), pod, seen)
    mounts = [one for one in seen.events if one.get("reason") in _UNMOUNTED and is_about(one, pod)]
    if mounts:
        detail = first_sentence(str(mounts[-1].get("message") or mounts[-1].get("reason")))
        return _bounded("volume", "refused", detail, pod, seen)
    return "starting", ""


def _unscheduled(scheduled: Json, pod: Json, seen: Seen) -> tuple[str, str]:
    """Why a pod has no node, from the scheduler's message."""
    if scheduled.get("reason") == "SchedulingGated":
        return "gated", "waits for its scheduling gates"
    text = str(scheduled.get("message") or "Unschedulable")
    message, waited = first_sentence(text), since(scheduled.get("lastTransitionTime"), seen)
    if _NO_CLAIM.search(text):
        return "refused", message
    if _UNBOUND in text:
        return _until(seen.wait_for_image_s, waited, ("volume", message), "refused")
    most_s = _node_wait_s(pod, seen)
    is_over = not most_s or (waited is not None and waited >= most_s)
    if not is_over:
        return "scheduling", message
    is_elsewhere = _VOLUME_ELSEWHERE.search(text) and not _NO_ROOM.search(message)
    return ("placement" if is_elsewhere else "capacity"), message


def _node_wait_s(pod: Json, seen: Seen) -> float:
    """Longest wait of the pod for a node: shorter for a recreated pod, because its attempt may move."""
    born = timestamp(pod["metadata"].get("creationTimestamp"))
    start = timestamp(((seen.job or {}).get("status") or {}).get("startTime"))
    is_recreated = born is not None and start is not None and born - start > RECREATED_S
    return min(RECREATED_WAIT_S, seen.wait_for_node_s) if is_recreated else seen.wait_for_node_s


def _bounded(kind: str, after: str, detail: str, pod: Json, seen: Seen) -> tuple[str, str]:
    """*kind* until the pod has been on its node for longer than the limit of that wait, then *after*."""
    bound = condition(pod, "PodScheduled")
    waited = None if bound is None else since(bound.get("lastTransitionTime"), seen)
    return _until(seen.wait_for_image_s, waited, (kind, detail), after)


def _until(most_s: float, waited: float | None, now: tuple[str, str], after: str) -> tuple[str, str]:
    if waited is None or waited < most_s:
        return now
    return after, joined(f"not within {most_s:g} s", now[1])


def refused_pod(seen: Seen) -> tuple[str, str] | None:
    """``(kind, detail)`` of the API server's last refusal of a pod of the Job; None without one.

    ``quota`` waits for capacity. ``config`` waits, as long as for an image, for what may recover by itself (a
    webhook that does not answer, a service account). ``refused`` is final.
    """
    events = [one for one in seen.events if one.get("reason") == "FailedCreate"]
    if not events:
        return None
    message = str(events[-1].get("message") or "")
    kind = next((kind for words, kind in _REFUSED_PODS if words in message), "config")
    detail = message[:MAX_DETAIL_CHARACTERS]
    if kind != "config":
        return kind, detail
    return _until(seen.wait_for_image_s, since(first_told(events[-1]), seen), (kind, detail), "refused")


def first_told(event: Json) -> str | None:
    """When an event was first recorded."""
    return (
        event.get("firstTimestamp")
        or event.get("eventTime")
        or (event.get("metadata") or {}).get("creationTimestamp")
    )


def _waiting_containers(pod: Json) -> Iterable[Json]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def is_waiting_silently(pod: Json) -> bool:
    """True for a pod that is bound to a node and gives no reason for its wait: its events may have it."""
    if (pod.get("status") or {}).get("phase") != "Pending" or not (pod.get("spec") or {}).get("nodeName"):
        return False
    states = [container_state(one, "waiting") or {} for one in _waiting_containers(pod)]
    return not {str(one.get("reason") or "") for one in states} & {*_BAD_IMAGE, *_BAD_CONFIG}


LOST_AFTER_S = 180.0
"""How long a pod may be overdue on a node that does not answer before it counts as lost, seconds.

Source: issue of the backend. It uses the API server's clock, which set the time of the deletion.
"""
HELD_S = 120.0
"""How long a pod may keep running after its training if no process stops it, seconds. Chosen: a node that
shuts down stops all containers of a pod within that time, one after the other.
"""
STUCK_AFTER_S = 600.0
"""How long a pod may be overdue on a node that answers before its node counts as lost, seconds.

Chosen: longer than the kubelet tries to unmount a volume; a process in an uninterruptible wait never ends.
"""

_BEFORE = {"capacity": "scheduling", "placement": "scheduling", "image": "pulling", "refused": "config"}
"""The reason of a wait before it timed out: an attempt that is stopping does not time out again."""
_REFUSED = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "Unexpected")
"""The kubelet's reason for a pod that it rejects. Source: recorded; a prefix of status.reason."""


_JOB_DEADLINE = NodeEnd(None, None, "deadline-exceeded", "ran into the deadline of its Job")
_SUCCEEDED = NodeEnd(0, None, "succeeded")


# -- the end of one pod


def end_of(pod: Json) -> NodeEnd:
    """The end of a pod in phase Failed or Succeeded."""
    status = pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if reason.startswith(_REFUSED):
        return _lost(f"{reason}: {first_sentence(message)}")
    disruption = condition(pod, "DisruptionTarget")
    main = container_state(container(pod, names.MAIN), "terminated")
    if main is not None and main.get("reason") == "OOMKilled":
        return _out_of_memory(main)
    if disruption is not None:
        detail = f"{disruption.get('reason')}: {disruption.get('message', '')}"
        return _lost(detail[:MAX_DETAIL_CHARACTERS])
    if reason == "Evicted":
        return _lost(f"Evicted: {first_sentence(message)}")
    if reason == "DeadlineExceeded":
        return NodeEnd(None, None, "deadline-exceeded", first_sentence(message))
    if main is not None:
        return _ended(main)
    return _failed_before(pod, reason, message)


def _failed_before(pod: Json, reason: str, message: str) -> NodeEnd:
    """A pod that failed before its training ran."""
    for one in (pod.get("status") or {}).get("initContainerStatuses") or ():
        end = container_state(one, "terminated")
        if end is not None and end.get("exitCode"):
            detail = f"container {one['name']}: {end.get('reason')}, exit code {end.get('exitCode')}"
            said = str(end.get("message") or "").strip()
            return NodeEnd(int(end["exitCode"]), None, "setup-failed", joined(detail, said))
    return _lost(joined(reason, message) if reason or message else "the pod failed without a reason")


def _lost(detail: str) -> NodeEnd:
    return NodeEnd(None, None, "lost", detail)


def _out_of_memory(end: Json) -> NodeEnd:
    detail = "the container was over its memory limit (OOMKilled)"
    code = end.get("exitCode")
    number = int(signal.SIGKILL) if code == 128 + signal.SIGKILL else None
    return NodeEnd(code, number, "out-of-memory", detail)


def _ended(end: Json) -> NodeEnd:
    """The training's container ended by itself: the wrapper's report, else the exit code."""
    code = int(end.get("exitCode") or 0)
    if end.get("reason") == "StartError":
        detail = f"the image cannot start python3: {first_sentence(str(end.get('message') or ''))}"
        return NodeEnd(code, None, "setup-failed", detail)
    reason, detail = _said(end)
    number = code - 128 if 128 < code < 128 + 65 else None
    if reason is None:
        reason = "killed" if number is not None else reason_of(code)
    return NodeEnd(None if number is not None else code, number, reason, detail)


def _said(end: Json) -> tuple[str | None, str]:
    """``(reason, detail)`` of the launcher's termination message; it is untrusted, and checked."""
    text = str(end.get("message") or "")
    try:
        body = json.loads(text)
        reason, detail = body["reason"], str(body.get("detail") or "")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, text.strip().rpartition("\n")[2][:MAX_DETAIL_CHARACTERS]
    return (reason, detail[:MAX_DETAIL_CHARACTERS]) if reason in END_REASONS else (None, "")


# -- the whole attempt


def unmet(status: AttemptStatus) -> tuple[str, str] | None:
    """``(kind, detail)`` of what an attempt lacks, if none of its nodes started; None when any node ran."""
    if any(node.state not in ("pending", "starting") for node in status.nodes):
        return None
    found = (node for node in status.nodes if outcome_of(node.reason).recovery == "next-offer")
    return next(((node.reason, node.detail) for node in found), None)


def read_attempt(seen: Seen, nodes: int, *, first: int = 0) -> AttemptStatus:
    """State of the *nodes* nodes of one Job; the attempt numbers them from *first* on."""
    status = _read_job(seen, nodes)
    return (
        AttemptStatus(tuple(replace(one, node=first + one.node) for one in status.nodes)) if first else status
    )


def _read_job(seen: Seen, nodes: int) -> AttemptStatus:
    newest: dict[int, Json] = {}
    for pod in sorted(seen.pods, key=_age):
        index = index_of(pod)
        if index is not None:
            newest[index] = pod
    if seen.job is None:
        return AttemptStatus(tuple(_without_job(seen, node, newest.get(node)) for node in range(nodes)))
    return AttemptStatus(tuple(_node(seen, seen.job, node, newest.get(node)) for node in range(nodes)))


def _without_job(seen: Seen, node: int, pod: Json | None) -> NodeStatus:
    """Lost once its pod has ended: until then the pod may save, and no other attempt may run beside it."""
    gone = "its Job is gone from the cluster"
    if pod is None or is_pod_over(pod):
        return NodeStatus(node, "lost", reason="lost", detail=gone)
    return _silent_node(seen, node, pod) or NodeStatus(node, "running", detail=f"is being ended: {gone}")


def _age(pod: Json) -> tuple[bool, str, str]:
    metadata = pod["metadata"]
    is_going = bool(metadata.get("deletionTimestamp"))
    return (not is_going, str(metadata.get("creationTimestamp") or ""), metadata["name"])


def _node(seen: Seen, job: Json, node: int, pod: Json | None) -> NodeStatus:
    end = job_end(job)
    if pod is None:
        return _without_pod(seen, job, node, end)
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        ended = end_of(pod)
        if phase == "Succeeded" and ended.reason == "lost":
            ended = _SUCCEEDED
        is_replaced = end is None and condition(pod, "DisruptionTarget") is not None and phase == "Failed"
        if is_replaced and not condition(job, "FailureTarget"):
            return NodeStatus(node, "pending", detail=f"is recreated after {ended.detail}")
        return _told(job, node, ended)
    if end is not None:
        return _told(job, node, _by_job(job, node, end))
    return _unfinished(seen, job, node, pod)


def _unfinished(seen: Seen, job: Json, node: int, pod: Json) -> NodeStatus:
    silent = _silent_node(seen, node, pod)
    if silent is not None:
        return silent
    stuck = _stuck(seen, job, node, pod)
    if stuck is not None:
        return stuck
    main = container(pod, names.MAIN)
    if container_state(main, "running") is not None or container_state(main, "terminated") is not None:
        if is_held(pod, seen):
            return _told(job, node, end_of(pod))
        return NodeStatus(node, "running", detail=_held_by(pod) or _leaving(pod, job))
    kind, detail = waiting_for(pod, seen)
    if stop_asked(job) is not None:  # stopped already
        kind = _BEFORE.get(kind, kind)
    is_bound = bool((pod.get("spec") or {}).get("nodeName"))
    state: NodeState = "starting" if is_bound and not outcome_of(kind).never_starts else "pending"
    return NodeStatus(node, state, reason="" if kind == "starting" else kind, detail=detail)


def _silent_node(seen: Seen, node: int, pod: Json) -> NodeStatus | None:
    """The loss of an overdue pod whose machine does not answer; None for any other."""
    silence = silent_for(pod, seen)
    if silence is None or silence < LOST_AFTER_S or not is_silent(pod, seen):
        return None
    where = (pod.get("spec") or {}).get("nodeName")
    detail = f"node {where} does not answer; its pod is overdue by {silence:.0f} s"
    return NodeStatus(node, "lost", reason=SILENT, detail=detail)


def _stuck(seen: Seen, job: Json, node: int, pod: Json) -> NodeStatus | None:
    """A pod that its kubelet, which answers, cannot stop; None for any other."""
    silence = silent_for(pod, seen)
    if silence is None or silence < HELD_S:
        return None
    if container_state(container(pod, names.MAIN), "terminated") is not None:
        return _told(job, node, end_of(pod))
    if silence < STUCK_AFTER_S:
        return None
    where = (pod.get("spec") or {}).get("nodeName")
    return NodeStatus(node, "lost", reason="lost", detail=f"node {where} cannot end it since {silence:.0f} s")


def is_held(pod: Json, seen: Seen) -> bool:
    """True for a pod whose training ended a while ago, and that only containers of others keep running."""
    end = timestamp((container_state(container(pod, names.MAIN), "terminated") or {}).get("finishedAt"))
    if end is None or seen.server_time is None or not _held_by(pod):
        return False
    return seen.server_time - end >= HELD_S


def _held_by(pod: Json) -> str:
    """The container that keeps a pod running after its training, with no stop requested; "" for others.

    The kubelet ends a pod when all containers except its native sidecars have ended. A plain container that a
    webhook added, such as a proxy of a service mesh, never ends.
    """
    if container_state(container(pod, names.MAIN), "terminated") is None:
        return ""
    if pod["metadata"].get("deletionTimestamp") or condition(pod, "DisruptionTarget") is not None:
        return ""
    others = (pod.get("status") or {}).get("containerStatuses") or ()
    names_of = [one["name"] for one in others if container_state(one, "running") is not None]
    return f"its training has ended, but container {names_of[0]} still runs" if names_of else ""


def _leaving(pod: Json, job: Json) -> str:
    """Why a running pod is being stopped."""
    if stop_asked(job) is not None:
        return "is being stopped"
    disruption = condition(pod, "DisruptionTarget")
    return f"is being ended: {disruption.get('reason')}" if disruption is not None else ""


def silent_for(pod: Json, seen: Seen) -> float | None:
    """Seconds since a deleted pod should have ended; None when it is not overdue, or this is unknown."""
    due = timestamp(pod["metadata"].get("deletionTimestamp"))
    if due is None or seen.server_time is None:
        return None
    return seen.server_time - due if seen.server_time > due else None


def is_silent(pod: Json, seen: Seen) -> bool:
    """True unless the pod's node may be read and is ready."""
    node = seen.nodes.get(str((pod.get("spec") or {}).get("nodeName")), {})
    return condition(node, "Ready") is None


def lacks_pods(seen: Seen) -> bool:
    """True for a Job that may have pods and has fewer than it needs: only events may show why."""
    if seen.job is None or job_end(seen.job) is not None or (seen.job.get("spec") or {}).get("suspend"):
        return False
    return len({index_of(pod) for pod in seen.pods}) < int(seen.job["spec"].get("completions") or 1)


def _without_pod(seen: Seen, job: Json, node: int, end: Json | None) -> NodeStatus:
    status = job.get("status") or {}
    if node in indexes(status.get("completedIndexes")):
        return NodeStatus(node, "ended", exit_code=0, reason="succeeded")
    ending = end or condition(job, "FailureTarget")  # from then on the Job creates no pods
    if ending is not None:
        return _told(job, node, _by_job(job, node, ending))
    if node in indexes(status.get("failedIndexes")):
        return NodeStatus(node, "ended", reason="failed", detail="its pod failed and is gone")
    if (job.get("spec") or {}).get("suspend"):
        if stop_asked(job) is not None:
            return NodeStatus(node, "ended", reason="stopped", detail="stopped before it was admitted")
        queue = (job["metadata"].get("labels") or {}).get(names.QUEUE)
        if queue:
            return NodeStatus(node, "pending", reason="queue", detail=f"waits for its Kueue queue {queue}")
        return NodeStatus(node, "pending", detail="its Job is suspended")
    refused = refused_pod(seen)
    if refused is not None:
        kind = refused[0] if stop_asked(job) is None else _BEFORE.get(refused[0], refused[0])
        return NodeStatus(node, "pending", reason=kind, detail=refused[1])
    return NodeStatus(node, "pending", detail="its pod is being made")


def _by_job(job: Json, node: int, end: Json) -> NodeEnd:
    """The end of a node whose pod left no end, from the Job's."""
    if end["type"] == "Complete" or node in indexes((job.get("status") or {}).get("completedIndexes")):
        return _SUCCEEDED
    reason, message = str(end.get("reason") or ""), str(end.get("message") or "")
    if reason == "DeadlineExceeded":
        return _JOB_DEADLINE
    return NodeEnd(None, None, "killed", f"ended with its Job: {joined(reason, message)}")


def _told(job: Json, node: int, end: NodeEnd) -> NodeStatus:
    """The node's end; a deadline that this backend set to stop the Job is that stop."""
    asked = stop_asked(job)
    if end.reason == "lost":
        return end.of_node(node)
    ended = job_end(job) or condition(job, "FailureTarget") or {}
    if end.reason in ("killed", "stopped") and ended.get("reason") == "DeadlineExceeded":
        end = _JOB_DEADLINE
    if asked is not None and end.reason in ("deadline-exceeded", "killed", "stopped"):
        if asked.get("unmet"):
            kind = str(asked.get("unmet_kind"))
            known = kind if outcome_of(kind).recovery == "next-offer" else "capacity"
            return NodeEnd(None, None, known, str(asked["unmet"])).of_node(node)
        grace_s = float(asked.get("grace_s") or 0.0)
        reason = "stopped" if grace_s > 0 else "killed"
        end = replace(end, reason=reason, detail="it was asked to stop")
    return end.of_node(node)
