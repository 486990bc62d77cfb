"""The owner releases an ended attempt's machines, however often that fails; a running one is billed."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import BackendError, BudgetError
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.report import run_report
from envscaler_airflow.owner.stage import Delivered, SupersededError, Waiting, Wake
from envscaler_airflow.run import NodeStatus
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.run.event_bodies import NewOwner
from envscaler_airflow.run.outcomes import LOST_AFTER_S

AWAY = BackendError("the API server does not answer", transient=True)
REFUSED = BackendError("403: delete jobs", status=403)
PRICE = 0.05


def calls(world, method):
    """Return how often *method* of the backend was called."""
    return [name for name, _ in world.backend.calls].count(method)


def types(world):
    """Return the types of the run's events."""
    return [event.type for event in world.log.read()]


def test_a_release_that_failed_is_repeated_by_the_next_execution(world):
    """The machine was lost and its Job remains: the second try releases it (A8)."""
    owner = world.owner()
    owner.enter()
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    failed = world.state.attempts[0].unreleased

    world.owner().enter()

    assert failed == "the API server does not answer"
    assert world.state.attempts[0].unreleased == ""
    assert world.state.attempts[0].released_at == world.clock.time()
    assert types(world)[-1] == "attempt-started"
    assert "attempt-released" in types(world)


def test_a_try_that_was_replaced_during_a_release_writes_nothing_more(world, monkeypatch):
    """It slept in the call for the release; the next try runs an attempt since, which ends (A4)."""
    owner = world.owner()
    owner.enter()
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    release = world.backend.release

    def sleep(handle):
        monkeypatch.setattr(world.backend, "release", release)
        world.owner().enter()
        world.succeed()

    monkeypatch.setattr(world.backend, "release", sleep)
    with pytest.raises(SupersededError):
        owner.resume(Wake("backoff"))

    assert types(world)[-1] == "attempt-started"
    assert world.state.live.number == 2


def test_it_is_repeated_while_the_next_attempt_runs_and_after_its_end(world):
    """Four failures in four executions, one event; the watch wakes the owner for it (A8)."""
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    world.backend.fail_next("release", AWAY)
    waiting = owner.resume(Wake("backoff"))
    world.say()
    watch = world.watch(waiting)
    early = watch.poll()
    world.clock.advance(600)
    world.say()
    late = watch.poll()
    owner.resume(late)

    assert early is None
    assert late.detail == "an earlier attempt is not released"
    assert types(world).count("release-failed") == 1
    assert world.state.attempts[0].released_at == world.clock.time()


def test_a_result_waits_a_moment_for_its_machines_and_not_for_ever(world):
    """Delivered once they are released, or after ten minutes (A8)."""
    owner = world.owner()
    owner.enter()
    world.succeed()
    world.backend.fail_next("release", AWAY)
    first = owner.resume(Wake("status"))
    world.clock.advance(30)
    second = owner.resume(Wake("backoff"))

    assert isinstance(first, Waiting)
    assert "is not released: the API server does not answer" in first.reason
    assert first.watching.backoff_s == 30.0
    assert isinstance(second, Delivered)
    assert world.state.attempts[0].unreleased == ""


def test_the_try_after_a_clear_waits_for_the_release_too(world):
    """The run failed an hour ago; its last machine was not released then, and is now (A8)."""
    owner = world.owner(budget_usd=0.04)
    owner.enter()
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))
    world.clock.advance(3600)
    world.backend.fail_next("release", AWAY)

    cleared = world.owner(max_tries=7, budget_usd=0.04)
    waiting = cleared.enter()

    assert "is not released: the API server does not answer" in waiting.reason
    with pytest.raises(BudgetError):
        cleared.resume(Wake("backoff"))
    assert world.state.attempts[0].unreleased == ""


def test_a_try_that_cannot_pay_for_a_start_waits_for_the_release_too(world):
    """The budget does not pay for another attempt; the machine of the last one is not released yet (A8)."""
    owner = world.owner(budget_usd=0.0501)
    owner.enter()
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    for _ in range(2):
        world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))

    waiting = owner.resume(Wake("backoff"))
    with pytest.raises(BudgetError, match="budget"):
        owner.resume(Wake("backoff"))

    assert "is not released: the API server does not answer" in waiting.reason
    assert world.state.attempts[0].unreleased == ""


def test_an_execution_that_slept_tries_to_release_again(world, monkeypatch):
    """It failed an hour ago, within the same execution: the machine may be released now (A8)."""
    owner = world.owner(budget_usd=0.04)
    owner.enter()
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    append = owner.owned.run.events.append

    def sleep(*args, **kwargs):
        event = append(*args, **kwargs)
        if event.type == "release-failed":
            world.clock.advance(3600)
        return event

    monkeypatch.setattr(owner.owned.run.events, "append", sleep)
    with pytest.raises(BudgetError):
        owner.resume(Wake("status"))

    assert types(world).count("release-failed") == 1
    assert world.state.attempts[0].unreleased == ""


def test_a_result_is_delivered_though_its_machines_are_never_given_back(world):
    """Ten minutes without an API server; at once where it refuses for good (A8)."""
    owner = world.owner()
    owner.enter()
    world.succeed()
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    world.clock.advance(601)
    world.backend.fail_next("release", AWAY)

    assert isinstance(owner.resume(Wake("backoff")), Delivered)


def test_what_is_refused_for_good_holds_no_result(world):
    """``envscaler reap`` removes it (A8)."""
    owner = world.owner()
    owner.enter()
    world.succeed()
    world.backend.fail_next("release", REFUSED)

    assert isinstance(owner.resume(Wake("status")), Delivered)
    assert world.state.attempts[0].unreleased == "403: delete jobs"


@pytest.fixture
def zombie(world):
    """A run whose first machine was declared lost after an hour without contact, and keeps running."""
    owner = world.owner(budget_usd=10.0)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    handle = world.handle
    world.backend.hide(handle)
    for _ in range(2):
        world.backend.fail_next("usage", AWAY)
    owner.resume(Wake("silent", silent_s=LOST_AFTER_S + 1))
    return owner, handle


@pytest.mark.usefixtures("zombie")
def test_a_machine_called_lost_that_lives_on_is_billed_again(world):
    """An hour before and an hour after: two hours count for the budget (A8)."""
    assert world.state.attempts[0].outcome == "lost"
    assert world.state.attempts[0].unreleased == "whether it still runs is unknown"
    world.clock.advance(3600)

    spent = facts.spent_usd(world.state, world.backend, now=world.clock.time())

    assert spent == pytest.approx(2 * PRICE)


def test_it_ends_once_it_is_seen_and_the_report_has_its_whole_bill(world, zombie):
    """The owner stops it when it is seen, releases it at the next check, and reports the two hours (A8)."""
    owner, handle = zombie
    world.clock.advance(3600)
    world.backend.show(handle)
    owner.resume(Wake("status"))
    stopped = world.state.attempts[0].unreleased
    owner.resume(Wake("backoff"))
    after = world.state.attempts[0]
    report = run_report(world.state, now=world.clock.time())

    assert stopped == "whether it still runs is unknown"
    assert calls(world, "stop") == 1
    assert after.released_at is not None
    assert after.end.usd == pytest.approx(2 * PRICE)
    assert report.bill.lines[0].usd == pytest.approx(2 * PRICE)


def test_a_machine_that_only_does_not_answer_is_not_released_and_stays_on_the_bill(world):
    """It may train on: it is asked to stop, and its bill stays open until it is gone (A8)."""
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10))
    handle = world.handle
    world.backend.lose(handle, reason="silent")
    owner.resume(Wake("status", quiet_s={0: LOST_AFTER_S}))
    ended = world.state.attempts[0]
    early = calls(world, "release"), calls(world, "stop")
    world.backend._life(handle).nodes[0] = NodeStatus(0, "lost", reason="killed")
    owner.resume(Wake("backoff"))

    assert ended.outcome == "lost"
    assert ended.unreleased == "node 0 does not answer: it may still run, and is stopped once it answers"
    assert early == (0, 1)
    assert world.state.attempts[0].unreleased == ""


def test_a_bill_that_the_provider_did_not_report_at_the_end_is_read_at_the_release(world):
    """No answer at the end and at the first release, an answer at the second: an hour is reported (A8)."""
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    world.backend.lose(world.handle)
    for _ in range(3):
        world.backend.fail_next("usage", AWAY)
    owner.resume(Wake("status"))
    early = world.state.attempts[0]
    owner.resume(Wake("backoff"))
    late = world.state.attempts[0]

    assert (early.end.usd, early.unreleased) == (None, "the API server does not answer")
    assert (late.end.usd, late.unreleased) == (pytest.approx(PRICE), "")


def test_a_bill_that_was_open_at_the_end_is_read_again_by_the_execution_after_a_death(world):
    """The owner dies before it records that the lost machine is not released; that ends in half an hour."""
    lives = {"calls": 0, "dies_at": 0, "after": True}
    owner = world.owner(lives=lives)
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    handle = world.handle
    world.backend.hide(handle)
    lives["dies_at"] = lives["calls"] + 1
    with pytest.raises(world.killed):
        owner.resume(Wake("silent", silent_s=LOST_AFTER_S + 1))
    early, last = world.state.attempts[0], types(world)[-1]
    world.clock.advance(1800)
    world.backend.show(handle)
    world.backend.lose(handle)

    world.owner().enter()

    assert (last, early.outcome) == ("attempt-ended", "lost")
    assert early.end.usd == pytest.approx(PRICE)
    assert world.state.attempts[0].end.usd == pytest.approx(1.5 * PRICE)


def test_an_owner_that_was_replaced_meanwhile_releases_nothing_more(world):
    """Another try took the number of its event: what is left to release is that one's."""
    owner = world.owner()
    owner.enter()
    world.backend.lose(world.handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    owner._releaser.begin()
    state = world.owner().owned.append(world.state, NewOwner(reason="taken over"))
    before = calls(world, "release")

    after = owner._releaser.release_all(state)

    assert (after, world.state.number, calls(world, "release")) == (state, state.number, before)


@pytest.mark.parametrize(("later", "usd"), [((0, 3600), 2 * PRICE), (None, PRICE)], ids=["more", "forgotten"])
def test_a_pod_that_came_after_the_loss_is_on_the_bill(world, monkeypatch, later, usd):
    """The bill was complete at the loss, the release failed; a backend that forgot pods changes nothing."""
    owner = world.owner()
    owner.enter()
    world.say(checkpoint=world.save(10))
    world.clock.advance(3600)
    handle, whole = world.handle, world.backend.usage
    world.backend.lose(handle)
    world.backend.fail_next("release", AWAY)
    owner.resume(Wake("status"))
    early = world.state.attempts[0]
    known = whole(handle)
    end = known[0].end
    more = () if later is None else (*known, UsageInterval(0, end + later[0], end + later[1]))
    monkeypatch.setattr(world.backend, "usage", lambda which: more if which == handle else whole(which))
    owner.resume(Wake("backoff"))
    late = world.state.attempts[0]

    assert (early.end.usd, bool(early.unreleased)) == (pytest.approx(PRICE), True)
    assert (late.end.usd, late.unreleased) == (pytest.approx(usd), "")
