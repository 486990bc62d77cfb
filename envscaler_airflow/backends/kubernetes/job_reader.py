"""Read the Jobs of attempts: by one list and watch per cluster and namespace for all runs, or by calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from envscaler_airflow.backends.base import AttemptStatus
from envscaler_airflow.backends.kubernetes import failures, names
from envscaler_airflow.backends.kubernetes.client import Cluster, ForbiddenError, Json, RefusedError
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.failures import is_waiting_silently
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import Seen, is_pod_over, job_end
from envscaler_airflow.backends.kubernetes.job_usage import needs_history
from envscaler_airflow.backoff import wait_s
from envscaler_airflow.errors import BackendError

WATCH_S = 300
"""Length of one watch, seconds. Chosen: the API server's limit is 30 to 60 min; proxies cut earlier."""
QUIET_S = 60.0
"""Longest silence of a watch, seconds, until it counts as lost. Chosen: bookmarks come once a minute; the
next list has what was missed.
"""
STALE_S = 120.0
"""Age, in seconds, from which a view that could not be renewed returns nothing. Chosen: the state is then
unknown, which never means dead.
"""
FIRST_LOOK_S = 30.0
"""Longest wait for the first list. Chosen: as for any answer."""
IDLE_S = 900.0
"""How long a view without readers keeps running, seconds. Chosen: longer than a trigger's pause."""
PAGE = 20
"""Objects in one answer of a list. Chosen: parsing JSON blocks all threads of a process, including an event
loop's; a pod takes about 0.1 ms, and many objects at once trigger a full garbage collection
(benchmarks/triggerer.py).
"""
WARNINGS_S = 30.0
"""Age from which the warnings of a namespace are listed again, seconds, once for all readers. Chosen: a
missing quota or volume is shown within half a minute, with at most two calls a minute.
"""
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 30.0
"""Waits after errors in a row, seconds. Chosen: they do not overload an API server that recovers."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One object as bytes: a thousand pods are a thousand objects to the garbage collector, not a million.

    A newer version is another instance, which is equal only to itself.
    """

    name: str
    job: str
    is_leaving: bool
    text: bytes

    @classmethod
    def of(cls, body: Json) -> Kept:
        """Keep the parts of *body* that any reader uses: only a few fields of a pod's spec."""
        metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        spec = body.get("spec") or {}
        if "containers" in spec:
            containers = [
                {name: one.get(name) for name in ("name", "resources")} for one in spec["containers"]
            ]
            spec = {"nodeName": spec.get("nodeName"), "containers": containers}
        elif "template" in spec:
            spec = {key: value for key, value in spec.items() if key != "template"}
        slim = {"metadata": metadata, "spec": spec, "status": body.get("status") or {}}
        is_leaving = bool(metadata.get("deletionTimestamp"))
        text = json.dumps(slim, separators=(",", ":")).encode()
        return cls(metadata["name"], _job_name(body), is_leaving, text)

    def body(self) -> Json:
        """The object, parsed again for each reader."""
        found: Json = json.loads(self.text)
        return found


@dataclass(slots=True)
class Table:
    """Objects of one kind, from list and watch.

    Attributes:
        path: Path of the kind in the namespace.
        version: Resource version to continue from; None before the first list.
        items: By name.
        by_job: Pods by the name of their Job, then by their own.
    """

    path: str
    version: str | None = None
    items: dict[str, Kept] = field(default_factory=dict)
    by_job: dict[str, dict[str, Kept]] = field(default_factory=dict)

    def fill(self, body: Json) -> None:
        """Replace all items by those of a list."""
        self.items, self.by_job = {}, {}
        for item in body.get("items") or ():
            self._put(item)
        self.version = str(body["metadata"]["resourceVersion"])

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply one event of the watch.

        Raises:
            ExpiredError: The version is too old: list again.
        """
        kind, body = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise ExpiredError(f"{self.path}: {body.get('code')} {body.get('reason')}: {body.get('message')}")
        metadata = body.get("metadata") or {}
        if metadata.get("resourceVersion"):
            self.version = str(metadata["resourceVersion"])
        if kind in ("ADDED", "MODIFIED"):
            self._put(Kept.of(body))
        elif kind == "DELETED":
            self.items.pop(metadata.get("name", ""), None)
            self.by_job.get(_job_name(body), {}).pop(metadata.get("name", ""), None)

    def _put(self, kept: Kept) -> None:
        self.items[kept.name] = kept
        self.by_job.setdefault(kept.job, {})[kept.name] = kept


class ExpiredError(BackendError):
    """The resource version of a watch is too old."""

    def __init__(self, message: str) -> None:
        """Create it with the server's message; a new list returns a current version."""
        super().__init__(message, status=410, transient=True)


class View:
    """Jobs and pods of one namespace, kept by two threads.

    Reading blocks only for the first list. The result is never older than :data:`STALE_S`.

    Attributes:
        results: Results for a Job and the objects beside it, by its name; see :func:`.job_reader.steadily`.
        lists, watches: How many were started.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin empty; :meth:`start` starts the threads."""
        self._cluster = cluster
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tables = {"jobs": Table(names.jobs(namespace)), "pods": Table(names.pods(namespace))}
        self._heard: dict[str, float] = {}
        self._filled = {name: threading.Event() for name in self._tables}
        self._ending = threading.Event()
        self._problem = ""
        self._looked = monotonic()
        self._server: tuple[float, float] | None = None
        self._threads: list[threading.Thread] = []
        self._namespace = namespace
        self._listing = threading.Lock()
        self._warnings: dict[str, list[Json]] = {}
        self._warned_at: float | None = None
        self.results: dict[str, tuple[Any, Any]] = {}
        self.lists = 0
        self.watches = 0

    def start(self) -> None:
        """Start to list and watch."""
        for name in self._tables:
            thread = threading.Thread(
                target=self._keep, args=(name,), name=f"envscaler-watch-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads as soon as they wake."""
        self._ending.set()

    @property
    def is_closed(self) -> bool:
        """True when it is not updated any more."""
        return self._ending.is_set()

    def attempt(self, name: str) -> tuple[Json | None, list[Json], float | None]:
        """``(job, pods, server's time)`` of the Job *name*.

        Raises:
            BackendError: The view is empty or too old.
        """
        job, pods = self.shown(name)
        with self._lock:
            server_time = self._server_time()
        return (None if job is None else job.body()), [pod.body() for pod in pods], server_time

    def shown(self, name: str) -> tuple[Kept | None, tuple[Kept, ...]]:
        """The Job *name* and its pods, unparsed.

        Raises:
            BackendError: The view is empty or too old.
        """
        self._looked = self._monotonic()
        for table, filled in self._filled.items():
            if not filled.wait(FIRST_LOOK_S):
                raise BackendError(
                    f"{table}: no list within {FIRST_LOOK_S:g} s: {self._problem}", transient=True
                )
        with self._lock:
            age = self._monotonic() - min(self._heard.values())
            if age > STALE_S:
                raise BackendError(
                    f"the watch received nothing for {age:.0f} s: {self._problem}", transient=True
                )
            pods = self._tables["pods"].by_job.get(name, {})
            return self._tables["jobs"].items.get(name), tuple(pods.values())

    def warnings(self, uid: str) -> list[Json]:
        """Warning events about the object *uid*, of the last :data:`WARNINGS_S`; [] if none may be read."""
        if self._listing.acquire(blocking=False):  # a concurrent reader uses the previous ones
            try:
                if self._warned_at is None or self._monotonic() - self._warned_at >= WARNINGS_S:
                    self._warned_at = self._monotonic()
                    self._warnings = self._list_warnings()
            finally:
                self._listing.release()
        return self._warnings.get(uid, [])

    def _list_warnings(self) -> dict[str, list[Json]]:
        found: dict[str, list[Json]] = {}
        with suppress(BackendError):
            query = {"fieldSelector": "type=Warning"}
            answer = self._cluster.list(names.events(self._namespace), query, page=PAGE)
            for event in answer.body["items"]:
                found.setdefault(str((event.get("involvedObject") or {}).get("uid")), []).append(event)
        return found

    def _server_time(self) -> float | None:
        if self._server is None:
            return None
        said, at = self._server
        return said + (self._monotonic() - at)

    # -- the threads

    def _keep(self, name: str) -> None:
        try:
            self._follow(name)
        finally:
            self.close()  # after any end: the next read creates another view

    def _follow(self, name: str) -> None:
        failed = 0
        while not self._ending.is_set():
            if self._monotonic() - self._looked > IDLE_S:
                self._ending.set()
                return
            try:
                self.round(name)
            except BackendError as err:
                self._problem = str(err)
                if not isinstance(err, ExpiredError):
                    failed += 1
                    asked = err.retry_after_s if isinstance(err, RefusedError) else None
                    self._ending.wait(
                        max(asked or 0.0, wait_s(failed, first_s=FIRST_WAIT_S, most_s=MOST_WAIT_S))
                    )
            else:
                failed = 0

    def round(self, name: str) -> None:
        """One watch of the table *name*, after a list if there is no version to continue from.

        Raises:
            BackendError: The server refused, or the watch was interrupted.
        """
        table = self._tables[name]
        if table.version is None:
            self._list(name, table)
        try:
            for event in self._events(table):
                with self._lock:
                    table.take(event)
                    if event.get("type") == "DELETED":
                        self._forget(name)
                    self._heard[name] = self._monotonic()
        except BackendError as err:
            if err.status == 410:
                table.version = None
                raise ExpiredError(str(err)) from err
            raise
        self._heard[name] = self._monotonic()  # it ended at its requested timeout

    def _list(self, name: str, table: Table) -> None:
        self.lists += 1
        query = {"labelSelector": f"{names.MANAGED_BY}={names.MANAGER}"}
        answer = self._cluster.list(table.path, query, page=PAGE, each=Kept.of)
        with self._lock:
            table.fill(answer.body)
            self._forget(name)
            self._heard[name] = self._monotonic()
            if answer.server_time is not None:
                self._server = (answer.server_time, self._monotonic())
        self._filled[name].set()

    def _forget(self, name: str) -> None:
        """Forget the results for deleted Jobs."""
        if name == "jobs":
            left = self._tables["jobs"].items
            self.results = {job: result for job, result in self.results.items() if job in left}

    def _events(self, table: Table) -> Iterator[Json]:
        self.watches += 1
        query = {
            "watch": "true",
            "labelSelector": f"{names.MANAGED_BY}={names.MANAGER}",
            "resourceVersion": table.version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
        }
        for line in self._cluster.stream(table.path, query, read_timeout_s=QUIET_S + 30):
            if self._ending.is_set():
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as err:  # interrupted in the middle of a line
                raise BackendError(f"{table.path}: the watch broke off: {err}", transient=True) from err


def _job_name(body: Json) -> str:
    """Name of the Job that a pod belongs to; "" for anything else."""
    return str(((body.get("metadata") or {}).get("labels") or {}).get(names.JOB_NAME) or "")


_views: dict[tuple[str, str], View] = {}
_views_lock = threading.Lock()


def shared_view(cluster: Cluster, namespace: str) -> View:
    """This process's view on that namespace; the first call creates it."""
    key = (cluster.host, namespace)
    with _views_lock:
        view = _views.get(key)
        if view is None or view.is_closed:
            view = View(cluster, namespace)
            view.start()
            _views[key] = view
        return view


def close_views() -> None:
    """Close every view of this process, at its end or between tests."""
    with _views_lock:
        for view in _views.values():
            view.close()
        _views.clear()


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
