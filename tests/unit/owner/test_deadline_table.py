"""The table of a deadline is built when there is time, stored, and looked up when there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.owner import policies
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.scaling import Check, Policy, StartFacts, replay
from envscaler_airflow.scaling.deadline import Table
from envscaler_airflow.scaling.deadline.policy import DEADLINE, job_of
from envscaler_airflow.store.run import Run

DEMAND = Offer("scripted", "", "gpu-1", "on-demand", vcpus=8, memory_gib=32, usd_per_hour=3.0)
SPOT = replace(DEMAND, capacity_type="spot", usd_per_hour=1.0)
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1}}
entrypoint: [python, train.py]
checkpoint: {every: 10m}
scaling: {policy: deadline, warmup: 1s, stabilization: 1s, cooldown: 1s, min_epochs_between: 0}
"""


@pytest.fixture
def world(new_world):
    """A run with a deadline that has not begun."""
    return new_world((DEMAND, SPOT), spec=SPEC)


def owner_of(world, deadline_s=4 * 3600.0):
    """Return an owner whose stage has a deadline."""
    owner = world.owner()
    owner.owned.stage = replace(owner.owned.stage, strategy="deadline", deadline_s=deadline_s)
    return owner


def publish(store, prefix, job):
    """Do what an owner does at a start that finds *job* on the market."""
    offers = (replace(DEMAND, usd_per_hour=job.on_demand_usd), replace(SPOT, usd_per_hour=job.spot_usd))
    facts = StartFacts(
        Allocation(SPOT), job.overhead_s, deadline_left_s=job.ticks * job.gap_s, offers=lambda: offers
    )
    policies.prepare(Run(store, prefix), DEADLINE, Policy("deadline"), facts)


def present(world):
    """Return the name of the current table."""
    return policies.present_table(Run(world.store, world.prefix), "deadline")[0]


def test_the_table_is_there_when_the_attempt_runs(world):
    """Four hours are 24 ticks of ten minutes; the owner builds the table, every other process reads it."""
    owner_of(world).enter()

    data = policies.read_table(Run(world.store, world.prefix), "deadline", present(world))

    assert Table.from_bytes(data).ticks[-1] == 24


def test_a_table_serves_every_later_start_of_the_same_kind(world):
    """Less time left needs no new table; half the price, starts twice as long, or more time do."""
    job = job_of(Allocation(SPOT), (DEMAND, SPOT), deadline_s=4 * 3600.0, start_s=60.0)
    publish(world.store, world.prefix, job)
    written = []
    write = world.store.write

    class Counted:
        def __getattr__(self, name):
            return getattr(world.store, name)

        def write(self, name, data):
            written.append(name)
            write(name, data)

    changes = ({}, {"ticks": 12}, {"spot_usd": 1.01}, {"spot_usd": 0.5}, {"overhead_s": 120.0}, {"ticks": 48})
    for change in changes:
        written.append(str(change))
        job = replace(job, **change)  # on top of those before: each is a new fact
        publish(Counted(), world.prefix, job)

    built = "a table"
    names = ["a table" if name.endswith(".bin") else name for name in written if not name.endswith(".json")]
    assert names == [
        "{}", "{'ticks': 12}", "{'spot_usd': 1.01}", "{'spot_usd': 0.5}", built,
        "{'overhead_s': 120.0}", built, "{'ticks': 48}", built,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offers", "deadline_s"),
    [
        ((DEMAND,), 14_400.0),
        ((DEMAND, replace(SPOT, usd_per_hour=None)), 14_400.0),
        ((DEMAND, SPOT), -1.0),
        ((DEMAND, SPOT), 1e9),
    ],
)
def test_there_is_no_table_of_what_cannot_be_told(offers, deadline_s):
    """One market, an unknown price, or a deadline that has passed or is years away."""
    assert job_of(Allocation(DEMAND), offers, deadline_s=deadline_s, start_s=60.0) is None


def test_a_torn_table_is_none(world):
    """The policy then uses its rule of two starts."""
    name = "tables/deadline-0123456789abcdef.bin"
    world.store.write(f"{world.prefix}/{name}", b"torn")
    world.store.write(f"{world.prefix}/tables/deadline.json", b"torn")

    assert present(world) is None
    for asked in (name, "../other/tables/x"):
        with pytest.raises(ProtocolError, match="expected a table of policy deadline"):
            policies.read_table(Run(world.store, world.prefix), "deadline", asked)


def test_the_sensor_decides_by_the_table(new_world):
    """On demand with hours to spare: the numbers are ticks of on-demand, which only the table provides."""
    world = new_world((DEMAND, SPOT), spec=SPEC + "capacity: on-demand\n")
    owner_of(world, deadline_s=10 * 3600.0).enter()
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        candidates=(Allocation(DEMAND), Allocation(SPOT)),
        monotonic=world.clock.monotonic,
    )
    for step in range(1, 15):
        world.say(step=10 * step, elapsed_s=60.0 * step)
        world.clock.advance(60)
        check = watcher.snapshot().check

    ticks = check.decision.numbers["ticks_of_on_demand"]
    assert 0 < ticks["spot"] < ticks["on_demand"]
    assert (check.decision.action, check.decision.target) == ("move", Allocation(SPOT))


def test_a_check_names_its_table_and_is_decided_again_by_it(new_world):
    """Another table has become current since: replaying gives the recorded decision."""
    world = new_world((DEMAND, SPOT), spec=SPEC + "capacity: on-demand\n")
    owner_of(world, deadline_s=10 * 3600.0).enter()
    watcher = ScalingWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        candidates=(Allocation(DEMAND), Allocation(SPOT)),
        monotonic=world.clock.monotonic,
    )
    checks = []
    for step in range(1, 6):
        world.say(step=10 * step, elapsed_s=60.0 * step)
        world.clock.advance(60)
        checks.append(watcher.snapshot().check)
    job = job_of(Allocation(SPOT), (DEMAND, SPOT), deadline_s=36_000.0, start_s=3000.0)
    publish(world.store, world.prefix, job)

    again = [Check.from_dict(json.loads(json.dumps(check.to_dict()))) for check in checks]
    known = policies.policies_of(Run(world.store, world.prefix))

    assert checks[-1].observation.deadline_table != present(world)
    assert [replay(check, policies=known) for check in again] == [check.decision for check in checks]
