"""A store or machines that do not answer for a while: the stage waits and keeps its retries."""

from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralTimeout
from fakes.operator_world import PREFIX, Ti, operator_world

from envscaler_airflow.errors import BackendError, StoreError
from envscaler_airflow.operators import execution
from envscaler_airflow.owner.run_watch import AttemptWatcher
from envscaler_airflow.owner.stage import Wake, Watching, is_transient, watching_until_retry
from envscaler_airflow.run.event_bodies import StopRequested
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import FaultyStore, ManualClock
from envscaler_airflow.triggers.stage_trigger import settle_s

AWAY = BackendError("the API server does not answer", status=503, transient=True)
TIMEOUT = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}
REFUSED = BackendError("pods is forbidden", status=403)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stage's operator with its store and machines."""
    with operator_world(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def faulty(world, monkeypatch):
    """Wrap the store so that the operator sees injected faults."""
    store = FaultyStore(world.store)
    place = type("Place", (), {"open": lambda _: store, "deployment": lambda *_: "unit", "options": {}})
    monkeypatch.setattr(execution, "store_place", lambda *_: place())
    return store


def seen(deferral, *, kind="status", watched_s=30.0):
    """Return the event of the trigger that *deferral* made."""
    _, arguments = deferral.trigger.serialize()
    watched = {"prefix": arguments["prefix"], "watching": arguments["watching"], "watched_s": watched_s}
    return {"kind": kind, "watched": watched}


def resume(world, operator, event):
    """Play a later execution and return its deferral."""
    return world.deferral(lambda: operator.resume(world.context(operator, Ti()), event))


def watching_of(deferral):
    """Return what the trigger of *deferral* watches."""
    return Watching.from_dict(deferral.trigger.serialize()[1]["watching"])


def test_a_timeout_that_meets_a_store_without_an_answer_is_repeated(world, faulty):
    """Airflow ends the next deferral as soon as it may, and then the stop is requested (A3) (A7)."""
    operator, ti = world.operator(execution_timeout=timedelta(seconds=100)), Ti()
    world.execute(operator, ti)
    ti.start_date -= timedelta(seconds=101)
    faulty.add("refuse", "read", "*/events/*", times=1)

    def time_out():
        operator.resume_execution(TRIGGER_FAIL_REPR, dict(TIMEOUT), world.context(operator, ti))

    deferral = world.deferral(time_out)
    with pytest.raises(TaskDeferralTimeout):
        time_out()

    assert deferral.timeout == timedelta(seconds=settle_s())
    assert world.log.load().live.stop_reason == "timeout"


def test_a_timeout_of_a_try_that_another_has_replaced_does_nothing(world):
    """It fails without a retry, and writes no event (A2)."""
    operator, ti = world.operator(execution_timeout=timedelta(seconds=100)), Ti(1)
    world.execute(operator, ti)
    world.execute(world.operator(), Ti(2))
    before = world.log.load().number

    with pytest.raises(AirflowFailException, match="is owned by"):
        operator.resume_execution(TRIGGER_FAIL_REPR, dict(TIMEOUT), world.context(operator, ti))

    assert world.log.load().number == before


def test_a_store_that_does_not_answer_postpones_the_execution(world, faulty, capsys):
    """Ten times in a row: deferred and logged each time, after 15 s at first and 10 min at last (A7)."""
    operator = world.operator()
    deferral, pauses = world.execute(operator), []
    faulty.add("refuse", "read", "*/events/*", times=None)

    for _ in range(10):
        deferral = resume(world, operator, seen(deferral))
        pauses.append(watching_of(deferral).pause_s)

    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600, 600, 600]
    told = [line for line in capsys.readouterr().out.splitlines() if "no answer" in line]
    assert len(told) == 10
    assert "10 in a row" in told[-1]
    assert "uses up no retry, and is tried again in 600 s" in told[-1]


def test_machines_that_do_not_answer_postpone_it_too(world):
    """The kill of an attempt that did not stop in time gets no answer; the next execution repeats it (A7)."""
    operator = world.operator()
    deferral = world.execute(operator)
    world.backend.fail_next("submit", AWAY)
    world.backend.lose(world.handle)
    deferral = resume(world, operator, seen(deferral))

    deferral = resume(world, operator, seen(deferral, kind="backoff"))
    postponed_once = watching_of(deferral)
    again = resume(world, operator, seen(deferral, kind="backoff"))

    assert (postponed_once.faults, postponed_once.backoff_s) == (1, 0.0)
    assert (watching_of(again).faults, watching_of(again).attempt) == (0, 2)


def test_the_first_execution_is_postponed_once_its_attempt_was_begun(world):
    """The machines were requested, and it is unknown whether they started (A7)."""
    world.backend.fail_next("submit", AWAY, after=True)

    deferral = world.execute(world.operator())

    assert (watching_of(deferral).attempt, watching_of(deferral).handle) == (1, None)
    assert world.log.load().live.phase == "intended"
    later = resume(world, world.operator(), seen(deferral))
    assert watching_of(later).handle is not None
    assert len(world.backend.live) == 1


def test_an_execute_that_cannot_read_its_store_is_retried_by_airflow(world, faulty):
    """It is unknown whether an attempt was begun (A7)."""
    faulty.add("refuse", "read", "*/events/*", times=None)
    operator = world.operator()

    with pytest.raises(AirflowException, match="scripted fault") as caught:
        operator.execute(world.context(operator, Ti()))

    assert not isinstance(caught.value, AirflowFailException)


def test_what_the_machines_refuse_for_good_is_not_postponed(world):
    """Waiting does not restore a permission that was revoked (A7)."""
    operator = world.operator()
    deferral = world.execute(operator)
    world.backend.lose(world.handle)
    deferral = resume(world, operator, seen(deferral))
    world.backend.fail_next("offers", REFUSED)
    world.backend.fail_next("submit", REFUSED)
    world.backend.fail_next("find", REFUSED)

    with pytest.raises(AirflowException, match="forbidden"):
        operator.resume(world.context(operator, Ti()), seen(deferral, kind="backoff"))


def test_after_half_an_hour_beyond_the_lease_airflow_retries(world, faulty):
    """By then the sidecar has saved and ended (A7)."""
    operator = world.operator()
    deferral = world.execute(operator)
    faulty.add("refuse", "read", "*/events/*", times=None)
    deferral = resume(world, operator, seen(deferral, watched_s=7 * 86400.0))  # watched for a week: no fault
    deferral = resume(world, operator, seen(deferral, watched_s=3000.0))
    deferral = resume(world, operator, seen(deferral, watched_s=599.0))

    with pytest.raises(AirflowException, match="scripted fault"):
        operator.resume(world.context(operator, Ti()), seen(deferral, watched_s=1.0))


def test_no_pause_is_shorter_than_airflow_stands(world, faulty, monkeypatch):
    """A deployment's workers may report only once a minute (A7)."""
    monkeypatch.setattr(execution, "settle_s", lambda: 62.0)
    operator = world.operator()
    deferral = world.execute(operator)
    faulty.add("refuse", "read", "*/events/*", times=None)

    assert watching_of(resume(world, operator, seen(deferral))).pause_s == 62.0
    assert settle_s() >= 2.0


def test_an_answer_ends_the_count(world, faulty):
    """The next fault counts as a first one (A7)."""
    operator = world.operator()
    deferral = world.execute(operator)
    faulty.add("refuse", "read", "*/events/*", times=1)
    deferral = resume(world, operator, seen(deferral))
    deferral = resume(world, operator, seen(deferral))

    assert (watching_of(deferral).faults, watching_of(deferral).pause_s) == (0, 0.0)


def watch_of(world, watching, clock):
    """Return what a trigger watches with."""
    return AttemptWatcher(
        run=Run(world.store, PREFIX), backend=world.backend, watching=watching, monotonic=clock.monotonic
    )


def test_a_postponed_execution_is_woken_after_its_pause_and_hears_a_newer_owner_before(world):
    """An attempt that ended long ago is reported after 15 s, a takeover by another try at once (A7)."""
    operator, clock = world.operator(), ManualClock()
    known = watching_of(world.execute(operator))
    watch = watch_of(world, watching_until_retry(known, Wake("status"), watched_s=0.0, least_s=7.0), clock)
    world.backend.end(world.handle)
    early = watch.poll()
    clock.advance(15)
    late = watch.poll()
    other = watch_of(world, watching_until_retry(known, Wake("status"), watched_s=0.0, least_s=7.0), clock)
    world.execute(operator, Ti(2))

    assert early is None
    assert (late.kind, late.detail) == ("status", "the attempt ended")
    assert other.poll().kind == "superseded"


def test_a_request_that_came_in_a_pause_is_not_lost(world):
    """The trigger reports it once the pause is over (A7)."""
    clock = ManualClock()
    known = watching_of(world.execute(world.operator()))
    watch = watch_of(world, watching_until_retry(known, Wake("status"), watched_s=0.0, least_s=7.0), clock)
    world.log.append_request(StopRequested(reason="enough"))
    early = [watch.poll(), watch.poll()]
    clock.advance(15)

    assert early == [None, None]
    assert watch.poll().kind == "request"


def test_a_pause_that_ends_without_news_wakes_the_owner_all_the_same(world):
    """The reason for the wake may be gone, and the owner's reaction was interrupted (A7)."""
    clock = ManualClock()
    known = watching_of(world.execute(world.operator()))
    watch = watch_of(world, watching_until_retry(known, Wake("status"), watched_s=0.0, least_s=7.0), clock)
    clock.advance(15)

    assert watch.poll().detail == "tried again, since there was no answer"


def test_a_store_that_refuses_may_let_in_again_and_machines_that_refuse_do_not():
    """Credentials expire over a weekend; revoking a permission is a decision of an administrator (A7)."""
    assert is_transient(StoreError("AccessDenied", status=403))
    assert is_transient(AWAY)
    assert not is_transient(REFUSED)
