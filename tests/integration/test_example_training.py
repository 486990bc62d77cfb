"""The example's stages as real processes: killed, moved and resumed, they end with the same model.

The test stands in for the sidecar: it creates the spool folder, moves
complete checkpoints out of it, and gives the newest one to the next attempt.
"""

import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from envscaler_agent.ending import EXIT_DRAINED
from envscaler_agent.protocol import Control, parse_checkpoint_name

STAGES = Path(__file__).parents[2] / "dags/examples/text_classifier"
EPOCHS = 30
SIZES = ["--hidden=8", "--batch=64", f"--epochs={EPOCHS}"]


def _run(script, *arguments, **options):
    command = [sys.executable, str(STAGES / script), *[str(argument) for argument in arguments]]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def _finish(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small corpus from the installed packages."""
    folder = tmp_path_factory.mktemp("data")
    sizes = ["--per-label=40", "--least-per-label=40", "--least-documents=200", "--features=1024"]
    _finish(_run("prepare.py", "--output", folder, *sizes))
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The model of an uninterrupted training by one process."""
    folder = tmp_path_factory.mktemp("whole")
    _finish(_run("train.py", "--data", data, "--output", folder, "--processes=1", *SIZES))
    return folder


class Life:
    """One attempt of the training, on a machine of so many CPUs, resumed from *restore*."""

    def __init__(self, folder, data, *, attempt, processes, restore=None):
        """Create the spool folder and start the process."""
        self.spool = folder / f"a{attempt}"
        self.output = folder / "model"
        (self.spool / "checkpoints").mkdir(parents=True)
        session = {"generation": 1, "attempt": attempt, "node": 0, "nodes": 1, "every": {"steps": 17}}
        start = {"schema": "2.0", "session": session}
        if restore is not None:
            step = parse_checkpoint_name(restore.name)[1]
            start["restore"] = {"path": str(restore), "name": restore.name, "step": step}
        (self.spool / "start.json").write_text(json.dumps(start))
        self.newest = restore
        env = {**os.environ, "ENVSCALER_SPOOL": str(self.spool), "ENVSCALER_CPUS": str(processes)}
        arguments = ["--data", data, "--output", self.output, *SIZES]
        self.process = _run("train.py", *arguments, env=env, start_new_session=True)

    def take_checkpoints(self):
        """Do the sidecar's work; True while the process lives."""
        alive = self.process.poll() is None
        checkpoints = self.spool / "checkpoints"
        complete = sorted(path for path in checkpoints.iterdir() if parse_checkpoint_name(path.name))
        for path in complete:
            taken = self.spool / path.name
            path.rename(taken)
            (checkpoints / f"{path.name}.done").touch()
            self.newest = taken
        return alive

    def until(self, count):
        """Let it run until it has saved *count* times; False when it ended before."""
        saved = set()
        while self.take_checkpoints():
            saved.add(self.newest)
            if len(saved - {None}) >= count:
                return True
            time.sleep(0.002)
        return False

    def lose(self):
        """SIGKILL to every process at once, as when a machine is lost."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        self.take_checkpoints()

    def ask_to_leave(self):
        """Write what the owner writes for a move."""
        control = Control(sequence=1, action="drain", align="epoch", reason="move")
        draft = self.spool / ".control"
        draft.write_bytes(control.to_json())
        draft.rename(self.spool / "control.json")

    def wait(self):
        """Exit code."""
        give_up = time.monotonic() + 60
        while self.take_checkpoints() and time.monotonic() < give_up:
            time.sleep(0.005)
        return self.process.wait(timeout=1)

    def place(self):
        """Epoch of the newest checkpoint, and the position in its order."""
        place = json.loads((self.newest / "place.json").read_text())["place"]
        return place["epoch"], place["position"]


@pytest.fixture
def lives(tmp_path, data):
    """Make attempts one after another; none outlives the test."""
    made = []
    numbers = itertools.count(1)

    def make(processes, restore=None):
        made.append(Life(tmp_path, data, attempt=next(numbers), processes=processes, restore=restore))
        return made[-1]

    yield make
    for life in made:
        if life.process.poll() is None:
            life.lose()
        life.process.stdout.close()


def _assert_same(model, whole):
    for name in ("vector", "about", "hidden"):
        with np.load(model / "model.npz") as ours, np.load(whole / "model.npz") as theirs:
            if name == "vector":
                assert np.abs(ours[name] - theirs[name]).max() <= 1e-6
            else:
                assert ours[name] == theirs[name]
    ours, theirs = (json.loads((folder / "metrics.json").read_text()) for folder in (model, whole))
    assert (ours["samples_repeated"], ours["samples_dropped"]) == (0, 0)
    assert {**ours, "history": None} == {**theirs, "history": None}
    assert [row["accuracy"] for row in ours["history"]] == [row["accuracy"] for row in theirs["history"]]


def test_two_processes_train_the_model_of_one(data, whole, tmp_path):
    """The shards of a batch are summed in one order, for any number of processes."""
    _finish(_run("train.py", "--data", data, "--output", tmp_path, "--processes=2", *SIZES))

    with np.load(tmp_path / "model.npz") as two, np.load(whole / "model.npz") as one:
        assert np.array_equal(two["vector"], one["vector"])  # equal to the bit
    _assert_same(tmp_path, whole)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_point_it_ends_with_the_same_model(lives, whole, seed):
    """Three losses at random points, on one CPU and on two; the last attempt finishes."""
    draw = random.Random(seed)
    restore, losses = None, 0

    while losses < 3:
        life = lives(draw.choice([1, 2]), restore)
        if not life.until(draw.randint(1, 12)):
            break
        time.sleep(draw.uniform(0, 0.03))  # anywhere in a step, or during a save
        life.lose()
        restore, losses = life.newest, losses + 1
    last = lives(2, restore)

    assert losses
    assert last.wait() == 0, last.process.stdout.read()
    _assert_same(last.output, whole)


def test_moved_at_an_epoch_end_to_another_number_of_processes(lives, whole):
    """On a request it saves at the end of an epoch, exits with the protocol's code, and resumes elsewhere."""
    first = lives(1)
    assert first.until(2)
    first.ask_to_leave()
    code = first.wait()
    epoch, position = first.place()
    second = lives(2, first.newest)

    assert code == EXIT_DRAINED
    assert 0 < epoch < EPOCHS
    assert position == 0
    assert second.wait() == 0, second.process.stdout.read()
    _assert_same(second.output, whole)


def test_no_worker_outlives_a_killed_training(lives):
    """After SIGKILL of the parent its children read the end of their pipe, and end by themselves."""
    life = lives(2)
    assert life.until(1)
    group = life.process.pid

    os.kill(group, signal.SIGKILL)
    life.process.wait(timeout=10)
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("a worker process is still there")


def test_a_lost_worker_ends_the_training(lives):
    """A killed child causes an error that names it, rather than a training that waits for ever."""
    life = lives(2)
    assert life.until(1)
    children = Path(f"/proc/{life.process.pid}/task/{life.process.pid}/children")

    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)

    assert life.wait() == 1
    assert "worker process" in life.process.stdout.read()


def test_scores_what_was_held_out(data, whole, tmp_path):
    """Every held-out document has its line, and the model is well above the majority class."""
    output = _finish(
        _run("score.py", "--model", whole, "--data", data, "--output", tmp_path, "--margin=0.05")
    )

    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    heldout = [json.loads(line) for line in (data / "heldout.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [document["id"] for document in heldout]
    assert "accuracy" in output


def test_nothing_that_is_held_out_was_trained_on(data, monkeypatch):
    """No held-out text has the words of a training row; and the split has about the requested sizes."""
    monkeypatch.syspath_prepend(str(STAGES))
    model, text = importlib.import_module("model"), importlib.import_module("text")
    facts = json.loads((data / "labels.json").read_text())
    heldout = [json.loads(line)["text"] for line in (data / "heldout.jsonl").read_text().splitlines()]
    rows, _ = model.load_rows(data / "train.npz")

    seen = {rows.take(np.array([row])).columns.tobytes() for row in range(len(rows))}
    hasher = text.Hasher(facts["features"], frozenset(facts["ignored_words"]))

    assert not [each for each in heldout if hasher.row(each)[0].tobytes() in seen]
    assert 3 * len(heldout) < len(rows) < 9 * len(heldout)
    assert len(facts["labels"]) > 20
