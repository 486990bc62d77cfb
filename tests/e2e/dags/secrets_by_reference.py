"""A stage with secrets by reference, and one whose author writes a secret where every user can read it."""

from __future__ import annotations

from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, spec_params

with DAG("secret", schedule=None, params=spec_params("envs/secret.yaml")):
    EnvStageOperator(task_id="train", spec="envs/secret.yaml", retries=0, poll_interval=1)

with DAG("careless", schedule=None):
    EnvStageOperator(
        task_id="train",
        spec="envs/secret.yaml",
        parameters={"note": "{{ conn.canary.password }}"},
        retries=0,
        poll_interval=1,
    )
