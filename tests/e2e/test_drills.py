"""``envscaler drill`` on a stage of a real Airflow, whose owner is a deferred task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable


def started(run, *words: str) -> subprocess.Popen[str]:
    """The command in a shell that knows the run store."""
    command = [sys.executable, "-m", "envscaler_airflow.cli", "drill", "--run", run.run_id, "--yes", "--json"]
    env = os.environ | {"ENVSCALER_STORE_URL": f"file://{run.airflow.home}/store"}
    return subprocess.Popen(
        [*command, *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def over(drill: subprocess.Popen[str]) -> dict:
    """What its one fault showed; every bound was kept."""
    printed, said = drill.communicate(timeout=400)
    assert drill.returncode == 0, printed + said
    return json.loads(printed)["faults"][0]


def test_a_lost_node_and_a_killed_triggerer_are_survived(begin: Callable):
    """The next execution replaces the node; a restarted triggerer watches again (C6) (feature G4)."""
    run = begin("stage", steps=2000)
    run.wait_step(3)
    run.wait_watched()

    lost = over(started(run, "--faults", "lose-node"))
    run.wait_watched()
    alone = started(run, "--faults", "triggerer", "--triggerer", str(run.airflow.pids("triggerer")[0]))
    assert alone.stderr is not None
    for line in alone.stderr:
        if "waiting until it is started again" in line:
            break
    run.airflow.restart("triggerer")

    watched = over(alone)
    assert (lost["before"][:5], lost["after"][:5]) == ("g1-a1", "g1-a2")
    assert lost["committed_steps_lost"] == 0
    assert (watched["before"], watched["pause_s"]) == (watched["after"], 0)
    run.airflow.set_state(run.dag_id, run.run_id, "train", "failed")
    run.wait_gone()
    run.check()
