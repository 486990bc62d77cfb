"""A stage runs under a real Airflow: deferred, its log shown, its outputs handed over."""

from __future__ import annotations

from envscaler_airflow.testing.airflow_services import AirflowServices


def test_a_stage_succeeds_and_hands_its_outputs_over(airflow: AirflowServices):
    """XCom holds the outputs by name and the report; the task log holds what the training printed, once."""
    run_id = airflow.trigger_dag("stage", conf={"steps": 20})

    state = airflow.wait_for_run("stage", run_id)

    log = airflow.logs("stage", run_id, "train")
    result = airflow.xcom("stage", run_id, "train")
    assert state == "success"
    assert airflow.xcom("stage", run_id, "train", "result") == result["outputs"]["result"]
    assert [line for line in log if line == "counted"] == ["counted"]
    assert [line for line in log if line.startswith("step ")] == [f"step {n} done" for n in range(1, 21)]
