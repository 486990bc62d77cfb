"""The Job controller: creates pods, counts their ends, and records how a Job ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fakes.kubernetes import deletion
from fakes.kubernetes.errors import ApiError
from fakes.kubernetes.jobstate import (
    INDEX,
    TRACKING,
    Tally,
    Verdict,
    finished_at,
    index_of,
    is_finished,
    spread,
    tally,
    verdict,
)
from fakes.kubernetes.objects import (
    Object,
    clone,
    controller_of,
    is_going,
    is_over,
    seconds_of,
    set_condition,
    stamp,
)
from fakes.kubernetes.resources import JOBS, PODS
from fakes.kubernetes.store import Change

if TYPE_CHECKING:
    from fakes.kubernetes.cluster import Cluster

BACKOFF_S = 10.0
MOST_S = 600.0
"""Delay before a replacement. Source: job_controller.go, DefaultJobPodFailureBackOff and
MaxJobPodFailureBackOff."""


@dataclass(slots=True)
class _Memory:
    """What the Job controller remembers of one Job between syncs."""

    seen: set[str] = field(default_factory=set)
    ignored: dict[int, int] = field(default_factory=dict)
    streak: int = 0
    last_end: float = 0.0
    refusals: int = 0
    retry_at: float = 0.0
    end_at: float = 0.0


class JobController:
    """One queue of Jobs; each is synced whenever it or a pod of it changes."""

    def __init__(self, cluster: Cluster) -> None:
        """Use *cluster*."""
        self._cluster = cluster
        self._store = cluster.store
        self._memory: dict[str, _Memory] = {}
        self._pods: dict[str, dict[str, None]] = {}

    def hear(self, change: Change) -> None:
        """Queue the Job of *change*."""
        if change.resource is JOBS:
            if change.kind == "DELETED":
                self._cluster.queue.add("job-gone", change.item["metadata"]["uid"])
            else:
                self._cluster.queue.add("job", change.item["metadata"]["uid"])
        elif change.resource is PODS:
            owner = controller_of(change.item) or (controller_of(change.old) if change.old else None)
            if owner is None or owner["kind"] != "Job":
                return
            pods = self._pods.setdefault(owner["uid"], {})
            if change.kind == "DELETED":
                pods.pop(change.item["metadata"]["uid"], None)
            else:
                pods[change.item["metadata"]["uid"]] = None
            self._later(owner["uid"])

    def _later(self, uid: str) -> None:
        wait = self._cluster.pace.job_sync_s
        if self._store.find(uid) is None:
            self._cluster.queue.add("job-gone", uid)
        elif wait:
            self._cluster.clock.after(wait, lambda: self._cluster.queue.add("job", uid))
        else:
            self._cluster.queue.add("job", uid)

    def forget(self, uid: str) -> None:
        """Remove the finalizer from the pods of a deleted Job."""
        self._memory.pop(uid, None)
        for pod in self._owned(uid):
            self._release(pod)

    def _owned(self, uid: str) -> list[Object]:
        found = [self._store.find(pod) for pod in self._pods.get(uid, ())]
        pods = [one[1] for one in found if one is not None]
        return [pod for pod in pods if (controller_of(pod) or {}).get("uid") == uid]

    def sync(self, uid: str) -> None:
        """Reconcile one Job's pods and status."""
        found = self._store.find(uid)
        if found is None:
            self.forget(uid)
            return
        job = found[1]
        pods = self._owned(uid)
        if is_going(job):
            for pod in pods:
                self._release(pod)
            return
        if is_finished(job):
            for pod in pods:
                self._release(pod)
            self._schedule_ttl(job)
            return
        if job["spec"].get("suspend"):
            self._suspend(job, pods)
            return
        self._go_on(job, pods)

    def _go_on(self, job: Object, pods: list[Object]) -> None:
        memory = self._memory.setdefault(job["metadata"]["uid"], _Memory())
        job = self._start(job)
        now = self._cluster.clock.now()
        count = tally(job, pods)
        self._note_ends(memory, job, count, pods)
        outcome = verdict(job, count, now)
        if outcome is not None:
            for pod in count.active:
                self._delete(job, pod)
            if outcome.kind == "Failed":
                count.failed += count.active
            count.active = []
        else:
            self._manage(job, memory, count)
        self._report(job, count, outcome)

    def _start(self, job: Object) -> Object:
        """Set startTime, and turn a Suspended condition off; arm the deadline."""
        now = self._cluster.clock.now()
        if "startTime" in job["status"]:
            return job

        def begin(fresh: Object) -> None:
            fresh["status"]["startTime"] = stamp(now)
            if any(one["type"] == "Suspended" for one in fresh["status"].get("conditions") or ()):
                resumed = {
                    "type": "Suspended",
                    "status": "False",
                    "reason": "JobResumed",
                    "message": "Job resumed",
                }
                set_condition(fresh, resumed, now)

        fresh = clone(job)
        begin(fresh)
        limit = job["spec"].get("activeDeadlineSeconds")
        uid = job["metadata"]["uid"]
        if limit is not None:
            due = int(now) + limit
            self._cluster.clock.at(due, lambda: self._cluster.queue.add("job", uid))
        if any(one["type"] == "Suspended" for one in fresh["status"].get("conditions") or ()):
            self._cluster.record(job, "Resumed", "Job resumed", component="job-controller")
        return fresh

    def _note_ends(self, memory: _Memory, job: Object, count: Tally, pods: list[Object]) -> None:
        """Count consecutive failures, ignored ones too: they delay the next pod."""
        fresh = [pod for pod in [*count.failed, *count.ignored] if pod["metadata"]["uid"] not in memory.seen]
        for pod in sorted(fresh, key=lambda one: finished_at(one, self._cluster.clock.now())):
            memory.seen.add(pod["metadata"]["uid"])
            index = index_of(pod)
            if index is not None and pod in count.ignored:
                memory.ignored[index] = memory.ignored.get(index, 0) + 1
            memory.streak += 1
            memory.last_end = max(memory.last_end, finished_at(pod, self._cluster.clock.now()))
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if pod["status"].get("phase") == "Succeeded" and uid not in memory.seen:
                memory.seen.add(uid)
                if finished_at(pod, 0) >= memory.last_end:
                    memory.streak = 0

    def _manage(self, job: Object, memory: _Memory, count: Tally) -> None:
        """Delete surplus pods, create missing ones."""
        for pod in count.excess:
            self._delete(job, pod)
        missing = count.missing
        if not missing:
            return
        now = self._cluster.clock.now()
        due = memory.retry_at
        if memory.streak and job["spec"].get("backoffLimitPerIndex") is None:
            due = max(due, memory.last_end + min(BACKOFF_S * 2 ** (memory.streak - 1), MOST_S))
        uid = job["metadata"]["uid"]
        if due > now:
            self._cluster.clock.at(due, lambda: self._cluster.queue.add("job", uid))
            return
        for index in missing:
            ready = count.index_due.get(index, 0.0) if index is not None else 0.0
            if ready > now:
                self._cluster.clock.at(ready, lambda: self._cluster.queue.add("job", uid))
            elif not self._make(job, memory, count, index):
                return

    def _make(self, job: Object, memory: _Memory, count: Tally, index: int | None) -> bool:
        """Create one pod; a refusal is an event, and a later retry."""
        body = pod_of(job, index, count.index_failures, memory.ignored)
        try:
            pod = self._cluster.api.create(PODS, job["metadata"]["namespace"], body)
        except ApiError as error:
            text = f"Error creating: {error}"
            self._refused(job, text)
            memory.refusals += 1
            memory.retry_at = self._cluster.clock.now() + min(2 ** (memory.refusals - 1), 60)
            uid = job["metadata"]["uid"]
            self._cluster.clock.at(memory.retry_at, lambda: self._cluster.queue.add("job", uid))
            return False
        memory.refusals, memory.retry_at = 0, 0.0
        count.active.append(pod)
        message = f"Created pod: {pod['metadata']['name']}"
        self._cluster.record(job, "SuccessfulCreate", message, component="job-controller")
        return True

    def _refused(self, job: Object, text: str) -> None:
        """Record why a pod could not be created, after the delay of the pace."""

        def tell() -> None:
            self._cluster.record(job, "FailedCreate", text, warning=True, component="job-controller")

        wait = self._cluster.pace.refusal_s
        if wait:
            self._cluster.clock.after(wait, tell)
        else:
            tell()

    def _delete(self, job: Object, pod: Object) -> None:
        if is_going(pod) or is_over(pod):
            return
        deletion.delete(self._store, PODS, pod, {})
        message = f"Deleted pod: {pod['metadata']['name']}"
        self._cluster.record(job, "SuccessfulDelete", message, component="job-controller")

    def _release(self, pod: Object) -> None:
        """Remove our finalizer from a pod."""
        if TRACKING not in (pod["metadata"].get("finalizers") or ()):
            return

        def free(fresh: Object) -> None:
            kept = [one for one in fresh["metadata"].get("finalizers") or () if one != TRACKING]
            fresh["metadata"]["finalizers"] = kept
            if not kept:
                del fresh["metadata"]["finalizers"]

        self._store.edit(PODS, pod, free)

    def _report(self, job: Object, count: Tally, outcome: Verdict | None) -> None:
        """Write the status: first uncounted pods, then, without finalizers, the counts and the end."""
        now = self._cluster.clock.now()
        base = job["status"]
        first = clone(base)
        indexed = job["spec"]["completionMode"] == "Indexed"
        uncounted: Object = {}
        if count.failed:
            uncounted["failed"] = [pod["metadata"]["uid"] for pod in count.failed]
        if count.succeeded and not indexed:
            uncounted["succeeded"] = [pod["metadata"]["uid"] for pod in count.succeeded]
        self._fill(first, job, count, now)
        first["uncountedTerminatedPods"] = uncounted
        if outcome is not None:
            early = "SuccessCriteriaMet" if outcome.kind == "Complete" else "FailureTarget"
            set_condition({"status": first}, outcome.condition(early), now)
        self._write(job, first)
        for pod in [*count.failed, *count.ignored, *count.succeeded, *count.excess]:
            self._release(self._newest(pod))
        second = clone(first)
        second["uncountedTerminatedPods"] = {}
        _add(second, "failed", len(count.failed))
        if not indexed:
            _add(second, "succeeded", len(count.succeeded))
        if outcome is not None and not self._terminating(job) and self._may_end(job):
            second["terminating"] = 0
            set_condition({"status": second}, outcome.condition(outcome.kind), now)
            if outcome.kind == "Complete":
                second["completionTime"] = stamp(now)
        self._write(job, second)
        if outcome is not None and is_finished({"status": second}):
            self._announce(job, outcome)

    def _may_end(self, job: Object) -> bool:
        """Return whether the pace lets the Job end now; otherwise arms another sync."""
        wait, uid = self._cluster.pace.job_end_s, job["metadata"]["uid"]
        if not wait:
            return True
        memory = self._memory.setdefault(uid, _Memory())
        now = self._cluster.clock.now()
        if not memory.end_at:
            memory.end_at = now + wait
            self._cluster.clock.at(memory.end_at, lambda: self._cluster.queue.add("job", uid))
        return now >= memory.end_at

    def _newest(self, pod: Object) -> Object:
        found = self._store.find(pod["metadata"]["uid"])
        return found[1] if found is not None else pod

    def _terminating(self, job: Object) -> int:
        return sum(1 for pod in self._owned(job["metadata"]["uid"]) if is_going(pod) and not is_over(pod))

    def _fill(self, status: Object, job: Object, count: Tally, now: float) -> None:
        status["terminating"] = self._terminating(job)
        status["ready"] = sum(1 for pod in count.active if _is_ready(pod))
        status.pop("active", None)
        if count.active:
            status["active"] = len(count.active)
        if job["spec"]["completionMode"] == "Indexed":
            status.pop("completedIndexes", None)
            status.pop("succeeded", None)
            if count.completed:
                status["completedIndexes"] = spread(count.completed)
                status["succeeded"] = len(count.completed)
        if job["spec"].get("backoffLimitPerIndex") is not None:
            status["failedIndexes"] = spread(count.failed_indexes)

    def _write(self, job: Object, status: Object) -> None:
        def put(fresh: Object) -> None:
            fresh["status"] = clone(status)

        self._store.edit(JOBS, job, put)

    def _announce(self, job: Object, outcome: Verdict) -> None:
        self._memory.pop(job["metadata"]["uid"], None)
        if outcome.kind == "Complete":
            self._cluster.record(job, "Completed", "Job completed", component="job-controller")
        else:
            self._cluster.record(
                job, outcome.reason, outcome.message, warning=True, component="job-controller"
            )

    def _suspend(self, job: Object, pods: list[Object]) -> None:
        now = self._cluster.clock.now()
        count = tally(job, pods)
        for pod in count.active:
            self._delete(job, pod)
        for pod in pods:
            self._release(self._newest(pod))

        def pause(fresh: Object) -> None:
            status = fresh["status"]
            before = next(
                (one["status"] for one in status.get("conditions") or () if one["type"] == "Suspended"), ""
            )
            fresh["status"].pop("startTime", None)
            status.pop("active", None)
            status |= {"ready": 0, "terminating": self._terminating(job), "uncountedTerminatedPods": {}}
            paused = {
                "type": "Suspended",
                "status": "True",
                "reason": "JobSuspended",
                "message": "Job suspended",
            }
            set_condition(fresh, paused, now)
            if before != "True":
                self._cluster.record(job, "Suspended", "Job suspended", component="job-controller")

        self._store.edit(JOBS, job, pause)

    def _schedule_ttl(self, job: Object) -> None:
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is None:
            return
        ends = [one for one in job["status"]["conditions"] if one["type"] in {"Complete", "Failed"}]
        due = seconds_of(ends[0]["lastTransitionTime"]) + ttl
        self._cluster.clock.at(due, lambda: self._expire(job))

    def _expire(self, job: Object) -> None:
        found = self._store.find(job["metadata"]["uid"])
        if found is not None and not is_going(found[1]):
            deletion.delete(self._store, JOBS, found[1], {"propagationPolicy": "Foreground"})


def _add(status: Object, name: str, more: int) -> None:
    if more:
        status[name] = status.get(name, 0) + more


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def pod_of(job: Object, index: int | None, failures: dict[int, int], ignored: dict[int, int]) -> Object:
    """Render the Job's next pod; *index* is None for a NonIndexed Job."""
    meta, template = job["metadata"], clone(job["spec"]["template"])
    name = meta["name"]
    pod_meta = template["metadata"]
    pod_meta.pop("creationTimestamp", None)
    reference = {
        "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": meta["uid"], "controller": True,
        "blockOwnerDeletion": True,
    }  # fmt: skip
    pod_meta |= {"ownerReferences": [reference], "finalizers": [TRACKING], "generateName": f"{name}-"}
    spec = template["spec"]
    if index is not None:
        pod_meta["generateName"] = f"{name}-{index}-"
        pod_meta.setdefault("labels", {})[INDEX] = str(index)
        pod_meta.setdefault("annotations", {})[INDEX] = str(index)
        if job["spec"].get("backoffLimitPerIndex") is not None:
            failed = json.dumps(failures.get(index, 0))
            pod_meta["annotations"]["batch.kubernetes.io/job-index-failure-count"] = failed
            if index in ignored:
                marks = pod_meta["annotations"]
                marks["batch.kubernetes.io/job-index-ignored-failure-count"] = str(ignored[index])
        spec["hostname"] = f"{name}-{index}"
        reference = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}
        entry = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": reference}}
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            if all(one["name"] != entry["name"] for one in container.get("env") or ()):
                container["env"] = [*(container.get("env") or []), clone(entry)]
    return {"metadata": pod_meta, "spec": spec}
