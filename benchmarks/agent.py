"""What the agent costs: its own CPU time, and the throughput of a training with and without it.

``python benchmarks/agent.py [--pairs N] [--seconds S] [--json FILE]``

Two numbers, both of real processes on this machine:

- CPU seconds of wrapper and sampler (by /proc) per second of a training that makes 20 steps a second,
  at one sample a second; start-up is left out and stated beside it. The goal is at most 0.5 % of one core.
- A paired A/B: the same small CPU loop (no numpy) that counts its own steps, alternately bare and
  under the agent, in random order within each pair. The mean of the paired differences has a
  confidence interval by Student's t over the pairs; a machine that others use makes it wide, and
  it is then said as it is.
"""

from __future__ import annotations

import argparse
import json
import math
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
T_95 = {4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 29: 2.045}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom. Source: any statistics table."""

LOOP = """
import sys, time
seconds, cooperates = float(sys.argv[1]), sys.argv[2] == "1"
steps = 0
if cooperates:
    from envscaler_airflow.agent import Session
    session = Session().__enter__()
cpu, wall = time.process_time(), time.monotonic()
while time.monotonic() < wall + seconds:
    total = 0
    for number in range(20000):
        total += number * number
    steps += 1
    if cooperates:
        session.step(samples=1, loss=0.5)
        session.checkpoint(lambda folder: None)
print(steps / (time.monotonic() - wall), steps / (time.process_time() - cpu))
"""
STEPPING = """
import time
from envscaler_airflow.agent import Session
with Session() as session:
    while True:
        time.sleep(0.05)
        session.step(samples=1, loss=0.5)
        session.checkpoint(lambda folder: None)
"""


def wrapped(exchange: Path, *command: str, sample_interval_s: float = 1.0) -> list[str]:
    """A command under the agent; its exchange folder is laid out."""
    exchange.mkdir(parents=True)
    session = {"sample_interval_s": sample_interval_s}
    start = {"schema": "1.0", "session": session}
    (exchange / "start.json").write_text(json.dumps(start), encoding="utf-8")
    agent = [sys.executable, "-m", "envscaler_airflow.agent", "run", "--exchange", str(exchange)]
    return [*agent, "--", *command]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, by /proc; its children do not count."""
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
    """CPU per cent of one core that wrapper and sampler use beside a quiet training."""
    with tempfile.TemporaryDirectory() as folder:
        command = wrapped(Path(folder) / "exchange", sys.executable, "-c", STEPPING)
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


def throughput(seconds: float, *, with_agent: bool, folder: Path) -> tuple[float, float]:
    """Steps of the loop per second, and per CPU second."""
    command = [sys.executable, "-c", LOOP, str(seconds), "1" if with_agent else "0"]
    if with_agent:
        command = wrapped(folder, *command)
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    wall, cpu = done.stdout.split()[-2:]
    return float(wall), float(cpu)


def compare(pairs: int, seconds: float) -> dict[str, dict[str, float]]:
    """Relative change by the agent, per cent, with its 95 % confidence interval."""
    chance = random.Random(1)
    found: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            order = [False, True]
            chance.shuffle(order)
            got = {on: throughput(seconds, with_agent=on, folder=Path(folder) / str(number)) for on in order}
            found.append(tuple(100 * (a / b - 1) for a, b in zip(got[True], got[False], strict=True)))
    names = ("steps per second", "steps per CPU second")
    return {
        name: interval(list(column)) for name, column in zip(names, zip(*found, strict=True), strict=True)
    }


def interval(differences: list[float]) -> dict[str, float]:
    """Mean and its 95 % confidence interval by Student's t."""
    count = len(differences)
    mean = statistics.mean(differences)
    freedom = max(known for known in T_95 if known <= count - 1)
    half = T_95[freedom] * statistics.stdev(differences) / math.sqrt(count)
    return {"change_percent": mean, "low_percent": mean - half, "high_percent": mean + half, "pairs": count}


def main() -> int:
    """Measure, print, and fail when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10, help="A/B pairs, at least 5")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run of the A/B")
    parser.add_argument("--own-seconds", type=float, default=60.0, help="length of the CPU measurement")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    cost = own_cost(options.own_seconds)
    found: dict[str, Any] = {"own": cost, "load": os.getloadavg()[0]}
    print(
        f"own CPU: {cost['percent']:.2f} % of one core (wrapper {cost['wrapper_percent']:.2f}, "
        f"sampler {cost['sampler_percent']:.2f}) over {cost['wall_s']:.0f} s; goal {GOAL_PERCENT} %; "
        f"start-up {cost['startup_cpu_s']:.2f} CPU s, once"
    )
    if options.pairs:
        found["throughput"] = compare(max(5, options.pairs), options.seconds)
        for name, change in found["throughput"].items():
            print(
                f"{name} with the agent: {change['change_percent']:+.2f} % "
                f"(95 % interval {change['low_percent']:+.2f} to {change['high_percent']:+.2f}, "
                f"{change['pairs']:.0f} pairs, load {found['load']:.1f})"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if cost["percent"] <= GOAL_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
