"""How a stage runs: checkpoints, scaling, failures, and metrics in its output."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from envscaler_agent.protocol import LOG_PATTERN_FIELDS
from envscaler_airflow.envspec.fields import (
    AbsolutePath,
    Count,
    Duration,
    Fraction,
    GpuMemory,
    Line,
    Memory,
    MetricName,
    NotNegative,
    PolicyName,
    Positive,
    fault,
)
from envscaler_airflow.envspec.quantities import duration_s, gpu_memory_gb, memory_bytes
from envscaler_airflow.envspec.resources import Model

TARGET_ABOVE = 10.0
"""``target: {gpu_utilization: 70}`` scales out above 80. Chosen: samples of a
busy GPU differ by less."""
TARGET_BELOW = 20.0
"""And in below 50. Chosen: the work of two nodes at 50 fills one, and some room."""


def _counted(value: str, units: tuple[str, ...], problem: str) -> dict[str, float]:
    """``3 samples`` as ``{"samples": 3}``, ``5m`` as ``{"seconds": 300}``."""
    number, _, unit = value.strip().partition(" ")
    unit = unit.strip().removesuffix("s")
    if unit in units and number.isascii() and number.isdigit() and len(number) <= 6:
        return {f"{unit}s": int(number)}
    try:
        return {"seconds": duration_s(value)}
    except ValueError:
        raise fault(f"{value!r:.60} {problem}") from None


class Every(Model):
    """One of a time, a number of steps or a number of epochs: ``10m``, ``100 steps``, ``1 epoch``."""

    seconds: Positive | None = None
    steps: Count | None = None
    epochs: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _counted(
                value, ("step", "epoch"), 'is not an interval; write "10m", "100 steps" or "1 epoch"'
            )
        if isinstance(value, dict | Every):
            return value
        raise fault(f'{value!r:.60} has no unit; write "10m", "100 steps" or "1 epoch"')

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(part is not None for part in (self.seconds, self.steps, self.epochs)) != 1:
            raise fault(
                'needs exactly one of seconds, steps and epochs; write "10m", "100 steps" or "1 epoch"'
            )
        return self


class Checkpoint(Model):
    """Where checkpoints are saved, how often, and when a move may happen.

    A move waits for the next step or the end of the epoch, at most ``align_timeout``. The last ``keep``
    checkpoints stay.
    """

    path: AbsolutePath | None = None
    every: Every = Every(seconds=600)
    align: Literal["now", "step", "epoch"] = "step"
    align_timeout: Duration = "1h"
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3

    @property
    def align_timeout_s(self) -> float:
        """Longest wait for the alignment, seconds."""
        return duration_s(self.align_timeout)


class Hold(Model):
    """How long a rule must hold: ``3 samples`` or ``5m``."""

    samples: Count | None = None
    seconds: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"samples": value}
        if isinstance(value, str):
            return _counted(value, ("sample",), 'is not a time to hold; write "3 samples" or "5m"')
        if isinstance(value, dict | Hold):
            return value
        raise fault(f'{value!r:.60} is not a time to hold; write "3 samples" or "5m"')

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.samples is None) == (self.seconds is None):
            raise fault('needs exactly one of samples and seconds; write "3 samples" or "5m"')
        return self


class MetricRule(Model):
    """Change by ``step`` nodes when ``metric`` is above or below a bound for a while.

    ``step`` defaults to 1 above and -1 below. ``across`` aggregates over nodes. With ``ahead``, a linear
    forecast through the last checks must also be past the bound that much later. With ``prometheus``, the
    metric is the result of that query, under the name ``metric``.
    """

    metric: MetricName
    prometheus: Line | None = None
    across: Literal["mean", "max", "min", "p50", "p90", "p95", "p99"] = "mean"
    ahead: Duration | None = None
    above: Annotated[float, Field(strict=True, ge=-1e12, le=1e12)] | None = None
    below: Annotated[float, Field(strict=True, ge=-1e12, le=1e12)] | None = None
    hold: Annotated[Hold, Field(alias="for")] = Hold(samples=3)
    step: Annotated[int, Field(strict=True, ge=-1000, le=1000)] | None = None

    @property
    def ahead_s(self) -> float:
        """How far ahead the metric is forecast, seconds."""
        return 0.0 if self.ahead is None else duration_s(self.ahead)

    @property
    def change(self) -> int:
        """Nodes to add; negative removes."""
        return self.step if self.step is not None else 1 if self.above is not None else -1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise fault("needs exactly one of above and below; write above: 80")
        if self.step == 0:
            raise fault("0 changes nothing; write 1 or -1", at="step")
        return self


class Speedup(Model):
    """A stated speed of one offer relative to another, until it is measured.

    ``mean`` is the ratio of speeds, ``stdev`` its standard deviation, ``source`` where the figure comes from.
    """

    offer: Line
    relative_to: Line
    mean: Positive
    stdev: NotNegative
    source: Line


class PhaseGpu(Model):
    """GPUs that a phase needs: the minimum nominal memory of one."""

    memory: GpuMemory

    @property
    def memory_gb(self) -> float:
        """Nominal memory, GB."""
        return gpu_memory_gb(self.memory)


class PhaseResources(Model):
    """The needs of one phase of a training; absent fields do not change anything."""

    nodes: Count | None = None
    gpu: PhaseGpu | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nodes is None and self.gpu is None:
            raise fault("needs nodes or gpu; write nodes: 4 or gpu: {memory: 80Gi}")
        return self


class Scaling(Model):
    """The bounds, the policy and the pace of moving a running stage."""

    min_nodes: Count | None = None
    max_nodes: Count | None = None
    policy: PolicyName = "cost-to-finish"
    cooldown: Duration | None = None
    stabilization: Duration | None = None
    tolerance: Fraction | None = None
    warmup: Duration = "30s"
    min_speed: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    min_epochs_between: Annotated[int, Field(strict=True, ge=0, le=100_000)] | None = None
    max_moves: Annotated[int, Field(strict=True, ge=0, le=100_000)] | None = None
    recommend_only: Annotated[bool, Field(strict=True)] = False
    rules: Annotated[tuple[MetricRule, ...], Field(max_length=64)] = ()
    match: Literal["any", "all"] = "any"
    target: dict[MetricName, Annotated[float, Field(strict=True, gt=0, le=1e12)]] = Field(default={})
    speedup: Annotated[tuple[Speedup, ...], Field(max_length=256)] = ()
    phases: Annotated[dict[PolicyName, PhaseResources], Field(max_length=64)] = Field(default={})

    @property
    def cooldown_s(self) -> float | None:
        """Least seconds between two moves; None: the policy decides."""
        return None if self.cooldown is None else duration_s(self.cooldown)

    @property
    def warmup_s(self) -> float:
        """Seconds that a speed must have been measured before it counts."""
        return duration_s(self.warmup)

    @property
    def stabilization_s(self) -> float | None:
        """Seconds that a better machine must stay better before a move; None: the policy decides."""
        return None if self.stabilization is None else duration_s(self.stabilization)

    @property
    def all_rules(self) -> tuple[MetricRule, ...]:
        """``rules``, and those that ``target`` is short for: out above target + 10, in below target - 20."""
        made: list[MetricRule] = []
        for metric, value in self.target.items():
            made.append(MetricRule(metric=metric, above=value + TARGET_ABOVE))
            made.append(MetricRule(metric=metric, below=max(0.0, value - TARGET_BELOW)))
        return (*self.rules, *made)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise fault(
                f"{self.max_nodes} is below min_nodes {self.min_nodes}; write at least that", at="max_nodes"
            )
        if self.policy == "threshold" and not self.all_rules:
            fix = "rules: [{metric: gpu_utilization, above: 80}] or target: {gpu_utilization: 70}"
            raise fault(f"threshold has no rules; write {fix}", at="policy")
        if self.policy == "phase" and not self.phases:
            raise fault("phase has no phases; write phases: {loading: {nodes: 4}}", at="policy")
        return self


class Stall(Model):
    """A stage is stalled after ``factor`` times the usual step time, and at least ``min``, without a step."""

    factor: Annotated[float, Field(strict=True, ge=2, le=10_000)] = 10.0
    min: Duration = "5m"

    @property
    def min_s(self) -> float:
        """Least seconds without a step."""
        return duration_s(self.min)


class Failure(Model):
    """What happens after an attempt fails.

    After out-of-memory the next attempt requests ``oom_memory_factor`` times the memory, up to
    ``oom_memory_cap``. The run fails after ``max_fruitless_attempts`` in a row without a newer checkpoint.
    An attempt ends itself if its owner has not renewed the lease for ``orphan_after``.
    """

    oom_memory_factor: Annotated[float, Field(strict=True, ge=1, le=16)] = 1.5
    oom_memory_cap: Memory | None = None
    max_fruitless_attempts: Annotated[int, Field(strict=True, ge=1, le=1000)] = 5
    orphan_after: Duration = "30m"

    @property
    def oom_memory_cap_bytes(self) -> int | None:
        """Bytes; None is the largest offer."""
        return None if self.oom_memory_cap is None else memory_bytes(self.oom_memory_cap)

    @property
    def orphan_after_s(self) -> float:
        """Seconds without a sign of the owner."""
        return duration_s(self.orphan_after)

    @field_validator("orphan_after")
    @classmethod
    def _check_orphan_after(cls, value: str) -> str:
        if duration_s(value) < 60:
            raise ValueError(f"{value} is shorter than the lease's own interval of 60 s; write at least 2m")
        return value


def _pattern(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as err:
        raise ValueError(
            f"{text!r:.80} is not a regular expression: {err}; write one such as 'step (\\d+)'"
        ) from err
    if compiled.groups < 1:
        raise ValueError(f"{text!r:.80} has no group for the value; write one such as 'step (\\d+)'")
    if compiled.groups > 1:
        raise ValueError(
            f"{text!r:.80} has {compiled.groups} groups; keep one for the value, others as (?:...)"
        )
    return text


def _reported(name: Any) -> Any:
    if name not in LOG_PATTERN_FIELDS:
        known = ", ".join(LOG_PATTERN_FIELDS)
        raise ValueError(f"{name!r:.60} cannot be read from output; write one of {known}")
    return name


Pattern = Annotated[str, Field(max_length=500, examples=[r"step (\d+)"]), BeforeValidator(_pattern)]


class Metrics(Model):
    """Regular expressions that read step, loss and epoch from the output of code without ``Session``."""

    log_patterns: dict[Annotated[str, BeforeValidator(_reported)], Pattern] = Field(default={})
