"""Runs seeds: ``python -m tests.simulation --help``, or ``make simulate SEEDS=1000 FROM=1``."""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text have another order in each process without it
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation import mutations, patches, shrink

if TYPE_CHECKING:
    from tests.simulation.run import Result

CORPUS = Path(__file__).with_name("corpus.txt")
PER_DAY = 100_000
"""Seeds that belong to one day. Chosen: more than a machine runs in a day."""
_clock = time.monotonic  # the real one


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its timeline")
    which.add_argument("--corpus", action="store_true", help="run every seed that ever failed")
    which.add_argument("--fresh", action="store_true", help="run the seeds of today")
    add = parser.add_argument
    add("--seeds", type=int, default=100, help="how many (default 100)")
    add("--from", dest="first", type=int, default=1, metavar="N", help="first seed (default 1)")
    add("--minutes", type=float, help="run more seeds until this time is over")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    add("--shrink", action="store_true", help="with --replay: drop faults that are not needed")
    add("--coverage", action="store_true", help="print which pairs of the state machine occur")
    add("--mutation", choices=mutations.MUTATIONS, help="put this fault into the code first")
    add("--until-found", action="store_true", help="end at the first seed that fails")
    return parser


def main() -> int:
    """Run what the options ask for; return 1 if a seed fails."""
    asked = options().parse_args()
    if asked.mutation:
        mutations.install(asked.mutation)
    patches.install()
    if asked.replay is not None:
        return replay(asked.replay, is_short=asked.shrink)
    return many(asked)


def replay(seed: int, *, is_short: bool) -> int:
    """Run one seed and print its timeline; *is_short*: with as few faults as possible."""
    from tests.simulation.run import simulate

    result = simulate(seed)
    if is_short and result.violation is not None:
        first = result.violation.partition(":")[0]

        def fails(muted: frozenset[str]) -> list[str] | None:
            again = simulate(seed, muted=muted)
            is_same = again.violation is not None and again.violation.partition(":")[0] == first
            return again.struck if is_same else None

        result = simulate(seed, muted=shrink.fewest(result.struck, fails))
    print(*result.lines, sep="\n")
    print(summary(result))
    return 0 if result.violation is None else 1


def one(seed: int) -> Result:
    """Run one seed, for a process of the pool; the timeline stays behind."""
    from tests.simulation.run import simulate

    result = simulate(seed)
    result.lines.clear()
    return result


def many(asked: argparse.Namespace) -> int:
    """Run many seeds in several processes, and print one line for each that fails."""
    began, counts = _clock(), Counter[str]()
    failed, done, cpu_s = [], 0, 0.0
    until = None if asked.minutes is None else began + 60 * asked.minutes
    for result in _results(asked, until):
        done, cpu_s = done + 1, cpu_s + result.cpu_s
        counts.update(result.counts)
        if result.violation is not None:
            failed.append(result.seed)
            print(summary(result), flush=True)
            if asked.until_found:
                break
    if asked.coverage:
        from tests.simulation import coverage

        print(*coverage.report(counts), sep="\n")
    print(
        f"{done} seeds, {len(failed)} failed, in {_clock() - began:.0f} s "
        f"({cpu_s / max(1, done):.2f} CPU-seconds each; {counts['steps']} steps, "
        f"{sum(count for name, count in counts.items() if name.startswith('fault '))} faults)"
    )
    return 1 if failed else 0


def _results(asked: argparse.Namespace, until: float | None) -> Iterator[Result]:
    """Run each seed in one of several processes; yields the results as they come."""
    waiting: set[Future[Result]] = set()
    seeds, fork = _seeds(asked, until), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(asked.jobs, mp_context=fork) as pool:
        try:
            while True:
                for seed in itertools.islice(seeds, 2 * asked.jobs - len(waiting)):
                    waiting.add(pool.submit(one, seed))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


def _seeds(asked: argparse.Namespace, until: float | None) -> Iterator[int]:
    """The seeds; with a time, at least as many as requested, and more until it is over."""
    if asked.corpus:
        yield from (seed for seed, _ in corpus())
        return
    today = (dt.datetime.now(dt.UTC).date() - dt.date(2026, 1, 1)).days
    first = today * PER_DAY if asked.fresh else asked.first
    for number in itertools.count():
        if number >= asked.seeds and (until is None or _clock() >= until):
            return
        yield first + number


def corpus() -> Iterable[tuple[int, str]]:
    """Each seed that ever failed, with the line on what it found."""
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            seed, _, found = line.partition(" ")
            yield int(seed), found.strip()


def summary(result: Result) -> str:
    """One line on a seed."""
    if result.violation is None:
        return f"seed {result.seed}: holds"
    what = result.violation.splitlines()[0]
    return f"seed {result.seed}: {what}; replay: make simulate REPLAY={result.seed}"


if __name__ == "__main__":
    sys.exit(main())
