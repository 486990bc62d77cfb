"""How nodes do and how they ended, told from Job, pods and nodes as the API server shows them. Pure.

The table of classes is ``docs/reference/failures.md``.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from envscaler_airflow.backends.base import AttemptStatus, NodeState, NodeStatus
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.protocol import (
    END_REASONS,
    EXIT_LEFT,
    EXIT_NOT_FOUND,
    EXIT_ORPHANED,
    EXIT_SETUP_FAILED,
    EXIT_STOPPED,
)

Json = Mapping[str, Any]
Recovery = Literal["next-attempt", "more-memory", "replaced", "fail", "wait", "next-offer", "stop"]

LOST_AFTER_S = 180.0
"""How long a pod may be overdue on a node that does not answer before it is given up, seconds.

Source: issue of the backend. By the API server's clock, which wrote the time of the deletion.
"""
HELD_S = 120.0
"""How long a pod may go on after its training although nobody ends it, seconds. Chosen: a node that shuts
down ends all containers of a pod within that, one after the other."""
MAIN = "main"
MAX_DETAIL_CHARACTERS = 500

_BY_EXIT_CODE = {
    0: "succeeded",
    EXIT_LEFT: "left",
    EXIT_ORPHANED: "orphaned",
    EXIT_STOPPED: "stopped",
    EXIT_SETUP_FAILED: "setup-failed",
    EXIT_NOT_FOUND: "not-found",
}
_REFUSED = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "Unexpected")
"""How the kubelet names a pod that it does not take. Source: recorded; a prefix of status.reason."""
_BAD_IMAGE = (
    "InvalidImageName",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "ImageInspectError",
)
_NEVER = ("InvalidImageName", "ErrImageNeverPull")
"""What no waiting heals, by the kubelet's reason."""
_NOT_THERE = re.compile(
    r"code = NotFound|: not found\b|manifest unknown|pull access denied|repository does not exist"
    r"|unauthorized|401 Unauthorized|403 Forbidden|no match for platform",
    re.IGNORECASE,
)
"""The same, by the runtime's words: the registry answered, and has no such image for us.

Source: recorded (containerd: gRPC NotFound); OCI distribution specification, error codes; containerd's
and Docker's messages. Anything else, such as a registry that does not answer, may heal.
"""
_REFUSED_PODS = (
    ("exceeded quota", "quota"),
    ("violates PodSecurity", "refused"),
    (" is invalid: ", "refused"),
    (" usage per Container is ", "refused"),
    (" usage per Pod is ", "refused"),
)
"""Why the API server takes no pod of a Job, by its own words; ``refused`` is what no waiting heals.

Source: recorded (quota); wording of the PodSecurity and LimitRanger admission plugins and of validation.
"""
_BAD_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True, slots=True)
class Failure:
    """One class of failure.

    Attributes:
        name: As it stands in the table.
        reason: What the node's status says: one of the protocol's, or ``deadline-exceeded``.
        recovery: What the owner does.
        detail: One line for people.
        exit_code, signal: Of the training's container, where there is one.
    """

    name: str
    reason: str
    recovery: Recovery
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None


_JOB_DEADLINE = Failure("Job deadline", "deadline-exceeded", "fail", "ran into the deadline of its Job")


@dataclass(frozen=True, slots=True)
class Seen:
    """What the API server showed of one attempt.

    Attributes:
        job: None when it is gone, or is another of the same name.
        pods: Of this Job, any order.
        nodes: By name, as far as they may be read and were needed.
        events: Warnings about the Job or its pods, any order.
        server_time: Clock of the API server, seconds since the epoch; None when it did not say.
        wait_for_node_s: Longest wait for a node, seconds.
        wait_for_image_s: Longest wait for an image once a node is there, seconds.
    """

    job: Json | None
    pods: tuple[Json, ...] = ()
    nodes: Mapping[str, Json] = field(default_factory=dict)
    events: tuple[Json, ...] = ()
    server_time: float | None = None
    wait_for_node_s: float = 0.0
    wait_for_image_s: float = math.inf


# -- reading objects


def timestamp(text: str | None) -> float | None:
    """Seconds since the epoch of ``2026-11-29T17:27:27Z``; None for none."""
    return None if not text else dt.datetime.fromisoformat(text).timestamp()


def condition(body: Json, kind: str) -> Json | None:
    """The condition of that type when it is True; they have no order."""
    found = (body.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind and one["status"] == "True"), None)


def _any_condition(body: Json, kind: str) -> Json | None:
    found = (body.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), None)


def index_of(pod: Json) -> int | None:
    """The pod's completion index; None when it is no pod of an Indexed Job."""
    metadata = pod["metadata"]
    for marks in (metadata.get("labels"), metadata.get("annotations")):
        text = (marks or {}).get(names.INDEX)
        if text is not None and text.isdigit():
            return int(text)
    return None


def job_end(job: Json) -> Json | None:
    """The condition that ended the Job for good, None while it runs."""
    return condition(job, "Complete") or condition(job, "Failed")


def indexes(text: str | None) -> frozenset[int]:
    """Indexes of ``completedIndexes``: ``0-2,5``."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def stop_asked(job: Json) -> Json | None:
    """What :data:`names.STOP` holds; None when nobody asked."""
    text = (job["metadata"].get("annotations") or {}).get(names.STOP)
    try:
        body = json.loads(text) if text else None
    except ValueError:
        return {}
    return body if isinstance(body, dict) else None


def first_sentence(text: str) -> str:
    """The part of a scheduler's message that does not change from version to version."""
    return text.split(". ", 1)[0].rstrip(".")[:MAX_DETAIL_CHARACTERS]


def _container(pod: Json, name: str, *, init: bool = False) -> Json | None:
    found = (pod.get("status") or {}).get("initContainerStatuses" if init else "containerStatuses") or ()
    return next((one for one in found if one["name"] == name), None)


def _state(container: Json | None, kind: str) -> Json | None:
    return ((container or {}).get("state") or {}).get(kind)


# -- the end of one pod


def failure_of(pod: Json) -> Failure:
    """Class of a pod that ended (phase Failed or Succeeded)."""
    status = pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if reason.startswith(_REFUSED):
        return Failure("refused by the node", "lost", "next-attempt", f"{reason}: {first_sentence(message)}")
    disruption = condition(pod, "DisruptionTarget")
    main = _state(_container(pod, MAIN), "terminated")
    if main is not None and main.get("reason") == "OOMKilled":
        return _out_of_memory(main)
    if disruption is not None:
        detail = f"{disruption.get('reason')}: {disruption.get('message', '')}"
        return Failure("disruption", "lost", "next-attempt", detail[:MAX_DETAIL_CHARACTERS])
    if reason == "Evicted":
        return Failure("evicted", "lost", "next-attempt", f"Evicted: {first_sentence(message)}")
    if reason == "DeadlineExceeded":
        return Failure("pod deadline", "deadline-exceeded", "fail", first_sentence(message))
    if main is not None:
        return _ended(main)
    return _failed_before(pod, reason, message)


def _failed_before(pod: Json, reason: str, message: str) -> Failure:
    """A pod that failed although its training never ran."""
    for container in (pod.get("status") or {}).get("initContainerStatuses") or ():
        end = _state(container, "terminated")
        if end is not None and end.get("exitCode"):
            detail = f"container {container['name']}: {end.get('reason')}, exit code {end.get('exitCode')}"
            said = str(end.get("message") or "").strip()
            return Failure(
                "set-up", "setup-failed", "fail", _joined(detail, said), exit_code=int(end["exitCode"])
            )
    if reason or message:
        return Failure("node", "lost", "next-attempt", _joined(reason, message))
    return Failure("node", "lost", "next-attempt", "the pod failed and nobody said why")


def _out_of_memory(end: Json) -> Failure:
    detail = "the container was over its memory limit (OOMKilled)"
    code = end.get("exitCode")
    number = int(signal.SIGKILL) if code == 128 + signal.SIGKILL else None
    return Failure("out of memory", "out-of-memory", "more-memory", detail, code, number)


def _ended(end: Json) -> Failure:
    """The training's container ended by itself: what the wrapper says of it, else by its exit code."""
    code = int(end.get("exitCode") or 0)
    if end.get("reason") == "StartError":
        detail = f"the image cannot start python3: {first_sentence(str(end.get('message') or ''))}"
        return Failure("start", "setup-failed", "fail", detail, code)
    reason, detail = _said(end)
    number = code - 128 if 128 < code < 128 + 65 else None
    if reason is None:
        reason = "killed" if number is not None else _BY_EXIT_CODE.get(code, "failed")
    recovery: Recovery = {"succeeded": "stop", "left": "stop", "stopped": "stop"}.get(  # type: ignore[assignment]  # a table of literals
        reason, "next-attempt" if reason in ("killed", "orphaned") else "fail"
    )
    name = {"cuda-out-of-memory": "CUDA out of memory", "out-of-memory": "out of memory"}.get(reason, reason)
    return Failure(name, reason, recovery, detail, None if number is not None else code, number)


def _said(end: Json) -> tuple[str | None, str]:
    """``(reason, detail)`` of the termination message that the launcher leaves; it is data, and checked."""
    text = str(end.get("message") or "")
    try:
        body = json.loads(text)
        reason, detail = body["reason"], str(body.get("detail") or "")
    except (ValueError, TypeError, KeyError):
        return None, text.strip().rpartition("\n")[2][:MAX_DETAIL_CHARACTERS]
    return (reason, detail[:MAX_DETAIL_CHARACTERS]) if reason in END_REASONS else (None, "")


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)[:MAX_DETAIL_CHARACTERS]


# -- what a pod waits for


def waiting_for(pod: Json, seen: Seen) -> tuple[str, str]:
    """``(kind, detail)`` of a pod that does not run yet.

    Kinds: ``scheduling``, ``capacity`` (no node within the time given), ``gated``, ``pulling``, ``image``
    (it can never be had, or did not come within the time given), ``config``, ``volume``, ``starting``.
    """
    scheduled = _any_condition(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        if scheduled.get("reason") == "SchedulingGated":
            return "gated", "waits for its scheduling gates"
        waited = _since(scheduled, seen)
        is_over = not seen.wait_for_node_s or (waited is not None and waited >= seen.wait_for_node_s)
        message = first_sentence(str(scheduled.get("message") or "Unschedulable"))
        return ("capacity" if is_over else "scheduling"), message
    if scheduled is None and not (pod.get("spec") or {}).get("nodeName"):
        return "scheduling", "waits for the scheduler"
    for container in _waiting_containers(pod):
        state = _state(container, "waiting") or {}
        reason, message = str(state.get("reason") or ""), str(state.get("message") or "")
        if reason in _BAD_IMAGE:
            if reason == "ImagePullBackOff":  # alternates with the other: one wait is shown once
                reason, message = "ErrImagePull", message.rpartition("ErrImagePull: ")[2]
            detail = _joined(f"{reason} of {container.get('image', '')}", message)
            if _is_hopeless(reason, message):
                return "image", detail
            return _late_image(detail, pod, seen)
        if reason in _BAD_CONFIG:
            return "config", _joined(reason, message)
    mounts = [one for one in seen.events if one.get("reason") == "FailedMount" and _is_about(one, pod)]
    if mounts:
        return "volume", first_sentence(str(mounts[-1].get("message") or "FailedMount"))
    return "starting", ""


def _since(condition: Json, seen: Seen) -> float | None:
    """Seconds since it became what it is, by the API server's clock; None when nobody can tell."""
    at = timestamp(condition.get("lastTransitionTime"))
    return None if at is None or seen.server_time is None else seen.server_time - at


def _is_hopeless(reason: str, message: str) -> bool:
    """True for an image that can never be had."""
    return reason in _NEVER or _NOT_THERE.search(message) is not None


def _late_image(detail: str, pod: Json, seen: Seen) -> tuple[str, str]:
    """An image that may still come: until it has not for its time, since its pod has a node."""
    bound = condition(pod, "PodScheduled")
    waited = None if bound is None else _since(bound, seen)
    if waited is None or waited < seen.wait_for_image_s:
        return "pulling", detail
    return "image", _joined(f"not within {seen.wait_for_image_s:g} s", detail)


def _waiting_containers(pod: Json) -> Iterable[Json]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _is_about(event: Json, body: Json) -> bool:
    involved = event.get("involvedObject") or event.get("regarding") or {}
    return bool(involved.get("uid") == body["metadata"].get("uid"))


# -- the whole attempt


def unmet(status: AttemptStatus) -> str | None:
    """Why an attempt that never began could not be had; None when any node of it ran."""
    if any(node.state not in ("pending", "starting") for node in status.nodes):
        return None
    return next((node.detail for node in status.nodes if node.reason == "capacity"), None)


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
    """Lost once its pod has ended: until then that may save, and no other attempt is to run beside it."""
    gone = "its Job is gone from the cluster"
    if pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
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
        failure = failure_of(pod)
        if phase == "Succeeded" and failure.reason == "lost":
            failure = Failure("succeeded", "succeeded", "stop", exit_code=0)
        is_replaced = end is None and condition(pod, "DisruptionTarget") is not None and phase == "Failed"
        if is_replaced and not condition(job, "FailureTarget"):
            return NodeStatus(node, "pending", detail=f"is made again after {failure.detail}")
        return _told(job, node, failure)
    if end is not None:
        return _told(job, node, _by_job(job, node, end))
    return _unfinished(seen, job, node, pod)


def _unfinished(seen: Seen, job: Json, node: int, pod: Json) -> NodeStatus:
    silent = _silent_node(seen, node, pod)
    if silent is not None:
        return silent
    main = _container(pod, MAIN)
    if _state(main, "running") is not None or _state(main, "terminated") is not None:
        if is_held(pod, seen):
            return _told(job, node, failure_of(pod))
        return NodeStatus(node, "running", detail=_held_by(pod) or _leaving(pod, job))
    kind, detail = waiting_for(pod, seen)
    if stop_asked(job) is not None:  # given up already
        kind = {"capacity": "scheduling", "image": "pulling"}.get(kind, kind)
    state: NodeState = "pending" if kind in ("scheduling", "capacity", "gated", "image") else "starting"
    return NodeStatus(node, state, reason="" if kind == "starting" else kind, detail=detail)


def _silent_node(seen: Seen, node: int, pod: Json) -> NodeStatus | None:
    """The loss of a pod that is overdue where its machine does not answer; None for any other."""
    silence = silent_for(pod, seen)
    if silence is None or silence < LOST_AFTER_S or not is_silent(pod, seen):
        return None
    where = (pod.get("spec") or {}).get("nodeName")
    detail = f"node {where} does not answer; its pod is overdue by {silence:.0f} s"
    return NodeStatus(node, "lost", reason="lost", detail=detail)


def is_held(pod: Json, seen: Seen) -> bool:
    """True for a pod whose training has ended a while ago, and that only containers of others keep."""
    end = timestamp((_state(_container(pod, MAIN), "terminated") or {}).get("finishedAt"))
    if end is None or seen.server_time is None or not _held_by(pod):
        return False
    return seen.server_time - end >= HELD_S


def _held_by(pod: Json) -> str:
    """Which container keeps a pod whose training has ended, and that nobody ends; "" for any other.

    The kubelet ends a pod when all but its native sidecars have ended: one that somebody's webhook added as a
    plain container, such as a proxy of a service mesh, never does.
    """
    if _state(_container(pod, MAIN), "terminated") is None:
        return ""
    if pod["metadata"].get("deletionTimestamp") or condition(pod, "DisruptionTarget") is not None:
        return ""
    others = (pod.get("status") or {}).get("containerStatuses") or ()
    names_of = [one["name"] for one in others if _state(one, "running") is not None]
    return f"its training has ended, but container {names_of[0]} still runs" if names_of else ""


def _leaving(pod: Json, job: Json) -> str:
    """Why a pod that runs is being ended."""
    if stop_asked(job) is not None:
        return "is being stopped"
    disruption = condition(pod, "DisruptionTarget")
    return f"is being ended: {disruption.get('reason')}" if disruption is not None else ""


def silent_for(pod: Json, seen: Seen) -> float | None:
    """Seconds that a pod is overdue although it was deleted; None when it is not, or nobody can tell."""
    due = timestamp(pod["metadata"].get("deletionTimestamp"))
    if due is None or seen.server_time is None:
        return None
    return seen.server_time - due if seen.server_time > due else None


def is_silent(pod: Json, seen: Seen) -> bool:
    """True unless the pod's node may be read and says that it is ready."""
    node = seen.nodes.get(str((pod.get("spec") or {}).get("nodeName")), {})
    return condition(node, "Ready") is None


def is_waiting_silently(pod: Json) -> bool:
    """True for a pod that is bound to a node and does not say what it waits for: only events may tell."""
    if (pod.get("status") or {}).get("phase") != "Pending" or not (pod.get("spec") or {}).get("nodeName"):
        return False
    reasons = {str((_state(one, "waiting") or {}).get("reason") or "") for one in _waiting_containers(pod)}
    return not reasons & {*_BAD_IMAGE, *_BAD_CONFIG}


def lacks_pods(seen: Seen) -> bool:
    """True for a Job that may have pods and has fewer than it wants: only events may tell why."""
    if seen.job is None or job_end(seen.job) is not None or (seen.job.get("spec") or {}).get("suspend"):
        return False
    return len({index_of(pod) for pod in seen.pods}) < int(seen.job["spec"].get("completions") or 1)


def _without_pod(seen: Seen, job: Json, node: int, end: Json | None) -> NodeStatus:
    status = job.get("status") or {}
    if node in indexes(status.get("completedIndexes")):
        return NodeStatus(node, "ended", exit_code=0, reason="succeeded")
    ending = end or condition(job, "FailureTarget")  # from then on no pod is made any more
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
    refused = [one for one in seen.events if one.get("reason") == "FailedCreate"]
    if refused:
        message = str(refused[-1].get("message") or "")
        kind = next((kind for words, kind in _REFUSED_PODS if words in message), "config")
        return NodeStatus(node, "pending", reason=kind, detail=message[:MAX_DETAIL_CHARACTERS])
    return NodeStatus(node, "pending", detail="its pod is being made")


def _by_job(job: Json, node: int, end: Json) -> Failure:
    """The end of a node whose pod left no end of its own, by the Job's."""
    if end["type"] == "Complete" or node in indexes((job.get("status") or {}).get("completedIndexes")):
        return Failure("succeeded", "succeeded", "stop", exit_code=0)
    reason, message = str(end.get("reason") or ""), str(end.get("message") or "")
    if reason == "DeadlineExceeded":
        return _JOB_DEADLINE
    return Failure("echo", "killed", "next-attempt", f"ended with its Job: {_joined(reason, message)}")


def _told(job: Json, node: int, failure: Failure) -> NodeStatus:
    """The node's end; a deadline of ours that carried a stop is that stop."""
    asked = stop_asked(job)
    if failure.reason == "lost":
        return NodeStatus(node, "lost", reason="lost", detail=failure.detail)
    ended = job_end(job) or condition(job, "FailureTarget") or {}
    if failure.reason in ("killed", "stopped") and ended.get("reason") == "DeadlineExceeded":
        failure = _JOB_DEADLINE
    if asked is not None and failure.reason in ("deadline-exceeded", "killed", "stopped"):
        if asked.get("unmet"):
            return NodeStatus(node, "ended", reason="capacity", detail=str(asked["unmet"]))
        grace_s = float(asked.get("grace_s") or 0.0)
        reason = "stopped" if grace_s > 0 else "killed"
        return NodeStatus(node, "ended", failure.exit_code, failure.signal, reason, "it was asked to stop")
    return NodeStatus(node, "ended", failure.exit_code, failure.signal, failure.reason, failure.detail)
