"""Stage 2: train the classifier, ready to be moved to another machine or to lose this one at any moment.

``python train.py --data data --output model``

Run directly, it trains on this machine. As a stage, ``Session`` finds the checkpoint to resume from, saves
when a checkpoint is due or requested, and ends the program when the stage moves. A checkpoint contains
everything that determines the next step: parameters, optimizer state, random state, and the position in the
order of the epoch. A training that was moved and interrupted therefore ends with the same parameters as one
that was not.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process uses one core, more cores are used by more processes;
os.environ["MKL_NUM_THREADS"] = "1"  # read once, when numpy is loaded
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model import Rows, Shape, load_rows
from parallel import Recipe, Team, shared_array

from envscaler_agent import Session


@dataclass(slots=True)
class Place:
    """Position of the training, stored with the arrays.

    Attributes:
        epoch: Epochs finished.
        position: Samples of this epoch that were used.
        step: Optimizer steps done.
        samples: Samples used, all epochs.
        random_state: State of the generator before this epoch's order was drawn.
        repeated: Additional uses of samples in the same epoch, in finished epochs.
        dropped: Samples that a finished epoch did not use.
        history: One row for each finished epoch: loss, accuracy on the validation documents.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    samples: int = 0
    random_state: dict[str, Any] = field(default_factory=dict)
    repeated: int = 0
    dropped: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class Training:
    """A team, its position in the work, and how to save both."""

    def __init__(self, team: Team, *, epochs: int) -> None:
        """Start at the beginning; :meth:`load` resumes from a checkpoint."""
        self.team, self.epochs = team, epochs
        self.count = len(team.train[1])
        self.place = Place()
        self.used = np.zeros(self.count, dtype=np.int64)
        self._generator = np.random.Generator(np.random.PCG64(team.recipe.seed))
        self._loss_sum = 0.0
        self.team.vector[:] = team.shape.initial(team.recipe.seed)
        self._begin_epoch()

    @property
    def is_done(self) -> bool:
        """True after the last epoch."""
        return self.place.epoch >= self.epochs

    def step(self) -> tuple[int, float]:
        """Use the next batch of this epoch's order; returns its size and its loss."""
        place, begin = self.place, self.place.position
        end = min(begin + self.team.recipe.batch, self.count)
        loss = self.team.step(begin, end, place.step + 1)
        self.used[self.team.order[begin:end]] += 1
        self._loss_sum += loss * (end - begin)
        place.position, place.step, place.samples = end, place.step + 1, place.samples + end - begin
        return end - begin, loss

    def end_epoch(self) -> dict[str, float]:
        """Count the repeated and dropped samples, measure, and draw the next order."""
        place = self.place
        place.repeated += int(np.maximum(self.used - 1, 0).sum())
        place.dropped += int((self.used == 0).sum())
        row = {"loss": self._loss_sum / self.count, "accuracy": self.team.accuracy()}
        place.history.append(row)
        place.epoch, place.position = place.epoch + 1, 0
        self._begin_epoch()
        return row

    def save(self, folder: str | Path) -> None:
        """Write everything that determines the next step."""
        path = Path(folder)
        np.savez(
            path / "arrays.npz",
            vector=self.team.vector,
            first=self.team.adam.first,
            second=self.team.adam.second,
            used=self.used,
        )
        place = {name: getattr(self.place, name) for name in Place.__slots__}
        body = {"about": self._about(), "place": place, "loss_sum": self._loss_sum}
        (path / "place.json").write_text(json.dumps(body), encoding="utf-8")

    def load(self, folder: str | Path) -> None:
        """Resume from what :meth:`save` wrote.

        Raises:
            ValueError: Another training wrote it: other data, sizes or settings.
        """
        path = Path(folder)
        body = json.loads((path / "place.json").read_text(encoding="utf-8"))
        if body["about"] != self._about():
            raise ValueError(f"{path}: checkpoint of {body['about']}, this training is {self._about()}")
        self.place = Place(**body["place"])
        self._generator.bit_generator.state = self.place.random_state
        self._begin_epoch()
        self._loss_sum = body["loss_sum"]
        with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
            self.team.vector[:] = arrays["vector"]
            self.team.adam.first[:] = arrays["first"]
            self.team.adam.second[:] = arrays["second"]
            self.used[:] = arrays["used"]

    def _begin_epoch(self) -> None:
        self.place.random_state = dict(self._generator.bit_generator.state)
        self.team.order[:] = self._generator.permutation(self.count)
        self.used[:] = 0
        self._loss_sum = 0.0

    def _about(self) -> dict[str, Any]:
        shape, recipe = self.team.shape, self.team.recipe
        sizes = {name: getattr(shape, name) for name in Shape.__slots__}
        settings = {name: getattr(recipe, name) for name in Recipe.__slots__}
        return {**sizes, **settings, "samples": self.count, "epochs": self.epochs}


def run(training: Training, session: Session) -> None:
    """Train to the end, or until the session stops."""
    team, place = training.team, training.place
    begun, mark = time.monotonic(), place.samples
    accuracy = place.history[-1]["accuracy"] if place.history else None
    while not training.is_done:
        samples, loss = training.step()
        session.step(samples=samples, loss=loss, accuracy=accuracy, data_s=team.data_s, sync_s=team.sync_s)
        ended = place.position == training.count
        if ended:
            session.phase("evaluation")
            row = training.end_epoch()
            accuracy = row["accuracy"]
            session.report(repeated_samples=place.repeated)
            session.phase("training")
            speed = (place.samples - mark) / (time.monotonic() - begun)
            print(
                f"epoch {place.epoch}/{training.epochs} loss {row['loss']:.4f} "
                f"accuracy {accuracy:.4f} samples/s {speed:.0f}",
                flush=True,
            )
            begun, mark = time.monotonic(), place.samples
        session.checkpoint(training.save, epoch_end=place.epoch if ended else None)


def write(training: Training, facts: dict[str, Any], output: Path) -> None:
    """Write the model and its measurements."""
    output.mkdir(parents=True, exist_ok=True)
    shape, place = training.team.shape, training.place
    about = {name: facts[name] for name in ("labels", "features", "ignored_words")}
    np.savez(output / "model.npz", vector=training.team.vector, hidden=shape.hidden, about=json.dumps(about))
    metrics = {
        "epochs": place.epoch,
        "steps": place.step,
        "samples": place.samples,
        "samples_repeated": place.repeated,
        "samples_dropped": place.dropped,
        "history": place.history,
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    print(f"{place.step} steps, {place.samples} samples, {place.repeated} repeated, {place.dropped} dropped")


def prepare(options: argparse.Namespace) -> tuple[Training, dict[str, Any]]:
    """Read the corpus into shared memory and set up the training."""
    facts = json.loads((options.data / "labels.json").read_text(encoding="utf-8"))
    train, validation = (
        _shared(*load_rows(options.data / f"{name}.npz")) for name in ("train", "validation")
    )
    steps = options.epochs * -(-len(train[1]) // options.batch)
    shape = Shape(facts["features"], options.hidden, len(facts["labels"]))
    recipe = Recipe(options.batch, options.rate, options.decay, options.dropout, steps, options.seed)
    return Training(Team(shape, recipe, train, validation), epochs=options.epochs), facts


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of this stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--checkpoints", type=Path, help="outside a stage: where to save, and to go on from")
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--batch", type=int, default=512, help="samples in a step, all processes together")
    parser.add_argument("--hidden", type=int, default=128, help="units of the hidden layer")
    parser.add_argument("--rate", type=float, default=1e-2, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=1.0, help="weight decay")
    parser.add_argument("--dropout", type=float, default=0.3, help="share of words left out in a step")
    parser.add_argument("--seed", type=int, default=1)
    granted = int(os.environ.get("ENVSCALER_CPUS", "1"))
    parser.add_argument("--processes", type=int, default=granted, help="default: the CPUs that were granted")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the stage."""
    options = parse(arguments)
    training, facts = prepare(options)
    with training.team as team:
        team.start(options.processes)
        with Session(team.recipe.total_steps, training.epochs, local_dir=options.checkpoints) as session:
            restored = session.restore()
            if restored:
                training.load(restored)
            print(
                f"{training.count} documents, {len(facts['labels'])} labels, {options.processes} processes, "
                f"from step {training.place.step}",
                flush=True,
            )
            session.phase("training")
            run(training, session)
        write(training, facts, options.output)
    return 0


def _shared(rows: Rows, labels: np.ndarray) -> tuple[Rows, np.ndarray]:
    """A copy in memory that the children read without copying."""
    arrays = []
    for array in (rows.starts, rows.columns, rows.values, labels):
        copy = shared_array(array.shape, array.dtype.type)
        copy[:] = array
        arrays.append(copy)
    return Rows(arrays[0], arrays[1], arrays[2], rows.features), arrays[3]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
