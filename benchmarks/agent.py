"""What the agent costs: its own CPU time, and what a training does with and without it.

``python benchmarks/agent.py [--pairs N] [--steps N] [--json FILE]``

Three numbers, all of real processes on this machine:

- CPU seconds of wrapper and sampler (by /proc) per second of a training that makes 20 steps a second, at one
  sample a second; start-up is excluded and reported separately. The goal is at most 0.5 % of one core.
- CPU time of ``session.step`` and ``session.checkpoint`` together, when nothing is due: 200,000 calls of each
  in one process under the wrapper.
- A paired A/B: the same fixed work, alternately bare and under the agent, in random order within each pair,
  after two seconds for imports and other one-time work. A step hashes a MiB, about a millisecond. It
  allocates nothing: loops that do differ by several per cent with the modules imported before. The comparison
  uses the CPU time of the training per step, which other processes disturb least, and also the wall time per
  step. The result is the median of the ratios of all pairs, with a 95 % interval by the bootstrap over pairs
  (Efron, "Bootstrap Methods", Annals of Statistics 7, 1979: percentile interval): one pair that another
  program disturbed changes neither.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL_PERCENT = 0.5
SETTLE_S = 5.0
RESAMPLES = 10_000
"""Resamples of the bootstrap. Chosen: the interval's ends are then stable to a hundredth of a per cent."""

LOOP = """
import hashlib, sys, time
steps, cooperates = int(sys.argv[1]), sys.argv[2] == "1"
if cooperates:
    from envscaler_agent import Session
    session = Session().__enter__()
block = bytes(1 << 20)
def step():
    hashlib.sha256(block).digest()
    if cooperates:
        session.step(samples=1, loss=0.5)
        session.checkpoint(lambda folder: None)
warm = time.monotonic() + 2.0
while time.monotonic() < warm:
    step()
cpu, wall = time.process_time(), time.monotonic()
for _ in range(steps):
    step()
print((time.process_time() - cpu) / steps, (time.monotonic() - wall) / steps)
"""
CALLS = """
import time
from envscaler_agent import Session
with Session() as session:
    def call(times):
        for _ in range(times):
            session.step(samples=1, loss=0.5)
            session.checkpoint(lambda folder: None)
    call(2000)
    start = time.process_time()
    call(200000)
    print((time.process_time() - start) / 200000)
"""
STEPPING = """
import time
from envscaler_agent import Session
with Session() as session:
    while True:
        time.sleep(0.05)
        session.step(samples=1, loss=0.5)
        session.checkpoint(lambda folder: None)
"""


def wrapped(spool: Path, *command: str, sample_interval_s: float = 1.0) -> list[str]:
    """A command under the agent, with its spool folder created."""
    spool.mkdir(parents=True)
    session = {"sample_interval_s": sample_interval_s}
    start = {"schema": "2.0", "session": session}
    (spool / "start.json").write_text(json.dumps(start), encoding="utf-8")
    agent = [sys.executable, "-m", "envscaler_agent", "run", "--spool", str(spool)]
    return [*agent, "--", *command]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, by /proc, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Direct children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def own_cost(seconds: float) -> dict[str, float]:
    """CPU per cent of one core that wrapper and sampler use next to an idle training."""
    with tempfile.TemporaryDirectory() as folder:
        command = wrapped(Path(folder) / "spool", sys.executable, "-c", STEPPING)
        agent = subprocess.Popen(command)
        try:
            time.sleep(SETTLE_S)
            training = {
                pid
                for pid in children(agent.pid)
                if b"Session()" in Path(f"/proc/{pid}/cmdline").read_bytes()
            }
            sampler = [pid for pid in children(agent.pid) if pid not in training]
            parts = {"wrapper": [agent.pid], "sampler": sampler}
            before = {name: sum(map(cpu_seconds, pids)) for name, pids in parts.items()}
            began = time.monotonic()
            time.sleep(seconds)
            used = {name: sum(map(cpu_seconds, pids)) - before[name] for name, pids in parts.items()}
            wall = time.monotonic() - began
        finally:
            agent.terminate()
            agent.wait(timeout=60)
    percent = {f"{name}_percent": 100 * value / wall for name, value in used.items()}
    return {
        **percent,
        "percent": sum(percent.values()),
        "startup_cpu_s": sum(before.values()),
        "wall_s": wall,
    }


def call_us() -> float:
    """Microseconds of CPU that one ``step`` and one ``checkpoint`` take, when nothing is due."""
    with tempfile.TemporaryDirectory() as folder:
        command = wrapped(Path(folder) / "spool", sys.executable, "-c", CALLS)
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    return 1e6 * float(done.stdout.split()[-1])


def seconds_per_step(steps: int, *, with_agent: bool, folder: Path) -> tuple[float, float]:
    """CPU and wall seconds that one step of the loop takes."""
    command = [sys.executable, "-c", LOOP, str(steps), "1" if with_agent else "0"]
    if with_agent:
        command = wrapped(folder, *command)
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    cpu, wall = done.stdout.split()[-2:]
    return float(cpu), float(wall)


def compare(pairs: int, steps: int) -> dict[str, dict[str, float]]:
    """Additional time of a step with the agent, per cent, with its 95 % interval."""
    chance = random.Random(1)
    found: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            order = [False, True]
            chance.shuffle(order)
            got = {
                on: seconds_per_step(steps, with_agent=on, folder=Path(folder) / str(number)) for on in order
            }
            found.append(tuple(a / b for a, b in zip(got[True], got[False], strict=True)))
    names = ("CPU time of a step", "wall time of a step")
    return {
        name: {**interval(list(column), chance), "pairs": len(found)}
        for name, column in zip(names, zip(*found, strict=True), strict=True)
    }


def interval(ratios: list[float], chance: random.Random) -> dict[str, float]:
    """Median of *ratios* less one, per cent, and its 95 % percentile interval by the bootstrap."""
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return {
        "change_percent": 100 * (statistics.median(ratios) - 1),
        "low_percent": 100 * (low - 1),
        "high_percent": 100 * (high - 1),
    }


def main() -> int:
    """Measure, print, and fail when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=30, help="A/B pairs; 0 leaves the A/B out")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run of the A/B")
    parser.add_argument("--own-seconds", type=float, default=60.0, help="length of the CPU measurement")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    cost = own_cost(options.own_seconds)
    found: dict[str, Any] = {"own": cost, "load": os.getloadavg()[0], "cpus": os.cpu_count()}
    print(
        f"own CPU: {cost['percent']:.2f} % of one core (wrapper {cost['wrapper_percent']:.2f}, "
        f"sampler {cost['sampler_percent']:.2f}) over {cost['wall_s']:.0f} s; goal {GOAL_PERCENT} %; "
        f"start-up {cost['startup_cpu_s']:.2f} CPU s, once"
    )
    found["call_us"] = call_us()
    print(f"session.step and session.checkpoint: {found['call_us']:.1f} us of CPU a step, nothing due")
    if options.pairs:
        found["step"] = compare(options.pairs, options.steps)
        for name, change in found["step"].items():
            print(
                f"{name} with the agent: {change['change_percent']:+.2f} % (median of {options.pairs} pairs, "
                f"95 % interval {change['low_percent']:+.2f} to {change['high_percent']:+.2f}, "
                f"load {found['load']:.1f} on {found['cpus']} CPUs)"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if cost["percent"] <= GOAL_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
