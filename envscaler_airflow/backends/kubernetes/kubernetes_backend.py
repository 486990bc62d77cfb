"""The Kubernetes backend: each attempt is an Indexed Job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.base import (
    AttemptRequest,
    AttemptStatus,
    Injection,
    Leftover,
    NodeFault,
    ResizeState,
)
from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.client import (
    Answer,
    Cluster,
    ForbiddenError,
    Json,
    RefusedError,
    connect,
    located,
)
from envscaler_airflow.backends.kubernetes.cluster_offers import derived_offers, free_nodes, shortfall
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.backends.kubernetes.handles import (
    Part,
    attempts_of,
    handle_of,
    is_of,
    is_released,
    is_started,
    leftovers_of,
    marks_of,
    may_start,
    parts_of,
)
from envscaler_airflow.backends.kubernetes.job_changes import (
    amend,
    ask,
    break_pod,
    fault_obstacle,
    free_lost,
    is_removable,
    is_running,
    release_part,
    rescale_patch,
    running_pod,
    state_of,
    status_of,
    stop_part,
    unneeded,
)
from envscaler_airflow.backends.kubernetes.job_manifest import (
    job_artefact,
    render_attempt,
    render_parts,
    secret_object,
)
from envscaler_airflow.backends.kubernetes.job_reader import (
    View,
    gone,
    look_at,
    shared_view,
    steadily,
    with_history,
)
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    Seen,
    index_of,
    job_end,
    job_of,
    stop_asked,
)
from envscaler_airflow.backends.kubernetes.job_usage import came_late, usage_of
from envscaler_airflow.backends.kubernetes.mounts import drivers_for
from envscaler_airflow.backends.kubernetes.scheduling import LEAST_GRACE_S, any_node
from envscaler_airflow.backends.kubernetes.security import OF_STORE
from envscaler_airflow.errors import BackendError, CapacityError, NoOfferError, SpecError
from envscaler_airflow.images.targets import with_image
from envscaler_airflow.run import Handle, Outcome, outcome_of
from envscaler_airflow.run.cost import UsageInterval

if TYPE_CHECKING:
    from envscaler_airflow.envspec.models import EnvSpec
    from envscaler_airflow.images.artefacts import Artefact
    from envscaler_airflow.planning.offers import Offer

SETTLE_S = 5.0
"""Longest wait of ``submit`` for the cluster's first report. Chosen: a scheduler answers in a second."""

_POLL_S = 0.2


class KubernetesBackend:
    """Runs attempts on a Kubernetes cluster.

    Satisfies :class:`~envscaler_airflow.backends.base.Backend`. Any process that reaches the cluster can
    repeat every call; only a shared view of a namespace is in memory.
    """

    name = "kubernetes"
    runs_mixed = True

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
            api_client: An ``ApiClient`` of the official client, as a hook returns it; None: from the next
                three.
            context: Name of a context of the kubeconfig.
            kubeconfig: Its path; None for the default.
            in_cluster: True in a pod of the cluster.
            watches: True in a process that watches many attempts: those of a namespace share one watch.
            sleep: Waits between two reads and two tries.
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
        """Namespace of the attempts."""
        return self.settings.namespace

    def address(self) -> dict[str, Any]:
        """Context, kubeconfig and namespace, at this time; {} for a client that a hook made."""
        return {} if self._api is not None else {**located(**self._where), "namespace": self.namespace}

    def prepare(self, spec: EnvSpec) -> EnvSpec:
        """*spec* with the image of its pods. Raises SpecError if neither spec nor settings name one."""
        return with_image(spec, image=self.settings.image, repository=self.settings.image_repository)

    def sample_offer(self, spec: EnvSpec) -> Offer:
        """An offer of any nodes that have what *spec* requests; the cluster is not asked."""
        return any_node(spec.resources.alternatives[0], self.settings, is_spot=spec.capacity == "spot")

    def artefacts(self, request: AttemptRequest) -> list[Artefact]:
        """``job.yaml``: what ``submit`` sends where the cluster has no CSI driver for buckets."""
        return [job_artefact(request, self.settings)]

    def share_watch(self) -> None:
        """Use this process's shared watch on the namespace from now on."""
        self._watches = True

    def offers(self) -> tuple[Offer, ...]:
        """The offers that the configuration lists, else shares of the nodes.

        Raises:
            NoOfferError: There is neither: RBAC forbids reading nodes.
        """
        if self.settings.cluster_prices:
            return tuple(item.offer(self.settings.region) for item in self.settings.cluster_prices)
        try:
            nodes = self._nodes()
        except ForbiddenError as err:
            raise NoOfferError(
                f"{err}; grant it, or list what is available as cluster_prices in the configuration"
            ) from err
        return derived_offers(nodes, self.settings)

    def later_offers(self) -> tuple[Offer, ...]:
        """Shares of nodes that accept no pods now, for as long as a stage waits for a node.

        These are cordoned nodes, nodes that are not ready, and nodes with a taint that the pods do not
        tolerate. () if the configuration lists the nodes, or stages do not wait for any.
        """
        if self.settings.wait_for_node_s <= 0 or self.settings.cluster_prices:
            return ()
        return derived_offers(self._nodes(), self.settings, is_later=True)

    def _nodes(self) -> list[Json]:
        """The nodes that stages may use."""
        wanted = ",".join(f"{key}={value}" for key, value in sorted(self.settings.node_selector.items()))
        query = {"labelSelector": wanted} if wanted else None
        return list(self.cluster.list(names.nodes(), query).body["items"])

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> dict[str, int]:
        """Nodes of each offer that are available now, by its name; *without* does not count as running.

        Empty if unknown: RBAC forbids reading nodes or pods, prices are configured by hand, or the cluster
        autoscales. Raises BackendError.
        """
        if self.settings.wait_for_node_s > 0 or self.settings.cluster_prices:
            return {}
        try:
            pods = self.cluster.list(names.all_pods()).body["items"]
            freed = {(part.namespace, part.name) for part in self._parts(without)} if without else set()
            pods = [pod for pod in pods if job_of(pod) not in freed]
            return free_nodes(offers, self._nodes(), pods, self.settings)
        except ForbiddenError:
            return {}

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """What ``submit`` would send, as JSON without secrets."""
        return render_attempt(request, self.settings, drivers=self._drivers(request))

    def _drivers(self, request: AttemptRequest) -> frozenset[str]:
        """CSI drivers of the cluster that mount a volume of the stage; empty if RBAC forbids reading them."""
        found = set()
        for name in drivers_for(request.launch.paths.volumes):
            try:
                answer = self.cluster.find(names.drivers(name))
            except ForbiddenError:
                continue
            modes = (answer.body.get("spec") or {}).get("volumeLifecycleModes") if answer else None
            if "Ephemeral" in (modes or ()):
                found.add(name)
        return frozenset(found)

    # -- starting

    def submit(self, request: AttemptRequest) -> Handle:
        """Start the attempt, finish an interrupted start, or adopt a running or ended one.

        Raises:
            CapacityError: No node has capacity now, and the cluster adds none.
            NoOfferError: The cluster can never have the capacity.
            SpecError: The image or the request can never work.
            BackendError: The API server refused, or the attempt was released.
        """
        if request.allocation.offer.cloud != "kubernetes":
            raise BackendError(f"{request.allocation.offer.name}: is not an offer of a cluster")
        jobs = self._make(request, render_parts(request, self.settings, drivers=self._drivers(request)))
        handle = handle_of(jobs)
        self._settle(handle)
        return handle

    def _make(self, request: AttemptRequest, parts: Sequence[Json]) -> list[Json]:
        """Create every Job, then what their pods need; no pod starts before everything exists."""
        jobs = [self._existing(request, part["name"]) for part in parts]
        if not any(jobs):
            self._check_room(request, parts)
        made = self._create_all(request, parts, jobs)
        waiting = [may_start(job) for job in made]
        try:
            for part, job, waits in zip(parts, made, waiting, strict=True):
                if waits:
                    self._equip(job, part, request)
            return [self._unsuspend(job) if waits else job for job, waits in zip(made, waiting, strict=True)]
        except RefusedError as err:
            if err.transient:
                raise
            self._take_back(handle_of(made))  # it would stay suspended for ever
            if err.status in (400, 422):
                raise SpecError(f"{request.run_label}: {err}") from err
            raise

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle when the attempt was started and is not released, else None."""
        marks = marks_of(request, self.namespace)
        found = [self._read(mark["metadata"]["name"]) for mark in marks]
        jobs = [job if job is not None and is_of(job, request) else None for job in found]
        there = [job for job in jobs if job is not None]
        if not any(is_started(job) for job in there) or all(is_released(job) for job in there):
            return None
        pairs = zip(marks, jobs, strict=True)
        return handle_of([job or gone(self.cluster, mark, there[0]) for mark, job in pairs])

    def attempts(self) -> Iterator[Handle]:
        """Every attempt of this namespace that is not released."""
        for jobs in attempts_of(job for job in self.jobs() if not is_released(job)):
            yield handle_of(jobs)

    def jobs(self) -> list[Json]:
        """Every Job of this backend in the namespace, as the API server returns it."""
        return list(self._list_jobs().body["items"])

    def _list_jobs(self) -> Answer:
        return self.cluster.list(names.jobs(self.namespace), {"labelSelector": names.OURS})

    def leftovers(self, store_url: str) -> Iterator[Leftover]:
        """Every Job of that store that is not released. Raises BackendError."""
        return leftovers_of(self._list_jobs(), store_url)

    def remove(self, handle: Handle) -> None:
        """Delete the Jobs of *handle*, their pods with them. Raises BackendError."""
        self._take_back(handle)

    def _existing(self, request: AttemptRequest, name: str) -> Json | None:
        job = self._read(name)
        if job is None:
            return None
        if not is_of(job, request):
            raise BackendError(
                f"Job {self.namespace}/{name} is not of this run; remove it, or use another namespace"
            )
        if is_released(job):
            raise BackendError(f"{name}: this attempt has ended and was released")
        return job

    def _create_all(
        self, request: AttemptRequest, parts: Sequence[Json], jobs: Sequence[Json | None]
    ) -> list[Json]:
        """The existing Jobs and the missing ones; if one cannot be created, the new ones are removed."""
        made: list[Json] = []
        new = [job for job in jobs if job is not None and may_start(job)]  # from an interrupted start
        for part, job in zip(parts, jobs, strict=True):
            try:
                made.append(job or self._create(request, part))
            except (SpecError, BackendError) as err:
                if new and not (isinstance(err, BackendError) and err.transient):
                    self._take_back(handle_of(new))
                raise
            if job is None:
                new.append(made[-1])
        return made

    def _create(self, request: AttemptRequest, rendered: Mapping[str, Any]) -> Json:
        try:
            return self.cluster.create(names.jobs(self.namespace), rendered["job"])
        except RefusedError as err:
            if err.status == 409:  # another call or process was first
                job = self._existing(request, rendered["name"])
                if job is not None:
                    return job
            if err.status in (400, 404, 422):
                raise SpecError(f"{request.run_label}: {err}") from err
            raise

    def _equip(self, job: Json, rendered: Mapping[str, Any], request: AttemptRequest) -> None:
        """Create the ConfigMap and the Secret, owned by the Job: they are deleted with it."""
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        made = [(names.config_maps(self.namespace), dict(rendered["config_map"]))]
        keys = {OF_STORE + name: value for name, value in request.store_login.variables.items()}
        secret = secret_object(rendered, {**request.secret_env, **keys})
        if secret is not None:
            made.append((names.secrets(self.namespace), secret))
        for path, body in made:
            body["metadata"] = {**body["metadata"], "ownerReferences": [owner]}
            self._create_once(path, body)
        for claim in rendered.get("claims", ()):
            self._claim(claim, {**owner, "controller": False})

    def _claim(self, claim: Json, owner: Json) -> None:
        """Create the claim if absent; one that is deleted with its run is owned by every attempt's Job."""
        is_of_run = names.RUN in (claim["metadata"].get("labels") or {})
        held = {"ownerReferences": [owner]} if is_of_run else {}
        body = {**claim, "metadata": {**claim["metadata"], **held}}
        if not self._create_once(names.claims(self.namespace), body) and is_of_run:
            where = names.claims(self.namespace, claim["metadata"]["name"])
            self.cluster.patch_strategic(where, {"metadata": held})

    def _create_once(self, path: str, body: Json) -> bool:
        """True when it was created, False when one of that name exists."""
        try:
            self.cluster.create(path, body)
        except RefusedError as err:
            if err.status != 409:
                raise
            return False
        return True

    def _unsuspend(self, job: Json) -> Json:
        """Let the Job create its pods; where a Kueue queue decides that, mark the Job as ready."""
        metadata = job["metadata"]
        patch: Json = {"metadata": {"uid": metadata["uid"], "annotations": {names.READY: "true"}}}
        if not (metadata.get("labels") or {}).get(names.QUEUE):
            patch["spec"] = {"suspend": False}
        return self.cluster.patch(names.jobs(self.namespace, metadata["name"]), patch)

    def _check_room(self, request: AttemptRequest, parts: Sequence[Json]) -> None:
        """Refuse an attempt that exceeds the whole cluster, if no nodes are added and they may be read."""
        if self.settings.wait_for_node_s > 0 or self.settings.cluster_prices:
            return
        try:
            nodes = self._nodes()
        except ForbiddenError:
            return
        for part, rendered in zip(request.allocation.parts, parts, strict=True):
            missing = shortfall(rendered["job"]["spec"]["template"], part, nodes, self.settings)
            if missing is not None:
                raise NoOfferError(f"{request.run_label}: {missing}")

    def _settle(self, handle: Handle) -> None:
        """Wait shortly for the first report of scheduler and kubelet, and remove an attempt that cannot run.

        Raises:
            CapacityError, NoOfferError, SpecError: With the cluster's own message.
        """
        for _ in range(math.ceil(SETTLE_S / _POLL_S)):
            status = self.observe(handle)
            for node in status.nodes:
                if node.state == "pending" and outcome_of(node.reason).never_starts:
                    self._take_back(handle)
                    raise error_of(outcome_of(node.reason))(f"{handle.name}: {node.detail}")
            is_queued = any(node.reason == "queue" for node in status.nodes)
            if is_queued or all(node.state != "pending" for node in status.nodes):
                return
            self._sleep(_POLL_S)
        if any(node.reason == "quota" for node in status.nodes):
            for part, seen in self._look(handle):
                if not seen.pods:
                    amend(self.cluster, part, {"metadata": {"annotations": {names.DELAYED_PODS: "true"}}})

    def _take_back(self, handle: Handle) -> None:
        for part in self._parts(handle):
            self.cluster.delete(names.jobs(part.namespace, part.name), uid=part.uid)

    # -- watching

    def observe(self, handle: Handle) -> AttemptStatus:
        """State of every node.

        Raises:
            BackendError: The API server does not answer, or the handle does not belong to this backend.
        """
        parts = self._parts(handle)
        view = self._view(parts[0].namespace)
        if view is None:
            return status_of(self._look(handle))
        return steadily(view, parts, lambda: status_of(self._look(handle)))

    def _parts(self, handle: Handle) -> tuple[Part, ...]:
        return parts_of(handle, self.namespace)

    def _look(self, handle: Handle) -> list[tuple[Part, Seen]]:
        """Each Job of the attempt with its current state."""
        return [
            (part, look_at(part, self.cluster, self._view(part.namespace), self.settings))
            for part in self._parts(handle)
        ]

    def _view(self, namespace: str) -> View | None:
        return shared_view(self.cluster, namespace) if self._watches else None

    def pods(self, handle: Handle) -> list[tuple[int, Json]]:
        """``(node, pod)`` of every pod, by node; a node whose pod was recreated appears twice."""
        found = [
            (part.first + index, dict(pod))
            for part, seen in self._look(handle)
            for pod in seen.pods
            if (index := index_of(pod)) is not None
        ]
        return sorted(found, key=lambda one: one[0])

    def replace_nodes(self, handle: Handle, *, quiet_s: Mapping[int, float]) -> tuple[str, ...]:
        """Delete pods on nodes that do not answer, so that their Job recreates them; returns the pods' names.

        A pod whose status in the store changed recently is kept: its node may only be cut off from the API
        server.

        If one Job of a mixed attempt has failed, the others are stopped, as a Job stops its own pods. Only
        the owner calls it. If the Role does not allow it, nothing is done: the node counts as lost.
        """
        found = self._look(handle)
        for part, seen in unneeded(found):
            stop_part(self.cluster, part, seen, grace_s=LEAST_GRACE_S)
        return tuple(
            name
            for part, seen in found
            for name in free_lost(self.cluster, seen, first=part.first, quiet_s=quiet_s)
        )

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """Intervals of every node, from the times in Jobs and pods. Raises BackendError."""
        return usage_of(self._look_back(handle))

    def _look_back(self, handle: Handle) -> list[tuple[Part, Seen]]:
        """The same as :meth:`_look`, with the events that bills depend on, which are kept longer."""
        found = [(part, with_history(self.cluster, part, seen)) for part, seen in self._look(handle)]
        for part, seen in found:
            if came_late(seen, part):
                amend(self.cluster, part, {"metadata": {"annotations": {names.DELAYED_PODS: "true"}}})
        return found

    def rescale(self, handle: Handle, nodes: int) -> Handle:
        """Change its Job to *nodes* nodes, keeping the first ones; returns the new handle.

        Raises:
            BackendError: No answer if ``.transient``; otherwise it has several Jobs, has ended, or was not
                created to be rescaled.
        """
        [(part, seen), *others] = self._look(handle)
        if others:
            raise BackendError(f"{handle.name}: an attempt on two offers cannot be rescaled in place")
        if seen.job is None or job_end(seen.job) is not None or stop_asked(seen.job) is not None:
            raise BackendError(f"{handle.name}: it has ended, and cannot be rescaled")
        patch = rescale_patch(dict(seen.job), nodes)
        try:
            job = self.cluster.patch(names.jobs(part.namespace, part.name), patch)
        except RefusedError as err:
            if err.transient:
                raise
            raise BackendError(f"{handle.name}: cannot be rescaled: {err}", status=err.status) from err
        return handle_of([job])

    def removable(self, handle: Handle) -> frozenset[int]:
        """Nodes with a marked pod, or with a machine that will be removed, if machines may be read."""
        pods = self.pods(handle)
        try:
            nodes = {node["metadata"]["name"]: node for node in self._nodes()}
        except ForbiddenError:
            nodes = {}
        return frozenset(
            node for node, pod in pods if is_removable(pod, nodes.get(pod["spec"].get("nodeName") or ""))
        )

    def resize(self, handle: Handle, *, vcpus: float | None, memory_bytes: int | None) -> ResizeState:
        """Request these amounts per node, in place; ``infeasible`` if one node cannot provide them.

        Raises:
            BackendError: The API server does not answer, or the Role does not allow it.
        """
        for pod in self._live(handle):
            if ask(self.cluster, pod, vcpus=vcpus, memory_bytes=memory_bytes) == "infeasible":
                return "infeasible"
        return self.resized(handle)

    def resized(self, handle: Handle) -> ResizeState:
        """The progress of the last :meth:`resize`; pending for a node without a pod. Raises BackendError."""
        live, nodes = self._live(handle), sum(part.nodes for part in self._parts(handle))
        state = state_of(live)
        return "going" if state == "done" and len(live) < nodes else state

    def obstacle(self, handle: Handle, fault: NodeFault, *, node: int) -> str:
        """Why *fault* cannot be injected into *node*; "" if it can. Raises BackendError."""
        return fault_obstacle(self.cluster, running_pod(self.pods(handle), node), fault)

    def inject(self, handle: Handle, fault: NodeFault, *, node: int) -> Injection:
        """Break the pod of *node*. Raises BackendError if there is an obstacle."""
        return break_pod(self.cluster, running_pod(self.pods(handle), node), fault)

    def _live(self, handle: Handle) -> tuple[Json, ...]:
        return tuple(pod for _, pod in self.pods(handle) if is_running(pod))

    # -- ending

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Set a deadline that ends the Job now, with *grace_s* seconds for its pods; 0 kills.

        The Job's record stays, so that any process can still read how it ended.
        """
        for part, seen in self._look_back(handle):
            stop_part(self.cluster, part, seen, grace_s=grace_s)

    def release(self, handle: Handle) -> None:
        """Remove the pods of an ended attempt; its Jobs stay for a while as tombstones."""
        found = self._look(handle)
        if status_of(found).is_over:
            for part, seen in found:
                release_part(self.cluster, part, seen, self.settings)

    def _read(self, name: str) -> Json | None:
        found = self.cluster.find(names.jobs(self.namespace, name))
        return None if found is None else found.body


def error_of(row: Outcome) -> type[CapacityError | NoOfferError | SpecError]:
    """Exception of a start whose pending node never runs; only a lack of capacity is remembered."""
    if row.is_final:
        return SpecError
    return CapacityError if row.caused_by == "platform" else NoOfferError
