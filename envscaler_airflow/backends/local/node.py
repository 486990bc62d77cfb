"""Node main: ``python -m envscaler_airflow.backends.local.node FOLDER --lock-fd N``.

Two processes in a session of their own. The guard is the leader: it does nothing but wait for node
main, and ends whatever is left when that dies. Node main starts courier and wrapper, watches them
and writes end.json last. Both hold the node's lock, so it is free only when both are gone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.cgroups import Cage, Limits, build_cage
from envscaler_airflow.backends.local.ends import NodeEnd
from envscaler_airflow.backends.local.machine import this_identity
from envscaler_airflow.backends.local.processes import ProcessId, Survivors, kill_all
from envscaler_airflow.backends.local.supervise import Clock, NodeMain

_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""


LAUNCHER_S = 5.0
"""Longest wait for the launching process to be gone, seconds. Chosen: it only has to exit."""


def main(arguments: list[str] | None = None) -> int:
    """Become a daemon and run the node in FOLDER to its end."""
    parser = argparse.ArgumentParser(prog="python -m envscaler_airflow.backends.local.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    os.set_inheritable(options.lock_fd, False)
    launcher = os.getpid()
    if os.fork():
        os._exit(0)  # at once: the owner waits for this process; the node is a child of init from here on
    os.setsid()
    until = time.monotonic() + LAUNCHER_S
    while os.getppid() == launcher and time.monotonic() < until:
        time.sleep(0.001)  # it runs for this node too: a node that ends at once would kill it as a leftover
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _ignore)  # not SIG_IGN, which the training would inherit
    run_guard(options.folder)
    return 0


def _ignore(_number: int, _frame: object) -> None:
    """A handler that does nothing and is undone by exec."""


def become_reaper() -> None:
    """Inherit what our descendants leave behind, so that none escapes by a double fork (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_guard(folder: Path) -> None:
    """Start node main, wait for it, and leave nothing of the node behind."""
    request = files.read_json(folder / files.REQUEST) or {}
    limits = request["limits"]
    name = f"{request['attempt']}-n{request['node']}-{request['id'][:8]}"
    cage = Cage(notes=("no cgroups: switched off",))
    if request["cgroups"]:
        cage = build_cage(name, Limits(limits["memory_bytes"], limits["vcpus"]))
    try:
        cage.join("main")
    except OSError as err:
        cage.remove()
        cage = Cage(notes=(*cage.notes, f"cgroup cannot be joined: {err}"))
    become_reaper()
    guard = ProcessId.of(os.getpid())
    pid = os.fork()
    if not pid:
        os._exit(run_main(folder, request, cage, guard))
    os.waitpid(pid, 0)
    survivors = Survivors(str(folder / files.EXCHANGE), guard, cage)
    while kill_all(survivors, spare={os.getpid()}, reap=reap):
        pass  # only what hangs in the kernel: the node is not over before it is gone
    cage.leave()
    cage.remove()


def reap() -> None:
    """Collect dead children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run_main(folder: Path, request: dict[str, Any], cage: Cage, guard: ProcessId | None) -> int:
    """Run node main; whatever goes wrong in it is written down as the node's end."""
    become_reaper()
    clock = Clock()
    me = ProcessId.of(os.getpid())
    body = {
        "id": request["id"],
        "main": me.to_dict() if me else None,
        "guard": guard.to_dict() if guard else None,
        "identity": this_identity().to_dict(),
        "started": clock.started,
        "cage": cage.to_dict(),
        "limits": cage.limits_said(request["limits"]),
    }
    node = None
    try:
        files.write_json(folder / files.NODE, body)
        node = NodeMain(folder, request, cage, guard=guard, clock=clock)
        end = node.run()
    except Exception as err:  # noqa: BLE001  # the outermost edge: an end without a word would look like a loss
        traceback.print_exc(file=sys.stderr)
        end = NodeEnd(None, None, "setup-failed" if node is None else "failed", f"node main: {err!r}"[:500])
        survivors = Survivors(str(folder / files.EXCHANGE), guard, cage, me)
        kill_all(survivors, spare={os.getpid(), os.getppid()}, reap=reap)
    files.write_json(folder / files.END, {"id": request["id"], **end.to_dict(), **clock.interval()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
