"""Which nodes the owner drains when it shrinks an attempt, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_agent.protocol import Progress, Status, status_name
from envscaler_airflow.owner.in_place_change import order_of_drain
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run.event_bodies import NodeDrain
from envscaler_airflow.testing import ElasticBackend

DEMAND = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
SPOT = replace(DEMAND, capacity_type="spot", usd_per_hour=0.3)
FOUR, MIXED = Allocation(DEMAND, 4), Allocation(DEMAND, 4, rest=SPOT, rest_nodes=2)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
num_nodes: 1..4
entrypoint: [python, train.py]
checkpoint: {every: 10m}
distributed: {launcher: torchrun, elastic: true}
scaling: {min_nodes: 1, max_nodes: 4, cooldown: 1s}
"""


@pytest.mark.parametrize(
    ("allocation", "facts", "drained"),
    [
        (FOUR, {"removable": {1}}, NodeDrain(1, "it is marked removable")),
        (MIXED, {"step_s": {1: 9.0}}, NodeDrain(3, "it is spot, and others are on demand")),
        (
            FOUR,
            {"step_s": {0: 9.0, 1: 1.0, 2: 2.0, 3: 1.5}},
            NodeDrain(2, "it is among the slowest: 2 s a step"),
        ),
        (FOUR, {"step_s": {1: 1.0, 2: 2.0, 3: 1.5}}, NodeDrain(2, "it is the slowest: 2 s a step")),
        (FOUR, {}, NodeDrain(3, "it is the last, and nothing else tells them apart")),
        (MIXED, {"removable": {1}}, NodeDrain(1, "it is marked removable")),
    ],
)
def test_one_goes(allocation, facts, drained):
    """Marked, else spot, else slowest, else the last; the reason names the rule."""
    assert order_of_drain(allocation, 1, **facts) == (drained,)


@given(
    nodes=st.integers(2, 9), data=st.data(), marked=st.sets(st.integers(0, 8)),
    step_s=st.dictionaries(st.integers(0, 8), st.floats(0.1, 9.0)),
)  # fmt: skip
def test_rank_zero_never_goes_and_each_goes_once(nodes, data, marked, step_s):
    """Marks and speed do not change that."""
    count = data.draw(st.integers(0, nodes - 1))

    got = [
        item.node
        for item in order_of_drain(Allocation(DEMAND, nodes), count, removable=marked, step_s=step_s)
    ]

    assert 0 not in got
    assert len(set(got)) == len(got) == count


def shrunk(new_world, *, slow, marked=frozenset()):
    """Return the owner's answer to a move from four nodes to three."""
    world = new_world((DEMAND,), spec=SPEC.replace("num_nodes: 1..4", "num_nodes: 4"), backend=ElasticBackend)
    world.backend.marked = marked
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    for node in range(4):
        step_s = 2.0 if node == slow else 1.0
        said = Progress(step=10, total_steps=1000, epoch=1, elapsed_s=60.0, step_time_s=step_s)
        status = Status(generation=1, attempt=1, node=node, sequence=1, phase="running", progress=said)
        world.store.write(f"{world.prefix}/{status_name(1, 1, node)}", status.to_json())
    world.ask_move(target=Allocation(DEMAND, 3))
    owner.resume(Wake("request"))
    return next(item for item in world.log.read() if item.type in ("move-accepted", "change-intended"))


@pytest.mark.parametrize(("slow", "event"), [(2, "move-accepted"), (3, "change-intended")])
def test_who_leaves_is_recorded_and_only_the_last_go_in_place(new_world, slow, event):
    """The slowest of four drains: the last one by a change in place, any other one by a next attempt."""
    answer = shrunk(new_world, slow=slow)

    assert answer.type == event
    assert answer.body.nodes_to_drain == (NodeDrain(slow, "it is the slowest: 2 s a step"),)


def test_a_node_that_somebody_marked_goes_before_the_slowest(new_world):
    """The backend reports the mark."""
    answer = shrunk(new_world, slow=2, marked=frozenset({3}))

    assert answer.type == "change-intended"
    assert answer.body.nodes_to_drain == (NodeDrain(3, "it is marked removable"),)
