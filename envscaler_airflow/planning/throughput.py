"""How long one training step takes: computation, synchronization, and how much they overlap.

The form is that of Pollux. Its parameters are fitted to measurements of runs, or derived from datasheets, by
how much memory a job moves and how much it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from envscaler_airflow.planning.record import NotNegative, Record

_LEAST_S = 1e-6
"""Seconds below which parts of a step are not distinguished. Chosen."""


@dataclass(frozen=True, slots=True)
class Step(Record):
    """Seconds of one step as a function of batch, GPUs and nodes.

    ``compute = fixed_s + sample_s * local_batch``; ``sync`` is 0 on one GPU, otherwise ``local_s +
    local_each_s * (gpus - 2)`` within a node and ``spread_s + spread_each_s * (gpus - 2)`` over several;
    ``step = (compute^overlap + sync^overlap)^(1/overlap)``: with overlap 1, nothing is hidden.

    Source:
        A. Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning,
        OSDI 2021, section 3.2, equations 8 to 11.
    """

    fixed_s: NotNegative[float]
    sample_s: NotNegative[float]
    local_s: NotNegative[float] = 0.0
    local_each_s: NotNegative[float] = 0.0
    spread_s: NotNegative[float] = 0.0
    spread_each_s: NotNegative[float] = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Reject NaN, negative seconds and an overlap that would make a step shorter than its parts."""
        Record.__post_init__(self)
        if not 1 <= self.overlap <= 10:
            raise ValueError(f"overlap must be in [1, 10], got {self.overlap!r}")
        if self.fixed_s + self.sample_s <= 0:
            raise ValueError("a step takes time: fixed_s or sample_s must be > 0")

    def compute_s(self, local_batch: float) -> float:
        """Seconds of the forward and backward pass."""
        return self.fixed_s + self.sample_s * local_batch

    def sync_s(self, gpus: int, nodes: int = 1) -> float:
        """Seconds to synchronize gradients without overlap."""
        if gpus <= 1:
            return 0.0
        first, each = (self.local_s, self.local_each_s) if nodes <= 1 else (self.spread_s, self.spread_each_s)
        return first + each * (gpus - 2)

    def seconds(self, local_batch: float, gpus: int = 1, nodes: int = 1) -> float:
        """Seconds of one step."""
        compute, sync = self.compute_s(local_batch), self.sync_s(gpus, nodes)
        if sync <= 0:
            return compute
        longer, shorter = max(compute, sync), min(compute, sync)
        stretched: float = (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap)
        return longer * stretched


class Timing(NamedTuple):
    """A measured step."""

    local_batch: float
    gpus: int
    nodes: int
    step_s: float


def fit_step(timings: Sequence[Timing], prior: Step, *, trust: float = 0.02) -> Step:
    """Fit a step to *timings* by least squares of relative errors, with *prior* filling the gaps.

    Args:
        timings: At least one.
        prior: Where to start; a factor of e away from it costs as much as a relative error of *trust* ^ 0.5
            in every timing.
        trust: Weight of the prior, > 0.

    Raises:
        ValueError: No timings, or an invalid one.
    """
    if not timings:
        raise ValueError("timings: none given")
    for timing in timings:
        if not 0 < timing.step_s < math.inf:
            raise ValueError(f"step_s must be finite and > 0, got {timing.step_s!r}")
    start = _numbers(prior)

    def loss(point: list[float]) -> float:
        step = _step(point, prior)
        errors = (
            math.log(step.seconds(item.local_batch, item.gpus, item.nodes) / item.step_s) for item in timings
        )
        far = sum((now - before) ** 2 for now, before in zip(point, start, strict=True))
        return sum(error * error for error in errors) / len(timings) + trust * far / len(timings)

    return _step(minimise(loss, start), prior)


_FITTED = ("fixed_s", "sample_s", "local_s", "local_each_s", "spread_s", "spread_each_s")


def _numbers(step: Step) -> list[float]:
    logs = [math.log(max(getattr(step, name), _LEAST_S)) for name in _FITTED]
    return [*logs, math.log(step.overlap)]


def _step(point: Sequence[float], prior: Step) -> Step:
    values = {name: math.exp(min(number, 20.0)) for name, number in zip(_FITTED, point, strict=False)}
    # A part that is zero in the prior stays zero unless the fit moved it.
    for name, value in values.items():
        if getattr(prior, name) == 0 and value <= 2 * _LEAST_S:
            values[name] = 0.0
    return Step(**values, overlap=min(10.0, math.exp(min(max(point[-1], 0.0), 3.0))))


def minimise(
    function: Callable[[list[float]], float], start: Sequence[float], *, width: float = 0.5, rounds: int = 600
) -> list[float]:
    """A point near *start* where *function* is small, without derivatives.

    Source:
        J. A. Nelder, R. Mead, A simplex method for function minimization, Computer Journal 7 (1965).
    """
    points = [list(start)] + [
        [value + (width if at == axis else 0.0) for at, value in enumerate(start)]
        for axis in range(len(start))
    ]
    simplex = sorted((function(point), point) for point in points)
    for _ in range(rounds):
        if simplex[-1][0] - simplex[0][0] <= 1e-9 * (abs(simplex[0][0]) + 1e-12):
            break
        simplex[-1] = _next(function, simplex)
        simplex.sort()
    return simplex[0][1]


def _next(
    function: Callable[[list[float]], float], simplex: list[tuple[float, list[float]]]
) -> tuple[float, list[float]]:
    """Where the worst point moves: reflected, farther, or nearer; if all fail, towards the best point."""
    worst = simplex[-1]
    count = len(simplex) - 1
    centre = [sum(point[at] for _, point in simplex[:-1]) / count for at in range(count)]

    def at(scale: float) -> tuple[float, list[float]]:
        point = [mid + scale * (mid - far) for mid, far in zip(centre, worst[1], strict=True)]
        return function(point), point

    reflected = at(1.0)
    if reflected[0] < simplex[0][0]:
        return min(reflected, at(2.0))
    if reflected[0] < simplex[-2][0]:
        return reflected
    contracted = at(0.5) if reflected[0] < worst[0] else at(-0.5)
    if contracted[0] < worst[0]:
        return contracted
    best = simplex[0][1]
    near = [(mine + 3 * other) / 4 for mine, other in zip(worst[1], best, strict=True)]
    return function(near), near


@dataclass(frozen=True, slots=True)
class Gpu(Record):
    """Datasheet of one GPU.

    Attributes:
        name: Canonical.
        memory_gb: Nominal.
        bandwidth_gb_s: Memory bandwidth.
        tflops: Dense, by precision: ``fp32``, ``tf32``, ``fp16`` (BF16 is the same), ``fp8``.
        link_gb_s: Between GPUs of one node, both directions together.
        has_direct_link: NVLink, NVSwitch or Infinity Fabric, not PCIe.
        source: Where it is from.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: dict[str, float]
    link_gb_s: float = 32.0
    has_direct_link: bool = False
    source: str = ""

    def peak_tflops(self, precision: str) -> float | None:
        """Peak at *precision*, or at the next available one that is as exact; None when none is known.

        A GPU without TF32 runs such jobs in FP32. One without FP8 uses FP16, or FP32 if it has no FP16
        either.
        """
        order = {"fp8": ("fp8", "fp16", "fp32"), "fp16": ("fp16", "fp32"), "tf32": ("tf32", "fp32")}
        for name in order.get("fp16" if precision == "bf16" else precision, ("fp32",)):
            if name in self.tflops:
                return self.tflops[name]
        return None


def moved(
    step: Step, *, before: Gpu, after: Gpu, flops: float, moved_bytes: float, precision: str
) -> Step | None:
    """Predict a *step* measured on one GPU for another; None when a datasheet lacks the precision.

    Samples scale by the roofline, the larger of compute and memory time, with the same share of the peak on
    both GPUs. The fixed part is the host's and scales by the square root of that (chosen: between a host that
    does not change and one that keeps pace). Synchronization within a node scales by that of its link.
    """
    old = roofline_s(before, flops=flops, moved_bytes=moved_bytes, precision=precision)
    new = roofline_s(after, flops=flops, moved_bytes=moved_bytes, precision=precision)
    if old is None or new is None:
        return None
    ratio, link = new / old, before.link_gb_s / after.link_gb_s
    return replace(
        step,
        fixed_s=step.fixed_s * math.sqrt(ratio),
        sample_s=step.sample_s * ratio,
        local_s=step.local_s * math.sqrt(link),
        local_each_s=step.local_each_s * math.sqrt(link),
    )


REACHED = 0.45
"""Fraction of the peak that matrix code reaches. Chosen: large language models train at 0.3 to 0.6."""


def roofline_s(gpu: Gpu, *, flops: float, moved_bytes: float, precision: str) -> float | None:
    """Seconds of one sample by the datasheet, at :data:`REACHED` of the compute peak and 0.8 of bandwidth.

    Source:
        S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52 (2009); 0.8 chosen, what copies reach.
    """
    peak = gpu.peak_tflops(precision)
    if peak is None:
        return None
    return max(flops / (peak * 1e12 * REACHED), moved_bytes / (gpu.bandwidth_gb_s * 1e9 * 0.8))
