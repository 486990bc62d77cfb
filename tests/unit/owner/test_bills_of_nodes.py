"""Cost of nodes that started later than others: each counts from its own start, even if a clock is wrong."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import replace
from pathlib import Path

import pytest

from envscaler_agent.protocol import Ended
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.report import run_bill, run_report
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.owner.usage import until_now, with_removed
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import AttemptState, Handle, RunState
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.run.state import Before
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.testing.scripted_backend import cpu_offer

HOUR = 3600.0
KEY = RunKey("deployment", "dag", "run", "train")
OFFER = cpu_offer(1, usd_per_hour=1.0)


def attempt(nodes=2, started_at=1e6):
    """Return an attempt that started at *started_at* by the owner's clock."""
    return AttemptState(1, 1, Allocation(OFFER, nodes), phase="started", started_at=started_at)


@pytest.mark.parametrize("off_s", [0.0, HOUR, -HOUR])
def test_a_node_that_was_made_again_is_paid_from_then(off_s):
    """100 h; node 1 was lost after 99 h and recreated at once: 200 node-hours, not 299."""
    at = 1e6 + off_s
    held = [
        UsageInterval(0, at, None),
        UsageInterval(1, at, at + 99 * HOUR),
        UsageInterval(1, at + 99 * HOUR, None),
    ]

    assert facts.usd_of(attempt(), held, now=1e6 + 100 * HOUR) == pytest.approx(200.0)


@pytest.mark.parametrize("off_s", [0.0, HOUR, -HOUR])
def test_nodes_that_came_in_place_are_paid_from_then(off_s):
    """Two nodes for 10 h, two more for the last hour: 22 node-hours."""
    at = 1e6 + off_s
    late = at + 9 * HOUR
    held = [UsageInterval(node, at if node < 2 else late, None) for node in range(4)]

    assert facts.usd_of(attempt(4), held, now=1e6 + 10 * HOUR) == pytest.approx(22.0)


@pytest.mark.parametrize("off_s", [0.0, HOUR, -HOUR])
@pytest.mark.parametrize("end_h", [None, 11])
def test_what_waited_for_its_node_is_paid_from_that_on(off_s, end_h):
    """Ten hours in a queue, an hour on a machine: one node-hour, both while it runs and after it ended."""
    made = dt.datetime.fromtimestamp(1e6 + off_s, dt.UTC).isoformat()
    queued = replace(attempt(1), handle=Handle("scripted", "a", {"created": made}))
    held = [UsageInterval(0, 1e6 + off_s + 10 * HOUR, end_h and 1e6 + off_s + end_h * HOUR)]

    assert facts.usd_of(queued, held, now=1e6 + 11 * HOUR) == pytest.approx(1.0)


@pytest.mark.parametrize("off_s", [0.0, HOUR, -HOUR])
def test_what_waited_and_was_changed_in_place_is_paid_by_its_prices(off_s):
    """Ten hours in a queue, ten hours at $1 on two nodes, then an hour at $2 on one."""
    made = dt.datetime.fromtimestamp(1e6 + off_s, dt.UTC).isoformat()
    dear = replace(OFFER, instance_type="cpu-2", usd_per_hour=2.0)
    before = Before(Allocation(OFFER, 2), 1e6 + 20 * HOUR)
    live = replace(attempt(1), allocation=Allocation(dear, 1), earlier=(before,))
    live = replace(live, handle=Handle("scripted", "a", {"created": made}))
    held = with_removed([UsageInterval(0, 1e6 + off_s + 10 * HOUR, None)], live)
    rows = tuple((one.node, one.start, one.end or 1e6 + off_s + 21 * HOUR) for one in held)
    end = AttemptEnded(generation=1, attempt=1, outcome="succeeded", usage=rows)
    over = replace(live, phase="ended", ended=end)
    told = run_report(RunState(generation=1, attempts=(over,)), now=1e6 + 21 * HOUR)

    assert facts.usd_of(live, held, now=1e6 + 21 * HOUR) == pytest.approx(22.0)
    assert told.bill.usd == pytest.approx(22.0)


def test_a_closed_interval_is_as_long_as_the_provider_says():
    """The owner's clock does not matter."""
    found = until_now([UsageInterval(0, 5.0, 65.0)], started_at=1e6, handle=None, now=2e6)

    assert [item.end - item.start for item in found] == [60.0]


def test_prices_change_at_the_owner_s_time_though_the_provider_s_clock_is_off():
    """Ten hours at $1, then changed in place to $2 for an hour; the provider's clock is an hour behind."""
    dear = replace(OFFER, instance_type="cpu-2", usd_per_hour=2.0)
    before = Before(Allocation(OFFER, 1), 1e6 + 10 * HOUR)
    live = replace(attempt(1), allocation=Allocation(dear, 1), earlier=(before,))
    held = [
        UsageInterval(0, 1e6 - HOUR, 1e6 + HOUR),
        UsageInterval(0, 1e6 + HOUR, None),
    ]

    assert facts.usd_of(live, held, now=1e6 + 11 * HOUR) == pytest.approx(12.0)


def test_what_was_deleted_with_its_times_is_not_free(world):
    """A user deletes the Job after ten hours: the bill is unknown, and the budget counts ten hours."""
    owner = world.owner(budget_usd=100.0)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(10 * HOUR)
    world.backend.lose(world.handle)
    made = world.clock.time() - 10 * HOUR
    world.backend.usage = lambda _handle: (UsageInterval(0, made, made),)

    owner.resume(Wake("status"))

    [attempt] = world.state.attempts
    assert (attempt.outcome, attempt.end.usd, attempt.end.usage) == ("lost", None, None)
    price = attempt.allocation.usd_per_hour
    assert facts.spent_usd(world.state, world.backend, now=world.clock.time()) == pytest.approx(10 * price)


@pytest.mark.parametrize(
    ("lasted_s", "claims", "is_free"), [(0.9, 1, True), (2.0, 1, True), (2.1, 1, False), (0.9, 2, False)]
)
def test_what_ran_for_less_than_a_second_is_billed_as_the_provider_says(world, lasted_s, claims, is_free):
    """Its owner sees it an hour later: the node reported its end at once, so nothing was deleted (D5)."""
    owner = world.owner()
    owner.enter()
    world.say(ended=Ended(exit_code=1, reason="failed"))
    said = world.store.read(f"{KEY.prefix}/status/g1-a1-n0-c1.json")
    folder = Path(world.store.url.removeprefix("file://")) / KEY.prefix
    for number in range(1, claims + 1):
        for name, at in (
            (f"claims/g1-a1-n0-{number:06d}.json", 0),
            (f"status/g1-a1-n0-c{number}.json", lasted_s),
        ):
            world.store.write(f"{KEY.prefix}/{name}", said)
            os.utime(folder / name, (1e6 + at, 1e6 + at))
    world.backend.end(world.handle, exit_code=1, reason="failed")
    made = world.clock.time()
    world.backend.usage = lambda _handle: (UsageInterval(0, made, made),)
    world.clock.advance(HOUR)

    owner.resume(Wake("status"))

    [attempt] = world.state.attempts
    assert (attempt.end.usd == 0, attempt.end.usage_is_lower_bound) == (is_free, None if is_free else True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_reported_no_end_proves_nothing(world, nodes):
    """Its only status came with its claim, and it may have run for hours after that (D5)."""
    owner = world.owner()
    owner.enter()
    world.say()
    folder = Path(world.store.url.removeprefix("file://")) / KEY.prefix
    world.store.write(f"{KEY.prefix}/claims/g1-a1-n0-000001.json", b"{}")
    for name in ("claims/g1-a1-n0-000001.json", "status/g1-a1-n0-c1.json"):
        os.utime(folder / name, (1e6, 1e6))
    live = replace(world.state.live, allocation=Allocation(OFFER, nodes))
    made = world.clock.time()
    world.clock.advance(HOUR)

    none = (UsageInterval(0, made, made),)

    assert facts.is_missing(none, owner.owned.run, live, now=world.clock.time())


def test_what_was_deleted_with_its_times_is_billed_by_its_statuses(world):
    """Two pods had the node, 4 h and 2.5 h by the store's dates; the budget still counts 10 h (D5)."""
    owner = world.owner(budget_usd=100.0)
    owner.enter()
    world.say(checkpoint=world.save(10))
    folder = Path(world.store.url.removeprefix("file://")) / KEY.prefix
    hours = {"claims/g1-a1-n0-000001.json": 0, "status/g1-a1-n0-c1.json": 4}
    hours |= {"claims/g1-a1-n0-000002.json": 5, "status/g1-a1-n0-c2.json": 7.5}
    for name, hour in hours.items():
        if not (folder / name).exists():
            world.store.write(f"{KEY.prefix}/{name}", b"{}")
        os.utime(folder / name, (1e6 + hour * HOUR, 1e6 + hour * HOUR))
    world.clock.advance(10 * HOUR)
    world.backend.lose(world.handle)
    made = world.clock.time() - 10 * HOUR
    world.backend.usage = lambda _handle: (UsageInterval(0, made, made),)

    owner.resume(Wake("status"))

    [attempt] = world.state.attempts
    price = attempt.allocation.usd_per_hour
    bill = run_bill(world.state, now=world.clock.time())
    assert [end - start for _node, start, end in attempt.end.usage] == [4 * HOUR, 2.5 * HOUR]
    assert (bill.usd, bill.known_usd) == (None, pytest.approx(6.5 * price))
    assert facts.spent_usd(world.state, world.backend, now=world.clock.time()) == pytest.approx(10 * price)
