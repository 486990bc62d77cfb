"""The table "at execute": how a new try of the stage's task handles an existing run. Each row is a test."""

from __future__ import annotations

import pytest
from fakes.run_events import (
    ACCEPTED,
    CLEARED,
    DELIVERED,
    FIRST,
    RECREATED,
    RETRY,
    SHELL_AGAIN,
    SUCCEEDED,
    begun,
    intended,
    life,
    owner,
    run,
    started,
)

from envscaler_airflow.run import Actor, Event, Facts, enter, fold, next_action
from envscaler_airflow.run.event_bodies import NewOwner

RUNNING = (begun(), intended(), started())
DONE = (begun(), *life("succeeded"), SUCCEEDED)
FAILED = (begun(), *life("failed", step=9), ("failed", {"generation": 1, "reason": "r"}))
STOPPED = (begun(), *life("drained", step=9), ("stopped", {"generation": 1, "reason": "r"}))


def kind(*events, actor, spec_hash="A", fresh=False):
    """The action of *actor* after these events."""
    return enter(run(*events), actor, spec_hash=spec_hash, fresh=fresh).kind


def follow(state, actor):
    """The action of *actor* right after it took over the run."""
    return next_action(fold([Event(state.number + 1, NewOwner(), actor=actor)], state), Facts())


def test_no_run_begins():
    """There is no run yet: the first generation begins."""
    assert kind(actor=FIRST) == "begin"


@pytest.mark.parametrize("found", [RUNNING, DONE, (*DONE, DELIVERED), FAILED, STOPPED])
def test_a_newer_try_of_this_dag_run_owns_it(found):
    """In any state, an older try that wakes up late does nothing (A2)."""
    assert kind(*found, owner(RETRY), actor=FIRST) == "superseded"


@pytest.mark.parametrize("found", [RUNNING, DONE, (*DONE, DELIVERED, ACCEPTED), FAILED, STOPPED])
def test_another_dag_run_of_the_same_name_begins_a_generation(found):
    """The previous DAG run was deleted; its state does not belong to this one (A1)."""
    got = enter(run(*found), RECREATED)

    assert (got.kind, got.reason) == ("begin", "the DAG run was deleted and recreated")


def test_a_live_attempt_of_the_same_spec_is_adopted():
    """A retry after a crashed worker takes over the running attempt."""
    assert kind(*RUNNING, actor=RETRY) == "adopt"


def test_a_retry_with_another_spec_keeps_the_frozen_one():
    """A changed DAG file counts from the next generation or clear."""
    got = enter(run(*RUNNING), RETRY, spec_hash="B")

    assert (got.kind, got.respec) == ("adopt", False)


def test_a_clear_with_another_spec_goes_on_with_the_new_one():
    """The attempt saves and stops, the next one runs the new spec."""
    got = enter(run(*RUNNING), CLEARED, spec_hash="B")

    assert (got.kind, got.respec) == ("adopt", True)


def test_an_intent_without_an_act_is_carried_out():
    """The worker died between the intent and the act."""
    state = run(begun(), intended())

    assert enter(state, RETRY, spec_hash="A").kind == "adopt"
    assert follow(state, RETRY).kind == "carry-out"


@pytest.mark.parametrize(
    ("found", "actor", "reason"),
    [
        (DONE, RETRY, "succeeded before, not yet delivered"),
        (DONE, CLEARED, "succeeded before, not yet delivered"),
        ((*DONE, DELIVERED), RETRY, "delivered before to a try that Airflow did not count as a success"),
        ((*DONE, DELIVERED), CLEARED, "delivered before to a try that Airflow did not count as a success"),
        ((*DONE, DELIVERED, ACCEPTED), RETRY, "delivered before, and the task was not cleared"),
    ],
)
def test_a_success_that_airflow_did_not_take_is_delivered(found, actor, reason):
    """A crash right after the delivery, then a clear of the failed task: nothing is trained again (A4)."""
    got = enter(run(*found), actor)

    assert (got.kind, got.reason) == ("deliver", reason)


def test_a_clear_after_an_accepted_delivery_begins_a_generation():
    """Airflow showed a success and the user cleared it: run it again (A4)."""
    assert kind(*DONE, DELIVERED, ACCEPTED, actor=CLEARED) == "begin"


def test_a_new_generation_has_to_be_accepted_again():
    """Acceptance of the previous generation does not apply to this one (A4)."""
    events = (*DONE, DELIVERED, ACCEPTED, begun(2, CLEARED))
    late = ("accepted", {"generation": 1})

    assert not run(*events, late).accepted


@pytest.mark.parametrize(("found", "action"), [(FAILED, "fail"), (STOPPED, "halt")])
def test_a_retry_of_what_failed_or_was_stopped_ends_again(found, action):
    """The recorded reason is repeated: only a clear of the task continues the run (A3)."""
    state = run(*found)

    assert enter(state, RETRY).kind == "adopt"
    assert (follow(state, RETRY).kind, follow(state, RETRY).reason) == (action, "r")


@pytest.mark.parametrize("found", [FAILED, STOPPED])
def test_a_clear_of_what_failed_or_was_stopped_goes_on(found):
    """The next attempt starts from the last good checkpoint, in the same generation."""
    state = run(*found)

    assert enter(state, CLEARED, spec_hash="B").respec
    assert follow(state, CLEARED).kind == "start"


def test_fresh_begins_once_per_clear():
    """restart="fresh" starts over at a clear, and resumes after a crash of the fresh generation."""
    assert kind(*RUNNING, actor=CLEARED, fresh=True) == "begin"
    assert kind(*RUNNING, actor=RETRY, fresh=True) == "adopt"


def test_fresh_overrides_no_stop():
    """A retry of a cancelled run halts even if the form requests a fresh start (A3)."""
    state = run(*STOPPED)

    assert enter(state, RETRY, fresh=True).kind == "adopt"
    assert follow(state, RETRY).kind == "halt"


def test_the_very_same_try_goes_on():
    """Its process starts again: it is neither an older try nor another one."""
    assert kind(*RUNNING, actor=FIRST) == "adopt"


OF_TWO = Actor("ti-5", 4, 3, life="two")
"""Fourth try of the DAG run that was recreated."""


@pytest.mark.parametrize(
    ("last", "actor", "expected"),
    [
        (OF_TWO, RETRY, "superseded"),  # a zombie of the previous DAG run: its task instance is older
        (RECREATED, Actor("ti-9", 2, 3, life="two"), "adopt"),  # Airflow failed a try that was not running
        (RECREATED, Actor("ti-91", 2, 3, life="two"), "adopt"),  # and an ordinary retry
        (RECREATED, Actor("ti-91", 1, 3, life="two"), "adopt"),  # the same number twice: the later one wins
        (Actor("ti-91", 1, 3, life="two"), RECREATED, "superseded"),
        (RECREATED, Actor("ti-95", 1, 3, life="three"), "begin"),
    ],
)
def test_which_try_is_newer(last, actor, expected):
    """Within a DAG run the higher try number, between two the later task instance (A1, A2)."""
    assert kind(*RUNNING, owner(last), actor=actor) == expected


@pytest.mark.parametrize(
    ("last", "actor", "expected"),
    [
        (Actor("ti-3", 3, 3), Actor("ti-4", 4, 3), "adopt"),
        (Actor("ti-3", 3, 3), Actor("ti-3", 4, 3), "adopt"),
        (Actor("ti-3", 3, 3), Actor("ti-4", 1, 3), "begin"),
        (Actor("ti-3", 3, 3), Actor("ti-4", 3, 3), "begin"),
        (Actor("ti-3", 3, 3), Actor("ti-2", 2, 3), "superseded"),
        (Actor("ti-3", 1, 3), Actor("ti-2", 3, 3), "superseded"),  # of the previous DAG run
        (Actor("ti-3", 3, 3, life="one"), Actor("ti-4", 4, 3), "adopt"),
        (Actor("ti-3", 3, 3), Actor("ti-4", 4, 3, life="one"), "adopt"),
    ],
)
def test_where_the_dag_run_cannot_be_told(last, actor, expected):
    """A later task instance whose try number is not above the owner's belongs to another DAG run (A1)."""
    assert kind(*RUNNING, owner(last), actor=actor) == expected


def test_every_retry_of_a_recreated_dag_run_goes_on():
    """The previous one made three tries; the second try of this one is not compared with them (A1)."""
    third = Actor("ti-3", 3, 3, life="one")
    second_of_two = Actor("ti-92", 2, 3, life="two")
    events = (*RUNNING, owner(third), begun(2, RECREATED), intended(generation=2), started(generation=2))

    assert kind(*events, actor=second_of_two) == "adopt"


def test_the_first_try_of_a_recreated_dag_run_may_be_lost():
    """Its second try is the first that we see, with a number above the previous DAG run's (A1)."""
    assert kind(*RUNNING, actor=Actor("ti-9", 2, 3, life="two")) == "begin"


def test_an_actor_says_which_dag_run_it_is_of():
    """It has none where that cannot be read."""
    assert Actor.from_dict(FIRST.to_dict()) == FIRST
    assert "life" not in Actor("ti-1", 1, 3).to_dict()


def test_a_name_typed_again_in_a_shell_does_not_train_again():
    """A succeeded run is delivered again and costs nothing; only ``--restart fresh`` begins (F6)."""
    found = (*DONE, DELIVERED, ACCEPTED, owner(SHELL_AGAIN))

    again = Actor("ti-6", try_number=9, max_tries=9, life="shell")
    assert kind(*found, actor=again) == "deliver"
    assert kind(*found, actor=again, fresh=True) == "begin"


@pytest.mark.parametrize("found", [RUNNING, FAILED, STOPPED])
def test_a_name_typed_again_in_a_shell_goes_on_with_what_has_not_succeeded(found):
    """Each start from a shell counts as a clear of it (F5)."""
    state = run(*found, owner(SHELL_AGAIN))

    assert state.status == "active"
    assert enter(state, Actor("ti-6", 9, max_tries=9, life="shell"), spec_hash="B").respec
