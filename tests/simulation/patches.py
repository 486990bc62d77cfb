"""Puts the world's clocks, threads and random numbers in place of the process's own.

:func:`install` runs before any module of the project is imported, since many keep ``time.monotonic`` as a
default argument. Outside an actor everything behaves as before.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from tests.simulation import kernel

active: kernel.World | None = None
"""The world that runs; None outside :func:`tests.simulation.run.simulate`."""
_real = {name: getattr(time, name) for name in ("time", "monotonic", "sleep", "time_ns", "monotonic_ns")}
_real_lock, _real_rlock = threading.Lock, threading.RLock
_real_submit = ThreadPoolExecutor.submit
_real_uuid4, _real_start, _real_join = uuid.uuid4, threading.Thread.start, threading.Thread.join


def _in_actor() -> kernel.World | None:
    return active if active is not None and active.current is not None else None


def _time() -> float:
    world = _in_actor()
    return _real["time"]() if world is None else kernel.wall(world)


def _monotonic() -> float:
    world = _in_actor()
    return _real["monotonic"]() if world is None else kernel.monotonic(world)


def _sleep(seconds: float) -> None:
    world = _in_actor()
    if world is None:
        _real["sleep"](seconds)
    else:
        world.sleep(seconds)


def _uuid4() -> uuid.UUID:
    world = _in_actor()
    if world is None:
        return _real_uuid4()
    return uuid.UUID(int=world.stream("uuid").getrandbits(128), version=4)


def _lock() -> Any:
    world = _of_the_project(sys._getframe(1))
    return _real_lock() if world is None else kernel.Lock(world, is_reentrant=False)


def _rlock() -> Any:
    world = _of_the_project(sys._getframe(1))
    return _real_rlock() if world is None else kernel.Lock(world, is_reentrant=True)


def _of_the_project(caller: FrameType) -> kernel.World | None:
    """The world, where an actor runs the project's code; locks of the standard library stay real."""
    return _in_actor() if caller.f_globals.get("__name__", "").startswith("envscaler_") else None


def _start(thread: threading.Thread) -> None:
    """A thread of an actor is an actor that dies with its process."""
    world = _in_actor()
    if world is None:
        _real_start(thread)
        return
    parent = world.current
    assert parent is not None
    run: Callable[[], Any] = thread.run
    kind, name = (parent.within or parent).kind, f"{parent.name}/{thread.name}"
    actor = world.spawn(kind, run, machine=parent.machine, name=name, within=parent)
    thread._actor = actor  # type: ignore[attr-defined]


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    world, actor = _in_actor(), getattr(thread, "_actor", None)
    if world is None or actor is None:
        _real_join(thread, timeout)
    else:
        most_s = float("inf") if timeout is None else timeout
        world.wait(lambda: not actor.is_alive, every_s=0.5, most_s=most_s)


def _submit(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """A call that an actor gives to a pool runs at once."""
    if _in_actor() is None:
        return _real_submit(pool, call, *args, **kwargs)
    future: Future[Any] = Future()
    try:
        future.set_result(call(*args, **kwargs))
    except Exception as err:  # noqa: BLE001  (as a pool does)
        future.set_exception(err)
    return future


@contextlib.contextmanager
def running(world: kernel.World) -> Iterator[kernel.World]:
    """Make *world* the one that runs, and unwind it at the end; its seed decides jitter too."""
    global active  # noqa: PLW0603
    active = world
    random.seed(world.seed)
    try:
        yield world
    finally:
        world.close()
        active = None


def install() -> None:
    """Put them in place; refuses once the project is imported."""
    early = [
        name for name in sys.modules if name.partition(".")[0] in ("envscaler_airflow", "envscaler_agent")
    ]
    if early:
        raise RuntimeError(f"the simulation must patch the clocks before {early[0]} is imported")
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise RuntimeError("PYTHONHASHSEED must be 0, so that sets have one order: use `make simulate`")
    time.time, time.monotonic, time.sleep = _time, _monotonic, _sleep
    uuid.uuid4 = _uuid4
    time.time_ns, time.monotonic_ns = lambda: int(_time() * 1e9), lambda: int(_monotonic() * 1e9)
    threading.Thread.start, threading.Thread.join = _start, _join  # type: ignore[method-assign]
    threading.Lock, threading.RLock = _lock, _rlock  # type: ignore[misc,assignment]
    ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign,assignment]
    random.seed(0)
