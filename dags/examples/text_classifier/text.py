"""Text to numbers: words, hashed features, and near-duplicate detection.

Both ``prepare`` (training data) and ``score`` (new texts) use it, so that both see the same features. It
needs only numpy and the standard library.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from model import Rows

TOKEN = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]{1,4}")
"""Words, numbers, and runs of punctuation: a project's docstring markup is part of its style."""
MAX_TOKENS = 160
"""Maximum tokens read from a text. Chosen: nine docstrings in ten are shorter."""
SHINGLE_WORDS = 4
"""Words in a shingle. Chosen: short enough to survive an edit, too long for a stock phrase."""
BANDS, ROWS_PER_BAND = 6, 2
"""MinHash layout: texts whose shingles overlap by about (1/6)^(1/2) = 0.4 or more share a band.

Source: Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4.
"""

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class Hasher:
    """Turns a text into hashed word and word-pair features, unit length.

    Attributes:
        features: Number of hash buckets, a power of two.
        ignored: Words that are omitted, e.g. the names of the labels.
    """

    features: int
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Reject sizes that the mask below could not cover."""
        if self.features < 2 or self.features & (self.features - 1):
            raise ValueError(f"features must be a power of two, got {self.features!r}")

    def row(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Sorted buckets and their weights, log(1 + count) scaled to length 1."""
        words = [word for word in TOKEN.findall(text.lower()) if word not in self.ignored][:MAX_TOKENS]
        single = _word_hashes(words)
        pairs = (single[:-1] * _MIX) ^ (single[1:] >> np.uint64(1)) if len(words) > 1 else single[:0]
        mixed = (np.concatenate([single, pairs]) * _MIX) >> np.uint64(32)
        buckets, counts = np.unique(mixed & np.uint64(self.features - 1), return_counts=True)
        weights = np.log1p(counts)
        length = float(np.sqrt(np.sum(weights**2))) or 1.0
        return buckets.astype(np.int32), (weights / length).astype(np.float32)

    def rows(self, texts: Iterable[str]) -> Rows:
        """All *texts* as one compressed-row matrix."""
        built = [self.row(text) for text in texts]
        starts = np.zeros(len(built) + 1, dtype=np.int64)
        np.cumsum([len(buckets) for buckets, _ in built], out=starts[1:])
        if not built:
            return Rows(starts, np.zeros(0, np.int32), np.zeros(0, np.float32), self.features)
        buckets = np.concatenate([buckets for buckets, _ in built])
        weights = np.concatenate([weights for _, weights in built])
        return Rows(starts, buckets, weights, self.features)


def normalise(text: str) -> str:
    """Only the words, in lower case: texts that differ in layout, numbers or punctuation become equal."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def near_groups(normalised: Sequence[str]) -> np.ndarray:
    """Group number of each text; near-duplicate texts, directly or through others, have the same number.

    MinHash over word shingles, then connected components over the bands.
    """
    if not normalised:
        return np.zeros(0, dtype=np.int64)
    signatures = _minhashes(normalised)
    parents = list(range(len(normalised)))
    for band in range(BANDS):
        keys = np.zeros(len(normalised), dtype=np.uint64)
        for row in range(ROWS_PER_BAND):
            keys = (keys ^ signatures[band * ROWS_PER_BAND + row]) * _MIX
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        for index, other in enumerate(first[inverse.ravel()].tolist()):
            _union(parents, index, other)
    return np.array([_root(parents, index) for index in range(len(parents))], dtype=np.int64)


def _word_hashes(words: Sequence[str]) -> np.ndarray:
    hashes = (zlib.crc32(word.encode()) for word in words)
    return np.fromiter(hashes, dtype=np.uint64, count=len(words)) + np.uint64(1)


def _minhashes(normalised: Sequence[str]) -> np.ndarray:
    """Signatures, shape (BANDS * ROWS_PER_BAND, texts)."""
    shingles = [_shingles(text.split()) for text in normalised]
    starts = np.cumsum([0] + [len(part) for part in shingles])[:-1]
    flat = np.concatenate(shingles)
    seeds = np.random.default_rng(0).integers(1, 2**63, size=(BANDS * ROWS_PER_BAND, 2), dtype=np.uint64)
    rows = []
    for multiplier, offset in seeds:
        hashed = (flat * (multiplier | np.uint64(1))) ^ offset
        rows.append(np.minimum.reduceat(hashed ^ (hashed >> np.uint64(29)), starts))
    return np.stack(rows)


def _shingles(words: Sequence[str]) -> np.ndarray:
    hashes = _word_hashes(words or [""])
    width = min(SHINGLE_WORDS, len(hashes))
    mixed = np.zeros(len(hashes) - width + 1, dtype=np.uint64)
    for offset in range(width):
        mixed = (mixed ^ hashes[offset : offset + len(mixed)]) * _MIX
    return mixed


def _root(parents: list[int], index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index


def _union(parents: list[int], one: int, other: int) -> None:
    first, second = sorted((_root(parents, one), _root(parents, other)))
    parents[second] = first
