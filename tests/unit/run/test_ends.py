"""How an attempt ended, from the reports of the backend and its nodes."""

import pytest

from envscaler_agent.protocol import Ended, Status
from envscaler_airflow.run import NodeStatus, Observed, end_of
from envscaler_airflow.run.outcomes import LOST_AFTER_S


def node(index, reason, **status):
    """A node whose end the backend observed, and that reported its reason."""
    return NodeStatus(index, "ended", reason=reason, status=Status(ended=Ended(reason=reason), **status))


def test_the_cause_stands_before_its_echoes():
    """Node 1 ran out of memory, which broke node 0's next collective, and then node 2 was killed."""
    got = end_of(Observed((node(0, "failed"), node(1, "out-of-memory"), node(2, "killed"))))

    assert got.outcome == "out-of-memory"


def test_nothing_is_over_while_one_node_runs():
    """A node that succeeded waits for the others."""
    running = NodeStatus(1, "running", status=Status())

    assert end_of(Observed((node(0, "succeeded"), running))) is None


@pytest.mark.parametrize(("reason", "outputs"), [("succeeded", {"model": "file:///m"}), ("failed", None)])
def test_only_a_success_has_outputs(reason, outputs):
    """One of two outputs was uploaded when the command failed: the next stage must not get it."""
    got = end_of(Observed((node(0, reason, outputs={"model": "file:///m"}),)))

    assert got.outputs == outputs


@pytest.mark.parametrize(("silent_s", "outcome"), [(LOST_AFTER_S - 1, None), (LOST_AFTER_S, "lost")])
def test_silence_is_a_loss_only_after_its_time(silent_s, outcome):
    """Neither the backend nor the node reported anything."""
    got = end_of(Observed((NodeStatus(0, "unknown"),), silent_s=silent_s))

    assert (got and got.outcome) == outcome
