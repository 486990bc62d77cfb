"""How a run continues after an attempt failed: what is counted, and what the reason says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.run_events import (
    CLEARED,
    LARGE,
    SMALL,
    begun,
    ended,
    intended,
    life,
    owner,
    run,
    started,
    stopping,
)

from envscaler_airflow.run import Facts, next_action
from envscaler_airflow.run.recovery import budget_words, fruitless, still_fits

GIB = 2**30
ANYTIME = Facts(backoff_is_over=True)
AT_CAP = "out of memory at its cap ({} per node): give resources.limits.memory or failure.oom_memory_cap more"


def losses(first, last):
    """Losses at step 3 without a checkpoint."""
    return [event for number in range(first, last + 1) for event in life("lost", number, step=3)]


def requested_end(number, why):
    """An attempt that the owner ends."""
    return [intended(number), started(number), stopping(why, number), ended("drained", number, step=3)]


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        (losses(1, 3), 3),
        ([*losses(1, 3), *requested_end(4, "move"), *losses(5, 6)], 2),
        ([*losses(1, 3), owner(CLEARED), *losses(4, 4)], 1),
        ([*life("lost", 1, checkpoint_step=0), *losses(2, 2)], 1),
        ([*losses(1, 2), *life("lost", 3, checkpoint_step=1)], 0),
        ([*life("lost", 1, checkpoint_step=5), *life("lost", 2, checkpoint_step=5)], 1),
        ([*losses(1, 2), *life("not-started", 3), *life("not-started", 4, failure="capacity")], 2),
        ([*losses(1, 2), *life("not-started", 3, failure="refused")], 3),
    ],
    ids=[
        "none",
        "losses",
        "a-move",
        "a-clear",
        "step-0",
        "step-1",
        "the-same-step",
        "out-of-stock",
        "refused",
    ],
)
def test_attempts_in_a_row_without_a_newer_checkpoint_are_counted(events, count):
    """From the last clear on; ends that the owner requests and capacity that never came do not count."""
    assert fruitless(run(begun(), *events)) == count


def test_attempts_of_an_earlier_generation_do_not_count():
    """The new one has all its chances."""
    assert fruitless(run(begun(), *losses(1, 3), begun(2, CLEARED))) == 0


@pytest.mark.parametrize(
    ("memory_gib", "target", "kept"),
    [
        (4, SMALL, True),
        (5, SMALL, False),
        (5, LARGE, True),
        (8, LARGE, True),
        (9, LARGE, False),
        (9, None, True),
    ],
)
def test_memory_that_was_needed_is_kept_where_the_target_has_it(memory_gib, target, kept):
    """4 and 8 GiB; an unknown target may have any."""
    [last] = run(begun(), *life("lost")).attempts
    needed = memory_gib * GIB

    assert still_fits(replace(last, memory_bytes=needed), target) == (needed if kept else None)


def test_an_attempt_with_the_memory_of_its_spec_needs_no_other():
    """None is the spec's."""
    [last] = run(begun(), *life("lost")).attempts

    assert still_fits(last, SMALL) is None


@pytest.mark.parametrize(
    ("reserve_usd", "words"),
    [
        (0.0, "$1.50 of the budget of $2.00 are spent"),
        (0.25, "$1.50 of the budget of $2.00 are spent, saving and ending costs up to $0.25"),
    ],
)
def test_the_words_of_a_budget_name_all_amounts(reserve_usd, words):
    """Spent, allowed, and still to come."""
    assert budget_words(Facts(spent_usd=1.5, budget_usd=2.0, reserve_usd=reserve_usd)) == words


@pytest.mark.parametrize(
    ("events", "facts", "failure", "reason"),
    [
        (losses(1, 5), ANYTIME, "lost", "lost 5 attempts in a row without a newer checkpoint"),
        (
            life("failed", exit_code=3, detail="exit code 3"),
            ANYTIME,
            "failed",
            "failed before its first step was seen, exit code 3",
        ),
        (
            life("failed", exit_code=3, detail="no such column"),
            ANYTIME,
            "failed",
            "failed before its first step was seen, exit code 3: no such column",
        ),
        (life("not-started", failure="image", detail="no such image"), ANYTIME, "image", "no such image"),
        (life("not-started", failure="image"), ANYTIME, "image", "not-started"),
        (
            life("out-of-memory", step=3),
            Facts(backoff_is_over=True, memory_limit_bytes=4 * GIB, memory_cap_bytes=4 * GIB),
            "out-of-memory",
            AT_CAP.format("4.00 GiB"),
        ),
        (
            life("out-of-memory", step=3),
            ANYTIME,
            "out-of-memory",
            AT_CAP.format("unknown"),
        ),
    ],
)
def test_a_failure_has_its_class_and_its_reason(events, facts, failure, reason):
    """A person reads both."""
    got = next_action(run(begun(), *events), facts)

    assert (got.kind, got.failure, got.reason) == ("fail", failure, reason)


def test_a_wait_names_the_end_before_it():
    """A person sees why the run pauses."""
    got = next_action(run(begun(), *life("lost", step=3)), Facts())

    assert (got.kind, got.reason, got.backoff_s) == ("wait", "after: lost", 10.0)


@pytest.mark.parametrize(("step", "kind"), [(1, "start"), (0, "fail")])
def test_one_step_is_enough_to_have_trained(step, kind):
    """A fresh start counts from step 0."""
    crashed = life("failed", exit_code=3, step=step, start_step=0)

    assert next_action(run(begun(), *crashed), ANYTIME).kind == kind


def test_the_target_of_a_move_counts_before_any_deferred_one():
    """The attempt was lost while it drained for the large machine."""
    moving = ("attempt-stopping", {"generation": 1, "attempt": 1, "stop_reason": "stalled"})
    state = run(begun(), intended(), started(), moving, ended("lost", step=3))
    [last] = state.attempts

    def next_on(**fields):
        return next_action(replace(state, attempts=(replace(last, **fields),)), ANYTIME).target

    assert next_on(target=LARGE) == LARGE
    assert next_on(next_allocation=LARGE) == LARGE
    assert next_on(target=LARGE, next_allocation=SMALL) == LARGE
    assert next_on() == SMALL


@pytest.mark.parametrize(("memory_gib", "kept"), [(4, True), (5, False)])
def test_the_next_attempt_keeps_raised_memory_only_where_its_machine_has_it(memory_gib, kept):
    """4 GiB there."""
    state = run(begun(), *life("lost", step=3))
    [last] = state.attempts
    raised = replace(last, memory_bytes=memory_gib * GIB)

    got = next_action(replace(state, attempts=(raised,)), ANYTIME)

    assert got.memory_bytes == (memory_gib * GIB if kept else None)


def test_a_loss_is_no_reason_to_fail_whatever_it_says():
    """Only an attempt that never started fails for the class of its failure."""
    got = next_action(run(begun(), *life("lost", step=3, failure="image", detail="gone")), ANYTIME)

    assert (got.kind, got.reason, got.target) == ("start", "after: lost (gone)", SMALL)
