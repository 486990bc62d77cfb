"""Read one Job of an attempt: through the shared view of its namespace, or by calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from envscaler_airflow.backends.base import AttemptStatus
from envscaler_airflow.backends.kubernetes import failures, names
from envscaler_airflow.backends.kubernetes.client import Cluster, ForbiddenError, Json, RefusedError
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.failures import is_waiting_silently
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import Seen, is_pod_over, job_end
from envscaler_airflow.backends.kubernetes.job_usage import needs_history
from envscaler_airflow.backends.kubernetes.shared_watch import View


def look_at(part: Part, cluster: Cluster, view: View | None, settings: Settings) -> Seen:
    """What the API server, or the *view* of the namespace, returns for that part.

    Raises:
        BackendError: No answer.
    """
    job, pods, server_time = view.attempt(part.name) if view is not None else (None, [], None)
    # A view may be older than the Job: nothing is deleted before the server reports it. One of its two
    # watches may be behind: a Job ends after its pods, so beside an ended Job no pod still runs or is still
    # to come.
    is_whole = len(pods) >= part.nodes and all(map(is_pod_over, pods))
    if job is None or (job_end(job) is not None and view is not None and not is_whole):
        job, pods, server_time = _fetch(cluster, part)
    if job is not None and job["metadata"]["uid"] != part.uid:
        job = None
    ours = tuple(pod for pod in pods if _is_owned(pod, part.uid))
    seen = Seen(
        job,
        ours,
        server_time=server_time,
        wait_for_node_s=settings.wait_for_node_s,
        wait_for_image_s=settings.wait_for_image_s,
    )
    return replace(seen, nodes=_silent_nodes(cluster, seen), events=_warnings(cluster, view, seen))


def steadily(view: View, parts: Sequence[Part], read: Callable[[], AttemptStatus]) -> AttemptStatus:
    """What *read* returns for the parts, or its previous result if that is still valid.

    Most reads of most stages find no change: all nodes run, and the Job and its pods are the same. To parse
    them each time would block every thread of a process with a thousand stages, and would make enough garbage
    for full collections. Only results that do not depend on the time are reused.

    Raises:
        BackendError: The view is too old, or no answer.
    """
    shown, name = tuple(view.shown(part.name) for part in parts), parts[0].name
    key = (tuple(parts), shown)
    before, result = view.results.get(name, (None, None))
    if before == key:
        found: AttemptStatus = result
        return found
    status = read()
    is_leaving = any(pod.is_leaving for _, pods in shown for pod in pods)
    if not is_leaving and all(node.state == "running" and not node.detail for node in status.nodes):
        view.results[name] = (key, status)
    return status


def _fetch(cluster: Cluster, part: Part) -> tuple[Json | None, list[Json], float | None]:
    found = cluster.find(names.jobs(part.namespace, part.name))
    query = {"labelSelector": f"{names.JOB_NAME}={part.name}"}
    pods = cluster.list(names.pods(part.namespace), query)  # pods of a deleted Job outlive it
    return (None if found is None else found.body), pods.body["items"], pods.server_time


def gone(cluster: Cluster, rendered: Json, beside: Json) -> Json:
    """A placeholder for a deleted Job *beside* another of its attempt: its nodes are lost.

    It has the Job's uid, so that pods of it that are still ending are recognized.

    Raises:
        BackendError: No answer.
    """
    metadata = rendered["metadata"]
    marks = {name: metadata["labels"][name] for name in (names.RUN, names.GENERATION, names.ATTEMPT)}
    marks |= {names.JOB_NAME: metadata["name"]}
    query = {"labelSelector": ",".join(f"{name}={value}" for name, value in marks.items())}
    pods = cluster.list(names.pods(metadata["namespace"]), query).body["items"]
    owners = [one["uid"] for pod in pods for one in pod["metadata"].get("ownerReferences") or ()]
    made = {
        "uid": owners[0] if owners else "gone",
        "creationTimestamp": beside["metadata"]["creationTimestamp"],
    }
    return {**rendered, "metadata": {**metadata, **made}}


def _is_owned(pod: Json, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or ())


def _silent_nodes(cluster: Cluster, seen: Seen) -> dict[str, Json]:
    """Nodes of overdue pods, if they may be read."""
    overdue = {
        str(pod["spec"]["nodeName"])
        for pod in seen.pods
        if (failures.silent_for(pod, seen) or 0) >= failures.LOST_AFTER_S and pod["spec"].get("nodeName")
    }
    nodes = {}
    for name in sorted(overdue):
        with suppress(RefusedError):
            nodes[name] = cluster.get(names.nodes(name)).body
    return nodes


def with_history(cluster: Cluster, part: Part, seen: Seen) -> Seen:
    """*seen* with all events of its Job where the bill depends on them; kept for an hour by default."""
    if seen.job is None or not needs_history(seen, part):
        return seen
    query = {"fieldSelector": f"involvedObject.uid={part.uid}"}
    try:
        events = cluster.list(names.events(part.namespace), query).body["items"]
    except ForbiddenError:
        return seen
    made: dict[int, frozenset[str]] = {}
    for event in events:
        name = str(event.get("message") or "").removeprefix("Created pod: ")
        index = name.removeprefix(f"{part.name}-").partition("-")[0]
        if event.get("reason") == "SuccessfulCreate" and index.isdigit():
            made[int(index)] = made.get(int(index), frozenset()) | {name}
    return replace(seen, events=(*seen.events, *events), made=made)


def _warnings(cluster: Cluster, view: View | None, seen: Seen) -> tuple[Json, ...]:
    """Warnings about pods that wait without a reason, and about a Job that lacks pods, if readable."""
    about = [pod for pod in seen.pods if is_waiting_silently(pod)]
    if seen.job is not None and failures.lacks_pods(seen):
        about.append(seen.job)
    found: list[Json] = []
    for body in about:
        metadata = body["metadata"]
        if view is not None:
            found += view.warnings(metadata["uid"])
            continue
        query = {"fieldSelector": f"involvedObject.uid={metadata['uid']},type=Warning"}
        with suppress(RefusedError):
            found += cluster.list(names.events(metadata["namespace"]), query).body["items"]
    return tuple(found)


_NO_LOG = (
    b'failed to try resolving symlinks in path "/var/log/pods/',
    b"unable to retrieve container logs for ",
)
"""The kubelet's message, with status 200, that a log no longer exists. Source: kubelet, kuberuntime_logs.go.
"""


def kept_output(
    cluster: Cluster, pods: Iterable[tuple[int, Json]], since: Mapping[int, int]
) -> Iterator[tuple[int, bytes]]:
    """The output of each ``(node, pod)`` that the kubelet keeps, from byte *since* on."""
    for node, pod in pods:
        path = names.pods(pod["metadata"]["namespace"], pod["metadata"]["name"], "log")
        lines: list[bytes] = []
        try:
            lines = list(cluster.stream(path, {"container": names.MAIN}))
        except RefusedError as err:
            if err.status not in (400, 404):  # not started, or deleted
                raise
        whole = b"".join(lines)
        text = b"" if whole.startswith(_NO_LOG) else whole[since.get(node, 0) :]
        if text:
            yield node, text
