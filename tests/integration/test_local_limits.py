"""Integration tests: limits of a local node are real, and its share is its own."""

import sys
import time
from pathlib import Path

import attempts
import pytest

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.node_plan import Programs
from envscaler_airflow.planning.offers import Allocation

STANDINS = Path(__file__).parents[1] / "standins"
HOG = "held = []\nwhile True: held.append(bytearray(b'x' * (8 << 20)))"
"""Takes memory for ever, 8 MiB at a time, and touches it."""


def run(tmp_path, *command, cgroups=True, memory=None):
    """Run *command* to its end on the smallest offer; the status, the output and node.json."""
    programs = Programs(
        sidecar=(sys.executable, str(STANDINS / "sidecar.py")),
        wrapper=(sys.executable, str(STANDINS / "wrapper.py")),
        cgroups=cgroups,
    )
    backend = LocalBackend(tmp_path / "root", programs=programs)
    request = attempts.request(
        store_url="file:///store",
        run_prefix="dep/dag/run/train/-1",
        run_label="dag.train",
        generation=1,
        attempt=1,
        allocation=Allocation(backend.offers()[0]),
        command=command,
        spec={"resources": {"limits": {"memory": memory}}} if memory else {},
    )
    handle = backend.submit(request)
    until = time.monotonic() + 60
    while not backend.observe(handle).is_over and time.monotonic() < until:
        time.sleep(0.05)
    [status] = backend.observe(handle).nodes
    output = attempts.printed(handle).decode()
    node = files.read_json(Path(handle.details["folder"], "n0", files.NODE))
    backend.stop(handle, grace_s=0)
    backend.release(handle)
    return status, output, node


def test_memory_beyond_the_limit_ends_it_as_out_of_memory(tmp_path):
    """The kernel kills at 64 MiB, and the node's end has that reason."""
    status, _, node = run(tmp_path, "python", "-c", HOG, memory="64Mi")

    if "memory" not in node["scope"]["limits"]:
        pytest.skip(f"no memory cgroup here: {node['limits']}")
    assert (status.state, status.reason) == ("ended", "out-of-memory")
    assert "at the memory limit" in status.detail


def test_a_killed_helper_does_not_make_a_success_a_failure(tmp_path):
    """The kernel kills a child at the limit; the command handles that, and succeeds."""
    cope = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOG!r}]); print('coped')"

    status, output, _ = run(tmp_path, "python", "-c", cope, memory="64Mi")

    assert (status.exit_code, status.reason) == (0, "succeeded")
    assert "coped" in output


def test_without_cgroups_an_rlimit_holds_and_is_said(tmp_path):
    """The interpreter gets MemoryError at 256 MiB instead of a kill."""
    status, output, node = run(tmp_path, "python", "-c", HOG, cgroups=False, memory="256Mi")

    assert (status.exit_code, status.reason) == (1, "failed")
    assert "MemoryError" in output
    assert "by rlimit" in node["limits"]
    assert "no cgroups: switched off" in node["limits"]


def test_the_command_has_the_cpus_of_its_share(tmp_path):
    """cpu-1 is one CPU, in affinity and in the variables of the command."""
    ask = "import os; print(len(os.sched_getaffinity(0)), os.environ['ENVSCALER_CPUS'])"

    _, output, _ = run(tmp_path, "python", "-c", ask)

    assert output == "1 1\n"


def test_the_command_inherits_what_it_needs_and_no_more(tmp_path, monkeypatch):
    """Neither Airflow's settings nor the worker's credentials reach the training."""
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "canary-db")
    monkeypatch.setenv("AIRFLOW_CONN_S3", "canary-conn")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-aws")

    _, output, _ = run(tmp_path, "env")

    names = {line.partition("=")[0] for line in output.splitlines()}
    assert "canary" not in output
    assert {"PATH", "HOME", "ENVSCALER_SPOOL", "ENVSCALER_RUN"} <= names


def test_python_is_this_interpreter_and_knows_the_agent(tmp_path):
    """``python`` is Airflow's interpreter, and finds the agent."""
    ask = "import sys, envscaler_agent; print(sys.executable)"

    _, output, _ = run(tmp_path, "python", "-c", ask)

    assert Path(output.strip()).parent == Path(sys.executable).parent


def test_another_program_gets_a_copy_of_the_agent(tmp_path):
    """A shell script may start any Python: PYTHONPATH leads to the agent, which runs on every version."""
    ask = "import sys, envscaler_agent; print(envscaler_agent.__file__)"

    _, output, _ = run(tmp_path, "sh", "-c", f'python -c "{ask}"')

    copied = Path(output.strip())
    assert copied.is_relative_to(tmp_path / "root")
    names = {path.name for path in copied.parents[1].iterdir()}
    assert names - {"__pycache__"} == {"envscaler_agent", "pynvml.py"}


def test_no_descriptor_of_ours_reaches_the_command(tmp_path):
    """The lock is not inherited: its owner would seem alive as long as the command is."""
    _, output, _ = run(tmp_path, "python", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))")

    assert output == "['0', '1', '2', '3']\n"  # 3 is the listing's own descriptor


def test_no_signal_is_ignored_in_the_command(tmp_path):
    """The command gets the signals that node main ignores."""
    ask = "import signal; print([signal.getsignal(n).name for n in (signal.SIGTERM, signal.SIGHUP)])"

    _, output, _ = run(tmp_path, "python", "-c", ask)

    assert output == "['SIG_DFL', 'SIG_DFL']\n"
