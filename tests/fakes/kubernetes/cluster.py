"""A whole cluster in one thread: API server, controllers, scheduler, kubelets, time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn
from fakes.kubernetes.access import Access, User
from fakes.kubernetes.api import Api
from fakes.kubernetes.certificates import Certificate
from fakes.kubernetes.clock import Clock
from fakes.kubernetes.collecting import Collector
from fakes.kubernetes.faults import Fault, Faults
from fakes.kubernetes.handles import NodeHandle, PodHandle
from fakes.kubernetes.images import Images
from fakes.kubernetes.jobs import JobController
from fakes.kubernetes.kubelet import Kubelet
from fakes.kubernetes.logs import Logs
from fakes.kubernetes.nodes import NodeController, node_conditions, node_info
from fakes.kubernetes.objects import Object, clone, set_condition
from fakes.kubernetes.podrun import PodRun
from fakes.kubernetes.podstatus import Container
from fakes.kubernetes.programs import Execution, Program
from fakes.kubernetes.queue import Queue
from fakes.kubernetes.quotas import QuotaController
from fakes.kubernetes.recording import Recorder
from fakes.kubernetes.resizing import Resizer
from fakes.kubernetes.resources import NAMESPACES, NODES, PODS, RESOURCES, Resource
from fakes.kubernetes.scheduling import Scheduler
from fakes.kubernetes.scripts import Rejections, Scripts
from fakes.kubernetes.server import Server
from fakes.kubernetes.store import Change, Store
from fakes.kubernetes.watching import Watch

T = TypeVar("T")

START_S = 10.0
WORK_S = 60.0
"""How long to wait for threads to start and end, and for work in them, chosen."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Delays, in seconds of the cluster, that a real one has; all zero is as fast as can be.

    Attributes:
        job_sync_s: Time from a change of a pod to the Job controller's sync.
        job_end_s: Time from the end of the last pod to ``Complete`` or ``Failed``.
        refusal_s: Time from the refusal of a pod to ``FailedCreate``.
        namespace_s: Minimum time for which a deleted namespace stays ``Terminating``.
    """

    sandbox_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    remove_s: float = 0.0
    job_sync_s: float = 0.0
    resize_s: float = 0.0
    job_end_s: float = 0.0
    refusal_s: float = 0.0
    namespace_s: float = 0.0


REAL_PACE = Pace(sandbox_s=0.2, start_s=0.1, end_s=1.1, remove_s=0.8, job_sync_s=1.0, resize_s=0.03)
"""As recorded on an idle two-core machine."""
LATE_PACE = Pace(
    sandbox_s=0.2, start_s=0.1, end_s=1.1, remove_s=0.8, job_sync_s=1.0, resize_s=0.03, job_end_s=4.0,
    refusal_s=8.0, namespace_s=20.0,
)  # fmt: skip
"""As seen on a busy cluster of three nodes: effects come seconds later."""


class Cluster:
    """A fake Kubernetes on a loopback port. Use it as a context manager.

    Args:
        nodes: How many nodes to start with (``node-0``, ...; 8 CPUs, 32 GiB each); add others by `add_node`.
        speed: Seconds of the cluster for each real one; at 0 only `advance` moves its time.
        pace: Delays of kubelet and Job controller.
        namespaces: Made at the start, beside ``default``.
        executor: What runs containers for real (`fakes.kubernetes.processes.Processes`); None plays scripts.
        minor: Kubernetes 1.*minor* in ``/version``.
        tls: Serve HTTPS with a certificate of its own; kubectl sends tokens over HTTPS only.
    """

    def __init__(
        self, *, nodes: int = 1, speed: float = 1.0, pace: Pace | None = None,
        namespaces: tuple[str, ...] = (), executor: Any = None, minor: int = 36, port: int = 0,
        tls: bool = False,
    ) -> None:  # fmt: skip
        """Build all parts; `start` starts them."""
        self.clock = Clock(speed)
        self.store = Store(self.clock)
        self.queue = Queue()
        self.clock.settle = self.queue.drain
        self.access = Access(self.store)
        self.api = Api(self.store)
        self.faults = Faults()
        self.images = Images()
        self.logs = Logs(self)
        self.record = Recorder(self)
        self.scripts = Scripts(self.clock)
        self.rejections = Rejections()
        self.resizer = Resizer(self)
        self.pace = pace or Pace()
        self.executor = executor
        self.minor = minor
        self.resources: tuple[Resource, ...] = RESOURCES
        self.kubelets: dict[str, Kubelet] = {}
        self.watches: list[Watch] = []
        self.requests: deque[tuple[str, str]] = deque(maxlen=10_000)
        self.write_events = True
        self.has_provisioner = True
        """False: new claims stay unbound."""
        self.volume_labels: dict[str, dict[str, str]] = {}
        """Labels of the nodes that reach a claim's volume, by the claim's name; others are in conflict."""
        self.trouble: list[BaseException] = []
        """Errors inside the fake: raised at the end, so that no test passes on a broken fake."""
        self.node_controller = NodeController(self)
        self._wire()
        self._port = port
        self._certificate = Certificate() if tls else None
        self._addresses = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self._begin(nodes, ("default", "kube-system", *namespaces))

    def _wire(self) -> None:
        jobs, scheduler, collector = JobController(self), Scheduler(self), Collector(self)
        quotas = QuotaController(self)
        self.scheduler = scheduler
        parts = (jobs, scheduler, collector, self.node_controller, quotas)
        self.store.listeners += [part.hear for part in parts]
        self.store.listeners.append(self._tell_kubelets)
        self.queue.handle("job", jobs.sync)
        self.queue.handle("job-gone", jobs.forget)
        self.queue.handle("schedule", lambda _key: scheduler.run())
        self.queue.handle("orphans", collector.owner_gone)
        self.queue.handle("orphan", collector.orphan)
        self.queue.handle("finalize", collector.finalize)
        self.queue.handle("namespace", collector.empty)
        self.queue.handle("taints", self.node_controller.look)
        self.queue.handle("quota", quotas.sync)
        self.queue.handle("pod", self._hear_pod)

    def _begin(self, nodes: int, namespaces: tuple[str, ...]) -> None:
        for name in namespaces:
            self.api.create(NAMESPACES, "", {"metadata": {"name": name}})
        for number in range(nodes):
            self._add_node(f"node-{number}", {"cpu": "8", "memory": "32Gi"}, {}, ())

    # Life

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *error: object) -> None:
        """Stop; raises errors of the fake itself unless another exception is being raised."""
        self.stop()
        if self.trouble and error[0] is None:
            raise self.trouble[0]

    def start(self) -> Self:
        """Listen; returns when requests are answered."""
        ready = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", self._port))
        # For a listening socket that it is given, asyncio leaves this out: each answer would come 40 ms late.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._main, args=(ready,), name="fake-kubernetes", daemon=True)
        self._thread.start()
        if not ready.wait(START_S):
            raise TimeoutError("the fake API server did not start")
        return self

    def _main(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _loop, context: self._note(context.get("exception")))
        self.stopped = asyncio.Event()
        self.clock.attach(self._loop)
        self.queue.attach(self._loop)
        config = uvicorn.Config(
            Server(self), log_config=None, access_log=False, lifespan="off", ws="wsproto",
            timeout_graceful_shutdown=1, date_header=False,
            timeout_keep_alive=600,
        )  # fmt: skip
        if self._certificate:
            config.ssl_certfile = self._certificate.file
            config.ssl_keyfile = self._certificate.file
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket] if self._socket else []))
        while not (self._server.started or serving.done()):  # noqa: ASYNC110 - a flag, and no event
            await asyncio.sleep(0.005)
        ready.set()
        await self.stopped.wait()
        self.clock.detach()
        for kubelet in self.kubelets.values():
            kubelet.crash()
        for watch in self.watches:
            watch.queue.put_nowait("close")
        if self.executor is not None:
            await self.executor.close()
        self._server.should_exit = True
        await serving

    def _note(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, OSError | asyncio.CancelledError):
            self.trouble.append(error)

    def stop(self) -> None:
        """End everything: containers, connections, the thread."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self.stopped.set)
        self._thread.join(START_S)
        if self._thread.is_alive():
            raise TimeoutError("the fake API server did not stop")
        self._loop = None
        if self._certificate:
            self._certificate.close()

    def do(self, act: Callable[[], T]) -> T:
        """Call *act* in the cluster's thread with all its immediate effects; returns its result."""
        if self._loop is None or threading.current_thread() is self._thread:
            result = act()
            self.queue.drain()
            return result
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = act()
                self.queue.drain()
            except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
                future.set_exception(error)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(run)
        return future.result(WORK_S)

    # For tests: read

    @property
    def url(self) -> str:
        """Address of the API server."""
        return f"{'https' if self._certificate else 'http'}://127.0.0.1:{self._port}"

    def kubeconfig(self, path: Path, *, token: str | None = None, namespace: str = "default") -> Path:
        """Write a kubeconfig with one context, ``fake``, for the administrator or another *token*."""
        token = self.access.admin_token if token is None else token
        authority = {"certificate-authority-data": self._certificate.encoded} if self._certificate else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "fake", "user": {"token": token} if token else {}}],
            "contexts": [
                {"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}
            ],
        }
        path.write_text(json.dumps(config))
        return path

    def get(self, resource: Resource, name: str, namespace: str = "default") -> Object | None:
        """A copy of an object, straight from the store."""
        return self.do(
            lambda: clone(self.store.get(resource, namespace if resource.namespaced else "", name))
        )

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Copies of all objects of a kind."""
        return self.do(lambda: clone(self.store.all(resource, namespace)))

    def log(self, pod: str, container: str = "main", namespace: str = "default") -> str:
        """What a container has printed."""
        found = self.get(PODS, pod, namespace)
        return (
            ""
            if found is None
            else self.do(lambda: self.logs.text(found["metadata"]["uid"], container)).decode()
        )

    # For tests: change

    def advance(self, seconds: float) -> None:
        """Let time pass at once, and do everything due in order."""
        self.do(lambda: self.clock.advance(seconds))

    def create(self, resource: Resource, body: Object, namespace: str = "default") -> Object:
        """Add an object as an administrator would."""
        return self.do(
            lambda: clone(self.api.create(resource, namespace if resource.namespaced else "", body))
        )

    def add_node(
        self, name: str, *, cpu: str = "8", memory: str = "32Gi", gpus: int = 0, gpu: str = "nvidia.com/gpu",
        labels: dict[str, str] | None = None, taints: tuple[Object, ...] = (),
    ) -> NodeHandle:  # fmt: skip
        """Add a node with a kubelet of its own."""
        room = {"cpu": cpu, "memory": memory} | ({gpu: str(gpus)} if gpus else {})
        self.do(lambda: self._add_node(name, room, labels or {}, taints))
        return NodeHandle(self, name)

    def _add_node(
        self, name: str, room: dict[str, str], labels: dict[str, str], taints: tuple[Object, ...]
    ) -> None:
        address = f"192.0.2.{len(self.kubelets) % 250 + 2}"
        whole = {**room, "pods": "110", "ephemeral-storage": "100Gi"}
        now = self.clock.now()
        self.kubelets[name] = Kubelet(self, name, address)
        status = {
            "capacity": dict(whole), "allocatable": dict(whole), "conditions": node_conditions(now),
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "nodeInfo": node_info(self.minor),
        }  # fmt: skip
        spec: Object = {"taints": list(taints)} if taints else {}
        node = {"metadata": {"name": name, "labels": dict(labels)}, "spec": spec}
        made = self.api.create(NODES, "", node)
        self.store.edit(NODES, made, lambda item: item.update(status=status))

    def node(self, name: str) -> NodeHandle:
        """A node for a test to disturb."""
        return NodeHandle(self, name)

    def pod(self, name: str, namespace: str = "default") -> PodHandle:
        """A pod, by its name or the beginning of it (``train-0-``), for a test to disturb."""
        return PodHandle(self, name, namespace)

    def script(self, program: Program | Callable[[Object, Object], Program | None], *, pod: str = "*",
               container: str = "*", times: int | None = None) -> None:  # fmt: skip
        """Script the containers; the last rule whose names match (shell wildcards) counts."""
        self.do(lambda: self.scripts.add(program, pod, container, times))

    def next_error(self, verb: str = "*", resource: str = "*", status: int = 500, **more: Any) -> Fault:
        """Let the next request like this fail; see `Fault` for times, when, drop, delay_s."""
        fault = Fault(verb, resource, status, **more)
        self.do(lambda: self.faults.pending.append(fault))
        return fault

    def outage(self, *, down: bool = True) -> None:
        """Close every connection unanswered from now on, or (down=False) no longer."""

        def switch() -> None:
            self.faults.down = down
            if down:
                self.cut_watches()

        self.do(switch)

    def restart_server(self, *, unready_s: float, partly: bool = False) -> None:
        """Restart the API server; for *unready_s* it has not read roles and bindings.

        It refuses (403) every caller but ``system:masters`` until then, also at open paths such as
        ``/readyz``. With *partly* it has read those of the cluster but not those of namespaces: ``/readyz``
        answers 500.
        """

        def act() -> None:
            self.cut_watches()
            self.access.start(unready_s, partly=partly)

        self.do(act)

    def deny_pods(self, why: str = "") -> None:
        """Let a validating webhook deny every new pod with *why*; "" ends that."""
        self.do(lambda: setattr(self.api, "denied", why))

    def cut_watches(self) -> None:
        """Break all open watches midway."""
        self.do(lambda: [watch.queue.put_nowait("cut") for watch in self.watches])

    def end_watches(self) -> None:
        """End all open watches in the regular way, as a server does after some minutes."""
        self.do(lambda: [watch.queue.put_nowait("close") for watch in self.watches])

    def compact(self) -> None:
        """Forget history: resource versions from before now are too old (410)."""
        self.do(self.store.compact)

    def user(self, name: str, rules: list[Object], *, lifetime_s: float | None = None) -> str:
        """A token for a user with the rights of *rules* (PolicyRules) in all namespaces."""
        return self.do(lambda: self.access.issue(User(name, rules=tuple(rules)), lifetime_s))

    def serve(self, resource: Resource) -> None:
        """Serve another kind of object (a custom resource)."""
        self.do(lambda: setattr(self, "resources", (*self.resources, resource)))

    # For the other parts

    def node_object(self, name: str) -> Object | None:
        """The Node object."""
        return self.store.get(NODES, "", name)

    def bind(self, pod: Object, node: str) -> None:
        """Bind a pod to a node."""
        now = self.clock.now()

        def place(item: Object) -> None:
            item["spec"]["nodeName"] = node
            item["status"].pop("nominatedNodeName", None)
            set_condition(item, {"type": "PodScheduled", "status": "True"}, now)

        bound = self.store.edit(PODS, pod, place)
        if bound is not None:
            meta = bound["metadata"]
            text = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
            self.record(bound, "Scheduled", text, component="default-scheduler")

    def next_address(self) -> str:
        """A pod's address: a real loopback address where containers really run."""
        self._addresses += 1
        high, low = divmod(self._addresses, 250)
        return f"127.77.{high}.{low + 1}" if self.executor is not None else f"10.244.{high}.{low + 1}"

    def execution(self, run: PodRun, one: Container, env: dict[str, str]) -> Execution | str:
        """The script or process of a container; a text is the reason why it cannot start."""
        if self.executor is not None and not self.scripts.has(run.pod, one.spec):
            return self.executor.make(run, one, env)
        return self.scripts.execution(run.pod, one.spec, one.role, env)

    def _tell_kubelets(self, change: Change) -> None:
        if change.resource is not PODS:
            return
        node = change.item["spec"].get("nodeName")
        if node in self.kubelets:
            if change.kind == "DELETED":
                self.kubelets[node].gone(change.item["metadata"]["uid"])
            else:
                self.queue.add("pod", change.item["metadata"]["uid"])

    def _hear_pod(self, uid: str) -> None:
        found = self.store.find(uid)
        if found is not None and found[1]["spec"].get("nodeName") in self.kubelets:
            self.kubelets[found[1]["spec"]["nodeName"]].hear(found[1])
