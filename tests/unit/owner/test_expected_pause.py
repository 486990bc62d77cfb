"""Unit tests of the expected pause of a move before one was measured."""

from envscaler_agent.protocol import Progress, Status
from envscaler_airflow.owner.observe import SLOTS_S, expected_pause_s
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import AttemptState

HERE = Allocation(Offer("local", "", "cpu-1", "on-demand", vcpus=1, memory_gib=4))
LIVE = AttemptState(1, 1, HERE, intended_at=100.0, started_at=101.5)


def test_a_move_pauses_as_the_first_start_did_and_two_slots():
    """1.5 s to start, 2 s of setup, 0.5 s to the first step, 6 s of slots: 10 s."""
    head = Status(setup_s=2.0, progress=Progress(first_step_s=0.5))

    assert SLOTS_S == 6
    assert expected_pause_s(LIVE, head) == 10


def test_an_unknown_part_makes_the_whole_unknown():
    """Code that does not cooperate does not report when its first step was."""
    assert expected_pause_s(LIVE, Status(setup_s=2.0)) is None
    assert expected_pause_s(LIVE, None) is None
