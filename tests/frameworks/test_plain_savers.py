"""The frameworks' own savers, without a line of ours: killed at random, resumed by their own code (C)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from fakes.plain import Plain

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("FRAMEWORKS_PYTHON", ROOT / ".venv-frameworks/bin/python"))

HEAD = """
import glob, os, re, sys, time
import torch
torch.set_num_threads(1)
OUT, STEPS = sys.argv[1], 40
os.makedirs(OUT, exist_ok=True)
def newest(pattern):
    found = glob.glob(os.path.join(OUT, pattern))
    return max(found, key=lambda name: int(re.findall(r"\\d+", os.path.basename(name))[-1]), default=None)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
found = newest("checkpoint-*")
if found: accelerator.load_state(found)
step = int(found.split("-")[-1]) if found else 0
print("begins at", step, flush=True)
while step < STEPS:
    accelerator.backward(model(torch.randn(8, 4)).pow(2).mean()); optimizer.step(); optimizer.zero_grad()
    step += 1; time.sleep(0.3); print("step", step, flush=True)
    if step % 5 == 0: accelerator.save_state(os.path.join(OUT, f"checkpoint-{step}"))
print("done at", step)
"""


@pytest.fixture
def plain(tmp_path):
    """Make a run; what it left running is killed."""
    made = []

    def make(text):
        made.append(Plain(tmp_path, HEAD + text, python=str(PYTHON)))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [("accelerate", ACCELERATE)],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_killed_at_a_random_moment_it_resumes_from_its_last_save(plain, name, text):
    """Saved every 5 steps by ``save_state``: the next attempt begins there and ends (C1)."""
    run = plain(text).start()
    run.until(rf"step {random.Random(name).randint(22, 30)}\b")

    killed = run.kill()
    begins = run.start().begins()

    assert killed - 5 <= begins <= killed, (killed, begins, run.said(1))
    assert "done at 40" in run.over(), run.said()
