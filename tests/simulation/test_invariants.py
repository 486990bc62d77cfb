"""Each invariant is broken by hand once: a check that cannot fail finds nothing."""

from __future__ import annotations

import pytest

from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.run import Actor, Event
from envscaler_airflow.run import event_bodies as bodies
from tests.simulation.cloud import SimCloud
from tests.simulation.cloud_client import SimBackend
from tests.simulation.invariants import Invariants
from tests.simulation.kernel import Machine, Violation, World
from tests.simulation.store import SimStore

RUN = "deployment/dag/run/train/-1"
FIRST = Actor("ti-1", try_number=1, max_tries=3, life="one")
HERE, THERE = Machine("here"), Machine("there")


class Watched:
    """A store that is watched."""

    def __init__(self):
        """Begin empty."""
        world = World(1)
        self.store = SimStore(world)
        cloud = SimCloud(
            world, self.store, offers=(), node_type=None, replaces=False, backend_type=SimBackend
        )
        self.invariants = Invariants(world, self.store, cloud, reap_every_s=3600.0)
        self.number = 0

    def put(self, name, data, *, machine=HERE, kind="create"):
        """Let a process on *machine* store *data*."""
        self.store.put(kind, f"{RUN}/{name}", data, None, machine)

    def event(self, body, actor=FIRST):
        """Append an event."""
        self.number += 1
        event = Event(self.number, body, "writer", self.store.now(), actor)
        self.put(f"events/{self.number:06d}.json", event.to_json())


@pytest.fixture
def watched():
    """A run in its first generation."""
    found = Watched()
    found.event(bodies.NewGeneration(generation=1, spec_hash="s"))
    return found


def test_an_event_that_is_overwritten_breaks_it(watched):
    """Numbers are created once (C3)."""
    with pytest.raises(Violation, match="overwritten or deleted"):
        watched.put("events/000001.json", b"{}", kind="write")


def test_a_number_that_is_none_breaks_it(watched):
    """NaN is in no file (C3)."""
    with pytest.raises(Violation, match="no-nan: "):
        watched.put("decisions/a-000001.jsonl", b'{"speed": NaN}')


def test_a_frozen_spec_with_another_content_breaks_it(watched):
    """The hash names one content (C3)."""
    watched.put("spec-0123456789abcdef.json", b"{}")

    with pytest.raises(Violation, match="frozen-spec: "):
        watched.put("spec-0123456789abcdef.json", b'{"name": "b"}', kind="write")


def test_two_machines_under_one_claim_break_it(watched):
    """A status, and a manifest (C3)."""
    watched.put("status/g1-a1-n0-c1.json", b"{}", kind="write")
    watched.put("checkpoints/g1-step-00000001-a1/manifest-c1.json", b"{}")

    for name in ("status/g1-a1-n0-c1.json", "checkpoints/g1-step-00000001-a1/manifest-c1.json"):
        with pytest.raises(Violation, match="one-claim: "):
            watched.put(name, b"{}", kind="write", machine=THERE)


def test_a_machine_that_claims_its_node_twice_breaks_it(watched):
    """Two machines may, one after the other (C3)."""
    watched.put("claims/g1-a1-n0-000001.json", b"{}")
    watched.put("claims/g1-a1-n0-000002.json", b"{}", machine=THERE)

    with pytest.raises(Violation, match="claims: here claims"):
        watched.put("claims/g1-a1-n0-000003.json", b"{}")


def test_an_event_of_another_try_than_the_owner_breaks_it(watched):
    """A zombie ends the run (C3)."""
    with pytest.raises(Violation, match="one-owner: event 2 failed"):
        watched.event(bodies.Failed(generation=1, reason="r"), Actor("ti-0", 0, 3, life="one"))


def test_a_result_without_an_output_breaks_it(watched):
    """It says that an output is stored, and none is (C3)."""
    uri = f"s3://simulated/{RUN}/outputs/g1-a1-c1/model"

    with pytest.raises(Violation, match="one-attempt: output model"):
        watched.event(bodies.Succeeded(generation=1, outputs={"model": uri}))


SMALL = Allocation(
    Offer("aws", "us-east-1", "small", "spot", 2.0, 8.0, usd_per_hour=0.5, price_source="test"), 1
)
CLEARED = Actor("ti-2", try_number=2, max_tries=4, life="one")


def test_a_stop_for_a_budget_that_is_hardly_spent_breaks_it():
    """At most half an hour at $0.50 of $10.00 (G7)."""
    watched = Watched()
    watched.event(bodies.NewGeneration(generation=1, spec_hash="s", budget_usd=10.0))
    watched.event(bodies.AttemptIntended(generation=1, attempt=1, allocation=SMALL))

    with pytest.raises(Violation, match=r"budget: .* of \$10.0000, at most \$0.25"):
        watched.event(bodies.AttemptStopping(generation=1, attempt=1, stop_reason="budget"))


def test_a_result_that_is_delivered_again_once_it_was_accepted_and_cleared_breaks_it(watched):
    """A person cleared the task, so it is trained again (G7)."""
    watched.invariants.was_cleared = lambda _before, _after: True
    uri = f"s3://simulated/{RUN}/outputs/g1-a1-c1/model"
    watched.event(bodies.AttemptIntended(generation=1, attempt=1, allocation=SMALL))
    watched.event(bodies.AttemptEnded(generation=1, attempt=1, outcome="succeeded"))
    watched.put("outputs/g1-a1-c1/model/weights", b"1")
    watched.event(bodies.Succeeded(generation=1, outputs={"model": uri}))
    watched.event(bodies.Delivered(generation=1))
    watched.event(bodies.Accepted(generation=1))

    with pytest.raises(Violation, match="accepted: event 7"):
        watched.event(bodies.NewOwner(reason="taken over"), CLEARED)
