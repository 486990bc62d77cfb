"""What the owner does next: the table "at execute", and an end to hopeless repeats."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.lifecycle import (
    Actor,
    Event,
    Facts,
    NodeFacts,
    Observed,
    end_of,
    enter,
    fold,
    next_action,
)
from envscaler_airflow.planning.offers import Allocation, Offer
from envscaler_airflow.protocol import Ended, Progress, Status

SMALL = Allocation(Offer("local", "", "cpu-1", "on-demand", vcpus=1, memory_gib=4, usd_per_hour=0.05))
LARGE = Allocation(Offer("local", "", "cpu-2", "on-demand", vcpus=2, memory_gib=8, usd_per_hour=0.10))
FIRST = Actor("ti-1", try_number=1, max_tries=3)
RETRY = Actor("ti-2", try_number=2, max_tries=3)
CLEARED = Actor("ti-3", try_number=3, max_tries=5)
MADE_AGAIN = Actor("ti-9", try_number=1, max_tries=3)


def run(*steps):
    """State after events given as ``(type, body)`` or ``(type, body, actor)``."""
    events = [
        Event(number, step[0], step[1], writer="w", actor=step[2] if len(step) > 2 else FIRST)
        for number, step in enumerate(steps, start=1)
    ]
    return fold(events)


def begun(generation=1, actor=FIRST):
    """Start of a generation."""
    return ("generation", {"generation": generation, "spec_hash": "A"}, actor)


def intended(attempt=1, allocation=SMALL, generation=1):
    """Intent of an attempt."""
    body = {
        "generation": generation,
        "attempt": attempt,
        "allocation": allocation.to_dict(),
        "spec_hash": "A",
    }
    return ("attempt-intended", body)


def started(attempt=1, generation=1):
    """Act after the intent."""
    handle = {"backend": "local", "name": f"r-g{generation}-a{attempt}"}
    return ("attempt-started", {"generation": generation, "attempt": attempt, "handle": handle})


def ended(outcome, attempt=1, **more):
    """End of an attempt."""
    return ("attempt-ended", {"generation": 1, "attempt": attempt, "outcome": outcome, **more})


def life(outcome, attempt=1, **more):
    """Intent, act and end."""
    return [intended(attempt), started(attempt), ended(outcome, attempt, **more)]


SUCCEEDED = ("succeeded", {"generation": 1, "outputs": {"model": "file:///m"}})


def node(state, *, ended_as=None, health="ok", step=None, phase="running"):
    """One node, seen so and saying so."""
    said = Ended(reason=ended_as) if ended_as else None
    status = Status(
        generation=1,
        attempt=1,
        phase="ended" if ended_as else phase,
        health=health,
        progress=Progress(step=step),
        ended=said,
    )
    return Observed((NodeFacts(0, state, status=status),))


RUNNING = node("running")


class TestEnter:
    """Each row of the table of what a new try does with what it finds."""

    def test_no_run_begins(self):
        """Nothing is there: the first generation."""
        assert enter(run(), FIRST, spec_hash="A").kind == "begin"

    def test_a_dag_run_made_again_begins_anew(self):
        """Try 1 again under another id: the DAG run was deleted and made again."""
        state = run(begun(), *life("succeeded", step=5), SUCCEEDED, ("delivered", {}))

        got = enter(state, MADE_AGAIN, spec_hash="A")

        assert (got.kind, got.reason) == ("begin", "the DAG run was deleted and made again")

    def test_a_live_attempt_of_the_same_spec_is_adopted(self):
        """A retry after a crashed worker takes the running attempt over."""
        assert enter(run(begun(), intended(), started()), RETRY, spec_hash="A").kind == "adopt"

    def test_a_clear_with_another_spec_goes_on_with_the_new_one(self):
        """The spec changed and the task was cleared: checkpoint, stop, next attempt with the new one."""
        got = enter(run(begun(), intended(), started()), CLEARED, spec_hash="B")

        assert (got.kind, got.respec) == ("adopt", True)

    def test_a_retry_with_another_spec_keeps_the_frozen_one(self):
        """A changed DAG file counts from the next generation or clear."""
        got = enter(run(begun(), intended(), started()), RETRY, spec_hash="B")

        assert (got.kind, got.respec) == ("adopt", False)

    def test_succeeded_but_not_delivered_is_delivered(self):
        """The worker died between success and the XCom."""
        assert enter(run(begun(), *life("succeeded"), SUCCEEDED), RETRY, spec_hash="A").kind == "deliver"

    def test_delivered_to_the_same_max_tries_is_delivered_again(self):
        """A retry after a crash: Airflow does not know of the success."""
        state = run(begun(), *life("succeeded"), SUCCEEDED, ("delivered", {}))

        assert enter(state, RETRY, spec_hash="A").kind == "deliver"

    def test_delivered_and_cleared_begins_a_new_generation(self):
        """A clear sets max_tries anew: the user wants it done again."""
        state = run(begun(), *life("succeeded"), SUCCEEDED, ("delivered", {}))

        assert enter(state, CLEARED, spec_hash="A").kind == "begin"

    @pytest.mark.parametrize("end", ["failed", "stopped"])
    def test_failed_or_stopped_goes_on_in_the_same_generation(self, end):
        """The next attempt starts from the last good checkpoint."""
        state = run(begun(), *life("failed", step=9), (end, {"generation": 1, "reason": "r"}))

        assert enter(state, CLEARED, spec_hash="A").kind == "adopt"
        after = fold([Event(state.number + 1, "owner", {}, actor=CLEARED)], state)
        assert next_action(after, Facts()).kind == "start"

    def test_a_try_that_is_known_is_not_made_again(self):
        """The first try's own process starts anew: its number is not above the highest, its id is known."""
        assert enter(run(begun(), intended(), started()), FIRST, spec_hash="A").kind == "adopt"

    def test_fresh_begins_once_per_clear(self):
        """restart="fresh" begins anew on a clear, and goes on after a crash of the fresh one."""
        state = run(begun(), intended(), started())

        assert enter(state, CLEARED, spec_hash="A", fresh=True).kind == "begin"
        assert enter(state, RETRY, spec_hash="A", fresh=True).kind == "adopt"


class TestNext:
    """What follows what, once entered."""

    def test_an_intent_without_an_act_is_carried_out(self):
        """The worker died between intent and act."""
        assert next_action(run(begun(), intended()), Facts()).kind == "carry-out"

    def test_a_running_attempt_is_waited_for(self):
        """Nothing to do."""
        assert next_action(run(begun(), intended(), started()), Facts(observed=RUNNING)).kind == "wait"

    def test_unknown_is_never_dead(self):
        """A backend that cannot be asked for nine minutes is no loss; for ten it is."""
        state = run(begun(), intended(), started())
        facts = NodeFacts(0, "unknown", status=Status(phase="running"))

        assert next_action(state, Facts(observed=Observed((facts,), silent_s=540))).kind == "wait"
        late = next_action(state, Facts(observed=Observed((facts,), silent_s=600)))
        assert (late.kind, late.end.outcome) == ("end", "lost")

    def test_a_node_that_says_it_ended_is_over_when_the_backend_cannot_be_asked(self):
        """Worker and stage in different PID namespaces."""
        state = run(begun(), intended(), started())

        got = next_action(state, Facts(observed=node("unknown", ended_as="succeeded")))

        assert (got.kind, got.end.outcome) == ("end", "succeeded")

    @pytest.mark.parametrize(
        ("backend_says", "node_says", "outcome"),
        [
            ("succeeded", "succeeded", "succeeded"),
            ("succeeded", "failed", "failed"),  # an output was missing
            ("succeeded", None, "lost"),  # its results may not be stored
            ("failed", "cuda-out-of-memory", "cuda-out-of-memory"),
            ("out-of-memory", "killed", "out-of-memory"),  # only the cgroup knows
            ("deadline-exceeded", "stopped", "deadline-exceeded"),
            ("a provider's own word", None, "failed"),
        ],
    )
    def test_who_is_believed_about_an_end(self, backend_says, node_says, outcome):
        """The node, unless only the backend can know; exit code 0 alone is no success."""
        said = Ended(reason=node_says) if node_says else None
        status = Status(phase="ended" if said else "running", ended=said)
        observed = Observed((NodeFacts(0, "ended", reason=backend_says, status=status),))

        assert end_of(observed).outcome == outcome

    def test_a_lost_machine_is_replaced_after_ten_seconds(self):
        """The first back-off is 10 s, on the same offer."""
        state = run(begun(), *life("lost", step=50, checkpoint_step=40))

        assert next_action(state, Facts()).backoff_s == 10
        again = next_action(state, Facts(backoff_is_over=True))
        assert (again.kind, again.target) == ("start", SMALL)

    def test_status_wins_over_a_request_that_arrives_with_it(self):
        """The attempt succeeded while a move was asked: the request is stale and gets its answer."""
        ask = ("move-requested", {"target": LARGE.to_dict(), "from_attempt": [1, 1]})
        state = run(begun(), intended(), started(), ask)

        first = next_action(state, Facts(observed=node("ended", ended_as="succeeded")))
        state = fold([Event(5, *ended("succeeded"))], state)
        second = next_action(state, Facts())

        assert first.kind == "end"
        assert (second.kind, second.request.number) == ("refuse", 4)

    @pytest.mark.parametrize(
        ("rest", "observed", "kind"),
        [
            ([], None, "mismatch"),
            ([intended()], None, "mismatch"),
            ([intended(), started()], RUNNING, "wait"),
            ([intended(), started(), ("stop-requested", {"reason": "cancel"})], RUNNING, "wait"),
            ([intended(), started(), ("move-requested", {"target": {}})], RUNNING, "refuse"),
            ([intended(), started()], node("ended", ended_as="succeeded"), "end"),
            (life("lost"), None, "mismatch"),
            (life("failed"), None, "mismatch"),
            (life("succeeded"), None, "succeed"),
            ([*life("succeeded"), SUCCEEDED], None, "deliver"),
        ],
    )
    def test_what_a_newer_version_wrote_is_watched_and_never_started_or_stopped(self, rest, observed, kind):
        """A newer controller owns what it wrote: an older one adopts the run and only watches."""
        state = run(begun(), ("attempt-resized", {"generation": 1, "attempt": 1}), *rest)

        assert next_action(state, Facts(observed=observed, backoff_is_over=True)).kind == kind

    def test_a_new_generation_forgets_what_it_did_not_understand(self):
        """Nothing of the earlier one is left that could be harmed."""
        state = run(begun(), ("attempt-resized", {}), *life("lost"), begun(2))

        assert next_action(state, Facts()).kind == "start"

    def test_success_wins_over_a_stop_that_arrives_with_it(self):
        """There is nothing left to stop; the result is handed over."""
        ask = ("stop-requested", {"reason": "cancel", "by": "me"})
        state = run(begun(), intended(), started(), ask, ended("succeeded"))

        assert next_action(state, Facts()).kind == "succeed"

    def test_an_accepted_move_starts_on_its_target_without_waiting(self):
        """Checkpointed and left: the next attempt is on the large offer."""
        accept = {"request": 4, "generation": 1, "attempt": 1, "why": "move", "target": LARGE.to_dict()}
        ask = ("move-requested", {"target": LARGE.to_dict(), "from_attempt": [1, 1]})
        state = run(begun(), intended(), started(), ask, ("move-accepted", accept), ended("left"))

        got = next_action(state, Facts())

        assert (got.kind, got.target) == ("start", LARGE)
        assert state.pending == ()

    def test_a_stop_asked_under_the_present_owner_halts_the_run(self):
        """A user's cancel: the attempt is asked to go, then the run is stopped."""
        ask = ("stop-requested", {"reason": "cancel", "by": "me"})
        state = run(begun(), intended(), started(), ask)
        first = next_action(state, Facts(observed=RUNNING))
        stopping = {"generation": 1, "attempt": 1, "why": "stop", "request": 4, "reason": "cancel"}
        state = run(begun(), intended(), started(), ask, ("attempt-stopping", stopping), ended("left"))

        assert (first.kind, first.why) == ("stop", "stop")
        assert next_action(state, Facts()).kind == "halt"

    def test_a_stop_asked_of_an_earlier_owner_stops_its_attempt_only(self):
        """Cleared while deferred: the old try's kill stops the attempt, the new try goes on after it."""
        ask = ("stop-requested", {"reason": "killed", "by": "ti-1"})
        take = ("owner", {}, CLEARED)
        stopping = {"generation": 1, "attempt": 1, "why": "stop", "request": 4}
        before = run(begun(), intended(), started(), ask, take)
        asked = next_action(before, Facts(observed=RUNNING))
        steps = [begun(), intended(), started(), ask, take]
        by_control = run(*steps, ended("left"))
        by_event = run(
            begun(), intended(), started(), ask, ("attempt-stopping", stopping), take, ended("left")
        )

        assert asked.kind == "stop"
        assert next_action(by_control, Facts(backoff_is_over=True)).kind == "start"
        assert next_action(by_event, Facts()).kind == "start"

    def test_a_stalled_attempt_is_stopped_and_started_again(self):
        """No step for many times the usual."""
        state = run(begun(), intended(), started())

        got = next_action(state, Facts(observed=node("running", health="stalled", step=3)))

        assert (got.kind, got.why) == ("stop", "stalled")

    def test_spent_money_stops_the_attempt_and_fails_the_run(self):
        """The budget is an end with a checkpoint, not a kill."""
        state = run(begun(), intended(), started())
        stopping = {"generation": 1, "attempt": 1, "why": "budget", "reason": "spent"}
        after = run(begun(), intended(), started(), ("attempt-stopping", stopping), ended("left"))

        got = next_action(state, Facts(observed=RUNNING, spent_usd=5.0, budget_usd=5.0))

        assert (got.kind, got.why) == ("stop", "budget")
        assert next_action(after, Facts()).failure == "budget"

    def test_an_unknown_price_never_counts_as_spent(self):
        """None is unknown."""
        state = run(begun(), intended(), started())

        assert next_action(state, Facts(observed=RUNNING, spent_usd=None, budget_usd=0.01)).kind == "wait"

    def test_an_overdue_attempt_is_killed(self):
        """It was asked to go and did not within its time."""
        stopping = {"generation": 1, "attempt": 1, "why": "move", "target": LARGE.to_dict()}
        state = run(begun(), intended(), started(), ("attempt-stopping", stopping))

        assert next_action(state, Facts(observed=RUNNING, is_overdue=True)).kind == "kill"

    def test_an_attempt_of_an_earlier_generation_is_stopped_first(self):
        """The DAG run was made again while the old attempt still runs."""
        state = run(begun(), intended(), started(), begun(2, MADE_AGAIN))

        got = next_action(state, Facts(observed=RUNNING))
        state = fold([Event(5, *ended("stopped"))], state)

        assert (got.kind, got.reason) == ("stop", "it belongs to an earlier generation")
        assert next_action(state, Facts()).reason == "first attempt of the generation"


class TestHopeless:
    """An end to hopeless repeats."""

    def test_a_user_error_before_the_first_step_fails_at_once(self):
        """A typo costs one start, not five."""
        got = next_action(run(begun(), *life("failed", exit_code=1)), Facts(backoff_is_over=True))

        assert (got.kind, got.reason) == ("fail", "failed before its first step was seen, exit code 1")

    def test_a_user_error_before_the_first_step_after_a_resume_fails_at_once(self):
        """It went on from step 50 and made none."""
        one = life("lost", 1, step=60, start_step=0, checkpoint_step=50)
        two = life("failed", 2, exit_code=1, step=50, start_step=50)

        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))

        assert (got.kind, got.failure) == ("fail", "failed")

    def test_the_machines_own_deadline_is_not_tried_again(self):
        """The next attempt would meet it too."""
        got = next_action(run(begun(), *life("deadline-exceeded", step=9)), Facts(backoff_is_over=True))

        assert (got.kind, got.reason) == ("fail", "deadline-exceeded at the machine's own deadline")

    def test_the_same_user_error_at_the_same_step_fails_the_second_time(self):
        """Once may be chance; twice at step 70 is the code."""
        one = life("failed", 1, exit_code=1, step=70, start_step=0, checkpoint_step=50)
        two = life("failed", 2, exit_code=1, step=70, start_step=50, checkpoint_step=60)

        assert next_action(run(begun(), *one), Facts(backoff_is_over=True)).kind == "start"
        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))
        assert got.kind == "fail"
        assert "twice at step 70" in got.reason

    def test_an_error_of_code_that_tells_no_steps_has_a_second_chance_after_a_checkpoint(self):
        """Its steps are unknown, which is not none: it trained until its first checkpoint at least."""
        one = life("failed", 1, exit_code=1, checkpoint="g1-step-00000001-a1", checkpoint_step=1)
        two = life("failed", 2, exit_code=1, checkpoint="g1-step-00000002-a2", checkpoint_step=2)

        assert next_action(run(begun(), *one), Facts(backoff_is_over=True)).kind == "start"
        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))
        assert (got.kind, got.reason) == ("fail", "failed twice, exit code 1")

    def test_disruptions_with_progress_never_count(self):
        """Fifty losses, each after a newer checkpoint: it goes on."""
        steps = [s for n in range(1, 51) for s in life("lost", n, step=n * 10, checkpoint_step=n * 10)]

        assert next_action(run(begun(), *steps), Facts(backoff_is_over=True)).kind == "start"

    def test_five_fruitless_attempts_in_a_row_fail(self):
        """Five losses without a newer checkpoint."""
        steps = [s for n in range(1, 6) for s in life("lost", n, step=3)]

        assert next_action(run(begun(), *steps[:-3]), Facts(backoff_is_over=True)).kind == "start"
        assert next_action(run(begun(), *steps), Facts(backoff_is_over=True)).kind == "fail"

    def test_a_retry_goes_on_counting(self):
        """A worker died and nobody fixed anything: the fifth fruitless loss in a row still fails."""
        steps = [s for n in range(1, 6) for s in life("lost", n, step=3)]
        taken_over = ("owner", {"reason": "taken over"}, RETRY)

        state = run(begun(), *steps[:12], taken_over, *steps[12:])

        assert next_action(state, Facts(backoff_is_over=True)).kind == "fail"

    def test_a_clear_starts_the_counting_anew(self):
        """The user fixed something and cleared: five more chances."""
        steps = [s for n in range(1, 6) for s in life("lost", n, step=3)]
        state = run(begun(), *steps, ("failed", {"generation": 1}), ("owner", {}, CLEARED))

        assert next_action(state, Facts()).kind == "start"

    def test_backoff_doubles_up_to_ten_minutes(self):
        """10, 20, 40, ... 600 s."""
        waits = []
        for count in range(1, 9):
            steps = [s for n in range(1, count + 1) for s in life("lost", n, step=1)]
            facts = Facts(max_fruitless_attempts=100)
            waits.append(next_action(run(begun(), *steps), facts).backoff_s)

        assert waits == [10, 20, 40, 80, 160, 320, 600, 600]

    def test_out_of_memory_raises_memory_and_fails_at_the_cap(self):
        """4 GiB, then 6 GiB; at a cap of 6 GiB it fails."""
        gib = 2**30
        state = run(begun(), *life("out-of-memory", step=5, checkpoint_step=4))
        facts = {"backoff_is_over": True, "memory_cap_bytes": 6 * gib}

        raised = next_action(state, Facts(memory_limit_bytes=4 * gib, **facts))
        capped = next_action(state, Facts(memory_limit_bytes=6 * gib, **facts))

        assert (raised.kind, raised.memory_bytes) == ("start", 6 * gib)
        assert (capped.kind, capped.failure) == ("fail", "out-of-memory")

    def test_offers_that_cannot_be_had_do_not_count(self):
        """Nine stock-outs: it goes on waiting, longer each time, and plans anew."""
        steps = [s for n in range(1, 10) for s in (intended(n), ended("not-started", n))]
        state = run(begun(), *steps)

        assert next_action(state, Facts()).backoff_s == 600
        assert next_action(state, Facts(backoff_is_over=True)).target is None


class TestFold:
    """State is the fold of the events, in their order."""

    @pytest.mark.parametrize("number", [1, 3])
    def test_a_missing_or_repeated_number_is_refused(self, number):
        """Event 2 is the one that follows."""
        with pytest.raises(ProtocolError, match=f"event {number} follows 1"):
            fold([Event(number, "delivered")], run(begun()))

    def test_a_late_word_about_an_attempt_that_ended_changes_nothing(self):
        """Two owners saw the end: the first to say it is right."""
        state = run(begun(), *life("lost", step=3), ended("succeeded"))

        assert (state.current.outcome, state.current.ended_number) == ("lost", 4)
