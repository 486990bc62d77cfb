"""Find and end every process that a service home has started, even a detached one.

Each process below a home inherits the variable :data:`MARK`. The environment of some processes cannot be
read: Airflow's task supervisors hide theirs, and a process that sets its title overwrites it. These are found
by their session: the home's file ``sessions`` lists the sessions of its own services.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path

import psutil

MARK = "ENVSCALER_SERVICES"
"""Environment variable with the home that a process belongs to."""

_SESSIONS = "sessions"
_ROUNDS = 50
"""Maximum rounds of killing; each finds what was forked during the previous one. Chosen: 50 x 0.1 s."""


def note_session(home: Path, pid: int) -> None:
    """Record that session *pid* belongs to *home*."""
    with (home / _SESSIONS).open("a") as file:
        file.write(f"{pid}\n")


EMPTY_LOOKS = 2
"""Consecutive empty searches required. Chosen: a process in the middle of an exec shows no environment."""


def belonging_to(home: Path) -> list[psutil.Process]:
    """Every live process of *home*, except this process and its parents."""
    sessions = _sessions(home)
    me = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in me and _is_of(process, home, sessions)
    ]


def find(pid: int) -> psutil.Process | None:
    """The live process *pid*; None when it is gone."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def end_all(home: Path) -> list[str]:
    """Kill every process of *home* and return the command lines of the killed ones.

    Raises:
        RuntimeError: Some still exist after 5 s; names them.
    """
    killed: list[str] = []
    empty = 0
    for _ in range(_ROUNDS):
        found = belonging_to(home)
        empty = 0 if found else empty + 1
        if empty == EMPTY_LOOKS:
            return killed
        if not found:
            time.sleep(0.05)
            continue
        killed += [_describe(process) for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=0.1)
    raise RuntimeError(f"{home}: still alive: {[_describe(process) for process in belonging_to(home)]}")


def start_guard(home: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends everything of *home* once the caller is gone, even by SIGKILL.

    It waits for the end of its standard input, whose other end the caller keeps open.
    """
    command = [sys.executable, "-m", "envscaler_airflow.testing.processes", str(home)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _sessions(home: Path) -> frozenset[int]:
    try:
        text = (home / _SESSIONS).read_text()
    except FileNotFoundError:
        return frozenset()
    return frozenset(int(line) for line in text.split())


def _is_of(process: psutil.Process, home: Path, sessions: Container[int]) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.uids().real != os.getuid():
            return False
        if os.getsid(process.pid) in sessions:
            return True
        return process.environ().get(MARK) == str(home)
    except (psutil.Error, ProcessLookupError):
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}"


def _guard(home: Path) -> None:
    sys.stdin.buffer.read()
    end_all(home)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
