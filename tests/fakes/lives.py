"""Attempts of a training one after another, without a sidecar: each resumes from the newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from envscaler_agent.protocol import Control, parse_checkpoint_name


class Life:
    """One attempt: a command with its own spool folder, resumed from *restore*."""

    def __init__(self, folder, command, *, attempt=1, restore=None, every=None, env=None):
        """Create the spool folder and start the process."""
        self.spool = folder / f"a{attempt}"
        (self.spool / "checkpoints").mkdir(parents=True)
        session = {"generation": 1, "attempt": attempt, "node": 0, "nodes": 1, "every": every}
        start = {"schema": "2.0", "session": {key: value for key, value in session.items() if value}}
        if restore is not None:
            step = parse_checkpoint_name(restore.name)[1]
            start["restore"] = {"path": str(restore), "name": restore.name, "step": step}
        (self.spool / "start.json").write_text(json.dumps(start))
        self.newest = restore
        self.output = self.spool / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "ENVSCALER_SPOOL": str(self.spool), **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def take_checkpoints(self):
        """Do the sidecar's work; True while the process lives."""
        alive = self.process.poll() is None
        complete = [path for path in (self.spool / "checkpoints").iterdir() if _is_new(path)]
        for path in sorted(complete, key=lambda each: parse_checkpoint_name(each.name)[1]):
            taken = self.spool / path.name
            path.rename(taken)
            (self.spool / "checkpoints" / f"{path.name}.done").touch()
            self.newest = taken
        return alive

    def until(self, count):
        """Let it run until it has saved *count* times; False when it ended earlier."""
        begin, seen = self.newest, set()
        while self.take_checkpoints():
            seen.add(self.newest)
            if len(seen - {begin}) >= count:
                return True
            time.sleep(0.005)
        return False

    def lose(self):
        """SIGKILL to every process at once, as when a machine is lost."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        self.take_checkpoints()

    def ask_to_leave(self, align="now"):
        """Write what the owner writes for a move."""
        draft = self.spool / ".control"
        draft.write_bytes(Control(sequence=1, action="drain", align=align, reason="move").to_json())
        draft.rename(self.spool / "control.json")

    def wait(self, patience_s=90):
        """Exit code."""
        give_up = time.monotonic() + patience_s
        while self.take_checkpoints() and time.monotonic() < give_up:
            time.sleep(0.01)
        return self.process.wait(timeout=1)

    def said(self):
        """What the training printed."""
        return self.output.read_text()


def _is_new(path: Path) -> bool:
    return path.is_dir() and parse_checkpoint_name(path.name) is not None
