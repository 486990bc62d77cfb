"""The sensor repeats a refused request, later each time: a full cluster does not fill the log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.policies import bring_propose, forgotten

from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import RunState, fold
from envscaler_airflow.run.event_bodies import Event, read_body
from envscaler_airflow.scaling import Observation, Policy, Proposal, Want
from envscaler_airflow.scaling.cooldown import holds
from envscaler_airflow.scaling.observation import Refused
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

SMALL = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
num_nodes: 1..4
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling: {policy: more, stabilization: 0s, cooldown: 1s, warmup: 1s, min_epochs_between: 0, min_speed: 0}
"""


def sensed(world):
    """Make one check with a new watcher, and append its request if it wants a move."""
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        monotonic=world.clock.monotonic,
    )
    decision = watcher.snapshot().check.decision
    if decision.action == "move":
        body = {"reason": decision.reason, "target": decision.target.to_dict(), "from_attempt": [1, 1]}
        world.log.append_request(read_body("move-requested", body), actor=None)


@pytest.fixture
def full(new_world, monkeypatch):
    """A run on a cluster without a second node, under a policy that wants one at every check."""
    want = Proposal((Want(Allocation(SMALL, 2), "more is better"),))
    with forgotten():
        bring_propose(monkeypatch, more=lambda _seen, _policy: want)
        world = new_world((SMALL,), spec=SPEC, backend=ElasticBackend)
        world.backend.free = {SMALL.name: 0}
        yield world


def test_a_full_cluster_is_asked_less_and_less(full):
    """Half an hour of checks every 30 s: some requests, but not 60."""
    world = full
    owner = world.owner(value_of_hour=0.0)
    owner.enter()
    for look in range(60):
        world.say(step=10 + look, elapsed_s=30.0 * look + 30)
        sensed(world)
        if world.state.pending:
            owner.resume(Wake("request"))
        world.clock.advance(30)

    refused = [event for event in world.log.read() if event.type == "move-refused"]
    assert 3 <= len(refused) <= 6
    assert "are free" in refused[-1].body.reason
    assert world.state.refused[0].times == len(refused)


def event(number, kind, at=0.0, **body):
    """Return an event of the log."""
    return Event(number, read_body(kind, body), "w", at, None)


def asked(number, target, **more):
    """Return a request."""
    return event(number, "move-requested", target=target, **more)


def test_refusals_are_counted_by_target_and_forgotten_by_the_next_attempt():
    """The user's requests are not counted, and nonsense in the log does no harm."""
    target = Allocation(SMALL, 2).to_dict()
    begin = [
        event(1, "generation", generation=1, spec_hash="h"),
        event(2, "attempt-intended", generation=1, attempt=1, allocation=Allocation(SMALL).to_dict()),
    ]
    events = [
        *begin,
        asked(3, target),
        event(4, "move-refused", request=3, at=10.0),
        asked(5, target),
        event(6, "move-refused", request=5, at=20.0),
        asked(7, target, forced=True),
        event(8, "move-refused", request=7, at=30.0),
        asked(9, "x"),
        event(10, "move-refused", request=9),
    ]
    state = fold(events, RunState())
    later = event(11, "attempt-intended", generation=1, attempt=2, allocation=Allocation(SMALL).to_dict())

    [one] = state.refused
    assert (one.target, one.times, one.at) == (Allocation(SMALL, 2).name, 2, 20.0)
    assert fold([later], state).refused == ()


@pytest.mark.parametrize(
    ("times", "ago_s", "is_urgent", "is_held"),
    [
        (1, 59.0, False, True), (1, 60.0, False, False), (3, 239.0, False, True), (3, 240.0, False, False),
        (1000, 3599.0, False, True), (1000, 3600.0, False, False), (1000, 59.0, True, True),
        (1000, 60.0, True, False),
    ],
)  # fmt: skip
def test_the_wait_doubles_up_to_an_hour_and_what_is_urgent_waits_a_minute(times, ago_s, is_urgent, is_held):
    """The same for every policy."""
    target = Allocation(SMALL, 2)
    seen = Observation(Allocation(SMALL), (target,), refused={target.name: Refused(times, ago_s)})
    want = Want(target, "more", is_urgent=is_urgent)
    policy = Policy("threshold", max_nodes=4, min_speed=0.0)

    assert ((holds(seen, policy, want) or "").startswith("the owner refused that")) is is_held
    assert holds(replace(seen, refused={}), policy, want) is None
