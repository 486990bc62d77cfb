"""What the owner runs after an attempt of a stage with a deadline has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.errors import CapacityError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.scaling.deadline import Hazard, Risk, Zone
from envscaler_airflow.store.availability import Seen, read_seen, write_seen
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import ScriptedBackend

DEMAND = Offer("scripted", "", "gpu-1", "on-demand", vcpus=8, memory_gib=32, usd_per_hour=3.0)
SPOT = replace(DEMAND, capacity_type="spot", usd_per_hour=1.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling: {policy: deadline}
"""


class Counting(ScriptedBackend):
    """A backend that knows what is free."""

    free = 1

    def free_nodes(self, offers, *, without=None):
        """The same number of spot machines for each offer."""
        return {offer.name: self.free if offer.capacity_type == "spot" else 9 for offer in offers}


def begun(new_world, backend, deadline_s=20 * 3600.0):
    """A run with a deadline, with its first attempt on spot."""
    world = new_world((DEMAND, SPOT), spec=SPEC, backend=backend)
    owner = world.owner()
    owner.owned.stage = replace(owner.owned.stage, strategy="deadline", deadline_s=deadline_s)
    return world, owner, owner.enter()


def lose(world, hours=2.0, step=200):
    """Train for *hours*, save, and lose the machine."""
    world.clock.advance(hours * 3600.0)
    name = world.save(step)
    trained = hours * 3600.0 - 60.0
    world.say(step=step, checkpoint=name, elapsed_s=trained, first_step_s=1.0, save_s=0.0)
    world.backend.lose(world.handle)


def test_waits_for_spot_that_is_away_and_takes_it_when_it_is_back(new_world):
    """A loss with eight hours of slack: nothing runs, and the market is checked every two minutes."""
    world, owner, waiting = begun(new_world, Counting)
    lose(world)
    world.backend.free = 0

    waiting = owner.resume(world.watch(waiting).poll())

    assert world.state.live is None
    assert waiting.watching.backoff_s == pytest.approx(120.0)
    assert "may still be lost" in waiting.reason
    world.clock.advance(1800.0)
    world.backend.free = 1
    owner.resume(replace(world_wake(), kind="backoff"))
    assert world.state.live.allocation.offer == SPOT


def world_wake():
    """What a watcher reports."""
    from envscaler_airflow.owner.stage import Wake

    return Wake("status")


def test_buys_on_demand_when_no_slack_is_left(new_world):
    """Eight hours of work left, and eight hours to the deadline."""
    world, owner, waiting = begun(new_world, Counting, deadline_s=10.1 * 3600.0)
    lose(world)
    world.backend.free = 0

    owner.resume(world.watch(waiting).poll())

    assert world.state.live.allocation.offer == DEMAND


def test_buys_on_demand_when_the_first_launch_is_refused(new_world):
    """Nothing is measured, so what may be lost is unknown."""
    world = new_world((DEMAND, SPOT), spec=SPEC)
    owner = world.owner()
    owner.owned.stage = replace(owner.owned.stage, strategy="deadline", deadline_s=36_000.0)
    world.backend.fail_next("submit", CapacityError("InsufficientInstanceCapacity"))

    owner.enter()

    assert world.state.live.allocation.offer == DEMAND


def test_losses_of_spot_never_end_a_stage_that_has_time(new_world):
    """Six machines are lost before a step: on-demand runs in the end, and the run did not fail."""
    world, owner, waiting = begun(new_world, Counting)
    for _ in range(6):
        world.clock.advance(300.0)
        world.backend.lose(world.handle)
        waiting = owner.resume(world.watch(waiting).poll())
        while world.state.live is None:
            world.clock.advance(waiting.watching.backoff_s)
            waiting = owner.resume(replace(world_wake(), kind="backoff"))

    assert world.state.status == "active"


def test_what_was_seen_outlives_the_run(new_world):
    """The record of the offer has the launch that came and its loss."""
    world, owner, waiting = begun(new_world, Counting)
    lose(world)
    world.backend.free = 0
    owner.resume(world.watch(waiting).poll())

    seen = read_seen(world.store, SPOT.name)

    assert seen.zone.is_up is False
    assert seen.at == pytest.approx(world.clock.time(), abs=1.0)
    assert seen.zone.belief != Hazard().regimes


def test_a_record_that_cannot_be_used_counts_as_none(new_world):
    """Torn, of another number of regimes, poisoned, or from the future."""
    world = new_world((DEMAND, SPOT), spec=SPEC)
    name = "offer"
    good = Seen(Risk(Hazard(), 600.0).zone(name, 1.0), 5.0)
    write_seen(world.store, name, good)
    assert read_seen(world.store, name) == good
    for zone in (Zone(name, 1.0, belief=(1.0,)), Zone(name, 1.0, belief=(2.0, *Hazard().regimes[1:]))):
        write_seen(world.store, name, Seen(zone, 5.0))
        assert read_seen(world.store, name) is None
    assert Seen(good.zone, 5000.0).since(100.0) is None
    assert Run(world.store, world.prefix).events.load().number == 0
