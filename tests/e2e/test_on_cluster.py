"""Stages on a cluster under a real Airflow: by connection, with real training in pods."""

from __future__ import annotations

from collections.abc import Callable

from e2e.crowds import together
from fakes.kubernetes import Cluster

LONG = 600
"""More steps than any test waits for."""


def shown(run) -> list[str]:
    """The task's log, training and trigger included."""
    return run.airflow.logs(run.dag_id, run.run_id, "train")


def training_pod(run, *, after: dict | None = None) -> dict:
    """The pod that makes steps, other than *after*."""
    old = after["metadata"]["uid"] if after else None

    def trains() -> dict | None:
        begun = len(run.steps())
        pods = [pod for pod in run.pods() if pod["metadata"]["uid"] != old]
        if len(pods) != 1 or pods[0]["status"]["phase"] != "Running":
            return None
        run.until("a step", lambda: len(run.steps()) > begun)
        return pods[0]

    return run.until("a pod that trains", trains)


@together("cluster")
def test_the_sensor_moves_a_stage_to_a_larger_pod(begin: Callable):
    """The sensor finds the cluster of its stage; no step is lost or made twice."""
    run = begin("moved_on_cluster", steps=400, pause=0.25)

    state = run.wait_end(timeout_s=200)

    attempts = run.state().attempts
    assert state == "success"
    assert [a.allocation.name for a in attempts] == [
        "kubernetes/small/on-demand",
        "kubernetes/large/on-demand",
    ]
    assert [step for _, _, step in run.steps()] == list(range(1, 401))
    assert run.airflow.xcom(run.dag_id, run.run_id, "autoscale")["runs"]["-1"]["moves"] == 1
    run.wait_gone()
    run.check()


@together("cluster")
def test_a_stage_trains_in_a_pod(begin: Callable):
    """The task's log has the output once; outputs and report are in XCom; the pod is gone (feature E1)."""
    run = begin("on_cluster", steps=20)

    state = run.wait_end()

    log, result = shown(run), run.airflow.xcom(run.dag_id, run.run_id, "train")
    assert state == "success"
    assert run.airflow.xcom(run.dag_id, run.run_id, "train", "result") == result["outputs"]["result"]
    assert [line for line in log if line.startswith("step ")] == [f"step {n} done" for n in range(1, 21)]
    assert [a.allocation.name for a in run.state().attempts] == ["kubernetes/small/on-demand"]
    run.wait_gone()
    run.check()


@together("cluster")
def test_mark_failed_ends_the_pod(begin: Callable):
    """The trigger's on_kill asks the attempt to save and stop; removing its Job needs no further try."""
    run = begin("on_cluster", steps=LONG)
    run.wait_step(3)
    run.wait_watched()

    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")

    run.wait_gone(timeout_s=90)
    assert run.wait_end() == "failed"
    run.until("the recorded end", lambda: run.state().status == "stopped")
    assert "stop-requested" in [event.type for event in run.events()]
    run.check()


@together("cluster")
def test_a_deleted_dag_run_leaves_no_pod(begin: Callable):
    """The owner drains its stage as after "mark failed"."""
    run = begin("on_cluster", steps=LONG)
    run.wait_step(3)
    run.wait_watched()

    run.airflow.set_run_state(run.dag_id, run.run_id, "failed")
    run.airflow.delete_dag_run(run.dag_id, run.run_id)

    run.wait_gone(timeout_s=90)
    run.check()


@together("cluster")
def test_a_clear_adopts_the_pod(begin: Callable):
    """The training continues: the new try owns its Job."""
    run = begin("on_cluster", steps=60)
    run.wait_checkpoint()

    run.airflow.clear(run.dag_id, run.run_id, ["train"])

    run.until("the new owner", lambda: run.state().owner.try_number == 2)
    assert run.wait_end(timeout_s=150) == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    assert [step for _, _, step in run.steps()] == list(range(1, 61))
    run.wait_gone()
    run.check()


@together("cluster")
def test_an_image_that_does_not_exist_fails_the_task(begin: Callable):
    """It fails at once, for good, and with the kubelet's words: no retry would help."""
    begin.cluster.images.missing("nowhere/*")
    run = begin("on_cluster", steps=5, image="nowhere/at-all:1")

    assert run.wait_end() == "failed"

    [attempt] = run.state().attempts
    assert run.wait("failed")["try_number"] == 1
    assert any("nowhere/at-all:1" in line for line in shown(run))
    assert attempt.step is None
    run.wait_gone()
    run.check()


def test_the_example_that_clears_up_leaves_what_is_owned(begin: Callable):
    """It reaches the cluster by the usual connection, and asks Airflow for the state of each task."""
    run = begin("on_cluster", steps=60)
    run.wait_step(3)

    run.airflow.call("PATCH", "/dags/reap_cluster", body={"is_paused": False})
    reaping = run.airflow.trigger_dag("reap_cluster")

    assert run.airflow.wait_for_run("reap_cluster", reaping) == "success"
    assert run.airflow.xcom("reap_cluster", reaping, "reap") == []
    assert run.wait_end() == "success"
    run.wait_gone()
    run.check()


def test_a_stage_outlives_what_happens_to_its_machines(begin: Callable, cluster: Cluster):
    """No capacity at first, an evicted pod, a lost node, a killed triggerer: one attempt that resumes."""
    cluster.node("node-0").cordon()
    cluster.node("node-1").cordon()
    run = begin("on_cluster", steps=120, save_every=10)
    run.wait({"deferred"})
    run.until("why it waits", lambda: any("waits: scheduling: 0/2 nodes" in line for line in shown(run)))

    cluster.node("node-0").cordon(on=False)
    run.wait_checkpoint()
    first = training_pod(run)
    cluster.pod(first["metadata"]["name"], "ml").evict()
    second = training_pod(run, after=first)
    cluster.node("node-1").cordon(on=False)
    run.airflow.kill("triggerer")
    cluster.node("node-0").vanish()
    cluster.advance(60)  # until its pods are deleted
    third = training_pod(run, after=second)
    run.airflow.restart("triggerer")
    cluster.add_node("node-0")

    assert run.wait_end(timeout_s=150) == "success"
    assert [(a.number, a.outcome) for a in run.state().attempts] == [(1, "succeeded")]
    log = shown(run)
    assert [pod["spec"]["nodeName"] for pod in (first, second, third)] == ["node-0", "node-0", "node-1"]
    # The second pod's output may be lost with its node: output is uploaded every 10 s.
    first_start, *later = [int(line.split()[-1]) for line in log if line.startswith("starts at step")]
    assert first_start == 0
    assert later
    assert min(later) > 0
    assert log.count("counted") == 1
    run.wait_gone()
    run.check()
