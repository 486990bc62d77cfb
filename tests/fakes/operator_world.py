"""A stage's operator with its store and scripted machines: no Airflow services, no process."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.sdk._shared.secrets_masker import reset_secrets_masker
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import (
    TaskDeferred,
)

from envscaler_airflow import EnvStageOperator
from envscaler_airflow.backends.base import Handle
from envscaler_airflow.operators import slices
from envscaler_airflow.protocol import Ended, Status, status_name
from envscaler_airflow.store import EventLog, check_store, open_store
from envscaler_airflow.testing import ScriptedBackend

SPEC = """\
version: v1
name: train
parameters: {rate: {type: number, default: 0.1}, note: {type: string, default: ""}}
resources: {requests: {cpu: 1, memory: 1Gi}}
env: [{name: NOTE, value: "{{ parameters.note }}"}]
entrypoint: [python, train.py, "--rate={{ parameters.rate }}"]
outputs: {model: /output/model}
"""
PREFIX = "unit/dag/run/train/-1"


class Ti:
    """As much of a task instance as a slice uses."""

    def __init__(self, number=1, max_tries=3):
        """Try *number*."""
        self.id, self.try_number, self.max_tries = f"ti-{number}", number, max_tries
        self.dag_id, self.run_id, self.task_id, self.map_index = "dag", "run", "train", -1
        self.start_date = datetime.now(UTC)
        self.pushed = {}

    def xcom_push(self, key, value):
        """Keep it."""
        self.pushed[key] = value

    def xcom_pull(self, key, **_):
        """What was pushed."""
        return self.pushed.get(key)


class World:
    """A stage's operator with its store and machines."""

    def __init__(self, tmp_path):
        """Nothing begun."""
        (tmp_path / "train.yaml").write_text(SPEC)
        self.dag_file = tmp_path / "dag.py"
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.backend = ScriptedBackend(ends_on_stop=False)
        self.log = EventLog(self.store, PREFIX)
        self.params = {}

    def operator(self, *, spec="train.yaml", **more):
        """The operator of the stage, in a DAG of this folder."""
        dag = DAG("dag", schedule=None)
        dag.fileloc = str(self.dag_file)
        return EnvStageOperator(task_id="train", spec=spec, dag=dag, **more)

    def context(self, operator, ti):
        """What a worker hands to a slice."""
        return {
            "ti": ti,
            "dag": operator.dag,
            "dag_run": SimpleNamespace(team_name=None),
            "params": self.params,
        }

    def execute(self, operator, ti=None):
        """First slice; returns the deferral."""
        return self.deferral(lambda: operator.execute(self.context(operator, ti or Ti())))

    def resume(self, operator, ti, kind="status"):
        """A later slice."""
        return operator.resume(self.context(operator, ti), {"kind": kind})

    @staticmethod
    def deferral(call):
        """What *call* deferred for."""
        with pytest.raises(TaskDeferred) as caught:
            call()
        return caught.value

    @property
    def handle(self):
        """Of the live attempt."""
        return Handle.from_dict(self.log.load().live.handle)

    def end(self, *, reason="succeeded", exit_code=0, lines=(), outputs=None):
        """Let the live attempt end."""
        live = self.log.load().live
        ended = Ended(exit_code=exit_code, reason=reason, last_lines=tuple(lines))
        status = Status(
            generation=live.generation,
            attempt=live.number,
            sequence=9,
            phase="ended",
            ended=ended,
            outputs=outputs or {},
        )
        self.store.write(f"{PREFIX}/{status_name(live.generation, live.number, 0)}", status.to_json())
        self.backend.end(self.handle, exit_code=exit_code, reason=reason)


@contextmanager
def operator_world(tmp_path, monkeypatch):
    """Settings of a deployment, and operators that may be run outside a task."""
    made = World(tmp_path)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "unit")
    monkeypatch.setattr(slices, "open_backend", lambda _name: made.backend)
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    yield made
    reset_secrets_masker()
