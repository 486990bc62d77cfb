"""Garbage collection by owner references, and the end of namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.kubernetes import deletion
from fakes.kubernetes.objects import Object, is_going
from fakes.kubernetes.resources import NAMESPACES, Resource
from fakes.kubernetes.store import Change

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

ABSENT_S = 0.1
"""Time until an object whose owner does not exist is collected; recorded 80 ms."""


class Collector:
    """Tracks the owner references."""

    def __init__(self, cluster: Cluster) -> None:
        """Work on *cluster*."""
        self._cluster = cluster
        self._store = cluster.store
        self._owned: dict[str, dict[str, None]] = {}
        self._dying: set[str] = set()
        self._closing: dict[str, float] = {}
        """The earliest time of a namespace's deletion, by its uid."""

    def hear(self, change: Change) -> None:
        """Keep the graph up to date; react to deleted owners."""
        item = change.item
        uid = item["metadata"]["uid"]
        if change.kind == "DELETED":
            self._unlink(change.old or item, uid)
            if uid in self._owned:
                self._cluster.queue.add("orphans", uid)
            if self._dying:
                for name in tuple(self._dying):
                    self._cluster.queue.add("namespace", name)
            return
        if change.old is None or change.old["metadata"].get("ownerReferences") != item["metadata"].get(
            "ownerReferences"
        ):
            self._unlink(change.old or item, uid)
            self._link(item, uid)
        if change.resource is NAMESPACES and is_going(item):
            self._dying.add(item["metadata"]["name"])
            self._cluster.queue.add("namespace", item["metadata"]["name"])
        if is_going(item) and item["metadata"].get("finalizers"):
            self._cluster.queue.add("finalize", uid)

    def _link(self, item: Object, uid: str) -> None:
        for reference in item["metadata"].get("ownerReferences") or ():
            self._owned.setdefault(reference["uid"], {})[uid] = None
            if reference["uid"] not in self._store.by_uid:
                self._cluster.clock.after(ABSENT_S, lambda: self._cluster.queue.add("orphan", uid))

    def _unlink(self, item: Object, uid: str) -> None:
        for reference in item["metadata"].get("ownerReferences") or ():
            owned = self._owned.get(reference["uid"])
            if owned is not None:
                owned.pop(uid, None)
                if not owned:
                    del self._owned[reference["uid"]]
                    self._cluster.queue.add("finalize", reference["uid"])

    def _of(self, uid: str) -> list[tuple[Resource, Object]]:
        found = [self._store.find(one) for one in tuple(self._owned.get(uid, ()))]
        return [one for one in found if one is not None]

    def owner_gone(self, uid: str) -> None:
        """Check everything that *uid* owned."""
        for _resource, item in self._of(uid):
            self.orphan(item["metadata"]["uid"])

    def orphan(self, uid: str) -> None:
        """Delete an object without an existing owner."""
        found = self._store.find(uid)
        if found is None:
            return
        resource, item = found
        owners = item["metadata"].get("ownerReferences") or ()
        if not owners or any(self._exists(one) for one in owners) or is_going(item):
            return
        deletion.delete(self._store, resource, item, {"propagationPolicy": "Background"})

    def _exists(self, reference: Object) -> bool:
        return reference["uid"] in self._store.by_uid

    def finalize(self, uid: str) -> None:
        """Handle the collector's own finalizers."""
        found = self._store.find(uid)
        if found is None:
            return
        resource, item = found
        finalizers = item["metadata"].get("finalizers") or ()
        if not is_going(item):
            return
        if "orphan" in finalizers:
            for kind, one in self._of(uid):
                self._store.edit(kind, one, lambda fresh: _disown(fresh, uid))
            self._store.edit(resource, item, lambda fresh: _unfinalize(fresh, "orphan"))
        elif "foregroundDeletion" in finalizers:
            for kind, one in self._of(uid):
                if not is_going(one):
                    deletion.delete(self._store, kind, one, {"propagationPolicy": "Background"})
            if not self._of(uid):
                self._store.edit(resource, item, lambda fresh: _unfinalize(fresh, "foregroundDeletion"))

    @property
    def _pace_s(self) -> float:
        return self._cluster.pace.namespace_s

    def empty(self, name: str) -> None:
        """Delete everything in a namespace, and at last the namespace."""
        home = self._store.get(NAMESPACES, "", name)
        if home is None or not is_going(home):
            self._dying.discard(name)
            return
        left = False
        for resource in self._cluster.resources:
            if not resource.namespaced:
                continue
            for item in self._store.all(resource, name):
                left = True
                if not is_going(item):
                    deletion.delete(self._store, resource, item, {"propagationPolicy": "Background"})
        due = self._closing.setdefault(home["metadata"]["uid"], self._cluster.clock.now() + self._pace_s)
        if not left and self._cluster.clock.now() < due:
            self._cluster.clock.at(due, lambda: self._cluster.queue.add("namespace", name))
        elif not left:
            self._dying.discard(name)
            self._store.edit(NAMESPACES, home, lambda fresh: _unfinalize(fresh, "kubernetes"))
        elif not any(self._store.all(one, name) for one in self._cluster.resources if one.namespaced):
            self._cluster.queue.add("namespace", name)


def _disown(item: Object, uid: str) -> None:
    item["metadata"]["ownerReferences"] = [
        one for one in item["metadata"].get("ownerReferences") or () if one["uid"] != uid
    ]
    if not item["metadata"]["ownerReferences"]:
        del item["metadata"]["ownerReferences"]


def _unfinalize(item: Object, name: str) -> None:
    kept = [one for one in item["metadata"].get("finalizers") or () if one != name]
    item["metadata"]["finalizers"] = kept
    if not kept:
        del item["metadata"]["finalizers"]
