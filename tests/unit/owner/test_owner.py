"""The owner against a scripted backend: each step, and a worker that dies at every one of them."""

from __future__ import annotations

import json

import pytest

from envscaler_agent.protocol import Ended, Manifest
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import BudgetError, CapacityError, RunFailedError, SpecError, StoreError
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import kill_quietly, request_stop
from envscaler_airflow.owner.stage import (
    Delivered,
    Stage,
    StoppedError,
    SupersededError,
    Waiting,
    Wake,
)
from envscaler_airflow.run import Actor
from envscaler_airflow.store.availability import remember, stockouts
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import cpu_offer

LAST_CALL = 37
"""One more than the writes and calls of an undisturbed run; a test counts them."""


def test_a_run_from_first_start_to_delivery(world):
    """Begin on the least expensive offer, wait, succeed, deliver the outputs and a bill."""
    owner = world.owner()

    waiting = owner.enter()
    world.clock.advance(3600)
    world.succeed()
    got = owner.resume(world.watch(waiting).poll())

    assert isinstance(waiting, Waiting)
    assert isinstance(got, Delivered)
    assert got.outputs == {"model": world.output}
    assert got.report.bill.usd == pytest.approx(0.05)
    assert [event.type for event in world.log.read()] == [
        "generation",
        "attempt-intended",
        "attempt-started",
        "attempt-ended",
        "succeeded",
        "delivered",
    ]
    assert world.backend.live == []


def test_a_shell_refuses_to_deliver_what_another_spec_made(world):
    """The name of a succeeded run is typed again: its result, but never for changed code (F6)."""
    world.life = "shell"
    code = world.spec_path.parent / "code"
    code.mkdir()
    world.spec_path.write_text(f"{world.spec_path.read_text()}workdir: code\n")
    owner = world.owner(max_tries=1)
    waiting = owner.enter()
    world.succeed()
    owner.resume(world.watch(waiting).poll())

    again = world.owner(max_tries=2).enter()
    world.spec_path.write_text(world.spec_path.read_text().replace("train.py", "other.py"))
    (code / "other.py").write_text("")
    with pytest.raises(SpecError, match=r"differs: entrypoint, the files of workdir\); write --restart"):
        world.owner(max_tries=3).enter()

    assert isinstance(again, Delivered)
    assert [event.type for event in world.log.read()][-2:] == ["owner", "delivered"]
    assert world.state.generation == 1


@pytest.mark.parametrize(("life", "words"), [("life-1", "clear the task"), ("shell", "by its name to go on")])
def test_a_stopped_run_names_the_way_on_of_its_face(world, life, words):
    """A shell has no task to clear, and Airflow no name to type again (F6)."""
    world.life = life
    owner = world.owner(max_tries=1)
    owner.enter()
    request_stop(Run(world.store, world.key), reason="enough", by="me")
    owner.resume(Wake("request"))
    world.leave()

    with pytest.raises(StoppedError, match=words) as caught:
        owner.resume(Wake("status"))

    assert ("task" in str(caught.value)) == (life != "shell")


def test_a_watch_says_nothing_while_the_attempt_runs(world):
    """No event, no change of status, no wait: the trigger keeps checking."""
    watch = world.watch(world.owner().enter())
    world.say()

    assert watch.poll() is None


def test_a_move_is_a_request_an_acceptance_and_a_start_elsewhere(world):
    """The sensor requests, the owner accepts, the training saves and exits, the next attempt is larger."""
    owner = world.owner()
    waiting = owner.enter()
    world.say(elapsed_s=60.0)
    request = world.ask_move()

    wake = world.watch(waiting).poll()
    waiting = owner.resume(wake)
    asked = world.control()
    world.leave()
    owner.resume(world.watch(waiting).poll())

    assert wake.kind == "request"
    assert world.answer(request).type == "move-accepted"
    assert (asked.action, asked.align) == ("drain", "step")
    assert world.state.live.allocation.name == "scripted/cpu-2/on-demand"
    assert world.control().candidates == ("g1-step-00000050-a1",)
    assert len(world.backend.live) == 1


def test_a_move_to_what_is_not_offered_is_refused(world):
    """The request names 64 CPUs; the answer gives the reason and training continues."""
    owner = world.owner()
    owner.enter()
    world.say()
    request = world.ask_move(vcpus=64)

    got = owner.resume(Wake("request"))

    answer = world.answer(request)
    assert isinstance(got, Waiting)
    assert (answer.type, answer.body.reason) == (
        "move-refused",
        "scripted/cpu-64/on-demand is no longer offered",
    )


def test_a_checkpoint_of_a_zombie_is_never_a_candidate(world):
    """Attempt 1 saves again after attempt 2 began: attempt 3 does not get that checkpoint as a candidate."""
    owner = world.owner()
    owner.enter()
    good = world.save(40)
    world.say(step=45, checkpoint=good)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))
    zombie = Manifest(step=900, generation=1, attempt=1).to_json()
    world.store.write(f"{world.prefix}/checkpoints/g1-step-00000900-a1/manifest-c1.json", zombie)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))
    owner.resume(Wake("backoff"))

    assert world.state.live.number == 3
    assert world.control().candidates == (good,)


def test_a_lost_machine_waits_ten_seconds_then_starts_again(world):
    """The watch counts the back-off by its own clock."""
    owner = world.owner()
    waiting = owner.enter()
    world.say(checkpoint=world.save(10))
    world.backend.lose(world.handle)

    backing_off = owner.resume(world.watch(waiting).poll())
    watch = world.watch(backing_off)
    early = watch.poll()
    world.clock.advance(10)
    owner.resume(watch.poll())

    assert backing_off.reason.endswith("next start in 10 s")
    assert early is None
    assert world.state.live.number == 2


def test_a_node_that_is_unknown_for_ten_minutes_is_lost(world):
    """The backend does not answer; the watch counts by its own clock, and a changed status resets it."""
    waiting = world.owner().enter()
    world.say()
    world.backend.hide(world.handle)
    watch = world.watch(waiting)

    first = watch.poll()
    world.clock.advance(599)
    world.say()
    second = watch.poll()
    world.clock.advance(599)
    third = watch.poll()
    world.clock.advance(1)
    fourth = watch.poll()

    assert (first, second, third) == (None, None, None)
    assert (fourth.kind, fourth.silent_s) == ("silent", 600)


def test_the_last_lines_and_the_exit_code_are_in_the_failure(world):
    """The task's exception contains what a user needs to see."""
    owner = world.owner()
    owner.enter()
    ended = Ended(exit_code=3, reason="failed", last_lines=("Traceback", "ValueError: no such column"))
    world.say(ended=ended, step=0)
    world.backend.end(world.handle, exit_code=3, reason="failed")

    with pytest.raises(RunFailedError, match=r"exit code 3(.|\n)*ValueError: no such column"):
        owner.resume(Wake("status"))

    assert json.loads(world.store.read(f"{world.prefix}/result.json"))["status"] == "failed"


def test_spent_money_checkpoints_and_fails(world):
    """$0.05 an hour against $0.10: after two hours the owner asks the attempt to save and stop."""
    owner = world.owner(budget_usd=0.10)
    owner.enter()
    world.say()
    world.clock.advance(7200)

    owner.resume(Wake("status"))
    asked = world.control()
    world.leave()

    assert asked.action == "drain"
    with pytest.raises(BudgetError, match=r"\$0\.10 of the budget of \$0\.10"):
        owner.resume(Wake("status"))


def test_a_budget_that_pays_for_no_start_starts_nothing(world):
    """70 s at $0.05/h are $0.00097: the first check would end the attempt at once (B5)."""
    with pytest.raises(BudgetError, match=r"\$0.00097.*; write a budget of more than \$0.00097"):
        world.owner(budget_usd=0.0009).enter()

    assert (world.state.status, world.state.failure) == ("failed", "budget")
    assert world.state.attempts == ()
    assert isinstance(world.owner(max_tries=4, budget_usd=0.001).enter(), Waiting)


def test_a_cancel_checkpoints_and_stops_the_run(world):
    """`envscaler cancel`: save and stop; the task ends without a retry."""
    owner = world.owner()
    waiting = owner.enter()
    request_stop(Run(world.store, world.prefix), reason="cancelled", by="me")

    owner.resume(world.watch(waiting).poll())
    asked = world.control()
    world.leave()

    assert (asked.action, asked.align) == ("drain", "now")
    with pytest.raises(StoppedError, match="cancelled"):
        owner.resume(Wake("status"))


def test_a_kill_of_the_old_try_does_nothing_after_the_new_one_began(world):
    """After a clear the old trigger's on_kill comes late: the last owner has another ti.id."""
    world.owner().enter()
    world.owner(max_tries=5).enter()

    acted = kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="killed")

    assert not acted
    assert world.control().action == "run"


def test_a_cleared_run_takes_up_after_the_kill_of_its_old_try(world):
    """Cleared while deferred: the old attempt saves and stops, and the new try continues from there."""
    world.owner().enter()
    world.say()
    acted = kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="cleared")
    owner = world.owner(max_tries=5)

    owner.enter()
    asked = world.control()
    world.leave()
    got = owner.resume(Wake("status"))

    assert acted
    assert asked.action == "drain"
    assert isinstance(got, Waiting)
    assert (world.state.live.number, world.control().candidates) == (2, ("g1-step-00000050-a1",))


def test_a_stock_out_goes_to_the_next_offer(world):
    """The least expensive offer is not available: the wait is 10 s, then the owner requests the next one."""
    world.backend.fail_next("submit", CapacityError("none left"))
    owner = world.owner()

    waiting = owner.enter()
    owner.resume(Wake("backoff"))

    assert waiting.watching.backoff_s == 10
    assert world.state.live.allocation.name == "scripted/cpu-2/on-demand"


def test_a_stock_out_that_another_run_met_is_passed_over(world):
    """The store remembers it for a while: the first start uses the next offer at once."""
    remember(world.store, cpu_offer(1), "InsufficientInstanceCapacity", now=world.clock.time())

    world.owner().enter()

    assert world.state.live.allocation.name == "scripted/cpu-2/on-demand"


def test_a_stock_out_is_told_to_other_runs(world):
    """The error has the cloud's own code; a machine that is merely full would not be remembered."""
    world.backend.fail_next("submit", CapacityError("InsufficientInstanceCapacity: none left"))

    world.owner().enter()

    kept = stockouts(world.store, now=world.clock.time())
    assert [item.instance_type for item in kept] == ["cpu-1"]


def test_a_superseded_slice_touches_nothing(world):
    """The task was cleared while an old execution was starting: it sees another owner and ends."""
    old = world.owner()
    old.enter()
    world.owner(max_tries=5).enter()
    before = world.state.number

    with pytest.raises(SupersededError, match="owned by ti-02"):
        old.resume(Wake("status"))

    assert world.state.number == before


def test_a_cancel_between_a_clear_and_the_cleared_try_stops_that_try(world, caplog):
    """The new try starts nothing and says what to do; the second clear goes on (A3)."""
    world.owner().enter()
    world.leave()
    request_stop(Run(world.store, world.prefix), reason="cancelled", by="me")

    with pytest.raises(StoppedError, match="cancelled; clear the task"):
        world.owner(max_tries=5).enter()

    assert "one more clear overrides that" in caplog.text
    assert len(world.state.attempts) == 1
    world.owner(max_tries=7).enter()
    assert len(world.state.attempts) == 2


def test_a_request_that_comes_between_does_not_cost_the_ownership(world):
    """A cancel is recorded between the read and the takeover: the try still takes over."""
    world.owner().enter()
    owner = world.owner()
    append, landed = owner.owned.run.events.append, []

    def append_late(after, body, *, actor):
        if not landed:
            landed.append(request_stop(Run(world.store, world.prefix), reason="late", by="me"))
        return append(after, body, actor=actor)

    owner.owned.run.events.append = append_late
    owner.enter()

    assert world.state.owner.ti_id == "ti-02"


def test_a_timed_out_task_asks_its_attempt_to_save_and_go(world):
    """A deferral timeout: the attempt saves; the retry fails for that reason, and a clear continues (A3)."""
    owner = world.owner()
    owner.enter()
    world.say()

    owner.time_out("the deferral timed out")
    asked = world.control()
    world.leave()
    with pytest.raises(RunFailedError, match="the deferral timed out"):
        world.owner().enter()
    got = world.owner(max_tries=5).enter()

    assert asked.action == "drain"
    assert isinstance(got, Waiting)
    assert world.control().candidates == ("g1-step-00000050-a1",)


def test_an_attempt_of_a_deleted_dag_run_never_trains_beside_the_new_one(world):
    """Try 1 again under another id: generation 2 waits until the machine of generation 1 is released."""
    world.owner().enter()
    world.say()
    world.recreate_dag_run()
    stage_again = world.owner()

    stage_again.enter()
    asked = world.control()
    live_before = len(world.backend.live)
    world.leave()
    stage_again.resume(Wake("status"))

    assert (world.state.generation, world.state.live.generation, live_before) == (2, 2, 1)
    assert asked.action == "drain"
    assert world.control().candidates == ()


def _play(world, lives, script):
    """Play *script* with an owner that dies once, then with its successors; returns the delivery."""
    owner = world.owner(lives=lives)
    wake, result = None, None
    for _ in range(60):
        try:
            result = owner.enter() if wake is None else owner.resume(wake)
        except world.killed:
            owner, wake = world.owner(), None
            assert len(world.backend.live) <= 1
            continue
        assert len(world.backend.live) <= 1
        if isinstance(result, Delivered):
            return result
        script(world)
        wake = world.watch(result).poll() or Wake("backoff")
    raise AssertionError("the run did not end")


def _one_move_one_loss():
    """A move after the first check, a loss after the second attempt's first check, then success."""

    def script(world):
        live = world.state.live
        if live is None or live.handle is None or not world.backend.live:
            return
        if world.control().action != "run":
            world.leave()
        elif live.number == 1:
            world.say(elapsed_s=60.0)
            if not world.state.pending:
                world.ask_move()
        elif live.number == 2:
            world.say(step=70, checkpoint=world.save(70))
            world.backend.lose(world.handle)
        else:
            world.succeed()

    return script


def _calls_of_an_undisturbed_run(world):
    lives = {"calls": 0, "dies_at": -1, "after": False}
    _play(world, lives, _one_move_one_loss())
    return lives["calls"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, LAST_CALL))
def test_a_worker_that_dies_at_any_line_leaves_a_run_that_goes_on(world, dies_at, after):
    """Before and after each write and each call to the machines: never two attempts, always delivered."""
    lives = {"calls": 0, "dies_at": dies_at, "after": after}

    got = _play(world, lives, _one_move_one_loss())

    state = world.state
    assert got.outputs == {"model": world.output}
    assert world.backend.live == []
    assert state.status == "succeeded"
    assert [attempt.outcome for attempt in state.attempts].count("succeeded") == 1
    submitted = {name for method, name in world.backend.calls if method == "submit"}
    assert len(submitted) == len(state.attempts)


def test_the_deaths_above_cover_every_call(world):
    """The undisturbed run makes no more calls than the test above has deaths for."""
    assert _calls_of_an_undisturbed_run(world) == LAST_CALL - 1


def test_a_store_without_an_answer_is_no_news(world):
    """Unknown is never lost: the trigger gets the error and checks again."""
    waiting = world.owner().enter()
    watch = world.watch(waiting)

    class Down:
        def __getattr__(self, name):
            raise StoreError("no answer", transient=True)

    watch._run = Down()

    with pytest.raises(StoreError):
        watch.poll()


def test_an_error_before_an_action_ends_the_execution_without_it(world):
    """What closes a run behind its task ends attempts, and starts none."""

    class OverError(Exception):
        pass

    def only_end(action):
        if action.kind == "start":
            raise OverError

    actor, stage = Actor("ti-01", 1, 3), Stage(spec=load_spec(world.spec_path), spec_source="train.yaml")
    owner = Owner(
        run=Run(world.store, world.key), backend=world.backend, actor=actor, stage=stage, before=only_end
    )

    with pytest.raises(OverError):
        owner.enter()

    assert [event.type for event in world.log.read()] == ["generation"]
