"""The owner carries out or abandons each intent: no event before the start leaves it open."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import NoOfferError, RunFailedError, SpecError
from envscaler_airflow.owner.foreground import close
from envscaler_airflow.owner.request import kill_quietly, request_stop
from envscaler_airflow.owner.stage import StoppedError, Waiting, Wake
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing.scripted_backend import cpu_offer


@pytest.fixture
def begun(world):
    """A run whose worker died between the intent and the start."""
    world.backend.fail_next("submit", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.owner().enter()
    assert world.state.live.phase == "intended"
    world.backend.calls.clear()
    return world


def methods(world):
    """Return the names of the backend calls."""
    return [method for method, _ in world.backend.calls]


def types(world):
    """Return the types of the written events."""
    return [event.type for event in world.log.read()]


def test_a_start_that_the_spec_makes_impossible_ends_the_run(world):
    """The reason is recorded, and a retry fails with it at once (A4)."""
    world.backend.fail_next("submit", SpecError("train: volume hdfs://x: cannot be mounted here"))

    with pytest.raises(RunFailedError, match="hdfs://x: cannot be mounted"):
        world.owner().enter()
    with pytest.raises(RunFailedError, match="hdfs://x: cannot be mounted"):
        world.owner().enter()

    [attempt] = world.state.attempts
    assert (world.state.status, world.state.failure) == ("failed", "spec")
    assert (attempt.outcome, attempt.end.usd) == ("not-started", 0.0)
    assert methods(world).count("submit") == 1


def test_a_clear_after_such_a_start_tries_the_same_offer_again(world):
    """The user fixed the spec; the offer was never requested (A4)."""
    world.backend.fail_next("submit", SpecError("env KEY: secret:a/b: there is no such secret"))
    with pytest.raises(RunFailedError):
        world.owner().enter()

    world.owner(max_tries=9).enter()

    assert (world.state.status, world.state.live.number) == ("active", 2)
    assert world.state.live.allocation.name == "scripted/cpu-1/on-demand"


def test_a_start_that_fails_after_it_took_place_is_adopted(begun):
    """An earlier execution had started the attempt; it trains, even if the spec is wrong now (A4)."""
    begun.backend.fail_next("submit", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        begun.owner().enter()
    begun.backend.fail_next("submit", SpecError("env KEY: there is no such secret"))

    got = begun.owner().enter()

    assert isinstance(got, Waiting)
    assert begun.state.live.phase == "started"
    assert len(begun.backend.live) == 1


def test_a_run_that_no_attempt_can_be_chosen_for_has_failed(new_world):
    """Nothing fits: the run does not stay active (A4)."""
    world = new_world((cpu_offer(1, memory_gib=0.1),))

    with pytest.raises(NoOfferError):
        world.owner().enter()

    assert (world.state.status, world.state.failure) == ("failed", "no-offer")
    assert types(world) == ["generation", "failed"]


def test_a_stop_is_answered_before_an_intent_is_carried_out(begun):
    """Cancelled between the intent and the start: the owner starts no machine for it (A4)."""
    request_stop(Run(begun.store, begun.prefix), reason="cancelled", by="me")

    with pytest.raises(StoppedError, match="cancelled"):
        begun.owner().enter()

    assert "submit" not in methods(begun)
    assert begun.backend.live == []
    assert types(begun)[-3:] == ["attempt-stopping", "attempt-ended", "stopped"]
    assert begun.state.attempts[0].end.usd == 0.0


def test_a_timeout_is_answered_before_an_intent_is_carried_out(begun):
    """The task's time was over before the owner requested its machine (A4)."""
    owner = begun.owner()
    body = {"reason": "the deferral timed out", "by": "ti", "stop_reason": "timeout"}
    begun.log.append_request(read_body("stop-requested", body), actor=None)

    with pytest.raises(RunFailedError, match="timed out"):
        owner.enter()

    assert "submit" not in methods(begun)


def test_a_start_that_nobody_recorded_is_stopped_and_billed(begun):
    """Its worker died right after the start; the cancel finds it and asks it to save (A4)."""
    begun.backend.fail_next("submit", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        begun.owner().enter()
    request_stop(Run(begun.store, begun.prefix), reason="cancelled", by="me")
    begun.clock.advance(3600)
    owner = begun.owner()

    owner.enter()
    asked = begun.control()
    begun.leave()
    with pytest.raises(StoppedError):
        owner.resume(Wake("status"))

    [attempt] = begun.state.attempts
    assert asked.action == "drain"
    assert attempt.outcome == "drained"
    assert attempt.end.usd == pytest.approx(0.05)


def test_an_intent_of_a_deleted_dag_run_is_given_up(begun):
    """The new DAG run starts its own attempt; no one pays for a machine of the old one (A4)."""
    begun.recreate_dag_run()

    begun.owner().enter()

    assert methods(begun).count("submit") == 1
    assert (begun.state.live.generation, begun.state.attempts[0].outcome) == (2, "stopped")


def test_an_intent_with_another_spec_is_given_up_after_a_clear(begun):
    """The next attempt has the new spec, at once (A4)."""
    begun.spec_path.write_text(begun.spec_path.read_text().replace("train.py", "other.py"))

    begun.owner(max_tries=9).enter()

    assert methods(begun).count("submit") == 1
    assert begun.state.live.spec_hash == begun.state.spec_hash
    assert begun.state.attempts[0].stop_reason == "spec-changed"


def test_a_late_start_of_what_was_given_up_finds_that_it_must_not_train(begun):
    """An owner that hung in its backend call starts it after all: its control says to stop (A4)."""
    request_stop(Run(begun.store, begun.prefix), reason="cancelled", by="me")
    with pytest.raises(StoppedError):
        begun.owner().enter()

    control = begun.store.read(f"{begun.prefix}/control/g1-a1.json")

    assert b'"drain"' in control


def test_an_intent_whose_task_is_over_is_closed(begun):
    """Marked failed before the start: the run gets its end, and nothing was started (D6)."""
    kill_quietly(Run(begun.store, begun.prefix), begun.backend, ti_id="ti-01", reason="marked failed")

    state = close(Run(begun.store, begun.prefix), begun.backend, ti_id="ti-01", waits=False)

    assert (state.status, state.live) == ("stopped", None)
    assert "submit" not in methods(begun)


def test_a_start_that_nobody_recorded_is_closed(begun):
    """Its worker died right after the start, and the task is over: it is stopped and recorded (D6)."""
    begun.backend.fail_next("submit", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        begun.owner().enter()
    owner = begun.state.owner
    state = close(Run(begun.store, begun.prefix), begun.backend, ti_id=owner.ti_id, waits=False)
    assert state.live.phase == "stopping"
    begun.leave()

    state = close(Run(begun.store, begun.prefix), begun.backend, ti_id=owner.ti_id, waits=False)

    assert (state.status, state.attempts[0].outcome) == ("stopped", "drained")
    assert begun.backend.live == []


def test_a_run_that_was_being_moved_when_its_task_ended_is_stopped(world):
    """The attempt drains for a move; the next one never starts, and the run has its end (D6)."""
    owner = world.owner()
    owner.enter()
    world.say(elapsed_s=60.0)
    world.ask_move()
    owner.resume(Wake("request"))
    world.leave()

    state = close(Run(world.store, world.prefix), world.backend, ti_id="ti-01", waits=False)

    assert state.status == "stopped"


def test_a_kill_between_two_attempts_stops_the_run(world):
    """Marked failed while it waits for its next attempt: a later execution starts nothing (D6)."""
    owner = world.owner()
    owner.enter()
    world.say(step=5)
    world.backend.lose(world.handle)
    owner.resume(Wake("status"))

    acted = kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="marked failed")

    assert acted
    with pytest.raises(StoppedError):
        world.owner().enter()
