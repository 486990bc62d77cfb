"""What earlier runs of a stage measured, and its robust merge: knowledge for the next run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envscaler_airflow.planning.knowledge import Knowledge, StepTime
from envscaler_airflow.planning.performance import Speed
from envscaler_airflow.planning.record import MOST_VALUE, NotNegative, Positive, Record

MOST_RUNS = 20
"""Newest runs of a stage that count. Chosen: three weeks of a daily stage, and one read of 20 small files."""
MOST_KEYS = 64
"""Most machines, metrics or points kept of a run. Chosen: more than a run uses."""
PRIOR_STDEV = 0.1
"""Relative difference between two runs of a stage before it was measured. Chosen: daily data differ by that;
it has the weight of one run."""
CHANGED_STDEV = 0.3
"""Relative uncertainty added if what runs has changed since. Chosen: new code is rarely twice as fast."""
OUTLIER = 3.0
"""A deviation above this many times the usual one counts as this many. Source: Huber's rule; the usual one is
1.4826 times the median deviation."""
MOST_SPREAD = 1.0
"""Largest relative difference that few runs claim. Chosen: half or twice is as good as unknown."""
LEAST_DEVIATION = 0.02
"""Usual relative deviation below which differences are noise. Chosen: times of short runs vary by that."""


@dataclass(frozen=True, slots=True)
class Losses(Record):
    """Losses of spot nodes of one offer.

    Attributes:
        hours: Node-hours on the offer.
        losses: Nodes lost.
    """

    hours: NotNegative[float]
    losses: NotNegative[float]


@dataclass(frozen=True, slots=True)
class Usage(Record):
    """One metric of a run's nodes: median, 95th percentile and peak of what was reported."""

    median: NotNegative[float]
    p95: NotNegative[float]
    peak: NotNegative[float]


@dataclass(frozen=True, slots=True)
class Forecast(Record):
    """Time and cost that the plan of the first attempt expected, 10th and 90th percentile, and the actual."""

    hours_low: NotNegative[float]
    hours: NotNegative[float]
    hours_high: NotNegative[float]
    actual_hours: NotNegative[float]
    usd: NotNegative[float] | None = None
    actual_usd: NotNegative[float] | None = None

    @property
    def is_inside(self) -> bool:
        """True when the actual time was within the range."""
        return self.hours_low <= self.actual_hours <= self.hours_high


@dataclass(frozen=True, slots=True)
class RunProfile(Record):
    """What one generation of a run measured.

    Attributes:
        run: The run's folder.
        generation: Which generation of it.
        at: When it ended, seconds since the epoch on the run's clock.
        status: ``succeeded``, ``failed`` or ``stopped``.
        code: Hash of what runs: command, packages, image, workdir; not its data.
        image: Base image; "" for none.
        data_gib: Size of its volumes, as far as the spec states it.
        unit, units: The whole work; None when unknown.
        speeds: By machine name, in *unit* per second.
        steps: Steps by machine name.
        noise: Gradient noise by the part of the work done, 0 to 1.
        usage: By metric, as in ``Status.usage``; of GPUs without their number.
        memory_bytes, vcpus: What a node of its last attempt had.
        out_of_memory_bytes: Memory of a node with which an attempt ran out of memory.
        start_s: Seconds of a start by part: ``create``, ``setup``, ``restore``, ``first_step``.
        checkpoint_s, checkpoint_bytes: Of one checkpoint.
        losses: By offer name.
        forecast: What its first plan expected; None if that plan knew no speed.
    """

    run: str
    generation: int
    at: NotNegative[float]
    status: str
    code: str = ""
    image: str = ""
    data_gib: NotNegative[float] | None = None
    unit: str = "steps"
    units: NotNegative[float] | None = None
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    noise: tuple[tuple[float, float], ...] = ()
    usage: Mapping[str, Usage] = field(default_factory=dict)
    memory_bytes: NotNegative[int] | None = None
    vcpus: NotNegative[float] | None = None
    out_of_memory_bytes: NotNegative[int] | None = None
    start_s: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    checkpoint_s: NotNegative[float] | None = None
    checkpoint_bytes: NotNegative[int] | None = None
    losses: Mapping[str, Losses] = field(default_factory=dict)
    forecast: Forecast | None = None

    def __post_init__(self) -> None:
        """Reject numbers that no run measures, and more entries than one run has."""
        Record.__post_init__(self)
        for points in self.noise:
            if not all(0 <= value < math.inf for value in points) or points[0] > 1:
                raise ValueError(f"noise must be parts of 0 to 1 with values >= 0, got {points!r}")
        for value in _numbers(self.to_dict()):
            if value and not 1 / MOST_VALUE <= value <= MOST_VALUE:
                raise ValueError(f"got {value!r:.20}, expected 0 or {1 / MOST_VALUE:g} to {MOST_VALUE:g}")
        for name in ("speeds", "steps", "noise", "usage", "start_s", "losses"):
            if len(getattr(self, name)) > MOST_KEYS:
                raise ValueError(f"{name} must have at most {MOST_KEYS} entries")


def _numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON document."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


@dataclass(frozen=True, slots=True)
class Figure(Record):
    """A number of the next run.

    Attributes:
        value: Median over the runs.
        spread: Relative standard deviation of the next run's value.
        runs: Number of runs that measured it.
    """

    value: NotNegative[float]
    spread: NotNegative[float]
    runs: Positive[int]


@dataclass(frozen=True, slots=True)
class StageProfile(Record):
    """The merge of a stage's newest runs.

    Attributes:
        runs: Number of runs.
        same: Those that ran the same code; if there are any, speeds and work are theirs alone.
        unit, units: The whole work.
        speeds: By machine name.
        steps: The newest of each machine.
        noise: Gradient noise by tenth of the work done: medians.
        usage: By metric.
        start_s: Whole start, and its parts by name.
        checkpoint_s, checkpoint_bytes: Of one checkpoint.
        losses: By offer name, of all runs.
        out_of_memory_bytes: Largest memory that was too little in any of these runs; None: it was enough.
        image: Of the newest run.
        forecast_error: Actual over expected time of the forecasts.
        inside: Share of the actual times within the forecast's 80 % range; None without forecasts.
        first_at, last_at: End of the oldest and newest run.
    """

    runs: int = 0
    same: int = 0
    unit: str = "steps"
    units: Figure | None = None
    speeds: Mapping[str, Figure] = field(default_factory=dict)
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    noise: tuple[tuple[float, float], ...] = ()
    usage: Mapping[str, Usage] = field(default_factory=dict)
    start_s: Mapping[str, Figure] = field(default_factory=dict)
    checkpoint_s: Figure | None = None
    checkpoint_bytes: Figure | None = None
    losses: Mapping[str, Losses] = field(default_factory=dict)
    out_of_memory_bytes: int | None = None
    image: str = ""
    forecast_error: Figure | None = None
    inside: float | None = None
    first_at: float | None = None
    last_at: float | None = None

    @property
    def source(self) -> str:
        """``measured in 7 runs``, for a plan."""
        text = f"measured in {runs_text(self.same or self.runs)}"
        return text if self.same else f"{text} of other code"

    def knowledge(self) -> Knowledge:
        """Work and speeds for the next plan."""
        speeds = {
            name: Speed(found.value, found.value * found.spread, "learned")
            for name, found in self.speeds.items()
        }
        sources = {"work": self.source} if self.units is not None else {}
        sources |= {"speed": self.source} if speeds else {}
        units = None if self.units is None else self.units.value
        is_guess = not self.same
        return Knowledge(units, self.unit, speeds, sources=sources, steps=self.steps, is_guess=is_guess)


def runs_text(count: int) -> str:
    """``7 runs``."""
    return f"{count} run{'' if count == 1 else 's'}"


def merge(runs: Iterable[RunProfile], *, code: str = "") -> StageProfile:
    """Merge the newest :data:`MOST_RUNS` of *runs*, in any order, for a next run of *code*.

    Medians: of three runs or more, one with absurd numbers moves nothing beyond the others' values.
    """
    newest = sorted(runs, key=lambda run: (run.at, run.run, run.generation))[-MOST_RUNS:]
    if not newest:
        return StageProfile()
    same = [run for run in newest if run.code == code]
    told = same or newest
    unit = statistics.mode(run.unit for run in told)
    alike = [run for run in told if run.unit == unit]
    forecasts = [run.forecast for run in newest if run.forecast is not None]
    errors = [one.actual_hours / one.hours for one in forecasts if one.hours > 0]
    wider = 0.0 if same else CHANGED_STDEV
    return StageProfile(
        runs=len(newest),
        same=len(same),
        unit=unit,
        units=_figure([run.units for run in alike], wider),
        speeds=_figures([{name: one.mean for name, one in run.speeds.items()} for run in alike], wider),
        steps={name: step for run in alike for name, step in run.steps.items()},
        noise=_noise(told),
        usage=_usage([run.usage for run in newest]),
        start_s=_figures([_start(run) for run in newest], 0.0),
        checkpoint_s=_figure([run.checkpoint_s for run in newest], 0.0),
        checkpoint_bytes=_figure([run.checkpoint_bytes for run in newest], 0.0),
        losses=_losses(newest),
        out_of_memory_bytes=_too_little(newest),
        image=newest[-1].image,
        forecast_error=_figure(errors, 0.0),
        inside=statistics.mean(one.is_inside for one in forecasts) if forecasts else None,
        first_at=newest[0].at,
        last_at=newest[-1].at,
    )


def _start(run: RunProfile) -> dict[str, float]:
    """The parts of a start, and ``whole``; a restore is part of the set-up."""
    parts = dict(run.start_s)
    if "first_step" in parts:
        parts["whole"] = sum(seconds for name, seconds in parts.items() if name != "restore")
    return parts


def _figures(found: Sequence[Mapping[str, float]], wider: float) -> dict[str, Figure]:
    names = dict.fromkeys(name for values in found for name in values)
    figures = ((name, _figure([values.get(name) for values in found], wider)) for name in sorted(names))
    return {name: figure for name, figure in figures if figure is not None}


def _figure(values: Iterable[float | None], wider: float) -> Figure | None:
    """The median of the known values, and how far the next one may be from it.

    The variance between runs begins at that of :data:`PRIOR_STDEV` with the weight of a run; deviations count
    up to :data:`OUTLIER` times the usual one.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    middle = statistics.median(known)
    if middle <= 0:
        return Figure(0.0, 0.0, len(known))
    deviations = [abs(math.log(max(value, 1e-12) / middle)) for value in known]
    usual = max(LEAST_DEVIATION, 1.4826 * statistics.median(deviations))
    squares = sum(min(one, OUTLIER * usual) ** 2 for one in deviations)
    variance = (PRIOR_STDEV**2 + squares) / max(1, len(known) - 1)
    spread = min(MOST_SPREAD, math.sqrt(variance * (1 + 1 / len(known))))
    return Figure(middle, math.hypot(spread, wider), len(known))


def _noise(runs: Sequence[RunProfile]) -> tuple[tuple[float, float], ...]:
    by_tenth: dict[float, list[float]] = {}
    for run in runs:
        for part, noise in run.noise:
            by_tenth.setdefault(min(9, int(part * 10)) / 10, []).append(noise)
    return tuple((part, statistics.median(found)) for part, found in sorted(by_tenth.items()))


def _usage(runs: Sequence[Mapping[str, Usage]]) -> dict[str, Usage]:
    """Median and percentile: medians over the runs. Peak: the largest one below an outlier."""
    merged = {}
    for name in sorted(dict.fromkeys(name for run in runs for name in run)):
        found = [run[name] for run in runs if name in run]
        peaks = [one.peak for one in found]
        middle = statistics.median(peaks)
        peak = max((one for one in peaks if one <= OUTLIER * middle), default=middle)
        merged[name] = Usage(
            statistics.median(one.median for one in found), statistics.median(one.p95 for one in found), peak
        )
    return merged


def _losses(runs: Sequence[RunProfile]) -> dict[str, Losses]:
    """Sums over the runs; one of them counts for at most :data:`OUTLIER` usual ones."""
    found = {}
    for name in sorted(dict.fromkeys(name for run in runs for name in run.losses)):
        each = [run.losses[name] for run in runs if name in run.losses]
        most_h = OUTLIER * statistics.median(one.hours for one in each)
        most = OUTLIER * (1 + statistics.median(one.losses for one in each))
        hours = sum(min(one.hours, most_h) for one in each)
        found[name] = Losses(hours, sum(min(one.losses, most) for one in each))
    return found


def _too_little(runs: Sequence[RunProfile]) -> int | None:
    return max((run.out_of_memory_bytes for run in runs if run.out_of_memory_bytes is not None), default=None)
