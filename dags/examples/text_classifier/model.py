"""The classifier: hashed words -> hidden layer -> labels, with its gradient and its optimizer.

``hidden = tanh(rows @ embedding + hidden_bias)``, ``scores = hidden @ output + output_bias``.

Everything is float64, and every function returns the same bits for the same arguments in every process. Any
number of processes therefore trains the same model. It needs only numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants. Source: Kingma and Ba, arXiv 1412.6980, algorithm 1."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A sparse matrix in compressed rows.

    Attributes:
        starts: Row i has entries ``starts[i]`` to ``starts[i + 1]``; int64, rows + 1.
        columns: Column of each entry; int32, sorted within a row.
        values: Weight of each entry; float32, the sums over them are float64.
        features: Number of columns.
    """

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    features: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def take(self, rows: np.ndarray) -> Rows:
        """The given *rows*, in the order given."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        entries = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        return Rows(starts, self.columns[entries], self.values[entries], self.features)

    def drop(self, keep: np.ndarray, scale: float) -> Rows:
        """The entries where *keep* is true, times *scale*."""
        kept = np.zeros(len(self.columns) + 1, dtype=np.int64)
        np.cumsum(keep, out=kept[1:])
        return Rows(
            kept[self.starts], self.columns[keep], self.values[keep] * np.float32(scale), self.features
        )

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        """``(columns in use, sorted; dense matrix over them)``."""
        columns, places = np.unique(self.columns, return_inverse=True)
        matrix = np.zeros((len(self), len(columns)))
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        matrix[owner, places.ravel()] = self.values
        return columns, matrix


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network. The parameters form one flat vector of ``size`` float64.

    Attributes:
        features: Hash buckets.
        hidden: Units of the hidden layer.
        labels: Classes.
    """

    features: int
    hidden: int
    labels: int

    @property
    def embedding_size(self) -> int:
        """Parameters of the embedding, the first in the vector."""
        return self.features * self.hidden

    @property
    def head_size(self) -> int:
        """Parameters of everything after the embedding."""
        return self.hidden + self.hidden * self.labels + self.labels

    @property
    def size(self) -> int:
        """All parameters."""
        return self.embedding_size + self.head_size

    def embedding(self, vector: np.ndarray) -> np.ndarray:
        """View of the embedding, (features, hidden)."""
        return vector[: self.embedding_size].reshape(self.features, self.hidden)

    def head(self, vector: np.ndarray) -> np.ndarray:
        """View of everything after the embedding, flat."""
        return vector[self.embedding_size :]

    def head_parts(self, head: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of a flat head: hidden bias, output (hidden, labels), output bias."""
        output_end = self.hidden + self.hidden * self.labels
        output = head[self.hidden : output_end].reshape(self.hidden, self.labels)
        return head[: self.hidden], output, head[output_end:]

    def initial(self, seed: int) -> np.ndarray:
        """Initial parameters: Glorot for the output, unit scale for unit-length rows, biases 0."""
        generator = np.random.Generator(np.random.Philox(key=seed))
        vector = np.zeros(self.size)
        self.embedding(vector)[:] = generator.standard_normal((self.features, self.hidden))
        _, output, _ = self.head_parts(self.head(vector))
        output[:] = generator.standard_normal(output.shape) * np.sqrt(2 / (self.hidden + self.labels))
        return vector


@dataclass(frozen=True, slots=True)
class Gradient:
    """Sum over some samples of the gradient of the loss.

    Attributes:
        columns: Rows of the embedding that are not zero, sorted.
        embedding: Their gradients, (columns, hidden).
        head: Gradient of the flat head.
        loss: Sum of the cross-entropy, nats.
    """

    columns: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    loss: float


def scores(shape: Shape, vector: np.ndarray, rows: Rows) -> np.ndarray:
    """Log-probabilities of the labels, (rows, labels)."""
    columns, matrix = rows.dense()
    bias, output, output_bias = shape.head_parts(shape.head(vector))
    hidden = np.tanh(matrix @ shape.embedding(vector)[columns] + bias)
    return _log_softmax(hidden @ output + output_bias)


def gradient(shape: Shape, vector: np.ndarray, rows: Rows, labels: np.ndarray) -> Gradient:
    """Sum of the gradients of all *rows* against their *labels*."""
    columns, matrix = rows.dense()
    bias, output, output_bias = shape.head_parts(shape.head(vector))
    hidden = np.tanh(matrix @ shape.embedding(vector)[columns] + bias)
    log_probability = _log_softmax(hidden @ output + output_bias)
    chosen = np.arange(len(labels))
    loss = -float(log_probability[chosen, labels].sum())

    error = np.exp(log_probability)
    error[chosen, labels] -= 1
    behind = (error @ output.T) * (1 - hidden**2)
    head = np.concatenate([behind.sum(axis=0), (hidden.T @ error).ravel(), error.sum(axis=0)])
    return Gradient(columns, matrix.T @ behind, head, loss)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam that skips rows without a gradient (lazy), with decoupled weight decay.

    Attributes:
        first, second: Running moments, as long as the parameters.
        decay: Weight decay per unit of learning rate.

    Source: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101.
    """

    first: np.ndarray
    second: np.ndarray
    decay: float

    def update(self, vector: np.ndarray, part: slice, mean: np.ndarray, rate: float, step: int) -> None:
        """Move ``vector[part]`` against the *mean* gradient; *step* counts from 1."""
        self._move(vector[part], self.first[part], self.second[part], mean, (rate, step))

    def update_rows(
        self, shape: Shape, vector: np.ndarray, rows: np.ndarray, mean: np.ndarray, rate: float, step: int
    ) -> None:
        """Move the given *rows* of the embedding against their *mean* gradients."""
        views = [shape.embedding(each) for each in (vector, self.first, self.second)]
        values, first, second = (view[rows] for view in views)
        self._move(values, first, second, mean, (rate, step))
        for view, moved in zip(views, (values, first, second), strict=True):
            view[rows] = moved

    def _move(
        self,
        values: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        mean: np.ndarray,
        rate_step: tuple[float, int],
    ) -> None:
        rate, step = rate_step
        first += (1 - BETA_1) * (mean - first)
        second += (1 - BETA_2) * (mean**2 - second)
        scale = rate * np.sqrt(1 - BETA_2**step) / (1 - BETA_1**step)
        values *= 1 - rate * self.decay
        values -= scale * first / (np.sqrt(second) + EPSILON)


def learning_rate(peak: float, step: int, total_steps: int) -> float:
    """Half a cosine from *peak* down to 0 over *total_steps*; *step* counts from 1."""
    return peak * 0.5 * (1 + float(np.cos(np.pi * (step - 1) / max(1, total_steps))))


def save_rows(path: Path, rows: Rows, labels: np.ndarray) -> None:
    """Write a labelled matrix as ``.npz``."""
    np.savez(
        path,
        starts=rows.starts,
        columns=rows.columns,
        values=rows.values,
        features=rows.features,
        labels=labels,
    )


def load_rows(path: Path) -> tuple[Rows, np.ndarray]:
    """Read what :func:`save_rows` wrote; nothing in it is executed."""
    with np.load(path, allow_pickle=False) as file:
        rows = Rows(file["starts"], file["columns"], file["values"], int(file["features"]))
        return rows, file["labels"]


def _log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
