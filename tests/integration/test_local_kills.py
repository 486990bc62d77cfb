"""Integration tests: local nodes are killed at every step, and leave neither a process nor a duplicate."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import attempts
import psutil
import pytest

from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.node_plan import Programs
from envscaler_airflow.planning.offers import Allocation

STANDINS = Path(__file__).parents[1] / "standins"
PROGRAMS = Programs(
    sidecar=(sys.executable, str(STANDINS / "sidecar.py")),
    wrapper=(sys.executable, str(STANDINS / "wrapper.py")),
)

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:           # a grandchild that leaves session and parent
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {"OF": sys.argv[1]})
    os._exit(0)
open(sys.argv[2], "a").write("up\\n")
time.sleep(600)
"""
"""Ends by SIGKILL alone; its grandchild has left session, parent and environment."""


def closing(tmp_path, programs):
    """A backend with a root of its own; processes at the end of a test are killed."""
    made = LocalBackend(tmp_path / "root", programs=programs)
    yield made
    for handle in made.attempts():
        made.stop(handle, grace_s=0)
        made.release(handle)
    wait_for(lambda: processes_of(tmp_path) == [])


@pytest.fixture
def backend(tmp_path):
    """A backend as users have it."""
    yield from closing(tmp_path, PROGRAMS)


@pytest.fixture(params=[True, False], ids=["cgroups", "no-cgroups"])
def either(request, tmp_path):
    """With cgroups where the system has them, and without."""
    yield from closing(tmp_path, dataclasses.replace(PROGRAMS, cgroups=request.param))


def processes_of(tmp_path):
    """Every live process that names *tmp_path* in its arguments or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(tmp_path) in word for word in words):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def request_for(backend, *command, **changes):
    """A request for one node on the smallest offer."""
    fields = {
        "store_url": "file:///store",
        "run_prefix": "dep/dag/run/train/-1",
        "run_label": "dag.train",
        "generation": 1,
        "attempt": 1,
        "allocation": Allocation(backend.offers()[0]),
        "command": command,
    }
    return attempts.request(**(fields | changes))


def stubborn(backend, tmp_path):
    """An attempt that ends by SIGKILL alone, once its command and the grandchild run."""
    up = tmp_path / "up"
    request = request_for(backend, "python", "-c", STUBBORN, str(tmp_path), str(up))
    handle = backend.submit(request)
    wait_for(up.exists)
    wait_for(lambda: len(processes_of(tmp_path)) >= 6)
    return request, handle


def wait_for(claim, patience_s=60.0):
    """Wait until *claim* is true; a claim about all processes reads each of them."""
    until = time.monotonic() + patience_s
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.05)


def over(backend, handle):
    """The status once nothing of it runs."""
    wait_for(lambda: backend.observe(handle).is_over)
    return backend.observe(handle)


def node(handle, which):
    """A process of node 0, by its name in the handle."""
    return handle.details["nodes"][0][which]["pid"]


def test_a_stop_without_grace_reaches_a_grandchild_that_cut_every_tie(either, tmp_path):
    """Own session, orphaned, clean environment: it still belongs to the node, and ends with it."""
    _, handle = stubborn(either, tmp_path)

    either.stop(handle, grace_s=0)

    assert processes_of(tmp_path) == []
    [status] = over(either, handle).nodes
    assert (status.state, status.signal, status.reason) == ("ended", 9, "killed")


def test_what_outlives_its_grace_is_killed(either, tmp_path):
    """The command ignores SIGTERM: after two seconds it is killed, with the whole node."""
    _, handle = stubborn(either, tmp_path)

    either.stop(handle, grace_s=2.0)
    alive = processes_of(tmp_path)
    status = over(either, handle)

    assert alive != [], "the call does not wait for the grace"
    assert [(n.state, n.signal, n.reason) for n in status.nodes] == [("ended", 9, "killed")]
    wait_for(lambda: processes_of(tmp_path) == [])  # the guard cleans up after the end


@pytest.mark.parametrize("victim", ["main", "guard"])
def test_killing_one_of_its_keepers_leaves_no_orphan(either, tmp_path, victim):
    """The guard ends the processes of a dead node main: lost. Without its guard node main continues."""
    _, handle = stubborn(either, tmp_path)

    os.kill(node(handle, victim), signal.SIGKILL)

    if victim == "guard":
        assert either.observe(handle).nodes[0].state == "running"
        either.stop(handle, grace_s=0)
    [status] = over(either, handle).nodes
    assert status.state == ("lost" if victim == "main" else "ended")


def test_what_outlives_both_keepers_is_not_dead_and_is_ended_by_the_next_start(backend, tmp_path):
    """A command that still runs may still write: running, until the owner starts the next attempt."""
    _, handle = stubborn(backend, tmp_path)

    for victim in ("guard", "main"):
        os.kill(node(handle, victim), signal.SIGKILL)
    wait_for(lambda: "node main is gone" in backend.observe(handle).nodes[0].detail)
    state = backend.observe(handle).nodes[0].state
    backend.submit(request_for(backend, "true", attempt=2))

    assert state == "running"
    assert [n.state for n in over(backend, handle).nodes] == ["lost"]


def test_the_loss_of_a_machine_leaves_nothing(either, tmp_path):
    """As with a spot loss: no end of its own, no process, a closed bill."""
    _, handle = stubborn(either, tmp_path)

    either.take_away(handle)

    assert processes_of(tmp_path) == []
    assert [n.state for n in over(either, handle).nodes] == ["lost"]


def test_a_node_outlives_the_worker_that_started_it(backend, tmp_path):
    """A kill of the worker's whole process group and session does not reach it."""
    go = tmp_path / "go"
    script = textwrap.dedent(f"""
        import json, os, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from pathlib import Path
        from test_local_kills import PROGRAMS, LocalBackend, request_for
        backend = LocalBackend(Path({str(tmp_path / "root")!r}), programs=PROGRAMS)
        wait = "import os, time\\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)"
        handle = backend.submit(request_for(backend, "python", "-c", wait))
        print(json.dumps(handle.to_dict()), flush=True)
        import time; time.sleep(60)
    """)
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    body = json.loads(worker.stdout.readline())
    worker.stdout.close()

    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()

    handle = next(iter(backend.attempts()))
    assert handle.to_dict() == body
    assert os.getsid(node(handle, "main")) == node(handle, "guard")
    assert backend.observe(handle).nodes[0].state in ("starting", "running")
    go.touch()
    assert [(n.exit_code, n.reason) for n in over(backend, handle).nodes] == [(0, "succeeded")]


def test_a_wrapper_killed_alone_ends_the_node(either, tmp_path):
    """Its command ends with it, and the sidecar reads the end although the wrapper reported nothing."""
    _, handle = stubborn(either, tmp_path)
    [wrapper] = [p for p in processes_of(tmp_path) if str(STANDINS / "wrapper.py") in p.cmdline()]

    wrapper.send_signal(signal.SIGKILL)

    [status] = over(either, handle).nodes
    assert (status.state, status.signal, status.reason) == ("ended", 9, "killed")
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_sidecar_that_dies_is_started_again_and_training_goes_on(tmp_path):
    """Two deaths, then it lives; the command runs once."""
    programs = dataclasses.replace(PROGRAMS, sidecar=(*PROGRAMS.sidecar, "--die", "1"))
    backend = LocalBackend(tmp_path / "root", programs=programs)
    handle = backend.submit(request_for(backend, "sh", "-c", "echo once"))

    status = over(backend, handle)

    assert [n.reason for n in status.nodes] == ["succeeded"]
    assert attempts.printed(handle) == b"once\n"
    births = Path(handle.details["folder"], "n0", "spool", "births").read_text().split()
    assert len(births) == 2
    backend.release(handle)


def test_a_sidecar_killed_during_training_is_started_again(backend, tmp_path):
    """SIGKILL to the sidecar alone."""
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)"
    handle = backend.submit(request_for(backend, "python", "-c", wait))
    births = Path(handle.details["folder"], "n0", "spool", "births")
    wait_for(lambda: births.exists() and births.read_text().endswith("\n"))

    os.kill(int(births.read_text().split()[0]), signal.SIGKILL)
    wait_for(lambda: len(births.read_text().split()) == 2)
    go.touch()

    assert [n.reason for n in over(backend, handle).nodes] == ["succeeded"]


def test_an_orphan_whose_wrapper_is_stopped_is_ended_all_the_same(tmp_path):
    """SIGSTOP to the wrapper, and a sidecar that reports an orphan: killed, drained by the next, reported."""
    programs = dataclasses.replace(PROGRAMS, sidecar=(*PROGRAMS.sidecar, "--give-up"))
    backend = LocalBackend(tmp_path / "root", programs=programs)
    stop = (
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\n"
        "open(os.path.join(os.environ['ENVSCALER_SPOOL'], 'stopped'), 'w')\ntime.sleep(600)"
    )
    handle = backend.submit(request_for(backend, "python", "-c", stop))

    [status] = over(backend, handle).nodes

    assert (status.state, status.signal, status.reason) == ("ended", 9, "orphaned")
    wait_for(lambda: processes_of(tmp_path) == [])
    backend.release(handle)


@pytest.mark.parametrize("name", ["wrapper.json", "sidecar.json"])
def test_a_pipe_in_the_place_of_a_file_holds_no_node(backend, tmp_path, name):
    """The training puts it there and kills its wrapper; opening a pipe would wait for ever."""
    code = (
        "import os, signal\npath = os.path.join(os.environ['ENVSCALER_SPOOL'], "
        f"{name!r})\nos.mkfifo(path)\nos.kill(os.getppid(), signal.SIGKILL)"
    )
    handle = backend.submit(request_for(backend, "python", "-c", code))

    [status] = over(backend, handle).nodes

    assert (status.state, status.reason) == ("ended", "killed")


def test_a_removed_spool_and_a_dead_wrapper_end_the_node(backend, tmp_path):
    """The sidecar gets the end although the folder was removed."""
    code = (
        "import os, shutil, signal\nshutil.rmtree(os.environ['ENVSCALER_SPOOL'])\n"
        "os.kill(os.getppid(), signal.SIGKILL)"
    )
    handle = backend.submit(request_for(backend, "python", "-c", code))

    [status] = over(backend, handle).nodes

    assert (status.state, status.reason) == ("ended", "killed")


def test_room_for_the_last_words_is_kept_from_the_training(backend, tmp_path):
    """The node's folder has a megabyte in reserve while the command runs, and none once it has ended."""
    ballast = "os.path.join(os.environ['ENVSCALER_SPOOL'], '..', 'ballast')"
    code = f"import os\nassert os.path.getsize({ballast}) == 1 << 20"
    handle = backend.submit(request_for(backend, "python", "-c", code))

    [status] = over(backend, handle).nodes

    assert status.reason == "succeeded"
    assert not Path(handle.details["folder"], "n0", "ballast").exists()


def test_a_sidecar_that_hangs_holds_the_node_no_longer_than_it_may(tmp_path):
    """Uploads are bounded: the node ends, and the sidecar with it."""
    programs = dataclasses.replace(PROGRAMS, sidecar=(*PROGRAMS.sidecar, "--hang"), drain_s=0.3)
    backend = LocalBackend(tmp_path / "root", programs=programs)
    handle = backend.submit(request_for(backend, "true"))

    status = over(backend, handle)

    assert [n.reason for n in status.nodes] == ["succeeded"]
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_deadline_ends_the_node_by_itself(either, tmp_path):
    """Without any request: the machine has its own deadline."""
    command = ("python", "-c", STUBBORN, str(tmp_path), str(tmp_path / "up"))
    handle = either.submit(request_for(either, *command, deadline_s=2.0, grace_s=0.2))

    status = over(either, handle)

    assert [(n.state, n.reason) for n in status.nodes] == [("ended", "deadline-exceeded")]
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_wrapper_that_cannot_be_started_is_said(tmp_path):
    """An end with its reason, not a loss."""
    programs = dataclasses.replace(PROGRAMS, wrapper=(str(tmp_path / "no-such-program"),))
    backend = LocalBackend(tmp_path / "root", programs=programs)
    handle = backend.submit(request_for(backend, "true"))

    [status] = over(backend, handle).nodes

    assert (status.state, status.reason) == ("ended", "setup-failed")
    assert "no-such-program" in status.detail


STEPS = {
    "folder made": "files.locked",
    "locks held": "_Start._claim",
    "share claimed": "training_pythonpath",
    "request half written": "files.write_json",
    "all written": "_Start._spawn",
    "node main started": "after:subprocess.run",
    "node main known": "after:_Start._spawn",
}
"""Where the first submitter is killed; ``after:`` once the call is done."""


@pytest.mark.parametrize("step", STEPS)
def test_a_submitter_killed_at_any_step_leaves_one_attempt_or_none(backend, tmp_path, step):
    """The next submit adopts or finishes; the command runs exactly once (feature C6)."""
    runs = tmp_path / "runs"
    command = ("sh", "-c", f"echo $$ >> {runs}; sleep 0.3")
    script = textwrap.dedent(f"""
        import os, signal, subprocess, sys
        from pathlib import Path
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from envscaler_airflow.backends.local import local_backend as module
        from envscaler_airflow.backends.local.local_backend import _Start, files
        from test_local_kills import PROGRAMS, LocalBackend, request_for
        after, _, name = {STEPS[step]!r}.rpartition(":")
        holder, _, name = name.rpartition(".")
        holder = eval(holder) if holder else module
        act = getattr(holder, name)
        def die(*arguments, **options):
            if after:
                act(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        backend = LocalBackend(Path({str(tmp_path / "root")!r}), programs=PROGRAMS)
        setattr(holder, name, die)
        backend.submit(request_for(backend, *{command!r}))
    """)
    dead = subprocess.run([sys.executable, "-c", script], check=False)
    assert dead.returncode == -signal.SIGKILL

    handles = [backend.submit(request_for(backend, *command)) for _ in range(2)]

    assert handles[0] == handles[1]
    assert [n.reason for n in over(backend, handles[0]).nodes] == ["succeeded"]
    assert len(runs.read_text().split()) == 1


def test_many_submitters_at_once_start_it_once(backend, tmp_path):
    """Four processes race for the same attempt; all get the same handle."""
    runs = tmp_path / "runs"
    command = ("sh", "-c", f"echo $$ >> {runs}")
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from test_local_kills import PROGRAMS, LocalBackend, request_for
        backend = LocalBackend(Path({str(tmp_path / "root")!r}), programs=PROGRAMS)
        print("ready", flush=True)
        sys.stdin.readline()
        print(backend.submit(request_for(backend, *{command!r})).to_dict())
    """)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert {racer.stdout.readline() for racer in racers} == {"ready\n"}

    answers = {racer.communicate("go\n", timeout=60)[0] for racer in racers}

    assert len(answers) == 1
    [handle] = backend.attempts()
    assert [n.reason for n in over(backend, handle).nodes] == ["succeeded"]
    assert len(runs.read_text().split()) == 1


def test_a_secret_reaches_the_command_and_nothing_else(backend, tmp_path):
    """The command's environment has its value; no file and no environment of the sidecar has it."""
    canary = "canary-71b3"
    seen = tmp_path / "seen"
    command = ("sh", "-c", f'printf %s "$API_KEY" | sha256sum > {seen}')
    handle = backend.submit(request_for(backend, *command, secret_env={"API_KEY": canary}))

    over(backend, handle)

    assert seen.read_text().split()[0] == hashlib.sha256(canary.encode()).hexdigest()
    folder = Path(handle.details["folder"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
    sidecar = json.loads((folder / "n0" / "spool" / "env.json").read_text())
    assert "API_KEY" not in sidecar
