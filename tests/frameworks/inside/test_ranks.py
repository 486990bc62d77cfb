"""Two ranks below torchrun: saved together, left together, and gone on with together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fakes.lives import Life

EXAMPLES = Path(__file__).parents[3] / "dags/examples/frameworks"
ROOT = Path(__file__).parents[3]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate", "elastic"])
def test_two_ranks_leave_and_go_on_together(framework, tmp_path):
    """Asked to leave after a save, both go with one checkpoint; the end is that of the undisturbed."""
    script = str(EXAMPLES / f"train_{framework}.py")
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def life(name, **options):
        command = [*LAUNCHER, script, f"--output={tmp_path / name}", "--epochs=2"]
        return Life(tmp_path / f"{name}-lives", command, env=env, **options)

    whole = life("whole")
    assert whole.wait() == 0, whole.said()
    first = life("moved", attempt=1, every={"steps": 7})
    assert first.until(1), first.said()
    first.ask_to_leave()
    first.wait()
    left = first.newest
    second = life("moved", attempt=2, restore=left)

    assert second.wait() == 0, second.said()
    ranks = sorted(path.name for path in left.rglob("*") if path.stem.endswith(("0", "1")))
    assert len(ranks) >= 2, ranks
    models = [torch.load(tmp_path / name / "model.pt") for name in ("whole", "moved")]
    assert max(float((models[0][name] - models[1][name]).abs().max()) for name in models[0]) <= 1e-6
