"""The owner of a run on a cluster: it changes attempts in place, and grows them only into free resources."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fakes.kubernetes import JOBS, PODS
from integration.kubernetes.rig import KEY, running

from envscaler_agent.protocol import Progress, Status, status_name
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ManualClock

CHECKPOINT = {"every": "10m"}
QUICK = {"warmup": "1s", "stabilization": "1s", "cooldown": "1s", "min_epochs_between": 0}
ELASTIC = {
    "checkpoint": CHECKPOINT,
    "num_nodes": {"min": 1, "max": 1},
    "scaling": {"min_nodes": 1, "max_nodes": 3},
    "distributed": {"launcher": "torchrun", "elastic": True},
}


def move(run, target):
    """Request *target*, as a user does, and let the owner work until no change is under way."""
    for node in range(run.state.live.allocation.nodes):
        said = Progress(step=10, total_steps=1000, epoch=1, epochs=100, elapsed_s=60.0)
        status = Status(generation=1, attempt=1, node=node, sequence=1, phase="running", progress=said)
        run.store.write(f"{KEY.prefix}/{status_name(1, 1, node)}", status.to_json())
    because = {"reason": "test", "forced": True}
    request_move(Run(run.store, KEY), target=target, from_attempt=(1, 1), because=because)
    run.goes_on(lambda state: state.live.change is None, reason="request")
    return run.log.read()[-1]


def offer_of(backend, cpus):
    """An offer of the cluster's node."""
    return next(offer for offer in backend.offers() if offer.name.endswith(f":cpu-{cpus}/on-demand"))


def test_a_pod_gets_more_cpu_and_memory_while_it_runs(cluster, stage):
    """The vertical policy's move: the same pod, other requests, and no second Job (feature D7)."""
    run = stage(checkpoint=CHECKPOINT, scaling={"policy": "vertical", "cooldown": "1s"})
    run.begin()
    [before] = cluster.list(PODS, "default")
    target = Allocation(offer_of(run.backend, 2))

    last = move(run, target)

    [after] = cluster.list(PODS, "default")
    main = next(one for one in after["spec"]["containers"] if one["name"] == "main")
    assert (last.type, run.state.live.number, run.state.live.allocation) == ("changed", 1, target)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert main["resources"]["requests"]["cpu"] in ("2", "2000m")
    assert len(cluster.list(JOBS, "default")) == 1


def test_an_elastic_stage_gets_nodes_while_it_runs(cluster, stage):
    """Finally one Job of three pods; the first pod is the original one (feature C5)."""
    run = stage(**ELASTIC)
    run.begin()
    [first] = cluster.list(PODS, "default")

    last = move(run, Allocation(run.state.live.allocation.offer, 3))

    pods = cluster.list(PODS, "default")
    assert (last.type, run.state.live.number, run.state.live.allocation.nodes) == ("changed", 1, 3)
    assert len(pods) == 3
    assert first["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in pods}
    running(run.backend, run.handle)


def test_growing_beyond_what_is_free_is_refused(cluster, stage):
    """The cluster adds no nodes: it does not fit a hundred more, and the training keeps running."""
    run = stage(
        checkpoint=CHECKPOINT, num_nodes={"min": 1, "max": 1}, scaling={"min_nodes": 1, "max_nodes": 200}
    )
    run.begin()

    last = move(run, Allocation(run.state.live.allocation.offer, 101))

    assert last.type == "move-refused"
    assert "100 more nodes" in last.body.reason
    assert "are free" in last.body.reason
    assert len(cluster.list(PODS, "default")) == 1


def test_a_cluster_that_cannot_resize_gets_a_next_attempt(cluster, stage):
    """Before 1.33 this subresource does not exist: the attempt saves and stops, and the next one starts."""
    run = stage(checkpoint=CHECKPOINT, scaling={"policy": "vertical", "cooldown": "1s"})
    run.begin()
    cluster.next_error("patch", "pods/resize", 404)

    last = move(run, Allocation(offer_of(run.backend, 2)))

    assert (last.type, last.body.stop_reason) == ("attempt-stopping", "move")
    assert last.body.reason.endswith("in place it is infeasible")


def reported(run, sequence):
    """The pod's sidecar still writes its status."""
    status = Status(generation=1, attempt=1, claim=1, sequence=sequence, phase="running", start_step=0)
    run.store.write(f"{KEY.prefix}/{status_name(1, 1, 0)}", status.to_json())


def test_a_pod_whose_kubelet_is_dead_is_replaced_only_once_the_store_does_not_hear_it(cluster, stage):
    """Its containers train for ten minutes: one pod. Once they are silent too it is replaced (D1)."""
    run = stage(checkpoint=CHECKPOINT)
    run.begin()
    [first] = cluster.list(PODS, "default")
    cluster.node("node-0").silence()
    cluster.add_node("node-1")
    cluster.advance(50 + 60 + 30 + 240)
    clock, waiting = ManualClock(), run.owner.resume(Wake("status"))
    watch = AttemptWatcher(
        run=Run(run.store, KEY), backend=run.backend, watching=waiting.watching, monotonic=clock.monotonic
    )

    for sequence in range(1, 40):
        reported(run, sequence)
        assert watch.poll() is None
        clock.advance(15)
    assert [pod["metadata"]["uid"] for pod in cluster.list(PODS, "default")] == [first["metadata"]["uid"]]

    clock.advance(180)
    wake = watch.poll()
    run.owner.resume(wake)
    cluster.advance(60)

    assert wake.quiet_s[0] >= 180
    [second] = [pod for pod in cluster.list(PODS, "default") if pod["status"]["phase"] == "Running"]
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert run.state.live.number == 1


def decision(run, usage):
    """The last of the sensor's checks, one every 15 s: one for each aggregate of *usage*."""
    clock = ManualClock()
    watcher = ScalingWatcher(
        run=Run(run.store, KEY, clock=clock.time),
        backend=run.backend,
        candidates=tuple(Allocation(offer) for offer in run.backend.offers()),
        monotonic=clock.monotonic,
    )
    for look, used in enumerate(usage, 1):
        progress = Progress(step=10 * look, total_steps=4000, epoch=look, epochs=400, elapsed_s=15.0 * look)
        said = Status(generation=1, attempt=1, claim=1, sequence=look, phase="running", progress=progress)
        status = replace(said, start_step=0, usage=used)
        run.store.write(f"{KEY.prefix}/{status_name(1, 1, 0, 1)}", status.to_json())
        clock.advance(15)
        check = watcher.snapshot().check
    return check.decision


def test_a_steep_rise_of_a_pod_s_memory_is_met_at_the_third_look(stage):
    """6 MiB/s towards its limit of 512 MiB: the sensor requests a larger pod before the kill (D8)."""
    run = stage(checkpoint=CHECKPOINT, scaling={"policy": "vertical", **QUICK})
    run.begin()
    rise = [{"memory_bytes": mib << 20, "memory_limit_bytes": 512 << 20} for mib in (300, 390, 480)]

    two, three = decision(run, rise[:2]), decision(run, rise)

    assert two.action == "keep"
    assert three.action == "move"
    assert three.target.offer.memory_gib > run.state.live.allocation.offer.memory_gib
    assert "memory will be full in" in three.reason


def test_a_speedup_of_a_node_type_needs_no_capacity_type(stage):
    """``kubernetes/big`` also matches the offer on demand, and this cluster has no other (D9)."""
    sizes = [
        {"name": name, "vcpus": cpus, "memory_gib": cpus, "usd_per_hour": usd}
        for name, cpus, usd in (("small", 1, 1.0), ("big", 2, 1.2))
    ]
    stated = {"offer": "kubernetes/big", "relative_to": "kubernetes/small", "mean": 9.0, "stdev": 0.1}
    scaling = {"policy": "cost-to-finish", "speedup": [{**stated, "source": "measured before"}], **QUICK}
    run = stage(settings={"cluster_prices": sizes}, checkpoint=CHECKPOINT, scaling=scaling)
    run.begin()

    got = decision(run, 4 * [{}])

    assert (got.action, got.target.offer.instance_type) == ("move", "big")
    assert run.state.live.allocation.offer.instance_type == "small"


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_budget_goes_by_the_clocks_of_store_and_cluster(cluster, stage, monkeypatch, off_s):
    """$1 at $1 an hour: after half an hour the pod still trains, within the hour it saves (A6)."""
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + off_s)
    run = stage(settings={"usd_per_hour": {"*": 7.0}}, budget_usd=1.0)
    run.begin()

    cluster.advance(1800)
    run.owner.resume(Wake("status"))
    half = run.state.live
    cluster.advance(1740)
    run.owner.resume(Wake("status"))

    assert half.allocation.usd_per_hour == pytest.approx(1.0)
    assert half.phase == "started"
    assert run.state.live.stop_reason == "budget"
