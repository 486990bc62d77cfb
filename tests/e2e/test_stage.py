"""A stage runs under a real Airflow: it defers, shows its log and publishes its outputs."""

from __future__ import annotations

from collections.abc import Callable

from e2e.crowds import together

from envscaler_airflow.owner.request import request_move
from envscaler_airflow.store.run import Run


@together("local")
def test_a_stage_succeeds_and_hands_its_outputs_over(begin: Callable):
    """XCom contains outputs by name and the report; the task log has the training's output, once (F2).

    *Rendered Templates* shows every parameter of the run, defaults too (F14).
    """
    run = begin("stage", steps=20)

    state = run.wait_end()

    log = run.airflow.logs("stage", run.run_id, "train")
    result = run.airflow.xcom("stage", run.run_id, "train")
    rendered = run.airflow.task("stage", run.run_id, "train")["rendered_fields"]
    assert state == "success"
    assert rendered["parameters"] == {
        "steps": 20,
        "pause": 0.2,
        "fail_at": 0,
        "save_every": 5,
        "ledger": str(run.ledger),
    }
    assert run.airflow.xcom("stage", run.run_id, "train", "result") == result["outputs"]["result"]
    assert [line for line in log if line == "counted"] == ["counted"]
    assert [line for line in log if line.startswith("step ")] == [f"step {n} done" for n in range(1, 21)]
    assert f"the stage succeeded; output result: {result['outputs']['result']}" in log
    assert any(line.startswith("cost: total $") for line in log)
    assert not any("event=" in line or "run=" in line for line in log)


@together("local")
def test_the_task_log_holds_every_line_over_five_deferrals(begin: Callable):
    """Airflow drops a trigger's log at a deferral; the task's has all 150 lines once (F1) (feature E11)."""
    run = begin("stage", steps=150, pause=0.4)
    for deferral in range(5):
        run.wait_step(5 + 25 * deferral)
        live = run.state().live
        request = request_move(
            Run(run.store, run.key),
            target=live.allocation,
            from_attempt=(live.generation, live.number),
            because={"reason": "to where it is", "numbers": {}, "check": {}},
        )
        run.until("an answer", lambda number=request.number: run.state().number > number)

    assert run.wait_end() == "success"

    log = run.airflow.logs(run.dag_id, run.run_id, "train")
    steps = [line for line in log if line.startswith("step ")]
    assert sorted(steps) == sorted(f"step {n} done" for n in range(1, 151))
    assert sum(line.startswith("deferred: ") for line in log) >= 6
