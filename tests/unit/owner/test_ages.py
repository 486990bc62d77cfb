"""Time limits count across all watchers, also after one dies: in counted seconds, never by wall clocks."""

from __future__ import annotations

import pytest

from envscaler_airflow.owner.request import request_stop
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.store.lease import Lease
from envscaler_airflow.store.run import Run

OVERDUE_S = 90.0
"""Grace of 30 s and the margin of 60 s."""


def watch_again(world, waiting):
    """Create a watcher in another process, from serialized arguments."""
    waiting = type(waiting)(Watching.from_dict(waiting.watching.to_dict()), waiting.reason)
    return world.watch(waiting)


def renew(world, watch):
    """Renew the lease as a trigger does every minute."""
    Run(world.store, world.prefix).lease.renew(holder="trigger", ages=watch.ages())


def stopping(world):
    """A run whose attempt was asked to stop."""
    owner = world.owner()
    owner.enter()
    world.say()
    request_stop(Run(world.store, world.prefix), reason="enough", by="me")
    return owner, owner.resume(Wake("request"))


def test_an_attempt_that_does_not_go_is_killed_though_its_watcher_changes(world):
    """60 s under one trigger and 30 s under the next are 90 s."""
    _, waiting = stopping(world)
    first = watch_again(world, waiting)
    first.poll()
    world.clock.advance(60)
    before = first.poll()
    renew(world, first)
    second = watch_again(world, waiting)
    second.poll()
    world.clock.advance(29)
    almost = second.poll()
    world.clock.advance(1)

    assert (before, almost) == (None, None)
    assert second.poll().kind == "overdue"


def test_an_execution_in_between_restarts_no_age(world):
    """The owner checks repeatedly: the time keeps counting."""
    owner, waiting = stopping(world)
    for _ in range(3):
        watch = watch_again(world, waiting)
        watch.poll()
        world.clock.advance(30)
        wake = watch.poll()
        renew(world, watch)
        waiting = owner.resume(Wake("status"))

    assert wake.kind == "overdue"
    assert Run(world.store, world.prefix).lease.known().ages == {
        "stopping-g1-a1": OVERDUE_S,
        "quiet-g1-a1-n0": 90.0,
    }


def test_a_kill_is_repeated_after_a_minute_and_not_at_once(world):
    """A machine that does not answer is not killed in a loop."""
    owner, waiting = stopping(world)
    watch = watch_again(world, waiting)
    watch.poll()
    world.clock.advance(95)
    renew(world, watch)
    world.backend.stop = lambda _handle, **_how: None
    killed = owner.resume(watch.poll())
    watch = watch_again(world, killed)
    at_once = watch.poll()
    world.clock.advance(60)

    assert at_once is None
    assert watch.poll().kind == "overdue"


def test_silence_is_counted_over_all_watchers(world):
    """Neither the backend nor the node reports: 400 s and 200 s add up to ten minutes."""
    waiting = world.owner().enter()
    world.say()
    world.backend.hide(world.handle)
    first = watch_again(world, waiting)
    first.poll()
    world.clock.advance(400)
    first.poll()
    renew(world, first)
    second = watch_again(world, waiting)
    second.poll()
    world.clock.advance(199)
    almost = second.poll()
    world.clock.advance(1)
    wake = second.poll()

    assert almost is None
    assert (wake.kind, wake.silent_s) == ("silent", 600.0)


def test_one_word_ends_the_silence(world):
    """The node's status changes: the time that earlier watchers counted no longer applies."""
    waiting = world.owner().enter()
    world.say()
    world.backend.hide(world.handle)
    Run(world.store, world.prefix).lease.renew(holder="trigger", ages={"silent-g1-a1": 590.0})
    watch = watch_again(world, waiting)
    watch.poll()
    world.say(step=20)
    watch.poll()
    world.clock.advance(30)

    assert watch.poll() is None
    assert watch.ages() == {"silent-g1-a1": 30.0, "quiet-g1-a1-n0": 30.0}


def test_ages_of_another_attempt_count_for_nothing(world):
    """The lease still has the ages of attempt 7."""
    _, waiting = stopping(world)
    Run(world.store, world.prefix).lease.renew(holder="trigger", ages={"stopping-g1-a7": 1e6})

    assert watch_again(world, waiting).poll() is None


@pytest.mark.parametrize("ages", [None, {"stopping-g1-a1": 5.0}])
def test_a_renewal_that_does_not_know_the_ages_keeps_them(world, ages):
    """A renewal for another reason keeps the recorded ages."""
    Run(world.store, world.prefix).lease.renew(holder="trigger", ages={"stopping-g1-a1": 3.0})
    Run(world.store, world.prefix).lease.renew(holder="execution", ages=ages)

    found = Run(world.store, world.prefix).lease.read()

    assert found == Lease(2, "execution", "", ages or {"stopping-g1-a1": 3.0})
