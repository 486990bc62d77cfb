"""Pause of a rescale: a move of ours against torchrun's own elastic restart, on the same training.

    make frameworks-venv && .venv/bin/python benchmarks/rescale.py [--repeats 3]

Both run dags/examples/frameworks/train_elastic.py, save every 20 steps, go from one worker to two and back to
one, and are timed in one run, in turn. The pause is the time from the last step before the change to the
first new step after it. It includes repeating the steps since the last save.

- ours: ``envscaler run``, and a forced move. Workers are nodes of the local backend.
- torchrun: ``--nnodes=1:2``. A second agent joins, and later gets SIGTERM. Its workers resume from the newest
  save. Measured with defaults, where a rendezvous waits 30 s for a node that may join, and with
  ``last_call_timeout=1``. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set because without it torchrun 2.13 never
  recovers from a joining node: the first agent does not publish its address again.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fakes.owned import Owned  # noqa: E402 - found by the path above

EXAMPLES = ROOT / "dags/examples"
PYTHON = ROOT / ".venv-frameworks/bin/python"
EPOCHS = "200"
TRACED = """
import os, runpy, shutil, sys, time
from pathlib import Path
import torch
from envscaler_agent import Session
sys.path.insert(0, {scripts!r})

made = Session.step
def step(self, **what):
    made(self, **what)
    if self.rank == 0:
        with open({trace!r}, "a") as file:
            file.write(f"{{time.monotonic()}} {{self.steps}} {{self.world_size}}\\n")
Session.step = step

def restore(self):
    found = sorted(Path({saves!r}).glob("step-*"))
    if found:
        self.steps = int(found[-1].name[5:])
        return found[-1]

def checkpoint(self, save, epoch_end=None):
    if self.steps % 20 == 0:
        draft, final = Path({saves!r}) / ".draft", Path({saves!r}) / f"step-{{self.steps:06d}}"
        draft.mkdir(exist_ok=True)
        save(draft)
        torch.distributed.barrier()
        if self.rank == 0:
            draft.rename(final)
        torch.distributed.barrier()

if {is_alone}:
    Session.restore, Session.checkpoint = restore, checkpoint
sys.argv[0] = "train_elastic.py"
runpy.run_path({scripts!r} + "/train_elastic.py", run_name="__main__")
"""
"""The training with the time of each step recorded; without a stage it saves and resumes by itself."""


class Trace:
    """Steps of one training: the time, the number, and the number of workers."""

    def __init__(self, path: Path) -> None:
        """Start without any step."""
        self._path = path

    def steps(self) -> list[tuple[float, int, int]]:
        """All so far."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [line.split() for line in lines if len(line.split()) == 3]
        return [(float(at), int(step), int(workers)) for at, step, workers in rows]

    def await_steps(self, count: int, workers: int) -> None:
        """Wait until this many workers have made *count* steps in a row."""
        until = time.monotonic() + 180
        while time.monotonic() < until:
            last = self.steps()[-count:]
            if len(last) == count and {row[2] for row in last} == {workers}:
                return
            time.sleep(0.05)
        raise SystemExit(f"{workers} workers made no {count} steps: {self.steps()[-3:]}")

    def pauses(self) -> list[float]:
        """Seconds from the last step before each change to the first new one after it."""
        found, rows = [], self.steps()
        for index in range(1, len(rows)):
            if rows[index][2] != rows[index - 1][2]:
                newest = max(rows[:index], key=lambda row: row[1])
                first_new = next(row for row in rows[index:] if row[1] > newest[1])
                found.append(first_new[0] - newest[0])
        return found


def script(folder: Path, *, is_alone: bool) -> Trace:
    """Write the traced training into *folder*."""
    trace = folder / "trace"
    (folder / "saves").mkdir()
    fields = {"trace": str(trace), "saves": str(folder / "saves"), "scripts": str(EXAMPLES / "frameworks")}
    (folder / "train.py").write_text(TRACED.format(**fields, is_alone=is_alone))
    return Trace(trace)


def ours(folder: Path) -> list[float]:
    """Pauses of a move to two nodes and of a move back."""
    trace = script(folder, is_alone=False)
    arguments = ["python", str(folder / "train.py"), "--output=/output/model", f"--epochs={EPOCHS}"]
    run = Owned(
        folder, EXAMPLES / "envs/elastic_torch.yaml", PYTHON, entrypoint=[*arguments, "--step-s=0.05"]
    )
    try:
        run.start()
        trace.await_steps(30, 1)
        for number, nodes in enumerate((2, 1), start=2):
            run.move(to="cpu-1", nodes=nodes)
            trace.await_steps(30, nodes)
            assert run.state().current.number == number
    finally:
        run.close()
    return trace.pauses()


def torchruns(folder: Path, *, last_call_s: int | None) -> list[float]:
    """Pauses of torchrun's membership changes."""
    trace = script(folder, is_alone=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(PYTHON.parent / "torchrun"), "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=100"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=one"]
    command += [] if last_call_s is None else [f"--rdzv_conf=last_call_timeout={last_call_s}"]
    command += [str(folder / "train.py"), f"--output={folder}/model", f"--epochs={EPOCHS}", "--step-s=0.05"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}
    env |= {"ENVSCALER_GLOBAL_BATCH": "32", "ENVSCALER_MICRO_BATCH": "16"}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []

    def join() -> subprocess.Popen[bytes]:
        with (folder / f"agent-{len(agents)}").open("w") as said:
            agents.append(
                subprocess.Popen(
                    command, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
        return agents[-1]

    try:
        join()
        trace.await_steps(30, 1)
        second = join()
        trace.await_steps(30, 2)
        second.send_signal(signal.SIGTERM)
        trace.await_steps(30, 1)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    return trace.pauses()


def main() -> None:
    """Measure in turn, print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1, help="of four minutes each")
    asked = parser.parse_args()
    ways = {
        "ours: a move": ours,
        "torchrun, defaults": lambda folder: torchruns(folder, last_call_s=None),
        "torchrun, last_call 1 s": lambda folder: torchruns(folder, last_call_s=1),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(asked.repeats):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(prefix="rescale-") as folder:
                found[name].append(way(Path(folder)))
            print(f"  {name}: {[round(pause, 1) for pause in found[name][-1]]} s", flush=True)
    print(f"{'':26}{'1 to 2 workers':>16}{'2 to 1':>10}   median of {asked.repeats}")
    for name, runs in found.items():
        up, down = (statistics.median(run[change] for run in runs) for change in (0, 1))
        print(f"{name:26}{up:14.1f} s{down:8.1f} s")


if __name__ == "__main__":
    main()
