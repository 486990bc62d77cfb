"""A training that only counts: it cooperates, saves its step, and records the time of each step."""

# ruff: noqa: T201 - what it prints is what the tests look for

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from envscaler_agent import Session


def note(step: int) -> None:
    """Append ``generation attempt step time`` to the test's ledger; one write, so that lines stay intact."""
    if not os.environ.get("LEDGER"):
        return
    line = (
        f"{os.environ['ENVSCALER_GENERATION']} {os.environ['ENVSCALER_ATTEMPT']} {step} {time.monotonic()}\n"
    )
    with Path(os.environ["LEDGER"]).open("a", encoding="utf-8") as file:
        file.write(line)


def main() -> None:
    """Count from the checkpoint's step to ``--steps``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("--fail-at", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with Session(total_steps=args.steps) as session:
        path = session.restore()
        step = json.loads((path / "step.json").read_text()) if path else 0
        print(f"starts at step {step}", flush=True)

        def save(folder: Path) -> None:
            (folder / "step.json").write_text(json.dumps(step))

        while step < args.steps:
            time.sleep(args.pause / int(os.environ.get("ENVSCALER_CPUS", "1")))
            step += 1
            if step == args.fail_at:
                sys.exit("fails as it was told")
            note(step)
            session.step(samples=1)
            print(f"step {step} done", flush=True)
            session.checkpoint(save)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "steps.json").write_text(json.dumps(step))
    print("counted", flush=True)


if __name__ == "__main__":
    main()
