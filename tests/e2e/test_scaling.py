"""The sensor under a real Airflow: it moves a stage, survives its failure, and is skipped with it."""

from __future__ import annotations

from collections.abc import Callable

from e2e.crowds import together


def test_the_sensor_moves_the_stage_to_the_faster_offer(begin: Callable):
    """The sensor requests, the owner moves, and no step is lost or repeated (feature C5) (feature E2).

    Alone: the faster offer is all of a machine of two CPUs.
    The owner may refuse at first: it judges on fresh facts, and just then the stage may be saving.
    """
    run = begin("scaled", steps=560, pause=0.25)

    state = run.wait_end(timeout_s=200)

    attempts = run.state().attempts
    summary = run.airflow.xcom(run.dag_id, run.run_id, "autoscale")
    assert state == "success"
    assert [a.allocation.name for a in attempts] == ["local/cpu-1", "local/cpu-2"]
    assert [a.stop_reason for a in attempts] == ["move", ""]
    assert [step for _, _, step in run.steps()] == list(range(1, 561))
    assert summary["runs"]["-1"]["moves"] == 1
    moves = [event.type for event in run.events() if event.type.startswith("move-")]
    assert set(moves[::2]) == {"move-requested"}, "each has its answer before the next"
    assert moves[1::2] == [*["move-refused"] * (len(moves) // 2 - 1), "move-accepted"]
    assert run.store.children(f"{run.key.prefix}/decisions") != []
    run.check()


@together("local")
def test_the_sensor_succeeds_though_the_stage_failed(begin: Callable):
    """The stage's last lines and exit code are in its own log; the sensor reports how it ended."""
    run = begin("scaled", steps=20, fail_at=3)

    run.wait("failed")
    sensor = run.airflow.wait_for_task(run.dag_id, run.run_id, "autoscale")

    text = "\n".join(run.airflow.logs(run.dag_id, run.run_id, "train"))
    assert sensor["state"] == "success"
    assert run.airflow.xcom(run.dag_id, run.run_id, "autoscale")["runs"]["-1"]["status"] == "failed"
    assert "exit code 1" in text
    assert "fails as it was told" in text
    run.check()


@together("local")
def test_the_sensor_is_skipped_when_the_stage_never_ran(begin: Callable):
    """The stage was skipped without a run; the sensor found it in its own TaskGroup."""
    run = begin("never")

    state = run.wait_end()

    assert state == "success"
    assert run.airflow.task_states(run.dag_id, run.run_id) == {
        "group.decline": "skipped",
        "group.train": "skipped",
        "group.autoscale": "skipped",
    }
