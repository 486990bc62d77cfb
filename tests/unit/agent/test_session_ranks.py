"""Unit tests of Session: several ranks save and drain at the same step."""

import pytest
from fakes.session_rig import LAUNCHER, Rig, name

from envscaler_agent import saving as rk
from envscaler_agent import session as module
from envscaler_agent.ending import EXIT_DRAINED


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """Remove every launcher from the environment."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)


def test_two_ranks_of_a_node_leave_at_the_same_step(tmp_path, monkeypatch):
    """Rank 0 names the step, each writes its shard, rank 0 completes; both exit the same way."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x")
    first, second = (rig.session(rank=rank, world_size=2) for rank in (0, 1))
    codes = []
    rig.ask("drain")

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

    assert codes == [EXIT_DRAINED, EXIT_DRAINED]
    files = sorted(path.name for path in (rig.spool.checkpoints / name(2)).iterdir())
    assert files == ["agent.json", "shard-0", "shard-1"]


def test_no_checkpoint_is_complete_without_every_rank(tmp_path, monkeypatch):
    """Rank 1 cannot write its shard: nothing is renamed, rank 0 reports the reason, both keep training."""
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
    """Rank 1 was elsewhere: rank 0 does not fail, and drains at a later step."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x")
    rig.ask("drain")
    first = rig.session(rank=0, world_size=2)
    gathered = iter([["rank 1 was at step 5, not 2"], []])
    monkeypatch.setattr(first._ranks, "gather", lambda _: next(gathered))

    def train():
        with first:
            rig.walk(first, 2)
            assert not rig.said().draining
            rig.walk(first, 5)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_DRAINED
    assert rig.names() == [name(4)]
    assert "was at step 5" in capsys.readouterr().err


def test_a_rank_whose_shard_failed_makes_room_for_its_answer(tmp_path, monkeypatch):
    """Its part of the failed checkpoint is removed before it answers on the full disk."""
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
    """Every 4 steps means step 4, although rank 0 must name it one step earlier."""
    monkeypatch.setattr(rk, "WAIT_S", 5 * rk.POLL_S)
    rig = Rig(tmp_path / "x", every={"steps": 4})
    first, second = (rig.session(rank=rank, world_size=2) for rank in (0, 1))

    def save(folder):
        (folder / "w").touch()

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
    """A rank of node 1 sees no control; it drains when rank 0's integer requests it."""
    rig = Rig(tmp_path / "x", nodes=2, node=1)

    def train():
        with rig.session(rank=1, world_size=2, agree=lambda _: rk.DRAIN) as session:
            rig.walk(session, 20)

    with pytest.raises(SystemExit) as leaving:
        train()

    assert leaving.value.code == EXIT_DRAINED
    assert rig.names() == [name(module.AGREE_EVERY)]


def test_without_a_broadcast_only_counted_saves_cross_nodes(tmp_path, capsys):
    """No rank can be sure of the step of a drain, so it is not carried out."""
    rig = Rig(tmp_path / "x", nodes=2, every={"steps": 4})
    rig.ask("drain")

    with rig.session(rank=0, world_size=2) as session:
        rig.walk(session, 5)

    assert rig.names() == [name(4)]
    assert not rig.said().cooperates
    assert "no agree=" in capsys.readouterr().err
