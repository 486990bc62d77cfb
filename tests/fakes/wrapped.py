"""The wrapper with its own spool folder, and a training to run in it."""

import json
import os
import signal
import subprocess
import sys
import time

from envscaler_agent import process
from envscaler_agent import spool as ex
from envscaler_agent.protocol import Status

TRAIN = """
import sys, time
from envscaler_agent import Session
with Session(total_steps=10**6) as session:
    path = session.restore()
    print("restored", path, session.steps)
    def save(folder):
        (folder / "w").write_text(str(session.steps))
        {in_save}
    while True:
        time.sleep(0.005)
        session.step(samples=8, loss=0.5)
        session.checkpoint(save, epoch_end=session.steps % 20 == 0)
"""


def joined(folder):
    """All chunks of a folder in order; a chunk that is closed meanwhile is read again."""
    for _ in range(100):
        try:
            return b"".join(path.read_bytes() for path in sorted(folder.glob("0*")))
        except FileNotFoundError:
            continue
    raise AssertionError(folder)


class Node:
    """One spool folder and at most one wrapper on it at a time."""

    def __init__(self, root):
        """Use *root*, and create it."""
        self.spool = ex.Spool(root)
        self.process = None
        self.sequence = 0

    def start(self, *argv, setup=None, options=(), env=None, **session):
        """Start the wrapper with a ``start.json`` of *setup* and *session*."""
        session = {"generation": 1, "attempt": 1, **session}
        ex.write_json(self.spool.start, {"session": session, **(setup or {})})
        return self.run(*options, "--", *argv, env=env)

    def run(self, *arguments, env=None):
        """Start the wrapper on the present content of the spool folder."""
        command = [
            sys.executable,
            "-m",
            "envscaler_agent",
            "run",
            "--spool",
            str(self.spool.root),
        ]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        return self

    def train(self, *, in_save="", **session):
        """Start a cooperating training and wait until it has made steps."""
        self.start(sys.executable, "-c", TRAIN.format(in_save=in_save), **session)
        self.until(lambda: (self.report().progress.step or 0) > 5)
        return self

    def ask(self, action, **fields):
        """Write a request as the owner does."""
        self.sequence += 1
        ex.write_json(self.spool.control, {"sequence": self.sequence, "action": action, **fields})

    def end(self, timeout=20):
        """Wait for the wrapper's end: exit code, output, errors."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out.decode(), err.decode()

    def status(self):
        """The wrapper's last status."""
        try:
            return Status.from_json(self.spool.wrapper.read_bytes(), where="wrapper.json")
        except FileNotFoundError:
            return Status()

    def report(self):
        """The session's last status."""
        try:
            return ex.parse_report(self.spool.progress.read_bytes())
        except FileNotFoundError:
            return ex.SessionReport()

    def log(self):
        """All output in chunks, closed or not."""
        return joined(self.spool.logs)

    def metrics(self):
        """All metric lines."""
        return [json.loads(line) for line in joined(self.spool.metrics).splitlines()]

    def saves(self):
        """Complete checkpoints."""
        folder = self.spool.checkpoints
        return sorted(path.name for path in folder.glob("g*")) if folder.is_dir() else []

    def children(self):
        """Processes below the wrapper."""
        return [pid for pid in process.family(self.process.pid, process.parents()) if pid != self.process.pid]

    def kill(self):
        """End the machine: everything at once, without warning."""
        for pid in [self.process.pid, *self.children()]:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=10)

    def until(self, condition, timeout=15):
        """Wait until *condition* is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {self.status()}"
            assert self.process.poll() is None or condition(), self.process.communicate()
            time.sleep(0.02)
