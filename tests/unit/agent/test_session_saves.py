"""Unit tests of Session: when it saves, and that the last good save stays."""

import json
import warnings

import pytest
from fakes.session_rig import LAUNCHER, Rig, name

from envscaler_agent import spool as ex


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """Remove every launcher from the environment."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)


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
    """Ten steps of a second, three steps per epoch."""
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
    """The sidecar needs them for the manifest."""
    rig = Rig(tmp_path / "x", every={"steps": 4}, global_batch=64)

    with rig.session() as session:
        rig.walk(session, 5, epoch=2)

    facts = json.loads((rig.spool.checkpoints / name(4) / "agent.json").read_text())
    assert facts == {
        "step": 4,
        "epoch": 2,
        "samples": 128,
        "world_size": 1,
        "global_batch": 64,
        "save_s": 0.0,
    }
    assert (rig.spool.checkpoints / name(4) / "w").read_text() == "weights"
    assert rig.said().saved_step == 4


def test_the_time_of_saves_is_counted(tmp_path):
    """Two saves of 3 s: training paused for 6."""
    rig = Rig(tmp_path / "x", every={"steps": 4})

    def slow(folder):
        (folder / "w").touch()
        rig.now += 3

    with rig.session() as session:
        for _ in range(9):
            rig.now += 1
            session.step()
            session.checkpoint(slow)

    assert rig.said().progress.save_s == 6
    assert rig.said().last_save_s == 3


def test_a_save_is_announced_while_it_lasts(tmp_path):
    """The wrapper allows it more time."""
    rig = Rig(tmp_path / "x", every={"steps": 1})
    seen = []

    with rig.session() as session:
        session.step()
        session.checkpoint(lambda _: seen.append((rig.said().saving, rig.said().draining)))

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


def test_saves_are_left_out_while_the_sidecar_is_behind(tmp_path):
    """Two wait for the upload: a third would only fill the disk. One upload makes space again."""
    rig = Rig(tmp_path / "x", every={"steps": 1})

    with rig.session() as session:
        rig.walk(session, 4)
        assert "left out" in rig.said().warning
        (rig.spool.checkpoints / f"{name(1)}.done").touch()
        rig.walk(session, 1)

    assert [entry for entry in rig.names() if not entry.endswith(".done")] == [name(1), name(2), name(5)]


def test_what_a_killed_save_left_is_cleared_at_the_start(tmp_path):
    """The next save gets an empty folder."""
    rig = Rig(tmp_path / "x", every={"steps": 1})
    left = rig.spool.checkpoints / f".saving-{name(1)}"
    left.mkdir(parents=True)
    (left / "half").touch()

    with rig.session() as session:
        rig.walk(session, 1)

    assert rig.names() == [name(1)]
    assert not (rig.spool.checkpoints / name(1) / "half").exists()


# -- the same rank restarted inside one attempt, as an elastic launcher does -----------------------------


def restored_at(rig, folder, step):
    """Simulate that the attempt began from a checkpoint of *step*."""
    folder.mkdir()
    (folder / "agent.json").write_text(json.dumps({"step": step, "world_size": 1}), encoding="utf-8")
    start = json.loads(rig.spool.start.read_text())
    ex.write_json(rig.spool.start, {**start, "restore": {"path": str(folder), "step": step}})


def test_a_rank_begun_again_goes_on_from_the_newest_save_of_its_attempt(tmp_path):
    """Whether the sidecar has uploaded it or not; not from the attempt's starting checkpoint."""
    rig = Rig(tmp_path / "x", every={"steps": 4})
    restored_at(rig, tmp_path / "before", 100)
    with rig.session() as session:
        session.restore()
        rig.walk(session, 9)
    assert rig.names() == [name(104), name(108)]
    rig.spool.checkpoints.joinpath(f"{name(108)}.done").touch()

    with rig.session() as again:
        path = again.restore()
        rig.walk(again, 1)

    assert path == rig.spool.checkpoints / name(108)
    assert (again.steps, again.samples) == (109, 9 * 32)


def test_a_rank_begun_again_takes_no_save_of_another_attempt_or_before_its_start(tmp_path):
    """Those of other attempts may be void, and step 50 is before the attempt's starting checkpoint."""
    rig = Rig(tmp_path / "x", every={"steps": 4})
    restored_at(rig, tmp_path / "before", 100)
    for other in ("g1-step-00000200-a1", "g2-step-00000200-a2", name(50), "g1-step-00000200-a2.part"):
        folder = rig.spool.checkpoints / other
        folder.mkdir(parents=True)
        (folder / "agent.json").write_text('{"step": 200, "world_size": 1}', encoding="utf-8")

    with rig.session() as session:
        assert session.restore() == tmp_path / "before"
        assert session.steps == 100


def test_a_save_that_lies_on_several_nodes_is_not_taken_from_one(tmp_path, monkeypatch):
    """Neither with other nodes, which would use another one, nor from a time when there were some."""
    rig = Rig(tmp_path / "x", every={"steps": 4})
    restored_at(rig, tmp_path / "before", 100)
    folder = rig.spool.checkpoints / name(104)
    folder.mkdir(parents=True)
    (folder / "agent.json").write_text('{"step": 104, "world_size": 2}', encoding="utf-8")

    with rig.session(rank=0, world_size=1, local_rank=0) as alone:
        assert alone.restore() == tmp_path / "before"

    (folder / "agent.json").write_text('{"step": 104, "world_size": 1}', encoding="utf-8")
    with rig.session(rank=0, world_size=1, local_rank=0) as alone:
        assert alone.restore() == folder
    monkeypatch.setenv("WORLD_SIZE", "2")  # of torchrun: a node came since the attempt began with one
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with rig.session(rank=0, world_size=2, local_rank=0, agree=lambda value: value) as one_of_two:
        assert one_of_two.restore() == tmp_path / "before"


def test_a_save_that_writes_no_file_is_no_checkpoint(tmp_path, capsys):
    """A folder inside the folder does not count; the training gets a message and continues (C)."""
    rig = Rig(tmp_path / "x", every={"steps": 4})

    with rig.session() as session:
        for _ in range(5):
            session.step()
            session.checkpoint(lambda folder: (folder / "model").mkdir())

    assert rig.names() == []
    assert rig.said().saved_step is None
    assert "save wrote no file" in capsys.readouterr().err
