"""What a cluster reports late or never removes: refusals, volumes, pods that stay."""

from __future__ import annotations

import pytest
from fakes.kubernetes import CLAIMS, CONFIG_MAPS, JOBS, PODS, QUOTAS, Pace, Program
from integration.kubernetes.rig import KEY, OFFER, eventually, ours, over, request_for, running

from envscaler_airflow.backends.kubernetes import client
from envscaler_airflow.errors import BackendError, NoOfferError, RunFailedError, SpecError
from envscaler_airflow.owner import foreground
from envscaler_airflow.owner.request import kill_quietly
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store.availability import stockouts
from envscaler_airflow.store.run import Run

CLAIM = {"name": "d", "source": "pvc://data", "mount_path": "/data"}


@pytest.mark.parametrize(
    ("refuse", "spec", "settings", "words"),
    [
        (lambda cluster: cluster.deny_pods("unsigned"), {}, {}, r"denied the request: unsigned"),
        (lambda _cluster: None, {}, {"priority_class": "absent"}, "no PriorityClass with name absent"),
    ],
    ids=["webhook", "priority-class"],
)
def test_a_refusal_that_is_told_late_fails_the_run(cluster, stage, refuse, spec, settings, words):
    """The event comes after the start was recorded: the run fails with its message, unbilled (D3)."""
    cluster.pace = Pace(refusal_s=40)
    cluster.do(cluster.clock.stand_still)
    refuse(cluster)
    run = stage(settings=settings, **spec)
    run.owner.enter()
    assert run.node().reason == ""

    cluster.advance(45)
    eventually(run.node, lambda node: node.reason == "refused")
    with pytest.raises(RunFailedError, match=words):
        run.goes_on(lambda _state: False)

    state = run.state
    assert (state.status, state.failure) == ("failed", "refused")
    assert state.attempts[-1].end.usage == ()
    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])


def test_a_pod_that_is_made_again_and_refused_ends_the_run(cluster, stage):
    """A policy was added while it ran: its next pod is refused, and nothing waits for ever (D3)."""
    run = stage()
    run.begin()
    cluster.deny_pods("frozen")

    cluster.pod("").evict()
    cluster.advance(30)

    eventually(run.node, lambda node: node.reason == "refused")
    with pytest.raises(RunFailedError, match="denied the request: frozen"):
        run.goes_on(lambda _state: False)
    [ended] = [attempt.ended for attempt in run.state.attempts]
    assert all(end is not None for _node, _start, end in ended.usage)


def test_a_quota_that_is_told_late_is_waited_for_and_not_billed(cluster, connect, monkeypatch):
    """Two minutes of waiting cost nothing, neither during the wait nor once the pod has run (D3)."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    cluster.pace = Pace(refusal_s=20)
    cluster.do(cluster.clock.stand_still)
    cluster.create(QUOTAS, {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}})
    backend = connect()
    handle = backend.submit(request_for())
    cluster.advance(122)
    assert backend.observe(handle).nodes[0].reason == "quota"

    waited = backend.usage(handle)

    more = {"spec": {"hard": {"requests.cpu": "9"}}}
    cluster.api.patch(QUOTAS, "default", "cpus", "application/merge-patch+json", more)
    cluster.advance(120)
    running(backend, handle)
    cluster.advance(600)
    cluster.pod(f"{handle.name}-0-").exit(0)
    over(backend, handle)
    [billed] = backend.usage(handle)
    assert waited == ()
    assert 600 <= billed.end - billed.start <= 720


def test_a_pod_that_ran_before_a_quota_took_its_place_is_billed(cluster, connect, monkeypatch):
    """Refused at first, an hour of work, evicted, refused again: only the hour was work (D3)."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    cluster.pace = Pace(refusal_s=20)
    cluster.do(cluster.clock.stand_still)
    quota = {"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "500m"}}}
    cluster.create(QUOTAS, quota)
    backend = connect()
    handle = backend.submit(request_for())
    cluster.advance(30)
    patch = ("default", "cpus", "application/merge-patch+json")
    cluster.api.patch(QUOTAS, *patch, {"spec": {"hard": {"requests.cpu": "9"}}})
    cluster.advance(60)
    running(backend, handle)
    cluster.advance(3600)
    cluster.api.patch(QUOTAS, *patch, {"spec": {"hard": {"requests.cpu": "500m"}}})

    cluster.pod(f"{handle.name}-0-").evict()
    cluster.advance(60)

    [billed] = backend.usage(handle)
    assert billed.start < cluster.clock.now() - 3600


def test_a_claim_that_does_not_exist_is_told_as_that(cluster, connect):
    """Machines are not the problem: no next offer, and nothing is recorded against this one (D4)."""
    backend = connect(wait_for_node_s=600)
    cluster.do(lambda: setattr(cluster, "has_provisioner", False))
    request = request_for(spec={"volumes": [CLAIM]})

    with pytest.raises(SpecError, match='persistentvolumeclaim "data" not found'):
        backend.submit(request)

    eventually(lambda: cluster.list(JOBS, "default"), lambda left: left == [])


def test_a_claim_that_is_not_bound_is_waited_for_and_then_reported(cluster, stage):
    """A provisioner takes time; a volume that never comes fails the run with the scheduler's words (D4)."""
    cluster.do(lambda: setattr(cluster, "has_provisioner", False))
    run = stage(settings={"wait_for_node_s": 0, "wait_for_image_s": 300}, volumes=[{**CLAIM, "size": "1Gi"}])
    run.owner.enter()
    node = run.node()
    assert (node.state, node.reason) == ("pending", "volume")
    assert "unbound immediate PersistentVolumeClaims" in node.detail

    cluster.advance(310)

    with pytest.raises(RunFailedError, match=r"not within 300 s: .*unbound immediate"):
        run.goes_on(lambda _state: False)
    assert stockouts(run.store, now=cluster.clock.now()) == []


def test_a_volume_that_other_nodes_reach_is_no_lack_of_machines(cluster, stage):
    """The next offer is tried; nothing is recorded against this one (D4)."""
    cluster.create(CLAIMS, {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.do(lambda: cluster.volume_labels.update(data={"zone": "b"}))
    run = stage(volumes=[CLAIM])

    run.owner.enter()

    first = run.state.attempts[0]
    assert (first.outcome, first.end.failure) == ("not-started", "backend")
    assert "PersistentVolume's node affinity" in first.end.detail
    assert stockouts(run.store, now=cluster.clock.now()) == []


def test_a_volume_that_no_node_reaches_in_time_leads_to_the_next_offer(cluster, stage):
    """Where nodes are added it is discovered late, and is not a stock-out either (D4)."""
    cluster.create(CLAIMS, {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.do(lambda: cluster.volume_labels.update(data={"zone": "b"}))
    run = stage(settings={"wait_for_node_s": 300}, volumes=[CLAIM])
    run.owner.enter()
    assert run.node().reason == "scheduling"
    cluster.advance(310)
    assert run.node().reason == "placement"

    state = run.goes_on(lambda state: len(state.attempts) > 1)

    first = state.attempts[0]
    assert (first.outcome, first.end.failure) == ("not-started", "placement")
    assert stockouts(run.store, now=cluster.clock.now()) == []


def test_no_node_in_time_is_a_lack_of_machines(cluster, stage):
    """The attempt's own outcome has the reason that the shell and the page use (D4)."""
    run = stage(settings={"wait_for_node_s": 300})
    cluster.node("node-0").cordon()
    run.owner.enter()
    cluster.advance(310)
    assert run.node().reason == "capacity"

    state = run.goes_on(lambda state: state.attempts[0].outcome)

    first = state.attempts[0]
    assert (first.outcome, first.end.failure) == ("not-started", "capacity")


def test_a_pod_that_its_ready_node_cannot_end_holds_no_stage_for_ever(cluster, stage):
    """Ten minutes overdue: the node counts as lost, and the next attempt starts beside it (D4)."""
    cluster.add_node("node-1")
    run = stage(checkpoint={"every": "10m"})
    run.begin()
    pod = cluster.pod("")
    pod.hold()
    pod.delete(30)

    cluster.advance(30 + 590)
    assert run.node().state == "running"
    cluster.advance(20)
    assert run.node().state == "lost"
    assert "cannot end it" in run.node().detail

    state = run.goes_on(lambda state: len(state.attempts) > 1)
    assert [attempt.outcome for attempt in state.attempts] == ["lost", ""]
    running(run.backend, run.handle)


def test_a_training_that_ended_in_a_pod_that_stays_has_ended(cluster, connect, monkeypatch):
    """Its volume cannot be unmounted; the end of the command is known (D4)."""
    monkeypatch.setattr(client, "_date", lambda _text: cluster.clock.now())
    cluster.script(Program(term="ignore"), container="sidecar")
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    pod = cluster.pod(f"{handle.name}-0-")
    pod.exit(3, "main")
    pod.hold()
    pod.delete(30)

    cluster.advance(30 + 130)

    [node] = backend.observe(handle).nodes
    assert (node.state, node.reason, node.exit_code) == ("ended", "failed", 3)


def test_no_room_stays_a_lack_of_machines_where_a_volume_is_in_conflict_too(cluster, connect):
    """The node that reaches the volume is full: a lack of capacity (D4)."""
    cluster.create(CLAIMS, {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.do(lambda: cluster.volume_labels.update(data={"zone": "b"}))
    cluster.add_node("node-1", cpu="500m", labels={"zone": "b"})
    backend = connect(cluster_prices=[{"name": "small", "vcpus": 1, "memory_gib": 1}], wait_for_node_s=60)
    [offer] = backend.offers()

    handle = backend.submit(request_for(allocation=Allocation(offer), spec={"volumes": [CLAIM]}))
    cluster.advance(90)

    assert backend.observe(handle).nodes[0].reason in ("capacity", "scheduling")


def test_no_offer_is_raised_for_a_volume_out_of_reach(cluster, connect):
    """The start fails at once where no node is added (D4)."""
    cluster.create(CLAIMS, {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.do(lambda: cluster.volume_labels.update(data={"zone": "b"}))

    with pytest.raises(NoOfferError, match="PersistentVolume's node affinity"):
        connect().submit(request_for(allocation=Allocation(OFFER), spec={"volumes": [CLAIM]}))


def test_a_task_that_was_marked_failed_leaves_nothing_open(cluster, stage, monkeypatch):
    """As its trigger does: the pod saves and ends, and the run has its end, its cost and no pod (D6)."""
    monkeypatch.setattr(foreground.time, "sleep", lambda _s: cluster.advance(5))
    run = stage()
    run.begin()
    cluster.advance(1800)

    assert kill_quietly(Run(run.store, KEY), run.backend, ti_id="ti", reason="marked failed")
    state = foreground.close(Run(run.store, KEY), run.backend, ti_id="ti")

    [attempt] = state.attempts
    [job] = ours(cluster, JOBS)
    [[_node, start, end]] = attempt.end.usage
    assert (state.status, attempt.outcome) == ("stopped", "stopped")
    assert 1800 <= end - start < 2000
    assert job["spec"]["ttlSecondsAfterFinished"] == 3600
    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])
    cluster.advance(3700)
    eventually(lambda: [*ours(cluster, JOBS), *ours(cluster, CONFIG_MAPS)], lambda left: left == [])


ROLE = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]


@pytest.mark.parametrize("partly", [False, True], ids=["roles-unread", "bindings-unread"])
def test_a_server_that_has_just_started_is_asked_again(cluster, connect, partly):
    """It refuses every caller until it knows its roles: the refusal is temporary and ends nothing (D12)."""
    backend = connect(token=cluster.user("owner", ROLE))
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.restart_server(unready_s=300, partly=partly)

    for call in (
        lambda: backend.observe(handle),
        lambda: backend.usage(handle),
        lambda: backend.stop(handle, grace_s=30),
        lambda: backend.submit(request_for(attempt=2)),
        backend.offers,
    ):
        with pytest.raises(BackendError, match="has just started") as caught:
            call()
        assert caught.value.transient
    cluster.advance(300)

    running(backend, handle)


def test_a_role_that_is_missing_stays_an_error(cluster, connect):
    """The refusal of a server that knows its roles is final, and the message names the verb (D12)."""
    rules = [{"verbs": ["get", "list"], "apiGroups": ["*"], "resources": ["*"]}]
    backend = connect(token=cluster.user("reader", rules))

    with pytest.raises(BackendError, match=r"cannot create.*rbac") as caught:
        backend.submit(request_for())

    assert not caught.value.transient


def test_a_release_that_failed_is_done_by_the_next(cluster, connect):
    """The server disappeared between the mark on the Job and its pods: a repeat removes them (D12)."""
    backend = connect(keep="never")
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.pod(f"{handle.name}-0-").exit(3)
    over(backend, handle)
    cluster.next_error("delete", "pods", 403, times=1)
    with pytest.raises(BackendError):
        backend.release(handle)

    backend.release(handle)

    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])


def test_a_success_is_no_missed_deadline_though_its_job_completes_late(cluster, connect):
    """The owner releases before the Job controller's sync: the Job ends Complete (D5)."""
    cluster.pace = Pace(job_sync_s=20)
    backend = connect()
    handle = backend.submit(request_for())
    running(backend, handle)
    cluster.advance(60)
    cluster.pod(f"{handle.name}-0-").exit(0)
    assert over(backend, handle) == [("ended", "succeeded")]

    backend.release(handle)
    cluster.advance(60)

    [job] = ours(cluster, JOBS)
    assert [one["type"] for one in job["status"]["conditions"]][-2:] == ["SuccessCriteriaMet", "Complete"]
    eventually(lambda: cluster.list(PODS, "default"), lambda left: left == [])


@pytest.mark.parametrize("trouble", ["cordoned", "silent", "tainted"])
def test_a_stage_waits_while_no_node_takes_it(cluster, stage, trouble):
    """The only node is absent for a while: the stage starts on it once it is back (D2)."""
    node = cluster.node("node-0")
    away, back = {
        "cordoned": (node.cordon, lambda: node.cordon(on=False)),
        "silent": (node.silence, node.revive),
        "tainted": (lambda: node.taint("maintenance"), lambda: node.untaint("maintenance")),
    }[trouble]
    away()
    cluster.advance(120)
    run = stage(settings={"wait_for_node_s": 900})

    run.owner.enter()

    assert (run.node().state, run.node().reason) == ("pending", "scheduling")
    back()
    cluster.advance(30)
    running(run.backend, run.handle)


def test_a_stage_that_does_not_wait_says_at_once_that_nothing_is_there(cluster, stage):
    """A cordoned node is not an offer where no node is added (D2)."""
    cluster.node("node-0").cordon()

    with pytest.raises(NoOfferError):
        stage(settings={"wait_for_node_s": 0}).owner.enter()


def test_an_evicted_pod_without_room_goes_on_elsewhere_after_three_minutes(cluster, stage):
    """Its node type is in use, another is free: it does not wait as long as a first start, 15 min (D11)."""
    kind = "node.kubernetes.io/instance-type"
    cluster.node("node-0").edit(lambda node: node["metadata"]["labels"].update({kind: "small"}))
    run = stage(settings={"wait_for_node_s": 900}, checkpoint={"every": "10m"})
    run.begin()
    cluster.advance(600)
    cluster.node("node-0").cordon()
    cluster.add_node("other", labels={kind: "large"})

    cluster.pod("").evict()
    cluster.advance(170)
    assert run.node().reason == "scheduling"
    cluster.advance(60)

    state = run.goes_on(lambda state: len(state.attempts) > 1)
    assert state.attempts[1].allocation.offer.instance_type.startswith("large:")
    running(run.backend, run.handle)


def test_memory_is_bounded_without_a_limit_and_raised_with_its_request(cluster, stage):
    """The limit is four times the request; after an out-of-memory the request equals the limit (D11)."""
    run = stage()
    run.begin()

    def memory():
        [main] = [one for one in cluster.pod("").object["spec"]["containers"] if one["name"] == "main"]
        return [main["resources"][part]["memory"] for part in ("requests", "limits")]

    before = memory()
    cluster.pod("").oom()
    over(run.backend, run.handle)
    run.goes_on(lambda state: len(state.attempts) > 1)
    running(run.backend, run.handle)

    assert before == ["64Mi", "256Mi"]
    assert memory() == ["384Mi", "384Mi"]
