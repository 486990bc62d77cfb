"""Lists in pages, and watches: resource versions, bookmarks, selectors, 410."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.kubernetes import errors
from fakes.kubernetes.faults import DroppedError
from fakes.kubernetes.objects import Object, clone
from fakes.kubernetes.resources import EVENTS, Resource
from fakes.kubernetes.routing import TRUE
from fakes.kubernetes.selectors import field_test, label_test
from fakes.kubernetes.store import Change, Store

BOOKMARK_S = 60.0
"""Seconds between bookmarks. Source: cacher.go, about once a minute."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects of a resource that a caller selects."""

    resource: Resource
    namespace: str
    chosen: Callable[[Object], bool]

    def has(self, item: Object | None) -> bool:
        """Return whether *item* is among them."""
        if item is None:
            return False
        if self.namespace and item["metadata"].get("namespace") != self.namespace:
            return False
        return self.chosen(item)


def select(resource: Resource, namespace: str, query: dict[str, str], name: str = "") -> Selection:
    """Compile labelSelector and fieldSelector; raises 400."""
    labels = label_test(query.get("labelSelector", ""))
    fields = field_test(resource, query.get("fieldSelector", ""))

    def chosen(item: Object) -> bool:
        meta = item["metadata"]
        return (not name or meta["name"] == name) and labels(meta.get("labels") or {}) and fields(item)

    return Selection(resource, namespace, chosen)


def list_items(store: Store, selection: Selection, query: dict[str, str]) -> Object:
    """A list, or a page of it; raises 410 and 504."""
    wanted = query.get("resourceVersion", "")
    if wanted:
        _check_version(store, _number(wanted), exact=query.get("resourceVersionMatch") == "Exact")
    items = [item for item in store.all(selection.resource, selection.namespace) if selection.has(item)]
    meta: dict[str, Any] = {"resourceVersion": str(store.revision)}
    limit = int(query.get("limit") or 0)
    if query.get("continue"):
        start, revision = _opened(query["continue"])
        if revision >= 0 and revision < store.compacted and selection.resource is EVENTS:
            raise _expired_token(start)
        items = [item for item in items if _place(item) > start]
    if limit and len(items) > limit:
        items, rest = items[:limit], len(items) - limit
        meta["continue"] = _token(_place(items[-1]), store.revision)
        meta["remainingItemCount"] = rest
    resource = selection.resource
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": meta,
        "items": [
            {key: value for key, value in item.items() if key not in {"kind", "apiVersion"}} for item in items
        ],
    }


def _place(item: Object) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _token(start: str, revision: int) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": start})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _opened(token: str) -> tuple[str, int]:
    try:
        found = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return found["start"], found["rv"]
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise errors.bad_request(
            "invalid continue token: continue key is not valid: illegal base64 data at input byte 4"
        ) from error


def _expired_token(start: str) -> errors.ApiError:
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can "
        "start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the "
        "remainder of "
        "the results. Continuing with the provided token results in an inconsistent list - objects that were "
        "created, modified, or deleted between the time the first chunk was returned and now may "
        "show up in the list."
    )
    answer = errors.expired(message)
    if isinstance(answer.body, dict):
        answer.body["metadata"] = {"continue": _token(start, -1)}
    return answer


def _number(text: str) -> int:
    if text.isdigit():
        return int(text)
    message = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
    raise errors.ApiError(500, errors.status(500, None, message))


def _check_version(store: Store, wanted: int, *, exact: bool) -> None:
    if wanted > store.revision:
        raise errors.too_large(wanted, store.revision)
    if exact and wanted < store.oldest():
        raise errors.expired()


@dataclass(slots=True)
class Watch:
    """One open watch. `frames` yields JSON lines until the time is up or the watch is closed."""

    store: Store
    selection: Selection
    query: dict[str, str]
    as_partial: bool = False
    queue: asyncio.Queue[Change | str] = field(default_factory=asyncio.Queue)
    sent: int = 0

    def open(self) -> list[Object]:
        """Register, and return the first objects to send; raises 500 for an invalid version."""
        wanted = self.query.get("resourceVersion", "")
        start = _number(wanted) if wanted else 0
        self.store.listeners.append(self._hear)
        self.sent = self.store.revision
        initial = self.query.get("sendInitialEvents") in TRUE
        if start == 0 or initial:
            items = [one for one in self.store.all(self.selection.resource, self.selection.namespace)
                     if self.selection.has(one)]  # fmt: skip
            first = [self._event("ADDED", item) for item in items]
            if initial:
                first.append(self._bookmark(end_of_initial=True))
            return first
        if start < self.store.oldest():
            self.queue.put_nowait("close")
            message = f"too old resource version: {start} ({self.store.oldest()})"
            if self.selection.resource is EVENTS:
                message = "The resourceVersion for the provided watch is too old."
            return [{"type": "ERROR", "object": errors.status(410, "Expired", message)}]
        return [event for change in self.store.since(start) if (event := self._translate(change))]

    def close(self) -> None:
        """Receive no further changes."""
        if self._hear in self.store.listeners:
            self.store.listeners.remove(self._hear)

    def _hear(self, change: Change) -> None:
        if change.resource is self.selection.resource:
            self.queue.put_nowait(change)

    def _translate(self, change: Change) -> Object | None:
        """An object that starts to match is ADDED, one that no longer matches is DELETED."""
        if change.resource is not self.selection.resource:
            return None
        now = change.kind != "DELETED" and self.selection.has(change.item)
        before = self.selection.has(change.old)
        if now:
            return self._event("MODIFIED" if before else "ADDED", change.item)
        if before:
            return self._event("DELETED", change.item)
        return None

    def _event(self, kind: str, item: Object) -> Object:
        if self.as_partial:
            item = partial(item)
        return {"type": kind, "object": item}

    def _bookmark(self, *, end_of_initial: bool = False) -> Object:
        resource = self.selection.resource
        meta: dict[str, Any] = {"resourceVersion": str(self.store.revision), "creationTimestamp": None}
        if end_of_initial:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        body: Object = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
        if resource.kind == "Pod":
            body |= {"spec": {"containers": None}, "status": {}}
        return {"type": "BOOKMARK", "object": body}

    async def frames(self, stopped: asyncio.Event) -> AsyncIterator[bytes]:
        """JSON lines: the first objects, then changes, requested bookmarks, until timeoutSeconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + float(self.query.get("timeoutSeconds") or 1800)
        bookmarks = self.query.get("allowWatchBookmarks") in TRUE
        mark_at = min(loop.time() + BOOKMARK_S, max(loop.time() + 0.5, until - 2))
        try:
            for event in self.open():
                yield _line(event)
            while not stopped.is_set() and loop.time() < until:
                try:
                    wait = min(until, mark_at if bookmarks else until) - loop.time()
                    change = await asyncio.wait_for(self.queue.get(), max(0.001, wait))
                except TimeoutError:
                    if bookmarks and loop.time() >= mark_at and loop.time() < until:
                        mark_at = loop.time() + BOOKMARK_S
                        yield _line(self._bookmark())
                    continue
                if isinstance(change, str):
                    if change == "cut":
                        raise DroppedError
                    return
                event = self._translate(change)
                if event is not None:
                    yield _line(event)
        finally:
            self.close()


def partial(item: Object) -> Object:
    """The PartialObjectMetadata of an object."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": clone(item["metadata"]),
    }


def _line(event: Object) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"
