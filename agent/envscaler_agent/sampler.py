"""The sampler's process, one JSON line a second about GPUs and the command's processes, and its keeper.

A separate thread reads the GPUs, because a call into a broken driver may never return: then the lines
continue without them, and after :data:`CALL_S` this process names the call and exits. The wrapper starts
another one, which leaves that call out: :class:`SamplerChild` runs in the wrapper.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from envscaler_agent.gpu import Gpus, load_nvml, shown_gpus
from envscaler_agent.host import Host

CALL_S = 10.0
"""Longest time for one NVML call. Chosen: calls take milliseconds; half of the wrapper's limit."""
INIT_S = 60.0
"""Longest time for the first calls. Chosen: without persistence mode they load the driver, seconds per GPU.
"""
STALE_S = 15.0
"""Age from which GPU values are not reported. Chosen: three times the slow readings' interval."""
HUNG_EXIT = 3
"""Exit code after a call that hung. Chosen: neither success nor a crash of Python."""

Values = Mapping[str, Optional[float]]


class GpuThread:
    """Reads NVML repeatedly, and returns the last values on request."""

    def __init__(
        self,
        *,
        interval_s: float,
        visible: Optional[str],
        skip: "list[str]",
        load: Callable[[], Any] = load_nvml,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; :meth:`start` begins."""
        self._interval_s = interval_s
        self._visible = visible
        self._skip = skip
        self._load = load
        self._clock = clock
        self._gpus: Optional[Gpus] = None
        self._values: Dict[str, float] = {}
        self._heard_at = -math.inf
        self._began_at = clock()
        self._is_over = False

    def start(self) -> None:
        """Begin to read, unless the very first call hung before."""
        if "gpu:init" not in self._skip:
            threading.Thread(target=self.run, name="gpu", daemon=True).start()
        else:
            self._is_over = True

    def run(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Read until there is nothing to read."""
        nvml = self._load()
        if nvml is not None:
            gpus = Gpus(nvml, visible=self._visible, skip=self._skip, clock=self._clock)
            self._gpus = gpus  # before any call: otherwise no thread sees which call hangs
            gpus.find()
            while gpus.devices:
                self._values = gpus.sample(self._clock())
                self._heard_at = self._clock()
                sleep(self._interval_s)
        self._is_over = True

    def values(self, now: float) -> Dict[str, float]:
        """Return the last values, {} when they are old."""
        return dict(self._values) if now - self._heard_at < STALE_S else {}

    def hangs_at(self, now: float) -> Optional[str]:
        """Return the call that hangs, None without one."""
        if self._is_over:
            return None
        if self._gpus is None:
            return "gpu:init" if now - self._began_at > INIT_S else None
        call = self._gpus.call
        if call is None:
            return None
        return call[0] if now - call[1] > (CALL_S if self._gpus.is_searched else INIT_S) else None


def line(values: Values, *, t: float, at: float) -> bytes:
    """Return one JSON line; unknown values are left out."""
    body: Dict[str, float] = {"t": round(t, 3), "at": round(at, 3)}
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            body[name] = int(value) if value == int(value) else round(value, 3)
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def main(options_json: str) -> None:
    """Sample until the wrapper has ended."""
    options: Dict[str, Any] = json.loads(options_json)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the wrapper handles a terminal's Ctrl-C
    interval_s, origin = float(options["interval_s"]), float(options["origin"])
    host = Host(int(options["root"]))
    gpus = GpuThread(interval_s=interval_s, visible=options.get("visible"), skip=options.get("skip", []))
    gpus.start()
    out = sys.stdout.fileno()
    due = time.monotonic()
    try:
        while os.getppid() == options["parent"]:
            now = time.monotonic()
            values = {**host.sample(now, own=os.getpid()), **gpus.values(now)}
            os.write(out, line(values, t=now - origin, at=time.time()))
            hung = gpus.hangs_at(now)
            if hung is not None:
                os.write(out, json.dumps({"hung": hung}).encode() + b"\n")
                os._exit(HUNG_EXIT)  # the thread that hangs cannot be joined
            due = max(due + interval_s, now)
            time.sleep(max(0.0, due - time.monotonic()))
    except BrokenPipeError:
        pass
    os._exit(0)  # for the same reason


HANG_S = 20.0
"""Silence after which the sampler is replaced. Chosen: twice its own limit for one GPU call."""
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
GOOD_S = 120.0
"""A sampler that ran this long resets the back-off. Chosen: twice the longest back-off."""
_BOOT = "import sys; sys.path[:] = {path!r}; from envscaler_agent.sampler import main; main({options!r})"


class SamplerChild:
    """At most one sampler at a time.

    Attributes:
        pid: Process id, None while none runs.
        output: Descriptor of its lines, None while none runs.
        starts: How often one was started.
    """

    def __init__(self, *, interval_s: float, origin: float, clock: Callable[[], float]) -> None:
        """Prepare; *origin* is the moment of the clock that is ``t`` = 0."""
        self.pid: Optional[int] = None
        self.output: Optional[int] = None
        self.starts = 0
        self._options: Dict[str, Any] = {"interval_s": interval_s, "origin": origin, "parent": os.getpid()}
        self._hang_s = max(HANG_S, 10 * interval_s)
        self._clock = clock
        self._skip: Set[str] = set()
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._rest = b""
        self._heard_at = self._started_at = 0.0
        self._next_start = 0.0
        self._failures = 0
        self._killed: Set[int] = set()

    def watch(self, root: int, environ: Dict[str, str]) -> None:
        """Sample the family of process *root* and the GPUs that *environ* shows it."""
        self._options.update(root=root, visible=shown_gpus(environ))
        self._next_start = self._clock()

    def tick(self, now: float) -> None:
        """Start one that is due, kill one that hangs."""
        if self.pid is not None and now - self._heard_at > self._hang_s:
            self.kill()
        elif self.pid is None and "root" in self._options and now >= self._next_start:
            self._start(now)

    def read(self) -> List[Dict[str, Any]]:
        """Return the samples that have arrived; call it when ``output`` is readable."""
        assert self.output is not None
        try:
            data = os.read(self.output, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._close()
            return []
        self._heard_at = self._clock()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        samples = [sample for sample in map(_parse, lines) if sample is not None]
        for sample in samples:
            if isinstance(sample.get("hung"), str):
                self._skip.add(sample["hung"])
        return [sample for sample in samples if "hung" not in sample]

    def reaped(self, pid: int, code: int) -> bool:
        """Record that child *pid* has ended; False when it was another process."""
        if pid in self._killed:
            self._killed.discard(pid)
            return True
        if pid != self.pid:
            return False
        if self._process is not None:
            self._process.returncode = code
        self._forget()
        return True

    def kill(self) -> None:
        """Kill it for good; a process stuck in the driver cannot die, so nothing waits for it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, 9)
            self._process.returncode = -9
            self._killed.add(self._process.pid)
        self._forget()

    def stop(self) -> None:
        """Kill it and start no other."""
        self._options.pop("root", None)
        self.kill()

    def _start(self, now: float) -> None:
        package = str(Path(__file__).resolve().parents[2])
        options = json.dumps({**self._options, "skip": sorted(self._skip)})
        code = _BOOT.format(path=[package, *(path for path in sys.path if path)], options=options)
        self._heard_at = self._started_at = now
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError:
            self._forget()
            return
        self.starts += 1
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.output = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()

    def _forget(self) -> None:
        self._close()
        self._rest = b""
        self.pid = None
        self._process = None
        now = self._clock()
        self._failures = 0 if now - self._started_at > GOOD_S else self._failures + 1
        self._next_start = now + BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1 if self._failures else 0]

    def _close(self) -> None:
        if self.output is not None:
            os.close(self.output)
            self.output = None


def _parse(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return sample if isinstance(sample, dict) else None
