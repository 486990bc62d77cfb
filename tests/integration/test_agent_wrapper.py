"""The wrapper with real commands: each test starts its own, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fakes.wrapped import TRAIN, Node

from envscaler_agent import process
from envscaler_agent import spool as ex
from envscaler_agent.ending import (
    EXIT_DRAINED,
    EXIT_NOT_FOUND,
    EXIT_ORPHANED,
    EXIT_SETUP_FAILED,
    EXIT_STOPPED,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")


@pytest.fixture
def node(tmp_path):
    """A node; processes that still run afterwards are killed."""
    node = Node(tmp_path / "spool")
    yield node
    if node.process is not None:
        if node.process.poll() is None:
            node.kill()
        node.process.stdout.close()
        node.process.stderr.close()


def python(code):
    """A command that runs *code*."""
    return sys.executable, "-c", textwrap.dedent(code)


# -- ends ------------------------------------------------------------------------------------------


def test_a_command_that_succeeds(node):
    """Its output is forwarded and kept, errors too; times and the machine are recorded."""
    code, out, _ = node.start("sh", "-c", "echo one; echo two >&2; sleep 0.7").end()

    status = node.status()
    assert (code, out) == (0, "one\ntwo\n")
    assert (node.spool.logs / "000001.log").read_bytes() == b"one\ntwo\n"
    assert (status.phase, status.ended.reason, status.ended.last_lines) == (
        "ended",
        "succeeded",
        ("one", "two"),
    )
    assert 0 <= status.setup_s < 5
    assert any("memory_rss_bytes" in line for line in node.metrics())


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        (("sh", "-c", "exit 3"), 3, "failed"),
        (("sh", "-c", "kill -KILL $$"), 137, "killed"),
        (("sh", "-c", "kill -SEGV $$"), 139, "failed"),
        (("no-such-command",), EXIT_NOT_FOUND, "not-found"),
        (("sh", "-c", "no-such-command"), EXIT_NOT_FOUND, "not-found"),
        (("/etc/passwd",), 126, "failed"),
        (python("open('/dev/full', 'w').write('x' * 10**6)"), 1, "disk-full"),
    ],
)
def test_ends_are_told_apart(node, command, code, reason):
    """By real processes."""
    got, _, _ = node.start(*command).end()

    assert (got, node.status().ended.reason) == (code, reason)


def test_memory_that_is_not_to_be_had(node):
    """An rlimit instead of a cgroup: the command itself fails."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
        bytearray(1 << 30)
    """

    got, _, _ = node.start(*python(code)).end()

    assert (got, node.status().ended.reason) == (1, "out-of-memory")


def test_a_setup_that_failed(node):
    """The wrapper reports the sidecar's reason, and starts nothing."""
    code, _, err = node.start("touch", "/nonexistent/x", setup={"failed": "input data: not found"}).end()

    assert code == EXIT_SETUP_FAILED
    assert "input data: not found" in err
    assert node.status().ended.detail == "input data: not found"


def test_a_setup_that_was_not_to_be(node):
    """The sidecar was asked to stop, or lost its store: the stage has not failed."""
    for reason, expected in (("stopped", EXIT_STOPPED), ("orphaned", EXIT_ORPHANED)):
        code, _, _ = node.start("echo", "no", setup={"failed": "asked to drain", "reason": reason}).end()
        assert (code, node.status().ended.reason) == (expected, reason)


def test_a_working_directory_that_is_not_there(node, tmp_path):
    """The error names it, and does not call it a command that is not found."""
    code, _, err = node.start("true", setup={"cwd": str(tmp_path / "gone")}).end()

    assert code == EXIT_SETUP_FAILED
    assert f"{tmp_path}/gone does not exist" in err


def test_the_command_gets_its_place(node, tmp_path):
    """The working directory, environment and checkpoint that the sidecar prepared."""
    setup = {"cwd": str(tmp_path), "env": {"A": "b"}, "restore": {"path": "/r", "step": 1}}

    _, out, _ = node.start("sh", "-c", "pwd; echo $A $ENVSCALER_RESTORE $ENVSCALER_SPOOL", setup=setup).end()

    assert out.split() == [str(tmp_path), "b", "/r", str(node.spool.root)]


def test_no_start_in_time(node):
    """The sidecar never comes."""
    node.run("--wait-start", "0.3", "--", "true")

    code, _, err = node.end()

    assert code == EXIT_SETUP_FAILED
    assert "no start.json within 0.3 s" in err


def test_a_stop_while_it_waits_for_the_start(node):
    """Nothing is started any more."""
    node.spool.root.mkdir()
    node.run("--", "echo", "started")
    node.ask("stop")

    code, out, _ = node.end()

    assert (code, out) == (EXIT_STOPPED, "")


def test_a_command_without_an_spool(tmp_path):
    """Any command can be wrapped; nothing is written."""
    environ = {name: value for name, value in os.environ.items() if name != "ENVSCALER_SPOOL"}
    done = subprocess.run(
        [sys.executable, "-m", "envscaler_agent", "run", "--", "sh", "-c", "echo hello; exit 5"],
        capture_output=True,
        cwd=tmp_path,
        env=environ,
        timeout=20,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (5, b"hello\n", b"")
    assert list(tmp_path.iterdir()) == []


# -- what is left behind ---------------------------------------------------------------------------


def test_a_background_process_does_not_outlive_the_command(node):
    """It keeps the pipe open; the wrapper does not wait for it, and ends it."""
    began = time.monotonic()

    code, out, _ = node.start("sh", "-c", "sleep 300 & echo $!").end()

    assert code == 0
    assert time.monotonic() - began < 10
    assert not Path(f"/proc/{out.strip()}").exists()


def test_processes_in_a_session_of_their_own_are_ended_too(node):
    """Like the workers of torchrun: a signal to the group does not reach them."""
    node.start("sh", "-c", "setsid sh -c 'sleep 300 & sleep 300' & echo started; wait")
    node.until(lambda: b"started" in node.log() and len(node.children()) >= 5)
    children = node.children()
    node.ask("stop", grace_s=5)

    code, _, _ = node.end()

    assert code == EXIT_STOPPED
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_orphans_become_no_zombies(node):
    """A command that leaves many children: all are reaped while it runs."""
    node.start("sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (true & true); done; echo done; sleep 300")
    node.until(lambda: b"done" in node.log())
    time.sleep(0.3)

    states = [process.stat_fields(pid)[:1] for pid in node.children()]

    assert [b"Z"] not in states
    node.ask("stop", grace_s=2)
    node.end()


# -- leaving and stopping --------------------------------------------------------------------------


def test_cooperating_code_leaves_at_the_end_of_an_epoch(node):
    """Saved at a multiple of 20 steps, the protocol's code, and the control acknowledged (feature C3)."""
    node.train().ask("drain", align="epoch", align_timeout_s=60, grace_s=20)

    code, _, _ = node.end()

    (name,) = node.saves()
    assert code == EXIT_DRAINED
    assert int(name.split("-")[2]) % 20 == 0
    assert (node.spool.checkpoints / name / "w").exists()
    status = node.status()
    assert (status.ended.reason, status.control_sequence) == ("drained", 1)
    assert status.progress.first_step_s < status.progress.elapsed_s


def test_a_training_that_leaves_in_a_pipeline_has_not_succeeded(node):
    """A shell ends with the code of ``cat``, which is 0: the work is unfinished nevertheless."""
    node.start("sh", "-c", '"$0" -c "$1" | cat', sys.executable, TRAIN.format(in_save=""))
    node.until(lambda: (node.report().progress.step or 0) > 5)
    node.ask("drain", align="step")

    assert node.end()[0] == EXIT_DRAINED
    assert (node.status().ended.reason, len(node.saves())) == ("drained", 1)


def test_a_run_that_nobody_owns_is_orphaned(node):
    """The sidecar's reason says it."""
    node.train().ask("drain", align="step", reason="orphaned: the lease stood still")

    assert node.end()[0] == EXIT_ORPHANED
    assert node.status().ended.reason == "orphaned"
    assert len(node.saves()) == 1


def test_sigterm_to_the_wrapper_lets_the_training_save(node):
    """For a deleted pod: the work is kept."""
    node.train()
    node.process.terminate()

    assert node.end()[0] == EXIT_STOPPED
    assert node.status().ended.reason == "stopped"
    assert len(node.saves()) == 1


def test_a_signal_after_a_leave_keeps_it_a_leave(node):
    """A graceful delete sends both."""
    node.train().ask("drain", align="epoch", align_timeout_s=60)
    node.until(lambda: node.status().control_sequence == 1)
    node.process.terminate()

    assert node.end()[0] == EXIT_DRAINED


def test_a_signal_after_the_end_does_not_change_the_exit_code():
    """A pod that is deleted as its command ends still reports how that ended."""
    script = (
        "import os, signal, sys\n"
        "from envscaler_agent.__main__ import main\n"
        "code = main(['run', '--no-sampler', '--', 'sh', '-c', 'exit 3'])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(code)\n"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 3


def test_code_that_does_not_cooperate_is_told_after_the_snapshot(node, tmp_path):
    """Not before the sidecar has copied the last save of the code."""
    node.start("sh", "-c", "echo up; exec sleep 300", checkpoint_path=str(tmp_path))
    node.until(lambda: b"up" in node.log())
    node.ask("drain", align="step", align_timeout_s=60, grace_s=5)
    node.until(lambda: node.status().phase == "draining")
    time.sleep(1.2)
    assert node.process.poll() is None

    ex.write_json(node.spool.snapshot, {"sequence": 1})

    assert node.end()[0] == EXIT_DRAINED
    assert node.status().ended.signal == signal.SIGTERM


def test_code_that_will_not_go_is_killed_within_its_grace(node):
    """All processes ignore SIGTERM."""
    node.start("sh", "-c", "trap '' TERM; echo up; sleep 300 & wait; sleep 300")
    node.until(lambda: b"up" in node.log())
    began = time.monotonic()
    node.ask("stop", grace_s=1.5)

    assert node.end()[0] == EXIT_STOPPED
    assert 1 < time.monotonic() - began < 8


def test_a_training_that_ends_by_itself_when_asked_has_succeeded(node):
    """Nothing is left to move."""
    node.start("sh", "-c", "echo up; sleep 1; exit 0", checkpoint_path="/tmp")
    node.until(lambda: b"up" in node.log())
    node.ask("drain", align_timeout_s=60)

    assert node.end()[0] == 0
    assert node.status().ended.reason == "succeeded"


def test_a_leave_whose_save_fails_is_reported(node):
    """A full disk: the owner gets the reason and the lines."""
    node.train(in_save="open('/dev/full', 'w').write('x' * 10**6)").ask("drain", align="step")

    code, _, _ = node.end()

    assert code == 1
    assert node.status().ended.reason == "disk-full"
    assert node.saves() == []


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_training_killed_in_a_save_keeps_the_one_before(node):
    """SIGKILL during the second save: the first is complete, the incomplete one is removed later."""
    node.train(in_save="session.steps >= 40 and time.sleep(300)", every={"steps": 20})
    node.until(lambda: node.report().saving and node.report().progress.step == 40)
    node.kill()

    assert node.saves() == ["g1-step-00000020-a1"]
    assert list(node.spool.checkpoints.glob(".saving-*")) != []

    setup = {"restore": {"path": str(node.spool.checkpoints / node.saves()[0])}}
    node.start(sys.executable, "-c", TRAIN.format(in_save=""), setup=setup)
    node.until(lambda: b"g1-step-00000020-a1 20" in node.log())
    node.until(lambda: (node.report().progress.step or 0) > 25)
    assert list(node.spool.checkpoints.glob(".saving-*")) == []


def test_a_wrapper_that_is_restarted_forgets_what_was_asked_of_the_one_before(node):
    """The stop and the session's end were of the previous life; the owner's control stays valid."""
    node.train()
    node.process.terminate()
    node.end()

    node.start("sh", "-c", "exit 85")

    assert node.end()[0] == 85
    assert node.status().ended.reason == "failed"
    assert not node.spool.request.exists()


def test_a_full_disk_during_a_save_does_not_stop_the_training(node):
    """It is reported, and the training continues."""
    node.train(
        in_save="session.steps > 20 and open('/dev/full', 'w').write('x' * 10**6)", every={"steps": 20}
    )

    node.until(lambda: "No space left on device" in node.status().message)
    step = node.report().progress.step
    node.until(lambda: node.report().progress.step > step)

    assert node.saves() == ["g1-step-00000020-a1"]


def test_two_ranks_leave_at_the_same_step(node):
    """A launcher with two workers that synchronise at every step, as for gradients."""
    worker = """
        import multiprocessing, os, sys
        def work(rank, barrier):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
            from envscaler_agent import Session
            with Session() as session:
                def save(folder):
                    (folder / f"shard-{rank}").write_text(str(session.steps))
                while True:
                    barrier.wait(timeout=60)
                    session.step(samples=8)
                    session.checkpoint(save)
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(2)
        ranks = [context.Process(target=work, args=(rank, barrier)) for rank in (0, 1)]
        [rank.start() for rank in ranks]
        [rank.join() for rank in ranks]
        sys.exit(1 if any(rank.exitcode for rank in ranks) else 0)
    """
    node.start(*python(worker), every={"steps": 50})
    node.until(node.saves)
    node.ask("drain", align="step", grace_s=20, align_timeout_s=20)

    assert node.end()[0] == EXIT_DRAINED  # although the launcher exits with 1
    for name in node.saves():
        step = str(int(name.split("-")[2]))
        folder = node.spool.checkpoints / name
        assert [(folder / f"shard-{rank}").read_text() for rank in (0, 1)] == [step, step]
    assert "g1-step-00000050-a1" in node.saves()


# -- what is watched and said ----------------------------------------------------------------------


def test_secrets_are_masked_everywhere(node):
    """In output, chunks, last lines and messages; split by writes, and over several lines."""
    code = """
        import os, sys, time
        key, pem = os.environ["API_KEY"], os.environ["PEM"]
        sys.stdout.write("key " + key[:7]); sys.stdout.flush(); time.sleep(0.2)
        print(key[7:])
        print(pem)
        print(repr(pem))
        sys.exit(f"failed with {key}")
    """
    secrets = {
        "API_KEY": "canary-0123456789",
        "PEM": "-----BEGIN-----\ncanaryline1\ncanaryline2\n-----END-----",
    }

    _, out, err = node.start(*python(code), secret_env=["API_KEY", "PEM"], env=secrets).end()

    files = [path.read_text() for path in node.spool.root.rglob("*") if path.is_file()]
    assert "key ***\n" in out
    assert [text for text in (out, err, *files) if "canary" in text] == []


def test_a_stall_is_seen_and_ends(node):
    """Half a second without a step is long when a step takes 20 ms."""
    code = """
        import sys, time
        for step in range(400):
            print("step", step)
            time.sleep(3 if step == 100 else 0.02)
    """
    node.start(*python(code), log_patterns={"step": r"step (\d+)"}, stall_factor=5, stall_min_s=1)

    node.until(lambda: node.status().health == "stalled")
    assert "no step for" in node.status().message
    node.until(lambda: node.status().health == "ok")


def test_progress_by_log_patterns(node):
    """Steps, loss and epochs of code without our library; a bad pattern is named."""
    code = "for i in range(5): print(f'epoch {i} step {i * 10} loss {1 / (i + 1)}')"
    patterns = {"step": r"step (\d+)", "loss": r"loss (\S+)", "epoch": r"epoch (\d+)", "accuracy": "("}

    node.start(*python(code), log_patterns=patterns).end()

    progress = node.status().progress
    assert (progress.step, progress.loss, progress.epoch, progress.accuracy) == (40, 0.2, 4, None)
    assert "log_patterns.accuracy" in node.status().message


def test_a_sampler_that_is_killed_is_replaced(node):
    """Samples continue, and so does the command."""
    node.start("sleep", "300")

    def sampler():
        return [pid for pid in node.children() if b"sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def samples():
        return len([line for line in node.metrics() if "memory_rss_bytes" in line])

    node.until(lambda: sampler() and samples())
    os.kill(sampler()[0], signal.SIGKILL)
    before = samples()

    node.until(lambda: samples() > before)
    node.ask("stop", grace_s=2)
    assert node.end()[0] == EXIT_STOPPED


def test_the_machine_is_measured(node):
    """A process that burns CPU: about its own clock's time, with its memory, not the sampler (feature C2)."""
    code = """
        import time
        memory, began = bytearray(b"x") * (100 << 20), time.monotonic()
        while time.monotonic() < began + 4:
            sum(range(1000))
        print(100 * time.process_time() / (time.monotonic() - began))
    """

    _, output, _ = node.start(*python(code)).end()

    had = float(output.split()[-1])  # percent of one core, which others use too
    samples = [line for line in node.metrics() if line.get("cpu_percent") is not None]
    assert 0.5 * had < max(line["cpu_percent"] for line in samples) < 150  # a busy machine varies
    assert max(line["memory_rss_bytes"] for line in samples) > 50 << 20
    assert samples[-1]["processes"] == 1
    assert node.status().cpu_seconds > 0.01 * had  # 4 s of it, without the last sample
    assert node.status().usage["memory_rss_bytes"] > 50 << 20


def test_a_slow_reader_of_our_output_stops_no_control(node):
    """The wrapper's stdout is not read; it still follows the owner, and the chunks have all output."""
    node.start("sh", "-c", "yes | head -c 3000000; sleep 300")
    node.until(lambda: len(node.log()) > 200_000)
    node.ask("stop", grace_s=2)
    deadline = time.monotonic() + 15
    while node.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)

    assert node.process.returncode == EXIT_STOPPED


def test_a_bar_on_one_line_tells_its_steps_while_it_runs(node):
    """No newline until the whole loop is over, and the last update is complete (C14)."""
    code = r"""
        import sys, time
        for step in range(1, 9):
            sys.stderr.write(f"\r{step}/8 [00:01, loss={1 / step:.4f}]"); sys.stderr.flush()
            time.sleep(0.1 if step != 4 else 2)
        """
    patterns = {"step": r"(\d+)/8 \[", "total_steps": r"\d+/(8) \[", "loss": r"loss=([0-9.]+)"}

    node.start(*python(code), log_patterns=patterns)
    node.until(lambda: node.status().progress.step == 4)
    node.end()

    progress = node.status().progress
    assert (progress.step, progress.total_steps, progress.loss) == (8, 8, 0.125)


def test_sigterm_to_command_and_wrapper_together_is_no_success(node):
    """The command exits 0 at step 23 of 60, before the wrapper's next check (C)."""
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("step 23 of 60", flush=True)
        while True: time.sleep(0.01)
        """
    patterns = {"step": r"step (\d+)", "total_steps": r"of (\d+)"}
    node.start(*python(code), log_patterns=patterns)
    node.until(lambda: node.status().progress.step == 23)
    command = next(pid for pid in node.children() if b"step 23" in Path(f"/proc/{pid}/cmdline").read_bytes())

    os.kill(command, signal.SIGTERM)
    os.kill(node.process.pid, signal.SIGTERM)

    got, _, _ = node.end()
    assert (got, node.status().ended.reason) == (EXIT_STOPPED, "stopped")


def test_exit_code_0_before_the_last_step(node):
    """A success with a warning, or a failure where the spec requires all steps (C)."""
    words = python("print('step 5 of 1000')")
    patterns = {"step": r"step (\d+)", "total_steps": r"of (\d+)"}

    code, _, _ = node.start(*words, log_patterns=patterns).end()
    assert (code, node.status().ended.reason) == (0, "succeeded")
    assert node.status().ended.detail.startswith("exit code 0 at step 5 of 1,000")

    node.start(*words, log_patterns=patterns, success="all-steps").end()
    assert node.status().ended.reason == "failed"


# -- two packages ----------------------------------------------------------------------------------


def install(folder, name, version):
    """Leave what pip leaves of a distribution."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_two_installed_packages_of_the_agent_are_named_in_the_log(node, tmp_path):
    """The first line names both with their versions; the command runs all the same."""
    install(tmp_path / "site", "envscaler-airflow", "0.2.0")
    install(tmp_path / "site", "envscaler-agent", "0.1.0")

    code, out, _ = node.start("echo", "one", env={"PYTHONPATH": str(tmp_path / "site")}).end()

    first, second = node.log().decode().splitlines()
    assert first.startswith(
        "[envscaler] envscaler-airflow 0.2.0 and envscaler-agent 0.1.0 are both installed"
    )
    assert "pip uninstall envscaler-agent" in first
    assert (code, second, out) == (0, "one", f"{first}\none\n")


def test_one_installed_package_of_the_agent_is_not_worth_a_line(node):
    """The environment of these tests has the provider alone."""
    code, out, _ = node.start("echo", "one").end()

    assert (code, out) == (0, "one\n")


def test_a_start_of_another_major_version_names_both(node):
    """The command is not started, and the status says why."""
    node.spool.root.mkdir(parents=True)
    node.spool.start.write_text('{"schema": "3.0", "session": {}}')

    code, out, err = node.run("--", "echo", "one").end()

    ended = node.status().ended
    assert (code, out, ended.reason) == (EXIT_SETUP_FAILED, "", "setup-failed")
    assert "start.json: schema '3.0', this side uses 2.0 (envscaler " in err
    assert "start.json: schema '3.0', this side uses 2.0 (envscaler " in ended.detail
