"""Names that Kubernetes accepts, from the names of a run. Pure."""

from __future__ import annotations

import hashlib
import re

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.envspec.models import Volume

MAX_JOB_CHARACTERS = 52
"""Longest name of a Job. Chosen: a pod's host name is ``JOB-INDEX`` and must fit in a label of 63."""
MAX_LABEL_CHARACTERS = 63
"""Longest DNS label and label value. Source: RFC 1123; Kubernetes, labels and selectors."""

MAIN = "main"
"""Container of the stage in each of its pods."""
RUN = "envscaler.io/run"
"""Label: hash of store and run."""
GENERATION = "envscaler.io/generation"
ATTEMPT = "envscaler.io/attempt"
NODES = "envscaler.io/nodes"
FIRST_NODE = "envscaler.io/first-node"
"""Label of a Job that is part of a mixed attempt: number of its first node."""
MAX_NODES = "envscaler.io/max-nodes"
"""Label of a Job that may be rescaled in place: the most nodes that it may have."""
INITIAL_NODES = "envscaler.io/initial-nodes"
"""Label of the same Job: number of nodes at its start."""
RELEASED = "envscaler.io/released"
"""Label: the attempt was released; its Job stays for a while so that no late repeat restarts it."""
PREFIX = "envscaler.io/run-prefix"
"""Annotation: the run's folder in the store."""
STORE = "envscaler.io/store"
"""Annotation: URL of the run store."""
STAGE = "envscaler.io/stage"
"""Annotation: ``dag_id.task_id`` as the user wrote it."""
STOP = "envscaler.io/stop"
"""Annotation: JSON of the request, once an attempt was asked to stop."""
DELETES_CLAIMS = "envscaler.io/deletes-claims"
"""Annotation: ``true`` on a Job with a claim that is deleted with the run."""
READY = "envscaler.io/ready"
"""Annotation: ``true`` once everything that the pods need was created."""
DELAYED_PODS = "envscaler.io/delayed-pods"
"""Annotation: ``true`` on a Job that began without pods because a quota refused them."""
REMOVABLE = "envscaler.io/removable"
"""Annotation that any user may set on a pod: its node of the stage is removed first."""
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "envscaler"
OURS = f"{MANAGED_BY}={MANAGER},{RUN}"
"""Selects every object of attempts."""
INDEX = "batch.kubernetes.io/job-completion-index"
INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of the pods of a Job with ``backoffLimitPerIndex``: previous failures of the index."""
INDEX_IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"
"""The same for ignored failures; absent: none. Source: Kubernetes, batch/v1 types."""
JOB_NAME = "batch.kubernetes.io/job-name"
QUEUE = "kueue.x-k8s.io/queue-name"


def run_hash(store_url: str, run_prefix: str) -> str:
    """16 hex digits that identify store and run."""
    return hashlib.sha256(f"{store_url}\0{run_prefix}".encode()).hexdigest()[:16]


def attempt_name(request: AttemptRequest) -> str:
    """A DNS label of at most 52 characters: readable label, hash of store and run, generation, attempt."""
    tail = f"-{run_hash(request.store_url, request.run_prefix)[:10]}-g{request.generation}-a{request.attempt}"
    head = _plain(request.run_label)[: MAX_JOB_CHARACTERS - len(tail)].strip("-")
    return (head or "run") + tail


def part_name(attempt: str, part: int) -> str:
    """Name of the Job of that part; at most 3 characters more, which still leaves room for a pod's index."""
    return f"{attempt}-p{part}" if part else attempt


def claim_name(volume: Volume, run: str) -> str:
    """Claim of a ``pvc://`` volume; one that is deleted with its run contains its hash *run*."""
    return dns_label(f"{volume.location}-{run[:10]}") if volume.retain == "run" else volume.location


def dns_label(text: str) -> str:
    """*text* as a DNS label; one that had to be changed contains a hash of the whole."""
    plain = _plain(text)
    if plain and plain == text and len(plain) <= MAX_LABEL_CHARACTERS:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    head = plain[: MAX_LABEL_CHARACTERS - 9].strip("-")
    return f"{head}-{digest}" if head else f"x{digest}"


def label_value(text: str) -> str:
    """*text* as the value of a label; one that had to be changed contains a hash of the whole."""
    if len(text) <= MAX_LABEL_CHARACTERS and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    head = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[: MAX_LABEL_CHARACTERS - 9].strip("._-")
    return f"{head}-{digest}" if head else digest


def labels_of(request: AttemptRequest) -> dict[str, str]:
    """Labels of every object of one attempt."""
    return {
        MANAGED_BY: MANAGER,
        "app.kubernetes.io/name": label_value(request.run_label),
        RUN: run_hash(request.store_url, request.run_prefix),
        GENERATION: str(request.generation),
        ATTEMPT: str(request.attempt),
    }


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def jobs(namespace: str, name: str = "") -> str:
    """Jobs of a namespace, or one of them."""
    return _join(f"/apis/batch/v1/namespaces/{namespace}/jobs", name)


def pods(namespace: str, name: str = "", part: str = "") -> str:
    """Pods of a namespace, one of them, or its ``status``, ``resize``, ``eviction``, ``exec``."""
    return _join(f"/api/v1/namespaces/{namespace}/pods", name, part)


def all_pods() -> str:
    """Pods of all namespaces."""
    return "/api/v1/pods"


def config_maps(namespace: str) -> str:
    """ConfigMaps of a namespace."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


def secrets(namespace: str, name: str = "") -> str:
    """Secrets of a namespace, or one of them."""
    return _join(f"/api/v1/namespaces/{namespace}/secrets", name)


def claims(namespace: str, name: str = "") -> str:
    """Persistent volume claims of a namespace, or one of them."""
    return _join(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", name)


def drivers(name: str = "") -> str:
    """CSI drivers of the cluster, or one of them."""
    return _join("/apis/storage.k8s.io/v1/csidrivers", name)


def events(namespace: str) -> str:
    """Events of a namespace."""
    return f"/api/v1/namespaces/{namespace}/events"


def nodes(name: str = "") -> str:
    """Nodes of the cluster, or one of them."""
    return _join("/api/v1/nodes", name)


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
