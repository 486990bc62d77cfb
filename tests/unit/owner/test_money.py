"""No crash, silence or long attempt spends more than the budget, or spends it for nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from envscaler_agent.protocol import Progress, Status
from envscaler_airflow.errors import BackendError, BudgetError, RunFailedError
from envscaler_airflow.owner import facts, limits
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import AttemptState
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ManualClock
from envscaler_airflow.testing.scripted_backend import cpu_offer

SPEC_OF_TWO = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
num_nodes: 2
entrypoint: [python, train.py]
checkpoint: {every: 10m}
"""


def test_a_long_attempt_is_drained_before_the_budget_is_spent(world):
    """$0.05 an hour, $0.05 in all: a check of 30 s, a save of 20 and a drain of 30 fit (A6) (feature G2)."""
    owner = world.owner(budget_usd=0.05)
    watch = world.watch(owner.enter())
    world.say(checkpoint_s=20.0)
    before = [watch.poll()]
    world.clock.advance(3510)
    before.append(watch.poll())
    world.clock.advance(31)

    wake = watch.poll()
    owner.resume(wake)

    assert before == [None, None]
    assert wake.detail == "the budget is spent"
    assert world.control().action == "drain"


def test_a_clear_starts_no_attempt_that_would_be_drained_at_once(world):
    """58 of 60 minutes are spent and a drain needs more: the cleared run fails again (A6) (feature G2)."""
    owner = world.owner(budget_usd=0.05)
    owner.enter()
    world.say(checkpoint_s=20.0)
    world.clock.advance(3541)
    owner.resume(Wake("status"))
    world.leave()
    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))

    with pytest.raises(BudgetError, match="starting, saving and ending alone may cost"):
        world.owner(budget_usd=0.05, max_tries=5).enter()

    assert len(world.state.attempts) == 1


def test_a_cloud_that_bills_whole_minutes_is_drained_by_those(new_world):
    """3,421 s on Lambda are 58 minutes; a check, a save, a drain and one more minute make an hour."""
    world = new_world((replace(cpu_offer(1, usd_per_hour=0.05), cloud="lambda"),))
    owner = world.owner(budget_usd=0.05)
    watch = world.watch(owner.enter())
    world.say(checkpoint_s=20.0)
    world.clock.advance(3419)
    before = watch.poll()
    world.clock.advance(30)

    wake = watch.poll()
    owner.resume(wake)

    assert (before, wake.detail) == (None, "the budget is spent")
    assert world.state.live.stop_reason == "budget"


def test_a_run_is_reported_and_counted_as_its_cloud_bills(new_world):
    """61 s on Lambda at $1 an hour: two minutes, while it runs, in the report, and for its intent alone."""
    world = new_world((replace(cpu_offer(1, usd_per_hour=1.0), cloud="lambda"),))
    owner = world.owner()
    owner.enter()
    world.say()
    world.clock.advance(61)
    live = world.state.live

    metered = facts.spent_usd(world.state, world.backend, now=world.clock.time())
    at_most = facts._most_usd(live, now=live.intended_at + 61)
    world.succeed()
    report = owner.resume(Wake("status")).report

    assert [metered, at_most, report.bill.usd] == pytest.approx([1 / 30] * 3)


def test_what_earlier_attempts_cost_is_gone_from_the_budget(world):
    """Half an hour on the first machine leaves half an hour for the second."""
    owner = world.owner(budget_usd=0.05)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(1800)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    watch = world.watch(owner.resume(Wake("backoff")))
    world.say()
    world.clock.advance(1700)
    early = watch.poll()
    world.clock.advance(31)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_a_triggerer_that_restarts_does_not_begin_the_bill_again(world):
    """The watch is restored from serialized arguments after 50 minutes; ten more and the budget is spent."""
    waiting = world.owner(budget_usd=0.05).enter()
    world.say()
    world.clock.advance(3000)
    waiting = type(waiting)(Watching.from_dict(waiting.watching.to_dict()), waiting.reason)
    watch = world.watch(waiting)
    early = watch.poll()
    world.clock.advance(600)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_a_bill_that_cannot_be_read_still_ends(world):
    """The backend does not report the usage: the watcher's own hour counts."""
    watch = world.watch(world.owner(budget_usd=0.05).enter())
    for _ in range(2):
        world.backend.fail_next("usage", BackendError("down", transient=True))
    world.clock.advance(3529)
    early = watch.poll()
    world.clock.advance(30)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_an_end_whose_bill_is_unknown_counts_at_most_its_time_and_never_nothing(world):
    """An hour for $0.05 without usage data: the report says unknown, the budget of $0.05 is spent."""
    owner = world.owner(budget_usd=0.05)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    for _ in range(3):
        world.backend.fail_next("usage", BackendError("its times are gone"))

    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))

    ended = world.state.attempts[0].ended
    assert (ended.usd, ended.usage) == (None, None)


@pytest.mark.parametrize(("budget_usd", "deadline_s"), [(0.10, 2 * 3600), (None, 30 * 86400)])
def test_a_machine_ends_by_itself_soon_after_its_money(world, monkeypatch, budget_usd, deadline_s):
    """$0.10 at $0.05 an hour last two hours; then it ends although no other process is alive (A6).

    Without a budget it ends after 30 days.
    """
    submit, deadlines = world.backend.submit, []

    def noted(request):
        deadlines.append(request.deadline_s)
        return submit(request)

    monkeypatch.setattr(world.backend, "submit", noted)
    world.owner(budget_usd=budget_usd).enter()

    assert deadlines == [deadline_s]


def test_without_a_budget_nobody_asks_for_the_bill(world):
    """It saves one call to the provider per check."""
    watch = world.watch(world.owner().enter())
    world.say()
    world.clock.advance(10_000)
    world.backend.calls.clear()

    watch.poll()

    assert "usage" not in [method for method, _ in world.backend.calls]


def test_a_refusal_for_good_ends_the_run_after_five(new_world):
    """Forbidden is not out of stock: waiting does not help, so the retries end."""
    world = new_world((cpu_offer(1),))
    owner = world.owner()
    for _ in range(5):
        world.backend.fail_next("submit", BackendError("forbidden", status=403))

    owner.enter()
    for _ in range(3):
        owner.resume(Wake("backoff"))
    with pytest.raises(RunFailedError, match="forbidden"):
        owner.resume(Wake("backoff"))

    assert len(world.state.attempts) == 5


def test_many_looks_at_a_running_attempt_add_no_event(world):
    """Events contain only changes of state."""
    owner = world.owner()
    owner.enter()
    world.say()
    before = world.state.number
    for _ in range(300):
        owner.resume(Wake("status"))

    assert world.state.number == before


@pytest.mark.parametrize(
    ("offer", "seconds"),
    [
        (cpu_offer(1, usd_per_hour=36.0), 30 + 10 + 30),
        (replace(cpu_offer(1, usd_per_hour=36.0), cloud="gcp"), 30 + 10 + 30 + 60),
        (replace(cpu_offer(1, usd_per_hour=36.0), cloud="lambda"), 30 + 10 + 30 + 60),
    ],
)
def test_the_drain_begins_when_the_rest_of_the_budget_is_just_enough_for_it(offer, seconds):
    """A cent a second: a check, a save, a drain, and the cloud's minimum charge (A6)."""
    reserve = limits.reserve_usd(Allocation(offer), check_s=30.0, checkpoint_s=None)

    assert reserve == pytest.approx(0.01 * seconds)


def test_what_an_attempt_measured_of_itself_counts_for_its_drain():
    """A save of 100 s where the last one took 5, and 13 steps of 2 s until it begins (A6)."""
    said = Status(checkpoint_s=100.0, progress=Progress(step_time_s=2.0))
    place = Allocation(cpu_offer(1, usd_per_hour=36.0), 2)

    reserve = limits.reserve_usd(place, check_s=60.0, checkpoint_s=5.0, status=said)

    assert reserve == pytest.approx(0.02 * (60 + 100 + 26 + 30))


def test_a_trigger_that_looks_seldom_drains_earlier_and_the_owner_agrees(world):
    """Checks five minutes apart: the wake carries the interval, and the owner acts on it (A6)."""
    owner = world.owner(budget_usd=0.05)
    waiting = owner.enter()
    watch = AttemptWatcher(
        run=Run(world.store, world.prefix, clock=world.clock.time),
        backend=world.backend,
        watching=waiting.watching,
        monotonic=world.clock.monotonic,
        poll_s=300.0,
    )
    world.say()
    world.clock.advance(3600 - 340)

    wake = watch.poll()
    owner.resume(Wake.from_dict(wake.to_dict()))

    assert (wake.detail, wake.check_s) == ("the budget is spent", 300.0)
    assert world.state.live.stop_reason == "budget"
    assert "saving and ending costs up to $0.00472" in world.state.live.stop_detail


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_an_owner_whose_own_clock_is_an_hour_off_stops_nothing_and_everything_in_time(
    new_world, monkeypatch, off_s
):
    """Half the budget is left; then it is spent: by the store's time, not by this machine's clock (A6)."""
    true, machines = time.time, ManualClock(time=time.time())
    monkeypatch.setattr(time, "time", lambda: true() + off_s)
    world = new_world()
    world.clock = SimpleNamespace(time=None, monotonic=time.monotonic)
    world.backend.clock = machines
    owner = world.owner(budget_usd=0.05)
    owner.enter()
    world.say()
    machines.advance(1800)
    owner.resume(Wake("status"))
    half = world.state.live.phase
    machines.advance(1800)
    owner.resume(Wake("status"))

    assert half == "started"
    assert world.state.live.stop_reason == "budget"
    assert world.state.begun_at == pytest.approx(true(), abs=60)


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_provider_that_tells_its_own_time_is_billed_by_it_alone(off_s):
    """The store counted 50 minutes, the provider an hour: the bill uses the provider's time (A6)."""
    attempt = AttemptState(1, 1, Allocation(cpu_offer(1, usd_per_hour=1.0)), phase="started", started_at=1e6)
    at = 1e6 + off_s
    held = [UsageInterval(0, at, None, now=at + 3600)]

    assert facts.usd_of(attempt, held, now=1e6 + 3000) == pytest.approx(1.0)


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_machine_whose_clock_is_an_hour_off_is_neither_lost_nor_billed_wrong(world, off_s):
    """Half an hour at $0.05 is $0.025 while it runs and after its end, within the budget of $0.03."""
    theirs = ManualClock(time=world.clock.time() + off_s)
    world.backend.clock = theirs
    owner = world.owner(budget_usd=0.03)
    waiting = owner.enter()
    watch = world.watch(waiting)
    world.say()
    early = watch.poll()
    for clock in (world.clock, theirs):
        clock.advance(1800)
    world.say()

    late = watch.poll()
    owner.resume(Wake("status"))
    spent = facts.spent_usd(world.state, world.backend, now=world.clock.time())
    world.succeed()
    report = owner.resume(Wake("status")).report

    assert (early, late) == (None, None)
    assert spent == pytest.approx(0.025)
    assert report.bill.usd == pytest.approx(0.025)


def test_a_budget_that_comes_later_buys_no_attempt_of_unknown_price(new_world, caplog):
    """Cleared with a budget: the attempt continues with a warning about the budget; no new one starts."""
    world = new_world((replace(cpu_offer(1), usd_per_hour=None),))
    world.owner().enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(60)
    owner = world.owner(budget_usd=5.0)
    owner.enter()
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))

    with pytest.raises(BudgetError, match=r"a budget of \$5.00 cannot be kept"):
        owner.resume(Wake("backoff"))

    assert any("a budget of $5.00 cannot be kept" in line for line in told)
    assert len(world.state.attempts) == 1


def test_what_ran_beside_a_node_that_never_came_again_is_not_free(new_world):
    """Ten hours of node 0, whose Job a user deleted while node 1 was refused: its times are lost."""
    world = new_world(spec=SPEC_OF_TWO)
    world.owner().enter()
    began = world.clock.time()
    price = world.state.live.allocation.usd_per_hour
    owner = world.owner(budget_usd=1000.0)
    owner.enter()
    world.clock.advance(36000)
    world.backend.set_state(world.handle, "lost", node=0, reason="lost")
    world.backend.set_state(world.handle, "ended", node=1, reason="capacity", detail="full")
    world.backend.usage = lambda _handle: (UsageInterval(0, began, began),)

    owner.resume(Wake("status"))

    ended = world.state.attempts[0].ended
    assert (ended.outcome, ended.missing_nodes, ended.usd) == ("not-started", (1,), None)
    spent = facts.spent_usd(world.state, world.backend, now=world.clock.time())
    assert spent == pytest.approx(10 * price)
