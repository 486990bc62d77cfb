"""Keeps the status of ResourceQuotas and binds claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.kubernetes.admission import quota_status
from fakes.kubernetes.objects import Object
from fakes.kubernetes.resources import CLAIMS, QUOTAS
from fakes.kubernetes.store import Change

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster


class QuotaController:
    """Counts a namespace's usage; binds every claim at once while there is a provisioner."""

    def __init__(self, cluster: Cluster) -> None:
        """Work on *cluster*."""
        self._cluster = cluster
        self._store = cluster.store

    def hear(self, change: Change) -> None:
        """Recount when an object is created or deleted; bind new claims."""
        namespace = change.item["metadata"].get("namespace", "")
        counts = (
            change.kind != "MODIFIED"
            or change.resource is QUOTAS
            or _phase(change.item) != _phase(change.old)
        )
        if counts and namespace and self._store.all(QUOTAS, namespace):
            self._cluster.queue.add("quota", namespace)
        if change.resource is CLAIMS and change.kind == "ADDED" and self._cluster.has_provisioner:
            self._cluster.queue.call(lambda: self._bind(change.item))

    def sync(self, namespace: str) -> None:
        """Write the status of all quotas of a namespace."""
        for quota in self._store.all(QUOTAS, namespace):
            status = quota_status(self._store, quota)
            self._store.edit(QUOTAS, quota, lambda item, status=status: item.update(status=status))

    def _bind(self, claim: Object) -> None:
        def bound(item: Object) -> None:
            wanted = (item["spec"].get("resources") or {}).get("requests") or {}
            item["spec"]["volumeName"] = f"pvc-{item['metadata']['uid']}"
            item["status"] = {
                "phase": "Bound",
                "accessModes": item["spec"].get("accessModes"),
                "capacity": wanted,
            }

        self._store.edit(CLAIMS, claim, bound)


def _phase(item: Object | None) -> str | None:
    return (item or {}).get("status", {}).get("phase") if item else None
