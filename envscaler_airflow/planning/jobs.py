"""Properties of a training or inference job, from which its speed on a kind of machine is predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from envscaler_airflow.envspec.quantities import GPU_MEMORY_USABLE
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.performance import Speed, SpeedSource
from envscaler_airflow.planning.record import NotNegative, Record
from envscaler_airflow.planning.requirements import Misfit
from envscaler_airflow.planning.throughput import Gpu, Step, Timing, fit_step, moved

USABLE = GPU_MEMORY_USABLE
"""Fraction of a GPU's nominal memory that a job can use."""

HOST_GIB_EACH = 4.0
"""Host memory per GPU process. Chosen: Python, CUDA libraries and a few batches take 3 to 4."""

GB = 1e9
_FITTED_STDEV = 0.15
"""Relative stdev of a step on the GPU that it was fitted on. Measured: the 90th percentile of the errors of
fits to the published T4 profiles is 0.2."""

_MOVED_STDEV = 0.6
"""Relative stdev of a step that datasheets predict from another GPU. Measured: the median error from T4 to
V100 and A100 is 0.3 to 0.9 on four published models."""

_COUNT_STDEV = 0.15
"""Relative stdev added by each doubling of GPUs away from a measured count. Measured: predictions beyond the
measured counts are off by 11 to 51 % (published elastic profiles)."""

_SHARED_BIAS = 0.5
"""Fraction of the datasheets' error on one GPU that is also applied to the other GPUs. Chosen."""

_NETWORK_GAIN = 4.0
"""Speed-up of the network between hosts with direct GPU links. Chosen: such hosts have 100 Gbit/s and more,
others 25 to 50."""


@dataclass(frozen=True, slots=True)
class Footprint(Record):
    """Memory of a job on each GPU.

    Attributes:
        params: Parameters of the model.
        bytes_each: Bytes per parameter: weights, gradients and optimizer state.
        sample_bytes: Activations of one sample, or of one token.
        fixed_bytes: Additional bytes, such as the adapters of a LoRA.
        is_sharded: Parameters are sharded over all GPUs (FSDP, ZeRO 3).
    """

    params: NotNegative[float]
    bytes_each: NotNegative[float]
    sample_bytes: NotNegative[float] = 0.0
    fixed_bytes: NotNegative[float] = 0.0
    is_sharded: bool = False

    def static_bytes(self, gpus: int) -> float:
        """Bytes that each GPU needs before the first sample."""
        return self.params * self.bytes_each / (gpus if self.is_sharded else 1) + self.fixed_bytes

    def local_batch(self, memory_gb: float, gpus: int) -> float:
        """Largest batch that fits on one GPU; infinite when samples use no memory; below 1: none fits."""
        left = USABLE * memory_gb * GB - self.static_bytes(gpus)
        if left < 0:
            return 0.0
        return math.inf if self.sample_bytes == 0 else left / self.sample_bytes


@dataclass(frozen=True, slots=True)
class Job(Record):
    """A kind of job whose speed can be predicted.

    Attributes:
        name, title: The name for the command line, and a human-readable title.
        unit: Unit of speed and work: ``samples`` or ``tokens``.
        flops, moved_bytes: Per unit, forward and backward.
        precision: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``.
        reference_gpu: The GPU that *step* applies to.
        step: Seconds of one step.
        footprint: Memory.
        batch: Units in one step of all GPUs together at the start of training.
        max_batch: Largest batch that still trains.
        least_local: Fewest units at once on one GPU: a whole sequence, where units are tokens.
        local_batch: Units per GPU when *batch* grows with the number of GPUs; None: *batch* is constant.
        noise: Gradient noise to signal ratio at *batch*; None: a larger batch trains equally well.
        input_cpu_s: CPU seconds to read and prepare one unit; 0: the input is prepared in advance.
        is_measured: *step* is fitted to measurements, not derived from datasheets.
        source: Source of everything above.
    """

    name: str
    title: str
    unit: str
    flops: NotNegative[float]
    moved_bytes: NotNegative[float]
    precision: str
    reference_gpu: str
    step: Step
    footprint: Footprint
    batch: float
    max_batch: float
    least_local: float = 1.0
    local_batch: float | None = None
    noise: NotNegative[float] | None = None
    input_cpu_s: NotNegative[float] = 0.0
    is_measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        """Reject NaN and a batch of zero."""
        Record.__post_init__(self)
        if not 0 < self.batch <= self.max_batch < math.inf:
            raise ValueError(
                f"batch must be > 0 and at most max_batch, got {self.batch!r}, {self.max_batch!r}"
            )

    def gain(self, batch: float) -> float:
        """Progress of a step of *batch*, in steps of the job's own batch.

        Source:
            Pollux, section 3.1, with the ratio of gradient variance to squared gradient in place of its
            noise scale: ``(noise + 1) / (noise * batch0 / batch + 1)``.
        """
        if self.noise is None:
            return batch / self.batch
        return (self.noise + 1) / (self.noise * self.batch / batch + 1)


@dataclass(frozen=True, slots=True)
class Known(Record):
    """What is known about a job on one GPU: the step, and where it was measured.

    Attributes:
        step: Current estimate.
        at: (nodes, GPUs together) of each measurement; empty: predicted from datasheets.
        is_fitted: True for the job's own reference.
    """

    step: Step
    at: tuple[tuple[int, int], ...] = ()
    is_fitted: bool = False


def known_steps(
    job: Job, gpus: Mapping[str, Gpu], measured: Mapping[str, Sequence[Timing]] | None = None
) -> dict[str, Known]:
    """The job's step on every GPU: measured, the reference, or predicted from the reference by datasheets.

    Args:
        job: The job.
        gpus: Datasheets by canonical name.
        measured: Timings by GPU name; those of one GPU also correct the others, by half of the error.
    """
    before = gpus.get(job.reference_gpu)
    found: dict[str, Known] = {}
    for name, gpu in gpus.items():
        step = job.step if name == job.reference_gpu else None
        if step is None and before is not None:
            step = _moved(job, before, gpu)
        if step is not None:
            found[name] = Known(step, is_fitted=name == job.reference_gpu and job.is_measured)
    wrong = []
    for name, timings in (measured or {}).items():
        if name not in found or not timings:
            continue
        step = found[name].step
        if not found[name].is_fitted:
            wrong += [math.log(t.step_s / step.seconds(t.local_batch, t.gpus, t.nodes)) for t in timings]
        places = tuple(dict.fromkeys((timing.nodes, timing.gpus) for timing in timings))
        found[name] = Known(fit_step(timings, step), places)
    if wrong:
        _correct(found, math.exp(_SHARED_BIAS * sum(wrong) / len(wrong)))
    return found


def _correct(found: dict[str, Known], factor: float) -> None:
    """Apply a fraction of the error that was measured elsewhere to the steps predicted from datasheets."""
    for name, known in found.items():
        if not known.at and not known.is_fitted:
            step = known.step
            longer = replace(
                step,
                fixed_s=step.fixed_s * factor,
                sample_s=step.sample_s * factor,
                local_s=step.local_s * factor,
                local_each_s=step.local_each_s * factor,
                spread_s=step.spread_s * factor,
                spread_each_s=step.spread_each_s * factor,
            )
            found[name] = replace(known, step=longer)


def _moved(job: Job, before: Gpu, after: Gpu) -> Step | None:
    step = moved(
        job.step,
        before=before,
        after=after,
        flops=job.flops,
        moved_bytes=job.moved_bytes,
        precision=job.precision,
    )
    if step is None or before.has_direct_link == after.has_direct_link:
        return step
    gain = _NETWORK_GAIN if after.has_direct_link else 1 / _NETWORK_GAIN
    return replace(step, spread_s=step.spread_s / gain)


@dataclass(frozen=True, slots=True)
class JobModel:
    """Speeds of a job on kinds of machines; called as a search's ``speed_of``.

    Attributes:
        job: The job.
        gpus: Datasheets by canonical name.
        known: Steps by GPU name.
        batch: Units in a step of all GPUs together; None: the best feasible batch.
    """

    job: Job
    gpus: Mapping[str, Gpu]
    known: Mapping[str, Known]
    batch: float | None = None
    _made: dict[tuple[str, int, int, float], Speed | None] = field(default_factory=dict, compare=False)

    def __call__(self, kind: InstanceType, nodes: int) -> Speed | None:
        """Speed on *nodes* of *kind*; None: it has no GPU, an unknown one, or one that is too small."""
        if kind.gpu_name is None or kind.gpus < 1:
            return None
        together = int(kind.gpus) * nodes
        return self.at(kind.gpu_name, together=together, nodes=nodes, vcpus=kind.vcpus * nodes)

    def at(self, gpu: str, *, together: int, nodes: int, vcpus: float) -> Speed | None:
        """Speed on this many GPUs *together* on *nodes* with *vcpus* in total; None as above."""
        key = (gpu, together, nodes, vcpus)
        if key not in self._made:
            self._made[key] = self._speed(*key)
        return self._made[key]

    def _speed(self, gpu: str, together: int, nodes: int, vcpus: float) -> Speed | None:
        known, facts = self.known.get(gpu), self.gpus.get(gpu)
        if known is None or facts is None:
            return None
        rates = [
            self._rate(known.step, local, together, nodes, vcpus)
            for local in self._local_batches(facts, together)
        ]
        if not rates:
            return None
        source: SpeedSource = "fitted" if known.at or known.is_fitted else "datasheet"
        mean = max(rates)
        return Speed(mean, mean * self.spread(known, nodes, together), source)

    def _rate(self, step: Step, local: float, together: int, nodes: int, vcpus: float) -> float:
        """Progress per second, in units at the job's own batch.

        The input is read in parallel with the step, and the slower of the two decides. One vCPU per GPU
        process is reserved where there are more vCPUs than that.
        """
        job, batch = self.job, local * together
        step_s = step.seconds(local, together, nodes) * max(1.0, together / vcpus)
        readers = max(vcpus - together, vcpus / 2)
        step_s = max(step_s, batch * job.input_cpu_s / readers)
        return job.gain(batch) * job.batch / step_s

    def _local_batches(self, gpu: Gpu, together: int) -> list[float]:
        """Local batches that fit into memory and still train; only one when the batch is fixed."""
        job = self.job
        most = min(job.footprint.local_batch(gpu.memory_gb, together), job.max_batch / together)
        fixed = self.batch if self.batch is not None else None
        if fixed is None and job.noise is None:
            fixed = job.batch if job.local_batch is None else None
        if fixed is not None:
            # A batch that does not fit at once is split into several passes (gradient accumulation).
            is_whole = fixed / together >= job.least_local and most >= job.least_local
            return [fixed / together] if is_whole else []
        if job.local_batch is not None:
            return [min(job.local_batch, most)] if most >= job.least_local else []
        least = max(job.least_local, job.batch / together)
        steps = max(0, math.floor(2 * math.log2(most / least))) if most >= least else -1
        return [least * 2 ** (half / 2) for half in range(steps + 1)]

    def spread(self, known: Known, nodes: int, together: int) -> float:
        """Relative standard deviation: grows with the distance from the measured counts."""
        if not known.at:
            return _FITTED_STDEV if known.is_fitted else _MOVED_STDEV
        if (nodes, together) in known.at:
            return 0.03
        away = min(
            abs(math.log2(together / count)) + (many != nodes and max(many, nodes) > 1)
            for many, count in known.at
        )
        return 0.1 + _COUNT_STDEV * away

    def misfit(self, kind: InstanceType, nodes: int) -> Misfit | None:
        """Why the job cannot run there: not enough memory; None when it can, or when that is unknown."""
        if kind.gpu_name is None or kind.gpus < 1 or kind.gpu_memory_gb is None:
            return None
        least = HOST_GIB_EACH * kind.gpus
        if kind.memory_gib < least:
            text = (
                f"has {kind.memory_gib:g} GiB for the processes of {kind.gpus:g} GPUs, which take {least:g}"
            )
            return Misfit("memory", text, 1 - kind.memory_gib / least)
        together = int(kind.gpus) * nodes
        job = self.job
        if job.footprint.local_batch(kind.gpu_memory_gb, together) >= job.least_local:
            return None
        need = (job.footprint.static_bytes(together) + job.footprint.sample_bytes * job.least_local) / GB
        has = USABLE * kind.gpu_memory_gb
        reason = f"{job.name} needs {need:.3g} GB on each of {together} GPUs, {has:.3g} of a {kind.gpu_name}"
        return Misfit("gpu.memory", f"{reason} can be used", max(0.0, 1 - has / need))


def job_model(
    job: Job,
    gpus: Mapping[str, Gpu],
    *,
    measured: Mapping[str, Sequence[Timing]] | None = None,
    batch: float | None = None,
) -> JobModel:
    """Speeds of *job*, from what was *measured* and from datasheets."""
    return JobModel(job, gpus, known_steps(job, gpus, measured), batch)
