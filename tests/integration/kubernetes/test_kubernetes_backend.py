"""The Kubernetes backend against an API server with every kind of fault."""

from base64 import b64decode
from dataclasses import replace

import pytest
from fakes.kubernetes import CONFIG_MAPS, JOBS, NODES, PODS, QUOTAS, SECRETS, Program
from fakes.kubernetes.resources import LIMIT_RANGES, NAMESPACES
from integration.kubernetes.rig import OFFER, eventually, ours, over, request_for, running

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backends.kubernetes import client, names
from envscaler_airflow.errors import BackendError, CapacityError, NoOfferError, SpecError
from envscaler_airflow.planning.offers import Allocation


def test_with_its_job_everything_goes(cluster, connect):
    """ConfigMap, Secret and pods are owned by the Job."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    kinds = (JOBS, PODS, CONFIG_MAPS, SECRETS)
    assert [len(ours(cluster, kind)) for kind in kinds] == [1, 1, 1, 1]

    backend.cluster.delete(names.jobs("default", handle.name), uid=handle.details["uid"])

    eventually(lambda: [len(ours(cluster, kind)) for kind in kinds], lambda left: left == [0] * 4)


def test_keys_of_the_store_s_connection_lie_in_the_secret_of_the_attempt(cluster, connect):
    """With names that no variable of the training has; pods with an identity of their own get none."""
    login = StoreLogin({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    connect().submit(request_for(store_login=login, secret_env={"AWS_ACCESS_KEY_ID": "of-the-training"}))
    connect(store_secret="store-login").submit(request_for(attempt=2, store_login=login))

    first, second = (one["data"] for one in ours(cluster, SECRETS))

    assert {name: b64decode(value).decode() for name, value in first.items()} == {
        "AWS_ACCESS_KEY_ID": "of-the-training",
        "store.AWS_ACCESS_KEY_ID": "a",
        "store.AWS_SECRET_ACCESS_KEY": "b",
    }
    assert second.keys() == {"TOKEN"}


@pytest.mark.parametrize("watches", [False, True], ids=["calls", "watch"])
def test_a_job_that_somebody_deletes_is_over_when_its_pods_are(cluster, connect, watches):
    """They save within their grace period, and no other attempt runs beside them; overdue pods are killed."""
    cluster.script(Program(term="ignore"), container="main")
    backend = connect(watches=watches)
    handle = backend.submit(request_for())
    running(backend, handle)

    backend.cluster.delete(names.jobs("default", handle.name), uid=handle.details["uid"])
    [node] = eventually(lambda: backend.observe(handle).nodes, lambda nodes: nodes[0].detail)

    assert (node.state, node.detail) == ("running", "is being ended: its Job is gone from the cluster")
    assert [interval.end for interval in backend.usage(handle)] == [None]
    backend.stop(handle, grace_s=0)
    assert over(backend, handle) == [("lost", "lost")]
    assert cluster.list(PODS, "default") == []


def test_a_job_of_somebody_else_is_refused(cluster, connect):
    """The same name, another owner: the backend changes nothing of it."""
    backend, request = connect(), request_for()
    job = backend.render(request)["job"]
    job["metadata"]["labels"] = job["spec"]["template"]["metadata"]["labels"] = {"app": "other"}
    cluster.create(JOBS, job)

    with pytest.raises(BackendError, match="is not of this run") as caught:
        backend.submit(request)

    assert not caught.value.transient
    assert backend.find(request) is None


@pytest.mark.parametrize("verb", ["create", "patch"])
@pytest.mark.parametrize("drop", [True, False], ids=["no-answer", "500"])
def test_a_lost_answer_starts_nothing_twice(cluster, connect, verb, drop):
    """The request took effect, but its answer was lost: the repeat finds the Job."""
    backend = connect()
    cluster.next_error(verb, "jobs", 500, when="after", drop=drop)

    handle = backend.submit(request_for())

    running(backend, handle)
    assert len(cluster.list(JOBS, "default")) == 1
    assert len(cluster.list(PODS, "default")) == 1


@pytest.mark.parametrize("what", ["configmaps", "secrets", "jobs"])
def test_a_start_that_was_cut_off_is_finished(cluster, connect, what):
    """The owner dies at any line; no pod runs before all objects exist, and the next submit continues."""
    backend, request = connect(), request_for()
    verb = "patch" if what == "jobs" else "create"
    cluster.next_error(verb, what, 500, times=client.TRIES)
    with pytest.raises(BackendError):
        backend.submit(request)
    assert cluster.list(PODS, "default") == []
    assert len(cluster.list(JOBS, "default")) == 1
    assert backend.find(request) is None

    handle = backend.submit(request)

    running(backend, handle)
    assert backend.find(request) == handle


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(cluster, connect, status):
    """Three failures, then an answer."""
    backend = connect()
    cluster.next_error("create", "jobs", status, times=3)

    running(backend, backend.submit(request_for()))


def test_an_expired_token_and_a_server_that_is_gone_are_no_death(cluster, connect):
    """The state is unknown: the error is transient, and afterwards the attempt is still running."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    cluster.next_error("get", "jobs", 401)
    with pytest.raises(BackendError) as unauthorized:
        backend.observe(handle)
    cluster.outage()
    with pytest.raises(BackendError) as gone:
        backend.observe(handle)
    cluster.outage(down=False)

    assert (unauthorized.value.status, unauthorized.value.transient) == (401, True)
    assert gone.value.transient
    running(backend, handle)


def test_a_server_that_is_gone_for_ten_minutes_stops_no_training_and_starts_nothing(cluster, connect):
    """The state is unknown meanwhile, and no node is dead; a repeated start makes one Job."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    [before] = backend.pods(handle)

    cluster.outage()
    cluster.advance(600)
    with pytest.raises(BackendError) as looked:
        backend.observe(handle)
    with pytest.raises(BackendError) as started:
        backend.submit(request_for(attempt=2))
    cluster.outage(down=False)

    assert looked.value.transient
    assert started.value.transient
    running(backend, handle)
    [after] = backend.pods(handle)
    assert after[1]["metadata"]["uid"] == before[1]["metadata"]["uid"]
    second = backend.submit(request_for(attempt=2))
    running(backend, second)
    assert len(cluster.list(JOBS, "default")) == 2


def test_a_write_that_met_another_is_tried_again(cluster, connect):
    """A 409 for a resource version is repeated; a 409 for a uid would be final."""
    backend = connect()
    cluster.next_error("patch", "jobs", 409, times=2)

    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.next_error("patch", "jobs", 409, times=client.TRIES)
    with pytest.raises(BackendError) as caught:
        backend.stop(handle, grace_s=0)  # no request reached it, and the caller gets an error

    assert caught.value.transient
    backend.stop(handle, grace_s=0)
    assert over(backend, handle) == [("ended", "killed")]


@pytest.mark.parametrize("asked", [600, 5])
def test_pods_have_the_grace_that_the_stop_gives_them(cluster, connect, monkeypatch, asked):
    """Their first grace of 30 s no longer counts: it was set before the time for a checkpoint was known."""
    cluster.script(Program(term="ignore"), container="main")
    backend = connect()
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=2)))
    running(backend, handle)
    real = backend.cluster.patch

    def seen_by_the_job_controller(path, body):
        answer = real(path, body)
        cluster.advance(1)
        return answer

    monkeypatch.setattr(backend.cluster, "patch", seen_by_the_job_controller)
    backend.stop(handle, grace_s=asked)

    assert [pod["metadata"]["deletionGracePeriodSeconds"] for _, pod in backend.pods(handle)] == [asked] * 2
    backend.stop(handle, grace_s=0)
    assert over(backend, handle) == [("ended", "killed")] * 2


def test_what_no_node_could_ever_hold_is_refused(connect):
    """By the pod's requests; where nodes are added it waits, and the scheduler reports why."""
    for asked in ({"cpu": "4000"}, {"memory": "900Ti"}):
        spec = {"resources": {"requests": asked}}
        offer = replace(OFFER, vcpus=9999.0, memory_gib=1e6)
        with pytest.raises(NoOfferError, match="has capacity for 0"):
            connect().submit(request_for(spec=spec, allocation=Allocation(offer)))


def test_a_label_that_is_too_long_is_a_fault_of_the_request(cluster, connect):
    """70 characters in a pod_override: the API server names it, and nothing remains."""
    override = {"metadata": {"labels": {"team": "x" * 70}}}

    with pytest.raises(SpecError, match="must be no more than 63"):
        connect(pod_override=override).submit(request_for())

    assert cluster.list(JOBS, "default") == []


def test_an_image_that_is_gone_when_a_pod_is_recreated_is_reported(cluster, connect):
    """Hours after the start: pending because of an image that retrying will not bring."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.images.missing("train:*")

    cluster.pod(f"{handle.name}-0-").evict()
    for one in cluster.list(NODES):
        cluster.node(one["metadata"]["name"]).delete()
    cluster.add_node("fresh")

    [node] = eventually(
        lambda: backend.observe(handle).nodes, lambda nodes: nodes[0].reason in ("image", "pulling")
    )
    assert (node.state, node.reason) == ("pending", "image")
    assert "train:1" in node.detail


def test_a_namespace_that_does_not_exist_is_a_fault_of_the_request(connect):
    """The message names it."""
    with pytest.raises(SpecError, match="nowhere"):
        connect(namespace="nowhere").submit(request_for())


def test_an_image_that_cannot_be_named_fails_at_once(cluster, connect):
    """It leaves no Job."""
    with pytest.raises(SpecError, match="InvalidImageName"):
        connect(image="Not An Image").submit(request_for())

    assert cluster.list(JOBS, "default") == []


def test_no_room_is_told_with_the_schedulers_words(cluster, connect):
    """Nothing remains."""
    backend = connect(cluster_prices=[{"name": "large", "vcpus": 64, "memory_gib": 1}])
    [offer] = backend.offers()

    with pytest.raises(CapacityError, match="0/1 nodes are available"):
        backend.submit(request_for(allocation=Allocation(offer)))

    assert cluster.list(JOBS, "default") == []


def test_where_nodes_are_added_a_start_waits(connect):
    """The node is being added: pending, with the reason."""
    backend = connect(cluster_prices=[{"name": "large", "vcpus": 64, "memory_gib": 1}], wait_for_node_s=600)
    [offer] = backend.offers()

    handle = backend.submit(request_for(allocation=Allocation(offer)))

    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "scheduling")


def test_a_preempted_pod_is_made_again_and_the_attempt_goes_on(cluster, connect):
    """The policy ignores disruptions: the same Job, another pod."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    first = cluster.pod(f"{handle.name}-0-").object["metadata"]["uid"]

    cluster.pod(f"{handle.name}-0-").preempt()

    eventually(
        lambda: [pod["metadata"]["uid"] for pod in cluster.list(PODS, "default")],
        lambda uids: uids and first not in uids,
    )
    running(backend, handle)


def test_an_out_of_memory_is_reported(cluster, connect):
    """From the kubelet's report."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    cluster.pod(f"{handle.name}-0-").oom()

    assert over(backend, handle) == [("ended", "out-of-memory")]


def test_a_refusal_of_the_kubelet_is_a_loss(cluster, connect):
    """It counts as a failure of the Job, but not as one of the training."""
    cluster.node("node-0").reject_next("UnexpectedAdmissionError", "Allocate failed")
    backend = connect()

    handle = backend.submit(request_for())

    assert over(backend, handle) == [("lost", "lost")]


def test_a_deadline_ends_the_attempt(connect):
    """The machine's own deadline."""
    backend = connect()

    handle = backend.submit(request_for(deadline_s=5.0))

    assert over(backend, handle) == [("ended", "deadline-exceeded")]


def test_one_node_that_went_leaves_the_others(cluster, connect):
    """Code 85 fails its index only; code 1 ends the Job."""
    backend = connect()
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=3)))
    running(backend, handle)

    cluster.pod(f"{handle.name}-1-").exit(85)
    eventually(lambda: backend.observe(handle).nodes[1].state, lambda state: state == "ended")
    assert [node.state for node in backend.observe(handle).nodes] == ["running", "ended", "running"]
    cluster.pod(f"{handle.name}-2-").exit(1)

    reasons = [reason for _, reason in over(backend, handle)]
    assert reasons[1:] == ["drained", "failed"]
    assert reasons[0] in ("killed", "stopped")


@pytest.mark.parametrize(("code", "told"), [(0, ("ended", "succeeded")), (1, ("ended", "failed"))])
def test_a_container_of_others_keeps_no_training_that_has_ended(cluster, connect, monkeypatch, code, told):
    """The proxy of a mesh, added by a webhook, never ends: its pod would cost money until its deadline."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    proxy = {"spec": {"containers": [{"name": "main"}, {"name": "proxy", "image": "proxy:1"}]}}
    backend = connect(pod_override=proxy)
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(code, container="main")
    eventually(lambda: backend.observe(handle).nodes[0].detail, lambda detail: "container proxy" in detail)
    assert backend.observe(handle).nodes[0].state == "running"

    cluster.advance(180)
    assert over(backend, handle) == [told]
    [billed] = backend.usage(handle)
    assert billed.end is not None
    backend.release(handle)

    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])


def test_a_quota_is_waited_for(cluster, connect):
    """Shown in its own words."""
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    backend = connect()

    handle = backend.submit(request_for())

    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "quota")
    assert "exceeded quota: cpus" in node.detail


def test_a_limit_range_that_the_stage_is_above_refuses_it_at_once(cluster, connect):
    """Retrying will not help: the stage would be pending for a month."""
    rule = {"type": "Container", "max": {"memory": "512Mi"}}
    cluster.create(LIMIT_RANGES, {"metadata": {"name": "small"}, "spec": {"limits": [rule]}})

    with pytest.raises(SpecError, match="maximum memory usage per Container is 512Mi"):
        connect().submit(request_for())

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


def enforce(cluster, level):
    """The pod security standard of the namespace."""
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
    cluster.api.patch(NAMESPACES, "", "default", "application/merge-patch+json", labels)


@pytest.mark.parametrize(
    ("level", "settings"), [("baseline", {}), ("restricted", {"user": 1000})], ids=["baseline", "restricted"]
)
def test_pods_satisfy_the_standard_of_their_namespace(cluster, connect, level, settings):
    """With the restricted standard, if the deployment sets a user."""
    enforce(cluster, level)
    backend = connect(**settings)

    running(backend, backend.submit(request_for()))


def test_pods_that_their_namespace_forbids_fail_at_once(cluster, connect):
    """Retrying will not help; the API server's message names the setting, and no Job remains."""
    enforce(cluster, "restricted")
    backend = connect()

    with pytest.raises(SpecError, match=r"violates PodSecurity.*runAsNonRoot"):
        backend.submit(request_for())

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


@pytest.mark.parametrize(
    ("what", "verb", "status", "error"),
    [
        ("configmaps", "create", 422, SpecError),
        ("secrets", "create", 422, SpecError),
        ("secrets", "create", 403, BackendError),
        ("jobs", "patch", 403, BackendError),
    ],
)
def test_a_start_that_can_never_be_finished_leaves_no_job(cluster, connect, what, verb, status, error):
    """A Job whose objects cannot be created would wait for ever."""
    backend = connect()
    cluster.next_error(verb, what, status)

    with pytest.raises(error):
        backend.submit(request_for())

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


def test_a_queue_admits_the_job(cluster, connect):
    """It stays suspended until another controller admits it; a stop before that is an end (feature G1)."""
    backend = connect(queue="team")
    handle = backend.submit(request_for())
    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "queue")
    assert backend.find(request_for()) == handle

    other = backend.submit(request_for(attempt=2))
    backend.stop(other, grace_s=0)
    assert over(backend, other) == [("ended", "stopped")]
    backend.cluster.patch(names.jobs("default", handle.name), {"spec": {"suspend": False}})

    running(backend, handle)


def test_a_pod_on_a_silent_node_is_lost_and_then_made_again(cluster, connect, monkeypatch):
    """Overdue for three minutes, and so is its status: the owner deletes it, the Job recreates it (D1)."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.node("node-0").silence()
    cluster.add_node("node-1")

    cluster.advance(50 + 60 + 30 + 170)
    assert backend.observe(handle).nodes[0].state == "running"
    assert backend.replace_nodes(handle, quiet_s={0: 400.0}) == ()
    cluster.advance(30)

    assert backend.observe(handle).nodes[0].state == "lost"
    assert backend.replace_nodes(handle, quiet_s={}) == ()
    assert backend.replace_nodes(handle, quiet_s={0: 179.0}) == ()
    assert len(backend.replace_nodes(handle, quiet_s={0: 180.0})) == 1
    cluster.advance(60)
    running(backend, handle)


def test_leftovers_are_the_jobs_of_this_store_with_their_age(cluster, connect, monkeypatch):
    """Until they are released; Jobs of another store are not read."""
    backend = connect()
    handle = backend.submit(request_for())
    backend.submit(request_for(store_url="file:///other"))
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now() + 3600)

    [found] = backend.leftovers("file:///store")

    assert (found.handle.name, found.generation, found.attempt, found.runs) == (handle.name, 1, 1, True)
    assert found.prefix == request_for().run_prefix
    assert 3600 <= found.age_s < 3700


def test_a_job_whose_labels_were_changed_hides_no_other_from_reap(cluster, connect, caplog):
    """It is named in the log, and left alone (A8)."""
    backend = connect()
    bad, good = backend.submit(request_for()), backend.submit(request_for(attempt=2))
    for value in ("two", None):
        labels = {"metadata": {"labels": {names.ATTEMPT: value}}}
        cluster.api.patch(JOBS, "default", bad.name, "application/merge-patch+json", labels)

        found = list(backend.leftovers("file:///store"))

        assert [one.handle.name for one in found] == [good.name]
    assert caplog.text.count(f"job={bad.name} left alone") == 2


def test_what_has_another_uid_by_now_is_left_alone(cluster, connect, monkeypatch):
    """A Job that was recreated between read and write: the API server answers 422.

    Source: Kubernetes, controller_ref_manager.go: a patch with another uid is Invalid.
    """
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    job = cluster.get(JOBS, handle.name)
    stale = {**handle.details, "uid": "0" * 8}
    looked = backend._look(handle)
    monkeypatch.setattr(
        backend, "_look", lambda _handle: [(replace(part, uid=stale["uid"]), seen) for part, seen in looked]
    )

    backend.stop(handle, grace_s=30)
    with pytest.raises(BackendError, match="uid") as caught:
        backend.cluster.patch(names.jobs("default", handle.name), {"metadata": {"uid": stale["uid"]}})

    assert caught.value.status == 409
    assert not caught.value.transient
    assert cluster.get(JOBS, handle.name)["spec"] == job["spec"]

    backend.cluster.delete(names.jobs("default", handle.name), uid=stale["uid"])
    assert cluster.get(JOBS, handle.name)["metadata"]["uid"] == handle.details["uid"]


def test_a_release_of_what_is_gone_is_done(cluster, connect, monkeypatch):
    """Its time to live ended between read and write."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(0)
    over(backend, handle)
    looked = backend._look(handle)
    monkeypatch.setattr(backend, "_look", lambda _handle: looked)
    backend.cluster.delete(names.jobs("default", handle.name), uid=handle.details["uid"])

    backend.release(handle)

    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])
