"""Every framework's example through the real controller and local backend: lost, moved, and the same."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fakes.owned import Owned

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "dags/examples"
PYTHON = Path(os.environ.get("FRAMEWORKS_PYTHON", ROOT / ".venv-frameworks/bin/python"))
FRAMEWORKS = ["torch", "transformers", "lightning", "keras", "accelerate"]
COMPARE = """
import sys, torch
ours, theirs = (torch.load(path) for path in sys.argv[1:])
assert ours.keys() == theirs.keys()
print(max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours))
"""


def difference(ours: Path, theirs: Path) -> float:
    """Largest difference of any parameter of two models."""
    command = [PYTHON, "-c", COMPARE, ours / "model.pt", theirs / "model.pt"]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def undisturbed(framework: str, folder: Path) -> Path:
    """The model of a training that is no stage and that nobody disturbed."""
    script = EXAMPLES / f"frameworks/train_{framework}.py"
    subprocess.run(
        [PYTHON, script, f"--output={folder}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def owned(tmp_path):
    """Make runs; what is left of one at the end is killed."""
    made = []

    def make(spec: str, **changes) -> Owned:
        made.append(Owned(tmp_path, EXAMPLES / "envs" / spec, PYTHON, **changes))
        return made[-1]

    yield make
    for run in made:
        run.lose_machine()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lost_and_moved_it_ends_with_the_parameters_of_the_undisturbed(framework, owned, tmp_path):
    """SIGKILL after a checkpoint, then a move to another slice: no parameter differs in a single bit."""
    run = owned("framework.yaml")
    owner = run.start("--set", f"framework={framework}")
    run.await_checkpoint(attempt=1)
    run.lose_machine()
    run.await_checkpoint(attempt=2)
    run.move(to="cpu-2")
    output, _ = owner.communicate(timeout=150)

    assert owner.returncode == 0, output
    attempts = run.state().attempts
    assert [each.outcome for each in attempts] == ["lost", "left", "succeeded"], output
    starts = [each.ended["start_step"] for each in attempts[1:]]
    assert starts[0] >= 10
    assert starts[1] > starts[0]
    assert difference(run.output(), undisturbed(framework, tmp_path / "whole")) == 0


