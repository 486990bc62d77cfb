"""DELETE: preconditions, grace periods, propagation policies."""

from __future__ import annotations

from typing import Any

from fakes.kubernetes import errors
from fakes.kubernetes.objects import Object, is_going, is_over, stamp
from fakes.kubernetes.resources import JOBS, PODS, Resource
from fakes.kubernetes.store import Store

POLICIES = ("Foreground", "Background", "Orphan")
WARNING = (
    '299 - "child pods are preserved by default when jobs are deleted; set '
    "propagationPolicy=Background to remove "
    'them or set propagationPolicy=Orphan to suppress this warning"'
)


def check_options(resource: Resource, item: Object, options: Object) -> None:
    """Refuse an unknown policy (422) and a failed precondition (409)."""
    policy = options.get("propagationPolicy")
    if policy is not None and policy not in POLICIES:
        shown = f'"{policy}": supported values: "Foreground", "Background", "Orphan", "nil"'
        fault = {
            "reason": "FieldValueNotSupported",
            "message": f"Unsupported value: {shown}",
            "field": "propagationPolicy",
        }
        raise errors.invalid("DeleteOptions.meta.k8s.io", "", [fault])
    wanted = options.get("preconditions") or {}
    meta = item["metadata"]
    if wanted.get("uid") not in {None, meta["uid"]}:
        raise errors.precondition(resource, meta["name"], "UID", wanted["uid"], meta["uid"])
    if wanted.get("resourceVersion") not in {None, meta["resourceVersion"]}:
        found = meta["resourceVersion"]
        raise errors.precondition(resource, meta["name"], "ResourceVersion", wanted["resourceVersion"], found)


def delete(store: Store, resource: Resource, item: Object, options: Object) -> Object:
    """Delete *item* or start to; returns the body of the answer: the object, or a Status."""
    if resource is PODS:
        return _delete_pod(store, item, options.get("gracePeriodSeconds"))
    policy = options.get("propagationPolicy") or ("Orphan" if resource is JOBS else "Background")
    finalizer = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(policy)
    held = bool(item["metadata"].get("finalizers")) or finalizer is not None
    if not held and resource.plural != "namespaces":
        store.remove(resource, item)
        return success(resource, item)

    def mark(fresh: Object) -> None:
        meta = fresh["metadata"]
        meta.setdefault("deletionTimestamp", stamp(store.clock.now()))
        meta["deletionGracePeriodSeconds"] = 0
        if finalizer and finalizer not in meta.get("finalizers", []):
            meta["finalizers"] = [*meta.get("finalizers", []), finalizer]
        if resource.plural == "namespaces":
            meta["finalizers"] = [*meta.get("finalizers", []), "kubernetes"]
            fresh.setdefault("status", {})["phase"] = "Terminating"

    return store.edit(resource, item, mark) or success(resource, item)


def _delete_pod(store: Store, pod: Object, grace_s: int | None) -> Object:
    """Mark a pod with its grace period; one that never ran, or has ended, is removed at once."""
    if grace_s is None:
        grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
    if not pod["spec"].get("nodeName") or is_over(pod):
        grace_s = 0
    if is_going(pod) and grace_s >= pod["metadata"].get("deletionGracePeriodSeconds", 0):
        return pod

    def mark(fresh: Object) -> None:
        fresh["metadata"]["deletionTimestamp"] = stamp(store.clock.now() + grace_s)
        fresh["metadata"]["deletionGracePeriodSeconds"] = grace_s

    return store.edit(PODS, pod, mark) or pod


def success(resource: Resource, item: Object) -> dict[str, Any]:
    """The Status that answers a finished delete."""
    meta = item["metadata"]
    details = {"name": meta["name"], "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {key: value for key, value in details.items() if value},
    }
