"""Unit tests of how ranks agree: a test runs two ranks in turn, and waits end at once."""

import pytest

from envscaler_agent import saving as rk
from envscaler_agent.saving import Alone, Collective, Neighbours, Scheduled, layout
from envscaler_airflow.errors import CheckpointError


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Ranks 0 and 1 of a node; a wait checks three times."""
    monkeypatch.setattr(rk, "WAIT_S", 3 * rk.POLL_S)
    folder = tmp_path / "ranks"
    return [Neighbours(folder, rank, 2, sleep=lambda _: None) for rank in (0, 1)]


def test_both_save_at_the_step_that_rank_0_names(pair):
    """Wanted at step 10: both continue, and both save at 11, in any order."""
    first, second = pair

    assert first.decide(10, rk.SAVE, epoch_end=False) == rk.NOTHING
    assert second.look()
    assert second.decide(10, rk.NOTHING, epoch_end=False) == rk.NOTHING
    assert second.decide(11, rk.NOTHING, epoch_end=False) == rk.SAVE
    assert first.look()
    assert first.decide(11, rk.SAVE, epoch_end=False) == rk.SAVE


def test_a_rank_that_follows_never_decides(pair):
    """Rank 1's own wish does not matter."""
    _, second = pair

    assert not second.look()
    assert second.decide(10, rk.DRAIN, epoch_end=False) == rk.NOTHING


def test_the_first_rank_waits_for_all(pair):
    """Rank 1 has saved: both may continue."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)
    second.look()
    second.acknowledge(11, "")

    assert first.gather(11) == []
    first.announce(11, is_complete=True)
    assert second.await_outcome(11)
    assert not second.look()
    assert second.decide(12, rk.NOTHING, epoch_end=False) == rk.NOTHING


def test_a_rank_that_could_not_save_is_named(pair):
    """Rank 0 gets its reason, and the other ranks learn that there is no checkpoint."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)
    second.look()
    second.acknowledge(11, "OSError: disk full")

    assert first.gather(11) == ["rank 1: OSError: disk full"]
    first.announce(11, is_complete=False)
    assert not second.await_outcome(11)


def test_ranks_that_were_not_at_the_same_step_make_no_checkpoint(pair):
    """Without gradients to reduce, rank 1 ran ahead to 13: no save, and the next lead is longer."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)

    assert second.look()
    assert second.decide(13, rk.NOTHING, epoch_end=False) == rk.SAVE
    second.acknowledge(13, "")
    assert not second.look()
    assert first.gather(11) == ["rank 1 was at step 13, not 11"]
    first.announce(11, is_complete=False)
    assert not second.await_outcome(13)
    assert first.lead_steps == 2 * 1 + 2

    first.decide(20, rk.SAVE, epoch_end=False)
    assert second.look()
    assert second.decide(23, rk.NOTHING, epoch_end=False) == rk.NOTHING
    assert second.decide(24, rk.NOTHING, epoch_end=False) == rk.SAVE


def test_code_that_asks_every_fifth_step_saves_there(pair):
    """Step 11 is named but no rank calls then: all save at 15."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)
    second.look()
    second.decide(10, rk.NOTHING, epoch_end=False)

    assert second.decide(15, rk.NOTHING, epoch_end=False) == rk.SAVE
    assert first.decide(15, rk.SAVE, epoch_end=False) == rk.SAVE


def test_an_epoch_end_before_the_named_step_has_its_own_verdict(pair):
    """Step 24 was named; an epoch ends at 22: rank 1 waits there, and both save."""
    first, second = pair
    first.lead_steps = 4
    first.decide(20, rk.SAVE, epoch_end=False)
    second.look()

    with pytest.raises(CheckpointError, match="no verdict"):
        second.decide(22, rk.NOTHING, epoch_end=True)
    assert first.decide(22, rk.DRAIN, epoch_end=True) == rk.DRAIN
    assert second.decide(22, rk.NOTHING, epoch_end=True) == rk.DRAIN


def test_a_rank_that_never_answers_is_named(pair):
    """The wait is bounded; training continues without this checkpoint."""
    first, _ = pair

    assert first.gather(11) == [f"no answer from ranks [1] within {rk.WAIT_S:g} s"]


def test_a_rank_that_has_saved_goes_on(pair):
    """Rank 1 saved 11 and is at 12 while rank 0 still completes: it gets no second request."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)
    second.look()
    assert second.decide(11, rk.NOTHING, epoch_end=False) == rk.SAVE
    second.acknowledge(11, "")

    assert not second.look()
    assert second.decide(12, rk.NOTHING, epoch_end=False) == rk.NOTHING
    assert first.gather(11) == []


def test_an_answer_waits_for_room_on_a_full_disk(pair, monkeypatch):
    """Others wait for it: the rank retries the write until it succeeds, within bounds."""
    _, second = pair
    tries = []

    def full(path, body):
        tries.append(path.name)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(rk, "write_json", full)

    second.acknowledge(11, "")

    assert tries == ["rank-1.json"] * 3


def test_a_step_that_cannot_be_named_stays_wanted(pair, monkeypatch):
    """The disk is full: no rank learns of step 11, and the next try names 12."""
    first, second = pair

    def full(path, body):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rk, "write_json", full)
        assert first.decide(10, rk.SAVE, epoch_end=False) == rk.NOTHING
    assert not second.look()
    first.decide(11, rk.SAVE, epoch_end=False)

    assert second.look()
    assert second.decide(12, rk.NOTHING, epoch_end=False) == rk.SAVE


def test_an_epoch_end_has_a_verdict_at_once(pair):
    """The step before cannot be named: rank 1 waits there for rank 0."""
    first, second = pair

    with pytest.raises(CheckpointError, match="no verdict of rank 0 for step 20"):
        second.decide(20, rk.NOTHING, epoch_end=True)
    assert first.decide(20, rk.DRAIN, epoch_end=True) == rk.DRAIN
    assert second.decide(20, rk.NOTHING, epoch_end=True) == rk.DRAIN


def test_an_epoch_end_without_a_save_stops_nobody(pair):
    """The verdict may be to continue."""
    first, second = pair

    assert first.decide(20, rk.NOTHING, epoch_end=True) == rk.NOTHING
    assert second.decide(20, rk.NOTHING, epoch_end=True) == rk.NOTHING


def test_a_step_named_before_stands_at_an_epoch_end(pair):
    """Step 20 was named at 19 and ends an epoch: both save as named."""
    first, second = pair
    first.decide(19, rk.SAVE, epoch_end=False)
    second.look()

    assert first.decide(20, rk.DRAIN, epoch_end=True) == rk.SAVE
    assert second.decide(20, rk.NOTHING, epoch_end=True) == rk.SAVE


def test_a_new_launch_forgets_what_the_old_one_named(pair, tmp_path):
    """Rank 0 was killed between naming and saving; the restarted ranks begin without that name."""
    first, second = pair
    first.decide(10, rk.SAVE, epoch_end=False)
    second.look()
    second.acknowledge(11, "half")

    again = [Neighbours(tmp_path / "ranks", rank, 2, sleep=lambda _: None) for rank in (0, 1)]

    assert not again[1].look()
    assert again[0].gather(11) == [f"no answer from ranks [1] within {rk.WAIT_S:g} s"]


def test_across_nodes_all_are_asked_at_the_same_steps():
    """Every third call and every epoch end; rank 0 decides for all."""
    asked = []

    def agree(number):
        asked.append(number)
        return rk.DRAIN

    rank = Collective(agree, every=3, leads=False, local=Alone())
    got = []
    for step in range(1, 7):
        rank.look()
        got.append(rank.decide(step, rk.SAVE, epoch_end=step == 5))

    assert got == [0, 0, rk.DRAIN, 0, rk.DRAIN, rk.DRAIN]
    assert asked == [rk.NOTHING] * 3


def test_rank_0_says_what_it_wants():
    """The broadcast sends its integer."""
    rank = Collective(lambda number: number, every=1, leads=True, local=Alone())
    rank.look()

    assert rank.decide(5, rk.STOP, epoch_end=False) == rk.STOP


def test_the_ranks_of_a_node_complete_its_folder_together(pair):
    """The first rank of a node waits for its neighbours, even if another rank decides."""
    first, second = (Scheduled(local) for local in pair)
    second.acknowledge(11, "")

    assert (first.is_first, second.is_first) == (True, False)
    assert first.gather(11) == []
    first.announce(11, is_complete=True)
    assert second.await_outcome(11)


@pytest.mark.parametrize(
    ("environ", "given", "nodes", "expected"),
    [
        ({}, {}, 1, (0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, 2, (3, 4, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, {}, 2, (3, 4, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, {"rank": 1, "world_size": 2}, 1, (1, 2, 1, 2)),
        ({"RANK": "", "WORLD_SIZE": "x"}, {}, 1, (0, 1, 0, 1)),
    ],
)
def test_a_ranks_place(environ, given, nodes, expected):
    """Arguments, else the launcher's settings, else a single rank."""
    arguments = {"rank": None, "world_size": None, "local_rank": None, **given}

    assert layout(environ, nodes=nodes, **arguments) == expected


def test_an_impossible_place_is_refused():
    """Rank 2 of 2 would wait for ever."""
    with pytest.raises(ValueError, match="rank 2 of 2"):
        layout({}, rank=2, world_size=2, local_rank=0, nodes=1)
