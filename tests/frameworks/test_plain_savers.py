"""The libraries' own savers, without our library: killed at random, resumed by their own code (C)."""

from __future__ import annotations

import fcntl
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.plain import Plain

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FRAMEWORKS = os.environ.get("FRAMEWORKS_PYTHON", str(ROOT / ".venv-frameworks/bin/python"))
SEED = os.environ.get("SAVERS_SEED", "1")
"""Another seed changes the moments of the kills."""
PATIENCE_S = 240
"""For an interpreter that loads a framework on a busy machine. Chosen."""


@dataclass(frozen=True)
class Saver:
    """A training of ``savers/``.

    Attributes:
        name: Name of the script.
        every: Steps between two saves.
        kills: The step of the kill is drawn from these.
        first: Number of steps from multiples of *every* to the saves.
        behind: Steps more that the newest save may be behind, where no file shows that it is complete.
        is_lost: Its whole node is killed, so that no sidecar saves the rest; *kills* then count from its
            first checkpoint in the store.
        says_step: Its files contain their step.
        python: Its interpreter.
    """

    name: str
    every: int
    kills: tuple[int, int]
    first: int = 0
    behind: int = 0
    is_lost: bool = False
    says_step: bool = True
    python: str = FRAMEWORKS


# The slowest starters come first.
SAVERS = [
    Saver("transformers_trainer", 5, (2, 22), is_lost=True),
    # It also saves step 10, the best; later it saves no multiple of 10.
    Saver("lightning_top_k", 10, (16, 46), first=5),
    Saver("keras_backup", 1, (6, 16)),
    Saver("accelerate_folders", 5, (22, 52)),
    Saver("accelerate_automatic", 5, (22, 52)),
    Saver("torch_distributed", 10, (22, 52)),
    Saver("torch_imagenet", 1, (6, 16)),
    Saver("sklearn_partial_fit", 5, (2, 32), is_lost=True, python=sys.executable),
    Saver("sklearn_warm_start", 5, (22, 52), python=sys.executable),
    # Only 5 s without writes show that these are complete; the first round is 0 in their names.
    Saver("xgboost_checkpoints", 5, (42, 53), first=1, behind=30, says_step=False, python=sys.executable),
]


@pytest.fixture(scope="session")
def ends(request, tmp_path_factory, worker_id):
    """Output of each training without interruption; one process per interpreter serves all tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "undisturbed"
    folder.mkdir(exist_ok=True)
    mine = []
    with (folder / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "started").exists():
            (folder / "started").touch()
            calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
            asked = [call.params["saver"] for call in calls if "saver" in call.params]
            for python in sorted({saver.python for saver in asked}):
                scripts = [HERE / "savers" / f"{each.name}.py" for each in asked if each.python == python]
                mine.append(subprocess.Popen([python, HERE / "undisturbed.py", folder, *scripts]))

    def end(name: str) -> str:
        until = time.monotonic() + 300
        while not (folder / f"{name}.txt").exists():
            assert time.monotonic() < until, f"{name} alone has no end"
            time.sleep(0.1)
        return (folder / f"{name}.txt").read_text()

    yield end
    for process in mine:
        process.wait()


@pytest.fixture
def plain(tmp_path):
    """Make a run; what it left running is killed."""
    made = []

    def make(text, **options):
        made.append(Plain(tmp_path, text, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


def final(said: str) -> tuple[str, float]:
    """The last step, and the number that shows what the model learned."""
    match = re.search(r"done at (\d+) with (\S+)", said)
    assert match, said
    return match[1], float(match[2])


def best(said: str) -> str:
    """Its output about its best save; empty without one."""
    return "".join(re.findall(r"best of .*", said))


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: f"{saver.name}-seed-{SEED}")
def test_killed_at_a_random_moment_it_ends_as_the_undisturbed(plain, ends, saver):
    """It resumes from its newest complete save, at the same path, and knows its best one (C)."""
    draw = random.Random(f"{SEED} {saver.name}")
    text = (HERE / "savers" / f"{saver.name}.py").read_text()
    run = plain(text, python=saver.python).start()
    if saver.is_lost:
        run.until_saved(patience_s=PATIENCE_S)
    since = run.last_step() if saver.is_lost else 0
    # Kill between two saves: a save that the kill interrupts is lost, as it should be.
    steps = [since + at for at in range(*saver.kills)]
    step = draw.choice([at for at in steps if saver.every == 1 or (at - saver.first) % saver.every == 2])
    run.until(rf"step {step}\b", PATIENCE_S)
    time.sleep(draw.uniform(0, 0.1))

    killed = run.lose() if saver.is_lost else run.kill()
    kept = run.saved()[0].step
    begins = run.start().begins(PATIENCE_S)
    said = run.over(PATIENCE_S)

    seen = (killed, kept, begins, run.said(1), said)
    newest = (killed - 1 - saver.first) // saver.every * saver.every + saver.first
    assert (1 if saver.is_lost else newest - saver.behind) <= begins <= killed, seen
    assert (begins - saver.first) % saver.every == 0, seen
    assert begins == kept or not saver.says_step, seen
    assert final(said) == (final(ends(saver.name))[0], pytest.approx(final(ends(saver.name))[1], rel=1e-4))
    assert best(said) == best(ends(saver.name))
