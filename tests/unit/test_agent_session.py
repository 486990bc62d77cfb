"""Unit tests of Session: an exchange in a temporary folder, a clock by hand."""

import json
import math
import os
import warnings
from pathlib import Path

import pytest

from envscaler_airflow.agent import exchange as ex
from envscaler_airflow.agent import ranks as rk
from envscaler_airflow.agent import session as module
from envscaler_airflow.agent.session import Session
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.protocol import EXIT_LEFT, EXIT_STOPPED, Progress

LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "ENVSCALER_EXCHANGE",
    "TORCHELASTIC_RESTART_COUNT",
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """No launcher is around."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


class Rig:
    """An exchange folder, a clock, and a session that uses both."""

    def __init__(self, root, **session):
        """Lay out ``start.json`` with *session*."""
        self.exchange = ex.Exchange(root)
        self.now = 0.0
        self.saved = []
        body = {"generation": 1, "attempt": 2, **session}
        ex.write_json(self.exchange.start, {"session": body, "restore": None})
        self.sequence = 0

    def session(self, *arguments, **keywords):
        """A session on this exchange and clock."""
        timed = type("Timed", (Session,), {"_clock": staticmethod(lambda: self.now)})
        return timed(*arguments, exchange=self.exchange.root, **keywords)

    def ask(self, action, **fields):
        """What the owner asks."""
        self.sequence += 1
        ex.write_json(self.exchange.control, {"sequence": self.sequence, "action": action, **fields})

    def save(self, folder):
        """A save that writes one file."""
        assert not list(folder.iterdir())
        (folder / "w").write_text("weights", encoding="utf-8")
        self.saved.append(folder)

    def said(self):
        """The progress file."""
        return ex.parse_report(self.exchange.progress.read_bytes())

    def names(self):
        """Complete checkpoints."""
        folder = self.exchange.checkpoints
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []

    def walk(self, session, steps, *, dt=1.0, epoch=0):
        """Train *steps* steps of *dt* seconds; every *epoch*-th is an epoch's last."""
        for _ in range(steps):
            self.now += dt
            session.step(samples=32, loss=0.5, data_s=0.25, sync_s=0.125)
            session.checkpoint(self.save, epoch_end=bool(epoch) and session.steps % epoch == 0)


@pytest.fixture
def rig(tmp_path):
    """A rig without periodic checkpoints."""
    return Rig(tmp_path / "x")


def name(step):
    """Name of this attempt's checkpoint."""
    return f"g1-step-{step:08d}-a2"


# -- without an exchange ---------------------------------------------------------------------------


def test_a_plain_run_needs_nothing(tmp_path, monkeypatch):
    """On a laptop everything works, writes nothing and never leaves."""
    monkeypatch.chdir(tmp_path)

    with Session(total_steps=3) as session:
        assert session.restore() is None
        session.phase("training")
        for _ in range(3):
            session.step(samples=32, loss=0.5)
            assert not session.checkpoint(pytest.fail, epoch_end=True)

    assert (session.steps, session.epoch, session.samples) == (3, 3, 96)
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_keeps_and_restores(tmp_path):
    """Every ten minutes, as many as are kept, and the newest is found again."""
    now = [0.0]
    timed = type("Timed", (Session,), {"_clock": staticmethod(lambda: now[0])})
    with timed(local_dir=tmp_path) as session:
        for _ in range(5):
            now[0] += 600
            session.step(samples=10)
            assert session.checkpoint(lambda folder: (folder / "w").touch())

    again = timed(local_dir=tmp_path)

    assert again.restore() == tmp_path / "g0-step-00000005-a0"
    assert (again.steps, again.samples) == (5, 50)
    assert len(list(tmp_path.iterdir())) == 3


# -- restoring and counting ------------------------------------------------------------------------


def test_counts_go_on_from_the_restored_checkpoint(tmp_path):
    """The courier says where it stands; what it does not say is in the folder itself."""
    rig = Rig(tmp_path / "x")
    folder = tmp_path / "restored"
    folder.mkdir()
    (folder / "agent.json").write_text('{"step": 1, "epoch": 4, "samples": 3200}', encoding="utf-8")
    ex.write_json(rig.exchange.start, {"restore": {"path": str(folder), "step": 100}, "session": {}})

    with rig.session() as session:
        assert session.restore() == folder
        rig.walk(session, 1)

    assert (session.steps, session.epoch, session.samples) == (101, 4, 3232)
    assert rig.said().progress.samples == 3232


def test_progress_says_what_is_known(rig):
    """Ten steps of a second: one step and 32 samples a second; the rest is unknown."""
    with rig.session(100, 5) as session:
        rig.walk(session, 10, epoch=5)

    assert rig.said().progress == Progress(
        step=10,
        total_steps=100,
        epoch=2,
        epochs=5,
        samples=320,
        batch=32,
        loss=0.5,
        loss_is_nan=False,
        step_time_s=1.0,
        data_time_s=0.25,
        sync_time_s=0.125,
        steps_per_s=1.0,
        samples_per_s=32.0,
        save_s=0.0,
    )


def test_all_ranks_are_counted(rig):
    """Two ranks of 32 samples are 64 a step."""
    with rig.session(rank=0, world_size=2, agree=lambda number: number) as session:
        session.step(samples=32, tokens=10)

    progress = rig.said().progress
    assert (progress.samples, progress.batch, progress.tokens) == (64, 64, 20)


def test_progress_is_written_at_most_once_a_second(rig, monkeypatch):
    """2500 steps of a millisecond make three files, not 2500."""
    writes = []
    with rig.session() as session:
        monkeypatch.setattr(ex, "write_json", lambda path, body: writes.append(body["step"]))
        for _ in range(2500):
            rig.now += 0.001
            session.step()

    assert len(writes) == 3  # after 1 s, after 2 s, and at the end


def test_an_epoch_end_as_a_number_is_the_number_finished(rig):
    """0 is no end: none has finished."""
    with rig.session() as session:
        session.checkpoint(rig.save, epoch_end=0)
        assert session.epoch == 0
        session.checkpoint(rig.save, epoch_end=7)
        assert session.epoch == 7
        session.checkpoint(rig.save, epoch_end=True)

    assert session.epoch == 8


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_said_as_such(rig, loss):
    """The file stays valid JSON, and the owner sees it."""
    with rig.session() as session:
        session.step(loss=loss)

    progress = rig.said().progress
    assert (progress.loss, progress.loss_is_nan) == (None, True)


class Tensor:
    """A loss on a GPU: each look at it waits."""

    looks = 0

    def __init__(self, value=0.5, *, has_graph=True):
        """Keep *value*; *has_graph* until it is detached."""
        self.value = value
        self.has_graph = has_graph

    def detach(self):
        """The same without its graph."""
        return Tensor(self.value, has_graph=False)

    def __float__(self):
        """Wait for the GPU."""
        assert not self.has_graph
        Tensor.looks += 1
        return self.value


def test_a_tensor_is_looked_at_every_ten_seconds(rig):
    """60 steps in 30 s: at the first, at 10, 20 and 30 s and at the end; its graph is never kept."""
    Tensor.looks = 0

    with rig.session() as session:
        for _ in range(60):
            rig.now += 0.5
            session.step(loss=Tensor())
            assert not session._loss.has_graph

    assert rig.said().progress.loss == 0.5
    assert Tensor.looks <= 5


def test_slow_phases_and_saves_are_no_step_time(rig):
    """Steps of a second, an evaluation of 10 s between them: a step still takes a second."""
    with rig.session() as session:
        rig.walk(session, 5)
        session.phase("evaluation")
        rig.now += 10
        session.phase("training")
        rig.walk(session, 5)

    progress = rig.said().progress
    assert progress.step_time_s == pytest.approx(1.0)
    assert progress.steps_per_s == pytest.approx(0.5)
    assert progress.phase == "training"


def test_a_phase_is_said_at_once(rig):
    """The wrapper must know of an evaluation before it wonders about the silence."""
    with rig.session() as session:
        session.phase("evaluation")

        assert rig.said().progress.phase == "evaluation"


def test_facts_of_the_trainings_own_are_passed_on(rig):
    """Others are a mistake."""
    with rig.session() as session:
        session.report(noise_scale=512.0, repeated_samples=3)
        session.step()
        with pytest.raises(ValueError, match="unknown"):
            session.report(speed=1)

    progress = rig.said().progress
    assert (progress.noise_scale, progress.repeated_samples) == (512.0, 3)


def test_a_forked_worker_writes_nothing(rig, monkeypatch):
    """A data loader inherits the session; its numbers are not the training's."""
    with rig.session() as session:
        rig.walk(session, 3)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        session.steps = 999
        session.phase("loading")
        monkeypatch.undo()

        assert rig.said().progress.step == 3


def test_a_full_disk_costs_a_report_and_not_the_training(rig, monkeypatch):
    """Writing fails: the steps go on."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with rig.session() as session:
        monkeypatch.setattr(ex, "write_json", full)
        rig.walk(session, 10)

    assert session.steps == 10


# -- periodic checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ({"steps": 4}, [4, 8]),
        ({"seconds": 4}, [4, 8]),
        ({"epochs": 2}, [6]),
        (None, []),
    ],
)
def test_saves_when_it_is_due(tmp_path, every, expected):
    """Ten steps of a second, three steps an epoch."""
    rig = Rig(tmp_path / "x", every=every)

    with rig.session() as session:
        rig.walk(session, 10, epoch=3)

    assert rig.names() == [name(step) for step in expected]


def test_aligned_saves_wait_for_the_end_of_an_epoch(tmp_path):
    """Due at step 4, the epoch ends at 6."""
    rig = Rig(tmp_path / "x", every={"seconds": 4}, align="epoch")

    with rig.session() as session:
        rig.walk(session, 10, epoch=6)

    assert rig.names() == [name(6)]


def test_a_checkpoint_carries_its_facts(tmp_path):
    """What the courier needs for the manifest."""
    rig = Rig(tmp_path / "x", every={"steps": 4}, global_batch=64)

    with rig.session() as session:
        rig.walk(session, 5, epoch=2)

    facts = json.loads((rig.exchange.checkpoints / name(4) / "agent.json").read_text())
    assert facts == {
        "step": 4,
        "epoch": 2,
        "samples": 128,
        "world_size": 1,
        "global_batch": 64,
        "save_s": 0.0,
    }
    assert (rig.exchange.checkpoints / name(4) / "w").read_text() == "weights"
    assert rig.said().saved_step == 4


def test_the_time_of_saves_is_counted(tmp_path):
    """Two saves of 3 s: training stood still for 6."""
    rig = Rig(tmp_path / "x", every={"steps": 4})

    def slow(folder):
        rig.now += 3

    with rig.session() as session:
        for _ in range(9):
            rig.now += 1
            session.step()
            session.checkpoint(slow)

    assert rig.said().progress.save_s == 6
    assert rig.said().last_save_s == 3


def test_a_save_is_announced_while_it_lasts(tmp_path):
    """The wrapper gives it a longer leash."""
    rig = Rig(tmp_path / "x", every={"steps": 1})
    seen = []

    with rig.session() as session:
        session.step()
        session.checkpoint(lambda _: seen.append((rig.said().saving, rig.said().leaving)))

    assert seen == [(True, False)]
    assert not rig.said().saving


def test_a_failing_save_keeps_the_one_before_and_trains_on(tmp_path, capsys):
    """An exception of any kind: it is reported, and the next try succeeds."""
    rig = Rig(tmp_path / "x", every={"steps": 2})
    fails = iter([False, True, False])

    def save(folder):
        (folder / "w").touch()
        if next(fails):
            raise OSError(28, "No space left on device")

    with rig.session() as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        done = []
        for _ in range(6):
            session.step()
            done.append(session.checkpoint(save))
            if session.steps == 4:
                assert "step 4 failed, the one before stays: OSError" in rig.said().warning

    assert done == [False, True, False, False, False, True]
    assert rig.names() == [name(2), name(6)]
    assert rig.said().warning == ""
    assert "No space left on device" in capsys.readouterr().err


def test_a_failed_save_is_tried_again_within_a_minute(tmp_path):
    """Every ten minutes; the save at 600 s fails, the next comes at 660 s and not at 1200 s."""
    rig = Rig(tmp_path / "x", every={"seconds": 600})

    tries = []

    def fail(folder):
        tries.append(rig.now)
        raise ValueError

    with rig.session() as session:
        for now in (600, 659, 660, 719):
            rig.now = now
            assert not session.checkpoint(fail)
        rig.now = 720
        assert session.checkpoint(rig.save)

    assert tries == [600, 660]


def test_saves_are_left_out_while_the_courier_is_behind(tmp_path):
    """Two wait for the upload: a third would only fill the disk. One taken makes room again."""
    rig = Rig(tmp_path / "x", every={"steps": 1})

    with rig.session() as session:
        rig.walk(session, 4)
        assert "left out" in rig.said().warning
        (rig.exchange.checkpoints / f"{name(1)}.done").touch()
        rig.walk(session, 1)

    assert [entry for entry in rig.names() if not entry.endswith(".done")] == [name(1), name(2), name(5)]


def test_what_a_killed_save_left_is_cleared_at_the_start(tmp_path):
    """An empty folder is promised to the next one."""
    rig = Rig(tmp_path / "x", every={"steps": 1})
    left = rig.exchange.checkpoints / f".saving-{name(1)}"
    left.mkdir(parents=True)
    (left / "half").touch()

    with rig.session() as session:
        rig.walk(session, 1)

    assert rig.names() == [name(1)]
    assert not (rig.exchange.checkpoints / name(1) / "half").exists()


# -- what the owner asks ---------------------------------------------------------------------------


def test_saves_when_asked_once(rig):
    """A control is carried out once, however long it stands."""
    with rig.session() as session:
        rig.walk(session, 2)
        rig.ask("checkpoint")
        rig.walk(session, 3)

    assert rig.names() == [name(3)]


def test_leaves_at_the_next_step(rig):
    """Saved, said, and gone with the protocol's code."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2)
            rig.ask("leave", align="step")
            rig.walk(session, 5)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_LEFT
    assert rig.names() == [name(3)]
    assert (rig.said().left, rig.said().leaving) == (True, True)


def test_leaves_at_the_end_of_the_epoch(rig):
    """Asked at step 2, the epoch ends at 6."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2, epoch=6)
            rig.ask("leave", align="epoch", align_timeout_s=100)
            rig.walk(session, 20, epoch=6)

    with pytest.raises(SystemExit):
        train()

    assert rig.names() == [name(6)]


def test_the_wait_for_an_epoch_is_bounded(rig):
    """Nobody announces an epoch's end: after three seconds the next step will do."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2)
            rig.ask("leave", align="epoch", align_timeout_s=3)
            rig.walk(session, 20)

    with pytest.raises(SystemExit):
        train()

    assert rig.names() == [name(6)]


def test_a_leave_can_be_taken_back(rig):
    """The move was called off before the epoch's end."""
    with rig.session() as session:
        rig.ask("leave", align="epoch")
        rig.walk(session, 3, epoch=6)
        rig.ask("run")
        rig.walk(session, 10, epoch=6)

    assert rig.names() == []


def test_stops_with_a_checkpoint(rig):
    """The money is spent; the work is kept."""

    def train():
        with rig.session() as session:
            rig.ask("stop")
            rig.walk(session, 5)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_STOPPED
    assert rig.names() == [name(1)]


def test_a_signal_to_the_wrapper_stops_at_the_next_step(rig):
    """Also while an aligned leave waits."""

    def train():
        with rig.session() as session:
            rig.ask("leave", align="epoch")
            rig.walk(session, 3)
            ex.write_json(rig.exchange.request, {"action": "stop"})
            rig.walk(session, 3)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_STOPPED
    assert rig.names() == [name(4)]


def test_a_leave_whose_save_fails_is_an_error(rig):
    """The owner must hear that the work since the last checkpoint is lost."""
    rig.ask("leave")

    def fail(folder):
        raise OSError(28, "No space left on device")

    with rig.session() as session:
        session.step()
        with pytest.raises(CheckpointError, match=r"asked to leave at step 1.*No space left"):
            session.checkpoint(fail)

    assert not rig.said().left
    assert rig.names() == []


def test_a_stop_whose_save_fails_still_stops(rig):
    """With or without a checkpoint."""
    rig.ask("stop")

    def fail(folder):
        raise ValueError

    def train():
        with rig.session() as session:
            session.checkpoint(fail)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_STOPPED


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path):
    """Asked to leave right after a periodic save of the same step."""
    rig = Rig(tmp_path / "x", every={"steps": 1})

    def train():
        with rig.session() as session:
            rig.walk(session, 1)
            rig.ask("leave")
            rig.now += 1
            session.checkpoint(pytest.fail)

    with pytest.raises(SystemExit):
        train()


def test_a_control_of_another_version_changes_nothing(rig, capsys):
    """Training goes on, and the message names both versions."""
    with rig.session() as session:
        rig.exchange.control.write_text('{"schema": "2.0", "action": "leave"}', encoding="utf-8")
        rig.walk(session, 3)

    assert "2.0" in rig.said().warning
    assert "1.0" in capsys.readouterr().err


def test_cooperates_from_the_first_checkpoint_call(rig):
    """Code that only reports steps cannot be left to go by itself."""
    with rig.session() as session:
        session.step()
        assert not rig.said().cooperates
        session.checkpoint(rig.save)
        assert rig.said().cooperates


def test_an_exception_in_save_that_ends_the_process_is_not_swallowed(tmp_path):
    """Ctrl-C in the middle of a save ends the training, and nothing half is complete."""
    rig = Rig(tmp_path / "x", every={"steps": 1})

    def interrupted(folder):
        raise KeyboardInterrupt

    def train():
        with rig.session() as session:
            session.step()
            session.checkpoint(interrupted)

    with pytest.raises(KeyboardInterrupt):
        train()

    assert [entry for entry in rig.names() if not entry.startswith(".")] == []


# -- several ranks ---------------------------------------------------------------------------------


def test_two_ranks_of_a_node_leave_at_the_same_step(tmp_path, monkeypatch):
    """Rank 0 names the step, each writes its shard, rank 0 completes; both exit alike."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x")
    first, second = (rig.session(rank=rank, world_size=2) for rank in (0, 1))
    codes = []
    rig.ask("leave")

    def shard(number):
        return lambda folder: (folder / f"shard-{number}").touch()

    def finish_first(_):
        if not codes:
            with pytest.raises(SystemExit) as leaving:
                first.checkpoint(shard(0))
            codes.append(leaving.value.code)

    second._ranks._sleep = finish_first
    with first, second:
        for session, number in ((first, 0), (second, 1)):
            session.step()
            assert not session.checkpoint(shard(number))
        first.step()
        second.step()
        with pytest.raises(SystemExit) as leaving:
            second.checkpoint(shard(1))  # waits, so that rank 0 gets its turn
        codes.append(leaving.value.code)

    assert codes == [EXIT_LEFT, EXIT_LEFT]
    files = sorted(path.name for path in (rig.exchange.checkpoints / name(2)).iterdir())
    assert files == ["agent.json", "shard-0", "shard-1"]


def test_no_checkpoint_is_complete_without_every_rank(tmp_path, monkeypatch):
    """Rank 1 cannot write its shard: nothing is renamed, rank 0 says why, both train on."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x", every={"steps": 2})
    first, second = (rig.session(rank=rank, world_size=2) for rank in (0, 1))

    def fail(folder):
        raise OSError(28, "No space left on device")

    with first, second:
        for number in (1, 2):
            for session in (second, first):
                session.step()
            if number == 1:
                assert not first.checkpoint(rig.save)
            assert not second.checkpoint(fail)
        assert not first.checkpoint(rig.save)

        assert rig.names() == []
        assert "rank 1: OSError" in rig.said().warning


def test_a_leave_that_ranks_could_not_agree_on_is_tried_again(tmp_path, monkeypatch, capsys):
    """Rank 1 was elsewhere: rank 0 does not fail, and leaves at a later step."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x")
    rig.ask("leave")
    first = rig.session(rank=0, world_size=2)
    gathered = iter([["rank 1 was at step 5, not 2"], []])
    monkeypatch.setattr(first._ranks, "gather", lambda _: next(gathered))

    def train():
        with first:
            rig.walk(first, 2)
            assert not rig.said().leaving
            rig.walk(first, 5)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_LEFT
    assert rig.names() == [name(4)]
    assert "was at step 5" in capsys.readouterr().err


def test_a_rank_whose_shard_failed_makes_room_for_its_answer(tmp_path, monkeypatch):
    """Its half of a checkpoint that will never be is removed before it answers on the full disk."""
    rig = Rig(tmp_path / "x")
    rig.session(rank=0, world_size=2)
    second = rig.session(rank=1, world_size=2)
    seen = []
    monkeypatch.setattr(second._ranks, "look", lambda: True)
    monkeypatch.setattr(second._ranks, "decide", lambda *_, **__: rk.SAVE)
    monkeypatch.setattr(second._ranks, "acknowledge", lambda *_: seen.append(rig.names()))

    def fail(folder):
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    with second:
        second.step()
        assert not second.checkpoint(fail)

    assert seen == [[]]


def test_counted_saves_fall_on_their_step_with_several_ranks(tmp_path, monkeypatch):
    """Every 4 steps means step 4, although rank 0 must name it one step before."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x", every={"steps": 4})
    first, second = (rig.session(rank=rank, world_size=2) for rank in (0, 1))

    def save(folder):
        folder.mkdir(exist_ok=True)

    with first, second:
        for _ in range(9):
            rig.now += 1
            first.step()
            second.step()
            if first.steps in (4, 8):
                second.checkpoint(save)
                first.checkpoint(save)
            else:
                first.checkpoint(save)
                second.checkpoint(save)

    assert rig.names() == [name(4), name(8)]


def test_ranks_on_other_nodes_follow_the_broadcast(tmp_path):
    """A rank of node 1 sees no control; it leaves when rank 0's integer says so."""
    rig = Rig(tmp_path / "x", nodes=2, node=1)

    def train():
        with rig.session(rank=1, world_size=2, agree=lambda _: rk.LEAVE) as session:
            rig.walk(session, 20)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_LEFT
    assert rig.names() == [name(module.AGREE_EVERY)]


def test_without_a_broadcast_only_counted_saves_cross_nodes(tmp_path, capsys):
    """Nobody can be sure of the step of a leave, so it is not carried out."""
    rig = Rig(tmp_path / "x", nodes=2, every={"steps": 4})
    rig.ask("leave")

    with rig.session(rank=0, world_size=2) as session:
        rig.walk(session, 5)

    assert rig.names() == [name(4)]
    assert not rig.said().cooperates
    assert "no agree=" in capsys.readouterr().err


def test_exported_lazily():
    """``from envscaler_airflow.agent import Session``."""
    from envscaler_airflow import agent

    assert agent.Session is Session
    with pytest.raises(AttributeError, match="nosuch"):
        _ = agent.nosuch
    assert Path(agent.__file__).name == "__init__.py"
