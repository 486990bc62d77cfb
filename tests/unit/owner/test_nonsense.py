"""Nonsensical requests and policies: the owner refuses them with a reason and the training continues."""

from __future__ import annotations

import threading

import pytest
from fakes.policies import bring, bring_propose, forgotten

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.owner import policies
from envscaler_airflow.owner.stage import Waiting, Wake
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run.event_bodies import Unknown, read_body
from envscaler_airflow.scaling import Observation, Policy, Proposal, Want
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import cpu_offer


def started(world):
    """An owner with a running attempt."""
    owner = world.owner()
    owner.enter()
    world.say(elapsed_s=60.0)
    return owner


OFFER, HERE = cpu_offer(2).to_dict(), Allocation(cpu_offer(1))
HUGE = {"current": {"offer": OFFER, "nodes": 1}, "elapsed_s": 10**400}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"target": None},
        {"target": 5},
        {"target": "scripted/cpu-2"},
        {"target": []},
        {"target": {"offer": 5, "nodes": 1}},
        {"target": {"offer": OFFER, "nodes": "many"}},
        {"target": {"offer": OFFER, "nodes": 10**30}},
        {"target": {"offer": OFFER | {"usd_per_hour": float("1e999")}, "nodes": 1}},
        {"target": {"offer": OFFER | {"vcpus": [1]}, "nodes": 1}},
        {"target": {"offer": OFFER, "nodes": 1, "rest": 7, "rest_nodes": 1}},
        {"target": Allocation(cpu_offer(2)).to_dict(), "from_attempt": 5},
        {"target": Allocation(cpu_offer(2)).to_dict(), "from_attempt": {"a": 1}},
        {"target": Allocation(cpu_offer(2)).to_dict(), "from_attempt": [None, None]},
        {"target": Allocation(cpu_offer(2)).to_dict(), "check": {"observation": 7}},
        {"target": Allocation(cpu_offer(2)).to_dict(), "check": {"observation": {"current": "x" * 9}}},
        {"target": Allocation(cpu_offer(2)).to_dict(), "check": {"observation": HUGE}},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_read_is_refused(world, body):
    """Write access to the run's folder is not enough to stop a training."""
    owner = started(world)
    try:
        request = world.log.append_request(Unknown("move-requested", body), actor=None)
    except ProtocolError:
        return  # it cannot be written at all

    waiting = owner.resume(Wake("request"))

    assert isinstance(waiting, Waiting)
    assert world.answer(request).type == "move-refused"
    assert world.state.live.phase == "started"


@pytest.fixture(autouse=True)
def _as_before():
    """Isolate each test from the policies of the others."""
    with forgotten():
        yield


def raises(_seen, _policy):
    """A policy with a bug."""
    raise ZeroDivisionError("division by zero")


def wants_what_was_not_asked(_seen, _policy):
    """A policy that returns what no one requested."""
    return Proposal((Want(Allocation(cpu_offer(1024)), "more"),), "more")


@pytest.mark.parametrize(
    "policy",
    [
        raises,
        lambda _s, _p: None,
        lambda _s, _p: "move",
        lambda _s, _p: Proposal(("x",)),
        lambda _s, _p: Proposal(None),
        lambda _s, _p: Proposal((), "r", {"mood": float("nan")}),
        lambda _s, _p: Proposal((), "r", {"mood": object()}),
        wants_what_was_not_asked,
        7,
    ],
    ids=["raises", "none", "text", "no wants", "no tuple", "nan", "no json", "not asked", "no function"],
)
def test_a_policy_of_another_package_that_is_broken_moves_nothing(world, monkeypatch, policy):
    """The owner's execution refuses; the sensor's check keeps the machine, with the reason."""
    text = world.spec_path.read_text().replace("policy: cost-to-finish", "policy: theirs")
    world.spec_path.write_text(text)
    bring_propose(monkeypatch, theirs=policy)
    owner = started(world)
    body = {"target": Allocation(cpu_offer(2)).to_dict(), "from_attempt": [1, 1]}
    request = world.log.append_request(read_body("move-requested", body), actor=None)

    waiting = owner.resume(Wake("request"))

    assert isinstance(waiting, Waiting)
    assert world.answer(request).type == "move-refused"
    assert world.state.live.phase == "started"


def test_a_policy_that_hangs_holds_up_neither_the_owner_nor_many_threads(world, monkeypatch):
    """An execution of the owner that waits for ever would renew no lease."""
    door, calls = threading.Lock(), []
    door.acquire()

    def hangs(seen, _policy):
        calls.append(seen)
        with door:
            pass

    monkeypatch.setattr(policies, "LIMIT_S", 0.05)
    monkeypatch.setattr(policies, "MOST_AT_ONCE", 2)
    bring_propose(monkeypatch, theirs=hangs)
    propose = policies.policies_of(Run(world.store, world.prefix))["theirs"].propose
    said = [propose(None, None).reason for _ in range(4)]
    door.release()

    told = "policy 'theirs' (theirs:policy)"
    assert said[:2] == [f"{told} did not answer within 0.05 s"] * 2
    assert said[2:] == [f"{told} has not come back from 2 calls"] * 2
    assert len(calls) == 2


def test_a_policy_whose_package_is_broken_stops_no_other(world, monkeypatch):
    """It cannot be imported: the owner judges a stage with a built-in policy as before."""

    def load():
        raise ImportError("libcuda.so.1")

    bring(monkeypatch, theirs=load)
    owner = started(world)
    request = world.ask_move(2)

    owner.resume(Wake("request"))

    assert world.answer(request).type == "move-accepted"
    said = policies.policies_of(Run(world.store, world.prefix))["theirs"].propose(Observation(HERE), Policy())
    assert said == Proposal(
        reason="policy 'theirs' (theirs:policy) cannot be loaded: ImportError('libcuda.so.1')"
    )


def test_a_policy_that_is_not_installed_here_is_a_refusal(world):
    """The worker lacks the package that the submitting machine had."""
    world.spec_path.write_text(
        world.spec_path.read_text().replace("policy: cost-to-finish", "policy: theirs")
    )
    owner = started(world)
    request = world.log.append_request(
        read_body("move-requested", {"target": Allocation(cpu_offer(2)).to_dict()}), actor=None
    )

    owner.resume(Wake("request"))

    refused = world.answer(request)
    assert (refused.type, "'theirs' is not installed" in refused.body.reason) == ("move-refused", True)
