"""Policies on a real run: third-party ones, recommend-only, and explained in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner
from fakes.policies import bring_propose, forgotten

from envscaler_airflow.cli import main
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.scaling import Check, Decision, Observation, Policy, Proposal, Want, explain
from envscaler_airflow.store.decisions import DecisionLog
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ElasticBackend

SMALL = Offer("scripted", "", "node:cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=1.0)
LARGE = replace(SMALL, instance_type="node:cpu-2", vcpus=2, memory_gib=8, usd_per_hour=2.0)
SPEC = """\
version: v1
name: train
resources: {{requests: {{cpu: 1}}}}
num_nodes: 1..3
entrypoint: [python, train.py]
checkpoint: {{every: 10m}}
scaling: {{policy: {policy}, warmup: 1s, stabilization: 1s, cooldown: 1s, min_epochs_between: 0{more}}}
"""


def largest(observation: Observation, policy: Policy) -> Proposal:
    """What another package might provide: always the largest machine."""
    del policy
    target = max(observation.candidates, key=lambda item: item.offer.vcpus)
    return Proposal((Want(target, "bigger is better"),), numbers={"mood": "bold"})


@pytest.fixture
def brought(monkeypatch):
    """A package that provides the policy ``largest``."""
    with forgotten():
        bring_propose(monkeypatch, largest=largest)
        yield


def looked(world, *, looks=4):
    """Return the last check of a sensor that checks every minute."""
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        candidates=(Allocation(SMALL), Allocation(LARGE)),
        monotonic=world.clock.monotonic,
    )
    log = DecisionLog(Run(world.store, world.prefix), writer="sensor", monotonic=world.clock.monotonic)
    for look in range(1, looks + 1):
        world.say(step=10 * look, elapsed_s=60.0 * look)
        world.clock.advance(60)
        check = watcher.snapshot().check
        log.add(check)
    log.close()
    return check


def running(new_world, policy, more=""):
    """A world in which the first attempt runs on the small share."""
    spec = SPEC.format(policy=policy, more=more)
    world = new_world((SMALL, LARGE), spec=spec, backend=ElasticBackend)
    world.owner(value_of_hour=0.0).enter()
    return world


def test_a_policy_of_another_package_decides_on_a_real_run(new_world, brought):
    """Found by its entry point, behind our guards; its own numbers are recorded and explained."""
    world = running(new_world, "largest")

    check = looked(world)

    assert (check.decision.action, check.decision.target) == ("move", Allocation(LARGE))
    assert check.decision.policy == "largest"
    assert explain(check).endswith("\n  mood: bold")


def test_the_owner_validates_by_the_same_policy(new_world, brought):
    """The owner uses the same third-party policy to judge the sensor's request."""
    world = running(new_world, "largest")
    check = looked(world)
    from_check = {"reason": check.decision.reason, "check": check.to_dict()}
    live = world.state.live
    body = {**from_check, "target": Allocation(LARGE).to_dict(), "from_attempt": [1, live.number]}
    world.log.append_request(read_body("move-requested", body), actor=None)

    world.owner(value_of_hour=0.0).enter()

    accepted = world.log.read()[-1]
    assert (accepted.type, accepted.body.reason) == ("move-accepted", "bigger is better")
    assert world.state.live.target == Allocation(LARGE)


def test_a_move_out_of_a_thousand_places_is_asked_for_and_judged(new_world, brought):
    """No event could contain them all; it has what the owner needs and what users read about the target."""
    world = running(new_world, "largest")
    check = looked(world)
    places = tuple(replace(check.decision.target, nodes=nodes) for nodes in range(1, 1001))
    seen = replace(check.observation, candidates=places, wanted={place.name: 1.0 for place in places})
    moving = {place.name: {"hours": 1.0, "why": 400 * "x"} for place in places}
    numbers = {"value_of_hour": 2.0, "staying": {"hours": 3.0}, "moving": moving}
    long = replace(check, observation=seen, decision=replace(check.decision, numbers=numbers))

    request_move(
        Run(world.store, world.prefix),
        target=Allocation(LARGE),
        from_attempt=(1, world.state.live.number),
        because={"reason": "bigger", "numbers": numbers, "check": long.to_dict()},
    )
    asked = world.log.read()[-1].body
    world.owner(value_of_hour=0.0).enter()

    name = Allocation(LARGE).name
    assert asked.numbers == {**numbers, "moving": {name: moving[name]}}
    assert Check.from_dict(asked.check).observation.speeds == check.observation.speeds
    assert world.log.read()[-1].type == "move-accepted"


def test_only_recommending_records_every_number_and_asks_nobody(new_world, brought):
    """``recommend_only``: the decision is recorded, and the owner refuses such a move."""
    world = running(new_world, "largest", ", recommend_only: true")
    check = looked(world)
    world.log.append_request(
        read_body(
            "move-requested",
            {
                "reason": "r",
                "target": Allocation(LARGE).to_dict(),
                "from_attempt": [1, 1],
                "check": check.to_dict(),
            },
        ),
        actor=None,
    )

    world.owner(value_of_hour=0.0).enter()

    assert (check.decision.action, check.decision.target) == ("recommend", Allocation(LARGE))
    assert world.log.read()[-1].type == "move-refused"
    assert world.state.live.allocation == Allocation(SMALL)


@pytest.mark.parametrize(
    ("free", "event"), [(2, "move-accepted"), (1, "move-refused"), (None, "move-accepted")]
)
def test_growing_takes_only_what_is_free_when_it_is_validated(new_world, free, event):
    """Two more nodes: two free ones are enough, one is not, and an unknown number does not block the move."""
    world = running(new_world, "cost-to-finish")
    world.say(elapsed_s=60.0)
    world.backend.free = {} if free is None else {SMALL.name: free}
    world.ask_move(target=Allocation(SMALL, 3))

    world.owner(value_of_hour=0.0).enter()

    answer = next(item for item in world.log.read() if item.type in ("move-accepted", "move-refused"))
    assert answer.type == event
    if event == "move-refused":
        assert answer.body.reason.endswith("needs 2 more nodes, 1 are free")


@pytest.mark.parametrize(("free", "event"), [(1, "move-accepted"), (0, "move-refused")])
def test_no_training_is_stopped_for_a_place_without_room(new_world, free, event):
    """A larger machine, of which none is free: refused, even if the user requested it (F10)."""
    world = running(new_world, "cost-to-finish")
    world.say(elapsed_s=60.0)
    world.backend.free = {LARGE.name: free}
    world.ask_move(target=Allocation(LARGE))

    world.owner(value_of_hour=0.0).enter()

    answer = next(item for item in world.log.read() if item.type in ("move-accepted", "move-refused"))
    assert answer.type == event
    assert ("free_nodes", world.handle.name) in world.backend.calls
    if event == "move-refused":
        assert world.state.live.phase == "started"
        assert answer.body.reason.endswith("needs 1 more nodes, 0 are free")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"slack_s": 900.0, "start_s": 60.0, "ticks_of_on_demand": {"spot": 3.25, "on_demand": 7.5}},
            [
                "900 s may still be lost; a start takes 60 s",
                "expected cost to finish by the table: 3.25 ticks of on-demand with spot now, 7.5 without",
            ],
        ),
        (
            {"phase": "loading", "phase_from": "announced", "next": "training", "lasts_s": 120.0},
            [
                "phase loading (announced)",
                "next phase, by earlier runs: training",
                "it lasts 120 s, by earlier runs",
            ],
        ),
        (
            {
                "memory_gib": {"least": 80.0, "peak": 91.0, "long_peak": 92.0},
                "vcpus": {"least": None, "peak": None, "long_peak": None},
                "time_to_out_of_memory_s": 300.0,
            },
            [
                "memory: peak 91 % of the machine's in the last 5 min, 92 % in 20 min",
                "memory rises steadily: full in 300 s",
            ],
        ),
    ],
)
def test_every_policy_s_numbers_are_told_in_words(numbers, words):
    """A user reads the reason, not a dictionary."""
    here = Allocation(SMALL)
    check = Check(Observation(here), Policy(), Decision("keep", here, "why", "p", numbers))

    assert explain(check).splitlines()[2:] == [f"  {line}" for line in words]


def test_the_command_tells_it_of_a_run(new_world, brought):
    """``envscaler explain`` reads what the sensor recorded."""
    world = running(new_world, "largest")
    looked(world)

    got = CliRunner().invoke(main, ["explain", world.prefix, "--store", world.store.url])

    assert got.exit_code == 0, got.output
    assert "move to scripted/node:cpu-2/on-demand: bigger is better" in got.output
