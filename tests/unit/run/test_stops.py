"""A stop is final until the task is cleared, regardless of the events in between."""

from __future__ import annotations

import pytest
from fakes.run_events import (
    CLEARED,
    FIRST,
    RECREATED,
    RETRY,
    begun,
    ended,
    intended,
    life,
    owner,
    requested,
    run,
    started,
    stopping,
)

from envscaler_airflow.run import Actor, Facts, NodeStatus, Observed, next_action

ANYTIME = Facts(backoff_is_over=True)
RUNNING = (begun(), intended(), started())


def after(*events):
    """The next action."""
    return next_action(run(*events), ANYTIME)


@pytest.mark.parametrize(
    ("why", "kind", "failure"),
    [("stop", "halt", ""), ("timeout", "fail", "timeout"), ("image", "fail", "image")],
)
@pytest.mark.parametrize("outcome", ["drained", "stopped", "lost", "failed", "killed"])
@pytest.mark.parametrize("retried", ["before", "after", "twice"])
def test_a_retry_undoes_no_stop(why, kind, failure, outcome, retried):
    """For any outcome of the attempt, and any try that observed it (A3)."""
    events = [*RUNNING, stopping(why)]
    events += [owner(RETRY)] if retried != "after" else []
    events += [ended(outcome, step=3)]
    events += [owner(Actor("ti-21", 3, 3, life="one"))] if retried != "before" else []

    got = after(*events)

    assert (got.kind, got.reason, got.failure) == (kind, "enough", failure)


@pytest.mark.parametrize(("why", "kind"), [("stop", "halt"), ("timeout", "fail")])
@pytest.mark.parametrize(
    "before",
    [
        [begun()],  # before the first attempt
        [begun(), *life("lost", step=3)],  # between two
        [*RUNNING, ended("lost", step=3)],
    ],
)
def test_a_stop_that_no_attempt_was_asked_for_counts_for_the_retry(before, why, kind):
    """It came while no attempt ran, and the worker died (A3)."""
    got = after(*before, requested(why), owner(RETRY))

    assert (got.kind, got.reason) == (kind, "enough")


def test_a_stop_counts_when_the_attempt_ends_before_it_is_asked():
    """Requested while it ran; it was lost, and the worker died (A3)."""
    assert after(*RUNNING, requested(), owner(RETRY), ended("lost", step=3)).kind == "halt"


def test_a_stop_during_a_move_ends_the_run_instead_of_the_move():
    """The attempt drains for another machine; the next one does not start (A3)."""
    events = [*RUNNING, stopping("move"), requested(), owner(RETRY), ended("drained", step=3)]

    assert after(*events).kind == "halt"


@pytest.mark.parametrize("why", ["stop", "timeout", "image", "budget"])
@pytest.mark.parametrize("cleared", ["while it stops", "after its end"])
def test_a_clear_overrides_a_stop(why, cleared):
    """Another max_tries: the user wants it to continue (A3)."""
    events = [*RUNNING, stopping(why)]
    at = len(events) if cleared == "while it stops" else len(events) + 1
    events += [ended("drained", step=3)]
    events.insert(at, owner(CLEARED))

    got = after(*events)

    assert (got.kind, got.reason) == ("start", f"taken up again after a stop ({why})")


FRESH = ("generation", {"generation": 2, "spec_hash": "A", "reason": "restart='fresh'"}, CLEARED)


@pytest.mark.parametrize("taken", [owner(CLEARED), FRESH], ids=["resume", "fresh"])
@pytest.mark.parametrize(
    "before", [[begun()], [begun(), *life("lost", step=3)], list(RUNNING)], ids=["first", "between", "live"]
)
def test_a_cancel_that_no_owner_has_answered_stops_the_cleared_try(before, taken):
    """It may have come after the clear, which Airflow does not date; one more clear overrides it (A3)."""
    once_more = Actor("ti-4", 4, 7, life="one")
    events = [*before, requested(), taken]
    number = len(before) + 1
    if before == list(RUNNING):
        got = next_action(run(*events), Facts(observed=Observed((NodeStatus(0, "running"),))))
        assert (got.kind, got.request.number) == ("stop", number)
        events += [stopping("stop", request=number), ended("drained", step=3)]

    assert after(*events).kind == "halt"
    assert after(*events, ("stopped", {"generation": 1}), owner(once_more)).kind == "start"


@pytest.mark.parametrize(
    ("request_", "between", "actor"),
    [
        (requested(ti_id="ti-1"), [], CLEARED),  # marked failed, then cleared
        (requested(), [owner(RETRY)], CLEARED),  # a try before the cleared one has read it
        (requested(), [("failed", {"generation": 1})], CLEARED),  # the run ended first
        (requested(), [], Actor("ti-3", 3, 5, life="shell")),
    ],
    ids=["try", "read", "over", "shell"],
)
def test_a_clear_overrides_a_stop_that_came_before_it(request_, between, actor):
    """No attempt had to stop for it; a start from a shell is itself the clear (A3)."""
    by = FIRST if actor.life == "one" else Actor("ti-1", 1, 1, life="shell")

    assert after(begun(actor=by), request_, *between, owner(actor)).kind == "start"


def test_a_cancel_of_a_deleted_dag_run_stops_no_recreated_one():
    """It was for the earlier one (A3)."""
    assert after(begun(), requested(), begun(2, RECREATED)).kind == "start"


def test_a_cancel_after_an_overridden_stop_counts():
    """The end of the old try requested a stop, then a person cancelled (A3)."""
    events = [*RUNNING, requested(ti_id="ti-1"), requested(), owner(CLEARED)]

    assert after(*events, stopping("stop", request=4), ended("drained", step=3)).kind == "halt"
    assert run(*events).overridden_number == 4


def test_a_stop_after_a_clear_is_final_again():
    """The clear came first (A3)."""
    assert after(begun(), owner(CLEARED), requested()).kind == "halt"


def test_a_retry_after_a_clear_undoes_nothing():
    """Killed, cleared, cancelled, and the worker died (A3)."""
    retry = Actor("ti-4", 4, 5, life="one")
    killed = requested(ti_id="ti-1")

    assert after(begun(), killed, owner(CLEARED), requested(), owner(retry)).kind == "halt"


def test_a_sibling_that_is_cleared_clears_nothing_here():
    """It raises the clear number of the DAG run, but leaves this task's max_tries unchanged (A3)."""
    assert after(*RUNNING, stopping("stop"), ended("drained"), owner(RETRY)).kind == "halt"


def test_a_clear_while_a_worker_runs_the_task_may_count_as_a_retry():
    """Airflow leaves max_tries unchanged where the executor reports a failure; one more clear counts (A3)."""
    cleared_while_running = Actor("ti-2", 2, 3, life="one")
    once_more = Actor("ti-3", 3, 5, life="one")
    events = [*RUNNING, stopping("stop"), owner(cleared_while_running), ended("drained", step=3)]

    assert after(*events).kind == "halt"
    assert after(*events, ("stopped", {"generation": 1}), owner(once_more)).kind == "start"


def test_a_request_without_an_actor_changes_no_owner():
    """Anyone may request; only an owner event sets an owner."""
    assert run(begun(), requested()).owner == FIRST


@pytest.mark.parametrize("why", ["stop", "budget", "move"])
@pytest.mark.parametrize(
    ("states", "kind"), [(("starting", "pending"), "kill"), (("running", "starting"), "wait")]
)
def test_what_stops_before_any_node_runs_is_killed_at_once(why, states, kind):
    """Machines that are still on their way have nothing to save, and each minute costs money (A3)."""
    nodes = tuple(NodeStatus(index, state) for index, state in enumerate(states))

    got = next_action(run(*RUNNING, stopping(why)), Facts(observed=Observed(nodes)))

    assert got.kind == kind


@pytest.mark.parametrize("why", ["stop", "timeout"])
def test_a_stop_that_an_attempt_of_the_generation_before_answered_ends_the_run(why):
    """Cleared to start afresh, then cancelled while the old attempt still ran: nothing starts (A3)."""
    stop = stopping(why, request=5)
    events = [*RUNNING, begun(2, CLEARED), requested(why), stop, ended("drained", step=3)]

    assert after(*events).kind == ("halt" if why == "stop" else "fail")


def test_an_attempt_of_the_generation_before_that_has_to_go_ends_no_run():
    """Cancelled, then cleared to start afresh while it saves: the new generation starts (A3)."""
    before = [*RUNNING, requested(), stopping("stop", request=4), begun(2, CLEARED)]
    alone = [*RUNNING, begun(2, CLEARED), stopping("stop")]

    assert after(*before, ended("drained", step=3)).kind == "start"
    assert after(*alone, ended("drained", step=3)).kind == "start"
