"""A training without our library, with real sidecar and wrapper: interrupted and resumed."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from pathlib import Path

import attempts
import psutil

from envscaler_agent.protocol import Control, Manifest, control_name
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.store import open_store
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_checkpoint
from envscaler_airflow.store.run import Run

PREFIX = "dep/dag/run/train/-1"
SPEC = """
version: v1
name: plain
base: {image: "python:3.11"}
entrypoint: [python]
checkpoint: {path: /output/checkpoints, every: 1s}
metrics: {log_patterns: {step: 'step (\\d+)'}}
"""


class Plain:
    """One run of a script that saves to ``/output/checkpoints`` and prints its steps."""

    def __init__(self, folder: Path, script: str, *, python: str = sys.executable, spec: str = SPEC) -> None:
        """Create an empty store; nothing is started."""
        self.script = folder / "train.py"
        self.script.write_text(script)
        (folder / "store").mkdir()
        (folder / "spec.yaml").write_text(spec)
        self.url = f"file://{folder}/store"
        self.store = Run(open_store(self.url), PREFIX)
        self.backend = LocalBackend(folder / "root")
        self.python = python
        self.spec = load_spec(folder / "spec.yaml").to_dict()
        self.handles: list = []

    def start(self) -> Plain:
        """Start the next attempt from the checkpoints of the earlier ones."""
        attempt = len(self.handles) + 1
        control = Control(sequence=1, candidates=complete_checkpoints(self.store, 1))
        self.store.write(control_name(1, attempt), control.to_json())
        request = attempts.request(
            store_url=self.url,
            run_prefix=PREFIX,
            run_label="dag.train",
            generation=1,
            attempt=attempt,
            allocation=Allocation(self.backend.offers()[0]),
            command=(self.python, str(self.script), "/output/checkpoints"),
            spec=self.spec,
        )
        self.handles.append(self.backend.submit(request))
        return self

    def close(self) -> None:
        """Leave no process behind."""
        for handle in self.handles:
            self.backend.stop(handle, grace_s=0)
            self.backend.release(handle)

    def said(self, attempt: int = 0) -> str:
        """What an attempt printed, the last one by default."""
        return attempts.printed(self.handles[attempt - 1]).decode("utf-8", "replace")

    def until(self, pattern: str, patience_s: float = 150) -> str:
        """Wait until the live attempt has printed *pattern*; its output."""
        return self._await(lambda: self.said() if re.search(pattern, self.said()) else None, patience_s)

    def until_saved(self, *, step: int = 1, patience_s: float = 150) -> Manifest:
        """Wait until a checkpoint of *step* or later is in the store; its manifest."""
        return self._await(
            lambda: next((body for body in self.saved() if (body.step or 0) >= step), None), patience_s
        )

    def saved(self) -> list[Manifest]:
        """Manifests of all complete checkpoints, the newest first."""
        return [read_checkpoint(self.store, name) for name in complete_checkpoints(self.store, 1)]

    def kill(self) -> int:
        """SIGKILL to the command alone; returns the last step it printed."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self.script) in words and "envscaler_agent" not in words:
                    process.send_signal(signal.SIGKILL)
        self.over()
        return self.last_step()

    def lose(self) -> int:
        """SIGKILL to all of the machine's processes; returns the last printed step."""
        self.backend.take_away(self.handles[-1])
        self._await(lambda: not self._is_alive() or None, 30)
        return self.last_step()

    def _is_alive(self) -> bool:
        return any(node.state == "running" for node in self.backend.observe(self.handles[-1]).nodes)

    def last_step(self) -> int:
        """The last step that the live attempt printed."""
        return int([0, *re.findall(r"step (\d+)", self.said())][-1])

    def over(self, patience_s: float = 150) -> str:
        """Wait for the end of the live attempt; what it printed."""
        self._await(lambda: self.backend.observe(self.handles[-1]).is_over or None, patience_s)
        return self.said()

    def begins(self, patience_s: float = 150) -> int:
        """The first step of the live attempt, from its output."""
        return int(re.search(r"begins at (\d+)", self.until(r"begins at \d+", patience_s))[1])

    def _await(self, look, patience_s: float):
        until = time.monotonic() + patience_s
        while (found := look()) is None:
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)
        return found
