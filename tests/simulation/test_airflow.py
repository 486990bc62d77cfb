"""The simulated Airflow: a stage of a DAG runs to its end, and each seed has one timeline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TWICE = """
from tests.simulation import patches
patches.install()
from tests.simulation.run import AIRFLOW_RATES, Scenario, simulate
scenario = Scenario(steps=300, owner="airflow", has_sensor=True, rates=%s)
first, again = simulate(5, scenario=scenario), simulate(5, scenario=scenario)
assert first.violation is None, first.violation
assert first.lines == again.lines
print(*first.lines, sep="\\n")
"""


def lines_of(rates):
    """The timeline of one world, run twice in a process whose clocks are patched."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE % rates],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_stage_and_its_sensor_run_to_their_ends():
    """Execute, defer, trigger, resume; the sensor ends with it (G7)."""
    lines = lines_of("{}")

    assert "train try 1: state success" in lines
    assert "autoscale try 1: state success" in lines


def test_everything_that_happens_to_an_airflow_follows_from_the_seed():
    """Twice the same lines, with every kind of fault (G7)."""
    assert "FAULT" in lines_of("{kind: min(0.5, 5 * rate) for kind, rate in AIRFLOW_RATES.items()}")
