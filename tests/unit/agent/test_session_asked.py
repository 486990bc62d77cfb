"""Unit tests of Session: it carries out the owner's request once, at the right step."""

import pytest
from fakes.session_rig import LAUNCHER, Rig, name

from envscaler_agent import spool as ex
from envscaler_agent.ending import EXIT_DRAINED, EXIT_STOPPED
from envscaler_airflow.errors import CheckpointError


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """Remove every launcher from the environment."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def rig(tmp_path):
    """A rig without periodic checkpoints."""
    return Rig(tmp_path / "x")


def test_saves_when_asked_once(rig):
    """A control is carried out once, even if it stays."""
    with rig.session() as session:
        rig.walk(session, 2)
        rig.ask("checkpoint")
        rig.walk(session, 3)

    assert rig.names() == [name(3)]


@pytest.mark.parametrize("before", [None, "drain"])
def test_a_hold_is_no_request(rig, before):
    """The training continues, and an earlier request stays in force (A5)."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2)
            if before is not None:
                rig.ask(before, align="epoch", align_timeout_s=100)
                rig.walk(session, 1, epoch=6)
            rig.ask("hold")
            rig.walk(session, 9, epoch=6)

    if before is None:
        train()
        assert rig.names() == []
    else:
        with pytest.raises(SystemExit):
            train()
        assert rig.names() == [name(6)]


def test_leaves_at_the_next_step(rig):
    """It saves, reports and exits with the protocol's code."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2)
            rig.ask("drain", align="step")
            rig.walk(session, 5)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_DRAINED
    assert rig.names() == [name(3)]
    assert (rig.said().drained, rig.said().draining) == (True, True)


def test_leaves_at_the_end_of_the_epoch(rig):
    """Requested at step 2, the epoch ends at 6."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2, epoch=6)
            rig.ask("drain", align="epoch", align_timeout_s=100)
            rig.walk(session, 20, epoch=6)

    with pytest.raises(SystemExit):
        train()

    assert rig.names() == [name(6)]


def test_the_wait_for_an_epoch_is_bounded(rig):
    """The code announces no epoch's end: after three seconds the next step counts."""

    def train():
        with rig.session() as session:
            rig.walk(session, 2)
            rig.ask("drain", align="epoch", align_timeout_s=3)
            rig.walk(session, 20)

    with pytest.raises(SystemExit):
        train()

    assert rig.names() == [name(6)]


def test_a_leave_can_be_taken_back(rig):
    """The move was cancelled before the epoch's end."""
    with rig.session() as session:
        rig.ask("drain", align="epoch")
        rig.walk(session, 3, epoch=6)
        rig.ask("run")
        rig.walk(session, 10, epoch=6)

    assert rig.names() == []


def test_stops_with_a_checkpoint(rig):
    """The budget is spent; the work is kept."""

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
            rig.ask("drain", align="epoch")
            rig.walk(session, 3)
            ex.write_json(rig.spool.request, {"action": "stop"})
            rig.walk(session, 3)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_STOPPED
    assert rig.names() == [name(4)]


def test_a_leave_whose_save_fails_is_an_error(rig):
    """The owner must know that the work since the last checkpoint is lost."""
    rig.ask("drain")

    def fail(folder):
        raise OSError(28, "No space left on device")

    with rig.session() as session:
        session.step()
        with pytest.raises(CheckpointError, match=r"asked to stop at step 1.*No space left"):
            session.checkpoint(fail)

    assert not rig.said().drained
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
    """A drain request right after a periodic save of the same step."""
    rig = Rig(tmp_path / "x", every={"steps": 1})

    def train():
        with rig.session() as session:
            rig.walk(session, 1)
            rig.ask("drain")
            rig.now += 1
            session.checkpoint(pytest.fail)

    with pytest.raises(SystemExit):
        train()


def test_a_control_of_another_version_changes_nothing(rig, capsys):
    """Training continues, and the message names both versions."""
    with rig.session() as session:
        rig.spool.control.write_text('{"schema": "3.0", "action": "drain"}', encoding="utf-8")
        rig.walk(session, 3)

    assert "3.0" in rig.said().warning
    assert "2.0" in capsys.readouterr().err


def test_cooperates_from_the_first_checkpoint_call(rig):
    """Code that only reports steps cannot be trusted to stop by itself."""
    with rig.session() as session:
        session.step()
        assert not rig.said().cooperates
        session.checkpoint(rig.save)
        assert rig.said().cooperates


def test_an_exception_in_save_that_ends_the_process_is_not_swallowed(tmp_path):
    """Ctrl-C in the middle of a save ends the training, and no partial save counts as complete."""
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
