"""Two ranks below torchrun: they save, stop and resume together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fakes.lives import Life

from envscaler_agent.protocol import parse_checkpoint_name

EXAMPLES = Path(__file__).parents[3] / "dags/examples/frameworks"
ROOT = Path(__file__).parents[3]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate", "elastic"])
def test_two_ranks_leave_and_go_on_together(framework, tmp_path):
    """On a request after a save both ranks stop with one checkpoint; the end is as without interruption."""
    script = str(EXAMPLES / f"train_{framework}.py")
    env = {"PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}

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


FULL_ONCE = """
import runpy, sys
from lightning.pytorch.strategies import DDPStrategy

write, calls = DDPStrategy.save_checkpoint, []

def full_once(strategy, *arguments, **named):
    calls.append(strategy)
    if len(calls) == 1 and strategy.global_rank == 0:
        raise OSError(28, "No space left on device")
    write(strategy, *arguments, **named)

DDPStrategy.save_checkpoint = full_once
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("train_lightning", run_name="__main__")
"""


@pytest.mark.timeout(120)
def test_a_disk_that_is_full_for_one_rank_holds_up_no_other(tmp_path):
    """Lightning's ranks wait for each other at the end of a save: a rank that failed reaches it too."""
    script = tmp_path / "full_once.py"
    script.write_text(FULL_ONCE)
    command = [*LAUNCHER, str(script), str(EXAMPLES), f"--output={tmp_path / 'model'}", "--epochs=1"]
    env = {"PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}
    life = Life(tmp_path, command, env=env, every={"steps": 7})

    assert life.wait() == 0, life.said()
    assert "checkpoint at step 7 failed, the one before stays: rank 0: OSError" in life.said()
    assert parse_checkpoint_name(life.newest.name)[1] == 28


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("framework", "before", "after", "batch"),
    [("accelerate", 2, 1, 64), ("accelerate", 1, 2, 64), ("transformers", 2, 1, 32)],
)
def test_another_number_of_ranks_goes_on_where_the_last_one_was(tmp_path, framework, before, after, batch):
    """Two epochs of 16 global batches: exactly 32 steps, for any number of ranks."""

    def life(ranks, **options):
        command = [*LAUNCHER[:-1], f"--nproc_per_node={ranks}", str(EXAMPLES / f"train_{framework}.py")]
        env = {"PYTHONPATH": str(ROOT / "agent"), "OMP_NUM_THREADS": "1"}
        env["ENVSCALER_GRADIENT_ACCUMULATION"] = str(4 // ranks)
        command += [f"--output={tmp_path}", "--epochs=2"]
        return Life(tmp_path, command, env=env, every={"steps": 9}, **options)

    first = life(before, attempt=1)
    assert first.until(1), first.said()
    first.lose()
    second = life(after, attempt=2, restore=first.newest)

    assert second.wait() == 0, second.said()
    progress = json.loads((second.spool / "progress/rank-0.json").read_text())
    assert (progress["step"], progress["samples"], progress["batch"]) == (32, 32 * batch, batch)
