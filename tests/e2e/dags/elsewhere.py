"""A stage whose runs are in the store of a connection, not in the services' own."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, spec_params

with DAG("elsewhere", schedule=None, params=spec_params("envs/tiny.yaml")):
    EnvStageOperator(
        task_id="train",
        spec="envs/tiny.yaml",
        store_conn_id="elsewhere",
        retry_delay=timedelta(seconds=1),
        poll_interval=1,
    )
