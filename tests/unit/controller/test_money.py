"""No crash, no silence and no long attempt spends more than was given, or for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.backends.base import UsageInterval
from envscaler_airflow.controller import facts
from envscaler_airflow.controller.stage import Wake, Watching
from envscaler_airflow.errors import BackendError, BudgetError, RunFailedError
from envscaler_airflow.testing import ManualClock
from envscaler_airflow.testing.backend import cpu_offer

SPEC_OF_TWO = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
num_nodes: 2
entrypoint: [python, train.py]
checkpoint: {every: 10m}
"""


def test_a_long_attempt_is_stopped_when_the_budget_is_spent(world):
    """$0.05 an hour against $0.05: nothing happens for an hour, and the watch says so within 30 s."""
    owner = world.controller(budget_usd=0.05)
    watch = world.watch(owner.enter())
    world.say()
    before = [watch.poll()]
    world.clock.advance(3570)
    before.append(watch.poll())
    world.clock.advance(30)

    wake = watch.poll()
    owner.resume(wake)

    assert before == [None, None]
    assert wake.detail == "the budget is spent"
    assert world.control().action == "leave"


def test_what_earlier_attempts_cost_is_gone_from_the_budget(world):
    """Half an hour on the first machine leaves half an hour for the second."""
    owner = world.controller(budget_usd=0.05)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(1800)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    watch = world.watch(owner.resume(Wake("backoff")))
    world.say()
    world.clock.advance(1770)
    early = watch.poll()
    world.clock.advance(30)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_a_triggerer_that_restarts_does_not_begin_the_bill_anew(world):
    """The watch is made from its serialized arguments after 50 minutes; ten more and the money is gone."""
    waiting = world.controller(budget_usd=0.05).enter()
    world.say()
    world.clock.advance(3000)
    waiting = type(waiting)(Watching.from_dict(waiting.watching.to_dict()), waiting.reason)
    watch = world.watch(waiting)
    early = watch.poll()
    world.clock.advance(600)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_a_bill_that_cannot_be_read_still_ends(world):
    """The backend does not tell the usage: the watcher's own hour counts."""
    watch = world.watch(world.controller(budget_usd=0.05).enter())
    for _ in range(2):
        world.backend.fail_next("usage", BackendError("down", transient=True))
    world.clock.advance(3599)
    early = watch.poll()
    world.clock.advance(30)

    assert early is None
    assert watch.poll().detail == "the budget is spent"


def test_an_end_whose_bill_is_unknown_counts_at_most_its_time_and_never_nothing(world):
    """An hour for $0.05 that nobody metered: the report says unknown, the budget of $0.05 is spent."""
    owner = world.controller(budget_usd=0.05)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    for _ in range(2):
        world.backend.fail_next("usage", BackendError("down", transient=True))

    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))

    ended = world.state.attempts[0].ended
    assert "usd" not in ended
    assert "usage" not in ended


@pytest.mark.parametrize(("budget_usd", "deadline_s"), [(0.10, 2 * 3600 + 3600), (None, 30 * 86400)])
def test_a_machine_ends_by_itself_soon_after_its_money(world, monkeypatch, budget_usd, deadline_s):
    """$0.10 at $0.05 an hour last two hours; an hour later it goes though everybody else is dead.

    Without a budget it goes after 30 days.
    """
    submit, deadlines = world.backend.submit, []

    def noted(request):
        deadlines.append(request.deadline_s)
        return submit(request)

    monkeypatch.setattr(world.backend, "submit", noted)
    world.controller(budget_usd=budget_usd).enter()

    assert deadlines == [deadline_s]


def test_without_a_budget_nobody_asks_for_the_bill(world):
    """One call to the provider less for each look."""
    watch = world.watch(world.controller().enter())
    world.say()
    world.clock.advance(10_000)
    world.backend.calls.clear()

    watch.poll()

    assert "usage" not in [method for method, _ in world.backend.calls]


def test_a_refusal_for_good_ends_the_run_after_five(new_world):
    """Forbidden is not out of stock: waiting does not help, so it does not go on for ever."""
    world = new_world((cpu_offer(1),))
    owner = world.controller()
    for _ in range(5):
        world.backend.fail_next("submit", BackendError("forbidden", status=403))

    owner.enter()
    for _ in range(3):
        owner.resume(Wake("backoff"))
    with pytest.raises(RunFailedError, match="forbidden"):
        owner.resume(Wake("backoff"))

    assert len(world.state.attempts) == 5


def test_many_looks_at_a_running_attempt_add_no_event(world):
    """Events hold only what changes state."""
    owner = world.controller()
    owner.enter()
    world.say()
    before = world.state.number
    for _ in range(300):
        owner.resume(Wake("status"))

    assert world.state.number == before


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_machine_whose_clock_is_an_hour_off_is_neither_lost_nor_billed_wrong(world, off_s):
    """Half an hour at $0.05 is $0.025 while it runs and after its end, and the budget of $0.03 holds."""
    theirs = ManualClock(time=world.clock.time() + off_s)
    world.backend.clock = theirs
    owner = world.controller(budget_usd=0.03)
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
    assert report["bill"]["usd"] == pytest.approx(0.025)


def test_a_budget_that_comes_later_buys_no_attempt_of_unknown_price(new_world, caplog):
    """Cleared with a budget: what runs goes on, and is said to be beyond it; nothing new is begun."""
    world = new_world((replace(cpu_offer(1), usd_per_hour=None),))
    world.controller().enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(60)
    owner = world.controller(budget_usd=5.0)
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
    """Ten hours of node 0, whose Job somebody deleted while node 1 was refused: its times are gone."""
    world = new_world(spec=SPEC_OF_TWO)
    world.controller().enter()
    began = world.clock.time()
    price = world.state.live.allocation.usd_per_hour
    owner = world.controller(budget_usd=1000.0)
    owner.enter()
    world.clock.advance(36000)
    world.backend.set_state(world.handle, "lost", node=0, reason="lost")
    world.backend.set_state(world.handle, "ended", node=1, reason="capacity", detail="full")
    world.backend.usage = lambda _handle: (UsageInterval(0, began, began),)

    owner.resume(Wake("status"))

    ended = world.state.attempts[0].ended
    assert (ended["outcome"], ended["never_came"], "usd" in ended) == ("not-started", [1], False)
    spent = facts.spent_usd(world.state, world.backend, now=world.clock.time())
    assert spent == pytest.approx(10 * price)
