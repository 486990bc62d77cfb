"""Nodes that fall silent, return, or lose a pod by force: one pod per node reports, and one trains."""

from __future__ import annotations

import pytest
from fakes.kubernetes import PODS
from integration.kubernetes.rig import KEY, eventually

from envscaler_agent.protocol import (
    Control,
    Ended,
    Manifest,
    Progress,
    Status,
    checkpoint_name,
    status_name,
)
from envscaler_airflow.backends.kubernetes.job_snapshot import index_of
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store.checkpoints import complete_checkpoints, prune
from envscaler_airflow.store.lease import Claim, take_claim
from envscaler_airflow.store.run import Run

SILENT_S = 50 + 60 + 30 + 240
"""From the last heartbeat until the pod is overdue by more than three minutes."""
QUIET = {0: 200.0}


def claims(run, pod):
    """First action of the sidecar of *pod*: returns its claim's number."""
    claim = Claim(uid=pod["metadata"]["uid"])
    return take_claim(Run(run.store, KEY), claim, generation=1, attempt=1, node=index_of(pod))


def reports(run, pod, claim, *, sequence=1, step=10, ended=None):
    """Its action every 15 s."""
    status = Status(
        generation=1,
        attempt=1,
        node=index_of(pod),
        claim=claim,
        sequence=sequence,
        phase="ended" if ended else "running",
        progress=Progress(step=step, total_steps=1000),
        start_step=0,
        ended=ended,
    )
    run.store.write(f"{KEY.prefix}/{status_name(1, 1, index_of(pod), claim)}", status.to_json())


def running_pods(cluster):
    """Pods in phase Running, by node of the attempt."""
    found = {}
    for pod in cluster.list(PODS, "default"):
        if pod["status"].get("phase") == "Running":
            found.setdefault(index_of(pod), []).append(pod)
    return found


@pytest.fixture
def begun(cluster, stage):
    """A stage on node-0 whose pod has claimed and reported; a second machine is free."""

    def make(**spec):
        run = stage(checkpoint={"every": "10m"}, **spec)
        run.begin()
        cluster.add_node("node-1")
        [[first]] = running_pods(cluster).values()
        reports(run, first, claims(run, first))
        return run, first

    return make


def test_a_node_that_comes_back_after_its_pod_was_replaced_trains_no_more(cluster, begun):
    """Its containers kept running; their late writes are void, and the kubelet ends them (D1)."""
    run, first = begun()
    cluster.node("node-0").silence()
    cluster.advance(SILENT_S)
    run.owner.resume(Wake("status", quiet_s=QUIET))
    cluster.advance(60)
    [second] = running_pods(cluster)[0]
    reports(run, second, claims(run, second), step=20)

    reports(run, first, 1, sequence=9, step=900, ended=Ended(reason="succeeded", exit_code=0))
    run.owner.resume(Wake("status"))
    cluster.node("node-0").revive()
    cluster.advance(60)
    run.owner.resume(Wake("status"))

    said = Run(run.store, KEY).status((1, 1))
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert (said.claim, said.progress.step) == (2, 20)
    assert (run.state.status, run.state.live.number) == ("active", 1)
    assert [pod["metadata"]["uid"] for pod in running_pods(cluster)[0]] == [second["metadata"]["uid"]]
    eventually(lambda: list(cluster.kubelets["node-0"].runs), lambda left: left == [])
    assert claims(run, first) == 1  # its sidecar finds its own claim again, and a higher one


def test_after_a_pod_was_deleted_by_force_one_trains(cluster, begun):
    """On a machine that answers the old pod is killed, and the stage continues in one other pod (D1)."""
    run, first = begun()

    cluster.pod("").delete(0)
    cluster.advance(60)

    run.goes_on(lambda _state: running_pods(cluster))
    cluster.advance(60)
    [[second]] = running_pods(cluster).values()
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert run.state.status == "active"
    assert second["metadata"]["name"].startswith(run.handle.name)


def test_a_pod_that_is_deleted_by_force_on_a_silent_node_stays_while_it_reports(cluster, begun):
    """A forced delete does not end the containers: the pod is replaced once its status is silent too (D1)."""
    run, first = begun()
    cluster.node("node-0").silence()
    cluster.advance(60)
    cluster.pod("").delete(0)
    cluster.advance(SILENT_S)

    for sequence in range(2, 5):
        reports(run, first, 1, sequence=sequence)
        run.owner.resume(Wake("status"))
        cluster.advance(15)
    before = running_pods(cluster)[0]
    run.owner.resume(Wake("status", quiet_s=QUIET))
    cluster.advance(60)

    after = running_pods(cluster)[0]
    assert [pod["metadata"]["uid"] for pod in before] == [first["metadata"]["uid"]]
    assert len(after) == 1
    assert after[0]["metadata"]["uid"] != first["metadata"]["uid"]
    assert (run.state.status, run.state.live.number) == ("active", 1)


def test_an_elastic_stage_grows_beside_a_silent_node_without_a_second_pod_of_it(cluster, begun):
    """Two nodes more while the first one's kubelet is dead and its containers train: one pod each (D1)."""
    run, first = begun(
        num_nodes={"min": 1, "max": 1},
        scaling={"min_nodes": 1, "max_nodes": 3},
        distributed={"launcher": "torchrun", "elastic": True},
    )
    cluster.node("node-0").silence()
    cluster.advance(SILENT_S)
    reports(run, first, 1, sequence=2)
    target = Allocation(run.state.live.allocation.offer, 3)
    because = {"reason": "test", "forced": True}
    request_move(Run(run.store, KEY), target=target, from_attempt=(1, 1), because=because)

    for sequence in range(3, 8):
        reports(run, first, 1, sequence=sequence)
        run.owner.resume(Wake("request"))
        cluster.advance(15)

    before = running_pods(cluster)
    cluster.node("node-0").revive()
    cluster.advance(60)
    state = run.goes_on(lambda state: state.live.change is None)

    assert {node: len(pods) for node, pods in before.items()} == {0: 1, 1: 1, 2: 1}
    assert before[0][0]["metadata"]["uid"] == first["metadata"]["uid"]
    assert (state.live.number, state.live.allocation.nodes) == (1, 3)
    assert {node: len(pods) for node, pods in running_pods(cluster).items()} == {0: 1, 1: 1, 2: 1}


def saved(run, step):
    """A complete checkpoint of the first attempt."""
    name = checkpoint_name(1, step, 1)
    manifest = Manifest(step=step, generation=1, attempt=1)
    run.store.write(f"{KEY.prefix}/checkpoints/{name}/manifest-c1.json", manifest.to_json())
    return name


def test_the_sidecar_of_a_lost_pod_deletes_nothing_that_the_next_attempt_was_promised(cluster, begun):
    """It is cut off before its pod ends, and continues to clean up when the next attempt has started (A5)."""
    run, first = begun()
    names = [saved(run, step) for step in (10, 20, 30, 40)]
    store = Run(run.store, KEY)
    clear_up = {"generation": 1, "attempt": 1, "claim": 1, "candidates": (), "keep": 2}
    cluster.pod("").exit(1, "main")
    run.goes_on(lambda state: state.live is not None and state.live.number == 2 and state.live.handle)

    late = prune(store, **clear_up)

    control = Control.from_json(store.read("control/g1-a2.json"), where="control")
    assert late == ()
    assert set(control.candidates) == set(names)
    assert set(complete_checkpoints(store, 1)) == set(names)
    store.delete("control/g1-a2.json")  # without the fence it would have deleted everything beyond two
    assert set(prune(store, **clear_up)) == set(names[:2])
    assert claims(run, first) == 1
