"""Pure rules of the scheduler: does a pod fit a node, and if not, why."""

from __future__ import annotations

from decimal import Decimal

from fakes.kubernetes.objects import Object, pod_requests, quantity
from fakes.kubernetes.selectors import selector_test, term_holds

Amounts = dict[str, Decimal]


def tolerates(pod: Object, taint: Object) -> bool:
    """Return whether a toleration of *pod* covers *taint*."""
    return any(covers(one, taint) for one in pod["spec"].get("tolerations") or ())


def covers(toleration: Object, taint: Object) -> bool:
    """Return whether one toleration covers a taint."""
    if toleration.get("effect") not in {None, "", taint["effect"]}:
        return False
    if toleration.get("key") not in {None, "", taint["key"]}:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")


def affinity_holds(pod: Object, node: Object) -> bool:
    """Return whether the node matches nodeSelector and required node affinity."""
    labels = node["metadata"].get("labels") or {}
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    rules = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not rules:
        return True
    name = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(term_holds(one, labels) for one in term.get("matchExpressions") or ())
        and all(term_holds(one, name) for one in term.get("matchFields") or ())
        and bool(term.get("matchExpressions") or term.get("matchFields"))
        for term in rules["nodeSelectorTerms"]
    )


def preference(pod: Object, node: Object) -> int:
    """Weight of the preferred node affinity terms that match."""
    labels = node["metadata"].get("labels") or {}
    rules = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution"
    )
    return sum(
        rule["weight"]
        for rule in rules or ()
        if all(term_holds(one, labels) for one in rule["preference"].get("matchExpressions") or ())
    )


def static_refusal(pod: Object, node: Object) -> str:
    """Why the node cannot take the pod without changes (preemption does not help); empty if it can."""
    if node["spec"].get("unschedulable") and not tolerates(
        pod, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return "node(s) were unschedulable"
    for taint in node["spec"].get("taints") or ():
        if taint["key"] == "node.kubernetes.io/unschedulable" and node["spec"].get("unschedulable"):
            continue
        if taint["effect"] in {"NoSchedule", "NoExecute"} and not tolerates(pod, taint):
            return "node(s) had untolerated taint(s)"
    if not affinity_holds(pod, node):
        return "node(s) didn't match Pod's node affinity/selector"
    return ""


def lacking(pod: Object, node: Object, used: Amounts, count: int) -> list[str]:
    """Names of the resources that are short on *node*, with *used* and *count* pods on it."""
    allocatable = node["status"].get("allocatable") or {}
    short = [
        name
        for name, amount in pod_requests(pod).items()
        if amount and amount > quantity(allocatable.get(name, "0")) - used.get(name, Decimal(0))
    ]
    if count + 1 > quantity(allocatable.get("pods", "110")):
        short.append("pods")
    return sorted(short)


def never_enough(pod: Object, node: Object) -> bool:
    """Return whether even the empty node is too small."""
    return bool(lacking(pod, node, {}, 0))


def _terms(pod: Object, kind: str) -> list[Object]:
    rules = (pod["spec"].get("affinity") or {}).get(kind) or {}
    return rules.get("requiredDuringSchedulingIgnoredDuringExecution") or []


def _selected(term: Object, pod: Object, other: Object) -> bool:
    namespaces = term.get("namespaces") or [pod["metadata"]["namespace"]]
    if other["metadata"]["namespace"] not in namespaces:
        return False
    return selector_test(term.get("labelSelector"))(other["metadata"].get("labels") or {})


def neighbours_refuse(pod: Object, node: Object, nodes: dict[str, Object], others: list[Object]) -> str:
    """Check required pod affinity and anti-affinity, of the pod and of those already placed."""
    labels = node["metadata"].get("labels") or {}

    def near(other: Object, key: str) -> bool:
        there = nodes.get(other["spec"].get("nodeName", ""))
        return (
            there is not None
            and key in labels
            and (there["metadata"].get("labels") or {}).get(key) == labels[key]
        )

    for term in _terms(pod, "podAntiAffinity"):
        if any(_selected(term, pod, other) and near(other, term["topologyKey"]) for other in others):
            return "node(s) didn't match pod anti-affinity rules"
    for other in others:
        for term in _terms(other, "podAntiAffinity"):
            if _selected(term, other, pod) and near(other, term["topologyKey"]):
                return "node(s) didn't satisfy existing pods anti-affinity rules"
    for term in _terms(pod, "podAffinity"):
        matching = [other for other in others if _selected(term, pod, other)]
        itself = not matching and _selected(term, pod, pod)
        if not itself and not any(near(other, term["topologyKey"]) for other in matching):
            return "node(s) didn't match pod affinity rules"
    return ""


def spread_refuses(pod: Object, node: Object, nodes: dict[str, Object], others: list[Object]) -> str:
    """Check topologySpreadConstraints with DoNotSchedule."""
    for rule in pod["spec"].get("topologySpreadConstraints") or ():
        if rule.get("whenUnsatisfiable", "DoNotSchedule") != "DoNotSchedule":
            continue
        key, chosen = rule["topologyKey"], selector_test(rule.get("labelSelector"))
        domains = {
            one["metadata"]["labels"][key]: 0
            for one in nodes.values()
            if key in (one["metadata"].get("labels") or {}) and affinity_holds(pod, one)
        }
        here = (node["metadata"].get("labels") or {}).get(key)
        if here is None:
            return "node(s) didn't match pod topology spread constraints (missing required label)"
        for other in others:
            there = nodes.get(other["spec"].get("nodeName", ""))
            domain = (there or {"metadata": {}})["metadata"].get("labels", {}).get(key)
            if domain in domains and chosen(other["metadata"].get("labels") or {}):
                domains[domain] += 1
        itself = 1 if chosen(pod["metadata"].get("labels") or {}) else 0
        if domains[here] + itself - min(domains.values()) > rule.get("maxSkew", 1):
            return "node(s) didn't match pod topology spread constraints"
    return ""


def sentence(total: int, reasons: dict[str, int]) -> str:
    """Write ``0/5 nodes are available: 1 X, 4 Y.``, sorted as the scheduler sorts."""
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    return f"0/{total} nodes are available: {listed}."
