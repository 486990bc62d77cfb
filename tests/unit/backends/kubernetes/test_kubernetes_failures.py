"""Unit tests of the failure table: what the API server shows, and how the backend classifies it.

Fields are those that a real Kubernetes 1.36 wrote; each row of docs/reference/failures.md is one here.
"""

import json
from pathlib import Path

import pytest

from envscaler_airflow.backends.kubernetes import failures, names
from envscaler_airflow.backends.kubernetes import job_snapshot as reading
from envscaler_airflow.backends.kubernetes.failures import end_of, read_attempt, waiting_for
from envscaler_airflow.backends.kubernetes.handles import Part
from envscaler_airflow.backends.kubernetes.job_changes import unneeded
from envscaler_airflow.backends.kubernetes.job_snapshot import Seen
from envscaler_airflow.run import NodeStatus

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "failures.md"
AT = "2026-11-29T17:00:00Z"
NOW = reading.timestamp(AT)


def pod(*, phase="Running", main=None, node="node0", index=0, meta=None, **status):
    """Return a pod; *main* is the state of the training's container."""
    statuses = [{"name": "main", "image": "train:1", "state": main}] if main is not None else []
    return {
        "metadata": {
            "name": f"job-{index}-abcde",
            "namespace": "ns",
            "uid": f"pod-{index}",
            "creationTimestamp": AT,
            "labels": {names.INDEX: str(index)},
            **(meta or {}),
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def ended(code, reason="Error", message=""):
    """Return the state of a container that ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": AT}}


def waiting(reason, message=""):
    """Return the state of a container that waits."""
    return {"waiting": {"reason": reason, "message": message}}


def when(kind, reason="", message="", status="True"):
    """Return a condition."""
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": AT,
    }


def unscheduled(why):
    """Return the condition of a pod that the scheduler cannot place."""
    return when("PodScheduled", "Unschedulable", f"0/5 nodes are available: {why}", "False")


def job(*conditions, nodes=1, stop=None, queue=None, suspend=False, **status):
    """Return a Job with these conditions."""
    labels = {names.NODES: str(nodes)} | ({names.QUEUE: queue} if queue else {})
    return {
        "metadata": {
            "name": "job",
            "namespace": "ns",
            "uid": "job",
            "labels": labels,
            "annotations": {names.STOP: json.dumps(stop)} if stop else {},
        },
        "spec": {"completions": nodes, "suspend": suspend},
        "status": {"conditions": list(conditions), **status},
    }


REFUSED = "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu. More."
SAID = json.dumps({"reason": "cuda-out-of-memory", "detail": "CUDA out of memory"})
ENDS = {
    "application error": (
        pod(phase="Failed", main=ended(3)),
        ("failed", 3, None),
    ),
    "command not found": (
        pod(phase="Failed", main=ended(127)),
        ("not-found", 127, None),
    ),
    "drained": (pod(phase="Failed", main=ended(85)), ("drained", 85, None)),
    "stopped": (pod(phase="Failed", main=ended(87)), ("stopped", 87, None)),
    "orphaned": (pod(phase="Failed", main=ended(86)), ("orphaned", 86, None)),
    "set-up failed": (pod(phase="Failed", main=ended(88)), ("setup-failed", 88, None)),
    "init container failed": (
        pod(
            phase="Failed",
            main=waiting("PodInitializing"),
            initContainerStatuses=[{"name": "install", "state": ended(7)}],
        ),
        ("setup-failed", 7, None),
    ),
    "no python3 in the image": (
        pod(phase="Failed", main=ended(128, "StartError", 'exec: "python3": not found. More')),
        ("setup-failed", 128, None),
    ),
    "out of memory": (
        pod(phase="Failed", main=ended(137, "OOMKilled")),
        ("out-of-memory", 137, 9),
    ),
    "CUDA out of memory": (
        pod(phase="Failed", main=ended(1, message=SAID)),
        ("cuda-out-of-memory", 1, None),
    ),
    "killed by a signal": (pod(phase="Failed", main=ended(137)), ("killed", None, 9)),
    "eviction by the API": (
        pod(phase="Failed", main=ended(143), conditions=[when("DisruptionTarget", "EvictionByEvictionAPI")]),
        ("lost", None, None),
    ),
    "preemption": (
        pod(phase="Failed", main=ended(143), conditions=[when("DisruptionTarget", "PreemptionByScheduler")]),
        ("lost", None, None),
    ),
    "node silent": (
        pod(phase="Failed", conditions=[when("DisruptionTarget", "DeletionByTaintManager")]),
        ("lost", None, None),
    ),
    "node gone": (
        pod(phase="Failed", conditions=[when("DisruptionTarget", "DeletionByPodGC")]),
        ("lost", None, None),
    ),
    "node pressure": (
        pod(phase="Failed", main=ended(137), conditions=[when("DisruptionTarget", "TerminationByKubelet")]),
        ("lost", None, None),
    ),
    "evicted for local storage": (
        pod(phase="Failed", main=ended(137), reason="Evicted", message="Pod exceeds 4Mi. More"),
        ("lost", None, None),
    ),
    "refused: out of GPUs": (
        pod(phase="Failed", reason="OutOfnvidia.com/gpu", message=REFUSED),
        ("lost", None, None),
    ),
    "refused: admission": (
        pod(phase="Failed", reason="UnexpectedAdmissionError", message="Pod was rejected: Allocate failed"),
        ("lost", None, None),
    ),
    "pod deadline": (
        pod(phase="Failed", main=ended(143), reason="DeadlineExceeded", message="too long"),
        ("deadline-exceeded", None, None),
    ),
}
NOT_FOUND = "rpc error: code = NotFound desc = no such image"
WAITS = {
    "unschedulable": (
        pod(
            phase="Pending",
            node=None,
            conditions=[when("PodScheduled", "Unschedulable", "0/5 nodes are available. no", "False")],
        ),
        ("scheduling", "0/5 nodes are available"),
    ),
    "scheduler has not acted yet": (
        pod(phase="Pending", node=None),
        ("scheduling", "waits for the scheduler"),
    ),
    "gated": (
        pod(phase="Pending", node=None, conditions=[when("PodScheduled", "SchedulingGated", "", "False")]),
        ("gated", "waits for its scheduling gates"),
    ),
    "image does not exist": (
        pod(phase="Pending", main=waiting("ImagePullBackOff", f"Back-off: ErrImagePull: {NOT_FOUND}")),
        ("image", f"ErrImagePull of train:1: {NOT_FOUND}"),
    ),
    "image may not be pulled": (
        pod(phase="Pending", main=waiting("ErrImagePull", "unexpected status: 401 Unauthorized")),
        ("image", "ErrImagePull of train:1: unexpected status: 401 Unauthorized"),
    ),
    "registry does not answer": (
        pod(phase="Pending", main=waiting("ErrImagePull", "dial tcp: lookup r: no such host")),
        ("pulling", "ErrImagePull of train:1: dial tcp: lookup r: no such host"),
    ),
    "image is not on the node": (
        pod(phase="Pending", main=waiting("ErrImageNeverPull", "not present")),
        ("image", "ErrImageNeverPull of train:1: not present"),
    ),
    "image name is wrong": (
        pod(phase="Pending", main=waiting("InvalidImageName", "couldn't parse")),
        ("image", "InvalidImageName of train:1: couldn't parse"),
    ),
    "claim is missing": (
        pod(
            phase="Pending",
            node=None,
            conditions=[unscheduled('persistentvolumeclaim "d" not found. not found')],
        ),
        ("refused", '0/5 nodes are available: persistentvolumeclaim "d" not found'),
    ),
    "claim is not bound": (
        pod(
            phase="Pending",
            node=None,
            conditions=[unscheduled("pod has unbound immediate PersistentVolumeClaims. not found")],
        ),
        ("volume", "0/5 nodes are available: pod has unbound immediate PersistentVolumeClaims"),
    ),
    "Secret is missing": (
        pod(phase="Pending", main=waiting("CreateContainerConfigError", 'secret "absent" not found')),
        ("config", 'CreateContainerConfigError: secret "absent" not found'),
    ),
    "starting": (pod(phase="Pending", main=waiting("ContainerCreating")), ("starting", "")),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_has_its_class(name):
    """Reason, exit code and signal; the owner's table maps them to the next step."""
    body, (reason, code, number) = ENDS[name]

    got = end_of(body)

    assert (got.reason, got.exit_code, got.signal) == (reason, code, number)


@pytest.mark.parametrize("message", ["[" * 4096, '{"reason": ["failed"]}', '{"reason": "root"}', "9" * 4096])
def test_a_message_that_the_training_wrote_decides_nothing(message):
    """The kubelet passes on 4,096 bytes of any kind; then the exit code counts (B1)."""
    got = end_of(pod(phase="Failed", main=ended(3, message=message)))

    assert (got.reason, got.exit_code) == ("failed", 3)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_has_its_reason(name):
    """Kind and one human-readable line, the same for every version of the scheduler."""
    body, expected = WAITS[name]

    assert waiting_for(body, Seen(None, server_time=NOW + 5, wait_for_node_s=60)) == expected


OTHERS = {
    "volume cannot be mounted": "test_a_volume_that_cannot_be_mounted_is_told_by_its_event",
    "quota used up": "test_a_quota_and_a_queue_are_waits_with_a_reason",
    "pod is refused": "test_a_pod_that_the_api_server_refuses_is_told_from_one_that_waits",
    "pod is refused for another reason": "test_a_pod_that_the_api_server_refuses_is_told_from_one_that_waits",
    "queue has not admitted it": "test_a_quota_and_a_queue_are_waits_with_a_reason",
    "Job deadline": "test_a_deadline_of_the_job_is_one_unless_a_stop_set_it",
    "requested stop": "test_a_deadline_of_the_job_is_one_unless_a_stop_set_it",
    "Job deleted": "test_a_job_that_is_gone_is_lost",
    "node overdue": "test_a_pod_on_a_silent_node_is_lost_after_three_minutes",
    "pod stuck on a node that answers": "test_a_pod_on_a_silent_node_is_lost_after_three_minutes",
    "volume unreachable": "test_a_volume_out_of_reach_is_no_want_of_capacity",
    "other part failed": "test_when_one_part_has_failed_the_others_are_not_needed",
}
"""Rows that need more than one pod, and the test of each."""


def test_every_row_of_the_table_is_a_test():
    """And every test has its row."""
    cells = [line.split("|")[1].strip() for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    rows = [cell for cell in cells if cell != "class"]

    assert sorted(rows) == sorted([*ENDS, *WAITS, *OTHERS])
    assert all(callable(globals().get(name)) for name in OTHERS.values())


def test_when_one_part_has_failed_the_others_are_not_needed():
    """A Job ends its own pods; the owner ends those of the other Job.

    A pod that drained on request ends no other.
    """
    head, rest = Part("ns", "a", "u", 1), Part("ns", "b", "v", 1, first=1)
    runs = Seen(job(), (pod(main={"running": {}}),))
    failed = Seen(job(when("Failed", "PodFailurePolicy")), (pod(phase="Failed", main=ended(3)),))
    left = Seen(job(when("Failed", "PodFailurePolicy")), (pod(phase="Failed", main=ended(85)),))

    assert unneeded([(head, runs), (rest, failed)]) == [(head, runs)]
    assert unneeded([(head, runs), (rest, Seen(None))]) == [(head, runs)]
    assert unneeded([(head, runs), (rest, left)]) == []
    assert unneeded([(head, runs), (rest, runs)]) == []


def test_no_node_within_the_time_given_is_want_of_capacity():
    """By the server's clock: sixty seconds after the scheduler refused the pod."""
    body, _ = WAITS["unschedulable"]

    kinds = [
        waiting_for(body, Seen(None, server_time=now, wait_for_node_s=60))[0]
        for now in (NOW + 59, NOW + 60, None)
    ]

    assert kinds == ["scheduling", "capacity", "scheduling"]


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("5 node(s) had volume node affinity conflict. preemption", "placement"),
        (
            "2 node(s) didn't match Pod's node affinity/selector, 3 node(s) had no available volume zone. x",
            "placement",
        ),
        (
            "1 Insufficient cpu, 4 node(s) didn't match PersistentVolume's node affinity. preemption",
            "capacity",
        ),
    ],
)
def test_a_volume_out_of_reach_is_no_want_of_capacity(why, kind):
    """Unless a node that reaches it lacks capacity, according to the scheduler's message (D4)."""
    body = pod(phase="Pending", node=None, conditions=[unscheduled(why)])

    kinds = [waiting_for(body, Seen(None, server_time=NOW + at, wait_for_node_s=60))[0] for at in (59, 60)]

    assert kinds == ["scheduling", kind]


@pytest.mark.parametrize("name", ["Secret is missing", "claim is not bound", "volume cannot be mounted"])
def test_what_a_pod_lacks_is_waited_for_and_then_refused(name):
    """As long as for an image, by the server's clock; the message stays the same (D4)."""
    bound = [when("PodScheduled")]
    event = {"reason": "FailedMount", "message": "no such share", "involvedObject": {"uid": "pod-0"}}
    bodies = {
        "Secret is missing": pod(
            phase="Pending", main=waiting("CreateContainerConfigError", "absent"), conditions=bound
        ),
        "claim is not bound": WAITS["claim is not bound"][0],
        "volume cannot be mounted": pod(phase="Pending", main=waiting("ContainerCreating"), conditions=bound),
    }

    told = [
        nodes_of(Seen(job(), (bodies[name],), events=(event,), server_time=NOW + at, wait_for_image_s=600))[0]
        for at in (599, 600)
    ]

    assert told[0][1] in ("config", "volume")
    assert told[1][:2] == ("pending", "refused")
    assert told[1][2].startswith("not within 600 s: ")
    assert told[1][2].endswith(told[0][2])


def test_a_webhook_that_never_answers_is_given_up():
    """From its first refusal on; a quota may wait as long as the stage may (D3)."""
    refusal = {
        "reason": "FailedCreate",
        "firstTimestamp": AT,
        "message": 'failed calling webhook "w": refused',
    }
    quota = {**refusal, "message": "exceeded quota: gpus"}

    def kind(event, at):
        return nodes_of(Seen(job(), events=(event,), server_time=NOW + at, wait_for_image_s=600))[0][1]

    assert [kind(refusal, at) for at in (599, 600)] == ["config", "refused"]
    assert kind(quota, 86400) == "quota"


def test_an_image_that_does_not_come_within_its_time_is_given_up():
    """By the server's clock, from when the pod had its node: the wait for a node counts separately.

    The message says that the image was late, unless the image does not exist.
    """
    bound = when("PodScheduled")
    body = pod(phase="Pending", main=waiting("ErrImagePull", "i/o timeout"), conditions=[bound])

    told = [
        waiting_for(body, Seen(None, server_time=now, wait_for_image_s=600))
        for now in (NOW + 599, NOW + 600, None)
    ]
    gone = pod(phase="Pending", main=waiting("ErrImagePull", "x: not found"), conditions=[bound])
    never = waiting_for(gone, Seen(None, server_time=NOW + 700, wait_for_image_s=600))

    assert [kind for kind, _ in told] == ["pulling", "image", "pulling"]
    assert [detail.startswith("not within 600 s: ErrImagePull of ") for _, detail in told] == [
        False,
        True,
        False,
    ]
    assert (never[0], never[1].startswith("ErrImagePull of ")) == ("image", True)


def test_a_pull_that_fails_and_is_tried_again_is_one_wait():
    """The kubelet alternates between two reasons: the displayed reason stays the same."""
    failed, backing_off = (
        pod(phase="Pending", main=waiting(reason, before + "dial tcp: i/o timeout"))
        for reason, before in (("ErrImagePull", ""), ("ImagePullBackOff", "Back-off pulling: ErrImagePull: "))
    )

    assert waiting_for(failed, Seen(None)) == waiting_for(backing_off, Seen(None))


def test_an_image_that_never_comes_is_pending_until_it_is_given_up():
    """The owner acts on a pending node; after that, the node causes no further request."""
    body, _ = WAITS["image does not exist"]

    assert nodes_of(Seen(job(), (body,)))[0][:2] == ("pending", "image")
    assert nodes_of(Seen(job(stop={"grace_s": 0}), (body,)))[0][:2] == ("starting", "pulling")


def nodes_of(seen, nodes=1):
    """Return state, reason and detail of every node."""
    return [(one.state, one.reason, one.detail) for one in read_attempt(seen, nodes).nodes]


def test_a_job_that_is_gone_is_lost():
    """A user deleted it: it is known to be gone with its pods, also with those on a silent node."""
    gone = "its Job is gone from the cluster"
    running, over = pod(main={"running": {}}), pod(phase="Failed", index=1, main=ended(143))
    silent = overdue(600)

    assert nodes_of(Seen(None), 2) == [("lost", "lost", gone)] * 2
    assert nodes_of(Seen(None, (running, over)), 2) == [
        ("running", "", f"is being ended: {gone}"),
        ("lost", "lost", gone),
    ]
    assert nodes_of(Seen(None, silent.pods, server_time=silent.server_time))[0][:2] == ("lost", "silent")


def test_a_container_that_ended_runs_until_its_pod_has():
    """The sidecar is still uploading."""
    assert nodes_of(Seen(job(), (pod(main=ended(0)),)))[0][0] == "running"
    assert read_attempt(Seen(job(), (pod(phase="Succeeded", main=ended(0)),)), 1).nodes == (
        NodeStatus(0, "ended", exit_code=0, reason="succeeded"),
    )


def test_a_disrupted_pod_is_made_again_unless_its_job_ended():
    """Ignored by the policy: pending, with the reason; lost once the Job has failed."""
    body, _ = ENDS["preemption"]

    assert nodes_of(Seen(job(), (body,)))[0][0] == "pending"
    over = job(when("Failed", "BackoffLimitExceeded"))
    assert nodes_of(Seen(over, (body,)))[0][:2] == ("lost", "lost")


def test_the_pod_that_came_instead_counts():
    """An older or draining pod does not determine the state of the node."""
    old = pod(phase="Failed", conditions=[when("DisruptionTarget", "PreemptionByScheduler")])
    going = pod(main={"running": {}}, meta={"name": "b", "deletionTimestamp": AT})
    fresh = pod(main={"running": {}}, meta={"name": "a", "creationTimestamp": "2026-11-29T17:01:00Z"})

    assert nodes_of(Seen(job(), (fresh, old, going)))[0][0] == "running"


def test_a_node_that_went_is_told_by_its_job_when_its_pod_is_gone():
    """By completed and failed indexes, and by the Job's own end."""
    done = job(completedIndexes="0,2-3", failedIndexes="1", nodes=5)

    states = [(state, reason) for state, reason, _ in nodes_of(Seen(done), 5)]

    assert states == [
        ("ended", "succeeded"),
        ("ended", "failed"),
        ("ended", "succeeded"),
        ("ended", "succeeded"),
        ("pending", ""),
    ]


def test_a_deadline_of_the_job_is_one_unless_a_stop_set_it():
    """The same condition; the note records who requested the stop, and how."""
    over = when("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")

    assert nodes_of(Seen(job(over)))[0][:2] == ("ended", "deadline-exceeded")
    assert nodes_of(Seen(job(over, stop={"grace_s": 30})))[0][:2] == ("ended", "stopped")
    assert nodes_of(Seen(job(over, stop={"grace_s": 0})))[0][:2] == ("ended", "killed")


def test_a_success_before_the_stop_stays_a_success():
    """A request that comes too late changes nothing."""
    over = job(when("Complete", "CompletionsReached"), stop={"grace_s": 30}, completedIndexes="0")

    assert nodes_of(Seen(over))[0][:2] == ("ended", "succeeded")


def test_a_quota_and_a_queue_are_waits_with_a_reason():
    """The reason is shown, and the backend waits."""
    event = {"reason": "FailedCreate", "message": 'pods "x" is forbidden: exceeded quota: gpus, requested: 1'}

    assert nodes_of(Seen(job(), events=(event,)))[0][:2] == ("pending", "quota")
    queued = nodes_of(Seen(job(queue="team", suspend=True)))
    assert queued == [("pending", "queue", "waits for its Kueue queue team")]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true', "refused"),
        ('Pod "x" is invalid: spec.volumes[0].name: Required value', "refused"),
        ('pods "x" is forbidden: maximum cpu usage per Container is 2, but limit is 4', "refused"),
        ('pods "x" is forbidden: minimum memory usage per Pod is 1Gi, but request is 512Mi', "refused"),
        ('admission webhook "w" denied the request: unsigned', "refused"),
        ("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: unsigned", "refused"),
        ('pods "x" is forbidden: no PriorityClass with name high was found', "refused"),
        ('pods "x" is forbidden: failed quota: q: must specify limits.cpu for: main', "refused"),
        ('failed calling webhook "w": connection refused', "config"),
    ],
)
def test_a_pod_that_the_api_server_refuses_is_told_from_one_that_waits(words, kind):
    """By the API server's message."""
    event = {"reason": "FailedCreate", "message": f"Error creating: {words}"}

    assert nodes_of(Seen(job(), events=(event,)))[0] == ("pending", kind, f"Error creating: {words}")


def test_a_volume_that_cannot_be_mounted_is_told_by_its_event():
    """The container only reports ContainerCreating."""
    event = {
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed: secret "absent" not found',
        "involvedObject": {"uid": "pod-0"},
    }
    body = pod(phase="Pending", main=waiting("ContainerCreating"))

    assert nodes_of(Seen(job(), (body,), events=(event,)))[0][:2] == ("starting", "volume")


def overdue(seconds, *, ready=None):
    """Return a pod whose deletion was due *seconds* ago, on a node that is *ready* or cannot be read."""
    body = pod(
        main={"running": {}},
        meta={"deletionTimestamp": AT},
        conditions=[when("DisruptionTarget", "DeletionByTaintManager")],
    )
    nodes = {} if ready is None else {"node0": {"status": {"conditions": [when("Ready", status=ready)]}}}
    return Seen(job(), (body,), nodes, server_time=NOW + seconds)


def test_a_pod_on_a_silent_node_is_lost_after_three_minutes():
    """By the clock that wrote the deletion; a ready node gets ten minutes (D4)."""
    assert nodes_of(overdue(179))[0][0] == "running"
    assert nodes_of(overdue(180))[0][:2] == ("lost", "silent")
    assert nodes_of(overdue(600, ready="Unknown"))[0][0] == "lost"
    assert nodes_of(overdue(599, ready="True"))[0][0] == "running"
    assert nodes_of(overdue(600, ready="True"))[0] == ("lost", "lost", "node node0 cannot end it since 600 s")


def test_without_the_servers_clock_nothing_is_overdue():
    """Unknown is never lost."""
    seen = overdue(600)

    assert nodes_of(Seen(seen.job, seen.pods))[0][0] == "running"


def test_a_termination_message_is_data():
    """A reason that the protocol does not know, or any other text, changes nothing."""
    for text in ("not json", '{"reason": "rm -rf"}', '{"reason": 3}', "[]"):
        got = end_of(pod(phase="Failed", main=ended(3, message=text)))
        assert got.reason == "failed"
        assert len(got.detail) <= reading.MAX_DETAIL_CHARACTERS


@pytest.mark.parametrize(
    ("text", "expected"), [(None, set()), ("", set()), ("0-2", {0, 1, 2}), ("1,3-4", {1, 3, 4})]
)
def test_completed_indexes_are_read(text, expected):
    """Ranges and single ones."""
    assert reading.indexes(text) == expected


def test_a_node_that_never_came_is_told_as_that_after_the_stop():
    """The stop records what was missing; a node that ran was merely killed."""
    waits, _ = WAITS["unschedulable"]
    late = Seen(job(), (waits,), server_time=NOW + 60, wait_for_node_s=60)
    words = "0/5 nodes are available"
    over = when("Failed", "DeadlineExceeded")

    assert failures.unmet(read_attempt(late, 1)) == ("capacity", words)
    assert nodes_of(Seen(job(over, stop={"grace_s": 0, "unmet": words}))) == [("ended", "capacity", words)]
    given_up = Seen(job(stop={"grace_s": 0}), (waits,), server_time=NOW + 60, wait_for_node_s=60)
    assert nodes_of(given_up)[0][:2] == ("pending", "scheduling")
    assert failures.unmet(read_attempt(Seen(job(), (pod(main={"running": {}}),)), 1)) is None


def test_a_node_without_a_pod_has_ended_once_its_job_makes_none_any_more():
    """A silent node keeps one pod, so that the Job cannot end: the other nodes have still ended."""
    target = when("FailureTarget", "DeadlineExceeded")
    held = overdue(600).pods[0]

    got = nodes_of(Seen(job(target, nodes=2, stop={"grace_s": 0}), (held,), server_time=NOW + 600), 2)

    assert [(state, reason) for state, reason, _ in got] == [("lost", "silent"), ("ended", "killed")]
