"""Runs a random sample of mutmut's mutants: ``make mutants MINUTES=110 SEED=1``.

mutmut changes one expression at a time in what decides and acts; ``[tool.mutmut]`` in pyproject.toml names
the modules and the tests. A mutant survives if no test fails. Each survivor needs a test, or a line in
``survivors.yaml`` that names the reason why no user can notice it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

FOLDER = Path("mutants")
EXPLAINED = Path(__file__).with_name("survivors.yaml")
FIRST = "envscaler_airflow.run.recovery.x_still_fits__mutmut_1"
"""A mutant that is killed at once: with it mutmut generates all others, and measures the tests."""
PER_MUTANT_S, SHARE = 1.0, 0.25
"""What a mutant takes: a second, and this share of the time of all tests that reach it. Chosen: most are
killed early; what exceeds the time is not run."""
MOST_SURVIVORS = 0.05
"""Share of the sample that may survive. Chosen."""
NOTICED = {"killed", "timeout", "segfault", "caught by type check"}


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=110.0, help="time for the sample (default 110)")
    add("--seed", type=int, default=1, help="of the sample (default 1)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    add("--only", default="", help="only mutants whose name contains this")
    return parser


def main() -> int:
    """Run the sample; 1 if too many survive, or one without an explanation."""
    asked = options().parse_args()
    began = time.monotonic()
    run([FIRST], jobs=asked.jobs, until=None)
    names = sample(
        asked.seed, asked.only, left_s=asked.minutes * 60 - (time.monotonic() - began), jobs=asked.jobs
    )
    run(names, jobs=asked.jobs, until=began + asked.minutes * 60)
    found = {name: state for name, state in states().items() if name in set(names) and state != "not checked"}
    return report(found, known=len(states()), seed=asked.seed)


def mutmut(*words: str) -> list[str]:
    """The command line of mutmut in this environment."""
    return [str(Path(sys.executable).with_name("mutmut")), *words]


def run(names: Sequence[str], *, jobs: int, until: float | None) -> None:
    """Run these mutants, and stop at *until*."""
    command = mutmut("run", "--max-children", str(jobs), *names)
    log = FOLDER.parent / "build" / "mutants.log"
    log.parent.mkdir(exist_ok=True)
    with (
        log.open("w") as stream,
        subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT) as process,
    ):
        try:
            process.wait(None if until is None else max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        else:
            if process.returncode:
                sys.exit(f"mutmut ended with {process.returncode}:\n{log.read_text()[-4000:]}")


def sample(seed: int, only: str, *, left_s: float, jobs: int) -> list[str]:
    """As many mutants as fit into the time, in random order."""
    stats = json.loads((FOLDER / "mutmut-stats.json").read_text())
    durations, tests = stats["duration_by_test"], stats["tests_by_mangled_function_name"]
    names = sorted(name for name in states() if only in name)
    random.Random(seed).shuffle(names)
    room, chosen = left_s * jobs, []
    for name in names:
        reached = tests.get(name.partition("__mutmut_")[0], ())
        room -= PER_MUTANT_S + SHARE * sum(durations[one] for one in reached)
        if room < 0:
            break
        chosen.append(name)
    return chosen


def states() -> Mapping[str, str]:
    """State of every mutant, by its name."""
    done = subprocess.run(mutmut("results", "--all", "true"), check=True, capture_output=True, text=True)
    lines = (line.strip().rpartition(": ") for line in done.stdout.splitlines() if "__mutmut_" in line)
    return {name: state for name, _, state in lines}


def report(found: Mapping[str, str], *, known: int, seed: int) -> int:
    """Print each survivor, and how many there are."""
    explained = yaml.safe_load(EXPLAINED.read_text()) or {}
    survivors = sorted(name for name, state in found.items() if state not in NOTICED)
    unexplained = 0
    for name in survivors:
        diff = subprocess.run(mutmut("show", name), check=True, capture_output=True, text=True).stdout
        why = reason(explained, name, diff)
        unexplained += why is None
        print(f"{name}: {found[name]}: {why or 'no test notices it'}")
        print(
            "\n".join(
                line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
            )
        )
    counts = ", ".join(f"{count} {state}" for state, count in sorted(Counter(found.values()).items()))
    share = len(survivors) / max(1, len(found))
    print(f"seed {seed}: {len(found)} of {known} mutants ({counts})")
    print(f"{share:.1%} survive, {unexplained} of them without an explanation")
    return int(share > MOST_SURVIVORS or unexplained > 0)


def reason(explained: Mapping[str, Mapping[str, str]], name: str, diff: str) -> str | None:
    """Why *name* may survive: the list names its function, and the line as the mutant has it."""
    changed = {line[1:].strip() for line in diff.splitlines() if line[:1] == "+" and line[:3] != "+++"}
    known = explained.get(name.partition("__mutmut_")[0], {})
    return next((why for line, why in known.items() if line in changed), None)


if __name__ == "__main__":
    sys.exit(main())
