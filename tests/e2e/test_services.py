"""The Airflow of the session starts, defers, and survives what the kill tests do to it."""

from __future__ import annotations

import os
import signal

from envscaler_airflow.testing.airflow_services import AirflowServices


def test_a_plain_deferrable_dag_runs_to_its_end(airflow: AirflowServices):
    """Scheduler, dag processor, worker, triggerer and API server work together."""
    run_id = airflow.trigger_dag("plain")

    state = airflow.wait_for_run("plain", run_id)

    log = "\n".join(airflow.logs("plain", run_id, "defers"))
    assert state == "success"
    assert airflow.task_states("plain", run_id) == {"defers": "success"}
    assert airflow.xcom("plain", run_id, "defers") == "resumed"
    assert "before the deferral" in log
    assert "after the deferral" in log


def test_a_deferred_task_goes_on_after_the_triggerer_was_killed(airflow: AirflowServices):
    """The killed triggerer is gone, and the new one picks the trigger up."""
    run_id = airflow.trigger_dag("plain", conf={"seconds": 6})
    airflow.wait_for_task("plain", run_id, "defers", "deferred")

    airflow.kill("triggerer")
    survivors = airflow.pids("triggerer")
    airflow.restart("triggerer")

    assert survivors == []
    assert airflow.wait_for_run("plain", run_id) == "success"


def test_a_component_that_ends_by_itself_is_started_again(airflow: AirflowServices):
    """As in a deployment; the run continues without a word from its user."""
    run_id = airflow.trigger_dag("plain", conf={"seconds": 6})
    airflow.wait_for_task("plain", run_id, "defers", "deferred")

    os.kill(airflow.pids("triggerer")[0], signal.SIGKILL)

    assert airflow.wait_for_run("plain", run_id) == "success"
