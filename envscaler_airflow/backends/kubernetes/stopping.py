"""Stop the Jobs of an attempt, and release their resources once it is over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Cluster, Json, RefusedError
from envscaler_airflow.backends.kubernetes.failures import read_attempt, unmet
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    Seen,
    condition,
    index_of,
    indexes,
    job_end,
    stop_asked,
)
from envscaler_airflow.backends.kubernetes.job_usage import unheld
from envscaler_airflow.backends.kubernetes.mounts import holds_s
from envscaler_airflow.backends.kubernetes.settings import Settings

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
        is_over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if is_over or (job is not None and not pod["spec"].get("nodeName")):
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
