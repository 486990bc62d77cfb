"""Unit tests of Session's reports: a spool in a temporary folder, and a manual clock."""

import math
import os
from fractions import Fraction
from pathlib import Path

import pytest
from fakes.session_rig import LAUNCHER, Rig

from envscaler_agent import saving
from envscaler_agent import spool as ex
from envscaler_agent.protocol import Progress
from envscaler_agent.session import Session
from envscaler_airflow.sidecar.spool_state import Spool as SidecarSpool


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """Remove every launcher from the environment."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def rig(tmp_path):
    """A rig without periodic checkpoints."""
    return Rig(tmp_path / "x")


@pytest.mark.parametrize(
    ("every", "ranks", "saves"),
    [
        ({"seconds": 600}, {}, True),
        ({"steps": 5}, {}, True),
        (None, {}, False),
        ({"steps": 5}, {"rank": 0, "world_size": 4, "local_rank": 0}, True),
        ({"seconds": 600}, {"rank": 0, "world_size": 4, "local_rank": 0}, False),
    ],
)
def test_the_sidecar_hears_who_saves_now_and_then(tmp_path, every, ranks, saves):
    """It copies no files of a training that saves by Session; where Session does not save, it copies them."""
    rig = Rig(tmp_path / "x", nodes=2 if ranks else 1, **({"every": every} if every else {}))
    sidecar = SidecarSpool(rig.spool.root)
    with rig.session(**ranks) as session:
        session.step()
        assert not sidecar.saves()
        session.checkpoint(rig.save)

        assert rig.said().saves == sidecar.saves() == saves


def test_numbers_that_json_cannot_say_end_no_training(rig):
    """Counts from numpy and torch are not Python's; a noise scale may come from a division by zero."""
    with rig.session(total_steps=1e3) as session:
        session.report(noise_scale=math.nan, repeated_samples=Fraction(4))
        for _ in range(3):
            rig.now += 1.0
            session.step(samples=Fraction(32), tokens=Fraction(640), batch=Fraction(64), loss=0.5)
        rig.ask("checkpoint")
        rig.now += 1.0
        assert session.checkpoint(rig.save)

    said = rig.said().progress
    assert (said.total_steps, said.noise_scale, said.repeated_samples) == (1000, None, 4)
    assert (said.samples, said.tokens, said.batch) == (96, 1920, 64)
    assert said.samples_per_s == pytest.approx(64 / 3)  # two steps and a save after the first
    (name,) = rig.names()
    facts = saving.facts_of(rig.spool.checkpoints / name)
    assert (facts["samples"], facts["global_batch"]) == (96, 64)


# -- without a spool -----------------------------------------------------------------------------


def test_a_plain_run_needs_nothing(tmp_path, monkeypatch):
    """On a laptop everything works, writes nothing and never drains."""
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
    """Every ten minutes; the configured number is kept, and a restart finds the newest."""
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
    """The sidecar gives the position; the folder itself has the rest."""
    rig = Rig(tmp_path / "x")
    folder = tmp_path / "restored"
    folder.mkdir()
    (folder / "agent.json").write_text('{"step": 1, "epoch": 4, "samples": 3200}', encoding="utf-8")
    ex.write_json(rig.spool.start, {"restore": {"path": str(folder), "step": 100}, "session": {}})

    with rig.session() as session:
        assert session.restore() == folder
        rig.walk(session, 1)

    assert (session.steps, session.epoch, session.samples) == (101, 4, 3232)
    assert rig.said().progress.samples == 3232


def test_restored_steps_are_no_speed(tmp_path):
    """From step 1000, one step a second: the speed is one a second, not the thousand made before."""
    rig = Rig(tmp_path / "x")
    folder = tmp_path / "restored"
    folder.mkdir()
    (folder / "agent.json").write_text('{"step": 1000, "samples": 32000}', encoding="utf-8")
    ex.write_json(rig.spool.start, {"restore": {"path": str(folder), "step": 1000}, "session": {}})

    with rig.session() as session:
        rig.now += 2
        session.restore()
        rig.walk(session, 5)

    said = rig.said().progress
    assert (said.step, said.steps_per_s, said.step_time_s, said.samples_per_s) == (1005, 1.0, 1.0, 32.0)


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
    """0 does not mark an end: no epoch has finished."""
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
    """A loss on a GPU: each read waits."""

    looks = 0

    def __init__(self, value=0.5, *, has_graph=True):
        """Keep *value*; *has_graph* until it is detached."""
        self.value = value
        self.has_graph = has_graph

    def detach(self):
        """Return the same without its graph."""
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


def test_the_wait_before_the_first_step_is_no_step_time(rig):
    """Other nodes came ten minutes later, or a graph was compiled: the steps after it take a second each."""
    with rig.session() as session:
        rig.now += 600
        rig.walk(session, 1)
        assert rig.said().progress.step_time_s is None
        rig.walk(session, 5)

    progress = rig.said().progress
    assert (progress.step_time_s, progress.steps_per_s, progress.samples_per_s) == (1.0, 1.0, 32.0)


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
    assert progress.steps_per_s == pytest.approx(9 / 19)  # nine after the first
    assert progress.phase == "training"


def test_a_phase_is_said_at_once(rig):
    """The wrapper must know of an evaluation before the silence looks like a stall."""
    with rig.session() as session:
        session.phase("evaluation")

        assert rig.said().progress.phase == "evaluation"


def test_facts_of_the_trainings_own_are_passed_on(rig):
    """Unknown ones are an error."""
    with rig.session() as session:
        session.report(noise_scale=512.0, repeated_samples=3)
        session.step()
        with pytest.raises(ValueError, match="unknown"):
            session.report(speed=1)

    progress = rig.said().progress
    assert (progress.noise_scale, progress.repeated_samples) == (512.0, 3)


@pytest.mark.parametrize(("given", "said", "expected"), [("4", None, 4), ("4", 2, 2), ("", None, None)])
def test_passes_of_a_step_are_those_of_the_training_else_those_of_its_size(
    rig, monkeypatch, given, said, expected
):
    """``distributed.global_batch`` sets a variable, by which the training accumulates."""
    monkeypatch.setenv("ENVSCALER_GRADIENT_ACCUMULATION", given)
    with rig.session() as session:
        if said:
            session.report(micro_batches=said)
        session.step()

    assert rig.said().progress.micro_batches == expected


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
    """A failed write does not stop the steps."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with rig.session() as session:
        monkeypatch.setattr(ex, "write_json", full)
        rig.walk(session, 10)

    assert session.steps == 10


def test_exported_lazily():
    """``from envscaler_agent import Session``."""
    import envscaler_agent

    assert envscaler_agent.Session is Session
    with pytest.raises(AttributeError, match="nosuch"):
        _ = envscaler_agent.nosuch
    assert Path(envscaler_agent.__file__).name == "__init__.py"
