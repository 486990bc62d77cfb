"""Every process of a service home can be found and ended, however it was detached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from envscaler_airflow.testing import airflow_services

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
DETACH = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
    os._exit(0)
os._exit(0)
"""
OWNER = """
import signal, sys, time
from pathlib import Path
from envscaler_airflow.testing import airflow_services
home = Path(sys.argv[1])
airflow_services.start_guard(home)
print("guarded", flush=True)
time.sleep(60)
"""


def marked(home):
    """The environment of a process of *home*."""
    return os.environ | {airflow_services.MARK: str(home)}


def until(condition, seconds=10.0):
    """True as soon as *condition* is true, False when it was not in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def home(tmp_path):
    """A home whose processes are gone after the test."""
    yield tmp_path
    airflow_services.end_all(tmp_path)


def test_ends_a_process_that_left_its_session_and_parent(home):
    """A double fork detaches the training; the mark in its environment finds it."""
    subprocess.run([sys.executable, "-c", DETACH], env=marked(home), check=True)
    assert until(lambda: len(airflow_services.belonging_to(home)) == 1)

    killed = airflow_services.end_all(home)

    assert len(killed) == 1
    assert airflow_services.belonging_to(home) == []


def test_ends_a_process_without_the_mark_in_a_noted_session(home):
    """A process that overwrote its environment is found by the session of its service."""
    with subprocess.Popen(SLEEP, start_new_session=True) as service:
        airflow_services.note_session(home, service.pid)

        killed = airflow_services.end_all(home)

        assert len(killed) == 1
        service.wait(timeout=5)
        assert not psutil.pid_exists(service.pid)


def test_leaves_other_homes_alone(home, tmp_path_factory):
    """The mark names the home."""
    other = tmp_path_factory.mktemp("other")
    with subprocess.Popen(SLEEP, env=marked(other), start_new_session=True) as stranger:
        assert until(lambda: len(airflow_services.belonging_to(other)) == 1)

        killed = airflow_services.end_all(home)

        assert killed == []
        assert stranger.poll() is None
        airflow_services.end_all(other)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_the_guard_ends_all_when_its_owner_is_gone(home, how):
    """Neither a kill nor a Ctrl-C of the demo leaves a process behind."""
    command = [sys.executable, "-c", OWNER, str(home)]
    with subprocess.Popen(SLEEP, env=marked(home), start_new_session=True) as service:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
            owner.stdout.readline()
            guards = psutil.Process(owner.pid).children()
            owner.send_signal(getattr(signal, how))
            owner.wait(timeout=5)

        assert service.wait(timeout=10) == -9
        psutil.wait_procs(guards, timeout=5)
        assert [guard for guard in guards if guard.is_running() and guard.status() != "zombie"] == []
