"""The common command line of the trainings."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch


def parse(text: str | None) -> argparse.Namespace:
    """Parse it and set one thread, so that sums have the same order on every machine."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.0, help="wait in each step, to have time to watch")
    return parser.parse_args()


def write(output: Path, parameters: dict[str, torch.Tensor]) -> None:
    """Write the trained parameters."""
    output.mkdir(parents=True, exist_ok=True)
    torch.save(parameters, output / "model.pt")
    total = sum(float(value.double().sum()) for value in parameters.values() if value.is_floating_point())
    print(f"sum of the parameters: {total!r}", flush=True)


def wait(seconds: float) -> None:
    """Wait as long as a larger model would."""
    if seconds:
        time.sleep(seconds)
