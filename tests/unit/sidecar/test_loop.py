"""The rounds: what a node reports, when, and that the end comes last."""

import json
import os
import shutil

import pytest

from envscaler_agent.protocol import Status, status_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.sidecar.loop import WRAPPER_S, Sidecar
from envscaler_airflow.sidecar.spool_state import Layout, Memory, Spool
from envscaler_airflow.store.checkpoints import complete_checkpoints


@pytest.fixture
def ready(make_bench, store, tmp_path):
    """Prepare a node that is ready for setup, with one output."""

    def make(**options):
        bench = make_bench(layout={"outputs": {"model": f"{tmp_path}/model"}}, **options)
        bench.owner_asks()
        return bench

    return make


def rounds(bench, sidecar, count=1):
    """Run every thread's round *count* times, half a second each; return True when it is done."""
    for _ in range(count):
        bench.clock.now += 0.5
        sidecar.heavy.step()
        sidecar.snapshot()
        if sidecar.step():
            return True
    return False


def test_a_whole_life(ready, store, tmp_path):
    """Set up, run, checkpoint, succeed; the end follows the last upload, and ``done`` follows the end."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    sidecar.step()
    assert bench.status().phase == "setup"

    rounds(bench, sidecar)
    bench.wrapper_says(progress={"step": 1})
    rounds(bench, sidecar)
    assert (bench.status().phase, bench.status().start_step, bench.state.phase) == ("running", 0, "running")

    bench.session_saves("g1-step-00000010-a2", step=10)
    rounds(bench, sidecar)
    assert (bench.status().last_checkpoint, bench.status().checkpoints) == ("g1-step-00000010-a2", 1)

    (tmp_path / "model").write_text("W")
    (bench.spool.root / "logs/000001.log").write_text("bye")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"}, progress={"step": 20})
    store.puts.clear()
    assert rounds(bench, sidecar, 5)

    status = bench.status()
    assert (status.phase, status.ended.reason, status.progress.step) == ("ended", "succeeded", 20)
    assert status.outputs == {"model": store.uri("outputs/g1-a2-c1/model")}
    assert store.puts[-1] == status_name(1, 2, 0)
    assert bench.state.phase == "done"


def test_the_end_is_not_said_before_everything_is_up(ready, store, tmp_path):
    """The store accepts only the status: the node is uploading, not ended."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "model").write_text("W")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    real = store._store.put_file
    store._store.put_file = lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error"))

    assert not rounds(bench, sidecar, 20)
    assert (bench.status().phase, bench.status().ended, bench.status().outputs) == ("uploading", None, {})
    assert "output model waits" in bench.status().message

    store._store.put_file = real
    assert rounds(bench, sidecar, 120)
    assert bench.status().ended.reason == "succeeded"


def test_the_last_output_of_the_command_goes_up_before_the_end(ready, store, tmp_path):
    """Only the logs cannot be written: a reader of the end wants the last lines too."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "model").write_text("W")
    (bench.spool.root / "logs/000001.log").write_text("bye")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    real = store._store.put_file

    def no_logs(name, path):
        if name.startswith("logs/"):
            raise OSError(5, "I/O error")
        real(name, path)

    store._store.put_file = no_logs
    assert not rounds(bench, sidecar, 20)
    assert (bench.state.is_drained, bench.status().ended) == (True, None)

    store._store.put_file = real
    assert rounds(bench, sidecar, 130)
    assert store.children("logs") == ["g1-a2-n0-c1-000001.log"]


def test_a_snapshot_that_comes_at_the_last_moment_goes_up(ready, store):
    """The uploads were complete, then the other thread finished the last snapshot."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    real = sidecar.heavy._checkpoints.step

    def step():
        is_through = real()
        if not bench.state.is_final_snapshot_done:
            bench.session_saves("g1-step-00000009-a2", step=9)
            bench.context.memory.update(is_final_snapshot_done=True)
        return is_through

    sidecar.heavy._checkpoints.step = step
    bench.wrapper_says(ended={"exit_code": 1, "reason": "failed"})

    assert rounds(bench, sidecar, 5)

    assert complete_checkpoints(store, 1) == ("g1-step-00000009-a2",)


def test_done_is_not_said_before_the_end_was(ready, store, tmp_path):
    """A reader of ``done`` may remove the machine: the last status must already be in the store."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "model").write_text("W")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    sidecar.snapshot()
    sidecar.heavy.step()
    assert bench.state.is_drained
    store.down = True

    assert not rounds(bench, sidecar, 20)
    assert bench.state.phase == "draining"

    store.down = False
    assert rounds(bench, sidecar, 130)
    assert (bench.status().phase, bench.state.phase) == ("ended", "done")


def test_a_missing_output_turns_success_into_failure(ready):
    """Exit code 0, no output: the status has the reason and the path."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded", "last_lines": ["ok"]})

    assert rounds(bench, sidecar, 5)

    ended = bench.status().ended
    assert (ended.reason, ended.exit_code, ended.last_lines) == ("failed", 0, ("ok",))
    assert ended.detail.startswith("output 'model': ")
    assert bench.status().outputs == {}


@pytest.mark.parametrize("reason", ["failed", "drained", "killed"])
def test_outputs_of_a_command_that_did_not_succeed_stay_here(ready, store, tmp_path, reason):
    """A half-trained model is not an output."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "model").write_text("half")
    bench.wrapper_says(ended={"exit_code": 1, "reason": reason})

    assert rounds(bench, sidecar, 5)

    assert store.children("outputs") == []
    assert bench.status().ended.reason == reason


def test_the_last_checkpoint_goes_up_before_the_end(ready, store):
    """Saved while draining, seconds before the command ended."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    bench.session_saves("g1-step-00000010-a2", step=10)
    bench.wrapper_says(ended={"exit_code": 85, "reason": "drained"})

    assert rounds(bench, sidecar, 5)

    assert complete_checkpoints(store, 1) == ("g1-step-00000010-a2",)
    assert bench.status().last_checkpoint_step == 10


def test_the_last_snapshot_is_taken_and_goes_up_before_the_end(make_bench, store, tmp_path):
    """Code that does not use the library wrote its model and exited."""
    bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")})
    bench.owner_asks()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "ck/model.bin").write_text("W")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"}, progress={"step": 9})

    assert rounds(bench, sidecar, 5)

    assert complete_checkpoints(store, 1) == ("g1-step-00000009-a2",)
    assert bench.status().last_checkpoint == "g1-step-00000009-a2"


def test_a_failed_set_up_is_said_with_its_reason(make_bench):
    """The wrapper reads it and ends; the status carries the wrapper's report."""
    bench = make_bench()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar, 2)
    assert bench.status().ended is None
    assert bench.status().message.startswith("set-up failed: ")
    bench.wrapper_says(ended={"exit_code": 88, "reason": "setup-failed", "detail": "g1-a2.json is absent"})

    assert rounds(bench, sidecar, 3)

    assert bench.status().ended.detail == "g1-a2.json is absent"


def test_a_failed_set_up_that_no_wrapper_takes_up_is_ended_all_the_same(make_bench):
    """Two minutes later the sidecar reports the end instead of the wrapper."""
    bench = make_bench()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar, 2)
    bench.clock.now += WRAPPER_S

    assert rounds(bench, sidecar, 3)

    assert bench.status().ended.reason == "setup-failed"
    assert "control/g1-a2.json is absent" in bench.status().ended.detail


def test_an_attempt_that_was_asked_to_go_before_it_began_has_not_failed(ready):
    """Its image may still be loading: no wrapper reads that it should stop."""
    bench = ready()
    bench.heard(sequence=7, action="drain", reason="orphaned: the lease stood still")
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar, 2)
    bench.clock.now += WRAPPER_S

    assert rounds(bench, sidecar, 3)

    assert bench.status().ended.reason == "stopped"


def test_a_status_every_15_seconds_and_on_change(ready, store):
    """Steps alone wait for the 15 s; a change of epoch, health or phase does not."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    bench.wrapper_says(progress={"step": 1, "epoch": 0})
    rounds(bench, sidecar, 3)
    first = bench.status().sequence

    bench.wrapper_says(progress={"step": 2, "epoch": 0})
    rounds(bench, sidecar, 2)
    assert bench.status().sequence == first
    rounds(bench, sidecar, 30)
    assert (bench.status().sequence, bench.status().progress.step) == (first + 1, 2)

    for count, fields in enumerate(
        [{"progress": {"step": 3, "epoch": 1}}, {"health": "stalled"}, {"phase": "draining"}]
    ):
        bench.wrapper_says(**fields)
        rounds(bench, sidecar)
        assert bench.status().sequence == first + 2 + count


def test_the_sequence_grows_across_restarts(ready, store):
    """Also on another machine, where only the store has the last sequence."""
    bench = ready()
    rounds(bench, Sidecar(bench.context), 3)
    first = bench.status().sequence

    rounds(bench, Sidecar(bench.restarted()))
    assert bench.status().sequence == first + 1

    bench.spool.sidecar.unlink()
    rounds(bench, Sidecar(bench.restarted()))
    assert bench.status().sequence == first + 2


def test_an_outage_of_the_store_stops_nothing(ready, store):
    """An hour without a store: everything waits on the disk and is uploaded afterwards."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    bench.wrapper_says(progress={"step": 1})
    store.down = True
    for number in (1, 2):
        (bench.spool.root / f"logs/{number:06d}.log").write_text("x")
    bench.session_saves("g1-step-00000010-a2", step=10)
    for _ in range(60):
        bench.clock.now += 60
        assert not rounds(bench, sidecar)

    store.down = False
    bench.clock.now += 60
    rounds(bench, sidecar, 2)

    assert store.children("logs") == ["g1-a2-n0-c1-000001.log", "g1-a2-n0-c1-000002.log"]
    assert bench.status().last_checkpoint == "g1-step-00000010-a2"
    assert bench.status().message == ""


@pytest.mark.parametrize("left", ["nothing", "a file"])
def test_an_spool_that_the_training_removed_holds_no_machine(ready, store, tmp_path, left):
    """Its files are lost; the end is still received, outputs are uploaded, and the sidecar finishes."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    shutil.rmtree(bench.spool.root)
    if left == "a file":
        bench.spool.root.mkdir()
        for name in ("logs", "metrics", "checkpoints"):
            (bench.spool.root / name).touch()
    rounds(bench, sidecar, 3)
    (tmp_path / "model").write_text("W")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})

    assert rounds(bench, sidecar, 5)

    assert bench.status().outputs == {"model": store.uri("outputs/g1-a2-c1/model")}


def test_nonsense_from_the_wrapper_is_said_and_survived(ready):
    """The last valid status is kept."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    bench.wrapper_says(progress={"step": 1})
    rounds(bench, sidecar, 2)

    bench.spool.wrapper.write_bytes(b'{"schema":"2.0","phase":"dancing"}')
    rounds(bench, sidecar, 2)

    assert bench.status().progress.step == 1
    assert "phase must be one of" in bench.status().message


def test_secrets_of_the_wrappers_folder_are_not_followed(ready, tmp_path):
    """The sidecar does not read a wrapper.json that is a link to elsewhere."""
    bench = ready()
    (tmp_path / "other.json").write_bytes(Status(message="token").to_json())
    bench.spool.wrapper.symlink_to(tmp_path / "other.json")

    rounds(bench, Sidecar(bench.context), 2)

    assert "token" not in bench.status().message


def test_a_pipe_in_place_of_a_file_blocks_nobody(ready):
    """The training's side can put anything there."""
    bench = ready()
    os.mkfifo(bench.spool.wrapper)

    rounds(bench, Sidecar(bench.context), 2)

    assert "wrapper.json is not a file" in bench.status().message


def test_what_is_done_stays_done(ready, tmp_path):
    """A sidecar that is restarted after its end writes nothing and exits at once."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    rounds(bench, sidecar)
    (tmp_path / "model").write_text("W")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    rounds(bench, sidecar, 5)
    before = bench.status()

    assert Sidecar(bench.restarted()).run()
    assert bench.status() == before


def test_a_full_disk_under_the_spool_loses_no_state(bench, monkeypatch):
    """sidecar.json cannot be replaced: the old file stays complete, with the old state."""
    bench.context.memory.update(checkpoints=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("envscaler_airflow.store.root.Root.landing", full)
        with pytest.raises(OSError, match="No space"):
            bench.context.memory.update(checkpoints=2)

    assert bench.state.checkpoints == 1
    assert json.loads(bench.spool.sidecar.read_bytes())["checkpoints"] == 1
    assert not [path for path in bench.spool.root.iterdir() if path.name.startswith(".")]


def test_a_node_with_a_full_disk_still_speaks(ready, monkeypatch):
    """Its status goes to the store, with the reason and a growing sequence."""
    bench = ready()
    sidecar = Sidecar(bench.context)
    bench.wrapper_says(progress={"step": 1})
    rounds(bench, sidecar, 2)
    first = bench.status().sequence

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("envscaler_airflow.store.root.Root.landing", full)
    for _ in range(3):
        bench.clock.now += 20
        sidecar.step()

    assert bench.status().sequence > first + 1
    assert "No space left on device" in bench.status().message


def test_a_reader_never_sees_half_a_file(bench, monkeypatch):
    """A file is replaced in one step or not at all."""
    bench.spool.write(bench.spool.control, b"old")

    def fail(*_, **__):
        raise OSError(5, "I/O error")

    monkeypatch.setattr("os.replace", fail)

    with pytest.raises(OSError, match="I/O error"):
        bench.spool.write(bench.spool.control, b"new")

    assert bench.spool.control.read_bytes() == b"old"


def test_state_of_a_newer_sidecar_is_read(tmp_path):
    """Unknown fields are ignored, known ones kept."""
    spool = Spool(tmp_path)
    spool.write_json(spool.sidecar, {"sequence": 7, "rejected": ["a"], "mood": "new"})

    state = Memory(spool).state

    assert (state.sequence, state.rejected) == (7, ("a",))


def test_what_is_over_is_said_no_more(ready):
    """A disk that was full for a moment is not reported for the rest of the training."""
    bench = ready()
    sidecar, messages = Sidecar(bench.context), []
    steps = iter([OSError("No space left on device"), None])

    def step():
        error = next(steps, None)
        messages.append(bench.context.messages.text())
        if error is not None:
            raise error
        if len(messages) == 3:
            bench.context.ending.set()

    bench.context.ending.wait = lambda _seconds: False
    sidecar._rounds(step, "heavy")

    assert messages == ["", "OSError: No space left on device", ""]


def test_a_name_that_is_no_utf8_costs_no_memory(tmp_path):
    """It is in a message; a restarted sidecar still has all its state."""
    spool = Spool(tmp_path)
    Memory(spool).update(rejected=("g1-step-00000100-a1: x\udcff is missing",), name_step=700)

    again = Memory(spool).state

    assert (again.rejected, again.name_step) == (("g1-step-00000100-a1: x? is missing",), 700)


@pytest.mark.parametrize("body", [b"{", b'{"mounts": [{"name": 1}]}', b"[]"])
def test_a_layout_that_is_none_is_an_error(tmp_path, body):
    """It is a bug of the backend, reported with the path."""
    (tmp_path / "layout.json").write_bytes(body)

    with pytest.raises(ProtocolError, match=r"layout\.json"):
        Layout.read(tmp_path / "layout.json")
