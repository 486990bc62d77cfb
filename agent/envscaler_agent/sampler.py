"""The sampler's process: one JSON line a second about GPUs and the command's processes.

GPUs are asked in a thread of their own, since a call into a sick driver may never
return: then the lines go on without them, and after :data:`CALL_S` this process names
the call and ends. The wrapper starts another, which leaves that call out.
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
"""Longest that one NVML call may take. Chosen: they take milliseconds; half of the wrapper's patience."""
INIT_S = 60.0
"""Longest for those that begin. Chosen: without persistence mode they load the driver, seconds per GPU."""
STALE_S = 15.0
"""Age at which GPU values are no longer said. Chosen: three times the slow readings' interval."""
HUNG_EXIT = 3
"""Exit code after a call that hung. Chosen: neither success nor a crash of Python."""

Values = Mapping[str, Optional[float]]


class GpuThread:
    """Asks NVML again and again, and can be asked what it last heard."""

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
        """Begin to ask, unless the very first call hung before."""
        if "gpu:init" not in self._skip:
            threading.Thread(target=self.run, name="gpu", daemon=True).start()
        else:
            self._is_over = True

    def run(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Ask until there is nothing to ask."""
        nvml = self._load()
        if nvml is not None:
            gpus = Gpus(nvml, visible=self._visible, skip=self._skip, clock=self._clock)
            self._gpus = gpus  # before it asks anything: else nobody sees which question hangs
            gpus.find()
            while gpus.devices:
                self._values = gpus.sample(self._clock())
                self._heard_at = self._clock()
                sleep(self._interval_s)
        self._is_over = True

    def values(self, now: float) -> Dict[str, float]:
        """Return what was heard last, {} when that is old."""
        return dict(self._values) if now - self._heard_at < STALE_S else {}

    def hangs_at(self, now: float) -> Optional[str]:
        """Return the call that hangs, None when none does."""
        if self._is_over:
            return None
        if self._gpus is None:
            return "gpu:init" if now - self._began_at > INIT_S else None
        call = self._gpus.call
        if call is None:
            return None
        return call[0] if now - call[1] > (CALL_S if self._gpus.is_searched else INIT_S) else None


def line(values: Values, *, t: float, at: float) -> bytes:
    """Return one JSON line; what is unknown is left out."""
    body: Dict[str, float] = {"t": round(t, 3), "at": round(at, 3)}
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            body[name] = int(value) if value == int(value) else round(value, 3)
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def main(options_json: str) -> None:
    """Sample until the wrapper is gone."""
    options: Dict[str, Any] = json.loads(options_json)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the wrapper's to handle
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
                os._exit(HUNG_EXIT)  # the thread that hangs cannot be waited for
            due = max(due + interval_s, now)
            time.sleep(max(0.0, due - time.monotonic()))
    except BrokenPipeError:
        pass
    os._exit(0)  # likewise
