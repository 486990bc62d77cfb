"""The owner's next action, and a limit on hopeless repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.run_events import (
    CLEARED,
    LARGE,
    RECREATED,
    RETRY,
    SMALL,
    SUCCEEDED,
    begun,
    ended,
    intended,
    life,
    run,
    started,
)

from envscaler_agent.protocol import Ended, Progress, Status
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run import Event, Facts, NodeStatus, Observed, end_of, fold, next_action
from envscaler_airflow.run.event_bodies import Delivered, read_body


def node(state, *, ended_as=None, health="ok", step=None, phase="running"):
    """One node, with the backend's state and its own status."""
    said = Ended(reason=ended_as) if ended_as else None
    status = Status(
        generation=1,
        attempt=1,
        phase="ended" if ended_as else phase,
        health=health,
        progress=Progress(step=step),
        ended=said,
    )
    return Observed((NodeStatus(0, state, status=status),))


RUNNING = node("running")


class TestNext:
    """The next action after entering a run."""

    def test_an_intent_without_an_act_is_carried_out(self):
        """The worker died between intent and act."""
        assert next_action(run(begun(), intended()), Facts()).kind == "carry-out"

    def test_a_running_attempt_is_waited_for(self):
        """Nothing to do."""
        assert next_action(run(begun(), intended(), started()), Facts(observed=RUNNING)).kind == "wait"

    def test_unknown_is_never_dead(self):
        """An unreachable backend is not a loss for nine minutes; after ten it is."""
        state = run(begun(), intended(), started())
        facts = NodeStatus(0, "unknown", status=Status(phase="running"))

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
        """The node is trusted, unless only the backend can know; exit code 0 alone is not a success."""
        said = Ended(reason=node_says) if node_says else None
        status = Status(phase="ended" if said else "running", ended=said)
        observed = Observed((NodeStatus(0, "ended", reason=backend_says, status=status),))

        assert end_of(observed).outcome == outcome

    def test_a_lost_machine_is_replaced_after_ten_seconds(self):
        """The first back-off is 10 s, on the same offer."""
        state = run(begun(), *life("lost", step=50, checkpoint_step=40))

        assert next_action(state, Facts()).backoff_s == 10
        again = next_action(state, Facts(backoff_is_over=True))
        assert (again.kind, again.target) == ("start", SMALL)

    def test_status_wins_over_a_request_that_arrives_with_it(self):
        """The attempt succeeded while a move was requested: the request is stale and gets its answer."""
        ask = ("move-requested", {"target": LARGE.to_dict(), "from_attempt": [1, 1]})
        state = run(begun(), intended(), started(), ask)

        first = next_action(state, Facts(observed=node("ended", ended_as="succeeded")))
        state = fold([Event(5, read_body(*ended("succeeded")))], state)
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
        """A newer owner controls what it wrote: an older one adopts the run and only watches."""
        state = run(begun(), ("attempt-resized", {"generation": 1, "attempt": 1}), *rest)

        assert next_action(state, Facts(observed=observed, backoff_is_over=True)).kind == kind

    @pytest.mark.parametrize(
        ("rest", "observed", "answer", "words"),
        [
            (
                [("stop-requested", {"reason": "cancel"})],
                None,
                ("mismatch", None),
                "install that version to go on",
            ),
            (
                [intended(), started(), ("move-requested", {"target": {}})],
                RUNNING,
                ("refuse", 5),
                "until that takes over, nothing moves",
            ),
        ],
    )
    def test_the_answer_names_the_event_of_the_newer_version(self, rest, observed, answer, words):
        """The request gets its answer; a requested halt waits for the newer version too."""
        state = run(begun(), ("attempt-resized", {"generation": 1, "attempt": 1}), *rest)

        got = next_action(state, Facts(observed=observed, backoff_is_over=True))

        assert (got.kind, got.request and got.request.number) == answer
        assert got.reason == f"event 2 was written by a newer version of envscaler-airflow; {words}"

    def test_a_new_generation_forgets_what_it_did_not_understand(self):
        """Nothing of the earlier generation is left that could be harmed."""
        state = run(begun(), ("attempt-resized", {}), *life("lost"), begun(2))

        assert next_action(state, Facts()).kind == "start"

    def test_success_wins_over_a_stop_that_arrives_with_it(self):
        """There is nothing left to stop; the result is delivered."""
        ask = ("stop-requested", {"reason": "cancel", "by": "me"})
        state = run(begun(), intended(), started(), ask, ended("succeeded"))

        assert next_action(state, Facts()).kind == "succeed"

    def test_an_accepted_move_starts_on_its_target_without_waiting(self):
        """It saved and stopped: the next attempt is on the large offer."""
        accept = {
            "request": 4,
            "generation": 1,
            "attempt": 1,
            "stop_reason": "move",
            "target": LARGE.to_dict(),
        }
        ask = ("move-requested", {"target": LARGE.to_dict(), "from_attempt": [1, 1]})
        state = run(begun(), intended(), started(), ask, ("move-accepted", accept), ended("drained"))

        got = next_action(state, Facts())

        assert (got.kind, got.target) == ("start", LARGE)
        assert state.pending == ()

    def test_a_requested_stop_halts_the_run(self):
        """A user's cancel: the attempt drains, then the run is stopped."""
        ask = ("stop-requested", {"reason": "cancel", "by": "me"})
        state = run(begun(), intended(), started(), ask)
        first = next_action(state, Facts(observed=RUNNING))
        stopping = {"generation": 1, "attempt": 1, "stop_reason": "stop", "request": 4, "reason": "cancel"}
        state = run(begun(), intended(), started(), ask, ("attempt-stopping", stopping), ended("drained"))

        assert (first.kind, first.stop_reason) == ("stop", "stop")
        assert next_action(state, Facts()).kind == "halt"

    def test_a_stop_from_before_a_clear_stops_its_attempt_only(self):
        """Cleared while deferred: the old try's kill stops the attempt; the new try starts the next one."""
        ask = ("stop-requested", {"reason": "killed", "by": "ti ti-1", "ti_id": "ti-1"})
        take = ("owner", {}, CLEARED)
        stopping = {"generation": 1, "attempt": 1, "stop_reason": "stop", "request": 4}
        before = run(begun(), intended(), started(), ask, take)
        asked = next_action(before, Facts(observed=RUNNING))
        steps = [begun(), intended(), started(), ask, take]
        by_control = run(*steps, ended("drained"))
        by_event = run(
            begun(), intended(), started(), ask, ("attempt-stopping", stopping), take, ended("drained")
        )

        assert asked.kind == "stop"
        assert next_action(by_control, Facts(backoff_is_over=True)).kind == "start"
        assert next_action(by_event, Facts()).kind == "start"

    def test_a_stalled_attempt_is_stopped_and_started_again(self):
        """No step for many times the usual duration."""
        state = run(begun(), intended(), started())

        got = next_action(state, Facts(observed=node("running", health="stalled", step=3)))

        assert (got.kind, got.stop_reason) == ("stop", "stalled")

    def test_spent_money_stops_the_attempt_and_fails_the_run(self):
        """At the budget the attempt saves a checkpoint; it is not killed."""
        state = run(begun(), intended(), started())
        stopping = {"generation": 1, "attempt": 1, "stop_reason": "budget", "reason": "spent"}
        after = run(begun(), intended(), started(), ("attempt-stopping", stopping), ended("drained"))

        got = next_action(state, Facts(observed=RUNNING, spent_usd=5.0, budget_usd=5.0))

        assert (got.kind, got.stop_reason) == ("stop", "budget")
        assert next_action(after, Facts()).failure == "budget"

    def test_an_unknown_price_never_counts_as_spent(self):
        """None is unknown."""
        state = run(begun(), intended(), started())

        assert next_action(state, Facts(observed=RUNNING, spent_usd=None, budget_usd=0.01)).kind == "wait"

    def test_an_overdue_attempt_is_killed(self):
        """It was asked to drain and did not finish in time."""
        stopping = {"generation": 1, "attempt": 1, "stop_reason": "move", "target": LARGE.to_dict()}
        state = run(begun(), intended(), started(), ("attempt-stopping", stopping))

        assert next_action(state, Facts(observed=RUNNING, is_overdue=True)).kind == "kill"

    def test_an_attempt_of_an_earlier_generation_is_stopped_first(self):
        """The DAG run was recreated while the old attempt still runs."""
        state = run(begun(), intended(), started(), begun(2, RECREATED))

        got = next_action(state, Facts(observed=RUNNING))
        state = fold([Event(5, read_body(*ended("stopped")))], state)

        assert (got.kind, got.reason) == ("stop", "it belongs to an earlier generation")
        assert next_action(state, Facts()).reason == "first attempt of the generation"


class TestHopeless:
    """A limit on hopeless repeats."""

    def test_a_user_error_before_the_first_step_fails_at_once(self):
        """A typo costs one start, not five."""
        got = next_action(run(begun(), *life("failed", exit_code=1)), Facts(backoff_is_over=True))

        assert (got.kind, got.reason) == ("fail", "failed before its first step was seen, exit code 1")

    def test_a_user_error_before_the_first_step_after_a_resume_fails_at_once(self):
        """It resumed from step 50 and made no further step."""
        one = life("lost", 1, step=60, start_step=0, checkpoint_step=50)
        two = life("failed", 2, exit_code=1, step=50, start_step=50)

        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))

        assert (got.kind, got.failure) == ("fail", "failed")

    def test_the_machines_own_deadline_is_not_tried_again(self):
        """The next attempt would reach it too."""
        got = next_action(run(begun(), *life("deadline-exceeded", step=9)), Facts(backoff_is_over=True))

        assert (got.kind, got.reason) == ("fail", "deadline-exceeded at the machine's own deadline")

    @pytest.mark.parametrize(
        ("spent_usd", "deadline_s", "kind", "failure"),
        [
            (5.0, None, "start", ""),
            (9.0, None, "start", ""),
            (9.1, None, "fail", "budget"),
            (None, None, "fail", "deadline-exceeded"),
            (9.1, 60.0, "fail", "budget"),
            (5.0, 51.0, "start", ""),  # it ended at 101 s
            (5.0, 50.0, "fail", "deadline-exceeded"),
            (5.0, 0.0, "start", ""),
            (5.0, -60.0, "start", ""),
        ],
    )
    def test_a_machine_ends_at_the_deadline_of_its_money_or_of_the_stage(
        self, spent_usd, deadline_s, kind, failure
    ):
        """$10, and twice the stage's deadline; it may have waited unbilled, so that money is left (A6)."""
        start = ("generation", {"generation": 1, "spec_hash": "A", "deadline_s": deadline_s})
        state = run(start, *life("deadline-exceeded", step=9, start_step=0, checkpoint_step=9))
        state = replace(state, begun_at=0.0, attempts=(replace(state.attempts[0], ended_at=101.0),))
        facts = Facts(budget_usd=10.0, spent_usd=spent_usd, backoff_is_over=True)

        got = next_action(state, facts)

        assert (got.kind, got.failure) == (kind, failure)

    def test_the_same_user_error_at_the_same_step_fails_the_second_time(self):
        """Once may be chance; twice at step 70 is the code."""
        one = life("failed", 1, exit_code=1, step=70, start_step=0, checkpoint_step=50)
        two = life("failed", 2, exit_code=1, step=70, start_step=50, checkpoint_step=60)

        assert next_action(run(begun(), *one), Facts(backoff_is_over=True)).kind == "start"
        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))
        assert got.kind == "fail"
        assert "twice at step 70" in got.reason

    def test_an_error_of_code_that_tells_no_steps_has_a_second_chance_after_a_checkpoint(self):
        """Its steps are unknown, which is not zero: it trained at least until its first checkpoint."""
        one = life("failed", 1, exit_code=1, checkpoint="g1-step-00000001-a1", checkpoint_step=1)
        two = life("failed", 2, exit_code=1, checkpoint="g1-step-00000002-a2", checkpoint_step=2)

        assert next_action(run(begun(), *one), Facts(backoff_is_over=True)).kind == "start"
        got = next_action(run(begun(), *one, *two), Facts(backoff_is_over=True))
        assert (got.kind, got.reason) == ("fail", "failed twice, exit code 1")

    def test_disruptions_with_progress_never_count(self):
        """Fifty losses, each after a newer checkpoint: it continues."""
        steps = [s for n in range(1, 51) for s in life("lost", n, step=n * 10, checkpoint_step=n * 10)]

        assert next_action(run(begun(), *steps), Facts(backoff_is_over=True)).kind == "start"

    def test_five_fruitless_attempts_in_a_row_fail(self):
        """Five losses without a newer checkpoint."""
        steps = [s for n in range(1, 6) for s in life("lost", n, step=3)]

        assert next_action(run(begun(), *steps[:-3]), Facts(backoff_is_over=True)).kind == "start"
        assert next_action(run(begun(), *steps), Facts(backoff_is_over=True)).kind == "fail"

    def test_a_retry_goes_on_counting(self):
        """A worker died and nothing was fixed: the fifth fruitless loss in a row still fails."""
        steps = [s for n in range(1, 6) for s in life("lost", n, step=3)]
        taken_over = ("owner", {"reason": "taken over"}, RETRY)

        state = run(begun(), *steps[:12], taken_over, *steps[12:])

        assert next_action(state, Facts(backoff_is_over=True)).kind == "fail"

    def test_a_clear_starts_the_counting_again(self):
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
        """After nine stock-outs it keeps waiting, longer each time, and plans again."""
        steps = [s for n in range(1, 10) for s in (intended(n), ended("not-started", n))]
        state = run(begun(), *steps)

        assert next_action(state, Facts()).backoff_s == 600
        assert next_action(state, Facts(backoff_is_over=True)).target is None


class TestFold:
    """State is the fold of the events, in their order."""

    @pytest.mark.parametrize("number", [1, 3])
    def test_a_missing_or_repeated_number_is_refused(self, number):
        """Event 2 must follow."""
        with pytest.raises(ProtocolError, match=f"event {number} follows 1"):
            fold([Event(number, Delivered())], run(begun()))

    def test_a_late_word_about_an_attempt_that_ended_changes_nothing(self):
        """Two owners saw the end: the first report is right."""
        state = run(begun(), *life("lost", step=3), ended("succeeded"))

        assert (state.current.outcome, state.current.ended_number) == ("lost", 4)
