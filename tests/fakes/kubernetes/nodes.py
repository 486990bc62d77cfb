"""Controllers that watch nodes: silence, taints, evictions, pods without a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.kubernetes import deletion, fitting
from fakes.kubernetes.objects import Object, condition, is_going, is_over, set_condition, stamp
from fakes.kubernetes.resources import NODES, PODS
from fakes.kubernetes.store import Change
from fakes.kubernetes.subresources import disrupt

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

GRACE_S = 50.0
"""Silence until Ready turns Unknown. Source: node-monitor-grace-period, default since 1.32; recorded 50 to
56 s."""
QUARANTINE_S = 48.0
"""Time until pods of a deleted node are collected: 40 s, and up to 20 s until the next check. Source:
gc_controller.go."""
OUT_OF_SERVICE_S = 12.0
"""The same for terminating pods on a node out of service; recorded."""
UNREACHABLE = "node.kubernetes.io/unreachable"
NOT_READY = "node.kubernetes.io/not-ready"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class NodeController:
    """Node lifecycle, taint eviction, and pod garbage collection."""

    def __init__(self, cluster: Cluster) -> None:
        """Work on *cluster*."""
        self._cluster = cluster
        self._store = cluster.store
        self._armed: dict[str, float] = {}

    def hear(self, change: Change) -> None:
        """React to taints, to pods on tainted nodes, and to deleted nodes."""
        if change.resource is NODES:
            name = change.item["metadata"]["name"]
            if change.kind == "DELETED":
                self._cluster.clock.after(QUARANTINE_S, lambda: self._collect(name))
            else:
                before = (change.old or {}).get("spec", {}).get("taints")
                if change.item["spec"].get("taints") != before:
                    self._cluster.queue.add("taints", name)
        elif change.resource is PODS and change.kind != "DELETED":
            node = change.item["spec"].get("nodeName")
            if node and not (change.old or {}).get("spec", {}).get("nodeName"):
                found = self._store.get(NODES, "", node)
                if found is None:
                    self._cluster.clock.after(QUARANTINE_S, lambda: self._collect(node))
                elif found["spec"].get("taints"):
                    self._cluster.queue.add("taints", node)

    def silent(self, name: str) -> None:
        """A node is silent from now on: after the grace period its Ready is Unknown."""
        self._cluster.clock.after(GRACE_S, lambda: self._give_up(name))

    def _give_up(self, name: str) -> None:
        node = self._store.get(NODES, "", name)
        kubelet = self._cluster.kubelets.get(name)
        if node is None or (kubelet is not None and kubelet.is_alive):
            return
        now = self._cluster.clock.now()

        def unknown(item: Object) -> None:
            for one in list(item["status"].get("conditions") or ()):
                fresh = {"type": one["type"], "status": "Unknown", "reason": "NodeStatusUnknown"}
                set_condition(item, fresh | {"message": "Kubelet stopped posting node status."}, now)
                ready = condition(item, one["type"])
                if ready is not None and one.get("lastHeartbeatTime"):
                    ready["lastHeartbeatTime"] = one["lastHeartbeatTime"]

        self._store.edit(NODES, node, unknown)
        for pod in self._pods(name):
            self._store.edit(PODS, pod, lambda item: _unready(item, now))
            self._cluster.record(
                pod, "NodeNotReady", "Node is not ready", warning=True, component="node-controller"
            )
        self.taint(name, UNREACHABLE, "NoSchedule")
        self.taint(name, UNREACHABLE, "NoExecute")

    def back(self, name: str) -> None:
        """A node reports again."""
        node = self._store.get(NODES, "", name)
        if node is None:
            return
        now = self._cluster.clock.now()

        def ready(item: Object) -> None:
            item["status"]["conditions"] = node_conditions(now)
            item["spec"]["taints"] = [
                one for one in item["spec"].get("taints") or () if one["key"] not in {UNREACHABLE, NOT_READY}
            ]
            if not item["spec"]["taints"]:
                del item["spec"]["taints"]

        self._store.edit(NODES, node, ready)

    def taint(self, name: str, key: str, effect: str, value: str = "") -> None:
        """Put a taint on a node."""
        node = self._store.get(NODES, "", name)
        if node is None:
            return
        taint = {"key": key, "effect": effect} | ({"value": value} if value else {})
        if effect == "NoExecute":
            taint["timeAdded"] = stamp(self._cluster.clock.now())

        def add(item: Object) -> None:
            kept = [
                one
                for one in item["spec"].get("taints") or ()
                if (one["key"], one["effect"]) != (key, effect)
            ]
            item["spec"]["taints"] = [*kept, taint]

        self._store.edit(NODES, node, add)

    def untaint(self, name: str, key: str) -> None:
        """Take a taint off a node."""
        node = self._store.get(NODES, "", name)
        if node is None:
            return

        def drop(item: Object) -> None:
            item["spec"]["taints"] = [one for one in item["spec"].get("taints") or () if one["key"] != key]
            if not item["spec"]["taints"]:
                del item["spec"]["taints"]

        self._store.edit(NODES, node, drop)

    def _pods(self, name: str) -> list[Object]:
        return [pod for pod in self._store.all(PODS) if pod["spec"].get("nodeName") == name]

    def look(self, name: str) -> None:
        """Arm the eviction of each pod that does not tolerate the NoExecute taints of its node for ever."""
        node = self._store.get(NODES, "", name)
        taints = [
            one for one in (node or {"spec": {}})["spec"].get("taints") or () if one["effect"] == "NoExecute"
        ]
        now = self._cluster.clock.now()
        for pod in self._pods(name):
            uid = pod["metadata"]["uid"]
            stay = _tolerated_for(pod, taints)
            if not taints or stay is None:
                self._armed.pop(uid, None)
            elif uid not in self._armed and not is_going(pod):
                due = now + stay
                self._armed[uid] = due
                self._cluster.clock.at(due, lambda uid=uid, due=due: self._evict(uid, due))
        if any(one["key"] == OUT_OF_SERVICE for one in (node or {"spec": {}})["spec"].get("taints") or ()):
            self._cluster.clock.after(OUT_OF_SERVICE_S, lambda: self._collect(name, only_going=True))

    def _evict(self, uid: str, due: float) -> None:
        found = self._store.find(uid)
        if self._armed.get(uid) != due or found is None or is_over(found[1]):
            return
        self._armed.pop(uid, None)
        pod = found[1]
        text = f"Marking for deletion Pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
        self._cluster.record(pod, "TaintManagerEviction", text, component="taint-eviction-controller")
        why = "Taint manager: deleting due to NoExecute taint"
        disrupt(self._cluster, pod, "DeletionByTaintManager", why)

    def _collect(self, name: str, *, only_going: bool = False) -> None:
        """Fail and remove pods of deleted nodes (or of nodes out of service)."""
        if not only_going and self._store.get(NODES, "", name) is not None:
            return
        now = self._cluster.clock.now()
        fresh = {
            "type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC",
            "message": "PodGC: node no longer exists",
        }  # fmt: skip

        def fail(item: Object) -> None:
            item["status"]["phase"] = "Failed"
            if condition(item, "DisruptionTarget") is None and not only_going:
                set_condition(item, fresh, now)

        for pod in self._pods(name):
            if only_going and not is_going(pod):
                continue
            failed = pod if is_over(pod) else self._store.edit(PODS, pod, fail)
            if failed is not None:
                deletion.delete(self._store, PODS, failed, {"gracePeriodSeconds": 0})


def _unready(item: Object, now: float) -> None:
    if condition(item, "Ready") is not None:
        set_condition(item, {"type": "Ready", "status": "False"}, now)


def _tolerated_for(pod: Object, taints: list[Object]) -> float | None:
    """Seconds that a pod may stay despite *taints*; None for ever, 0 not at all."""
    least: float | None = None
    for taint in taints:
        covering = [one for one in pod["spec"].get("tolerations") or () if fitting.covers(one, taint)]
        if not covering:
            return 0.0
        for one in covering:
            seconds = one.get("tolerationSeconds")
            if seconds is not None:
                least = float(seconds) if least is None else min(least, float(seconds))
    return least


def node_conditions(now: float) -> list[Object]:
    """Conditions of a healthy node."""
    whole = [
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
    ]
    return [
        {
            "type": kind, "status": status, "lastHeartbeatTime": stamp(now), "lastTransitionTime": stamp(now),
            "reason": reason, "message": message,
        }
        for kind, status, reason, message in whole
    ]  # fmt: skip


def node_info(minor: int) -> Object:
    """The kubelet's report of its machine."""
    blank = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "kubeProxyVersion")
    return dict.fromkeys(blank, "") | {
        "containerRuntimeVersion": "containerd://1.6.20", "kubeletVersion": f"v1.{minor}.2",
        "operatingSystem": "linux", "architecture": "amd64",
    }  # fmt: skip
