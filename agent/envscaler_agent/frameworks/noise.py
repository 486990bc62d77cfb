"""Gradient noise scale: how much a larger batch would still help. For the planner.

With G the true gradient and S the sum of the variances of one sample's gradient, the simple noise scale is
B = S / |G|^2, in samples (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, eq. 2.9).
Neither is known, but the squared norms of gradients of a small batch b and a large one B have the
expectations |G|^2 + S/b and |G|^2 + S/B. So (appendix A.1 there)::

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

One rank, or one pass of accumulation, sees a small batch; the large one is their average, which training
computes anyway. Both are averaged over steps before the division, because a quotient of noisy numbers is
biased (there, and Qiao et al., "Pollux", OSDI 2021, section 3.1).
"""

from __future__ import annotations

import math
from typing import Any, Iterable, List, Optional, Tuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from envscaler_agent import Session

SMOOTHING = 0.95
"""Weight of the past in the running means. Chosen: the mean of about twenty samples."""
EVERY = 10
"""Steps between two samples. Chosen: a sample costs one pass over the gradients."""


class NoiseScale:
    """Running estimate from pairs of squared gradient norms. Pure."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        """Begin without samples."""
        self._smoothing = smoothing
        self._weight = self._square = self._variance = 0.0

    def add(self, *, small: float, small_batch: int, large: float, large_batch: int) -> None:
        """Add the mean squared gradient norm of the small batches and that of the large batch.

        Numbers that are not finite, such as those of a step that overflowed, are left out.

        Raises:
            ValueError: The large batch is not larger.
        """
        if not 0 < small_batch < large_batch:
            raise ValueError(f"a batch of {large_batch} is not larger than one of {small_batch}")
        if not (math.isfinite(small) and math.isfinite(large)):
            return
        square = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        variance = (small - large) / (1 / small_batch - 1 / large_batch)
        keep = self._smoothing
        self._weight = keep * self._weight + 1 - keep
        self._square = keep * self._square + (1 - keep) * square
        self._variance = keep * self._variance + (1 - keep) * variance

    @property
    def samples(self) -> Optional[float]:
        """Noise scale, samples; None while unknown: no sample yet, or no gradient above the noise."""
        if self._weight == 0 or self._square <= 0:
            return None
        return max(0.0, self._variance / self._square)


class GradientNoise:
    """Samples a model's gradients every few steps and reports the noise scale through a session.

    ::

        noise = GradientNoise(model, session, global_batch=64)
        for micro in micro_batches:
            loss(micro).backward()
            noise.after_backward()
        noise.before_step()
        optimizer.step()

    With ``DistributedDataParallel`` on several ranks the small batches are those of the ranks, taken from its
    buckets before they are reduced. Otherwise they are the accumulated passes; with one pass per step there
    is nothing to compare, and nothing is reported. Norms stay on the device until the next sample, so that
    nothing waits for a GPU; a step without a sample costs two comparisons.
    """

    def __init__(self, model: Any, session: Session, *, global_batch: int, every: int = EVERY) -> None:
        """Watch *model*; the first sample is at the first step."""
        self._model, self._session = model, session
        self._global_batch, self._every = global_batch, every
        self._scale = NoiseScale()
        self._steps = self._passes = 0
        self._squares: List[Any] = []
        self._before: Optional[List[Any]] = None
        self._pending: Optional[Tuple[Any, int, Any]] = None
        self._between_ranks = _is_parallel(model)
        if self._between_ranks:
            # A lambda, because torch refuses a hook whose annotations are strings.
            model.register_comm_hook(None, lambda _state, bucket: self._reduce(bucket))

    @property
    def samples(self) -> Optional[float]:
        """Noise scale so far, in samples; None while it is unknown."""
        return self._scale.samples

    def after_backward(self) -> None:
        """Measure what one more pass added to the gradients."""
        if self._between_ranks or self._steps % self._every:
            return
        now = [gradient.detach().clone() for gradient in self._gradients()]
        before = self._before or [torch.zeros_like(gradient) for gradient in now]
        self._squares.append(_square(a - b for a, b in zip(now, before)))
        self._before = now
        self._passes += 1

    def before_step(self) -> None:
        """Measure the gradient that the step will use, and report the result of the previous sample."""
        looks = self._steps % self._every == 0
        self._steps += 1
        if not looks:
            return
        self._report()
        squares, self._squares, self._before = self._squares, [], None
        passes, self._passes = self._passes, 0
        if self._between_ranks:
            parts = torch.distributed.get_world_size()
            small = torch.stack(squares).sum()
            torch.distributed.all_reduce(small)
            self._pending = small / parts, parts, _square(self._gradients())
        elif passes > 1:
            # What a pass adds is its gradient times a constant; the mean is the sum times the same constant.
            small = torch.stack(squares).mean()
            self._pending = small, passes, _square(self._gradients()) / passes**2

    def _report(self) -> None:
        if self._pending is None:
            return
        small, parts, large = self._pending
        self._pending = None
        self._scale.add(
            small=float(small),
            small_batch=self._global_batch // parts,
            large=float(large),
            large_batch=self._global_batch,
        )
        self._session.report(noise_scale=self._scale.samples)

    def _reduce(self, bucket: Any) -> Any:
        """Average a bucket over the ranks, as DDP would; first, on a sample, measure this rank's norm."""
        if self._steps % self._every == 0:
            self._squares.append(_square([bucket.buffer()]))
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    def _gradients(self) -> List[Any]:
        found = (parameter.grad for parameter in self._model.parameters())
        return [gradient for gradient in found if gradient is not None]


def _is_parallel(model: Any) -> bool:
    is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return is_wrapped and torch.distributed.get_world_size() > 1


def _square(tensors: Iterable[Any]) -> Any:
    """Return the squared norm of all of them together, on their device."""
    return torch.stack([tensor.detach().float().square().sum() for tensor in tensors]).sum()
