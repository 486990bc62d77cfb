"""Attempts of two offers, of a changing number of nodes, of other sizes, and with claims."""

import json
import time
from dataclasses import replace

import pytest
from fakes.kubernetes import CONFIG_MAPS, JOBS, NODES, PODS, QUOTAS, SECRETS
from fakes.kubernetes.resources import CLAIMS, DRIVERS
from integration.kubernetes.rig import MIXED, OFFER, eventually, ours, over, request_for, running, with_claim

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.errors import BackendError, CapacityError
from envscaler_airflow.owner.facts import usage_of, usd_of
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import AttemptState
from envscaler_airflow.run.state import Before

STARTED = 1e6
"""When an owner with a clock of its own started its attempt."""


def attempt_of(handle):
    """A live attempt, a dollar an hour."""
    priced = replace(OFFER, usd_per_hour=1.0)
    return AttemptState(1, 1, Allocation(priced), started_at=STARTED, handle=handle)


def test_a_mixed_attempt_is_a_job_for_each_offer(cluster, connect):
    """Ranks continue across the Jobs, each Job owns its objects, and all are deleted (feature B7)."""
    backend = connect()
    request = request_for(allocation=MIXED)

    handle = backend.submit(request)

    running(backend, handle)
    assert sorted(
        (job["metadata"]["name"], job["spec"]["completions"]) for job in cluster.list(JOBS, "default")
    ) == [(handle.name, 1), (f"{handle.name}-p1", 2)]
    assert [node for node, _ in backend.pods(handle)] == [0, 1, 2]
    assert list(backend.attempts()) == [handle]
    for part in backend.jobs():
        uid = part["metadata"]["uid"]
        backend.cluster.delete(names.jobs("default", part["metadata"]["name"]), uid=uid)
    kinds = (JOBS, PODS, CONFIG_MAPS, SECRETS)
    eventually(lambda: [len(ours(cluster, kind)) for kind in kinds], lambda left: left == [0] * 4)


@pytest.mark.parametrize(
    ("verb", "what", "nth"),
    [("create", "jobs", 2), ("create", "configmaps", 2), ("create", "secrets", 1), ("patch", "jobs", 2)],
)
def test_a_mixed_start_that_was_cut_off_is_finished(cluster, connect, verb, what, nth):
    """A crash between any two calls: nothing is started twice, and both Jobs run in the end."""
    backend, request = connect(), request_for(allocation=MIXED)
    calls = []
    real = getattr(backend.cluster, verb)

    def cut(path, body):
        if f"/{what}" in path:
            calls.append(path)
            if len(calls) == nth:
                raise KeyboardInterrupt
        return real(path, body)

    setattr(backend.cluster, verb, cut)
    with pytest.raises(KeyboardInterrupt):
        backend.submit(request)

    again = connect()
    handle = again.submit(request)

    running(again, handle)
    assert again.find(request) == handle
    assert len(cluster.list(JOBS, "default")) == 2
    assert len(cluster.list(PODS, "default")) == 3


def test_a_mixed_attempt_of_which_one_job_cannot_be_leaves_none(cluster, connect):
    """The second name belongs to another owner: the first Job is deleted, and nothing ran."""
    backend, request = connect(), request_for(allocation=MIXED)
    [_, second] = backend.render(request)["parts"]
    second["job"]["metadata"]["labels"] = {"app": "other"}
    cluster.create(JOBS, second["job"])

    with pytest.raises(BackendError, match="is not of this run"):
        backend.submit(request)

    assert [job["metadata"]["name"] for job in cluster.list(JOBS, "default")] == [second["name"]]
    assert cluster.list(PODS, "default") == []


def test_a_quota_for_jobs_that_has_room_for_one_part_leaves_none(cluster, connect):
    """The API server refuses the second Job."""
    cluster.create(QUOTAS, {"metadata": {"name": "jobs"}, "spec": {"hard": {"count/jobs.batch": "1"}}})
    backend = connect()

    with pytest.raises(BackendError, match="exceeded quota"):
        backend.submit(request_for(allocation=MIXED))

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


def test_a_cut_off_mixed_start_that_can_never_be_finished_leaves_none(cluster, connect, monkeypatch):
    """The first Job is of the previous try: a queue would admit it, and it would wait for ever for more."""
    backend, request = connect(queue="team"), request_for(allocation=MIXED)
    real = backend.cluster.create

    def broken(path, body):
        if body["metadata"]["name"].endswith("-p1"):
            raise BackendError("no answer", transient=True)
        return real(path, body)

    monkeypatch.setattr(backend.cluster, "create", broken)
    with pytest.raises(BackendError, match="no answer"):
        backend.submit(request)
    monkeypatch.undo()
    assert len(cluster.list(JOBS, "default")) == 1
    cluster.create(QUOTAS, {"metadata": {"name": "jobs"}, "spec": {"hard": {"count/jobs.batch": "1"}}})

    with pytest.raises(BackendError, match="exceeded quota"):
        backend.submit(request)

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


@pytest.mark.parametrize("deleted", [0, 1])
def test_a_mixed_attempt_whose_second_job_somebody_deleted_is_found_whole(cluster, connect, deleted):
    """The nodes of the deleted Job are lost, and the other is ended: a next attempt can start."""
    backend, request = connect(), request_for(allocation=MIXED)
    handle = backend.submit(request)
    running(backend, handle)
    part = handle.details["parts"][deleted]
    backend.cluster.delete(names.jobs("default", part["name"]), uid=part["uid"])
    eventually(lambda: len(cluster.list(JOBS, "default")), lambda count: count == 1)

    found = backend.find(request)

    assert found is not None
    assert (found.name, [one["first"] for one in found.details["parts"]]) == (handle.name, [0, 1])
    status = eventually(
        lambda: backend.replace_nodes(found, quiet_s={}) or backend.observe(found),
        lambda status: status.is_over,
    )
    assert [node.node for node in status.nodes] == [0, 1, 2]
    assert [node.node for node in status.nodes if node.state == "lost"] == ([1, 2] if deleted else [0])
    billed = backend.usage(found)
    assert sorted(one.node for one in billed) == [0, 1, 2]
    assert all(one.end is not None for one in billed)


def test_when_one_job_of_a_mixed_attempt_fails_the_owner_ends_the_other(cluster, connect):
    """A failed Job ends its own pods; the other's would wait for ever. A drained node ends no other node."""
    backend = connect()
    handle = backend.submit(request_for(allocation=MIXED))
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(85)
    eventually(lambda: backend.observe(handle).nodes[0].state, lambda state: state == "ended")
    backend.replace_nodes(handle, quiet_s={})
    assert [node.state for node in backend.observe(handle).nodes] == ["ended", "running", "running"]

    other = backend.submit(request_for(allocation=MIXED, attempt=2))
    running(backend, other)
    cluster.pod(f"{other.name}-p1-1-").exit(1)
    eventually(lambda: backend.observe(other).nodes[0].reason, lambda reason: reason == "unneeded")
    eventually(
        lambda: backend.replace_nodes(other, quiet_s={}) or backend.observe(other),
        lambda status: status.is_over,
    )

    reasons = [node.reason for node in backend.observe(other).nodes]
    assert (reasons[0], reasons[2]) == ("stopped", "failed")


ELASTIC = {
    "version": "v1",
    "name": "train",
    "entrypoint": ["x"],
    "distributed": {"launcher": "torchrun", "elastic": True},
    "num_nodes": {"min": 1, "max": 3},
}


def test_an_elastic_attempt_grows_and_shrinks_in_place(cluster, connect):
    """The same Job and the same first pod; the highest numbers end first. A repeat changes nothing."""
    backend = connect()
    handle = backend.submit(request_for(spec=ELASTIC))
    running(backend, handle)
    [(_, first)] = backend.pods(handle)

    grown = backend.rescale(handle, 3)
    assert backend.rescale(handle, 3) == backend.rescale(grown, 3) == grown
    assert [node.node for node in running(backend, grown).nodes] == [0, 1, 2]
    shrunk = backend.rescale(grown, 1)

    eventually(lambda: len(cluster.list(PODS, "default")), lambda count: count == 1)
    [(_, last)] = backend.pods(shrunk)
    assert last["metadata"]["uid"] == first["metadata"]["uid"]
    assert len(running(backend, shrunk).nodes) == 1
    assert len(cluster.list(JOBS, "default")) == 1
    assert backend.find(request_for(spec=ELASTIC)) == shrunk


def test_pods_that_went_when_it_shrank_are_still_paid_for(cluster, connect):
    """The API server removes them; the owner's events do not."""
    backend = connect()
    began = time.time()
    handle = backend.submit(request_for(spec=ELASTIC, allocation=Allocation(OFFER, nodes=3)))
    running(backend, handle)
    shrunk = backend.rescale(handle, 1)
    eventually(lambda: len(cluster.list(PODS, "default")), lambda count: count == 1)
    before = Before(Allocation(OFFER, nodes=3), until=began + 3600)

    live = AttemptState(1, 1, Allocation(OFFER), started_at=began, earlier=(before,), handle=shrunk)
    found = usage_of(backend, live)

    assert [item.node for item in backend.usage(shrunk)] == [0]
    assert [(item.node, item.end is None) for item in found] == [(0, True), (1, False), (2, False)]
    assert all(3590 < item.end - item.start <= 3600 for item in found[1:])  # from their binding on


def test_hours_in_the_schedulers_queue_are_no_money_spent(cluster, connect):
    """Three hours until a node was free, an hour on it: the budget counts one, while it runs."""
    backend = connect(wait_for_node_s=36000)
    cluster.node("node-0").cordon()
    handle = backend.submit(request_for())
    cluster.advance(3 * 3600)
    waited = usd_of(attempt_of(handle), backend.usage(handle), now=STARTED + 3 * 3600)
    cluster.add_node("node-1")
    cluster.advance(60)
    running(backend, handle)
    cluster.advance(3600)

    spent = usd_of(attempt_of(handle), backend.usage(handle), now=STARTED + 4 * 3600)

    assert waited == 0
    assert spent == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("spec", [{}, ELASTIC], ids=["fixed", "elastic"])
def test_pods_that_were_made_again_are_still_paid_for(cluster, connect, spec):
    """The API server removes a disrupted pod within seconds: two hours on spot count as two hours.

    A pod that was added when the attempt grew is not counted before, and a pod that waits again costs
    nothing.
    """
    backend = connect()
    handle = backend.submit(request_for(spec=spec))
    running(backend, handle)
    for _ in range(2):
        cluster.advance(3600)
        cluster.pod(f"{handle.name}-0-").evict()
        cluster.advance(60)
        running(backend, handle)
    if spec:
        handle = backend.rescale(handle, 2)
        running(backend, handle)
    for one in cluster.list(NODES):
        cluster.node(one["metadata"]["name"]).cordon()
    cluster.pod(f"{handle.name}-0-").evict()
    cluster.advance(3600)

    lost, *others = backend.usage(handle)

    assert lost.node == 0
    assert 7200 < lost.end - lost.start < 8000
    assert [(one.node, one.end) for one in others] == ([(1, None)] if spec else [])


@pytest.mark.parametrize("nodes", [1, 2])
def test_hours_of_waiting_for_a_quota_are_no_money_spent(cluster, connect, nodes):
    """No pod existed before: three hours at no price, then an hour on machines."""
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    backend = connect()
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=nodes)))
    cluster.advance(3 * 3600)
    assert {node.reason for node in backend.observe(handle).nodes} == {"quota"}
    more = {"spec": {"hard": {"requests.cpu": "9"}}}
    cluster.api.patch(QUOTAS, "default", "cpus", "application/merge-patch+json", more)
    cluster.advance(120)
    running(backend, handle)
    cluster.advance(3600)
    for node in range(nodes):
        cluster.pod(f"{handle.name}-{node}-").exit(0)
    over(backend, handle)

    billed = backend.usage(handle)

    assert len(billed) == nodes
    assert all(3600 <= one.end - one.start < 4000 for one in billed)


@pytest.mark.parametrize("graces", [(30,), (0,), (30, 0)])
@pytest.mark.parametrize("lack", ["node", "quota"])
def test_what_is_stopped_before_it_had_a_machine_costs_nothing(cluster, connect, lack, graces):
    """Three hours of waiting: no pod of it is left, and its Job ran from start to end."""
    backend = connect(wait_for_node_s=36000)
    if lack == "node":
        cluster.node("node-0").cordon()
    else:
        quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
        cluster.create(QUOTAS, quota)
    handle = backend.submit(request_for())
    cluster.advance(3 * 3600)

    for grace_s in graces:
        backend.stop(handle, grace_s=grace_s)
    over(backend, handle)

    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])
    assert backend.usage(handle) == ()


def test_what_is_stopped_while_only_a_part_has_a_machine_costs_that(cluster, connect):
    """One node of two had no machine; the other ran for an hour."""
    backend = connect(wait_for_node_s=36000)
    cluster.node("node-0").allocate(cpu="1500m")
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=2)))
    cluster.advance(3600)
    assert sorted(node.state for node in backend.observe(handle).nodes) == ["pending", "running"]

    backend.stop(handle, grace_s=30)
    over(backend, handle)
    cluster.advance(60)

    [billed] = backend.usage(handle)
    assert 3600 <= billed.end - billed.start < 4000


def test_a_part_that_somebody_deleted_is_not_free(cluster, connect):
    """Its times are lost with it: at most it ran as long as the other, which ends soon after."""
    backend = connect()
    handle = backend.submit(request_for(allocation=MIXED))
    running(backend, handle)
    cluster.advance(3600)
    second = handle.details["parts"][1]
    backend.cluster.delete(names.jobs("default", second["name"]), uid=second["uid"])
    eventually(lambda: len(cluster.list(PODS, "default")), lambda count: count == 1)

    assert {one.node: one.end for one in backend.usage(handle)} == {0: None, 1: None, 2: None}
    eventually(
        lambda: backend.replace_nodes(handle, quiet_s={}) or backend.observe(handle),
        lambda status: status.is_over,
    )
    first, *others = backend.usage(handle)
    assert [(one.node, one.end) for one in others] == [(1, first.end), (2, first.end)]
    assert all(one.end - one.start > 3000 for one in (first, *others))


def test_a_node_that_is_marked_or_about_to_go_is_known(cluster, connect):
    """From an annotation of its pod, a cordon, or an autoscaler's taint; node 0 may be among them."""
    cluster.add_node("going", cpu="1300m", memory="2Gi")
    backend = connect()
    handle = backend.submit(request_for(allocation=Allocation(OFFER, nodes=3)))
    running(backend, handle)
    assert backend.removable(handle) == frozenset()
    on = {pod["spec"]["nodeName"]: node for node, pod in backend.pods(handle)}
    other = next(node for node in range(3) if node != on.get("going"))
    pod = next(pod for node, pod in backend.pods(handle) if node == other)

    mark = {"metadata": {"annotations": {names.REMOVABLE: "true"}}}
    backend.cluster.patch(names.pods("default", pod["metadata"]["name"]), mark)
    cluster.node("going").taint("ToBeDeletedByClusterAutoscaler", effect="NoSchedule")

    assert backend.removable(handle) == {other, on.get("going", other)}
    cluster.node(pod["spec"]["nodeName"]).cordon()
    assert len(backend.removable(handle)) >= 2


def test_what_is_not_elastic_is_not_rescaled(cluster, connect):
    """A fixed number, two offers, an end: refused for good, without a change."""
    backend = connect()
    fixed = backend.submit(request_for())
    mixed = backend.submit(request_for(attempt=2, allocation=MIXED))
    ended = backend.submit(request_for(attempt=3, spec=ELASTIC))
    backend.stop(ended, grace_s=0)

    for handle in (fixed, mixed, ended):
        with pytest.raises(BackendError) as caught:
            backend.rescale(handle, 2)
        assert not caught.value.transient
    assert {job["spec"]["completions"] for job in cluster.list(JOBS, "default")} == {1, 2}


def test_a_claim_that_does_not_exist_is_made_and_stays(cluster, connect):
    """With its own name and the requested class; the next attempt binds it."""
    backend = connect()
    spec = with_claim(storage_class="fast", access_mode="ReadWriteMany")

    handle = backend.submit(request_for(spec=spec))
    backend.submit(request_for(spec=spec, attempt=2))
    running(backend, handle)
    for job in backend.jobs():
        backend.cluster.delete(names.jobs("default", job["metadata"]["name"]), uid=job["metadata"]["uid"])
    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])

    [claim] = cluster.list(CLAIMS, "default")
    assert claim["metadata"]["name"] == "data"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"


def test_a_claim_that_goes_with_its_run_is_held_by_every_attempt(cluster, connect):
    """It outlives the first Job and is deleted with the last; another run has its own."""
    backend, spec = connect(), with_claim(retain="run")
    first = backend.submit(request_for(spec=spec))
    second = backend.submit(request_for(spec=spec, attempt=2))
    backend.submit(request_for(spec=spec, run_prefix="dep/dag/other/train/-1"))
    assert len(cluster.list(CLAIMS, "default")) == 2

    backend.cluster.delete(names.jobs("default", first.name), uid=first.details["uid"])
    eventually(lambda: len(cluster.list(PODS, "default")), lambda count: count == 2)
    running(backend, second)
    assert len(cluster.list(CLAIMS, "default")) == 2
    backend.cluster.delete(names.jobs("default", second.name), uid=second.details["uid"])

    eventually(lambda: len(cluster.list(CLAIMS, "default")), lambda count: count == 1)


@pytest.mark.parametrize(("ends", "hours"), [("fails", 24), ("succeeds", 1)])
def test_a_claim_outlives_the_attempts_that_could_not_start(cluster, connect, ends, hours):
    """Its data are for the next attempt, which may wait for hours; after a success it is deleted."""
    backend = connect(cluster_prices=[{"name": "large", "vcpus": 64, "memory_gib": 1}])
    spec = with_claim(retain="run")
    [large] = backend.offers()
    handle = backend.submit(request_for(spec=spec))
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(1 if ends == "fails" else 0)
    over(backend, handle)
    backend.release(handle)

    def is_kept():
        with pytest.raises(CapacityError):
            backend.submit(request_for(spec=spec, attempt=2, allocation=Allocation(large)))
        return len(cluster.list(CLAIMS, "default")) == 1

    assert is_kept()
    cluster.advance(hours * 3600 - 600)
    assert is_kept()
    cluster.advance(1200)
    eventually(lambda: cluster.list(CLAIMS, "default"), lambda left: left == [])


def test_a_claim_that_is_there_is_bound_as_it_is(cluster, connect):
    """A user created it with another size: nothing of it is changed."""
    size = {"requests": {"storage": "9Gi"}}
    cluster.create(
        CLAIMS,
        {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": size}},
    )
    backend = connect()

    running(backend, backend.submit(request_for(spec=with_claim())))

    [claim] = cluster.list(CLAIMS, "default")
    assert claim["spec"]["resources"] == size
    assert "ownerReferences" not in claim["metadata"]


@pytest.mark.parametrize(
    ("modes", "is_mounted"), [(["Ephemeral", "Persistent"], True), (["Persistent"], False), (None, False)]
)
def test_a_bucket_is_mounted_where_the_cluster_has_the_driver(cluster, connect, modes, is_mounted):
    """A driver mounts it for a pod; otherwise it is copied. An unreadable one counts as absent."""
    if modes is not None:
        driver = {"metadata": {"name": "gcsfuse.csi.storage.gke.io"}, "spec": {"volumeLifecycleModes": modes}}
        cluster.create(DRIVERS, driver)
    volume = {"name": "d", "source": "gs://bucket/in/here/", "mount_path": "/d", "access_mode": "ReadOnly"}
    request = request_for(spec={"volumes": [volume]})

    rendered = connect().render(request)
    nobody = connect(token=cluster.user("few", [])).render(request)

    pod = rendered["job"]["spec"]["template"]
    copied = [one["name"] for one in json.loads(rendered["config_map"]["data"]["layout.json"])["mounts"]]
    mounted = [one["csi"] for one in pod["spec"]["volumes"] if "csi" in one]
    expected = {"bucketName": "bucket", "mountOptions": "implicit-dirs,only-dir=in/here"}
    assert [one["volumeAttributes"] for one in mounted] == ([expected] if is_mounted else [])
    assert copied == ([] if is_mounted else ["d"])
    assert ("annotations" in pod["metadata"]) is is_mounted
    assert json.loads(nobody["config_map"]["data"]["layout.json"])["mounts"] != []


def test_free_is_what_nobody_holds(cluster, connect):
    """Memory for six of the smallest offer, five beside one; unknown where pods may not be read."""
    backend = connect()
    [offer] = [one for one in backend.offers() if one.vcpus == 1]

    before = backend.free_nodes([offer])
    handle = backend.submit(request_for(allocation=Allocation(offer)))
    running(backend, handle)

    assert (before, backend.free_nodes([offer])) == ({offer.name: 6}, {offer.name: 5})
    assert backend.free_nodes([offer], without=handle) == {offer.name: 6}
    assert connect(wait_for_node_s=60).free_nodes([offer]) == {}
    token = cluster.user("few", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}])
    assert connect(token=token).free_nodes([offer]) == {}


def cpu_of(cluster, handle):
    """What the kubelet gives to the training."""
    [status] = cluster.pod(f"{handle.name}-0-").object["status"]["containerStatuses"]
    return status["resources"]["requests"]["cpu"]


def test_cpu_grows_in_place(cluster, connect):
    """The same pod, without a restart."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    backend.resize(handle, vcpus=2.0, memory_bytes=None)

    assert eventually(lambda: backend.resized(handle), lambda state: state != "going") == "done"
    assert cpu_of(cluster, handle) in ("2", "2000m")


def test_a_pod_that_is_made_again_has_to_grow_too(cluster, connect):
    """While it waits for a machine nothing is done; its pod has the size of the Job's template."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.node("node-0").cordon()
    cluster.pod(f"{handle.name}-0-").evict()

    eventually(lambda: backend.observe(handle).nodes[0].state, lambda state: state == "pending")
    assert backend.resize(handle, vcpus=2.0, memory_bytes=None) == "going"
    cluster.add_node("node-1")
    cluster.advance(60)
    running(backend, handle)

    state = eventually(
        lambda: backend.resize(handle, vcpus=2.0, memory_bytes=None), lambda state: state != "going"
    )
    assert state == "done"
    assert cpu_of(cluster, handle) in ("2", "2000m")


def test_a_resize_without_room_waits_and_one_beyond_the_node_never_comes(cluster, connect):
    """Deferred while others use the CPUs; infeasible at once for more than the node has."""
    backend = connect()
    handle = backend.submit(request_for())
    other = backend.submit(request_for(attempt=2, spec={"resources": {"requests": {"cpu": "6"}}}))
    running(backend, handle)
    running(backend, other)

    assert backend.resize(handle, vcpus=64.0, memory_bytes=None) == "infeasible"
    backend.resize(handle, vcpus=4.0, memory_bytes=None)

    assert eventually(lambda: backend.resized(handle), lambda state: state != "going") == "deferred"
    backend.stop(other, grace_s=0)
    assert eventually(lambda: backend.resized(handle), lambda state: state == "done") == "done"
