"""How the owner handles nodes that never started, or that ended while others run."""

from __future__ import annotations

import pytest

from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import (
    Actor,
    Event,
    Facts,
    NodeStatus,
    Observed,
    end_of,
    fold,
    next_action,
)
from envscaler_airflow.run.event_bodies import read_body

TWO = Allocation(Offer("kubernetes", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4), nodes=2)


def live():
    """A run whose first attempt was started on two nodes."""
    key = {"generation": 1, "attempt": 1}
    bodies = [
        ("generation", {"generation": 1, "spec_hash": "A"}),
        ("attempt-intended", {**key, "allocation": TWO.to_dict(), "spec_hash": "A"}),
        ("attempt-started", {**key, "handle": {"backend": "kubernetes", "name": "r"}}),
    ]
    actor = Actor("ti", try_number=1, max_tries=3)
    return fold(
        [Event(n, read_body(kind, body), writer="w", actor=actor) for n, (kind, body) in enumerate(bodies, 1)]
    )


def seen(*nodes):
    """Facts with these nodes, as ``(state, reason)``."""
    return Facts(
        observed=Observed(
            tuple(
                NodeStatus(index, state, reason=reason, detail="words")
                for index, (state, reason) in enumerate(nodes)
            )
        )
    )


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ((("running", ""), ("running", "")), "wait"),
        ((("pending", "scheduling"), ("pending", "scheduling")), "wait"),
        ((("pending", "capacity"), ("pending", "scheduling")), "kill"),
        ((("running", ""), ("lost", "lost")), "kill"),
        ((("running", ""), ("ended", "drained")), "wait"),
        ((("lost", "lost"), ("lost", "lost")), "end"),
    ],
)
def test_what_is_missing_ends_the_rest(nodes, kind):
    """A node never started or is lost: the rest is stopped; if it ended normally, the others finish."""
    assert next_action(live(), seen(*nodes)).kind == kind


def test_an_attempt_whose_nodes_never_came_was_not_started():
    """It counts as refused: the next offer is tried, and the user's code is not blamed."""
    end = end_of(seen(("ended", "capacity"), ("ended", "capacity")).observed)

    assert (end.outcome, end.detail) == ("not-started", "words")
