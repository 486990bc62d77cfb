"""How fast a training would be on an allocation that it has not used.

A step consists of compute, which grows with the batch of one GPU, and synchronization, which depends on where
the GPUs are. The logarithm of the synchronization, relative to the first step's compute, is a Gaussian
process over GPU type, count and nodes, conditioned on the measurements. Progress per second follows from the
best batch, given the gradient noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.planning.knowledge import StepTime
from envscaler_airflow.planning.record import Record


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The properties of an allocation that determine a training's speed.

    Attributes:
        gpu: Type.
        nodes, gpus: In total.
    """

    gpu: str
    nodes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Prior(Record):
    """Prior before any measurement. Chosen, near the moments of the measured trainings.

    Attributes:
        sync: Logarithm of synchronization over the compute of the first step, two GPUs of a node.
        sync_stdev: Standard deviation of *sync*.
        per_doubling, per_doubling_stdev: Added with each doubling of GPUs.
        across_nodes, across_nodes_stdev: Added as soon as there are two nodes.
        local_stdev: Deviation of one count from its neighbors.
        alike: Correlation between types.
        type_stdev: Deviation of the logarithm of another type's speed from what its memory bandwidth
            predicts.
        noise: Deviation of the logarithm of a measured synchronization.
        fixed_share: Fraction of the first step's compute that does not grow with the batch.
    """

    sync: float = -1.0
    sync_stdev: float = 0.6
    per_doubling: float = 0.1
    per_doubling_stdev: float = 0.15
    across_nodes: float = 0.3
    across_nodes_stdev: float = 0.6
    local_stdev: float = 0.2
    alike: float = 0.5
    type_stdev: float = 0.3
    noise: float = 0.15
    fixed_share: float = 0.35


OWN_BATCH = Prior(sync=-3.0, sync_stdev=1.0)
"""Prior for a training that keeps its batch: its user has chosen one that keeps GPUs busy, unlike the
smallest of a range, so synchronization is a small part of the step. Chosen: 5 % for two GPUs, 2 to 14 %
within a deviation; published trainings on H100 lose 0 to 2 % from 8 to 64 GPUs. On the trainings of
docs/reference/policies.md, -2 to -4 do about as well.
"""


def prior_for(init_batch: int, max_batch: int) -> Prior:
    """The prior for a training whose global batch has these bounds."""
    return OWN_BATCH if init_batch == max_batch else Prior()


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of one shape.

    Attributes:
        batch: Global batch.
        step_s: Mean seconds of a step.
        sync_s: The part of it that is synchronization not hidden behind compute.
        noise_scale: Gradient noise (variance over square) at that time; None: not reported.
        micro_batches: Number that one GPU accumulates in a step, which synchronizes once.
        times: Number of looks that it is the mean of, at most ten.
        earlier: Measurements of the same shape at other batches.
    """

    batch: int
    step_s: float
    sync_s: float
    noise_scale: float | None = None
    micro_batches: int = 1
    times: int = 1
    earlier: tuple[Measured, ...] = ()

    @classmethod
    def of(cls, step: StepTime) -> Measured:
        """The measurement of one *step*."""
        return cls(step.batch, step.step_s, step.sync_s, step.noise_scale, step.micro_batches)


def gain(batch: float, init_batch: float, noise_scale: float | None) -> float:
    """Progress of a step, in steps at *init_batch*; without a noise scale, in samples.

    Source: Qiao et al., Pollux, OSDI 2021, equation 7.
    """
    if noise_scale is None:
        return batch / init_batch
    return (noise_scale + 1) / (noise_scale * init_batch / batch + 1)


GROWS = 1.6
"""Gradient noise grows during training; this is its expected factor over the remaining work, relative to now.
Chosen; direction and size: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, section 4."""


def foreseen(noise_scale: float | None) -> float | None:
    """Expected noise scale over the remaining work, from the current one."""
    return None if noise_scale is None else GROWS * noise_scale


ROOM = 4.0
"""Factor above the largest batch seen on one GPU up to which batches are assumed to fit, until the noise
calls for more than a batch that was seen: at first it calls for small ones. Chosen."""
LARGER = 1.05
"""If a batch twice as large would be faster by this factor and is not used, it does not fit. Chosen."""
UNSURE = 0.05
"""Fraction of a step that its noise and the model of compute may explain. Chosen."""


@dataclass(slots=True)
class Learner:
    """Rates of every shape, with a standard deviation.

    Attributes:
        init_batch, max_batch: Bounds of the global batch; equal for a fixed one.
        speeds: Speed of one GPU by type, in any unit, from datasheets.
        memory: Memory of one GPU by type, in any unit.
        prior: The prior.
        seen: The shapes that the training used, each with its newest measurement.
    """

    init_batch: int
    max_batch: int
    speeds: Mapping[str, float]
    memory: Mapping[str, float] = field(default_factory=dict)
    prior: Prior = field(default_factory=Prior)
    seen: dict[Shape, Measured] = field(default_factory=dict)
    _base: tuple[Shape, float, float] | None = None
    _first: dict[str, Shape] = field(default_factory=dict)
    _limited: set[str] = field(default_factory=set)
    _part: dict[str, float] = field(default_factory=dict)
    _sync: dict[Shape, float] = field(default_factory=dict)
    _points: dict[str, dict[float, float]] = field(default_factory=dict)
    _compute: dict[str, tuple[float, float]] = field(default_factory=dict)
    _rows: list[tuple[Shape, float]] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _factor: list[list[float]] = field(default_factory=list)
    _is_conditioned: bool = False

    def learn(self, shape: Shape, measured: Measured) -> None:
        """Add a measurement on *shape* and its earlier ones; it replaces what was known of that shape."""
        self.learn_all({shape: measured})

    def learn_all(self, measured: Mapping[Shape, Measured]) -> None:
        """Add measurements, the first shape first: each at its smallest batch, then at larger ones.

        The compute of a type is that of the first shape on it, or of a faster one. Extra time on other shapes
        counts as synchronization, regardless of its cause (data loading, a shared bus).
        """
        rows = [
            (shape, sorted((*one.earlier, one), key=lambda item: item.batch))
            for shape, one in measured.items()
        ]
        for at in range(max((len(row) for _, row in rows), default=0)):
            for shape, row in rows:
                if at < len(row):
                    self._learn(shape, row[at])
        for shape, one in measured.items():
            self.seen[shape] = one
            if self._is_limited(shape, one):
                self._limited.add(shape.gpu)
        self._is_conditioned = False

    def _learn(self, shape: Shape, measured: Measured) -> None:
        local = measured.batch / shape.gpus / measured.micro_batches
        compute_s = max(measured.step_s - measured.sync_s, 1e-9) / measured.micro_batches
        if self._base is None:
            self._base = (shape, local, compute_s)
        self.seen[shape] = measured
        if measured.micro_batches > 1:
            self._part[shape.gpu] = max(local, self._part.get(shape.gpu, 0.0))
        first = self._first.setdefault(shape.gpu, shape)
        if first == shape or compute_s < self._step_of(shape.gpu, local):
            points = self._points.setdefault(shape.gpu, {})
            points[round(local, 3)] = compute_s
            self._compute[shape.gpu] = self._fit(shape.gpu, points)

    def _sync_of(self, shape: Shape, measured: Measured) -> float:
        compute_s = self._step_of(shape.gpu, measured.batch / shape.gpus)
        return max(_beyond(measured.step_s, compute_s), measured.sync_s)

    def _sync_told(self, shape: Shape) -> float:
        """The synchronization that informs other shapes; ignored if it is within the noise of the step."""
        found = self.seen[shape]
        compute_s = self._step_of(shape.gpu, found.batch / shape.gpus)
        return max(_beyond((1 - UNSURE) * found.step_s, compute_s), found.sync_s)

    def _step_of(self, gpu: str, local: float) -> float:
        return self._compute_s(gpu, *self._compute[gpu], local)

    def _compute_s(self, gpu: str, fixed: float, slope: float, local: float) -> float:
        """Seconds of compute of *local* samples, in as few micro-batches as fit."""
        passes = max(1, math.ceil(local / self._largest_part(gpu) - 1e-6))
        return passes * fixed + slope * local

    def _largest_part(self, gpu: str) -> float:
        """Samples of a micro-batch where the training accumulates; else infinite."""
        if gpu in self._part or self._base is None:
            return self._part.get(gpu, math.inf)
        base = self._base[0].gpu
        return self._part.get(base, math.inf) * _ratio(self.memory, gpu, base)

    def rate(self, shape: Shape, noise_scale: float | None) -> tuple[float, float]:
        """Median progress per second on *shape*, and the standard deviation of its logarithm.

        Raises:
            ValueError: There is no measurement yet.
        """
        if self._base is None:
            raise ValueError("nothing was measured yet")
        if not self._is_conditioned:
            self._condition()
        unsure = 0.0 if shape.gpu in self._compute else self.prior.type_stdev
        if shape in self.seen:
            return self._progress(shape, noise_scale), 0.01
        if shape.gpus == 1:
            return self._best(shape, [0.0], noise_scale)[0], max(unsure, 0.02)
        across = [self._kernel(shape, item) for item, _ in self._rows]
        mean = self._mean(shape) + sum(a * w for a, w in zip(across, self._weights, strict=True))
        solved = _forward(self._factor, across)
        spread = math.sqrt(max(self._kernel(shape, shape) - sum(value * value for value in solved), 0.0))
        syncs = [self._base[2] * math.exp(mean + part * spread) for part in (-1, 0, 1)]
        low, median, high = self._best(shape, syncs, noise_scale)
        return median, max(0.02, math.hypot(math.log(low / high) / 2, unsure))

    def _progress(self, shape: Shape, noise_scale: float | None) -> float:
        """The measured progress on *shape*, adjusted by the model to the change in noise."""
        found = self.seen[shape]
        measured = gain(found.batch, self.init_batch, found.noise_scale) / found.step_s
        (then,) = self._best(shape, [self._sync[shape]], found.noise_scale)
        return measured * self._best(shape, [self._sync[shape]], noise_scale)[0] / then

    def _fit(self, gpu: str, points: Mapping[float, float]) -> tuple[float, float]:
        """Fixed seconds and seconds per sample of compute on one GPU.

        A single batch size cannot separate the two. On the first type, the fixed share is the prior's. On
        another type, datasheets scale the part that grows, and the rest of the step is fixed.
        """
        small, large = min(points), max(points)
        if large > 1.3 * small:
            count = len(points)
            mean_x, mean_y = sum(points) / count, sum(points.values()) / count
            slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / sum(
                (x - mean_x) ** 2 for x in points
            )
            slope = min(max(slope, 0.0), mean_y / mean_x)
            return mean_y - slope * mean_x, slope
        most = (1 - self.prior.fixed_share) * points[large] / large
        if self._base is not None and gpu != self._base[0].gpu and self._base[0].gpu in self._compute:
            ratio = _ratio(self.speeds, gpu, self._base[0].gpu)
            most = min(0.95 * points[large] / large, self._compute[self._base[0].gpu][1] / ratio)
        return points[large] - most * large, most

    def _of_type(self, gpu: str) -> tuple[float, float]:
        if gpu in self._compute or self._base is None:
            return self._compute[gpu]
        base = self._base[0].gpu
        speed = _ratio(self.speeds, gpu, base)
        fixed, slope = self._compute[base]
        return fixed / speed, slope / speed

    def _best(self, shape: Shape, syncs_s: Sequence[float], noise_scale: float | None) -> list[float]:
        """Highest progress per second for each of *syncs_s*, over batches like those that were seen."""
        if self._base is None:
            raise ValueError("nothing was measured yet")
        local = self._base[1]
        fixed, slope = self._of_type(shape.gpu)
        largest = self._largest(shape.gpu)
        tried: list[tuple[float, float]] = []
        last = 0.0
        for power in range(-6, 13):
            mine = local * 2 ** (power / 2)
            batch = min(max(mine * shape.gpus, self.init_batch), self.max_batch)
            if power > -6 and batch / shape.gpus > largest * 1.01:
                break
            if batch != last:
                compute_s = self._compute_s(shape.gpu, fixed, slope, batch / shape.gpus)
                tried.append((gain(batch, self.init_batch, noise_scale), compute_s))
            last = batch
        return [max(made / math.hypot(compute_s, sync_s) for made, compute_s in tried) for sync_s in syncs_s]

    def _largest(self, gpu: str) -> float:
        """Largest batch of one GPU that is assumed to fit: the largest one seen, if memory was the limit."""
        if self._base is None:
            raise ValueError("nothing was measured yet")
        base = self._base[0].gpu
        of = gpu if gpu in self._first else base
        room = _ratio(self.memory, gpu, of)
        seen = max(m.batch / s.gpus for s, m in self.seen.items() if s.gpu == of)
        return seen * room * (1.0 if of in self._limited else ROOM)

    def _is_limited(self, shape: Shape, measured: Measured) -> bool:
        """True when the noise calls for a larger batch than the one that was run: no larger one fits."""
        local = measured.batch / shape.gpus
        fixed, slope = self._compute[shape.gpu]
        sync_s = self._sync_of(shape, measured)

        def progress(batch: float) -> float:
            step_s = math.hypot(fixed + slope * batch / shape.gpus, sync_s)
            return gain(batch, self.init_batch, measured.noise_scale) / step_s

        more = min(2 * local * shape.gpus, self.max_batch)
        return more > 1.5 * measured.batch and progress(more) > LARGER * progress(measured.batch)

    def _mean(self, shape: Shape) -> float:
        added = self.prior.per_doubling * (math.log2(shape.gpus) - 1)
        return self.prior.sync + added + (self.prior.across_nodes if shape.nodes > 1 else 0.0)

    def _kernel(self, a: Shape, b: Shape) -> float:
        prior, is_same = self.prior, a.gpu == b.gpu
        doublings, others = math.log2(a.gpus) - 1, math.log2(b.gpus) - 1
        out = prior.sync_stdev**2 + prior.per_doubling_stdev**2 * doublings * others
        if a.nodes > 1 and b.nodes > 1:
            out += prior.across_nodes_stdev**2
        if not is_same:
            return out * prior.alike
        if (a.nodes > 1) == (b.nodes > 1):
            out += prior.local_stdev**2 * math.exp(-((doublings - others) ** 2) / 2)
        return out

    def _condition(self) -> None:
        """Condition the Gaussian process on every measured shape."""
        if self._base is None:
            raise ValueError("nothing was measured yet")
        scale = self._base[2]
        self._sync = {item: self._sync_of(item, found) for item, found in self.seen.items()}
        self._rows = [
            (item, math.log(max(self._sync_told(item), 1e-3 * scale) / scale) - self._mean(item))
            for item in self.seen
            if item.gpus > 1
        ]
        self._is_conditioned = True
        size = len(self._rows)
        self._factor = [[0.0] * size for _ in range(size)]
        for i in range(size):
            for j in range(i + 1):
                value = self._kernel(self._rows[i][0], self._rows[j][0])
                if i == j:
                    value += self.prior.noise**2
                value -= sum(self._factor[i][k] * self._factor[j][k] for k in range(j))
                self._factor[i][j] = math.sqrt(max(value, 1e-12)) if i == j else value / self._factor[j][j]
        half = _forward(self._factor, [value for _, value in self._rows])
        weights = [0.0] * size
        for i in reversed(range(size)):
            rest = sum(self._factor[j][i] * weights[j] for j in range(i + 1, size))
            weights[i] = (half[i] - rest) / self._factor[i][i]
        self._weights = weights


def _ratio(of: Mapping[str, float], gpu: str, base: str) -> float:
    """Ratio of two types; 1 when one of them is unknown."""
    return of[gpu] / of[base] if gpu in of and base in of else 1.0


def _beyond(step_s: float, compute_s: float) -> float:
    """Synchronization of a step: half of it is hidden behind compute, ``step^2 = compute^2 + sync^2``.

    Source: Qiao et al., Pollux, OSDI 2021, equation 11, with an exponent of 2; chosen: of 1 to 6 it predicts
    the step at other batches best over the trainings of docs/reference/policies.md.
    """
    return math.sqrt(max(step_s**2 - compute_s**2, 0.0))


def _forward(factor: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    out: list[float] = []
    for i, value in enumerate(values):
        out.append((value - sum(factor[i][k] * out[k] for k in range(i))) / factor[i][i])
    return out
