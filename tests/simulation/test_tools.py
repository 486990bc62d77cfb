"""The simulation's own tools: shrinking, mutations that fit the code, the kernel's rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.simulation import kernel, mutations, shrink


@pytest.mark.parametrize("needed", [{"c"}, {"a", "j"}, {"c", "f", "g"}, set()])
def test_shrinking_keeps_what_the_failure_needs(needed):
    """Of ten faults only the needed ones are left (G7)."""
    struck, runs = list("abcdefghij"), []

    def fails(muted):
        runs.append(muted)
        left = [name for name in struck if name not in muted]
        return left if needed <= set(left) else None

    muted = shrink.fewest(struck, fails)

    assert set(struck) - muted == needed
    assert len(runs) <= 60


def test_shrinking_follows_faults_that_come_with_a_mute():
    """Without its first fault a world goes another way and meets another one; that one may go too."""

    def fails(muted):
        if "a" in muted:
            return [name for name in ("c", "d") if name not in muted]
        return ["b"]

    assert shrink.fewest(["a", "b"], fails) >= {"a", "c", "d"}


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_mutation_fits_the_code(name):
    """Its text occurs once in its module: code that changes takes its mutation along."""
    mutation = mutations.MUTATIONS[name]
    source = Path(importlib.util.find_spec(mutation.module).origin).read_text()

    assert source.count(mutation.old) == 1
    compile(source.replace(mutation.old, mutation.new), mutation.module, "exec")


def test_a_crash_ends_an_actor_at_its_next_effect_and_its_threads():
    """What runs in ``finally`` has no effect any more."""
    world, done = kernel.World(1), []
    machine = kernel.Machine("m")

    def body():
        try:
            world.sleep(10)
            done.append("slept")
            world.point("an effect")
            done.append("acted")
        finally:
            world.point("cleaning up")
            done.append("cleaned")

    actor, thread = world.spawn("worker", body, machine=machine), world.spawn("thread", body, machine=machine)
    actor.dies_with.append(thread)
    world.spawn("killer", lambda: (world.sleep(5), world.kill(actor, "test")), machine=machine)
    world.run(until=kernel.EPOCH + 100)

    assert done == []
    assert (actor.is_alive, thread.is_alive, world.counts["kill thread"]) == (False, False, 1)


def test_a_muted_fault_leaves_the_others_as_they_are():
    """Each fault has a number of its own among those of its kind."""

    def struck(muted=frozenset()):
        world = kernel.World(7, rates={"a": 0.3, "b": 0.3}, muted=muted)
        for _ in range(30):
            world.strikes("a")
            world.strikes("b")
        return world.struck

    everything = struck()
    assert len(everything) > 8
    assert struck(frozenset({everything[3]})) == [*everything[:3], *everything[4:]]


def test_actors_see_the_clock_of_their_machine():
    """Two machines, an hour apart; no actor reads the true time."""
    world, seen = kernel.World(1), []
    for name, skew_s in (("a", 0.0), ("b", 3600.0)):
        machine = kernel.Machine(name, skew_s)
        world.spawn(
            "worker", lambda: seen.append((kernel.wall(world), kernel.monotonic(world))), machine=machine
        )
    world.run(until=kernel.EPOCH + 1)

    assert seen[1][0] - seen[0][0] == 3600
    assert seen[1][1] == seen[0][1]


def test_a_halted_machine_does_what_came_due_once_it_goes_on():
    """One of its actors was due at 10 s, the other is due at 50 s; it goes on at 30 s (G7)."""
    world, seen = kernel.World(1), []
    machine = kernel.Machine("m")

    def after(seconds):
        world.sleep(seconds)
        seen.append(world.now - kernel.EPOCH)

    world.spawn("worker", lambda: after(10), machine=machine)
    world.spawn("worker", lambda: after(50), machine=machine)
    world.halt(machine)
    world.run(until=kernel.EPOCH)
    world.go_on(machine)
    world.run(until=kernel.EPOCH + 5)
    world.halt(machine)
    world.run(until=kernel.EPOCH + 30)
    early = list(seen)
    world.go_on(machine)
    world.run(until=kernel.EPOCH + 100)

    assert early == []
    assert seen == [30.0, 50.0]


def test_a_thread_wakes_its_parent_and_ends_with_its_process():
    """A wait ends when another actor wakes it, or raises what that one gives it."""
    world, seen = kernel.World(1), []
    machine = kernel.Machine("m")

    def thread():
        world.sleep(50)
        seen.append(("thread", world.now - kernel.EPOCH))
        world.wake(main)

    def body():
        world.spawn("t", thread, machine=machine, within=main)
        world.park(most_s=100)
        seen.append(("woken", world.now - kernel.EPOCH))
        with pytest.raises(ValueError, match="now"):
            world.park()
        seen.append(("told", world.now - kernel.EPOCH))
        world.spawn("t", thread, machine=machine, within=main)
        world.park()

    def other():
        world.sleep(70)
        world.wake(main, ValueError("now"))
        world.sleep(5)
        world.kill(main, "a test")

    main = world.spawn("p", body, machine=machine)
    world.spawn("o", other, machine=machine)
    world.run(until=kernel.EPOCH + 1000)

    assert seen == [("thread", 50.0), ("woken", 50.0), ("told", 70.0)]
    assert world.counts["kill t"] == 1
