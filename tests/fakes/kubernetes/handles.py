"""Nodes and pods as tests control them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fakes.kubernetes import subresources
from fakes.kubernetes.deletion import delete
from fakes.kubernetes.objects import Object, clone
from fakes.kubernetes.podrun import PodRun
from fakes.kubernetes.programs import Scripted
from fakes.kubernetes.resources import NODES, PODS

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """A node."""

    cluster: Cluster
    name: str

    def silence(self) -> None:
        """The kubelet is silent from now on (network cut); containers keep running."""

        def act() -> None:
            self.cluster.kubelets[self.name].silence()
            self.cluster.node_controller.silent(self.name)

        self.cluster.do(act)

    def crash(self) -> None:
        """The machine is off; its Node object stays until a user deletes it."""

        def act() -> None:
            self.cluster.kubelets[self.name].crash()
            self.cluster.node_controller.silent(self.name)

        self.cluster.do(act)

    def vanish(self, *, delete_after_s: float = 0.0) -> None:
        """A spot machine is lost: it is off at once, and the cloud's controller deletes its Node object."""
        self.crash()
        self.cluster.do(lambda: self.cluster.clock.after(delete_after_s, self._delete))
        if not delete_after_s:
            self.cluster.advance(0)

    def _delete(self) -> None:
        node = self.cluster.store.get(NODES, "", self.name)
        if node is not None:
            delete(self.cluster.store, NODES, node, {})

    def delete(self) -> None:
        """Delete the Node object; its containers run until pod garbage collection."""
        self.cluster.do(self._delete)

    def revive(self) -> None:
        """The kubelet reports again."""

        def act() -> None:
            self.cluster.node_controller.back(self.name)
            self.cluster.kubelets[self.name].revive()

        self.cluster.do(act)

    def restart_kubelet(self) -> None:
        """The kubelet restarts and admits its running pods again; see `reject_next`, `allocate`."""
        self.cluster.do(self.cluster.kubelets[self.name].restart)

    def shut_down(self, grace_s: float = 30.0) -> None:
        """Graceful shutdown (spot notice): pods end within *grace_s* as Terminated, TerminationByKubelet.

        Source: Kubernetes documentation, Node Shutdowns; not recorded.
        """

        def act() -> None:
            self.cluster.node_controller.taint(self.name, "node.kubernetes.io/not-ready", "NoSchedule")
            for run in list(self.cluster.kubelets[self.name].runs.values()):
                run.mark("TerminationByKubelet", SHUTDOWN)
                run.fail("Terminated", SHUTDOWN, grace_s)

        self.cluster.do(act)

    def taint(self, key: str, effect: str = "NoSchedule", value: str = "") -> None:
        """Add a taint."""
        self.cluster.do(lambda: self.cluster.node_controller.taint(self.name, key, effect, value))

    def untaint(self, key: str) -> None:
        """Remove a taint."""
        self.cluster.do(lambda: self.cluster.node_controller.untaint(self.name, key))

    def cordon(self, *, on: bool = True) -> None:
        """Cordon it, or uncordon it."""
        self.edit(
            lambda node: (
                node["spec"].update(unschedulable=True) if on else node["spec"].pop("unschedulable", None)
            )
        )

    def allocate(self, **amounts: str) -> None:
        """Change its allocatable resources, not its capacity: ``allocate(**{"nvidia.com/gpu": "0"})``."""
        self.edit(lambda node: node["status"]["allocatable"].update(amounts))

    def edit(self, change: object) -> None:
        """Apply any change to its object."""

        def act() -> None:
            node = self.cluster.store.get(NODES, "", self.name)
            if node is not None and callable(change):
                self.cluster.store.edit(NODES, node, change)

        self.cluster.do(act)

    def reject_next(self, reason: str, message: str, pod: str = "*") -> None:
        """Let its kubelet refuse the next pod: ``UnexpectedAdmissionError``, ``OutOfnvidia.com/gpu``, ..."""
        self.cluster.do(lambda: self.cluster.rejections.add(self.name, pod, reason, message))

    def refuse_resizes(self) -> None:
        """Let every resize be Infeasible here (static CPU manager)."""
        self.cluster.do(lambda: self.cluster.resizer.infeasible.add(self.name))


@dataclass(frozen=True, slots=True)
class PodHandle:
    """The newest pod that has not ended, by its name or the beginning of it."""

    cluster: Cluster
    name: str
    namespace: str

    def _find(self) -> Object:
        pods = self.cluster.store.all(PODS, self.namespace)
        found = [pod for pod in pods if pod["metadata"]["name"].startswith(self.name)]
        if not found:
            raise LookupError(f"no pod {self.name}* in {self.namespace}")
        live = [pod for pod in found if pod["status"].get("phase") in {"Pending", "Running"}]
        return (live or found)[-1]

    def _run(self) -> PodRun:
        pod = self._find()
        return self.cluster.kubelets[pod["spec"]["nodeName"]].runs[pod["metadata"]["uid"]]

    @property
    def object(self) -> Object:
        """A copy of it."""
        return self.cluster.do(lambda: clone(self._find()))

    def exit(self, code: int, container: str = "") -> None:
        """End a container with *code* (scripted ones only)."""
        self._end(container, code, oom=False)

    def oom(self, container: str = "") -> None:
        """Let the kernel kill a container for memory."""
        self._end(container, 137, oom=True)

    def _end(self, container: str, code: int, *, oom: bool) -> None:
        def act() -> None:
            run = self._run()
            one = next(
                one for one in run.containers if one.is_running and (one.name == container or
                (not container and one.role == "main"))
            )  # fmt: skip
            if oom:
                one.killed = "OOMKilled"
            if isinstance(one.execution, Scripted):
                one.execution.end(code, oom=oom)
            elif one.execution is not None:
                one.execution.kill()

        self.cluster.do(act)

    def hold(self, *, on: bool = True) -> None:
        """Block its end: a process in uninterruptible sleep, a volume that cannot be unmounted.

        The kubelet keeps trying; the pod stays ``Terminating``, and its containers do not change.
        """

        def act() -> None:
            run = self._run()
            run.is_held = on
            if not on and run.stopping:
                run.kill()

        self.cluster.do(act)

    def lose_log(self, container: str = "main") -> None:
        """The kubelet no longer finds the container's log, and returns its own error as the text."""
        self.cluster.do(lambda: self.cluster.logs.lost.add((self._find()["metadata"]["uid"], container)))

    def print(self, text: str, container: str = "main") -> None:
        """Let a container print a line."""

        def act() -> None:
            uid = self._find()["metadata"]["uid"]
            self.cluster.logs._kept[uid, container][-1].write("stdout", text.encode())

        self.cluster.do(act)

    def evict(self, grace_s: int | None = None) -> None:
        """As the eviction API does, with or without disruption budgets."""
        self.cluster.do(lambda: subresources.evict(self.cluster, self._find(), grace_s))

    def evict_by_kubelet(self, message: str = "The node was low on resource: ephemeral-storage.") -> None:
        """Local storage is full: reason Evicted, and no DisruptionTarget."""
        self.cluster.do(lambda: self._run().fail("Evicted", message, 0))

    def preempt(self) -> None:
        """As the scheduler does with a preempted pod."""
        why = "default-scheduler: preempting to accommodate a higher priority pod"
        self.cluster.do(
            lambda: subresources.disrupt(self.cluster, self._find(), "PreemptionByScheduler", why)
        )

    def delete(self, grace_s: int | None = None) -> None:
        """As a user with kubectl does."""
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self.cluster.do(lambda: delete(self.cluster.store, PODS, self._find(), options))
