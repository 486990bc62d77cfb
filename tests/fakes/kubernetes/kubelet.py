"""A node's agent: takes pods bound to it, runs them, and can become silent or vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.kubernetes import fitting
from fakes.kubernetes.objects import Object, condition, is_going, is_over, pod_requests, quantity, said, stamp
from fakes.kubernetes.podrun import PodRun
from fakes.kubernetes.resources import PODS

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster


class Kubelet:
    """One node's agent."""

    def __init__(self, cluster: Cluster, name: str, address: str) -> None:
        """Serve the node *name*."""
        self.cluster = cluster
        self.name = name
        self.address = address
        self.is_alive = True
        self.runs: dict[str, PodRun] = {}
        self._addresses: dict[str, str] = {}

    def hear(self, pod: Object) -> None:
        """Handle a pod that is bound to this node."""
        uid = pod["metadata"]["uid"]
        run = self.runs.get(uid)
        if not self.is_alive:
            return
        if run is None:
            if not is_over(pod) and not is_going(pod):
                self._admit(pod)
            elif is_going(pod) and not is_over(pod):
                run = self.runs[uid] = PodRun(self, pod)
                run.stop(0)
            return
        run.pod = pod
        if is_going(pod):
            if run.done and not run.leaving:
                self._leave(run)
            elif run.done:
                pass
            elif run.asked_s is None or pod["metadata"]["deletionGracePeriodSeconds"] < run.asked_s:
                run.asked_s = pod["metadata"]["deletionGracePeriodSeconds"]
                run.stop(run.asked_s)
        elif not run.done:
            self.cluster.resizer.look(self, run)

    def gone(self, uid: str) -> None:
        """The object was deleted: kill its running containers."""
        run = self.runs.pop(uid, None)
        if run is not None and self.is_alive:
            if not run.done and not run.stopping:
                run.tell_killing()
            run.abandon()
        self._room()
        self.cluster.logs.forget(uid)
        if self.cluster.executor is not None:
            self.cluster.executor.forget(uid)

    def finished(self, run: PodRun) -> None:
        """A pod has ended: free its resources, and remove its object if it is deleted."""
        self._room()
        if is_going(run.pod):
            self._leave(run)

    def _leave(self, run: PodRun) -> None:
        """Remove the object of a deleted pod, a moment after its end."""
        run.leaving = True
        wait = self.cluster.pace.remove_s
        if wait:
            self.cluster.clock.after(wait, run.remove)
        else:
            run.remove()

    def _room(self) -> None:
        """Retry deferred resizes, since resources may be free."""
        for run in self.runs.values():
            if condition(run.pod, "PodResizePending") is not None:
                self.cluster.queue.call(
                    lambda run=run: None if run.done else self.cluster.resizer.look(self, run)
                )

    def _admit(self, pod: Object) -> None:
        refusal = self._refusal(pod)
        if refusal is None:
            run = self.runs[pod["metadata"]["uid"]] = PodRun(self, pod)
            run.begin()
            return
        self._reject(pod, *refusal)

    def _reject(self, pod: Object, reason: str, message: str) -> None:
        """Record that the pod was refused."""
        text = f"Pod was rejected: {message}"
        now = self.cluster.clock.now()

        def write(item: Object) -> None:
            item["status"] = {
                "phase": "Failed", "reason": reason, "message": text, "startTime": stamp(now),
                "qosClass": item["status"].get("qosClass", "BestEffort"),
            }  # fmt: skip

        self.cluster.record(
            pod, reason, text.removeprefix("Pod was rejected: "), warning=True, host=self.name
        )
        self.cluster.store.edit(PODS, pod, write)

    def _refusal(self, pod: Object) -> tuple[str, str] | None:
        """Why the kubelet refuses a pod: reason and message, or None."""
        ordered = self.cluster.rejections.take(self.name, pod)
        if ordered is not None:
            return ordered
        node = self.cluster.node_object(self.name)
        if node is None:
            return None
        if not fitting.affinity_holds(pod, node):
            return (
                "NodeAffinity",
                "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
            )
        allocatable = node["status"].get("allocatable") or {}
        others = [run.pod for run in self.runs.values() if not run.done]
        for name, amount in pod_requests(pod).items():
            used = sum((pod_requests(other).get(name, 0) for other in others), start=quantity("0"))
            capacity = quantity(allocatable.get(name, "0"))
            if amount and amount + used > capacity:
                scale = 1000 if name == "cpu" else 1
                numbers = [said(value * scale) for value in (amount, used, capacity)]
                text = (
                    f"Node didn't have enough resource: {name}, requested: {numbers[0]}, used: {numbers[1]}, "
                    f"capacity: {numbers[2]}"
                )
                return f"OutOf{name}", text
        return None

    def addresses(self, pod: Object, *, start: bool, address: bool) -> Object:
        """Host address, start time and, once there is a sandbox, the pod's own address."""
        found: Object = {"hostIP": self.address, "hostIPs": [{"ip": self.address}]}
        found["startTime"] = pod["status"].get("startTime") or stamp(self.cluster.clock.now())
        if address and not start:
            uid = pod["metadata"]["uid"]
            own = self._addresses.setdefault(uid, self.cluster.next_address())
            if pod["spec"].get("hostNetwork"):
                own = self.address
            found |= {"podIP": own, "podIPs": [{"ip": own}]}
        return found

    def silence(self) -> None:
        """Report nothing from now on; containers keep running."""
        self.is_alive = False

    def crash(self) -> None:
        """The machine is off: containers die with it, and nothing is reported."""
        self.is_alive = False
        for run in self.runs.values():
            run.abandon()
        self.runs.clear()

    def restart(self) -> None:
        """Admit every pod again, as after a kubelet restart: a refused pod fails although it runs.

        Source: kubelet, HandlePodAdditions; a refused pod loses its containers.
        """
        for uid, run in list(self.runs.items()):
            if run.done or run.stopping:
                continue
            del self.runs[uid]  # its own requests do not count against it
            refusal = self._refusal(run.pod)
            if refusal is None:
                self.runs[uid] = run
                continue
            run.abandon()
            self._reject(run.pod, *refusal)

    def revive(self) -> None:
        """Report again: send events and carry out requests of the meantime."""
        self.is_alive = True
        for uid, run in list(self.runs.items()):
            found = self.cluster.store.find(uid)
            if found is None:
                self.runs.pop(uid)
                run.abandon()
                continue
            run.pod = found[1]
            for one in run.containers:
                if one.exit_code is not None and not run.done:
                    run._after_end(one)
                    break
            else:
                run.show()
            self.hear(found[1])
        for pod in self.cluster.store.all(PODS):
            if pod["spec"].get("nodeName") == self.name:
                self.hear(pod)
