"""Requests other than plain reads and writes: bindings, evictions, tokens, access reviews."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fakes.kubernetes import deletion, errors
from fakes.kubernetes.access import User, account_user
from fakes.kubernetes.bodies import decoded
from fakes.kubernetes.objects import Object, clone, holds, is_going, is_over, quantity, set_condition, stamp
from fakes.kubernetes.resources import ACCOUNTS, BUDGETS, PODS
from fakes.kubernetes.routing import Call
from fakes.kubernetes.selectors import selector_test

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

Answer = tuple[int, Any, dict[str, str]]

CREATED = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def special(cluster: Cluster, call: Call, user: User, body: bytes) -> Answer | None:
    """Answer one of these requests; None for all others."""
    if call.verb != "create":
        return None
    handler = _HANDLERS.get(call.what)
    if handler is not None:
        return handler(cluster, call, decoded(call, body or b"{}"))
    if call.resource.kind == "SelfSubjectAccessReview":
        return 201, cluster.access.review(user, decoded(call, body)), {}
    if call.resource.kind == "SelfSubjectRulesReview":
        return 201, cluster.access.rules_review(user, decoded(call, body)), {}
    return None


def _bind(cluster: Cluster, call: Call, body: Object) -> Answer:
    pod = cluster.api.read(PODS, call.namespace, call.name)
    cluster.bind(pod, body["target"]["name"])
    return 201, clone(CREATED), {}


def _token(cluster: Cluster, call: Call, body: Object) -> Answer:
    cluster.api.read(ACCOUNTS, call.namespace, call.name)
    lifetime = (body.get("spec") or {}).get("expirationSeconds") or 3600
    token = cluster.access.issue(account_user(call.namespace, call.name), lifetime)
    until = stamp(cluster.clock.now() + lifetime)
    body = {**body, "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
    return 201, {**body, "status": {"token": token, "expirationTimestamp": until}}, {}


def _evict(cluster: Cluster, call: Call, body: Object) -> Answer:
    pod = cluster.api.read(PODS, call.namespace, call.name)
    if not is_over(pod) and not is_going(pod):
        _check_budgets(cluster, pod)
    evict(cluster, pod, (body.get("deleteOptions") or {}).get("gracePeriodSeconds"))
    return 201, clone(CREATED), {}


def evict(cluster: Cluster, pod: Object, grace_s: int | None = None) -> None:
    """Mark the pod as the eviction API does, and delete it gracefully."""
    disrupt(cluster, pod, "EvictionByEvictionAPI", "Eviction API: evicting", grace_s)


def disrupt(cluster: Cluster, pod: Object, reason: str, message: str, grace_s: int | None = None) -> None:
    """Write a DisruptionTarget condition, then delete the pod: two writes, as in a real cluster."""
    now = cluster.clock.now()
    fresh = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    marked = cluster.store.edit(PODS, pod, lambda item: set_condition(item, fresh, now))
    if marked is not None:
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        deletion.delete(cluster.store, PODS, marked, options)


def _check_budgets(cluster: Cluster, pod: Object) -> None:
    namespace = pod["metadata"]["namespace"]
    for budget in cluster.store.all(BUDGETS, namespace):
        chosen = selector_test(budget["spec"].get("selector"))
        if not chosen(pod["metadata"].get("labels") or {}):
            continue
        covered = [
            one for one in cluster.store.all(PODS, namespace) if chosen(one["metadata"].get("labels") or {})
        ]
        healthy = sum(1 for one in covered if holds(one, "Ready") and not is_going(one))
        needed = _needed(budget["spec"], len(covered))
        if healthy - 1 < needed:
            name = budget["metadata"]["name"]
            text = f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            details = {"causes": [{"reason": "DisruptionBudget", "message": text}]}
            raise errors.ApiError(429, errors.status(429, "TooManyRequests", message, details))


def _needed(spec: Object, total: int) -> int:
    if spec.get("minAvailable") is not None:
        return _scaled(spec["minAvailable"], total)
    return total - _scaled(spec.get("maxUnavailable", 0), total)


def _scaled(value: int | str, total: int) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return -(-total * int(value[:-1]) // 100)
    return int(quantity(value))


_HANDLERS = {
    "pods/binding": _bind,
    "pods/eviction": _evict,
    "serviceaccounts/token": _token,
}
