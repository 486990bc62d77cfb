"""A training of three phases, each of which suits another number of nodes: loading, training, evaluation.

``python walk.py --output model``

Every step is eight shards of work, divided among the nodes, so that more nodes make a step faster. The
training announces each phase, because utilization alone identifies phases only after a while. The next step
depends only on its number, so that number is the checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from envscaler_agent import Session

PHASES = (("loading", 60), ("training", 200), ("evaluation", 40))
"""Names of the phases, and the steps of each."""
SHARDS = 8


def phase_of(step: int) -> str:
    """The phase that *step* belongs to, counted from 0."""
    for name, steps in PHASES:
        if step < steps:
            return name
        step -= steps
    return PHASES[-1][0]


def work(step: int, rank: int, world_size: int, rounds: int) -> None:
    """This node's shards of *step*."""
    for shard in range(rank, SHARDS, world_size):
        digest = f"{step}/{shard}".encode()
        for _ in range(rounds):
            digest = hashlib.sha256(digest).digest()


def save(folder: Path, step: int, rank: int = 0) -> None:
    """Write what :func:`restored` reads; only the first node writes."""
    if rank == 0:
        (folder / "step.json").write_text(json.dumps({"step": step}), encoding="utf-8")


def restored(folder: Path | None) -> int:
    """The step to continue with."""
    if folder is None:
        return 0
    return int(json.loads((folder / "step.json").read_text(encoding="utf-8"))["step"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk through the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20_000, help="work of a shard")
    asked = parser.parse_args(arguments)
    total = sum(steps for _, steps in PHASES)
    with Session(total_steps=total) as session:
        announced = None
        for step in range(restored(session.restore()), total):
            if phase_of(step) != announced:
                announced = phase_of(step)
                session.phase(announced)
            work(step, session.rank, session.world_size, asked.rounds)
            session.step(samples=SHARDS)
            session.checkpoint(lambda folder, done=step + 1: save(folder, done, session.rank))
    if session.rank == 0:
        asked.output.mkdir(parents=True, exist_ok=True)
        save(asked.output, total)


if __name__ == "__main__":
    main(sys.argv[1:])
