"""Events that are late on a real cluster are late on the fake one, by its own clock (D15)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from fakes.kubernetes import EVENTS, JOBS, NAMESPACES, PODS, QUOTAS, Cluster, Pace, Program


def job(name="train", **pod):
    """A Job of one pod."""
    container = {"name": "main", "image": "train:1", **pod.pop("container", {})}
    spec = {"restartPolicy": "Never", "containers": [container], **pod}
    body = {"completions": 1, "completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": spec}}
    return {"metadata": {"name": name}, "spec": body}


def conditions(cluster, name="train"):
    """Types of the Job's conditions that are True."""
    found = cluster.get(JOBS, name)["status"].get("conditions") or ()
    return [one["type"] for one in found if one["status"] == "True"]


def shorten(cluster, name):
    """Set a deadline in the past."""
    found = cluster.store.get(JOBS, "default", name)
    cluster.store.edit(JOBS, found, lambda item: item["spec"].update(activeDeadlineSeconds=1))


def ask(cluster, path, token):
    """Status and text of a GET."""
    request = urllib.request.Request(cluster.url + path, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_job_completes_seconds_after_its_pods():
    """The success is known at once, the completion follows (D15)."""
    with Cluster(speed=0, pace=Pace(job_end_s=4)) as cluster:
        cluster.script(Program(seconds=10))
        cluster.create(JOBS, job())
        cluster.advance(11)

        assert conditions(cluster) == ["SuccessCriteriaMet"]

        cluster.advance(4)

        assert conditions(cluster) == ["SuccessCriteriaMet", "Complete"]


def test_a_job_that_looks_late_can_miss_a_success_for_a_deadline():
    """Pods have succeeded, the Job controller has not counted them, and a user sets the deadline (D15)."""
    with Cluster(speed=0, pace=Pace(job_sync_s=5)) as cluster:
        cluster.script(Program(seconds=10))
        cluster.create(JOBS, job())
        cluster.advance(12)
        assert cluster.list(PODS, "default")[0]["status"]["phase"] == "Succeeded"
        assert conditions(cluster) == []

        cluster.do(lambda: shorten(cluster, "train"))

        ends = cluster.get(JOBS, "train")["status"]["conditions"]
        assert [one["reason"] for one in ends if one["type"] == "FailureTarget"] == ["DeadlineExceeded"]


def test_a_refused_pod_is_told_late():
    """The event comes seconds after the refusal, by a quota or a webhook (D15)."""
    with Cluster(speed=0, pace=Pace(refusal_s=8)) as cluster:
        cluster.create(QUOTAS, {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
        cluster.create(JOBS, job())
        cluster.advance(7)

        assert [one for one in cluster.list(EVENTS) if one["reason"] == "FailedCreate"] == []

        cluster.advance(2)

        [event, *_] = [one for one in cluster.list(EVENTS) if one["reason"] == "FailedCreate"]
        assert "exceeded quota: q" in event["message"]


def test_a_webhook_denies_pods_until_it_does_not():
    """In the API server's words; the next try of the Job passes (D15)."""
    with Cluster(speed=0) as cluster:
        cluster.deny_pods("images must be signed")
        cluster.create(JOBS, job())
        cluster.advance(1)
        [event, *_] = [one for one in cluster.list(EVENTS) if one["reason"] == "FailedCreate"]
        assert 'admission webhook "policy.example.com" denied the request: images must' in event["message"]

        cluster.deny_pods()
        cluster.advance(60)

        assert len(cluster.list(PODS, "default")) == 1


@pytest.mark.parametrize(("partly", "ready"), [(False, 403), (True, 500)])
def test_a_server_that_has_just_started_refuses_those_it_will_let_in(partly, ready):
    """Only the masters pass, until it knows roles and bindings (D15)."""
    with Cluster(speed=0) as cluster:
        token = cluster.user("owner", [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}])
        pods = "/api/v1/namespaces/default/pods"

        cluster.restart_server(unready_s=30, partly=partly)

        status, text = ask(cluster, pods, token)
        assert (status, json.loads(text)["reason"]) == (403, "Forbidden")
        assert 'User "owner" cannot list resource "pods"' in json.loads(text)["message"]
        assert ask(cluster, "/readyz", token)[0] == ready
        assert ask(cluster, pods, cluster.access.admin_token)[0] == 200
        cluster.advance(30)
        assert ask(cluster, pods, token)[0] == ask(cluster, "/readyz", token)[0] == 200


def test_a_kubelet_that_starts_admits_its_running_pods_again():
    """One passes; one whose device is absent now fails although it ran (D15)."""
    with Cluster(nodes=0, speed=0) as cluster:
        node = cluster.add_node("gpus", gpus=1)
        cluster.create(JOBS, job("plain"))
        cluster.create(JOBS, job("gpu", container={"resources": {"limits": {"nvidia.com/gpu": "1"}}}))
        cluster.advance(1)
        node.allocate(**{"nvidia.com/gpu": "0"})

        node.restart_kubelet()
        cluster.advance(1)

        shown = {pod["metadata"]["name"].rsplit("-", 2)[0]: pod["status"] for pod in cluster.list(PODS)}
        assert (shown["plain"]["phase"], shown["gpu"]["phase"]) == ("Running", "Failed")
        assert shown["gpu"]["reason"] == "OutOfnvidia.com/gpu"


def test_a_pod_that_cannot_leave_stays_on_its_ready_node():
    """Neither signal ends it; once it can end, it does (D15)."""
    with Cluster(speed=0) as cluster:
        cluster.script(Program(seconds=600))
        cluster.create(JOBS, job())
        cluster.advance(1)
        pod = cluster.pod("train-0-")
        pod.hold()
        pod.delete(30)

        cluster.advance(500)

        [held] = cluster.list(PODS, "default")
        assert held["metadata"]["deletionTimestamp"]
        assert held["status"]["phase"] == "Running"
        pod.hold(on=False)
        cluster.advance(1)
        assert held["metadata"]["uid"] not in {one["metadata"]["uid"] for one in cluster.list(PODS)}


def test_a_log_that_is_lost_is_the_kubelets_own_error():
    """With status 200, as if the training had printed it (D15)."""
    with Cluster(speed=0) as cluster:
        cluster.create(JOBS, job())
        cluster.advance(1)
        pod = cluster.pod("train-0-")
        pod.print("hello\n")
        pod.lose_log()

        status, text = ask(
            cluster,
            f"/api/v1/namespaces/default/pods/{pod.object['metadata']['name']}/log",
            cluster.access.admin_token,
        )

        assert status == 200
        assert text.startswith('failed to try resolving symlinks in path "/var/log/pods/default_train-0-')


def test_a_namespace_takes_long_to_go():
    """It exists, and accepts nothing new, until it is deleted (D15)."""
    with Cluster(speed=0, namespaces=("short",), pace=Pace(namespace_s=20)) as cluster:
        request = urllib.request.Request(
            f"{cluster.url}/api/v1/namespaces/short",
            headers={"Authorization": f"Bearer {cluster.access.admin_token}"},
            method="DELETE",
        )
        urllib.request.urlopen(request, timeout=10).close()
        cluster.advance(19)

        assert cluster.get(NAMESPACES, "short")["status"]["phase"] == "Terminating"
        with pytest.raises(Exception, match="because it is being terminated"):
            cluster.create(JOBS, job(), "short")

        cluster.advance(2)

        assert cluster.get(NAMESPACES, "short") is None
