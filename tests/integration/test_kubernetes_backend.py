"""The Kubernetes backend against an API server that has every kind of trouble."""

import time
from dataclasses import replace

import pytest
from fakes.kubernetes import CONFIG_MAPS, JOBS, NODES, PODS, QUOTAS, SECRETS, Cluster, Program
from fakes.kubernetes.resources import CLAIMS

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.kubernetes import KubernetesBackend, client, names, paths
from envscaler_airflow.backends.kubernetes.handles import handle_of
from envscaler_airflow.backends.kubernetes.rbac import rbac
from envscaler_airflow.backends.kubernetes.reap import orphans
from envscaler_airflow.backends.kubernetes.watch import close_views
from envscaler_airflow.errors import BackendError, CapacityError, EnvScalerError, NoOfferError, SpecError
from envscaler_airflow.lifecycle import RunState
from envscaler_airflow.planning.offers import Allocation, Offer

OFFER = Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1.0, memory_gib=1.0)


@pytest.fixture
def cluster():
    """One node; training plays the wrapper."""
    with Cluster(nodes=1, speed=5) as made:
        made.script(Program(seconds=0), container="install")
        made.script(Program(term_code=0), container="courier")
        made.script(Program(term_code=87), container="main")
        yield made
        close_views()


@pytest.fixture
def connect(cluster, tmp_path):
    """Makes backends; *token* is another identity's."""

    def make(*, token=None, **settings):
        path = cluster.kubeconfig(tmp_path / f"config-{token is None}", token=token)
        settings = {"image": "train:1", "wait_for_node_s": 0, "sleep": lambda _s: time.sleep(0.01)} | settings
        return KubernetesBackend(kubeconfig=str(path), **settings)

    return make


def request_for(**changes):
    """A request for one small node; *changes* are fields."""
    fields = {
        "store_url": "file:///store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 1,
        "allocation": Allocation(OFFER),
        "command": ("train",),
        "secret_env": {"TOKEN": "canary"},
    }
    return AttemptRequest(**(fields | changes))


def ours(cluster, kind):
    """Objects of that kind that an attempt made."""
    found = cluster.list(kind, "default")
    return [one for one in found if (one["metadata"].get("labels") or {}).get(names.MANAGED_BY)]


def eventually(look, claim, *, seconds=20):
    """The first value of *look* of which *claim* holds."""
    until = time.monotonic() + seconds
    while not claim(value := look()):
        assert time.monotonic() < until, value
        time.sleep(0.02)
    return value


def running(backend, handle):
    """Wait until every node runs."""
    return eventually(
        lambda: backend.observe(handle), lambda status: all(n.state == "running" for n in status.nodes)
    )


def over(backend, handle):
    """How each node ended, once all did."""
    status = eventually(lambda: backend.observe(handle), lambda status: status.is_over)
    return [(node.state, node.reason) for node in status.nodes]


def test_with_its_job_everything_goes(cluster, connect):
    """ConfigMap, Secret and pods are owned by the Job."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    kinds = (JOBS, PODS, CONFIG_MAPS, SECRETS)
    assert [len(ours(cluster, kind)) for kind in kinds] == [1, 1, 1, 1]

    backend.cluster.delete(paths.jobs("default", handle.name), uid=handle.details["uid"])

    eventually(lambda: [len(ours(cluster, kind)) for kind in kinds], lambda left: left == [0] * 4)


def test_a_job_of_somebody_else_is_refused(cluster, connect):
    """The same name, another owner: nothing of it is touched."""
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
    """It happened, and nobody said so: the repeat finds it."""
    backend = connect()
    cluster.next_error(verb, "jobs", 500, when="after", drop=drop)

    handle = backend.submit(request_for())

    running(backend, handle)
    assert len(cluster.list(JOBS, "default")) == 1
    assert len(cluster.list(PODS, "default")) == 1


@pytest.mark.parametrize("what", ["configmaps", "secrets", "jobs"])
def test_a_start_that_was_cut_off_is_finished(cluster, connect, what):
    """The owner dies at any line; no pod runs before all is there, and the next submit goes on."""
    backend, request = connect(), request_for()
    verb = "patch" if what == "jobs" else "create"
    cluster.next_error(verb, what, 403)
    with pytest.raises(BackendError):
        backend.submit(request)
    assert cluster.list(PODS, "default") == []
    assert backend.find(request) is None

    handle = backend.submit(request)

    running(backend, handle)
    assert backend.find(request) == handle


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(cluster, connect, status):
    """Three times, then it answers."""
    backend = connect()
    cluster.next_error("create", "jobs", status, times=3)

    running(backend, backend.submit(request_for()))


def test_an_expired_token_and_a_server_that_is_gone_are_no_death(cluster, connect):
    """Unknown: the error is transient, and afterwards the attempt runs on."""
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
    """Nothing is known meanwhile, and nobody is dead; the repeat of a start that met it makes one Job."""
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
    """409 of resource versions; one of uids would be final."""
    backend = connect()
    cluster.next_error("patch", "jobs", 409, times=2)

    running(backend, backend.submit(request_for()))


def test_what_no_node_could_ever_hold_is_refused(connect):
    """By what the pod asks for; where nodes are added it waits, and the scheduler says why."""
    for asked in ({"cpu": "4000"}, {"memory": "900Ti"}):
        spec = {"resources": {"requests": asked}}
        offer = replace(OFFER, vcpus=9999.0, memory_gib=1e6)
        with pytest.raises(NoOfferError, match="has room for 0"):
            connect().submit(request_for(spec=spec, allocation=Allocation(offer)))


def test_a_label_that_is_too_long_is_a_fault_of_the_request(cluster, connect):
    """70 characters in a pod_override: the API server names it, and nothing stays behind."""
    override = {"metadata": {"labels": {"team": "x" * 70}}}

    with pytest.raises(SpecError, match="must be no more than 63"):
        connect(pod_override=override).submit(request_for())

    assert cluster.list(JOBS, "default") == []


def test_an_image_that_is_gone_when_a_pod_is_made_again_is_told(cluster, connect):
    """Hours after the start: pending for want of an image that no waiting brings."""
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
    """And leaves no Job."""
    with pytest.raises(SpecError, match="InvalidImageName"):
        connect(image="Not An Image").submit(request_for())

    assert cluster.list(JOBS, "default") == []


def test_no_room_is_told_with_the_schedulers_words(cluster, connect):
    """Nothing stays behind."""
    backend = connect(cluster_prices=[{"name": "large", "vcpus": 64, "memory_gib": 1}])
    [offer] = backend.offers()

    with pytest.raises(CapacityError, match="0/1 nodes are available"):
        backend.submit(request_for(allocation=Allocation(offer)))

    assert cluster.list(JOBS, "default") == []


def test_where_nodes_are_added_a_start_waits(connect):
    """The node is on its way: pending, with the reason."""
    backend = connect(cluster_prices=[{"name": "large", "vcpus": 64, "memory_gib": 1}], wait_for_node_s=600)
    [offer] = backend.offers()

    handle = backend.submit(request_for(allocation=Allocation(offer)))

    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "scheduling")


def test_a_preempted_pod_is_made_again_and_the_attempt_goes_on(cluster, connect):
    """Disruptions are ignored by the policy: the same Job, another pod."""
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


def test_an_out_of_memory_is_told(cluster, connect):
    """By the kubelet's word."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    cluster.pod(f"{handle.name}-0-").oom()

    assert over(backend, handle) == [("ended", "out-of-memory")]


def test_a_refusal_of_the_kubelet_is_a_loss(cluster, connect):
    """It counts as a failure of the Job, and is none of the training's."""
    cluster.node("node-0").reject_next("UnexpectedAdmissionError", "Allocate failed")
    backend = connect()

    handle = backend.submit(request_for())

    assert over(backend, handle) == [("lost", "lost")]


def test_a_deadline_ends_the_attempt(connect):
    """The machine's own."""
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
    assert reasons[1:] == ["left", "failed"]
    assert reasons[0] in ("killed", "stopped")


MIXED = Allocation(OFFER, nodes=3, rest=OFFER, rest_nodes=2)


def test_a_mixed_attempt_is_a_job_for_each_offer(cluster, connect):
    """Ranks go on, each Job owns what is its own, and all of it goes."""
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
        backend.cluster.delete(paths.jobs("default", part["metadata"]["name"]), uid=uid)
    kinds = (JOBS, PODS, CONFIG_MAPS, SECRETS)
    eventually(lambda: [len(ours(cluster, kind)) for kind in kinds], lambda left: left == [0] * 4)


@pytest.mark.parametrize(
    ("verb", "what", "nth"),
    [("create", "jobs", 2), ("create", "configmaps", 2), ("create", "secrets", 1), ("patch", "jobs", 2)],
)
def test_a_mixed_start_that_was_cut_off_is_finished(cluster, connect, verb, what, nth):
    """Between any two calls: nothing is started twice, and both Jobs run in the end."""
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
    """The second name is another's: the first Job goes again, and nothing ran."""
    backend, request = connect(), request_for(allocation=MIXED)
    [_, second] = backend.render(request)["parts"]
    second["job"]["metadata"]["labels"] = {"app": "other"}
    cluster.create(JOBS, second["job"])

    with pytest.raises(BackendError, match="is not of this run"):
        backend.submit(request)

    assert [job["metadata"]["name"] for job in cluster.list(JOBS, "default")] == [second["name"]]
    assert cluster.list(PODS, "default") == []


def test_a_quota_for_jobs_that_has_room_for_one_part_leaves_none(cluster, connect):
    """The API server refuses the second Job itself."""
    cluster.create(QUOTAS, {"metadata": {"name": "jobs"}, "spec": {"hard": {"count/jobs.batch": "1"}}})
    backend = connect()

    with pytest.raises(BackendError, match="exceeded quota"):
        backend.submit(request_for(allocation=MIXED))

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


def test_when_one_job_of_a_mixed_attempt_fails_the_owner_ends_the_other(cluster, connect):
    """A Job ends its own pods; the other's would wait for ever. Who went as asked ends nobody."""
    backend = connect()
    handle = backend.submit(request_for(allocation=MIXED))
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(85)
    eventually(lambda: backend.observe(handle).nodes[0].state, lambda state: state == "ended")
    backend.mend(handle)
    assert [node.state for node in backend.observe(handle).nodes] == ["ended", "running", "running"]

    other = backend.submit(request_for(allocation=MIXED, attempt=2))
    running(backend, other)
    cluster.pod(f"{other.name}-p1-1-").exit(1)
    eventually(lambda: backend.observe(other).nodes[0].reason, lambda reason: reason == "unneeded")
    eventually(lambda: backend.mend(other) or backend.observe(other), lambda status: status.is_over)

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
    """The same Job and the same first pod; the highest numbers go first. A repeat changes nothing."""
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


def test_what_is_not_elastic_is_not_rescaled(cluster, connect):
    """A fixed number, two offers, an end: for good, and nothing is changed."""
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


def with_claim(**fields):
    """A spec with one claim."""
    volume = {"name": "d", "source": "pvc://data", "mount_path": "/data", "size": "1Gi", **fields}
    return {"volumes": [volume]}


def test_a_claim_that_does_not_exist_is_made_and_stays(cluster, connect):
    """By its own name, of the class that was asked for; the next attempt binds it."""
    backend = connect()
    spec = with_claim(storage_class="fast", access_mode="ReadWriteMany")

    handle = backend.submit(request_for(spec=spec))
    backend.submit(request_for(spec=spec, attempt=2))
    running(backend, handle)
    for job in backend.jobs():
        backend.cluster.delete(paths.jobs("default", job["metadata"]["name"]), uid=job["metadata"]["uid"])
    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])

    [claim] = cluster.list(CLAIMS, "default")
    assert claim["metadata"]["name"] == "data"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"


def test_a_claim_that_goes_with_its_run_is_held_by_every_attempt(cluster, connect):
    """It outlives the first Job and goes with the last; another run has its own."""
    backend, spec = connect(), with_claim(retain="run")
    first = backend.submit(request_for(spec=spec))
    second = backend.submit(request_for(spec=spec, attempt=2))
    backend.submit(request_for(spec=spec, run_prefix="dep/dag/other/train/-1"))
    assert len(cluster.list(CLAIMS, "default")) == 2

    backend.cluster.delete(paths.jobs("default", first.name), uid=first.details["uid"])
    eventually(lambda: len(cluster.list(PODS, "default")), lambda count: count == 2)
    running(backend, second)
    assert len(cluster.list(CLAIMS, "default")) == 2
    backend.cluster.delete(paths.jobs("default", second.name), uid=second.details["uid"])

    eventually(lambda: len(cluster.list(CLAIMS, "default")), lambda count: count == 1)


def test_a_claim_that_is_there_is_bound_as_it_is(cluster, connect):
    """Somebody made it, of another size: nothing of it is changed."""
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


def test_free_is_what_nobody_holds(cluster, connect):
    """Memory for six of the smallest slice, five beside one; where pods may not be read nobody can tell."""
    backend = connect()
    [offer] = [one for one in backend.offers() if one.vcpus == 1]

    before = backend.free_nodes([offer])
    running(backend, backend.submit(request_for(allocation=Allocation(offer))))

    assert (before, backend.free_nodes([offer])) == ({offer.name: 6}, {offer.name: 5})
    assert connect(wait_for_node_s=60).free_nodes([offer]) == {}
    token = cluster.user("few", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}])
    assert connect(token=token).free_nodes([offer]) == {}


def test_a_quota_is_waited_for(cluster, connect):
    """Shown with its own words."""
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    backend = connect()

    handle = backend.submit(request_for())

    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "quota")
    assert "exceeded quota: cpus" in node.detail


def test_a_queue_admits_the_job(cluster, connect):
    """It stays suspended until somebody else lets it go; a stop before that is an end."""
    backend = connect(queue="team")
    handle = backend.submit(request_for())
    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason) == ("pending", "queue")
    assert backend.find(request_for()) == handle

    other = backend.submit(request_for(attempt=2))
    backend.stop(other, grace_s=0)
    assert over(backend, other) == [("ended", "stopped")]
    backend.cluster.patch(paths.jobs("default", handle.name), {"spec": {"suspend": False}})

    running(backend, handle)


def test_a_pod_on_a_silent_node_is_lost_and_then_made_again(cluster, connect, monkeypatch):
    """Overdue for three minutes: lost, until the owner gives it up and the Job makes another."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.node("node-0").silence()
    cluster.add_node("node-1")

    cluster.advance(50 + 60 + 30 + 170)
    assert backend.observe(handle).nodes[0].state == "running"
    assert backend.mend(handle) == ()
    cluster.advance(30)

    assert backend.observe(handle).nodes[0].state == "lost"
    assert len(backend.mend(handle)) == 1
    cluster.advance(60)
    running(backend, handle)


NEEDED = [
    ("batch", "jobs", "create"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "patch"),
    ("batch", "jobs", "delete"),
    ("", "pods", "list"),
    ("", "pods", "delete"),
    ("", "pods/log", "get"),
    ("", "configmaps", "create"),
    ("", "secrets", "create"),
    ("", "nodes", "list"),
]


def life(backend):
    """Everything that an owner does with an attempt."""
    backend.offers()
    request = request_for()
    handle = backend.submit(request)
    running(backend, handle)
    list(backend.logs(handle))
    backend.stop(handle, grace_s=5)
    assert over(backend, handle) == [("ended", "stopped")]
    backend.release(handle)
    list(backend.attempts())
    running(backend, backend.submit(request_for(attempt=2, **MOST)))
    with pytest.raises(CapacityError):
        backend.submit(request_for(attempt=3, **MOST))


MOST = {
    "spec": {"resources": {"requests": {"cpu": "5"}}},
    "allocation": Allocation(replace(OFFER, vcpus=8.0)),
}
"""More than half of the node."""


def test_the_rights_that_are_shipped_are_enough(cluster, connect):
    """The whole life of an attempt."""
    token = cluster.user(
        "runner", [rule for document in rbac("default") for rule in document.get("rules", ())]
    )

    life(connect(token=token))


@pytest.mark.parametrize("missing", NEEDED, ids=lambda item: "-".join(part for part in item if part))
def test_with_one_verb_less_the_message_names_it(cluster, connect, missing):
    """So that the cluster's owner knows what to grant."""
    group, resource, verb = missing
    rules = []
    for document in rbac("default"):
        for rule in document.get("rules", ()):
            for one in rule["resources"]:
                verbs = [
                    word
                    for word in rule["verbs"]
                    if (rule["apiGroups"][0], one, word) != (group, resource, verb)
                ]
                rules.append({**rule, "resources": [one], "verbs": verbs})
    token = cluster.user("runner", rules)

    with pytest.raises(EnvScalerError, match=f'cannot {verb} resource "{resource}"'):
        life(connect(token=token))


def test_reap_finds_what_no_run_owns(cluster, connect, monkeypatch):
    """Old, of this store, and not the live attempt of its run."""
    backend = connect()
    handle = backend.submit(request_for())
    backend.submit(request_for(store_url="file:///other"))
    now = cluster.clock.now()

    def found(age, state):
        return [
            one.handle.name
            for one in orphans(backend, "file:///store", lambda _prefix: state, server_time=now + age)
        ]

    assert found(60, None) == []
    assert found(3600, None) == [handle.name]
    assert found(3600, RunState(generation=1, status="failed")) == [handle.name]


def test_one_watch_serves_every_attempt_of_a_namespace(cluster, connect):
    """Two lists and two watches, however many look; a cut watch and an old version cost one more."""
    backend = connect(watches=True)
    handles = [backend.submit(request_for(attempt=number)) for number in range(1, 6)]
    for handle in handles:
        running(backend, handle)
    calls = [path for method, path in cluster.requests if method == "GET" and "/pods?" in path]
    assert len([path for path in calls if "watch=true" in path]) == 1
    assert len(calls) <= 2

    cluster.cut_watches()
    cluster.pod(f"{handles[0].name}-0-").exit(3)
    cluster.compact()

    assert over(backend, handles[0]) == [("ended", "failed")]
    running(backend, handles[1])


def test_a_view_that_is_too_old_shows_nothing(cluster, connect):
    """The API server is gone: unknown, and afterwards all is there again."""
    from envscaler_airflow.backends.kubernetes.watch import View

    backend = connect()
    handle = backend.submit(request_for())
    now = [0.0]
    view = View(backend.cluster, "default", monotonic=lambda: now[0])
    view._list("jobs", view._tables["jobs"])
    view._list("pods", view._tables["pods"])

    assert view.attempt(handle.name)[0]["metadata"]["uid"] == handle.details["uid"]
    now[0] = 121.0
    with pytest.raises(BackendError, match="was not heard for 121 s"):
        view.attempt(handle.name)


def test_a_thousand_stages_cost_one_list_and_one_watch_of_each_kind(cluster, connect):
    """However many look, each with a backend of its own, as triggers have; a look takes no call."""
    maker = connect()
    handles = []
    for number in range(1000):
        job = maker.render(request_for(run_prefix=f"dep/dag/run/train/{number}"))["job"]
        handles.append(handle_of([cluster.create(JOBS, job)]))
    backend = connect(watches=True)
    backend.observe(handles[0])
    before = len(cluster.requests)

    states = {backend.observe(handle).nodes[0].state for handle in handles}

    assert states == {"pending"}
    assert len(cluster.requests) - before <= 2
    watched = [path for method, path in cluster.requests if "watch=true" in path]
    assert len(watched) == 2


def test_a_watch_backs_off_while_the_server_is_busy(cluster, connect):
    """No call for as long as it asks; then the view is whole again."""
    backend = connect(watches=True)
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.next_error("watch", "pods", 429, retry_after=2, times=1)
    cluster.next_error("list", "pods", 500, times=2)

    cluster.cut_watches()
    cluster.pod(f"{handle.name}-0-").exit(0)

    assert over(backend, handle) == [("ended", "succeeded")]
    calls = [path for method, path in cluster.requests if "/pods?" in path]
    assert len(calls) < 12


def cpu_of(cluster, handle):
    """What the kubelet gives to the training."""
    [status] = cluster.pod(f"{handle.name}-0-").object["status"]["containerStatuses"]
    return status["resources"]["requests"]["cpu"]


def test_cpu_grows_in_place(cluster, connect):
    """The same pod, not started again."""
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)

    backend.resize(handle, vcpus=2.0, memory_bytes=None)

    assert eventually(lambda: backend.resized(handle), lambda state: state != "going") == "done"
    assert cpu_of(cluster, handle) in ("2", "2000m")


def test_a_resize_without_room_waits_and_one_beyond_the_node_never_comes(cluster, connect):
    """Deferred while others hold it; infeasible at once for more than the node has."""
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


def test_a_job_that_the_view_has_not_seen_is_not_lost(cluster, connect):
    """The watch lags: the server itself is asked before anything counts as gone."""
    backend = connect(watches=True)
    first = backend.submit(request_for())
    running(backend, first)
    cluster.next_error("watch", "*", 503, times=100)
    cluster.next_error("list", "jobs", 503, times=100)
    cluster.cut_watches()

    second = connect().submit(request_for(attempt=2))

    assert backend.observe(second).nodes[0].state != "lost"
    cluster.do(cluster.faults.clear)
