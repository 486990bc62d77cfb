"""The fake cluster through the official client: Jobs, logs, watches, refusals."""

from __future__ import annotations

import json
import urllib.request

import pytest
from fakes.kubernetes import JOBS, NODES, PODS, Cluster, Program


@pytest.fixture
def cluster():
    """One node with 8 CPUs, whose time only `advance` moves."""
    with Cluster(speed=0) as cluster:
        yield cluster


def job(name="train", nodes=2, command=("sleep", "10"), **spec):
    """An Indexed Job of one container."""
    container = {"name": "main", "image": "registry.local/train:1", "command": list(command)}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    whole = {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    return {"metadata": {"name": name}, "spec": {**whole, "template": template, **spec}}


def call(cluster, method, path, body=None, headers=None):
    """One request as the administrator; answers status and object."""
    data = json.dumps(body).encode() if body is not None else None
    every = {"Authorization": f"Bearer {cluster.access.admin_token}", "Content-Type": "application/json"}
    request = urllib.request.Request(cluster.url + path, data, {**every, **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
            return error.code, json.loads(text) if text.startswith("{") else text


def conditions(item):
    """Type to reason of the conditions that are True."""
    return {one["type"]: one.get("reason") for one in item["status"]["conditions"] if one["status"] == "True"}


def test_a_job_runs_to_its_end(cluster):
    """Two pods of ten seconds; the Job is complete after them, with both indexes."""
    cluster.create(JOBS, job(command=["sh", "-c", "echo hello $JOB_COMPLETION_INDEX; sleep 10"]))
    running = [pod["status"]["phase"] for pod in cluster.list(PODS)]
    logs = [cluster.log(pod["metadata"]["name"]) for pod in cluster.list(PODS)]

    cluster.advance(10)

    status = cluster.get(JOBS, "train")["status"]
    assert running == ["Running", "Running"]
    assert logs == ["hello 0\n", "hello 1\n"]
    assert (status["succeeded"], status["completedIndexes"], status["ready"]) == (2, "0,1", 0)
    assert list(conditions({"status": status})) == ["SuccessCriteriaMet", "Complete"]


def test_a_job_has_its_own_labels_or_else_those_of_its_template(cluster):
    """Recorded: scenario 06 (none of its own) and 29 (one of its own)."""
    one, other = job("bare"), job("named")
    for each in (one, other):
        each["spec"]["template"]["metadata"] = {"labels": {"app": "train"}}
    bare = cluster.create(JOBS, one)
    named = {**other, "metadata": {"name": "named", "labels": {"dag": "d1"}}}

    labels = cluster.create(JOBS, named)["metadata"]["labels"]

    assert labels == {"dag": "d1"}
    assert bare["metadata"]["labels"].keys() == {
        "app",
        "batch.kubernetes.io/controller-uid",
        "batch.kubernetes.io/job-name",
        "controller-uid",
        "job-name",
    }


def test_a_failed_pod_fails_a_job_without_retries(cluster):
    """Exit code 3 and backoffLimit 0: BackoffLimitExceeded, and the other pod is stopped."""
    cluster.script(Program(seconds=5, exit_code=3), pod="train-1-*")
    cluster.create(JOBS, job(command=["sleep", "60"]))

    cluster.advance(5 + 31)

    found = cluster.get(JOBS, "train")
    assert conditions(found) == {"FailureTarget": "BackoffLimitExceeded", "Failed": "BackoffLimitExceeded"}
    assert found["status"]["failed"] == 2


def test_an_evicted_pod_is_ignored_and_made_again_after_ten_seconds(cluster):
    """An Ignore rule leaves `failed` unchanged; the replacement waits for the back-off."""
    ignore = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}
    cluster.create(JOBS, job(command=["sleep", "600"], podFailurePolicy=ignore))

    cluster.pod("train-1-").evict(grace_s=0)
    cluster.advance(9)
    before = len(cluster.list(PODS))
    cluster.advance(2)

    assert (before, len(cluster.list(PODS))) == (1, 2)
    assert "failed" not in cluster.get(JOBS, "train")["status"]


def test_a_pod_without_room_says_so_as_the_scheduler_does(cluster):
    """No node has GPUs: PodScheduled is False with the scheduler's message."""
    body = job(nodes=1)
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}

    cluster.create(JOBS, body)

    (pod,) = cluster.list(PODS)
    (found,) = pod["status"]["conditions"]
    assert found["reason"] == "Unschedulable"
    assert found["message"].startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")


def test_a_deleted_node_fails_its_pods_after_a_minute(cluster):
    """Pod garbage collection: DeletionByPodGC, and the Job gets a new pod elsewhere."""
    cluster.add_node("spot-1", gpus=1)
    body = job(nodes=1, command=["sleep", "600"])
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    body["spec"]["podFailurePolicy"] = {
        "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
    }
    cluster.create(JOBS, body)
    (first,) = cluster.list(PODS)

    cluster.node("spot-1").vanish()
    cluster.add_node("spot-2", gpus=1)
    cluster.advance(45)
    (still,) = cluster.list(PODS)
    cluster.advance(30)

    (second,) = cluster.list(PODS)
    assert still["metadata"]["uid"] == first["metadata"]["uid"]
    assert still["status"]["phase"] == "Running"
    assert (second["spec"]["nodeName"], second["status"]["phase"]) == ("spot-2", "Running")
    assert cluster.get(NODES, "spot-1") is None


def test_refusals_have_the_real_wording(cluster):
    """AlreadyExists, NotFound, and a delete whose uid is another's."""
    cluster.create(JOBS, job())
    path = "/apis/batch/v1/namespaces/default/jobs"
    options = {"preconditions": {"uid": "11111111-1111-1111-1111-111111111111"}}

    again = call(cluster, "POST", path, job())
    absent = call(cluster, "GET", f"{path}/absent")
    other = call(cluster, "DELETE", f"{path}/train", {**options, "propagationPolicy": "Background"})

    assert (again[0], again[1]["reason"]) == (409, "AlreadyExists")
    assert (absent[0], absent[1]["message"]) == (404, 'jobs.batch "absent" not found')
    assert (other[0], other[1]["reason"], other[1]["details"]["kind"]) == (409, "Conflict", "Job")


def test_a_watch_from_a_forgotten_version_says_expired(cluster):
    """HTTP 200, one ERROR event with code 410, and the end."""
    cluster.create(JOBS, job())
    cluster.compact()
    path = "/apis/batch/v1/namespaces/default/jobs?watch=true&resourceVersion=1"

    status, event = call(cluster, "GET", path)

    assert (status, event["type"], event["object"]["code"]) == (200, "ERROR", 410)


def test_deleting_a_job_in_the_background_leaves_nothing(cluster):
    """The owner reference deletes the pods, with their grace period."""
    cluster.create(JOBS, job(command=["sh", "-c", "trap 'exit 143' TERM; sleep 600"]))

    call(cluster, "DELETE", "/apis/batch/v1/namespaces/default/jobs/train?propagationPolicy=Background")
    cluster.advance(1)

    assert cluster.list(PODS) == []


def test_errors_come_as_ordered(cluster):
    """One 500, one 429 in plain text, then success."""
    cluster.next_error("list", "pods", 500)
    cluster.next_error("list", "pods", 429)

    answers = [call(cluster, "GET", "/api/v1/namespaces/default/pods") for _ in range(3)]

    assert [status for status, _body in answers] == [500, 429, 200]
    assert answers[1][1] == "Too many requests, please try again later.\n"


def test_a_user_without_the_verb_is_told_which(cluster):
    """RBAC in the real words."""
    token = cluster.user("eve", [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}])
    headers = {"Authorization": f"Bearer {token}"}

    status, body = call(cluster, "GET", "/api/v1/namespaces/default/pods", headers=headers)

    assert status == 403
    assert body["message"] == (
        'pods is forbidden: User "eve" cannot list resource "pods" in API group "" in the namespace "default"'
    )
