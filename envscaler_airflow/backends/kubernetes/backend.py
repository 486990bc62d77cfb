"""The Kubernetes backend: each attempt an Indexed Job."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import (
    AttemptRequest,
    AttemptStatus,
    Handle,
    ResizeState,
    UsageInterval,
)
from envscaler_airflow.backends.kubernetes import failures, names, paths
from envscaler_airflow.backends.kubernetes.client import Cluster, Json, RefusedError, connect
from envscaler_airflow.backends.kubernetes.failures import Seen, index_of, job_end, read_attempt
from envscaler_airflow.backends.kubernetes.lost import free_lost
from envscaler_airflow.backends.kubernetes.offers import derived_offers, shortfall
from envscaler_airflow.backends.kubernetes.render import MAIN, render_attempt, secret_object
from envscaler_airflow.backends.kubernetes.resize import ask, state_of
from envscaler_airflow.backends.kubernetes.settings import Settings
from envscaler_airflow.backends.kubernetes.usage import intervals
from envscaler_airflow.backends.kubernetes.watch import View, shared_view
from envscaler_airflow.errors import BackendError, CapacityError, NoOfferError, SpecError

if TYPE_CHECKING:
    from envscaler_airflow.planning.offers import Offer

SETTLE_S = 5.0
"""Longest that ``submit`` waits for the cluster's first word. Chosen: a scheduler answers in a second."""
RELEASED_TTL_S = 3600
"""How long a released Job stays so that no late repeat starts it anew, seconds. Chosen: longer than any
slice of an owner lives."""
STOP_DEADLINE_S = 1
"""Deadline that ends a Job at once; its record stays. Source: recorded, activeDeadlineSeconds is mutable."""

_POLL_S = 0.2


class KubernetesBackend:
    """Runs attempts on a Kubernetes cluster.

    Satisfies :class:`~envscaler_airflow.backends.base.Backend`. Any process that reaches the cluster can
    repeat every call; nothing but a shared view of a namespace is kept in memory.
    """

    name = "kubernetes"

    def __init__(
        self,
        *,
        api_client: Any = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        in_cluster: bool = False,
        watches: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        **settings: Any,
    ) -> None:
        """Use a cluster; nothing is called yet.

        Args:
            api_client: An ``ApiClient`` of the official client, as a hook gives it; None: by the next three.
            context: Name of a context of the kubeconfig.
            kubeconfig: Its path; None for the usual place.
            in_cluster: True in a pod of the cluster.
            watches: True in a process that watches many attempts: all of a namespace share one watch.
            sleep: Waits between two looks and two tries.
            settings: Fields of :class:`~.settings.Settings`.

        Raises:
            SpecError: A setting is wrong, or there is no such cluster.
        """
        self.settings = Settings.read(settings)
        self._api = api_client
        self._where: dict[str, Any] = {"context": context, "kubeconfig": kubeconfig, "in_cluster": in_cluster}
        self._watches = watches
        self._sleep = sleep
        self._cluster: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        """The API server, connected to on first use."""
        if self._cluster is None:
            api = self._api if self._api is not None else connect(**self._where)
            self._cluster = Cluster(api, sleep=self._sleep)
        return self._cluster

    @property
    def namespace(self) -> str:
        """Where attempts run."""
        return self.settings.namespace

    def share_watch(self) -> None:
        """From now on look through the one watch of this process on the namespace."""
        self._watches = True

    def offers(self) -> tuple[Offer, ...]:
        """What the configuration lists, else slices of the nodes.

        Raises:
            NoOfferError: Neither is there: nodes may not be read.
        """
        if self.settings.cluster_prices:
            return tuple(item.offer(self.settings.region) for item in self.settings.cluster_prices)
        try:
            nodes = self._nodes()
        except RefusedError as err:
            if err.status != 403:
                raise
            raise NoOfferError(
                f"{err}; grant it, or list what can be had as cluster_prices in the configuration"
            ) from err
        return derived_offers(nodes, self.settings)

    def _nodes(self) -> list[Json]:
        """The nodes that stages may use."""
        wanted = ",".join(f"{key}={value}" for key, value in sorted(self.settings.node_selector.items()))
        query = {"labelSelector": wanted} if wanted else None
        return list(self.cluster.list(paths.nodes(), query).body["items"])

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """What ``submit`` would send, as JSON and without secrets."""
        return render_attempt(request, self.settings)

    # -- starting

    def submit(self, request: AttemptRequest) -> Handle:
        """Start the attempt, finish a start that was cut off, or adopt what runs or ran.

        Raises:
            CapacityError: No node has room now, and none is added by the cluster.
            NoOfferError: The cluster can never have room.
            SpecError: The image or the request can never work.
            BackendError: The API server said no, or the attempt was released.
        """
        if request.allocation.offer.cloud != "kubernetes":
            raise BackendError(f"{request.allocation.offer.name}: is no offer of a cluster")
        rendered = self.render(request)
        job = self._existing(request, rendered["name"])
        if job is None:
            self._check_room(request)
            job = self._create(request, rendered)
        if not _is_started(job) and job_end(job) is None and failures.stop_asked(job) is None:
            self._equip(job, rendered, request)
            job = self._unsuspend(job)
        handle = self.handle(job)
        self._settle(handle, job)
        return handle

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle when the attempt was started and is not released, else None."""
        job = self._read(names.attempt_name(request))
        if job is None or not _is_of(job, request) or not _is_started(job) or _is_released(job):
            return None
        return self.handle(job)

    def attempts(self) -> Iterator[Handle]:
        """Every attempt of this namespace that is not released, for a check of orphans."""
        for job in self.jobs():
            if not _is_released(job):
                yield self.handle(job)

    def jobs(self) -> list[Json]:
        """Every Job of ours in this namespace, as the API server shows it."""
        query = {"labelSelector": f"{names.MANAGED_BY}={names.MANAGER},{names.RUN}"}
        return list(self.cluster.list(paths.jobs(self.namespace), query).body["items"])

    def _existing(self, request: AttemptRequest, name: str) -> Json | None:
        job = self._read(name)
        if job is None:
            return None
        if not _is_of(job, request):
            raise BackendError(
                f"Job {self.namespace}/{name} is not of this run; remove it, or use another namespace"
            )
        if _is_released(job):
            raise BackendError(f"{name}: this attempt has ended and was released")
        return job

    def _create(self, request: AttemptRequest, rendered: Mapping[str, Any]) -> Json:
        try:
            return self.cluster.create(paths.jobs(self.namespace), rendered["job"])
        except RefusedError as err:
            if err.status == 409:  # a repeat of ours, or of another process, was first
                job = self._existing(request, rendered["name"])
                if job is not None:
                    return job
            if err.status in (400, 404, 422):
                raise SpecError(f"{request.run_label}: {err}") from err
            raise

    def _equip(self, job: Json, rendered: Mapping[str, Any], request: AttemptRequest) -> None:
        """ConfigMap and Secret, owned by the Job: with it they go."""
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        made = [(paths.config_maps(self.namespace), dict(rendered["config_map"]))]
        secret = secret_object(rendered, request.secret_env)
        if secret is not None:
            made.append((paths.secrets(self.namespace), secret))
        for path, body in made:
            body["metadata"] = {**body["metadata"], "ownerReferences": [owner]}
            try:
                self.cluster.create(path, body)
            except RefusedError as err:
                if err.status != 409:
                    raise

    def _unsuspend(self, job: Json) -> Json:
        """Let its pods be made; where a Kueue queue decides that, mark it as ready."""
        metadata = job["metadata"]
        patch: Json = {"metadata": {"uid": metadata["uid"], "annotations": {names.READY: "true"}}}
        if not (metadata.get("labels") or {}).get(names.QUEUE):
            patch["spec"] = {"suspend": False}
        return self.cluster.patch(paths.jobs(self.namespace, metadata["name"]), patch)

    def _check_room(self, request: AttemptRequest) -> None:
        """Refuse what the whole cluster has no room for, where no nodes are added and they may be read."""
        if self.settings.wait_for_node_s > 0 or self.settings.cluster_prices:
            return
        try:
            nodes = self._nodes()
        except RefusedError as err:
            if err.status == 403:
                return
            raise
        missing = shortfall(request.allocation, nodes)
        if missing is not None:
            raise NoOfferError(f"{request.run_label}: {missing}")

    def _settle(self, handle: Handle, job: Json) -> None:
        """Wait a little for the scheduler's and the kubelet's first word, and take back what cannot run.

        Raises:
            CapacityError, SpecError: With the scheduler's or the kubelet's own message.
        """
        nodes = _nodes(job)
        turns = math.ceil(SETTLE_S / _POLL_S)
        for _ in range(turns):
            seen = self._look(handle)
            status = read_attempt(seen, nodes)
            for node in status.nodes:
                if node.reason == "capacity":
                    self._take_back(handle)
                    raise CapacityError(f"{handle.name}: {node.detail}")
                if node.reason == "image" and node.detail.startswith(
                    ("InvalidImageName", "ErrImageNeverPull")
                ):
                    self._take_back(handle)
                    raise SpecError(f"{handle.name}: {node.detail}")
            if all(node.state != "pending" for node in status.nodes) or _waits_for_queue(status):
                return
            self._sleep(_POLL_S)

    def _take_back(self, handle: Handle) -> None:
        self.cluster.delete(paths.jobs(self.namespace, handle.name), uid=str(handle.details["uid"]))

    # -- watching

    def observe(self, handle: Handle) -> AttemptStatus:
        """State of every node.

        Raises:
            BackendError: The API server does not answer, or the handle is none of this backend's.
        """
        return read_attempt(self._look(handle), _handle_nodes(handle))

    def _look(self, handle: Handle) -> Seen:
        """What the API server, or the shared view of the namespace, shows of the attempt."""
        if not handle.details.get("uid"):
            raise BackendError(f"{handle.name}: this handle names no Job of a cluster")
        namespace = str(handle.details.get("namespace") or self.namespace)
        view = self._view(namespace)
        job, pods, server_time = view.attempt(handle.name) if view is not None else (None, [], None)
        if job is None:  # a view may be older than the Job: nothing is gone before the server says so
            job, pods, server_time = self._fetch(namespace, handle.name)
        uid = handle.details["uid"]
        if job is not None and job["metadata"]["uid"] != uid:
            job = None
        ours = tuple(pod for pod in pods if _is_owned(pod, uid))
        seen = Seen(job, ours, server_time=server_time, wait_for_node_s=self.settings.wait_for_node_s)
        return self._look_closer(namespace, seen, events=view is None)

    def _view(self, namespace: str) -> View | None:
        return shared_view(self.cluster, namespace) if self._watches else None

    def _fetch(self, namespace: str, name: str) -> tuple[Json | None, list[Json], float | None]:
        found = self.cluster.find(paths.jobs(namespace, name))
        if found is None:
            return None, [], None
        query = {"labelSelector": f"{names.JOB_NAME}={name}"}
        pods = self.cluster.list(paths.pods(namespace), query)
        return found.body, pods.body["items"], pods.server_time

    def _look_closer(self, namespace: str, seen: Seen, *, events: bool) -> Seen:
        """Nodes of overdue pods, and warnings about what waits; neither has to be readable."""
        overdue = {
            str(pod["spec"]["nodeName"])
            for pod in seen.pods
            if (failures.silent_for(pod, seen) or 0) >= failures.LOST_AFTER_S and pod["spec"].get("nodeName")
        }
        nodes = {}
        for name in sorted(overdue):
            with suppress(RefusedError):
                nodes[name] = self.cluster.get(paths.nodes(name)).body
        warnings = self._warnings(namespace, seen) if events else ()
        if not nodes and not warnings:
            return seen
        return Seen(seen.job, seen.pods, nodes, warnings, seen.server_time, seen.wait_for_node_s)

    def _warnings(self, namespace: str, seen: Seen) -> tuple[Json, ...]:
        """Warnings about pods that wait without a word, and about a Job that lacks pods."""
        waiting = [pod for pod in seen.pods if failures.is_waiting_silently(pod)]
        without_pods = [seen.job] if seen.job is not None and failures.lacks_pods(seen) else []
        found: list[Json] = []
        for body in [*waiting, *without_pods]:
            query = {"fieldSelector": f"involvedObject.uid={body['metadata']['uid']},type=Warning"}
            with suppress(RefusedError):
                found += self.cluster.list(paths.events(namespace), query).body["items"]
        return tuple(found)

    def mend(self, handle: Handle) -> tuple[str, ...]:
        """Give up pods on nodes that do not answer, so that their Job makes them again; names of the pods.

        For the owner alone. Where the Role does not allow it, nothing is done: the node counts as lost.
        """
        return free_lost(self.cluster, self._look(handle))

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """Intervals of every node by the times in Job and pods. Raises BackendError."""
        return intervals(self._look(handle), handle)

    def logs(self, handle: Handle, *, since: Mapping[int, int] | None = None) -> Iterator[tuple[int, bytes]]:
        """What the kubelet keeps of each node's output, from byte *since* on."""
        for pod in self._look(handle).pods:
            node = index_of(pod)
            if node is None:
                continue
            path = paths.pods(pod["metadata"]["namespace"], pod["metadata"]["name"], "log")
            skip, lines = (since or {}).get(node, 0), []
            try:
                lines = list(self.cluster.stream(path, {"container": MAIN}))
            except RefusedError as err:
                if err.status not in (400, 404):  # not started, or gone
                    raise
            text = b"".join(lines)[skip:]
            if text:
                yield node, text

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Ask for so much per node, in place; ``infeasible`` once one node cannot have it.

        Raises:
            BackendError: The API server does not answer, or the Role does not allow it.
        """
        for pod in self._live(handle):
            if ask(self.cluster, pod, vcpus=vcpus, memory_bytes=memory_bytes) == "infeasible":
                return "infeasible"
        return self.resized(handle)

    def resized(self, handle: Handle) -> ResizeState:
        """How far the last :meth:`resize` is. Raises BackendError."""
        return state_of(self._live(handle))

    def _live(self, handle: Handle) -> tuple[Json, ...]:
        pods = self._look(handle).pods
        return tuple(dict(pod) for pod in pods if (pod.get("status") or {}).get("phase") == "Running")

    # -- ending

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Let the Job run into a deadline now, and its pods have *grace_s* seconds; 0 kills.

        The Job's record stays, so that any process can still tell how it ended.
        """
        seen = self._look(handle)
        job = seen.job
        if job is None or job_end(job) is not None:
            return
        asked = failures.stop_asked(job)
        if asked is None or (grace_s <= 0 < float(asked.get("grace_s") or 0)):
            never_came = failures.unmet(read_attempt(seen, _handle_nodes(handle)))
            note = {"grace_s": grace_s, "at": seen.server_time} | (
                {"unmet": never_came} if never_came else {}
            )
            patch = {
                "metadata": {"uid": job["metadata"]["uid"], "annotations": {names.STOP: json.dumps(note)}},
                "spec": {"activeDeadlineSeconds": STOP_DEADLINE_S},
            }
            try:
                self.cluster.patch(paths.jobs(job["metadata"]["namespace"], handle.name), patch)
            except RefusedError as err:
                if err.status not in (404, 409):
                    raise
                return
        # The kubelet has to see the end, so that nothing runs when the pod is gone: never 0.
        grace = max(1, math.ceil(grace_s))
        for pod in seen.pods:
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                continue
            metadata = pod["metadata"]
            path = paths.pods(metadata["namespace"], metadata["name"])
            self.cluster.delete(path, uid=metadata["uid"], grace_s=grace)

    def release(self, handle: Handle) -> None:
        """Remove the pods of an ended attempt; its Job stays for an hour as the mark that it was."""
        seen = self._look(handle)
        job = seen.job
        if job is None or not read_attempt(seen, _handle_nodes(handle)).is_over:
            return
        metadata = job["metadata"]
        path = paths.jobs(metadata["namespace"], metadata["name"])
        if job_end(job) is None and (job["spec"].get("suspend") or not seen.pods):
            self.cluster.delete(path, uid=metadata["uid"])
            return
        kept = self._keeps(job)
        patch: Json = {
            "metadata": {"uid": metadata["uid"], "labels": {names.RELEASED: "true"}},
            "spec": {"ttlSecondsAfterFinished": max(RELEASED_TTL_S, kept)},
        }
        if job_end(job) is None:
            patch["spec"]["activeDeadlineSeconds"] = STOP_DEADLINE_S
        self.cluster.patch(path, patch)
        if kept:
            return
        for pod in seen.pods:
            where = paths.pods(metadata["namespace"], pod["metadata"]["name"])
            self.cluster.delete(where, uid=pod["metadata"]["uid"])

    def _keeps(self, job: Mapping[str, Any]) -> int:
        """Seconds that its pods stay for people to look at."""
        keep = self.settings.keep
        if keep == "never" or failures.condition(job, "Complete") is not None:
            return 0
        return self.settings.ttl_s if keep == "on-failure" else keep

    def _read(self, name: str) -> Json | None:
        found = self.cluster.find(paths.jobs(self.namespace, name))
        return None if found is None else found.body

    def handle(self, job: Json) -> Handle:
        """The handle of the attempt that *job* is."""
        metadata = job["metadata"]
        details = {
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "created": metadata["creationTimestamp"],
            "nodes": _nodes(job),
        }
        return Handle(self.name, metadata["name"], details)


def _nodes(job: Json) -> int:
    return int((job["metadata"].get("labels") or {}).get(names.NODES) or job["spec"]["completions"])


def _handle_nodes(handle: Handle) -> int:
    return int(handle.details.get("nodes") or 1)


def _is_of(job: Json, request: AttemptRequest) -> bool:
    labels = job["metadata"].get("labels") or {}
    expected = names.labels_of(request)
    return all(
        labels.get(key) == expected[key]
        for key in (names.MANAGED_BY, names.RUN, names.GENERATION, names.ATTEMPT)
    )


def _is_started(job: Json) -> bool:
    """True when its pods may be made: it was let go, or its queue decides."""
    return (job["metadata"].get("annotations") or {}).get(names.READY) == "true"


def _is_released(job: Json) -> bool:
    return (job["metadata"].get("labels") or {}).get(names.RELEASED) == "true"


def _is_owned(pod: Json, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or ())


def _waits_for_queue(status: AttemptStatus) -> bool:
    return any(node.reason == "queue" for node in status.nodes)
