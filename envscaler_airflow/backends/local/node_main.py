"""The process of one node: a loop over the wrapper, the sidecar, their output and requests to stop."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envscaler_agent.ending import EXIT_CODES, EXIT_ORPHANED, reason_of
from envscaler_agent.protocol import END_REASONS, Ended
from envscaler_agent.spool import Spool
from envscaler_airflow.backends.base import NodeEnd
from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.cgroups import CgroupScope, Limits, build_scope
from envscaler_airflow.backends.local.files import OutputWriter
from envscaler_airflow.backends.local.machine import this_identity
from envscaler_airflow.backends.local.processes import (
    ProcessId,
    Survivors,
    descendants,
    kill_all,
    sidecar_env,
    training_env,
)
from envscaler_airflow.errors import BackendError
from envscaler_airflow.sidecar.keeper import Keeper, report_end, reported_end


def tell_end(
    returncode: int | None,
    *,
    said: Ended | None = None,
    oom_kills: int | None = None,
    ended_by: tuple[str, str] | None = None,
) -> NodeEnd:
    """The end of a node.

    Args:
        returncode: Exit code of the wrapper as in ``subprocess``; None when it had to be killed.
        said: What the wrapper reported about the command.
        oom_kills: Out-of-memory kills that the kernel counted; None: not counted.
        ended_by: Reason and detail when node main itself ended it (deadline, end of the grace).
    """
    code = returncode if returncode is not None and returncode >= 0 else None
    number = int(signal.SIGKILL) if returncode is None else -returncode if returncode < 0 else None
    reason = said.reason if said else "killed" if code is None else reason_of(code)
    detail = said.detail if said else ""
    if said and said.signal is not None:
        code, number = None, said.signal
    if oom_kills and reason != "succeeded" and reason not in EXIT_CODES:
        return NodeEnd(
            code, number, "out-of-memory", f"the kernel killed {oom_kills} process(es) at the memory limit"
        )
    if ended_by and ended_by[0] == "killed" and number == signal.SIGTERM:
        return NodeEnd(code, number, "stopped", "ended at the first word")
    if ended_by and ended_by[0] == "killed" and number == signal.SIGKILL:  # the wrapper may have reported it
        return NodeEnd(code, number, *ended_by)
    if ended_by and reason != "succeeded" and (returncode is None or ended_by[0] != "killed"):
        return NodeEnd(code, number, *ended_by)
    return NodeEnd(code, number, reason, detail)


def ended_of(end: NodeEnd) -> Ended:
    """*end* as the wrapper would have reported it."""
    reason = end.reason if end.reason in END_REASONS else "killed"
    return Ended(exit_code=end.exit_code, signal=end.signal, reason=reason, detail=end.detail)


TURN_S = 0.5
"""Longest time between two checks of stop.json. Chosen: a stop acts quickly, an idle node costs nothing."""
FAST_TURN_S = 0.1
"""The same while the node drains. Chosen: for a quick end."""
ALIVE_EVERY_S = 5.0
"""The lock file's time is when the node was last seen alive. Chosen: a loss is billed to 5 s."""

_CHUNK = 1 << 16
_SIDECAR_SEGMENT_BYTES = 1 << 20


class Clock:
    """Wall time at the start, and elapsed seconds that changes of the wall clock do not affect."""

    def __init__(self) -> None:
        """Start now."""
        self.started = time.time()
        self._zero = self.now()

    @staticmethod
    def now() -> float:
        """Seconds on a clock that continues while the machine sleeps."""
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now() - self._zero

    def interval(self) -> dict[str, float]:
        """Start and end, in the form of end.json."""
        return {"started": self.started, "ended": self.started + self.elapsed()}


class NodeMain:
    """Runs one node to its end."""

    def __init__(
        self,
        folder: Path,
        request: dict[str, Any],
        scope: CgroupScope,
        *,
        guard: ProcessId | None,
        clock: Clock,
    ) -> None:
        """Take over the node; start nothing yet."""
        self._folder = folder
        self._request = request
        self._scope = scope
        self._clock = clock
        self._spool = Spool(folder / files.SPOOL)
        self._survivors = Survivors(str(self._spool.root), guard, scope, ProcessId.of(os.getpid()))
        self._selector = selectors.DefaultSelector()
        self._wrapper: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._sidecar = Keeper(
            self._spool, self._start_sidecar, monotonic=clock.now, output="its output beside node.log"
        )
        self._kill_at = float("inf")
        self._drained_at = float("inf")
        self._ended_by: tuple[str, str] | None = None
        self._asked_wrapper = False
        self._terminated = False
        self._alive_at = 0.0
        self._is_end_said = False

    def run(self) -> NodeEnd:
        """Start, watch, drain, stop what is left, and report how it ended."""
        self._listen()
        files.reserve(self._folder)
        self._start_wrapper()
        while not self._is_over():
            self._turn()
        return self._finish()

    def _listen(self) -> None:
        """Let signals wake the loop."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._selector.register(read, selectors.EVENT_READ, None)

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        self._terminated = True

    def _start_wrapper(self) -> None:
        for name in (files.SPOOL, files.WORK, files.ROOT):
            (self._folder / name).mkdir(exist_ok=True)
        env = training_env(os.environ, self._request)
        try:
            self._wrapper = subprocess.Popen(
                self._request["wrapper"],
                cwd=self._folder / files.WORK,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=self._confine,  # noqa: PLW1509  # node main has one thread
            )
        except (OSError, subprocess.SubprocessError) as err:
            self._ended_by = ("setup-failed", f"the wrapper cannot be started: {err}")
            self._kill_at = 0.0
            return
        self._pump_from(self._wrapper, OutputWriter(self._folder / files.OUTPUT))

    def _confine(self) -> None:
        """In the child, before the wrapper: set cgroup, CPUs, and rlimits where no cgroup limits memory."""
        with suppress(OSError):
            self._scope.join("training")
        cpus = self._request.get("cpus")
        if cpus and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)
        memory = self._request["limits"]["memory_bytes"]
        if memory is not None and "memory" not in self._scope.limits:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    def _start_sidecar(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self._request["sidecar"], "--uid", self._request["id"]],
            cwd=self._folder,
            env=sidecar_env(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        writer = OutputWriter(
            self._folder / files.SIDECAR_OUTPUT, segment_bytes=_SIDECAR_SEGMENT_BYTES, kept_segments=2
        )
        self._pump_from(process, writer)
        return process

    def _pump_from(self, process: subprocess.Popen[bytes], writer: OutputWriter) -> None:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, writer)

    def _is_over(self) -> bool:
        now = self._clock.now()
        if now >= self._kill_at:
            return True
        if self._wrapper is not None:
            return False
        return self._sidecar.is_done or self._sidecar.has_failed or now >= self._drained_at

    def _turn(self) -> None:
        self._sidecar.keep()
        self._pump(FAST_TURN_S if self._wrapper is None else TURN_S)
        self._reap()
        self._look_at_stop()
        self._look_at_deadline()
        self._say_alive()

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            with suppress(BlockingIOError):
                chunk = os.read(key.fd, _CHUNK)
                if key.data is None:
                    continue
                if chunk:
                    key.data.write(chunk)
                else:
                    self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.data.close()
        key.fileobj.close()  # type: ignore[union-attr]  # only pipes of Popen carry data

    def _reap(self) -> None:
        """Collect dead children, adopted ones too."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._on_death(pid, os.waitstatus_to_exitcode(status))

    def _on_death(self, pid: int, returncode: int) -> None:
        if self._wrapper is not None and pid == self._wrapper.pid:
            self._wrapper.returncode = self._returncode = returncode
            self._wrapper = None
            self._drained_at = self._clock.now() + self._request["drain_s"]
            self._end_training()
        elif self._sidecar.process is not None and pid == self._sidecar.process.pid:
            self._sidecar.process.returncode = returncode
            self._sidecar.died()
            if returncode == EXIT_ORPHANED and self._wrapper is not None:
                self._ended_by = ("orphaned", "it had no owner, and its wrapper did not end after a SIGTERM")
                self._signal_wrapper(signal.SIGKILL)

    def _end_training(self) -> None:
        """Kill what outlives the wrapper except the sidecar; report its end if the wrapper could not."""
        with suppress(OSError):
            (self._folder / files.BALLAST).unlink()  # space for the final reports on a full disk
        keep = {os.getpid(), os.getppid()}
        if self._sidecar.process is not None:
            keep |= {self._sidecar.process.pid, *descendants(self._sidecar.process.pid)}
        kill_all(self._survivors, spare=keep)
        self._say_its_end()

    def _say_its_end(self) -> None:
        """Report the wrapper's end to the sidecar, unless the wrapper did; retried until it is written."""
        self._is_end_said = reported_end(self._spool) is not None
        if not self._is_end_said:
            end = tell_end(self._returncode, oom_kills=self._scope.oom_kills(), ended_by=self._ended_by)
            with suppress(OSError):
                self._spool.root.mkdir(exist_ok=True)  # the training may have removed it
                report_end(self._spool, ended_of(end))
                self._is_end_said = True

    def _look_at_stop(self) -> None:
        """Read stop.json, or treat a plain SIGTERM as a stop with the grace of the request."""
        try:
            stop = files.read_json(self._folder / files.STOP)
        except BackendError:
            stop = {}
        if stop is None and not self._terminated:
            return
        grace = float((stop or {}).get("grace_s", self._request["grace_s"]))
        self._end_within(grace, "killed", f"stopped; what was left after {grace:g} s was killed")

    def _look_at_deadline(self) -> None:
        deadline = self._request["deadline_s"]
        if deadline is not None and self._clock.elapsed() >= deadline:
            detail = f"ran into its deadline of {deadline:g} s"
            self._end_within(self._request["grace_s"], "deadline-exceeded", detail)

    def _end_within(self, grace_s: float, reason: str, detail: str) -> None:
        """Ask the wrapper once; kill everything after *grace_s*. Later requests only shorten the time."""
        if self._ended_by is None:
            self._ended_by = (reason, detail)
            self._kill_at = self._clock.now() + grace_s
        if grace_s <= 0:
            self._kill_at = 0.0
        if not self._asked_wrapper and self._wrapper is not None and grace_s > 0:
            self._asked_wrapper = True
            self._signal_wrapper(signal.SIGTERM)

    def _signal_wrapper(self, number: int) -> None:
        """Signal without ``Popen``, which would reap a wrapper that just died and lose its end."""
        if self._wrapper is not None:
            with suppress(ProcessLookupError):
                os.kill(self._wrapper.pid, number)

    def _say_alive(self) -> None:
        now = self._clock.now()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            with suppress(OSError):
                os.utime(self._folder / files.LOCK)
            if self._wrapper is None and self._returncode is not None and not self._is_end_said:
                self._say_its_end()

    def _finish(self) -> NodeEnd:
        """Kill what is left, read the remaining output, and report the end."""
        spare = {os.getpid(), os.getppid()}
        while kill_all(self._survivors, spare=spare, reap=self._reap):
            self._say_alive()  # only a process stuck in the kernel: the node ends after it
        self._reap()
        self._drain_pipes()
        return tell_end(
            self._returncode,
            said=reported_end(self._spool),
            oom_kills=self._scope.oom_kills(),
            ended_by=self._ended_by,
        )

    def _drain_pipes(self) -> None:
        """Read to the end; no process writes any more."""
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                continue
            with suppress(BlockingIOError):
                while chunk := os.read(key.fd, _CHUNK):
                    key.data.write(chunk)
            self._close(key)


_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""


LAUNCHER_S = 5.0
"""Longest wait for the launching process to exit, seconds. Chosen: it only has to exit."""


def main(arguments: list[str] | None = None) -> int:
    """Become a daemon and run the node in FOLDER to its end."""
    parser = argparse.ArgumentParser(prog="python -m envscaler_airflow.backends.local.node_main")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    os.set_inheritable(options.lock_fd, False)
    launcher = os.getpid()
    if os.fork():
        os._exit(0)  # now: the owner waits for this process; from here on the node is a child of init
    os.setsid()
    until = time.monotonic() + LAUNCHER_S
    while os.getppid() == launcher and time.monotonic() < until:
        time.sleep(0.001)  # it has the node's marker: a node that ends quickly would kill it as a leftover
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _ignore)  # not SIG_IGN, which the training would inherit
    run_guard(options.folder)
    return 0


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing; exec resets this handler, unlike SIG_IGN."""


def become_reaper() -> None:
    """Adopt orphaned descendants, so that none escapes by a double fork (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_guard(folder: Path) -> None:
    """Start node main, wait for it, and leave nothing of the node behind."""
    request = files.read_json(folder / files.REQUEST) or {}
    limits = request["limits"]
    name = f"{request['attempt']}-n{request['node']}-{request['id'][:8]}"
    scope = CgroupScope(notes=("no cgroups: switched off",))
    if request["cgroups"]:
        scope = build_scope(name, Limits(limits["memory_bytes"], limits["vcpus"]))
    try:
        scope.join("main")
    except OSError as err:
        scope.remove()
        scope = CgroupScope(notes=(*scope.notes, f"cgroup cannot be joined: {err}"))
    become_reaper()
    guard = ProcessId.of(os.getpid())
    pid = os.fork()
    if not pid:
        os._exit(run_main(folder, request, scope, guard))
    os.waitpid(pid, 0)
    survivors = Survivors(str(folder / files.SPOOL), guard, scope)
    while kill_all(survivors, spare={os.getpid()}, reap=reap):
        pass  # only a process stuck in the kernel: the node ends after it
    scope.leave()
    scope.remove()


def reap() -> None:
    """Collect dead children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run_main(folder: Path, request: dict[str, Any], scope: CgroupScope, guard: ProcessId | None) -> int:
    """Run node main; any failure in it is recorded as the node's end."""
    become_reaper()
    clock = Clock()
    me = ProcessId.of(os.getpid())
    body = {
        "id": request["id"],
        "main": me.to_dict() if me else None,
        "guard": guard.to_dict() if guard else None,
        "identity": this_identity().to_dict(),
        "started": clock.started,
        "scope": scope.to_dict(),
        "limits": scope.limits_said(request["limits"]),
    }
    node = None
    try:
        files.write_json(folder / files.NODE, body)
        node = NodeMain(folder, request, scope, guard=guard, clock=clock)
        end = node.run()
    except Exception as err:  # noqa: BLE001  # the outermost edge: an unreported end would look like a loss
        traceback.print_exc(file=sys.stderr)
        end = NodeEnd(None, None, "setup-failed" if node is None else "failed", f"node main: {err!r}"[:500])
        survivors = Survivors(str(folder / files.SPOOL), guard, scope, me)
        kill_all(survivors, spare={os.getpid(), os.getppid()}, reap=reap)
    files.write_json(folder / files.END, {"id": request["id"], **asdict(end), **clock.interval()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
