"""Puts the world's clocks, threads and random numbers in place of the process's own.

:func:`install` runs before any module of the project is imported, since many keep ``time.monotonic`` as a
default argument. Outside an actor everything behaves as before.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.simulation import kernel

active: kernel.World | None = None
"""The world that runs; None outside :func:`tests.simulation.run.simulate`."""
_real = {name: getattr(time, name) for name in ("time", "monotonic", "sleep", "time_ns", "monotonic_ns")}
_real_uuid4, _real_thread = uuid.uuid4, threading.Thread.start


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


def _start(thread: threading.Thread) -> None:
    """A thread of an actor is an actor that dies with its process."""
    world = _in_actor()
    if world is None:
        _real_thread(thread)
        return
    parent = world.current
    assert parent is not None
    run: Callable[[], Any] = thread.run
    world.spawn("thread", run, machine=parent.machine, name=f"{parent.name}/{thread.name}", within=parent)


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
    threading.Thread.start = _start  # type: ignore[method-assign]
    random.seed(0)
