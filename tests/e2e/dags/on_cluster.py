"""Stages on the cluster of a connection, with their sensor."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params

ARGS = {"conn_id": "cluster", "retry_delay": timedelta(seconds=1)}

with DAG("on_cluster", schedule=None, default_args=ARGS, params=spec_params("envs/on_cluster.yaml")):
    EnvStageOperator(task_id="train", spec="envs/on_cluster.yaml", compute="kubernetes", poll_interval=1)

with DAG("moved_on_cluster", schedule=None, default_args=ARGS, params=spec_params("envs/moved.yaml")):
    EnvStageOperator(
        task_id="train",
        spec="envs/moved.yaml",
        compute="kubernetes",
        value_of_hour=100,
        poll_interval=1,
    )
    ScalingSensor(task_id="autoscale", stage="train", check_interval=1)
