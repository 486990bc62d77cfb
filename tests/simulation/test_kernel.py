"""How actors of a simulated world sleep, wake and end."""

from __future__ import annotations

import pytest

from tests.simulation.kernel import EPOCH, Lock, Machine, World


def seconds(world: World, what: str) -> list[float]:
    """When *what* was noted, seconds since the beginning."""
    return [line.at - EPOCH for line in world.lines if line.what == what]


def test_a_kill_runs_no_handler_and_ends_the_whole_process() -> None:
    """As SIGKILL: neither the thread that dies nor its process runs its ``finally`` before the end."""
    world, machine = World(1), Machine("machine")

    def body() -> None:
        try:
            world.sleep(1)
            if world.current is thread:
                world.kill(thread, "test")
            world.sleep(1)
        finally:
            world.note("handler")

    process = world.spawn("process", body, machine=machine)
    thread = world.spawn("process", body, machine=machine, name="process/thread", within=process)
    world.run(until=EPOCH + 100)
    was_alive = [process.is_alive, thread.is_alive]

    assert (was_alive, seconds(world, "handler")) == ([False, False], [])
    world.close()
    assert len(seconds(world, "handler")) == 2


def test_an_actor_that_another_one_starts_runs_by_itself() -> None:
    """The sleep of a child gives up control to the world, not to the actor that started it."""
    world, machine = World(1), Machine("machine")

    def child() -> None:
        world.sleep(3)
        world.note("child")

    def parent() -> None:
        world.spawn("child", child, machine=machine)
        world.sleep(10)
        world.note("parent")

    world.spawn("parent", parent, machine=machine)
    world.run(until=EPOCH + 100)

    assert (seconds(world, "child"), seconds(world, "parent")) == ([3], [10])


def test_an_actor_waits_for_the_lock_of_another_one() -> None:
    """The second one gets it after the five seconds of the first; a reentrant one is taken twice."""
    world, machine = World(1), Machine("machine")
    lock = Lock(world, is_reentrant=True)

    def body() -> None:
        with lock, lock:
            world.sleep(5)
        world.note("done")

    for name in ("first", "second"):
        world.spawn(name, body, machine=machine)
    world.run(until=EPOCH + 100)

    assert [round(at) for at in seconds(world, "done")] == [5, 10]


def test_a_deadlock_is_an_error_with_names() -> None:
    """The process that had the lock was killed; waiting for it would stop the whole simulation."""
    world, machine = World(1), Machine("machine")
    lock = Lock(world, is_reentrant=False)

    def first() -> None:
        with lock:
            world.sleep(100)

    def second() -> None:
        world.sleep(1)
        world.kill(owner, "test")
        lock.acquire()

    owner = world.spawn("first", first, machine=machine)
    world.spawn("second", second, machine=machine)

    with pytest.raises(RuntimeError, match="deadlock: second waits for a lock of first"):
        world.run(until=EPOCH + 100)
    world.close()
