"""Data parallelism in processes: fork, shared memory, and an order of sums independent of the process count.

A batch is cut into a fixed number of shards. Each process computes the gradients of its shards into shared
memory and waits for the others. It then updates its own part of the parameters with the sum over *all*
shards, first to last. One process computes the same sums in the same order as many, so the model does not
depend on the number of processes.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from model import Adam, Gradient, Rows, Shape, gradient, learning_rate, scores

SHARDS = 4
"""Shards of a batch, and the maximum of useful processes. Chosen: larger shards use the cache better."""

_ORDER = struct.Struct("<4sqqq")
_STEP, _UPDATE, _EVALUATE = b"step", b"upda", b"eval"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of every training step.

    Attributes:
        batch: Global batch, samples.
        rate: Peak learning rate.
        decay: Weight decay.
        dropout: Fraction of the words of a sample that are dropped in a step.
        total_steps: Steps of the whole training.
        seed: Seed of all random draws.
    """

    batch: int
    rate: float
    decay: float
    dropout: float
    total_steps: int
    seed: int


def shared_array(shape: int | tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Zeros in anonymous memory that forked children share."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


class Team:
    """The processes of one training: this one, and ``processes - 1`` children.

    A child whose parent ends, by any signal, reads the end of its pipe and exits. A parent whose child ends
    raises.
    """

    def __init__(
        self,
        shape: Shape,
        recipe: Recipe,
        train: tuple[Rows, np.ndarray],
        validation: tuple[Rows, np.ndarray],
    ) -> None:
        """Allocate the shared memory; no process is started yet."""
        self.shape, self.recipe = shape, recipe
        self.train, self.validation = train, validation
        self.vector = shared_array(shape.size, np.float64)
        self.adam = Adam(
            shared_array(shape.size, np.float64), shared_array(shape.size, np.float64), recipe.decay
        )
        self.order = shared_array(len(train[1]), np.int64)
        self.data_s = 0.0
        self.sync_s = 0.0
        self._rank, self._processes = 0, 1
        self._counts = shared_array((SHARDS, 2), np.int64)  # columns, samples right
        self._losses = shared_array(SHARDS, np.float64)
        self._columns = shared_array((SHARDS, shape.features), np.int64)
        self._embeddings = shared_array((SHARDS, shape.features, shape.hidden), np.float64)
        self._heads = shared_array((SHARDS, shape.head_size), np.float64)
        self._children: list[tuple[int, int, int]] = []  # pid, pipe to, pipe from

    def start(self, processes: int) -> None:
        """Fork the children. Afterwards parameters and order may change, but the data may not."""
        self._processes = min(processes, SHARDS)
        for rank in range(1, self._processes):
            to_child, from_child = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, others_to, others_from in self._children:
                    os.close(others_to)
                    os.close(others_from)
                os.close(to_child[1])
                os.close(from_child[0])
                self._serve(rank, to_child[0], from_child[1])
            os.close(to_child[0])
            os.close(from_child[1])
            self._children.append((pid, to_child[1], from_child[0]))

    def __enter__(self) -> Self:
        """The children, if any, end with the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the children and wait for them."""
        for pid, to_child, from_child in self._children:
            os.close(to_child)
            os.close(from_child)
            os.waitpid(pid, 0)
        self._children.clear()

    def step(self, begin: int, end: int, number: int) -> float:
        """One optimizer step over ``order[begin:end]``; returns the mean loss. *number* counts from 1."""
        self.data_s = self.sync_s = 0.0
        self._together(_STEP, (begin, end, number), self._gradients)
        self._together(_UPDATE, (begin, end, number), self._update)
        return float(self._losses.sum()) / (end - begin)

    def accuracy(self) -> float:
        """Fraction of the validation documents whose label has the highest score."""
        self._together(_EVALUATE, (0, len(self.validation[1]), 0), self._evaluate)
        return int(self._counts[:, 1].sum()) / max(1, len(self.validation[1]))

    def _together(
        self, kind: bytes, numbers: tuple[int, int, int], work: Callable[[int, int, int], None]
    ) -> None:
        message = _ORDER.pack(kind, *numbers)
        for pid, to_child, _ in self._children:
            try:
                os.write(to_child, message)
            except BrokenPipeError as err:
                raise RuntimeError(f"worker process {pid} ended between two steps") from err
        work(*numbers)
        begun = time.perf_counter()
        for pid, _, from_child in self._children:
            if not os.read(from_child, 1):
                raise RuntimeError(f"worker process {pid} ended in the middle of a step")
        self.sync_s += time.perf_counter() - begun

    def _serve(self, rank: int, commands: int, answers: int) -> NoReturn:
        """Main loop of a child."""
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
            self._rank, self._children = rank, []
            work = {_STEP: self._gradients, _UPDATE: self._update, _EVALUATE: self._evaluate}
            while message := os.read(commands, _ORDER.size):
                kind, begin, end, number = _ORDER.unpack(message)
                work[kind](begin, end, number)
                os.write(answers, b".")
            code = 0
        except Exception:  # noqa: BLE001 - the outermost edge of a process: shown here, raised in the parent
            traceback.print_exc()
        finally:
            os._exit(code)

    def _shards(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """This process's shards of ``begin .. end``: (shard, begin, end)."""
        cuts = [begin + (end - begin) * shard // SHARDS for shard in range(SHARDS + 1)]
        return [(shard, cuts[shard], cuts[shard + 1]) for shard in range(self._rank, SHARDS, self._processes)]

    def _gradients(self, begin: int, end: int, number: int) -> None:
        for shard, first, last in self._shards(begin, end):
            begun = time.perf_counter()
            rows, labels = self._batch(self.order[first:last], shard, number)
            self.data_s += time.perf_counter() - begun
            self._put(shard, gradient(self.shape, self.vector, rows, labels))

    def _batch(self, chosen: np.ndarray, shard: int, number: int) -> tuple[Rows, np.ndarray]:
        """Samples with some words dropped; the random draws depend only on seed, step and shard."""
        rows = self.train[0].take(chosen)
        draw = np.random.Generator(np.random.Philox(key=[self.recipe.seed, number * SHARDS + shard]))
        keep = draw.random(len(rows.columns)) >= self.recipe.dropout
        return rows.drop(keep, 1 / (1 - self.recipe.dropout)), self.train[1][chosen]

    def _put(self, shard: int, found: Gradient) -> None:
        count = len(found.columns)
        self._counts[shard, 0] = count
        self._columns[shard, :count] = found.columns
        self._embeddings[shard, :count] = found.embedding
        self._heads[shard] = found.head
        self._losses[shard] = found.loss

    def _update(self, begin: int, end: int, number: int) -> None:
        """Sum the gradients of this process's part over all shards, and update that part."""
        rate = learning_rate(self.recipe.rate, number, self.recipe.total_steps)
        features, samples = self.shape.features, end - begin
        low = features * self._rank // self._processes
        high = features * (self._rank + 1) // self._processes
        total = np.zeros((high - low, self.shape.hidden))
        touched = np.zeros(high - low, dtype=bool)
        for shard in range(SHARDS):
            columns = self._columns[shard, : self._counts[shard, 0]]
            first, last = np.searchsorted(columns, (low, high))
            mine = columns[first:last] - low
            total[mine] += self._embeddings[shard, first:last]
            touched[mine] = True
        rows = np.flatnonzero(touched)
        self.adam.update_rows(self.shape, self.vector, rows + low, total[rows] / samples, rate, number)
        if self._rank == 0:
            mean = sum(self._heads, np.zeros(self.shape.head_size)) / samples
            self.adam.update(self.vector, slice(self.shape.embedding_size, None), mean, rate, number)

    def _evaluate(self, begin: int, end: int, _number: int) -> None:
        for shard, first, last in self._shards(begin, end):
            found = scores(self.shape, self.vector, self.validation[0].take(np.arange(first, last)))
            self._counts[shard, 1] = int((found.argmax(axis=1) == self.validation[1][first:last]).sum())
