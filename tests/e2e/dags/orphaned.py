"""A stage without retries, whose lease is shorter than a spec allows, to keep the tests short."""

from __future__ import annotations

import slice_gates
from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, spec_params
from envscaler_airflow.envspec.running import Failure

slice_gates.install()
Failure.orphan_after_s = property(lambda _self: 15.0)

with DAG("orphaned", schedule=None, params=spec_params("envs/tiny.yaml")):
    EnvStageOperator(task_id="train", spec="envs/tiny.yaml", retries=0, poll_interval=1)
