"""How actors of a simulated world sleep, wake and end."""

from __future__ import annotations

from tests.simulation.kernel import EPOCH, Machine, World


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
