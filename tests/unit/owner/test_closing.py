"""A run whose task was marked or deleted gets its end, though no owner's execution follows."""

from __future__ import annotations

import json

import pytest

from envscaler_airflow.owner import foreground as closing
from envscaler_airflow.owner.foreground import close
from envscaler_airflow.owner.request import kill_quietly
from envscaler_airflow.owner.stage import Wake
from envscaler_airflow.store.run import Run


def killed(world):
    """The task is marked failed while deferred, and its trigger asks the attempt to stop."""
    world.owner().enter()
    kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="marked failed")


@pytest.fixture
def no_wait(monkeypatch):
    """Fail on any wait, unless the test says what happens meanwhile."""
    steps = []

    def sleep(_seconds):
        steps.pop(0)()

    monkeypatch.setattr(closing.time, "sleep", sleep)
    return steps


def test_a_killed_run_gets_its_end_its_cost_and_its_report(world, no_wait):
    """The attempt saves and ends; the run is stopped, its Job released, and its bill is known (D6)."""
    killed(world)
    handle = world.handle

    def ends():
        world.clock.advance(1800)
        world.leave()

    no_wait.append(ends)

    state = close(Run(world.store, world.prefix), world.backend, ti_id="ti-01")

    [attempt] = state.attempts
    assert (state.status, attempt.outcome) == ("stopped", "drained")
    assert attempt.end.usd > 0
    assert ("release", handle.name) in world.backend.calls
    result = json.loads(world.store.read(f"{world.prefix}/result.json"))
    assert result["status"] == "stopped"
    assert result["report"]["attempts"]


def test_a_killed_run_that_waited_for_its_next_attempt_is_stopped(world):
    """Nothing of it runs: there is nothing to stop, and the run still gets its end (D6)."""
    owner = world.owner()
    owner.enter()
    world.say(step=5)
    world.backend.set_state(world.handle, "lost", reason="lost")
    owner.resume(Wake("status"))
    assert world.state.live is None

    state = close(Run(world.store, world.prefix), world.backend, ti_id="ti-01", waits=False)

    assert state.status == "stopped"
    assert state.live is None


def test_a_run_that_another_try_owns_is_left_alone(world):
    """The task was cleared: its new try continues the run (D6)."""
    killed(world)
    world.owner().enter()
    before = world.state.number

    close(Run(world.store, world.prefix), world.backend, ti_id="ti-01", waits=False)

    assert world.state.number == before


def test_a_try_that_comes_meanwhile_takes_over(world, no_wait):
    """The closing process stops at once, and records nothing more (D6)."""
    killed(world)
    handle = world.handle

    def cleared():
        world.owner(max_tries=4).enter()
        world.backend.end(handle, exit_code=85, reason="drained")

    no_wait.append(cleared)

    state = close(Run(world.store, world.prefix), world.backend, ti_id="ti-01")

    assert state.owner.ti_id == "ti-02"
    assert state.status == "active"


def test_a_success_that_came_first_is_kept_for_the_next_try(world):
    """It is recorded but not delivered: a clear delivers it (D6)."""
    world.owner().enter()
    world.succeed()
    kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="marked failed")

    state = close(Run(world.store, world.prefix), world.backend, ti_id="ti-01", waits=False)

    assert (state.status, state.delivered) == ("succeeded", ())


def test_the_cost_of_a_short_run_is_not_nothing(world, no_wait, caplog, monkeypatch):
    """A tenth of a second of a machine at $1 an hour, in the triggerer's log (F11)."""
    killed(world)

    def ends():
        world.clock.advance(0.1)
        world.leave()

    no_wait.append(ends)
    monkeypatch.setattr(closing.threading, "Thread", AtOnce)

    with caplog.at_level("INFO"):
        closing.close_behind(Run(world.store, world.prefix), world.backend, ti_id="ti-01")

    [line] = [line for line in caplog.messages if "after its task was ended" in line]
    assert "cost $0.0000" in line
    assert not line.endswith("$0.00")


class AtOnce:
    """A thread that has finished when it is started."""

    def __init__(self, *, target, **_more):
        """Keep the function to run."""
        self.start = target
