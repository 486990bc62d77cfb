"""What the owner cannot change wakes it at most once a minute, and no waiting time is forgotten."""

from __future__ import annotations

import pytest

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.backends.base import NodeStatus
from envscaler_airflow.errors import StoreError
from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

SMALL = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
num_nodes: 2..4
entrypoint: [python, train.py]
checkpoint: {every: 10m}
distributed: {launcher: torchrun, elastic: true}
scaling: {policy: cost-to-finish, cooldown: 10s, stabilization: 1s}
"""


@pytest.fixture
def world(new_world):
    """A run of two nodes that has not begun."""
    return new_world((SMALL,), spec=SPEC, backend=ElasticBackend)


def started(world):
    """An owner with a running attempt of two nodes."""
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    for node in range(2):
        world.say(node=node, elapsed_s=60.0)
    return owner


def executions(world, owner, waiting, *, seconds, poll_s=5):
    """Play a trigger and its executions for *seconds*, and return the wakes."""
    wakes, watch = [], world.watch(waiting)
    for _ in range(0, seconds, poll_s):
        wake = watch.poll()
        if wake is not None:
            wakes.append(wake)
            Run(world.store, world.prefix).lease.renew(holder="trigger", ages=watch.ages())
            wake = Wake.from_dict(wake.to_dict())
            waiting = owner.resume(wake)
            waiting = type(waiting)(Watching.from_dict(waiting.watching.to_dict()), waiting.reason)
            watch = world.watch(waiting)
        world.clock.advance(poll_s)
    return wakes


@pytest.mark.parametrize(
    "state",
    [
        NodeStatus(1, "lost", reason="lost"),
        NodeStatus(1, "pending", reason="capacity", detail="none"),
        NodeStatus(1, "running", reason="unneeded"),
    ],
    ids=lambda state: f"{state.state}-{state.reason}",
)
def test_an_attempt_that_goes_while_a_node_is_missing_is_killed_in_time_and_not_looked_at_all_the_time(
    world, state
):
    """Node 0 hangs because node 1 is gone: the owner kills it 90 s after the request."""
    owner = started(world)
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    waiting = owner.resume(Wake("request"))
    world.backend._lives[world.handle.name].nodes[1] = state
    kills = []
    world.backend.stop = lambda _handle, *, grace_s: kills.append(grace_s)

    wakes = executions(world, owner, waiting, seconds=100)

    assert kills == [0]
    assert [wake.kind for wake in wakes].count("overdue") == 1
    assert len(wakes) <= 3


def test_a_machine_that_cannot_be_killed_is_killed_again_each_minute(world):
    """Its node is gone and the other does not stop: no call every second."""
    owner = started(world)
    kills = []
    world.backend.stop = lambda _handle, *, grace_s: kills.append(grace_s)
    world.backend.lose(world.handle, node=1)
    waiting = owner.resume(Wake("status"))

    executions(world, owner, waiting, seconds=300)

    assert 4 <= len(kills) <= 7


def test_a_new_node_that_is_lost_before_the_others_came_is_waited_for_and_then_undone(world):
    """The owner requests two more nodes; one is lost at once: after ten minutes the other two continue."""
    world.backend.new_nodes = NodeStatus(0, "lost", reason="lost")
    owner = started(world)
    world.ask_move(target=Allocation(SMALL, 4))
    waiting = owner.resume(Wake("request"))

    wakes = executions(world, owner, waiting, seconds=700)

    assert world.log.read()[-1].type == "change-undone"
    assert world.state.live.allocation == Allocation(SMALL, 2)
    assert len(wakes) <= 12


def test_a_second_reason_is_heard_while_the_first_is_quiet(world):
    """The owner knows of the lost node of a draining attempt; it learns of the complete end at once."""
    owner = started(world)
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    owner.resume(Wake("request"))
    world.backend.lose(world.handle, node=1)
    waiting = owner.resume(Wake("status", detail="a node is lost", seen=("a node is lost",)))
    watch = world.watch(waiting)
    quiet = watch.poll()
    world.backend.end(world.handle, node=0, exit_code=85, reason="drained")

    assert quiet is None
    assert watch.poll().detail == "the attempt ended"


def test_two_lasting_reasons_do_not_wake_in_turn(world):
    """A draining attempt with one node lost and one not available."""
    owner = started(world)
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    waiting = owner.resume(Wake("request"))
    nodes = world.backend._lives[world.handle.name].nodes
    nodes[1] = NodeStatus(1, "lost")
    nodes[0] = NodeStatus(0, "pending", reason="capacity", detail="none")

    assert len(executions(world, owner, waiting, seconds=60)) == 1


def test_silence_that_ends_nothing_wakes_once_a_minute(world):
    """Node 0 is pending, node 1 unknown: nothing has ended, and the owner is not woken all the time."""
    owner = started(world)
    waiting = owner.resume(Wake("status"))
    nodes = world.backend._lives[world.handle.name].nodes
    nodes[:] = [NodeStatus(0, "pending"), NodeStatus(1, "unknown")]

    wakes = executions(world, owner, waiting, seconds=900)

    assert 2 <= len(wakes) <= 6


def test_a_store_that_was_out_of_reach_is_no_silence(world):
    """Backend and store are unreachable for an hour; the first answer has the old status: nothing is lost."""
    owner = started(world)
    waiting = owner.resume(Wake("status"))
    world.backend.hide(world.handle)
    watch = world.watch(waiting)
    watch.poll()
    read, world.store.read = world.store.read, _out_of_reach
    for _ in range(60):
        world.clock.advance(60)
        with pytest.raises(StoreError):
            watch.poll()
    world.store.read = read

    assert watch.poll() is None
    assert watch.ages() == {}
    world.clock.advance(600)
    assert watch.poll().kind == "silent"


def test_a_lease_that_somebody_wrote_into_kills_nothing(world):
    """Ages longer than any machine exists are unknown, not expired."""
    owner = started(world)
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    waiting = owner.resume(Wake("request"))
    world.backend.hide(world.handle)
    text = '{"schema": "%s", "counter": 3, "ages": {"stopping-g1-a1": %s, "silent-g1-a1": %s, "x": NaN}}'
    for age in ("Infinity", "1e300", "-5"):
        world.store.write(f"{world.prefix}/lease/run.json", (text % (SCHEMA, age, age)).encode())

        assert world.watch(waiting).poll() is None


def test_silence_is_told_with_whatever_else_wakes(world):
    """Node 0 is lost and node 1 silent for ten minutes: the end needs both."""
    owner = started(world)
    waiting = owner.resume(Wake("status"))
    nodes = world.backend._lives[world.handle.name].nodes
    nodes[:] = [NodeStatus(0, "lost"), NodeStatus(1, "unknown")]
    kills = []
    world.backend.stop = lambda _handle, *, grace_s: kills.append(grace_s)

    watch = world.watch(waiting)
    watch.poll()
    world.clock.advance(601)
    owner.resume(watch.poll())

    assert world.state.attempts[0].outcome == "lost"


def _out_of_reach(*_args, **_how):
    raise StoreError("no answer", transient=True)
