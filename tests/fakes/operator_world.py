"""A stage's operator with its store and scripted machines: no Airflow services, no process."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.sdk._shared.secrets_masker import reset_secrets_masker
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType, TaskDeferred
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from envscaler_agent.protocol import Ended, Status, status_name
from envscaler_airflow import EnvStageOperator
from envscaler_airflow.operators import execution
from envscaler_airflow.store import check_store, open_store
from envscaler_airflow.store.run import Run
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
    """The part of a task instance that an execution uses."""

    def __init__(self, number=1, max_tries=3, *, ti_id=None):
        """Start with try *number*."""
        self.id, self.try_number, self.max_tries = ti_id or f"ti-{number}", number, max_tries
        self.dag_id, self.run_id, self.task_id, self.map_index = "dag", "run", "train", -1
        self.start_date = datetime.now(UTC)
        self.pushed = {}

    def xcom_push(self, key, value):
        """Store the value."""
        self.pushed[key] = value

    def xcom_pull(self, key, **_):
        """Return a pushed value."""
        return self.pushed.get(key)


def api_error(status):
    """The error of a worker when the API server answers with *status*."""
    return AirflowRuntimeError(
        ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": status})
    )


class TaskStateStore:
    """Airflow's task state store of one task of one DAG run, for one try, like the 3.3.2 accessor."""

    def __init__(self, kept, *, is_known=True):
        """Keep values in *kept*; *is_known* is False for a try whose task instance is gone."""
        self._kept, self._is_known = kept, is_known

    def get(self, key, default=None):
        """A try without a task instance finds nothing, and gets no error."""
        return self._kept.get(key, default) if self._is_known else default

    def set(self, key, value, *, retention=None):
        """A try without a task instance is refused."""
        assert retention is NEVER_EXPIRE
        if not self._is_known:
            raise api_error(404)
        self._kept[key] = value


class World:
    """A stage's operator with its store and machines."""

    def __init__(self, tmp_path):
        """Start with no attempt."""
        (tmp_path / "train.yaml").write_text(SPEC)
        self.dag_file = tmp_path / "dag.py"
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.backend = ScriptedBackend(ends_on_stop=False)
        self.log = Run(self.store, PREFIX).events
        self.params = {}
        self.dag_run_keeps = {}
        self.airflow_says = "success"

    def recreate_dag_run(self):
        """Let the DAG run be deleted and recreated: its task state store goes with it."""
        self.dag_run_keeps = {}

    def files(self):
        """Every file in the run's folder, with its content."""
        return {name: self.store.read(name) for name in self.store.names(PREFIX)}

    def finish(self, operator, ti):
        """The last execution, and what Airflow does after a success: the callbacks."""
        result, context = self.resume(operator, ti), self.context(operator, ti)
        for callback in operator.on_success_callback:
            callback(context)
        return result

    def operator(self, *, spec="train.yaml", **more):
        """The operator of the stage, in a DAG of this folder."""
        dag = DAG("dag", schedule=None)
        dag.fileloc = str(self.dag_file)
        return EnvStageOperator(task_id="train", spec=spec, dag=dag, **more)

    def context(self, operator, ti, *, is_known=True):
        """What a worker passes to an execution; *is_known* is False once another try has replaced it."""
        return {
            "task_state_store": TaskStateStore(self.dag_run_keeps, is_known=is_known),
            "ti": ti,
            "dag": operator.dag,
            "dag_run": SimpleNamespace(team_name=None),
            "params": self.params,
        }

    def execute(self, operator, ti=None):
        """Run the first execution; returns the deferral."""
        return self.deferral(lambda: operator.execute(self.context(operator, ti or Ti())))

    def resume(self, operator, ti, kind="status"):
        """Run a later execution."""
        return operator.resume(self.context(operator, ti), {"kind": kind})

    @staticmethod
    def deferral(call):
        """The deferral of *call*."""
        with pytest.raises(TaskDeferred) as caught:
            call()
        return caught.value

    @property
    def handle(self):
        """Number of the live attempt."""
        return self.log.load().live.handle

    def end(self, *, reason="succeeded", exit_code=0, lines=(), outputs=None):
        """End the live attempt."""
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
    """Settings of a deployment, and operators that may run outside a task."""
    made = World(tmp_path)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "unit")
    monkeypatch.setattr(execution, "open_backend", lambda _name: made.backend)
    monkeypatch.setattr(execution, "task_state", lambda *_: made.airflow_says)
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    yield made
    reset_secrets_masker()
