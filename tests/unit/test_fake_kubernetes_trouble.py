"""What a test can do to the fake cluster: to its server, its nodes, its pods; and what watches receive."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.request

import kubernetes_asyncio
import pytest
from fakes.kubernetes import JOBS, NODES, PODS, PRIORITIES, Cluster, Program


@pytest.fixture
def cluster():
    """One node with 8 CPUs, whose time only `advance` moves."""
    with Cluster(speed=0) as cluster:
        yield cluster


def pod(name="p", labels=None, **spec):
    """A pod of one container that runs until it is stopped."""
    container = {"name": "main", "image": "registry.local/train:1"}
    whole = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": whole}


def gpu_pod(name, gpus, **spec):
    """One that requests GPUs."""
    body = pod(name, **spec)
    body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return body


def reason(item, kind):
    """Reason of a condition that is True."""
    for one in item["status"].get("conditions") or ():
        if one["type"] == kind and one["status"] == "True":
            return one.get("reason")
    return None


def ask(cluster, method, path, body=None, kind="application/json"):
    """One request; answers status and text."""
    headers = {"Authorization": f"Bearer {cluster.access.admin_token}", "Content-Type": kind}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(cluster.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def watch(cluster, query, act):
    """Events of a watch of pods during which *act* happens; the watch is ended afterwards."""

    def later():
        act()
        cluster.end_watches()

    timer = threading.Timer(0.2, later)
    timer.start()
    _status, text = ask(cluster, "GET", f"/api/v1/namespaces/default/pods?watch=true&{query}")
    timer.join()
    events = [json.loads(line) for line in text.splitlines()]
    return [(event["type"], event["object"]["metadata"].get("name")) for event in events]


def test_a_watch_sees_what_leaves_its_selector_as_deleted(cluster):
    """A pod that turns from Running to Succeeded leaves a watch of running ones."""
    cluster.script(Program(seconds=5), pod="p")
    cluster.create(PODS, pod())

    events = watch(cluster, "fieldSelector=status.phase%3DRunning", lambda: cluster.advance(5))

    assert events[0] == ("ADDED", "p")
    assert events[-1] == ("DELETED", "p")


def test_a_watch_goes_on_from_a_version(cluster):
    """Nothing earlier, everything later, with the selected labels."""
    cluster.create(PODS, pod("old", {"run": "a"}))
    version = json.loads(ask(cluster, "GET", "/api/v1/pods")[1])["metadata"]["resourceVersion"]

    def act():
        cluster.create(PODS, pod("other", {"run": "b"}))
        cluster.create(PODS, pod("fresh", {"run": "a"}))

    events = watch(cluster, f"resourceVersion={version}&labelSelector=run%3Da", act)

    assert events[0] == ("ADDED", "fresh")
    assert {name for _kind, name in events} == {"fresh"}


def test_initial_events_end_with_a_bookmark(cluster):
    """A streaming list: ADDED, then the bookmark that marks the end."""
    cluster.create(PODS, pod())
    query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"

    events = watch(cluster, query, lambda: None)

    assert events == [("ADDED", "p"), ("BOOKMARK", None)]


def test_a_cut_watch_breaks_off(cluster):
    """The connection ends midway, without the last chunk."""
    timer = threading.Timer(0.2, cluster.cut_watches)
    timer.start()

    with pytest.raises((http.client.HTTPException, OSError)):
        ask(cluster, "GET", "/api/v1/namespaces/default/pods?watch=true")
    timer.join()


def test_a_lost_answer_has_happened(cluster):
    """`when="after"`: the Job exists though its creator got a 500."""
    cluster.next_error("create", "pods", 500, when="after")

    status, _text = ask(cluster, "POST", "/api/v1/namespaces/default/pods", pod())

    assert status == 500
    assert cluster.get(PODS, "p") is not None


def test_an_outage_answers_nobody_until_it_is_over(cluster):
    """Connections are closed without an answer; afterwards everything is as before."""
    cluster.outage()
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(cluster, "GET", "/version")

    cluster.outage(down=False)

    assert ask(cluster, "GET", "/version")[0] == 200


def test_a_token_that_ran_out_is_refused(cluster):
    """401 after its lifetime."""
    everything = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
    token = cluster.user("bob", everything, lifetime_s=60)
    cluster.access.admin_token = token

    before = ask(cluster, "GET", "/api/v1/pods")[0]
    cluster.advance(61)

    assert (before, ask(cluster, "GET", "/api/v1/pods")[0]) == (200, 401)


def test_a_silent_node_keeps_its_pods_running_until_they_are_evicted(cluster):
    """Unknown after 50 s, evicted 60 s later, still Running; back again, the pod ends."""
    toleration = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    cluster.create(PODS, pod(tolerations=[{**toleration, "tolerationSeconds": 60}]))

    cluster.node("node-0").silence()
    cluster.advance(51)
    node = cluster.get(NODES, "node-0")
    cluster.advance(60)
    evicted = cluster.get(PODS, "p")
    cluster.node("node-0").revive()
    cluster.advance(31)

    assert [one["effect"] for one in node["spec"]["taints"]] == ["NoSchedule", "NoExecute"]
    assert evicted["status"]["phase"] == "Running"
    assert reason(evicted, "DisruptionTarget") == "DeletionByTaintManager"
    assert cluster.get(PODS, "p") is None


def test_a_more_important_pod_takes_the_place_of_another(cluster):
    """Its status has the reason, and it ends within its grace period."""
    cluster.add_node("gpu-0", gpus=4)
    cluster.create(PRIORITIES, {"metadata": {"name": "high"}, "value": 100})
    cluster.create(PODS, gpu_pod("low", 4, terminationGracePeriodSeconds=5))

    cluster.script(Program(term="ignore"), pod="nobody")
    cluster.create(PODS, gpu_pod("urgent", 4, priorityClassName="high"))
    cluster.advance(6)

    urgent = cluster.get(PODS, "urgent")
    assert cluster.get(PODS, "low") is None
    assert (urgent["spec"]["nodeName"], urgent["status"]["phase"]) == ("gpu-0", "Running")


def test_a_kubelet_refuses_when_asked(cluster):
    """UnexpectedAdmissionError: Failed, without containers, without conditions."""
    cluster.node("node-0").reject_next("UnexpectedAdmissionError", "Allocate failed due to device lost")

    cluster.create(PODS, pod())

    status = cluster.get(PODS, "p")["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "UnexpectedAdmissionError")
    assert "containerStatuses" not in status
    assert "conditions" not in status


@pytest.mark.parametrize(
    ("trouble", "shown"),
    [
        (lambda p: p.oom(), ("", "OOMKilled", 137)),
        (lambda p: p.exit(42), ("", "Error", 42)),
        (lambda p: p.evict_by_kubelet(), ("Evicted", "Error", 137)),
    ],
)
def test_ends_of_pods_look_as_recorded(cluster, trouble, shown):
    """Reason of the pod, reason and code of the container."""
    cluster.script(Program(term="ignore"))
    cluster.create(PODS, pod())

    trouble(cluster.pod("p"))
    cluster.advance(1)

    status = cluster.get(PODS, "p")["status"]
    ended = status["containerStatuses"][0]["state"]["terminated"]
    assert (status.get("reason", ""), ended["reason"], ended["exitCode"]) == shown
    assert status["phase"] == "Failed"


def test_a_shutdown_of_a_node_ends_its_pods_as_terminated(cluster):
    """A spot notice with graceful shutdown: TerminationByKubelet."""
    cluster.script(Program(term_code=0))
    cluster.create(PODS, pod())

    cluster.node("node-0").shut_down(30)
    cluster.advance(1)

    found = cluster.get(PODS, "p")
    assert (found["status"]["phase"], found["status"]["reason"]) == ("Failed", "Terminated")
    assert reason(found, "DisruptionTarget") == "TerminationByKubelet"


def test_a_missing_image_shows_why_and_heals(cluster):
    """ImagePullBackOff; when the image is there, the next try starts the container."""
    cluster.images.missing("registry.local/train:1")
    cluster.create(PODS, pod())
    cluster.advance(2)
    waiting = cluster.get(PODS, "p")["status"]["containerStatuses"][0]["state"]["waiting"]["reason"]

    cluster.images.found("registry.local/train:1")
    cluster.advance(10)

    assert waiting == "ImagePullBackOff"
    assert cluster.get(PODS, "p")["status"]["phase"] == "Running"


def test_a_resize_waits_for_room(cluster):
    """Deferred while another pod uses the CPUs, done when it has ended."""
    for name, cpus in (("big", "6"), ("small", "1")):
        body = pod(name)
        body["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpus}}
        cluster.create(PODS, body)
    container = {"name": "main", "resources": {"requests": {"cpu": "4"}}}
    kind = "application/strategic-merge-patch+json"
    path = "/api/v1/namespaces/default/pods/small/resize"

    status, _text = ask(cluster, "PATCH", path, {"spec": {"containers": [container]}}, kind)
    cluster.advance(0)
    deferred = reason(cluster.get(PODS, "small"), "PodResizePending")
    cluster.pod("big").delete(0)
    cluster.advance(1)

    small = cluster.get(PODS, "small")["status"]
    assert (status, deferred) == (200, "Deferred")
    assert small["containerStatuses"][0]["resources"] == {"requests": {"cpu": "4"}}


def test_the_asynchronous_client_lists_and_watches(cluster, tmp_path):
    """The client that triggers use: a list, then a watch from its version."""
    path = cluster.kubeconfig(tmp_path / "config")
    cluster.create(PODS, pod("first"))

    async def look():
        api = await kubernetes_asyncio.config.new_client_from_config(str(path))
        async with api:
            core = kubernetes_asyncio.client.CoreV1Api(api)
            listed = await core.list_namespaced_pod("default")
            stream = kubernetes_asyncio.watch.Watch()
            version = listed.metadata.resource_version
            cluster.create(PODS, pod("second"))
            async for event in stream.stream(core.list_namespaced_pod, "default", resource_version=version):
                await stream.close()
                return [item.metadata.name for item in listed.items], event["object"].metadata.name
        return None

    assert asyncio.run(look()) == (["first"], "second")


def test_a_spot_node_that_vanishes_costs_the_job_one_pod(cluster):
    """Garbage collection fails its pod, and the Job recreates it on the next node."""
    cluster.add_node("spot-0", gpus=1)
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
    template = gpu_pod("x", 1)
    spec = {"completions": 1, "parallelism": 1, "completionMode": "Indexed", "backoffLimit": 0}
    template = {"spec": template["spec"]}
    body = {
        "metadata": {"name": "train"},
        "spec": {**spec, "podFailurePolicy": {"rules": rules}, "template": template},
    }
    cluster.create(JOBS, body)

    cluster.node("spot-0").vanish(delete_after_s=30)
    cluster.advance(30 + 60)
    waiting = cluster.list(PODS)
    cluster.add_node("spot-1", gpus=1)

    (fresh,) = cluster.list(PODS)
    assert [one["status"]["phase"] for one in waiting] == ["Pending"]
    assert (fresh["spec"]["nodeName"], fresh["status"]["phase"]) == ("spot-1", "Running")
    assert "failed" not in cluster.get(JOBS, "train")["status"]


def test_the_last_finalizer_takes_a_deleted_pod_with_it(cluster):
    """The finalizer is never written away first: DELETED still has it, as recorded."""
    held = pod()
    held["metadata"]["finalizers"] = ["example.com/hold"]
    cluster.create(PODS, held)
    cluster.pod("p").delete(0)
    seen = []
    cluster.do(lambda: cluster.store.listeners.append(lambda change: seen.append((change.kind, change.item))))
    kind = "application/merge-patch+json"

    ask(cluster, "PATCH", "/api/v1/namespaces/default/pods/p", {"metadata": {"finalizers": None}}, kind)

    kinds = [(kind, item["metadata"].get("finalizers")) for kind, item in seen if item["kind"] == "Pod"]
    assert kinds == [("DELETED", ["example.com/hold"])]
