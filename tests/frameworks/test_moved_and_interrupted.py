"""Every framework's example with the real owner and local backend: lost, moved, with the same result."""

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
EPOCHS = 8
"""Of 1.6 s of waiting each. Chosen: a request arrives before the end, also on a busy machine."""
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


def undisturbed(framework: str, folder: Path, *, epochs: int) -> Path:
    """The model of an uninterrupted training outside a stage."""
    script = EXAMPLES / f"frameworks/train_{framework}.py"
    launcher = ["-m", "torch.distributed.run", "--standalone"] if framework == "elastic" else []
    subprocess.run(
        [PYTHON, *launcher, script, f"--output={folder}", f"--epochs={epochs}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
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
        run.close()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lost_and_moved_it_ends_with_the_parameters_of_the_undisturbed(framework, owned, tmp_path):
    """SIGKILL after a checkpoint, then a move to another offer: no parameter differs in a single bit."""
    run = owned("framework.yaml")
    owner = run.start("--set", f"framework={framework}", "--set", f"epochs={EPOCHS}")
    run.await_checkpoint(attempt=1)
    run.lose_machine()
    run.await_checkpoint(attempt=2)
    run.move(to="cpu-2")
    output, _ = owner.communicate(timeout=150)

    assert owner.returncode == 0, output
    attempts = run.state().attempts
    assert [each.outcome for each in attempts] == ["lost", "drained", "succeeded"], output
    starts = [each.end.start_step for each in attempts[1:]]
    assert starts[0] >= 10
    assert starts[1] > starts[0]
    assert difference(run.output(), undisturbed(framework, tmp_path / "whole", epochs=EPOCHS)) == 0


def test_one_worker_two_and_one_again_train_the_model_of_one(owned, tmp_path):
    """Rescaled as it runs: the same global batch, and an end within 1e-5 of the fixed run's (feature A11)."""
    run = owned("elastic_torch.yaml")
    owner = run.start("--set", f"epochs={2 * EPOCHS}")
    first = run.await_checkpoint(attempt=1)
    run.move(to="cpu-1", nodes=2)
    second = run.await_checkpoint(attempt=2)
    run.move(to="cpu-1", nodes=1)
    output, _ = owner.communicate(timeout=150)

    assert owner.returncode == 0, output
    attempts = run.state().attempts
    assert [each.outcome for each in attempts] == ["drained", "drained", "succeeded"], output
    assert [each.allocation.nodes for each in attempts] == [1, 2, 1]
    assert [body["world_size"] for body in (first, second)] == [1, 2]
    assert [body["global_batch"] for body in (first, second)] == [32, 32]
    assert difference(run.output(), undisturbed("elastic", tmp_path / "whole", epochs=2 * EPOCHS)) <= 1e-5


def test_the_shards_of_all_workers_are_one_checkpoint(owned):
    """One manifest has two nodes' shards, torch's index and the random state of each rank."""
    run = owned("elastic_torch.yaml", num_nodes=2, scaling={"min_nodes": 2, "max_nodes": 2})
    run.start()
    body = run.await_checkpoint(attempt=1)

    by_node = {node: {item["path"] for item in body["files"] if item["node"] == node} for node in (0, 1)}
    assert ".metadata" in by_node[0]
    assert {"__0_0.distcp", "random-00000.json"} <= by_node[0]
    assert {"__1_0.distcp", "random-00001.json"} <= by_node[1]
