"""A stage that runs twice on this machine: the second plan knows what the first run measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

TRAIN = """\
import time
from envscaler_agent import Session
with Session(total_steps=40) as session:
    for _ in range(40):
        time.sleep(0.1)
        session.step(samples=4)
"""
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 256Mi}}
workdir: code
entrypoint: [python, train.py]
"""


def test_the_second_run_is_planned_with_the_measured_speed(tmp_path):
    """Ten steps a second, measured in 1 run: the plan has a time and a cost with ranges (feature B5)."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    (tmp_path / "train.yaml").write_text(SPEC)
    store = tmp_path / "store"
    env = {
        **os.environ,
        "ENVSCALER_LOCAL_ROOT": str(tmp_path / "local"),
        "ENVSCALER_CACHE": str(tmp_path / "cache"),
    }

    def shell(*args):
        command = [sys.executable, "-m", "envscaler_airflow.cli", *args, "--store", str(store)]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for name in ("first", "second"):
        shell("run", "-f", "train.yaml", "--name", name)
    first = json.loads(shell("explain", "first", "--plan", "--json"))
    second = json.loads(shell("explain", "second", "--plan", "--json"))

    assert first["chosen"].get("estimate") is None
    assert first["notes"][0] == "no speed is known yet: ranked by USD an hour, without times"
    assert any("speed: measured in 1 run" in note for note in second["notes"])
    assert 0 < second["chosen"]["speed"]["mean"] <= 10.0
    estimate = second["chosen"]["estimate"]
    assert estimate["usd_low"] < estimate["usd"] < estimate["usd_high"]
