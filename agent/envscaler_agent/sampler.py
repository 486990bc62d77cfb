"""The sampler's process: one JSON line a second about GPUs and the command's processes.

A separate thread reads the GPUs, because a call into a broken driver may never return: then the lines
continue without them, and after :data:`CALL_S` this process names the call and exits. The wrapper starts
another one, which leaves that call out.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, Dict, Mapping, Optional

from envscaler_agent.gpu import Gpus, load_nvml
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
