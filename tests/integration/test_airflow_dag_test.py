"""``dag.test()`` of a DAG file, as an author tries it before the deployment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DAG_FILE = """\
from airflow.sdk import DAG

from envscaler_airflow import EnvStageOperator, ScalingSensor

with DAG("tried", schedule=None) as dag:
    sensor = ScalingSensor(task_id="autoscale", stage="train")
    train = EnvStageOperator(task_id="train", spec="train.yaml", poll_interval=1)

if __name__ == "__main__":
    run = dag.test()
    print("STATE", run.state, sorted((ti.task_id, str(ti.state)) for ti in run.get_task_instances()))
"""
SPEC = """\
version: v1
name: tried
resources: {requests: {cpu: 1, memory: 64Mi}}
entrypoint: [python, -c, "print('trained')"]
"""


@pytest.mark.timeout(240)
def test_dag_test_runs_a_sensor_before_its_stage(tmp_path: Path):
    """The sensor, which comes first, does not wait for a stage that cannot run beside it (F13)."""
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "tried.py").write_text(DAG_FILE)
    (dags / "train.yaml").write_text(SPEC)
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__ENVSCALER__STORE_URL": f"file://{tmp_path}/store",
        "AIRFLOW__ENVSCALER__LOCAL_ROOT": str(tmp_path / "local"),
    }
    migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(migrate, env=env, check=True, capture_output=True, timeout=120)

    done = subprocess.run(
        [sys.executable, str(dags / "tried.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "STATE success [('autoscale', 'success'), ('train', 'success')]" in done.stdout, (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
