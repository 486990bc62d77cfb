"""Billed time of an attempt's nodes, from the timestamps of the cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.failures import first_told, is_held
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_snapshot import (
    Json,
    Seen,
    index_of,
    is_pod_over,
    job_end,
    stop_asked,
    timestamp,
)
from envscaler_airflow.run.cost import UsageInterval

MADE_AGAIN_S = 60.0
"""If the first known pod of a node is this much later than its Job's start, an earlier one existed, seconds.
Chosen: a Job creates its pods within seconds, and waits at least 10 s before it recreates one.
"""


def usage_of(found: Sequence[tuple[Part, Seen]]) -> tuple[UsageInterval, ...]:
    """Intervals of all Jobs of an attempt. A deleted Job, without times, is billed as long as the others."""
    held = [
        (seen.job is None, replace(one, now=seen.server_time))
        for part, seen in found
        for one in intervals(seen, part)
    ]
    ends = [one.end for is_gone, one in held if not is_gone]
    if not ends:
        return tuple(one for _, one in held)
    last = max((end for end in ends if end is not None), default=0.0)
    until = None if None in ends else last
    return tuple(_at_most(one, until) if is_gone and one.end == one.start else one for is_gone, one in held)


def _at_most(one: UsageInterval, until: float | None) -> UsageInterval:
    return replace(one, end=None if until is None else max(one.start, until))


def intervals(seen: Seen, part: Part) -> tuple[UsageInterval, ...]:
    """One interval for each pod, from its binding to a node to the end of its last container.

    A node whose pods were deleted is billed from the Job's start to its end; if the Job was deleted, to the
    last recorded time. A pod that never got a machine costs nothing, and neither does a Job that was stopped
    before any of its pods ran. Disrupted pods are deleted within seconds: a node whose pod was recreated was
    also allocated before.
    """
    found = [interval for pod in seen.pods if (interval := _of_pod(pod, seen)) is not None]
    known = {interval.node for interval in found} | {index_of(pod) for pod in seen.pods}
    known |= _given_up(seen, part) | refused_from_the_start(seen, part)
    others = (_of_job(node, seen, part) for node in range(part.nodes) if node not in known)
    found += [interval for interval in others if interval is not None]
    found += _of_gone_pods(seen, part)
    numbered = [replace(one, node=part.first + one.node) for one in found]
    return tuple(sorted(numbered, key=lambda one: (one.node, one.start)))


def unheld(seen: Seen, part: Part) -> list[int]:
    """Nodes of the part that never got a machine, by the current state; recorded with a stop.

    Once the Job has ended its pods are deleted, and cannot be distinguished from those that ran.
    """
    if seen.job is None:
        return []
    if not seen.pods:
        late = set(range(part.nodes)) if _is_late(seen.job) else refused_from_the_start(seen, part)
        return sorted(late)
    held = {one.node - part.first for one in intervals(seen, part)}
    return [node for node in range(part.nodes) if node not in held]


def _given_up(seen: Seen, part: Part) -> set[int]:
    """Nodes that had no machine by the time of the stop."""
    asked = (stop_asked(seen.job) if seen.job is not None else None) or {}
    if asked.get("unmet"):
        return set(range(part.nodes))
    told = asked.get("unheld")
    return {node for node in told if isinstance(node, int)} if isinstance(told, list) else set()


def _of_pod(pod: Json, seen: Seen) -> UsageInterval | None:
    node, start = index_of(pod), _bound_at(pod)
    if node is None or start is None:
        return None
    end = None
    if is_pod_over(pod) or _is_over(seen):
        end = max(start, _ended_at(pod) or _job_ended_at(seen) or start)
    elif is_held(pod, seen):
        end = max(start, seen.server_time or start)  # it is released at this time
    return UsageInterval(node, start, end)


def _of_gone_pods(seen: Seen, part: Part) -> Iterator[UsageInterval]:
    """From the Job's start to the first known pod, for each node that the Job began with.

    Without nodes for which that pod is known to be the very first.
    """
    job = seen.job or {}
    start, labels = (
        timestamp((job.get("status") or {}).get("startTime")),
        job.get("metadata", {}).get("labels"),
    )
    begun = int((labels or {}).get(names.INITIAL_NODES) or part.nodes)
    made: dict[int, float] = {}
    for pod in seen.pods:
        node, at = index_of(pod), timestamp(pod["metadata"].get("creationTimestamp"))
        if node is not None and at is not None:
            made[node] = min(at, made.get(node, at))
    firsts = {index_of(pod) for pod in seen.pods if _is_first(pod, seen)}
    for node, at in made.items():
        if node < begun and node not in firsts and start is not None and at - start > MADE_AGAIN_S:
            yield UsageInterval(node, start, at)


def _was_refused_early(seen: Seen) -> bool:
    """True when the API server refused a pod within moments of the Job's start: a quota, a policy."""
    start = timestamp(((seen.job or {}).get("status") or {}).get("startTime"))
    told = [timestamp(first_told(one)) for one in seen.events if one.get("reason") == "FailedCreate"]
    return start is not None and any(at is not None and at - start <= MADE_AGAIN_S for at in told)


def refused_from_the_start(seen: Seen, part: Part) -> set[int]:
    """Nodes that never had a pod, because the API server refused each; from the events of the Job."""
    if seen.made is None or not _was_refused_early(seen):
        return set()
    shown = {index for pod in seen.pods if (index := index_of(pod)) is not None}
    return set(range(part.nodes)) - set(seen.made) - shown


def needs_history(seen: Seen, part: Part) -> bool:
    """True when the bill depends on whether nodes had pods before the known ones."""
    job = seen.job
    if job is None or not (job.get("status") or {}).get("startTime") or _is_late(job):
        return False
    shown = {index_of(pod) for pod in seen.pods}
    return len(shown) < part.nodes or any(True for _ in _of_gone_pods(seen, part))


def came_late(seen: Seen, part: Part) -> bool:
    """True when the first pod of a node came late, after refusals, and is known."""
    return (
        seen.made is not None
        and any(True for _ in _of_gone_pods(replace(seen, made=None), part))
        and (not any(True for _ in _of_gone_pods(seen, part)))
    )


def _is_first(pod: Json, seen: Seen) -> bool:
    """True when the cluster shows that the node had no earlier pod, or its Job had none due to a quota."""
    notes, index = pod["metadata"].get("annotations") or {}, index_of(pod)
    if names.INDEX_FAILURES in notes:
        return notes[names.INDEX_FAILURES] == "0" and names.INDEX_IGNORED not in notes
    if seen.made is not None and index is not None and _was_refused_early(seen):
        return seen.made.get(index, frozenset()) <= {pod["metadata"]["name"]}
    return _is_late(seen.job or {})


def _is_late(job: Json) -> bool:
    return bool((job.get("metadata", {}).get("annotations") or {}).get(names.DELAYED_PODS) == "true")


def _is_over(seen: Seen) -> bool:
    return seen.job is not None and job_end(seen.job) is not None


def _bound_at(pod: Json) -> float | None:
    status = pod.get("status") or {}
    for one in status.get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "True":
            return timestamp(one.get("lastTransitionTime"))
    return timestamp(status.get("startTime"))


def _ended_at(pod: Json) -> float | None:
    status = pod.get("status") or {}
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    ends = [
        timestamp(((one.get("state") or {}).get("terminated") or {}).get("finishedAt")) for one in containers
    ]
    known = [end for end in ends if end is not None]
    return max(known) + _behind_s(pod) if known else timestamp(pod["metadata"].get("deletionTimestamp"))


def _behind_s(pod: Json) -> float:
    """Least delay of its machine's clock behind the API server's, seconds.

    The kubelet accepts a pod after its binding; if its timestamp is earlier, its clock is behind.
    """
    bound, taken = _bound_at(pod), timestamp((pod.get("status") or {}).get("startTime"))
    return 0.0 if bound is None or taken is None else max(0.0, bound - taken)


def _job_ended_at(seen: Seen) -> float | None:
    end = job_end(seen.job) if seen.job is not None else None
    return timestamp(end.get("lastTransitionTime")) if end is not None else None


def _of_job(node: int, seen: Seen, part: Part) -> UsageInterval | None:
    created = timestamp(part.created)
    if seen.job is None:
        return None if created is None else UsageInterval(node, created, created)
    start = timestamp((seen.job.get("status") or {}).get("startTime"))
    if start is None:
        return None
    end = _job_ended_at(seen)
    return UsageInterval(node, start, None if end is None else max(start, end))
