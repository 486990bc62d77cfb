"""Events, written as kubelet, controllers and scheduler write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.kubernetes.objects import Object, micro_stamp, stamp
from fakes.kubernetes.resources import EVENTS, NAMESPACES

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

FRESH = {"FailedScheduling", "FailedCreate"}
"""Repeats of these are new objects; repeats of others raise a count."""


class Recorder:
    """Writes Event objects; repeats are counted."""

    def __init__(self, cluster: Cluster) -> None:
        """Write into *cluster*."""
        self._cluster = cluster
        self._count = 0
        self._seen: dict[tuple[str, str, str, str], Object] = {}

    def __call__(
        self, item: Object, reason: str, message: str, *, warning: bool = False, component: str = "kubelet",
        host: str = "", field_path: str = "",
    ) -> None:  # fmt: skip
        """Record that *reason* happened to *item*."""
        if not self._cluster.write_events:
            return
        key = (item["metadata"]["uid"], reason, message, field_path)
        old = self._seen.get(key)
        now = self._cluster.clock.now()
        if old is not None and reason not in FRESH and self._repeat(old, stamp(now)):
            return
        event = self._event(item, reason, message, now, field_path)
        event["type"] = "Warning" if warning else "Normal"
        if component == "default-scheduler":
            action = {"Scheduled": "Binding", "FailedScheduling": "Scheduling", "Preempted": "Preempting"}[
                reason
            ]
            event |= {
                "source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": micro_stamp(now),
                "action": action, "reportingComponent": component, "reportingInstance": f"{component}-fake",
            }  # fmt: skip
        else:
            source = {"component": component} | ({"host": host} if host else {})
            event |= {
                "source": source, "firstTimestamp": stamp(now), "lastTimestamp": stamp(now), "count": 1,
                "eventTime": None, "reportingComponent": component, "reportingInstance": host,
            }  # fmt: skip
        self._seen[key] = self._cluster.store.create(EVENTS, event)

    def _event(self, item: Object, reason: str, message: str, now: float, field_path: str) -> Object:
        meta = item["metadata"]
        namespace = meta.get("namespace", "default")
        if self._cluster.store.get(NAMESPACES, "", namespace) is None:
            namespace = "default"
        involved = {
            "kind": item["kind"], "namespace": meta.get("namespace", ""), "name": meta["name"], "uid":
            meta["uid"],
            "apiVersion": item["apiVersion"], "resourceVersion": meta["resourceVersion"],
        }  # fmt: skip
        involved = {name: value for name, value in involved.items() if value}
        if field_path:
            involved["fieldPath"] = field_path
        self._count += 1
        tag = f"{int(now * 1e6) * 1000 + self._count:016x}"
        return {
            "metadata": {"name": f"{meta['name']}.{tag}", "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
        }

    def _repeat(self, old: Object, now: str) -> bool:
        def count(event: Object) -> None:
            event["count"] = event.get("count", 1) + 1
            event["lastTimestamp"] = now

        return self._cluster.store.edit(EVENTS, old, count) is not None
