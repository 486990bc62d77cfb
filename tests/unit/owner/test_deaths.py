"""A worker that dies at any write or call around an intent, a release, a delivery or a closing."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner.foreground import close
from envscaler_airflow.owner.request import accept_delivery, kill_quietly, request_stop
from envscaler_airflow.owner.stage import Delivered, StoppedError, Wake
from envscaler_airflow.store.run import Run

STOP_CALLS, RELEASE_CALLS, CLOSE_CALLS = 13, 27, 5
"""Writes and calls of each play below without a death; a test counts them."""
DEATHS = [pytest.param(False, id="before"), pytest.param(True, id="after")]
UNDISTURBED = -1


def lives_of(dies_at, *, after=False):
    """A process that dies at its n-th write or call."""
    return {"calls": 0, "dies_at": dies_at, "after": after}


def check_complete(world):
    """Check that nothing runs or is left, no intent is open, and each attempt that ran has its bill."""
    state = world.state
    submitted = {name for method, name in world.backend.calls if method == "submit"}
    started = {one.handle.name for one in state.attempts if one.handle is not None}
    assert world.backend.live == []
    assert submitted >= started
    assert {life.handle.name for life in world.backend._lives.values()} == started
    assert all(life.is_released for life in world.backend._lives.values())
    assert not any(one.is_live or one.unreleased for one in state.attempts)
    assert all(one.end.usd is not None for one in state.attempts)


def play(world, lives, act):
    """An owner that dies once, then its successors, until the run is over; *act* is what happens between."""
    owner, wake = world.owner(lives=lives), None
    for _ in range(30):
        try:
            result = owner.enter() if wake is None else owner.resume(wake)
        except world.killed:
            owner, wake = world.owner(), None
            assert len(world.backend.live) <= 1
            continue
        except StoppedError:
            return None
        assert len(world.backend.live) <= 1
        if isinstance(result, Delivered):
            return result
        act()
        wake = Wake("backoff" if world.state.live is None else "status")
    raise AssertionError("the run did not end")


def play_stop(world, monkeypatch, lives):
    """Record a cancel right behind the first intent."""
    create, asked = world.store.create, []

    def with_a_cancel(name, data):
        done = create(name, data)
        if b'"attempt-intended"' in data and not asked:
            asked.append(request_stop(Run(world.store, world.prefix), reason="cancelled", by="me"))
        return done

    monkeypatch.setattr(world.store, "create", with_a_cancel)
    assert play(world, lives, world.leave) is None


@pytest.mark.parametrize("after", DEATHS)
@pytest.mark.parametrize("dies_at", range(1, STOP_CALLS + 1))
def test_a_death_around_an_intent_that_is_cancelled(world, monkeypatch, dies_at, after):
    """The run stops, nothing keeps running, and the bill includes what was started for it (A3)."""
    play_stop(world, monkeypatch, lives_of(dies_at, after=after))

    assert world.state.status == "stopped"
    check_complete(world)


def play_release(world, lives):
    """Lose the first attempt, which cannot be released at first; the second succeeds."""
    world.backend.fail_next("release", BackendError("503", status=503, transient=True))

    def act():
        live = world.state.live
        if live is not None and live.number == 1:
            world.say(step=70, checkpoint=world.save(70))
            world.backend.lose(world.handle)
        elif live is not None:
            world.succeed()

    return play(world, lives, act)


@pytest.mark.parametrize("after", DEATHS)
@pytest.mark.parametrize("dies_at", range(1, RELEASE_CALLS + 1))
def test_a_death_around_a_release_that_fails(world, dies_at, after):
    """The result is delivered, and every machine is released (A8)."""
    got = play_release(world, lives_of(dies_at, after=after))

    assert got.outputs == {"model": world.output}
    check_complete(world)


@pytest.mark.parametrize("after", DEATHS)
def test_a_death_at_the_acceptance(world, after):
    """A clear trains again only if the acceptance was written (A4)."""
    owner = world.owner()
    owner.enter()
    world.succeed()
    assert isinstance(owner.resume(Wake("status")), Delivered)
    store, _ = world.mortal(lives_of(1, after=after))
    with pytest.raises(world.killed):
        accept_delivery(Run(store, world.prefix), world.state.owner)

    got = world.owner(max_tries=9).enter()

    assert isinstance(got, Delivered) is not after
    assert world.state.generation == 1 + after


def play_closing(world, lives):
    """Mark a task failed while its stage trains; the process that closes the run dies."""
    world.owner().enter()
    world.say(step=5)
    kill_quietly(Run(world.store, world.prefix), world.backend, ti_id="ti-01", reason="marked failed")
    world.clock.advance(1800)
    world.leave()
    store, backend = world.mortal(lives)
    try:
        close(Run(store, world.prefix), backend, ti_id="ti-01", waits=False)
    except world.killed:
        close(Run(world.store, world.prefix), world.backend, ti_id="ti-01", waits=False)


@pytest.mark.parametrize("after", DEATHS)
@pytest.mark.parametrize("dies_at", range(1, CLOSE_CALLS + 1))
def test_a_death_of_the_one_that_closes_a_run(world, dies_at, after):
    """The next process finishes it: the run is stopped, with its bill and its report (D6)."""
    play_closing(world, lives_of(dies_at, after=after))

    assert world.state.status == "stopped"
    check_complete(world)


def test_the_deaths_above_cover_every_call(new_world, tmp_path_factory, monkeypatch):
    """No play makes more calls than the tests have deaths for."""
    plays = {
        STOP_CALLS: lambda world, lives: play_stop(world, monkeypatch, lives),
        RELEASE_CALLS: play_release,
        CLOSE_CALLS: play_closing,
    }
    counted = []
    for run in plays.values():
        lives = lives_of(UNDISTURBED)
        run(type(new_world())(tmp_path_factory.mktemp("world")), lives)
        counted.append(lives["calls"])

    assert counted == list(plays)
