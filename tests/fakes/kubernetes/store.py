"""All objects with their history: resource versions, finalizers, deletion, and notification of changes."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fakes.kubernetes.clock import Clock
from fakes.kubernetes.errors import exists
from fakes.kubernetes.objects import Object, clone, is_going, stamp
from fakes.kubernetes.resources import PODS, Resource

Kind = Literal["ADDED", "MODIFIED", "DELETED"]

HISTORY = 20_000
"""Changes kept for watches, chosen: minutes of a busy test; `compact` drops older ones."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write. `item` and `old` are shared and never changed."""

    revision: int
    kind: Kind
    resource: Resource
    item: Object
    old: Object | None


Listener = Callable[[Change], None]


class Store:
    """Objects by resource, namespace and name; every write has a revision of its own.

    Readers get the stored objects themselves, and must clone one to change it (`edit` does).
    """

    def __init__(self, clock: Clock) -> None:
        """Start empty."""
        self.clock = clock
        self.revision = 1000
        self.compacted = self.revision
        self.history: deque[Change] = deque(maxlen=HISTORY)
        self.by_uid: dict[str, tuple[Resource, tuple[str, str]]] = {}
        self.listeners: list[Listener] = []
        self._items: dict[str, dict[tuple[str, str], Object]] = {}

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The object, or None."""
        return self._items.get(resource.full, {}).get((namespace, name))

    def all(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Objects of a namespace (or of all), by namespace and name as etcd orders them."""
        items = self._items.get(resource.full, {})
        return [items[key] for key in sorted(items) if not namespace or key[0] == namespace]

    def each(self, resource: Resource) -> Iterator[Object]:
        """Objects in any order, quickly; do not write during the iteration."""
        return iter(self._items.get(resource.full, {}).values())

    def find(self, uid: str) -> tuple[Resource, Object] | None:
        """The object with this uid."""
        found = self.by_uid.get(uid)
        if found is None:
            return None
        resource, (namespace, name) = found
        item = self.get(resource, namespace, name)
        return (resource, item) if item is not None else None

    def create(self, resource: Resource, item: Object) -> Object:
        """Add *item* (with name, and namespace if it has one); raises 409 AlreadyExists."""
        meta = item["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        if key in self._items.get(resource.full, {}):
            raise exists(resource, meta["name"])
        if "uid" not in meta:
            born(resource, item, self.clock.now())
        self._items.setdefault(resource.full, {})[key] = item
        self.by_uid[meta["uid"]] = (resource, key)
        self._commit("ADDED", resource, item, None)
        return item

    def write(self, resource: Resource, item: Object) -> Object:
        """Replace an object; no effect if it is the same; deletes it with its last finalizer."""
        meta = item["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        old = self._items[resource.full][key]
        meta["resourceVersion"] = old["metadata"]["resourceVersion"]
        if item == old:
            return old
        if _is_done(resource, item) and is_going(old) and old["metadata"].get("finalizers"):
            self.remove(resource, old)
            return item
        if _wished(item) != _wished(old) or is_going(item) != is_going(old):
            meta["generation"] = old["metadata"].get("generation", 1) + 1
        self._items[resource.full][key] = item
        self._commit("MODIFIED", resource, item, old)
        if _is_done(resource, item):
            self.remove(resource, item)
        return item

    def edit(self, resource: Resource, item: Object, change: Callable[[Object], None]) -> Object | None:
        """Apply *change* to a copy of the newest version of *item*; None if it is deleted or replaced."""
        meta = item["metadata"]
        newest = self.get(resource, meta.get("namespace", ""), meta["name"])
        if newest is None or newest["metadata"]["uid"] != meta["uid"]:
            return None
        fresh = clone(newest)
        change(fresh)
        return self.write(resource, fresh)

    def remove(self, resource: Resource, item: Object) -> None:
        """Remove an object now, in spite of finalizers."""
        meta = item["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        old = self._items[resource.full].pop(key)
        self.by_uid.pop(meta["uid"], None)
        last = clone(old)
        self._commit("DELETED", resource, last, old)

    def since(self, revision: int) -> list[Change]:
        """Changes after *revision*, oldest first."""
        return [change for change in self.history if change.revision > revision]

    def compact(self) -> None:
        """Drop the history: watches and tokens from before now are too old."""
        self.compacted = self.revision
        self.history.clear()

    def oldest(self) -> int:
        """The oldest revision that a watch may start from."""
        if self.history and len(self.history) == self.history.maxlen:
            return max(self.compacted, self.history[0].revision - 1)
        return self.compacted

    def _commit(self, kind: Kind, resource: Resource, item: Object, old: Object | None) -> None:
        self.revision += 1
        item["metadata"]["resourceVersion"] = str(self.revision)
        change = Change(self.revision, kind, resource, item, old)
        self.history.append(change)
        for listener in tuple(self.listeners):
            listener(change)


def born(resource: Resource, item: Object, now: float) -> None:
    """Give a new object its kind, uid, time and generation."""
    meta = item["metadata"]
    item["kind"], item["apiVersion"] = resource.kind, resource.api_version
    meta["uid"] = str(uuid.uuid4())
    meta["creationTimestamp"] = stamp(now)
    for gone in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion"):
        meta.pop(gone, None)
    if "spec" in item:
        meta["generation"] = 1


def _wished(item: Object) -> Object:
    """The part of an object whose changes raise its generation: a binding does not."""
    return {key: value for key, value in (item.get("spec") or {}).items() if key != "nodeName"}


def _is_done(resource: Resource, item: Object) -> bool:
    meta = item["metadata"]
    if not is_going(item) or meta.get("finalizers"):
        return False
    return resource is not PODS or meta.get("deletionGracePeriodSeconds", 0) == 0
