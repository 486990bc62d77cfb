"""The sampler's process: started, watched, and replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set

from envscaler_agent.gpu import shown_gpus

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
    except ValueError:
        return None
    return sample if isinstance(sample, dict) else None
