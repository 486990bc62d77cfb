"""Stage 3: label the held-out documents in batches, and refuse a model that has learned nothing.

``python score.py --model model --data data --output predictions``
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from model import Shape, scores
from text import Hasher


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained model with everything that it needs to read a text.

    Attributes:
        shape: Sizes of the network.
        vector: Its parameters.
        labels: Names, in the order of its scores.
        hasher: Makes features of a text, as in training.
    """

    shape: Shape
    vector: np.ndarray
    labels: tuple[str, ...]
    hasher: Hasher

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Read what train.py wrote; nothing in it is executed."""
        with np.load(folder / "model.npz", allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            shape = Shape(int(about["features"]), int(file["hidden"]), len(about["labels"]))
            hasher = Hasher(shape.features, frozenset(about["ignored_words"]))
            return cls(shape, file["vector"], tuple(about["labels"]), hasher)

    def predict(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """The best label of each text, and its probability."""
        found = scores(self.shape, self.vector, self.hasher.rows(texts))
        best = found.argmax(axis=1)
        sure = np.exp(found[np.arange(len(texts)), best])
        return [(self.labels[label], float(share)) for label, share in zip(best, sure, strict=True)]


def predictions(classifier: Classifier, source: Path, batch: int) -> Iterator[dict[str, Any]]:
    """One row for each held-out document, in the order of the file; only one batch at a time is in memory."""
    with source.open(encoding="utf-8") as file:
        while documents := [json.loads(line) for line in itertools.islice(file, batch)]:
            answers = classifier.predict([document["text"] for document in documents])
            for document, (label, probability) in zip(documents, answers, strict=True):
                yield {
                    "id": document["id"],
                    "label": document["label"],
                    "predicted": label,
                    "probability": round(probability, 6),
                }


def summary(counts: Counter[tuple[str, bool]]) -> dict[str, Any]:
    """Accuracy, and the accuracy of always predicting the most frequent label."""
    by_label = Counter[str]()
    for (label, _), count in counts.items():
        by_label[label] += count
    total = counts.total()
    right = sum(count for (_, is_right), count in counts.items() if is_right)
    return {
        "documents": total,
        "accuracy": right / total if total else 0.0,
        "majority": max(by_label.values(), default=0) / total if total else 1.0,
        "by_label": {label: counts[label, True] / count for label, count in sorted(by_label.items())},
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of this stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the predictions")
    parser.add_argument("--batch", type=int, default=512, help="documents scored at a time")
    parser.add_argument("--margin", type=float, default=0.3, help="accuracy wanted above the majority class")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the stage; the exit code is 1 when the model is not well above the majority class."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    classifier = Classifier.load(options.model)
    counts: Counter[tuple[str, bool]] = Counter()
    with (options.output / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for row in predictions(classifier, options.data / "heldout.jsonl", options.batch):
            counts[row["label"], row["label"] == row["predicted"]] += 1
            file.write(json.dumps(row) + "\n")
    found = summary(counts)
    (options.output / "scores.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        f"{found['documents']} documents, accuracy {found['accuracy']:.4f}, "
        f"majority class {found['majority']:.4f}"
    )
    wanted = found["majority"] + options.margin
    if found["accuracy"] < wanted:
        print(f"accuracy {found['accuracy']:.4f} is below {wanted:.4f}: not a model to use", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
