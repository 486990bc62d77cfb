"""Stage 1: make a labelled text corpus of the documentation that is installed on this machine.

A document is a docstring, and its label is the distribution that it comes from. All text is real, and nothing
is downloaded. Texts that are equal up to layout are kept once. Near-duplicate texts stay on one side of the
split, so that no held-out document was seen in training.

``python prepare.py --output data``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from docstrings import Document, documents, installed, names_of, python_files
from model import save_rows
from text import Hasher, near_groups, normalise

MIN_WORDS = 8
"""Shortest document, words. Chosen: shorter ones ("Return the name.") reveal nothing about their project."""
SAY_EVERY_S = 5.0
"""Seconds between two lines of progress. Chosen: a waiting user sees that it is making progress."""
SPLITS = ("train", "validation", "heldout")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the documents per label.

    Attributes:
        per_label: Maximum documents of one distribution, so that no label dominates the others.
        least_per_label: Distributions with fewer documents are omitted.
    """

    per_label: int
    least_per_label: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents without duplicates.

    Attributes:
        documents: Sorted by label, then in the order in which they were found.
        normalised: Their normalized texts.
        equal: Number of documents omitted because an equal one of the same label is kept.
        ambiguous: Number of documents omitted because two distributions have the same text.
    """

    documents: tuple[Document, ...]
    normalised: tuple[str, ...]
    equal: int
    ambiguous: int

    @property
    def labels(self) -> list[str]:
        """Names of the labels, sorted."""
        return sorted({document.label for document in self.documents})


class Reading:
    """Reports how many files were read, and of how many: ``read 1200 of 45311 files``."""

    def __init__(self, total: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Start with none of *total* files read."""
        self.total, self.done = total, 0
        self._reached, self._monotonic, self._said = 0, monotonic, monotonic()

    def follow(self, source: Iterable[Document], files: int) -> Iterator[Document]:
        """The documents of *source*, which has this many files; files that it does not read count as read."""
        self.done = self._reached
        self._reached += files
        yield from source

    def one(self) -> None:
        """Count a file, and report it if some seconds have passed."""
        self.done += 1
        if self._monotonic() - self._said >= SAY_EVERY_S:
            self._said = self._monotonic()
            print(f"read {self.done} of {self.total} files", flush=True)


def collect(sources: Mapping[str, Iterable[Document]], limits: Limits) -> Corpus:
    """Collect the documents of every source, each text once, and drop labels that have too few."""
    found: dict[str, dict[str, Document]] = {}
    equal = 0
    for label, source in sources.items():
        texts: dict[str, Document] = {}
        for document in source:
            text = normalise(document.text)
            if text in texts:
                equal += 1
            elif text.count(" ") >= MIN_WORDS - 1:
                texts[text] = document
            if len(texts) == limits.per_label:
                break
        found[label] = texts
    owners = Counter(text for texts in found.values() for text in texts)
    ambiguous = 0
    kept: list[tuple[str, Document]] = []
    for texts in found.values():
        own = [(text, document) for text, document in texts.items() if owners[text] == 1]
        ambiguous += len(texts) - len(own)
        if len(own) >= limits.least_per_label:
            kept.extend(own)
    return Corpus(tuple(document for _, document in kept), tuple(text for text, _ in kept), equal, ambiguous)


def split(normalised: Sequence[str], *, heldout: float, validation: float) -> np.ndarray:
    """Index into :data:`SPLITS` for each text; near-duplicate texts stay together.

    The place of a group depends only on the text of its first member, so that it does not change when other
    documents are added or removed.
    """
    groups, members = np.unique(near_groups(normalised), return_inverse=True)
    places = []
    for first in groups.tolist():
        digest = hashlib.sha256(normalised[first].encode()).digest()
        draw = int.from_bytes(digest[:8], "big") / 2**64
        places.append(2 if draw < heldout else 1 if draw < heldout + validation else 0)
    return np.array(places, dtype=np.int64)[members.ravel()]


def write(corpus: Corpus, places: np.ndarray, hasher: Hasher, output: Path) -> dict[str, object]:
    """Write the matrices, the held-out texts and ``labels.json``; returns the content of the last one."""
    output.mkdir(parents=True, exist_ok=True)
    labels = corpus.labels
    number = {label: index for index, label in enumerate(labels)}
    for place, name in enumerate(SPLITS):
        chosen = np.flatnonzero(places == place).tolist()
        if name == "heldout":
            continue  # passed on as text: reading it is part of inference
        rows = hasher.rows(corpus.documents[index].text for index in chosen)
        answers = np.array([number[corpus.documents[index].label] for index in chosen], dtype=np.int64)
        save_rows(output / f"{name}.npz", rows, answers)
    with (output / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for index in np.flatnonzero(places == SPLITS.index("heldout")).tolist():
            document = corpus.documents[index]
            line = {"id": document.source, "label": document.label, "text": document.text}
            file.write(json.dumps(line) + "\n")
    facts: dict[str, object] = {
        "labels": labels,
        "features": hasher.features,
        "ignored_words": sorted(hasher.ignored),
        "documents": {name: int((places == place).sum()) for place, name in enumerate(SPLITS)},
        "left_out": {"equal": corpus.equal, "ambiguous": corpus.ambiguous},
    }
    (output / "labels.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of this stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--features", type=int, default=16_384, help="hash buckets, a power of two")
    parser.add_argument("--per-label", type=int, default=1_200, help="most documents of one label")
    parser.add_argument("--least-per-label", type=int, default=150, help="labels with fewer are left out")
    parser.add_argument("--least-documents", type=int, default=10_000, help="fail with fewer in all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the stage; the exit code is 1 when this environment has too little text."""
    options = parse(arguments)
    found = installed()
    files = {name: python_files(distribution) for name, distribution in found.items()}
    reading = Reading(sum(map(len, files.values())))
    sources = {
        name: reading.follow(documents(name, its_own, files[name], on_file=reading.one), len(files[name]))
        for name, its_own in found.items()
    }
    corpus = collect(sources, Limits(options.per_label, options.least_per_label))
    count, labels = len(corpus.documents), corpus.labels
    print(f"{count} documents of {len(labels)} distributions; {len(found)} are installed")
    if count < options.least_documents or len(labels) < 2:
        print(
            f"too few: at least {options.least_documents} documents of 2 distributions are needed; "
            "install more packages here or lower --least-documents",
            file=sys.stderr,
        )
        return 1
    places = split(corpus.normalised, heldout=0.15, validation=0.05)
    facts = write(corpus, places, Hasher(options.features, names_of(labels)), options.output)
    print(f"left out: {facts['left_out']}; split: {facts['documents']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
