"""A human-readable text of what an attempt waits for."""

from __future__ import annotations

import pytest

from envscaler_airflow.backends.base import AttemptStatus
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Facts, NodeStatus, Observed, fold, next_action
from envscaler_airflow.run.event_bodies import Event, NewGeneration, read_body
from envscaler_airflow.testing import cpu_offer

STARTED = fold(
    [
        Event(1, NewGeneration(generation=1, spec_hash="A")),
        Event(
            2,
            read_body(
                "attempt-intended",
                {
                    "generation": 1,
                    "attempt": 1,
                    "spec_hash": "A",
                    "allocation": Allocation(cpu_offer(1)).to_dict(),
                },
            ),
        ),
        Event(
            3,
            read_body(
                "attempt-started",
                {"generation": 1, "attempt": 1, "handle": {"backend": "local", "name": "a"}},
            ),
        ),
    ]
)


def test_nodes_that_wait_for_the_same_are_told_together():
    """Running nodes, and those whose state is unknown, wait for nothing."""
    status = AttemptStatus(
        (
            NodeStatus(0, "running"),
            NodeStatus(1, "pending", reason="scheduling", detail="no room"),
            NodeStatus(2, "starting", detail="pulls"),
            NodeStatus(3, "pending", reason="scheduling", detail="no room"),
            NodeStatus(4, "starting"),
        )
    )

    assert status.waits == "node 1, 3: scheduling: no room; node 2: pulls"
    assert AttemptStatus(status.nodes[1:2]).waits == "scheduling: no room"
    assert AttemptStatus(()).waits == ""


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (NodeStatus(0, "pending", detail="no room"), "starts: no room"),
        (NodeStatus(0, "starting"), "starts"),
        (NodeStatus(0, "running"), "runs"),
    ],
)
def test_an_attempt_without_its_machine_does_not_run_yet(node, reason):
    """The owner reports it when it starts to wait."""
    action = next_action(STARTED, Facts(observed=Observed((node,))))

    assert (action.kind, action.reason) == ("wait", reason)
