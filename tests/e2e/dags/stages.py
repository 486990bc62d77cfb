"""DAGs with tiny stages, one for each way in which the tests break a run."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, spec_params

PARAMS = spec_params("envs/tiny.yaml")

with DAG("stage", schedule=None, params=PARAMS):
    EnvStageOperator(
        task_id="train", spec="envs/tiny.yaml", retry_delay=timedelta(seconds=1), poll_interval=1
    )

with DAG("stage_without_retries", schedule=None, params=PARAMS):
    EnvStageOperator(task_id="train", spec="envs/tiny.yaml", retries=0, poll_interval=1)

with DAG("stage_with_timeout", schedule=None, params=PARAMS):
    EnvStageOperator(
        task_id="train",
        spec="envs/tiny.yaml",
        retry_delay=timedelta(seconds=1),
        poll_interval=1,
        execution_timeout=timedelta(seconds=12),
    )
