"""An interrupted demo leaves nothing that it started, not even its home."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fakes.kubernetes import JOBS

from envscaler_airflow.testing.airflow_services import MARK, belonging_to


class Interrupted:
    """A demo in a temporary folder of its own, whose output is read line by line."""

    def __init__(self, folder):
        """Start it."""
        command = [sys.executable, "-m", "envscaler_airflow.cli", "demo"]
        env = {name: value for name, value in os.environ.items() if name != MARK}
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            env=env | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []

    def wait_for(self, words):
        """Read until a line contains *words*."""
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return
        pytest.fail("".join(self.lines))

    @property
    def home(self):
        """Its temporary home."""
        (home,) = self.folder.glob("envscaler-demo-*")
        return home


@pytest.fixture
def demo(tmp_path):
    """One demo; nothing of it outlives the test."""
    started = Interrupted(tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait(timeout=10)
    started.process.stdout.close()


@pytest.mark.timeout(420)
def test_runs_on_a_cluster(tmp_path, cluster):
    """On the current context every stage runs in pods, one of them evicted; the demo leaves nothing there."""
    store = tmp_path / "store"
    store.mkdir()
    env = {name: value for name, value in os.environ.items() if name != MARK} | {
        "KUBECONFIG": str(cluster.kubeconfig(tmp_path / "config")),
        "ENVSCALER_STORE_URL": f"file://{store}",
        "ENVSCALER_DEMO_IMAGE": "everything:1",
        "ENVSCALER_NAMESPACE": "default",
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "envscaler_airflow.cli", "demo", "--backend", "kubernetes"]

    done = subprocess.run(
        [*command, "--set", "epochs=8"], env=env, capture_output=True, text=True, timeout=400, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1 on kubernetes/cpu-1/on-demand" in done.stdout
    assert "evicted the pod of attempt" in done.stdout
    assert "lost a node and resumes from step" in done.stdout
    assert "held-out documents" in done.stdout
    assert cluster.list(JOBS, "default") == []
    assert belonging_to(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("starting a real Airflow", signal.SIGTERM, 130),
        ("starting a real Airflow", signal.SIGKILL, -signal.SIGKILL),
        ("prepare  attempt 1 on", signal.SIGINT, 130),
    ],
)
def test_leaves_no_process_behind(demo, words, number, code):
    """At the start, during a stage, and on SIGKILL: in that case the guard cleans up."""
    demo.wait_for(words)
    time.sleep(3)  # services and training are starting
    home = demo.home
    before = belonging_to(home)

    demo.process.send_signal(number)

    assert demo.process.wait(timeout=60) == code
    give_up = time.monotonic() + 20
    # A killed process that the kernel is removing has no environment any more but is still alive.
    while (belonging_to(home) or any(map(_lives, before))) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert before
    assert belonging_to(home) == []
    assert [process for process in before if _lives(process)] == []
    if number != signal.SIGKILL:
        assert not Path(home).exists()


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
