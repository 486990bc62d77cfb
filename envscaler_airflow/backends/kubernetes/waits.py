"""What a pod waits for, and which waits never end by themselves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from envscaler_airflow.backends.kubernetes.job_snapshot import (
    MAX_DETAIL_CHARACTERS,
    Json,
    Seen,
    any_condition,
    condition,
    container_state,
    first_sentence,
    is_about,
    joined,
    since,
    timestamp,
)

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
