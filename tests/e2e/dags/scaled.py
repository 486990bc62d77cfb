"""A stage with its sensor: one that moves, one that fails, and one that never runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, TaskGroup, task
from airflow.sdk.exceptions import AirflowSkipException

from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params

PARAMS = spec_params("envs/scaled.yaml")


def stage(**more: Any) -> EnvStageOperator:
    """A stage that can move."""
    return EnvStageOperator(
        task_id="train",
        spec="envs/scaled.yaml",
        value_of_hour=100,
        retry_delay=timedelta(seconds=1),
        poll_interval=1,
        **more,
    )


with DAG("scaled", schedule=None, params=PARAMS):
    stage()
    ScalingSensor(task_id="autoscale", stage="train", check_interval=1, retry_delay=timedelta(seconds=1))

with DAG("never", schedule=None, params=PARAMS):

    @task
    def decline() -> None:
        """Skip everything downstream."""
        raise AirflowSkipException("nothing to train today")

    with TaskGroup("group"):
        decline() >> stage()
        ScalingSensor(task_id="autoscale", stage="train", check_interval=1, retry_delay=timedelta(seconds=1))
