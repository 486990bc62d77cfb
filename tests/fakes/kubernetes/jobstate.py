"""Pure rules of Jobs: how pods count, which are missing, and when a Job has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fakes.kubernetes.objects import Object, condition, is_going, is_over, seconds_of

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
Action = Literal["FailJob", "FailIndex", "Ignore", "Count"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a Job ends."""

    kind: Literal["Complete", "Failed"]
    reason: str
    message: str

    def condition(self, name: str) -> Object:
        """A condition *name* with this reason and message."""
        return {"type": name, "status": "True", "reason": self.reason, "message": self.message}


@dataclass(slots=True)
class Tally:
    """The state of a Job's pods at one sync. `failed`, `ignored` and `succeeded` are not yet counted."""

    active: list[Object] = field(default_factory=list)
    failed: list[Object] = field(default_factory=list)
    ignored: list[Object] = field(default_factory=list)
    succeeded: list[Object] = field(default_factory=list)
    excess: list[Object] = field(default_factory=list)
    missing: list[int | None] = field(default_factory=list)
    completed: set[int] = field(default_factory=set)
    failed_indexes: set[int] = field(default_factory=set)
    index_failures: dict[int, int] = field(default_factory=dict)
    index_due: dict[int, float] = field(default_factory=dict)
    fail_job: str = ""


def is_finished(job: Object) -> bool:
    """Return whether the status has Complete or Failed."""
    conditions = job.get("status", {}).get("conditions") or ()
    return any(one["type"] in {"Complete", "Failed"} and one["status"] == "True" for one in conditions)


def index_of(pod: Object) -> int | None:
    """Completion index of a pod."""
    text = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return int(text) if text is not None else None


def finished_at(pod: Object, otherwise: float) -> float:
    """When a pod ended: the latest finishedAt, else when Ready turned False, else *otherwise*."""
    ends = [
        seconds_of(one["state"]["terminated"]["finishedAt"])
        for one in pod["status"].get("containerStatuses") or ()
        if one["state"].get("terminated", {}).get("finishedAt")
    ]
    if ends:
        return max(ends)
    ready = condition(pod, "Ready")
    if ready is not None and ready["status"] != "True":
        return seconds_of(ready["lastTransitionTime"])
    return otherwise


def is_failed(job: Object, pod: Object) -> bool:
    """Return whether *pod* counts as failed, also while terminating, unless only failed ones are replaced."""
    if pod["status"].get("phase") == "Failed":
        return True
    if job["spec"]["podReplacementPolicy"] == "Failed":
        return False
    return is_going(pod) and pod["status"].get("phase") != "Succeeded"


def spread(indexes: set[int]) -> str:
    """Write indexes as the Job status does: ``0-2,5``."""
    parts: list[str] = []
    run: list[int] = []
    for index in [*sorted(indexes), None]:
        if run and (index is None or index != run[-1] + 1):
            if len(run) == 1:
                parts.append(str(run[0]))
            else:
                parts.append(f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}")
            run = []
        if index is not None:
            run.append(index)
    return ",".join(parts)


def gathered(text: str | None) -> set[int]:
    """Read ``0-2,5``."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def judge(job: Object, pod: Object) -> tuple[Action, str]:
    """The action of the podFailurePolicy for a failed pod, and the message of FailJob."""
    for at, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules") or ()):
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        message = ""
        if rule.get("onExitCodes"):
            hit = _exit_hit(rule["onExitCodes"], pod)
            if hit is not None:
                message = f"Container {hit[0]} for pod {name} failed with exit code {hit[1]}"
        else:
            kind = _condition_hit(rule.get("onPodConditions") or (), pod)
            message = f"Pod {name} has condition {kind}" if kind else ""
        if message:
            return rule["action"], f"{message} matching {rule['action']} rule at index {at}"
    return "Count", ""


def _exit_hit(rule: Object, pod: Object) -> tuple[str, int] | None:
    status = pod["status"]
    for one in [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]:
        if rule.get("containerName") not in {None, one["name"]}:
            continue
        ended = one["state"].get("terminated")
        if ended is None or ended["exitCode"] == 0:
            continue
        if (ended["exitCode"] in rule["values"]) == (rule["operator"] == "In"):
            return one["name"], ended["exitCode"]
    return None


def _condition_hit(rules: list[Object], pod: Object) -> str:
    for rule in rules:
        found = condition(pod, rule["type"])
        if found is not None and found["status"] == rule.get("status", "True"):
            return str(rule["type"])
    return ""


def tally(job: Object, pods: list[Object]) -> Tally:
    """Sort the pods of a running Job."""
    count = Tally()
    spec, status = job["spec"], job["status"]
    indexed = spec["completionMode"] == "Indexed"
    completions = spec.get("completions") or 0
    count.completed = {one for one in gathered(status.get("completedIndexes")) if one < completions}
    count.failed_indexes = gathered(status.get("failedIndexes"))
    for pod in pods:
        index = index_of(pod) if indexed else None
        if index is not None and index >= completions:
            _beyond(count, pod)
        else:
            _sort(job, pod, index, count)
    if indexed:
        _missing_indexes(job, pods, count)
    else:
        _missing_any(job, pods, count)
    return count


def _beyond(count: Tally, pod: Object) -> None:
    """A pod above a reduced completions is deleted and does not count."""
    count.excess.append(pod)


def _sort(job: Object, pod: Object, index: int | None, count: Tally) -> None:
    tracked = TRACKING in (pod["metadata"].get("finalizers") or ())
    if pod["status"].get("phase") == "Succeeded":
        if index is not None:
            count.completed.add(index)
        if tracked:
            count.succeeded.append(pod)
    elif is_failed(job, pod):
        if tracked:
            _sort_failed(job, pod, index, count)
    elif not is_going(pod):
        count.active.append(pod)


def _sort_failed(job: Object, pod: Object, index: int | None, count: Tally) -> None:
    action, message = judge(job, pod) if pod["status"].get("phase") == "Failed" else ("Count", "")
    if action == "FailJob":
        count.fail_job = count.fail_job or message
    if action == "Ignore":
        count.ignored.append(pod)
        return
    count.failed.append(pod)
    limit = job["spec"].get("backoffLimitPerIndex")
    if index is None or limit is None:
        return
    text = (pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-index-failure-count", "0")
    failures = int(text) + 1
    count.index_failures[index] = failures
    count.index_due[index] = finished_at(pod, 0.0) + min(10.0 * 2 ** (failures - 1), 600.0)
    if failures > limit or action == "FailIndex":
        count.failed_indexes.add(index)


def _holding(job: Object, pods: list[Object]) -> list[Object]:
    """Pods that keep their place: also terminating ones, where only failed ones are replaced."""
    if job["spec"]["podReplacementPolicy"] != "Failed":
        return []
    return [pod for pod in pods if is_going(pod) and not is_over(pod)]


def _missing_indexes(job: Object, pods: list[Object], count: Tally) -> None:
    spec = job["spec"]
    held = _holding(job, pods)
    taken = {index_of(pod) for pod in [*count.active, *held]}
    done = count.completed | count.failed_indexes
    open_ones = [index for index in range(spec["completions"]) if index not in done]
    wanted = min(spec["parallelism"], len(open_ones))
    room = wanted - len(count.active) - len(held)
    if room > 0:
        count.missing = [index for index in open_ones if index not in taken][:room]
    elif len(count.active) > wanted:
        _drop(count, wanted)
    by_index: dict[int, Object] = {}
    for pod in pods:
        index = index_of(pod)
        if index is not None and pod["status"].get("phase") == "Failed":
            by_index[index] = pod
    if spec.get("backoffLimitPerIndex") is not None:
        for index in [one for one in count.missing if one is not None and one not in count.index_due]:
            _recall(by_index.get(index), index, count)


def _recall(pod: Object | None, index: int, count: Tally) -> None:
    """An index's failures so far, from its last pod that still exists."""
    if pod is None:
        return
    text = (pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-index-failure-count", "0")
    count.index_failures[index] = int(text) + 1
    count.index_due[index] = finished_at(pod, 0.0) + min(10.0 * 2 ** int(text), 600.0)


def _missing_any(job: Object, pods: list[Object], count: Tally) -> None:
    spec, status = job["spec"], job["status"]
    wanted = spec["parallelism"]
    done = status.get("succeeded", 0) + len(count.succeeded)
    if spec.get("completions") is not None:
        wanted = min(wanted, max(0, spec["completions"] - done))
    elif done:
        wanted = min(wanted, len(count.active))
    room = wanted - len(count.active) - len(_holding(job, pods))
    count.missing = [None] * max(0, room)
    if len(count.active) > wanted:
        _drop(count, wanted)


def _drop(count: Tally, wanted: int) -> None:
    """Surplus pods: pending ones and the highest indexes first."""
    order = sorted(
        count.active,
        key=lambda pod: (pod["status"].get("phase") != "Running", index_of(pod) or 0),
        reverse=True,
    )
    gone = order[: len(count.active) - wanted]
    count.excess += gone
    count.active = order[len(gone) :]


def verdict(job: Object, count: Tally, now: float) -> Verdict | None:
    """How the Job ended, or None while it runs. A recorded verdict stays."""
    for early, kind in (("SuccessCriteriaMet", "Complete"), ("FailureTarget", "Failed")):
        found = condition(job, early)
        if found is not None:
            return Verdict("Complete" if kind == "Complete" else "Failed", found["reason"], found["message"])
    spec, status = job["spec"], job["status"]
    if count.fail_job:
        return Verdict("Failed", "PodFailurePolicy", count.fail_job)
    failed = status.get("failed", 0) + len(count.failed)
    restarts = _restarts(job, count)
    limit = spec["backoffLimit"]
    if (count.failed and failed > limit) or (restarts is not None and restarts >= max(limit, 1)):
        return Verdict("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and now >= seconds_of(status["startTime"]) + deadline:
        return Verdict("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
    return _index_verdict(spec, count) or _success(spec, status, count)


def _restarts(job: Object, count: Tally) -> int | None:
    if job["spec"]["template"]["spec"].get("restartPolicy") != "OnFailure":
        return None
    statuses = [one for pod in count.active for one in pod["status"].get("containerStatuses") or ()]
    return sum(one["restartCount"] for one in statuses)


def _index_verdict(spec: Object, count: Tally) -> Verdict | None:
    most = spec.get("maxFailedIndexes")
    if most is not None and len(count.failed_indexes) > most:
        message = "Job has exceeded the specified maximal number of failed indexes"
        return Verdict("Failed", "MaxFailedIndexesExceeded", message)
    if count.failed_indexes and len(count.failed_indexes | count.completed) >= (spec.get("completions") or 0):
        return Verdict("Failed", "FailedIndexes", "Job has failed indexes")
    return None


def _success(spec: Object, status: Object, count: Tally) -> Verdict | None:
    completions = spec.get("completions")
    if spec["completionMode"] == "Indexed":
        is_done = len(count.completed) >= completions
    elif completions is None:
        is_done = bool(status.get("succeeded", 0) + len(count.succeeded)) and not count.active
    else:
        is_done = status.get("succeeded", 0) + len(count.succeeded) >= completions
    if is_done:
        return Verdict("Complete", "CompletionsReached", "Reached expected number of succeeded pods")
    return None
