"""The Jobs of an attempt: one, or one for each offer of a mixed allocation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest, Leftover
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import Answer, Json
from envscaler_airflow.backends.kubernetes.job_snapshot import job_end, stop_asked, timestamp
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import Handle

log = logging.getLogger(__name__)


BACKEND = "kubernetes"


@dataclass(frozen=True, slots=True)
class Part:
    """One Job of an attempt.

    Attributes:
        namespace, name, uid: The Job.
        nodes: How many nodes it has.
        first: Number of its first node in the attempt.
        created: When, by the API server.
    """

    namespace: str
    name: str
    uid: str
    nodes: int
    first: int = 0
    created: str = ""

    @classmethod
    def of(cls, job: Json) -> Part:
        """The part for *job*, as the API server returns it."""
        metadata = job["metadata"]
        labels = metadata.get("labels") or {}
        nodes = int(labels.get(names.NODES) or job["spec"]["completions"])
        first = int(labels.get(names.FIRST_NODE) or 0)
        return cls(
            metadata["namespace"],
            metadata["name"],
            metadata["uid"],
            nodes,
            first,
            metadata["creationTimestamp"],
        )


def handle_of(jobs: Sequence[Json]) -> Handle:
    """The handle of the attempt that consists of *jobs*, in the order of their nodes."""
    parts = [Part.of(job) for job in jobs]
    details: Json = {
        "namespace": parts[0].namespace,
        "uid": parts[0].uid,
        "created": parts[0].created,
        "nodes": sum(part.nodes for part in parts),
    }
    if len(parts) > 1:
        fields = ("name", "uid", "nodes", "first", "created")
        details["parts"] = [{field: getattr(part, field) for field in fields} for part in parts]
    return Handle(BACKEND, parts[0].name, details)


def marks_of(request: AttemptRequest, namespace: str) -> list[Json]:
    """Name, namespace and labels of each Job of the attempt; needs neither command nor secrets."""
    name, labels = names.attempt_name(request), names.labels_of(request)
    return [
        {
            "metadata": {
                "name": names.part_name(name, index),
                "namespace": namespace,
                "labels": {**labels, names.NODES: str(part.nodes), names.FIRST_NODE: str(part.first_rank)},
            }
        }
        for index, part in enumerate(request.allocation.parts)
    ]


def parts_of(handle: Handle, namespace: str) -> tuple[Part, ...]:
    """Its Jobs; *namespace* is used for a handle without one.

    Raises:
        BackendError: It names no Job.
    """
    details = handle.details
    where = str(details.get("namespace") or namespace)
    told = details.get("parts") or [{**details, "name": handle.name}]
    try:
        found = tuple(_part(where, one) for one in told)
    except (KeyError, TypeError, ValueError) as err:
        raise BackendError(f"{handle.name}: this handle names no Job of a cluster ({err!r})") from err
    if not all(part.uid for part in found):
        raise BackendError(f"{handle.name}: this handle names no Job of a cluster")
    return found


def _part(namespace: str, told: Mapping[str, Any]) -> Part:
    nodes, first = int(told.get("nodes") or 1), int(told.get("first") or 0)
    return Part(namespace, str(told["name"]), str(told["uid"]), nodes, first, str(told.get("created") or ""))


def attempts_of(jobs: Iterable[Json]) -> list[list[Json]]:
    """*jobs* by attempt, those of one attempt in the order of their nodes."""
    ordered = sorted(jobs, key=lambda job: (_attempt(job), Part.of(job).first))
    return [list(group) for _, group in groupby(ordered, key=_attempt)]


def _attempt(job: Json) -> tuple[str, ...]:
    labels = job["metadata"].get("labels") or {}
    return tuple(str(labels.get(name)) for name in (names.RUN, names.GENERATION, names.ATTEMPT))


def is_of(job: Json, request: AttemptRequest) -> bool:
    """True when *job* is of the attempt that *request* starts."""
    labels = job["metadata"].get("labels") or {}
    expected = names.labels_of(request)
    return all(
        labels.get(key) == expected[key]
        for key in (names.MANAGED_BY, names.RUN, names.GENERATION, names.ATTEMPT)
    )


def is_started(job: Json) -> bool:
    """True when its pods may be created: it is not suspended, or its queue decides."""
    return (job["metadata"].get("annotations") or {}).get(names.READY) == "true"


def may_start(job: Json) -> bool:
    """True for a Job whose start was interrupted, or that was just created."""
    return not is_started(job) and job_end(job) is None and stop_asked(job) is None


def is_released(job: Json) -> bool:
    """True when its attempt was released; the Job stays for a while as a tombstone."""
    return (job["metadata"].get("labels") or {}).get(names.RELEASED) == "true"


def leftovers_of(answer: Answer, store_url: str) -> Iterator[Leftover]:
    """Each Job of *answer* that is of a run of that store, and not released.

    Jobs of other stores are skipped: their runs cannot be read here. So is a Job whose labels were changed
    by hand, with a line in the log: the others are still found.

    Raises:
        BackendError: The API server does not report the time.
    """
    if answer.server_time is None:
        raise BackendError("the API server does not tell the time: ages cannot be known")
    for job in answer.body["items"]:
        annotations = job["metadata"].get("annotations") or {}
        if annotations.get(names.STORE) != store_url or is_released(job):
            continue
        try:
            yield _leftover(job, now=answer.server_time)
        except (KeyError, ValueError) as err:
            log.warning("job=%s left alone, its labels were changed: %r", job["metadata"]["name"], err)


def _leftover(job: Json, *, now: float) -> Leftover:
    metadata = job["metadata"]
    labels, born = metadata.get("labels") or {}, timestamp(metadata["creationTimestamp"])
    if born is None:
        raise ValueError("it has no creationTimestamp")
    return Leftover(
        handle_of([job]),
        prefix=metadata["annotations"][names.PREFIX],
        generation=int(labels[names.GENERATION]),
        attempt=int(labels[names.ATTEMPT]),
        age_s=now - born,
        runs=job_end(job) is None,
    )
