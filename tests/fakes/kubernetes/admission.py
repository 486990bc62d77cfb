"""Admission: service accounts, priorities, limit ranges, pod security, quotas."""

from __future__ import annotations

from decimal import Decimal

from fakes.kubernetes.defaults import qos_class
from fakes.kubernetes.errors import forbidden
from fakes.kubernetes.objects import Object, is_over, quantity, said
from fakes.kubernetes.podsecurity import ENFORCE, violations
from fakes.kubernetes.resources import (
    ACCOUNTS,
    LIMIT_RANGES,
    NAMESPACES,
    PODS,
    PRIORITIES,
    QUOTAS,
    Resource,
)
from fakes.kubernetes.store import Store

SYSTEM_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def admit(store: Store, resource: Resource, item: Object, namespace: str) -> None:
    """Complete an object before its creation, or refuse it (403)."""
    if resource is PODS:
        _admit_account(store, item, namespace)
        _admit_priority(store, item)
        _admit_limits(store, item, namespace)
        _admit_security(store, item, namespace)
        item["status"]["qosClass"] = qos_class(item["spec"])
    _admit_quotas(store, resource, item, namespace)


def _admit_account(store: Store, pod: Object, namespace: str) -> None:
    account = pod["spec"]["serviceAccountName"]
    if store.get(ACCOUNTS, namespace, account) is None:
        why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        raise forbidden(PODS, pod["metadata"]["name"], why)


def _admit_priority(store: Store, pod: Object) -> None:
    spec = pod["spec"]
    name = spec.get("priorityClassName")
    if not name:
        chosen = next((one for one in store.each(PRIORITIES) if one.get("globalDefault")), None)
        if chosen is None:
            spec["priority"] = 0
            return
        name = spec["priorityClassName"] = chosen["metadata"]["name"]
    found = store.get(PRIORITIES, "", name)
    if found is None and name not in SYSTEM_PRIORITIES:
        raise forbidden(PODS, pod["metadata"]["name"], f"no PriorityClass with name {name} was found")
    spec["priority"] = found["value"] if found else SYSTEM_PRIORITIES[name]
    spec["preemptionPolicy"] = (found or {}).get("preemptionPolicy", "PreemptLowerPriority")


def _admit_limits(store: Store, pod: Object, namespace: str) -> None:
    """Fill in defaults of a LimitRange, and refuse what is above its maximum."""
    for limits in store.all(LIMIT_RANGES, namespace):
        for rule in limits["spec"].get("limits") or ():
            if rule.get("type") != "Container":
                continue
            for container in pod["spec"]["containers"]:
                _limit(pod, container, rule)


def _limit(pod: Object, container: Object, rule: Object) -> None:
    resources = container.setdefault("resources", {})
    limits = {**(rule.get("default") or {}), **(resources.get("limits") or {})}
    defaults = rule.get("defaultRequest") or rule.get("default") or {}
    requests = {**defaults, **(resources.get("requests") or {})}
    filled = [
        f"{name} {part} for container {container['name']}"
        for part, whole in (("request", requests), ("limit", limits))
        for name in whole
        if name not in (resources.get(f"{part}s") or {})
    ]
    if filled:
        text = "LimitRanger plugin set: " + "; ".join(filled)
        pod["metadata"].setdefault("annotations", {})["kubernetes.io/limit-ranger"] = text
    if limits:
        resources["limits"] = limits
    if requests:
        resources["requests"] = requests
    for name, most in (rule.get("max") or {}).items():
        if name in limits and quantity(limits[name]) > quantity(most):
            why = f"maximum {name} usage per Container is {most}, but limit is {limits[name]}"
            raise forbidden(PODS, pod["metadata"]["name"], why)


def _admit_security(store: Store, pod: Object, namespace: str) -> None:
    labels = (store.get(NAMESPACES, "", namespace) or {}).get("metadata", {}).get("labels") or {}
    level = labels.get(ENFORCE, "privileged")
    if forbids := violations(pod, level):
        why = f'violates PodSecurity "{level}:latest": {forbids}'
        raise forbidden(PODS, pod["metadata"]["name"], why)


def usage_of(resource: Resource, item: Object) -> dict[str, Decimal]:
    """The amounts that one object adds to quotas, by name."""
    counted: dict[str, Decimal] = {f"count/{resource.full}": Decimal(1)}
    if resource is not PODS:
        return counted
    counted["pods"] = Decimal(1)
    for container in item["spec"]["containers"]:
        for part in ("requests", "limits"):
            for name, text in (container.get("resources", {}).get(part) or {}).items():
                key = f"{part}.{name}"
                counted[key] = counted.get(key, Decimal(0)) + quantity(text)
                if part == "requests" and name in {"cpu", "memory"}:
                    counted[name] = counted.get(name, Decimal(0)) + quantity(text)
    return counted


def used_in(store: Store, namespace: str, hard: Object) -> dict[str, Decimal]:
    """The namespace's usage of the names in *hard*; pods that have ended do not count."""
    used = dict.fromkeys(hard, Decimal(0))
    for resource in {PODS} | {one for one in _counted(store) if f"count/{one.full}" in hard}:
        for item in store.each(resource):
            if item["metadata"].get("namespace") != namespace or (resource is PODS and is_over(item)):
                continue
            for name, amount in usage_of(resource, item).items():
                if name in used:
                    used[name] += amount
    return used


def _counted(store: Store) -> set[Resource]:
    return {resource for resource, _key in store.by_uid.values()}


def _admit_quotas(store: Store, resource: Resource, item: Object, namespace: str) -> None:
    for quota in store.all(QUOTAS, namespace) if namespace else ():
        hard = quota["spec"].get("hard") or {}
        asked = {name: amount for name, amount in usage_of(resource, item).items() if name in hard}
        name, title = item["metadata"]["name"], quota["metadata"]["name"]
        if resource is PODS:
            _must_specify(item, hard, title)
        if not asked:
            continue
        used = used_in(store, namespace, hard)
        over = sorted(key for key, amount in asked.items() if used[key] + amount > quantity(hard[key]))
        if over:
            parts = [
                ",".join(f"{key}={text}" for key, text in pairs)
                for pairs in (
                    [(key, said(asked[key], key)) for key in over],
                    [(key, said(used[key], key)) for key in over],
                    [(key, hard[key]) for key in over],
                )
            ]
            why = f"exceeded quota: {title}, requested: {parts[0]}, used: {parts[1]}, limited: {parts[2]}"
            raise forbidden(resource, name, why)


def _must_specify(pod: Object, hard: Object, title: str) -> None:
    missing: dict[str, list[str]] = {}
    for key in ("limits.cpu", "limits.memory", "requests.cpu", "requests.memory"):
        part, _, name = key.partition(".")
        for container in pod["spec"]["containers"] if key in hard else ():
            if name not in (container.get("resources", {}).get(part) or {}):
                missing.setdefault(key, []).append(container["name"])
    if missing:
        listed = "; ".join(f"{key} for: {','.join(names)}" for key, names in missing.items())
        raise forbidden(PODS, pod["metadata"]["name"], f"failed quota: {title}: must specify {listed}")


def quota_status(store: Store, quota: Object) -> Object:
    """Status that the quota controller would write."""
    hard = quota["spec"].get("hard") or {}
    used = used_in(store, quota["metadata"]["namespace"], hard)
    return {"hard": dict(hard), "used": {name: said(amount, name) for name, amount in used.items()}}
