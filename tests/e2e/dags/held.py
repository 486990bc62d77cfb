"""Stages whose executions can be stopped right before and right after the call of the backend."""

from __future__ import annotations

from datetime import timedelta

import slice_gates
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, spec_params

slice_gates.install()

PARAMS = spec_params("envs/tiny.yaml")

with DAG("held", schedule=None, params=PARAMS):
    EnvStageOperator(
        task_id="train",
        spec="envs/tiny.yaml",
        retry_delay=timedelta(seconds=1),
        poll_interval=1,
        pre_execute=slice_gates.lose,
    )
    EmptyOperator(task_id="sibling")

with DAG("held_without_retries", schedule=None, params=PARAMS):
    EnvStageOperator(task_id="train", spec="envs/tiny.yaml", retries=0, poll_interval=1)
