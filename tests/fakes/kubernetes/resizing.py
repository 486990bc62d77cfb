"""The resize subresource of pods: which changes are valid, and what the kubelet does with them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING

from fakes.kubernetes.defaults import qos_class
from fakes.kubernetes.errors import cause, forbidden, invalid
from fakes.kubernetes.objects import Object, clone, condition, pod_requests, quantity, set_condition, stamp
from fakes.kubernetes.resources import NODES, PODS
from fakes.kubernetes.store import Store

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster
    from fakes.kubernetes.kubelet import Kubelet
    from fakes.kubernetes.podrun import PodRun
    from fakes.kubernetes.podstatus import Container


def resize(store: Store, old: Object, fresh: Object) -> None:
    """Apply only resources of *fresh*; refuse what no node of its kind could do (403, 422)."""
    name = old["metadata"]["name"]
    wanted = {one["name"]: one.get("resources") or {} for one in fresh["spec"]["containers"]}
    fresh["spec"] = clone(old["spec"])
    for container in fresh["spec"]["containers"]:
        before = container.get("resources") or {}
        after = wanted.get(container["name"], before)
        if _others(before) != _others(after):
            message = "only cpu and memory resources are mutable"
            raise invalid("Pod", name, [cause("spec", "FieldValueForbidden", message)])
        container["resources"] = clone(after)
    if qos_class(fresh["spec"]) != qos_class(old["spec"]):
        message = "Pod QOS Class may not change as a result of resizing"
        shown = f'"{qos_class(old["spec"])}"'
        raise invalid("Pod", name, [cause("spec", "FieldValueInvalid", message, shown)])
    _check_node(store, fresh)


def _others(resources: Object) -> dict[str, Decimal]:
    return {
        f"{part}.{name}": quantity(text)
        for part in ("requests", "limits")
        for name, text in (resources.get(part) or {}).items()
        if name not in {"cpu", "memory"}
    }


def _check_node(store: Store, pod: Object) -> None:
    node = store.get(NODES, "", pod["spec"].get("nodeName", ""))
    if node is None:
        return
    allocatable = node["status"].get("allocatable") or {}
    for name, amount in pod_requests(pod).items():
        most = quantity(allocatable.get(name, "0"))
        if amount > most:
            scale = 1000 if name == "cpu" else 1
            why = (
                f"node didn't have enough allocatable resources: {name}, requested: {int(amount * scale)}, "
                f"allocatable: {int(most * scale)}"
            )
            raise forbidden(PODS, pod["metadata"]["name"], why, [{"reason": "NodeCapacity"}])


class Resizer:
    """The kubelet's part: a request is done, waits (Deferred), or is impossible (Infeasible)."""

    def __init__(self, cluster: Cluster) -> None:
        """Work on *cluster*."""
        self._cluster = cluster
        self.infeasible: set[str] = set()
        """Nodes whose kubelet cannot resize (static CPU manager)."""
        self._busy: set[str] = set()

    def look(self, kubelet: Kubelet, run: PodRun) -> None:
        """Compare the pod's requests with the resources of its containers."""
        changed = [one for one in run.containers if one.is_running and self._differs(run, one)]
        if run.uid in self._busy:
            return
        if not changed:
            self._set(run, None)
            return
        told = self._told(run)
        if kubelet.name in self.infeasible and run.pod["status"].get("qosClass") == "Guaranteed":
            text = 'Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static"'
            self._pend(run, "Infeasible", "Infeasible", text, told)
            return
        short = self._short(kubelet, run)
        if short:
            text = f"Node didn't have enough resource: {short}"
            self._pend(run, "Deferred", f"OutOf{short.partition(',')[0]}", text, told)
            return
        self._busy.add(run.uid)
        self._set(run, {"type": "PodResizeInProgress", "status": "True"})
        run.say("ResizeStarted", f"Pod resize started: {told}")
        self._cluster.clock.after(self._cluster.pace.resize_s, lambda: self._finish(kubelet, run, told))

    def _finish(self, kubelet: Kubelet, run: PodRun, told: str) -> None:
        self._busy.discard(run.uid)
        if run.done or run.stopping:
            return
        for one in run.containers:
            if one.is_running and self._differs(run, one):
                self._apply(run, one)
        self._set(run, None)
        run.show()
        run.say("ResizeCompleted", f"Pod resize completed: {told}")
        self.look(kubelet, run)

    def _told(self, run: PodRun) -> str:
        """The request in the words of events."""
        containers = [
            {"name": one["name"], "resources": one.get("resources") or {}}
            for one in run.pod["spec"]["containers"]
        ]
        told = {"containers": containers, "generation": run.pod["metadata"].get("generation", 1)}
        return json.dumps(told, separators=(",", ":"))

    def _differs(self, run: PodRun, one: Container) -> bool:
        return _spec_of(run, one).get("resources") != (one.resources or None) and bool(
            _spec_of(run, one).get("resources") or one.resources
        )

    def _short(self, kubelet: Kubelet, run: PodRun) -> str:
        node = self._cluster.node_object(kubelet.name)
        if node is None:
            return ""
        allocatable = node["status"].get("allocatable") or {}
        others = [other.pod for other in kubelet.runs.values() if other is not run and not other.done]
        for name, amount in pod_requests(run.pod).items():
            used = sum((pod_requests(other).get(name, Decimal(0)) for other in others), start=Decimal(0))
            capacity = quantity(allocatable.get(name, "0"))
            if amount + used > capacity:
                scale = 1000 if name == "cpu" else 1
                asked, taken, most = (int(value * scale) for value in (amount, used, capacity))
                return f"{name}, requested: {asked}, used: {taken}, capacity: {most}"
        return ""

    def _apply(self, run: PodRun, one: Container) -> None:
        spec = _spec_of(run, one)
        policies = {rule["resourceName"]: rule["restartPolicy"] for rule in spec.get("resizePolicy") or ()}
        before, after = one.resources, spec.get("resources") or {}
        one.spec = spec
        one.resources = clone(after)
        for name in ("cpu", "memory"):
            if policies.get(name) == "RestartContainer" and _amount(before, name) != _amount(after, name):
                text = f"Container {one.name} resize requires restart"
                run.say("Killing", text, container=one)
                one.restarts += 1
                one.state = {"running": {"startedAt": stamp(self._cluster.clock.now())}}

    def _pend(self, run: PodRun, reason: str, event: str, message: str, told: str) -> None:
        pending = condition(run.pod, "PodResizePending")
        if pending is not None and pending.get("reason") == reason:
            return
        text = f'Pod resize {event}: {told[:-1]},"error":{json.dumps(message)}}}'
        run.say(f"Resize{reason}", text, warning=True)
        self._set(run, {"type": "PodResizePending", "status": "True", "reason": reason, "message": message})

    def _set(self, run: PodRun, fresh: Object | None) -> None:
        """Replace all resize conditions by *fresh*."""
        found = self._cluster.store.find(run.uid)
        if found is None:
            return
        now = self._cluster.clock.now()

        def write(item: Object) -> None:
            kinds = {"PodResizePending", "PodResizeInProgress"}
            kept = [one for one in item["status"].get("conditions") or () if one["type"] not in kinds]
            if len(kept) != len(item["status"].get("conditions") or ()):
                item["status"]["conditions"] = kept
            if fresh is not None:
                generation = item["metadata"].get("generation", 1)
                set_condition(item, fresh | {"observedGeneration": generation}, now)
                item["status"]["observedGeneration"] = generation

        run.pod = self._cluster.store.edit(PODS, found[1], write) or run.pod


def _spec_of(run: PodRun, one: Container) -> Object:
    spec = run.pod["spec"]
    every = [*(spec.get("initContainers") or []), *spec["containers"]]
    return next(other for other in every if other["name"] == one.name)


def _amount(resources: Object, name: str) -> tuple[str | None, str | None]:
    return (resources.get("requests") or {}).get(name), (resources.get("limits") or {}).get(name)
