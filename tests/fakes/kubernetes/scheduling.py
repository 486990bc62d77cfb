"""The scheduler: binds pods to nodes, records why it cannot, and preempts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from fakes.kubernetes import fitting
from fakes.kubernetes.objects import Object, is_going, is_over, pod_requests, set_condition
from fakes.kubernetes.resources import CLAIMS, NODES, PODS
from fakes.kubernetes.store import Change
from fakes.kubernetes.subresources import disrupt

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster


@dataclass(slots=True)
class _Look:
    """The result of one pass over the nodes for a pod."""

    fits: list[Object]
    reasons: Counter[str]
    helpful: list[Object]


class Scheduler:
    """Checks all waiting pods whenever a pod, node or claim changes."""

    def __init__(self, cluster: Cluster) -> None:
        """Work on *cluster*."""
        self._cluster = cluster
        self._store = cluster.store
        self._waiting: dict[str, None] = {}
        self._placed: dict[str, dict[str, Object]] = {}
        self._asked: dict[str, dict[str, Decimal]] = {}
        self._used: dict[str, dict[str, Decimal]] = {}
        self._picky: set[str] = set()
        self._nominated: dict[str, list[Object]] = {}
        self._said: dict[str, str] = {}

    def hear(self, change: Change) -> None:
        """Track waiting and bound pods; queue a pass when a pod may fit now."""
        if change.resource is PODS:
            self._track(change)
        elif change.resource is NODES or change.resource is CLAIMS:
            self._cluster.queue.add("schedule", "")

    def _track(self, change: Change) -> None:
        pod, uid = change.item, change.item["metadata"]["uid"]
        gone = change.kind == "DELETED" or is_over(pod)
        node = pod["spec"].get("nodeName")
        if gone or node or is_going(pod):
            self._waiting.pop(uid, None)
            self._said.pop(uid, None)
        elif not pod["spec"].get("schedulingGates"):
            self._waiting[uid] = None
            self._cluster.queue.add("schedule", "")
        if node and not gone:
            self._put(node, uid, pod)
        elif node and self._take(node, uid) and self._waiting:
            self._cluster.queue.add("schedule", "")

    def _put(self, node: str, uid: str, pod: Object) -> None:
        """Add a pod to a node."""
        self._take(node, uid)
        asked = pod_requests(pod)
        self._placed.setdefault(node, {})[uid] = pod
        self._asked[uid] = asked
        used = self._used.setdefault(node, {})
        for name, amount in asked.items():
            used[name] = used.get(name, Decimal(0)) + amount
        if (pod["spec"].get("affinity") or {}).get("podAntiAffinity"):
            self._picky.add(uid)

    def _take(self, node: str, uid: str) -> bool:
        """Remove it from its node; False if it was not there."""
        if self._placed.get(node, {}).pop(uid, None) is None:
            return False
        for name, amount in self._asked.pop(uid).items():
            self._used[node][name] -= amount
        self._picky.discard(uid)
        return True

    def on_node(self, name: str) -> list[Object]:
        """Pods that use resources of a node."""
        return list(self._placed.get(name, {}).values())

    def run(self) -> None:
        """One pass: highest priority first, then oldest."""
        found = [self._store.find(uid) for uid in tuple(self._waiting)]
        pods = [one[1] for one in found if one is not None]
        pods = [pod for pod in pods if not pod["spec"].get("nodeName") and not is_going(pod)]
        pods.sort(key=lambda pod: (-pod["spec"].get("priority", 0), int(pod["metadata"]["resourceVersion"])))
        nodes = {node["metadata"]["name"]: node for node in self._store.all(NODES)}
        self._nominated = {}
        for pod in pods:
            if pod["status"].get("nominatedNodeName"):
                self._nominated.setdefault(pod["status"]["nominatedNodeName"], []).append(pod)
        for pod in pods:
            if pod["spec"].get("schedulerName", "default-scheduler") == "default-scheduler":
                self._place(pod, nodes)

    def _place(self, pod: Object, nodes: dict[str, Object]) -> None:
        absent = self._absent_claim(pod)
        if absent:
            text = (
                f'0/{len(nodes)} nodes are available: persistentvolumeclaim "{absent}" not found. not found'
            )
            self._refuse(pod, text, "")
            return
        if self._has_unbound_claim(pod):
            text = f"0/{len(nodes)} nodes are available: pod has unbound immediate PersistentVolumeClaims."
            self._refuse(pod, text, " not found")
            return
        if not nodes:
            self._refuse(pod, "no nodes available to schedule pods", "")
            return
        look = self._look(pod, nodes)
        if look.fits:
            node = max(look.fits, key=lambda one: self._score(pod, one))
            self._cluster.bind(pod, node["metadata"]["name"])
            return
        message = fitting.sentence(len(nodes), look.reasons)
        self._preempt_or_refuse(pod, nodes, look, message)

    def _has_unbound_claim(self, pod: Object) -> bool:
        claims = (self._store.get(CLAIMS, pod["metadata"]["namespace"], name) for name in claims_of(pod))
        return any((claim or {}).get("status", {}).get("phase") != "Bound" for claim in claims)

    def _is_out_of_reach(self, pod: Object, node: Object) -> bool:
        """Return whether a volume of the pod is bound to other nodes."""
        labels = (node["metadata"].get("labels") or {}).items()
        wanted = (self._cluster.volume_labels.get(name, {}) for name in claims_of(pod))
        return any(not one.items() <= labels for one in wanted)

    def _absent_claim(self, pod: Object) -> str:
        for name in claims_of(pod):
            if self._store.get(CLAIMS, pod["metadata"]["namespace"], name) is None:
                return str(name)
        return ""

    def _look(self, pod: Object, nodes: dict[str, Object]) -> _Look:
        look = _Look([], Counter(), [])
        fussy = (pod["spec"].get("affinity") or {}).keys() & {"podAffinity", "podAntiAffinity"}
        others = None
        if fussy or self._picky or pod["spec"].get("topologySpreadConstraints"):
            others = [other for placed in self._placed.values() for other in placed.values()]
        for node in nodes.values():
            refusals = self._refusals(pod, node, nodes, others)
            if not refusals:
                look.fits.append(node)
                continue
            look.reasons.update(refusals)
            if not fitting.static_refusal(pod, node) and not fitting.never_enough(pod, node):
                look.helpful.append(node)
        return look

    def _refusals(
        self, pod: Object, node: Object, nodes: dict[str, Object], others: list[Object] | None
    ) -> list[str]:
        static = fitting.static_refusal(pod, node)
        if static:
            return [static]
        if self._is_out_of_reach(pod, node):
            return ["node(s) didn't match PersistentVolume's node affinity"]
        name = node["metadata"]["name"]
        used, count = self._used.get(name, {}), len(self._placed.get(name, {}))
        if self._nominated.get(name):
            placed = self._on(node, pod)
            used, count = _sum(placed), len(placed)
        short = fitting.lacking(pod, node, used, count)
        if short:
            return ["Too many pods" if one == "pods" else f"Insufficient {one}" for one in short]
        if others is None:
            return []
        rule = fitting.neighbours_refuse(pod, node, nodes, others) or fitting.spread_refuses(
            pod, node, nodes, others
        )
        return [rule] if rule else []

    def _on(self, node: Object, pod: Object) -> list[Object]:
        """Pods on *node*, with those of at least the same priority that wait for it after a preemption."""
        name = node["metadata"]["name"]
        priority = pod["spec"].get("priority", 0)
        nominated = [
            other
            for other in self._nominated.get(name, ())
            if other["metadata"]["uid"] != pod["metadata"]["uid"]
            and other["spec"].get("priority", 0) >= priority
        ]
        return [*self._placed.get(name, {}).values(), *nominated]

    def _score(self, pod: Object, node: Object) -> tuple[int, Decimal, str]:
        """Preferred affinity, then the node with the fewest pods, then the first name."""
        placed = self._placed.get(node["metadata"]["name"], {})
        inverse = "".join(chr(0x10FFFF - ord(letter)) for letter in node["metadata"]["name"])
        return fitting.preference(pod, node), Decimal(-len(placed)), inverse

    def _preempt_or_refuse(self, pod: Object, nodes: dict[str, Object], look: _Look, message: str) -> None:
        own = self._placed.get(pod["status"].get("nominatedNodeName", ""), {})
        priority = pod["spec"].get("priority", 0)
        if any(is_going(other) and other["spec"].get("priority", 0) < priority for other in own.values()):
            tail = "not eligible due to a terminating pod on the nominated node."
            self._refuse(pod, message, f" no new claims to deallocate, preemption: {tail}")
            return
        choice = self._victims(pod, look) if pod["spec"].get("preemptionPolicy") != "Never" else None
        if choice is None:
            helpless = len(nodes) - len(look.helpful)
            reasons = Counter({"Preemption is not helpful for scheduling": helpless} if helpless else {})
            if look.helpful:
                reasons["No preemption victims found for incoming pod"] = len(look.helpful)
            tail = fitting.sentence(len(nodes), reasons)
            self._refuse(pod, message, f" no new claims to deallocate, preemption: {tail}")
            return
        node, victims = choice
        self._refuse(pod, message, "", nominated=node["metadata"]["name"])
        for victim in victims:
            text = f"Preempted by pod {pod['metadata']['uid']} on node {node['metadata']['name']}"
            self._cluster.record(victim, "Preempted", text, component="default-scheduler")
            why = "default-scheduler: preempting to accommodate a higher priority pod"
            disrupt(self._cluster, victim, "PreemptionByScheduler", why)

    def _victims(self, pod: Object, look: _Look) -> tuple[Object, list[Object]] | None:
        """The node with the least important victims, and these pods; None if preemption does not help."""
        best: tuple[tuple[int, int, str], Object, list[Object]] | None = None
        priority = pod["spec"].get("priority", 0)
        for node in look.helpful:
            placed = self._on(node, pod)
            lower = [
                other
                for other in placed
                if other["spec"].get("priority", 0) < priority and not is_going(other)
            ]
            lower.sort(key=lambda other: other["spec"].get("priority", 0))
            victims: list[Object] = []
            kept = list(placed)
            while fitting.lacking(pod, node, _sum(kept), len(kept)) and lower:
                victims.append(lower.pop(0))
                kept.remove(victims[-1])
            if fitting.lacking(pod, node, _sum(kept), len(kept)) or not victims:
                continue
            rank = (
                max(one["spec"].get("priority", 0) for one in victims),
                len(victims),
                node["metadata"]["name"],
            )
            if best is None or rank < best[0]:
                best = (rank, node, victims)
        return (best[1], best[2]) if best is not None else None

    def _refuse(self, pod: Object, message: str, tail: str, nominated: str = "") -> None:
        """Write PodScheduled=False and an event, once for each new message."""
        text = message + tail
        uid = pod["metadata"]["uid"]
        if self._said.get(uid) == text:
            return
        self._said[uid] = text
        now = self._cluster.clock.now()
        fresh = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}

        def write(item: Object) -> None:
            set_condition(item, fresh, now)
            if nominated:
                item["status"]["nominatedNodeName"] = nominated

        self._cluster.record(pod, "FailedScheduling", text, warning=True, component="default-scheduler")
        if nominated:
            self._nominated.setdefault(nominated, []).append(pod)
        self._store.edit(PODS, pod, write)


def claims_of(pod: Object) -> list[str]:
    """Names of the claims that the pod mounts."""
    found = [volume.get("persistentVolumeClaim") or {} for volume in pod["spec"].get("volumes") or ()]
    return [str(one["claimName"]) for one in found if one.get("claimName")]


def _sum(pods: list[Object]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for pod in pods:
        for name, amount in pod_requests(pod).items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total
