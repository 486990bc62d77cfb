"""A run owned from a shell, with real processes: every class of failure and what follows it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import check_store, open_store

pytestmark = pytest.mark.timeout(180)

TRAIN = """
import os, sys, time
from envscaler_agent import Session
total, failing_at, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
out = os.environ["ENVSCALER_OUTPUT_MODEL"]
with Session(total_steps=total, epochs=total // 10) as session:
    path = session.restore()
    step = int(open(os.path.join(path, "step")).read()) if path else 0
    print("from step", step, flush=True)
    while step < total:
        step += 1
        time.sleep(0.05)  # the stage's own work
        session.step(samples=4, loss=1.0 / step)
        def save(folder):
            with open(os.path.join(folder, "step"), "w") as file:
                file.write(str(step))
        session.checkpoint(save, epoch_end=step // 10 if step % 10 == 0 else None)
        if step == failing_at and not path:
            if mode == "exit": print("ValueError: bad column"); sys.exit(3)
            if mode == "oom": block = bytearray(1 << 30); block[::4096] = b"x" * len(block[::4096])
            if mode == "stall": time.sleep(3600)
    os.makedirs(out, exist_ok=True)
    open(os.path.join(out, "model"), "w").write(str(step))
"""
SPEC = """\
version: v1
name: tiny
resources: {{requests: {{cpu: 1, memory: 64Mi}}, limits: {{memory: {memory}}}}}
workdir: code
entrypoint: [python, train.py, "{total}", "{failing_at}", {mode}]
outputs: {{model: /output/model}}
checkpoint: {{every: 10 steps}}
stall: {{factor: 2, min: 3s}}
failure: {{orphan_after: 2m, oom_memory_cap: {cap}}}
env: [{{name: API_TOKEN, value_from: "env:CANARY"}}]
"""
CANARY = "c4n4ry-0f-a-s3cret"


class Shell:
    """``envscaler`` in a folder of its own, with a store of its own."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet."""
        self.folder = folder
        (folder / "code").mkdir()
        (folder / "code" / "train.py").write_text(TRAIN)
        self.store = open_store(f"file://{folder}/store")
        check_store(self.store)
        self.env = {
            **os.environ,
            "ENVSCALER_STORE_URL": f"file://{folder}/store",
            "ENVSCALER_LOCAL_ROOT": str(folder / "attempts"),
            "CANARY": CANARY,
        }

    def spec(
        self, *, total=30, failing_at=0, mode="none", memory="512Mi", cap="1Gi", name="tiny.yaml"
    ) -> str:
        """Write a spec; returns its path."""
        text = SPEC.format(total=total, failing_at=failing_at, mode=mode, memory=memory, cap=cap)
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def start(self, *arguments: str, stderr=subprocess.STDOUT) -> subprocess.Popen[str]:
        """Start a command."""
        command = [sys.executable, "-m", "envscaler_airflow.cli", *arguments]
        return subprocess.Popen(
            command,
            env=self.env,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=150)
        return process.returncode, output

    def prefix(self, name: str = "one") -> str:
        """Folder of the run."""
        found = list((self.folder / "store").glob(f"*/shell/{name}/*/*"))
        return str(found[0].relative_to(self.folder / "store")) if found else ""

    def state(self, name: str = "one"):
        """State folded from the run's events."""
        return Run(self.store, self.prefix(name)).events.load()

    def await_step(self, step: int, *, attempt: int = 1, name: str = "one") -> None:
        """Wait until the attempt has reported *step*."""
        for _ in range(600):
            prefix = self.prefix(name)
            text = self.store.read(f"{prefix}/status/g1-a{attempt}-n0-c1.json") if prefix else None
            if text and (json.loads(text)["progress"].get("step") or 0) >= step:
                return
            time.sleep(0.1)
        raise AssertionError(f"step {step} was not reached")

    def await_checkpoint(self, *, name: str = "one") -> None:
        """Wait until a checkpoint is complete."""
        for _ in range(600):
            prefix = self.prefix(name)
            if prefix and list((self.folder / "store" / prefix).glob("checkpoints/*/manifest-c1.json")):
                return
            time.sleep(0.1)
        raise AssertionError("no checkpoint was completed")

    def stage_processes(self) -> list[psutil.Process]:
        """Every live process of every attempt."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder / "attempts") in " ".join(process.cmdline()):
                    mine.append(process)
        return mine

    def kill_node(self, name: str = "one") -> None:
        """Remove the machine: SIGKILL to everything on it at once."""
        for process in self.stage_processes():
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in self.stage_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def shell(tmp_path):
    """A shell whose attempts are gone at the end."""
    made = Shell(tmp_path)
    yield made
    made.kill_node()


def test_a_run_succeeds_and_leaves_no_process_and_no_secret(shell):
    """The output is in the store, the log was shown, and no file contains the canary."""
    code, output = shell.run("run", "-f", shell.spec(), "--name", "one")

    assert code == 0, output
    assert "from step 0" in output
    assert (shell.folder / "store" / shell.prefix() / "outputs/g1-a1-c1/model/model").read_text() == "30"
    assert shell.stage_processes() == []
    hits = [
        path for path in shell.folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert hits == []


def test_a_user_error_fails_the_second_time_at_the_same_step(shell):
    """Exit code and last lines are in the message; the second attempt resumed from the checkpoint."""
    code, output = shell.run("run", "-f", shell.spec(failing_at=25, mode="exit", total=30), "--name", "one")

    assert code == 0, output  # the second attempt restored beyond the failing branch and succeeded
    outcomes = [attempt.outcome for attempt in shell.state().attempts]
    assert outcomes == ["failed", "succeeded"]
    assert shell.state().attempts[1].end.start_step == 20


def test_a_user_error_before_the_first_step_fails_at_once(shell):
    """A command that fails at its start is not retried; its exit code is the shell's (F6)."""
    spec = Path(shell.spec())
    spec.write_text(spec.read_text().replace("train.py", "fails.py"))
    (shell.folder / "code" / "fails.py").write_text("raise SystemExit(7)\n")

    code, output = shell.run("run", "-f", str(spec), "--name", "one")

    assert code == 7
    assert "before its first step" in output
    assert len(shell.state().attempts) == 1


def test_a_command_that_does_not_exist_is_told_as_such(shell):
    """Exit code 127, one attempt."""
    spec = Path(shell.spec())
    spec.write_text(spec.read_text().replace("[python, train.py", "[no-such-program, train.py"))

    code, output = shell.run("run", "-f", str(spec), "--name", "one")

    assert code == 127
    assert "not-found" in output
    assert [attempt.outcome for attempt in shell.state().attempts] == ["not-found"]


def test_more_than_the_machine_has_is_refused_before_anything_starts(shell):
    """The message names what is missing, and the run never looks active (F5)."""
    spec = Path(shell.spec())
    spec.write_text(spec.read_text().replace("cpu: 1,", "cpu: 4096,"))

    code, output = shell.run("run", "-f", str(spec), "--name", "one")

    assert code == 2
    assert "4096" in output
    assert shell.state().attempts == ()
    assert json.loads(shell.run("status", "--output", "json")[1])[0]["status"] == "failed to start"


def test_out_of_memory_gets_more_memory(shell):
    """256 MiB are exceeded at step 15; the next attempt has 384 MiB and resumes from step 10 (feature C4)."""
    spec = shell.spec(failing_at=15, mode="oom", memory="256Mi", total=20)

    code, output = shell.run("run", "-f", spec, "--name", "one")

    assert code == 0, output
    first, second = shell.state().attempts
    assert first.outcome == "out-of-memory"
    assert second.memory_bytes == 384 * 2**20
    assert second.end.start_step == 10


def test_a_stall_is_ended_and_started_again(shell):
    """No step for many times the usual duration: stopped, then resumed from the checkpoint."""
    code, output = shell.run("run", "-f", shell.spec(failing_at=15, mode="stall", total=20), "--name", "one")

    assert code == 0, output
    assert [attempt.outcome for attempt in shell.state().attempts] == ["stalled", "succeeded"]


def test_a_lost_machine_resumes_from_the_last_good_checkpoint(shell):
    """SIGKILL to the whole node, as with a spot loss: no step before the checkpoint is lost."""
    owner = shell.start("run", "-f", shell.spec(total=160), "--name", "one")
    shell.await_checkpoint()
    shell.kill_node()
    output, _ = owner.communicate(timeout=150)

    first, second = shell.state().attempts
    assert owner.returncode == 0, output
    assert first.outcome == "lost"
    assert second.end.start_step >= 10
    assert shell.stage_processes() == []


def test_a_killed_owner_is_followed_by_one_that_adopts(shell):
    """SIGKILL to the shell: the stage keeps training, the next owner adopts the same attempt."""
    spec = shell.spec(total=100)
    owner = shell.start("run", "-f", spec, "--name", "one")
    shell.await_step(5)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()

    code, output = shell.run("run", "-f", spec, "--name", "one")

    assert code == 0, output
    assert [attempt.outcome for attempt in shell.state().attempts] == ["succeeded"]


def test_a_cancelled_run_saves_and_stops_and_is_taken_up_again(shell):
    """`cancel`, then the same name again: it resumes from the checkpoint of the stop."""
    spec = shell.spec(total=300)
    owner = shell.start("run", "-f", spec, "--name", "one")
    shell.await_step(5)
    shell.run("cancel", "one")
    stopped, _ = owner.communicate(timeout=60)
    after_stop = shell.stage_processes()

    code, output = shell.run("run", "-f", spec, "--name", "one")

    assert owner.returncode == 87
    assert "was stopped: cancelled from a shell" in stopped
    assert after_stop == []
    assert code == 0, output
    second = shell.state().attempts[1]
    assert second.end.start_step >= 5


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_saves_and_stops_the_training(shell, name):
    """TERM, HUP and INT alike: nothing keeps running, the last step is saved, the exit code differs (F5)."""
    owner = shell.start("run", "-f", shell.spec(total=3000), "--name", "one")
    shell.await_step(5)

    owner.send_signal(getattr(signal, name))
    output, _ = owner.communicate(timeout=60)

    assert owner.returncode == 128 + getattr(signal, name)
    assert f"{name}: asked the training to save and stop" in output
    assert shell.state().status == "stopped"
    assert shell.state().attempts[0].checkpoint_step >= 5
    assert shell.stage_processes() == []


def test_a_run_whose_owner_was_killed_is_orphaned_and_cancel_stops_it(shell):
    """`status` names it, `cancel` reports that no owner watches, saves, stops and ends (F5)."""
    owner = shell.start("run", "-f", shell.spec(total=3000), "--name", "one")
    shell.await_step(5)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    (listed,) = json.loads(shell.run("status", "--output", "json")[1])

    code, output = shell.run("cancel", "--wait", "one")

    assert (listed["status"], listed["attempts"]) == ("orphaned", 1)
    assert listed["usd"] > 0
    assert listed["owner"].endswith(f":{owner.pid}")
    assert code == 0
    assert "no owner watches it" in output
    assert "from step 0" not in output  # its log is not requested
    assert shell.state().status == "stopped"
    assert shell.state().attempts[0].checkpoint_step >= 5
    assert shell.stage_processes() == []


def test_a_pipe_that_is_closed_does_not_end_the_owner(shell, tmp_path):
    """`envscaler run | head -1`: the run goes on, its events still come, its code is its own (F5)."""
    with (tmp_path / "said").open("w+") as said:
        owner = shell.start("run", "-f", shell.spec(total=30), "--name", "one", stderr=said)
        owner.stdout.readline()
        owner.stdout.close()

        assert owner.wait(timeout=150) == 0
        said.seek(0)
        assert said.read().splitlines()[-1] == "-- the stage succeeded"
    assert shell.state().status == "succeeded"


def test_a_fresh_run_begins_from_a_named_checkpoint_of_another(shell):
    """`--restore-from` a checkpoint's URI; a torn one is refused before training."""
    shell.run("run", "-f", shell.spec(total=30), "--name", "one")
    checkpoints = sorted((shell.folder / "store" / shell.prefix() / "checkpoints").iterdir())
    uri = f"file://{checkpoints[-1]}"

    code, output = shell.run(
        "run", "-f", shell.spec(total=40, name="b.yaml"), "--name", "two", "--restore-from", uri
    )
    (checkpoints[-1] / "n0-c1/step").write_text("9999")
    torn_code, torn = shell.run(
        "run", "-f", shell.spec(total=40, name="c.yaml"), "--name", "three", "--restore-from", uri
    )

    assert code == 0, output
    assert "from step 30" in output
    assert torn_code == 88  # a checkpoint that cannot be restored, as reported by the wrapper
    assert "step has 4 bytes, the manifest says 2" in torn


ELSEWHERE = """
import json, sys
from envscaler_airflow.backends import backend_type
from envscaler_airflow.run import Handle
from envscaler_airflow.owner.stage import Watching
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.store.run_store import open_store
from envscaler_airflow.store.run import Run
url, prefix, root, handle, number = sys.argv[1:]
handle = Handle.from_dict(json.loads(handle))
backend = backend_type("local").create({"root": root}, None)
watching = Watching(int(number), 1, attempt=1, handle=handle)
wake = AttemptWatcher(run=Run(open_store(url), prefix), backend=backend, watching=watching).poll()
states = [node.state for node in backend.observe(handle).nodes]
print(json.dumps([states, wake.kind if wake else None]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_a_trigger_in_another_pid_namespace_tells_no_loss(shell):
    """What cannot be seen from there is unknown; the node's own end is trusted."""
    owner = shell.start("run", "-f", shell.spec(total=100), "--name", "one")
    shell.await_step(5)
    state = shell.state()
    elsewhere = [
        *("unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ELSEWHERE),
        *(f"file://{shell.folder}/store", shell.prefix(), str(shell.folder / "attempts")),
        *(json.dumps(state.live.handle.to_dict()), str(state.number)),
    ]

    def look():
        return json.loads(subprocess.run(elsewhere, capture_output=True, check=True, timeout=60).stdout)

    while_it_runs = look()
    os.killpg(owner.pid, signal.SIGKILL)  # so that no process records the end
    owner.communicate()
    for _ in range(600):
        if json.loads(shell.store.read(f"{shell.prefix()}/status/g1-a1-n0-c1.json"))["phase"] == "ended":
            break
        time.sleep(0.1)
    after_its_end = look()

    assert while_it_runs == [["unknown"], None]
    assert after_its_end == [["ended"], "status"]  # its last lines are beside it
    assert [attempt.outcome for attempt in shell.state().attempts] == [""]
    code, output = shell.run("run", "-f", shell.spec(total=100), "--name", "one")
    assert code == 0, output
    assert [attempt.outcome for attempt in shell.state().attempts] == ["succeeded"]
