"""What the API server returns for one attempt, and how its objects are read. Pure."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envscaler_airflow.backends.kubernetes import names

Json = Mapping[str, Any]

MAX_DETAIL_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """What the API server returned for one attempt.

    Attributes:
        job: None when it was deleted, or when another one has its name.
        pods: Of this Job, any order.
        nodes: By name, if they may be read and were needed.
        events: Warnings about the Job or its pods, any order.
        server_time: Clock of the API server, seconds since the epoch; None without it.
        wait_for_node_s: Longest wait for a node, seconds.
        wait_for_image_s: Longest wait, once a node is there, for an image or anything else that a pod needs
            and its node lacks, seconds.
        made: Names of the pods that the Job created, by node, from its events; None if they were not read.
    """

    job: Json | None
    pods: tuple[Json, ...] = ()
    nodes: Mapping[str, Json] = field(default_factory=dict)
    events: tuple[Json, ...] = ()
    server_time: float | None = None
    wait_for_node_s: float = 0.0
    wait_for_image_s: float = math.inf
    made: Mapping[int, frozenset[str]] | None = None


def timestamp(text: str | None) -> float | None:
    """Seconds since the epoch of ``2026-11-29T17:27:27Z``; None without one."""
    return None if not text else dt.datetime.fromisoformat(text).timestamp()


def condition(body: Json, kind: str) -> Json | None:
    """The condition of that type when it is True; conditions have no order."""
    found = (body.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind and one["status"] == "True"), None)


def any_condition(body: Json, kind: str) -> Json | None:
    """The condition of that type with any status."""
    found = (body.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), None)


def index_of(pod: Json) -> int | None:
    """The pod's completion index; None when it does not belong to an Indexed Job."""
    metadata = pod["metadata"]
    for marks in (metadata.get("labels"), metadata.get("annotations")):
        text = (marks or {}).get(names.INDEX)
        if text is not None and text.isdigit():
            return int(text)
    return None


def job_end(job: Json) -> Json | None:
    """The condition that ended the Job for good, None while it runs."""
    return condition(job, "Complete") or condition(job, "Failed")


def is_pod_over(pod: Json) -> bool:
    """True once none of the pod's containers runs or will run."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def indexes(text: str | None) -> frozenset[int]:
    """Indexes of ``completedIndexes``: ``0-2,5``."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def stop_asked(job: Json) -> Json | None:
    """The value of the annotation :data:`names.STOP`; None without a request to stop."""
    text = (job["metadata"].get("annotations") or {}).get(names.STOP)
    try:
        body = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else None


def first_sentence(text: str) -> str:
    """The part of a scheduler's message that is the same in every version."""
    return text.split(". ", 1)[0].rstrip(".")[:MAX_DETAIL_CHARACTERS]


def container(pod: Json, name: str) -> Json | None:
    """Status of the pod's container *name*; None while it has none."""
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((one for one in found if one["name"] == name), None)


def container_state(one: Json | None, kind: str) -> Json | None:
    """The container's state *kind* (waiting, running, terminated); None when it is in another."""
    return ((one or {}).get("state") or {}).get(kind)


def joined(*parts: str) -> str:
    """The *parts* that are not empty, on one line."""
    return ": ".join(part for part in parts if part)[:MAX_DETAIL_CHARACTERS]


def since(at: str | None, seen: Seen) -> float | None:
    """Seconds since *at* by the API server's clock; None when either is unknown."""
    when = timestamp(at)
    return None if when is None or seen.server_time is None else seen.server_time - when


def is_about(event: Json, body: Json) -> bool:
    """True when *event* is about the object *body*."""
    involved = event.get("involvedObject") or event.get("regarding") or {}
    return bool(involved.get("uid") == body["metadata"].get("uid"))


def job_of(pod: Json) -> tuple[str, str]:
    """Namespace and Job of *pod*; "" means without a Job."""
    labels = pod["metadata"].get("labels") or {}
    return pod["metadata"].get("namespace", ""), labels.get(names.JOB_NAME, "")
