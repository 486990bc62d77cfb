"""What a generation measured: for its next attempt, and for the profile of its stage. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from envscaler_agent.protocol import Progress, Status
from envscaler_airflow.planning.knowledge import Knowledge, StepTime, machine_name
from envscaler_airflow.planning.performance import ONE_WINDOW_STDEV, Speed, merged
from envscaler_airflow.planning.profile import MOST_KEYS, Losses, RunProfile, Usage
from envscaler_airflow.planning.record import MOST_VALUE
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.run.outcomes import outcome_of
from envscaler_airflow.run.state import AttemptState, RunState
from envscaler_airflow.scaling import Check

LEAST_S = 1.0
"""Training seconds below which an attempt measures no speed. Chosen: times are reported with a few ms."""


def knowledge_of(attempts: Iterable[AttemptState]) -> Knowledge:
    """Speeds and the work left, in steps, as *attempts* of one generation measured them."""
    attempts = tuple(attempts)
    speeds: dict[str, Speed] = {}
    for attempt in attempts:
        found = merged(speeds.get(attempt.allocation.name), speed_of(attempt))
        if found is not None:
            speeds[attempt.allocation.name] = found
    units = steps_left(attempts)
    source = "measured in this run"
    sources = {
        part: source for part, known in (("work", units is not None), ("speed", bool(speeds))) if known
    }
    return Knowledge(units, "steps", speeds, sources=sources)


def speed_of(attempt: AttemptState) -> Speed | None:
    """Steps per second after the first step, without saves; None if the attempt did not measure it.

    An attempt that was changed in place has no speed of its own: its steps are of several allocations.
    """
    end, trained = attempt.end, trained_s(attempt)
    if attempt.earlier or trained is None or end.start_step is None or end.step is None:
        return None
    steps = end.step - end.start_step - 1 + (end.repeated_steps or 0)
    if steps < 1 or trained < LEAST_S:
        return None
    mean = steps / trained
    return Speed(mean, ONE_WINDOW_STDEV * mean, "measured", trained)


def trained_s(attempt: AttemptState) -> float | None:
    """Seconds of training after the first step, without saves; None if it was not reported."""
    end = attempt.end
    if end.elapsed_s is None or end.first_step_s is None:
        return None
    if end.save_s is None and attempt.checkpoint_step is not None:
        return None  # it saved, and no process reported for how long
    return end.elapsed_s - end.first_step_s - (end.save_s or 0.0) + (end.earlier_pods_s or 0.0)


def steps_left(attempts: Iterable[AttemptState]) -> float | None:
    """Steps after the newest checkpoint; None if the training did not report how many there are."""
    total, kept = None, 0
    for attempt in attempts:
        total = attempt.end.total_steps or total
        kept = max(kept, attempt.checkpoint_step or 0)
    return None if total is None else float(max(0, total - kept))


def start_parts_s(attempt: AttemptState) -> dict[str, float]:
    """Seconds of its start by part: ``create`` of the machines, ``setup``, ``restore``, ``first_step``."""
    end, started = attempt.end, attempt.started_at
    parts = {
        "create": None if started is None else max(0.0, started - attempt.intended_at),
        "setup": end.setup_s,
        "restore": end.restore_s,
        "first_step": end.first_step_s,
    }
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def start_s(attempts: Iterable[AttemptState]) -> float | None:
    """Median seconds from the intent to the first step; None if no attempt reported it."""
    found = [parts for attempt in attempts if "first_step" in (parts := start_parts_s(attempt))]
    sums = [sum(seconds for name, seconds in parts.items() if name != "restore") for parts in found]
    return statistics.median(sums) if sums else None


def profile_of(
    state: RunState,
    statuses: Iterable[tuple[AttemptState, Sequence[Status]]],
    *,
    run: str,
    checks: Iterable[Check] = (),
    samples: Mapping[str, Sequence[float]] | None = None,
) -> RunProfile | None:
    """What the current generation measured; None if no attempt of it ran.

    Args:
        state: Fold of the run's events; the generation is over.
        statuses: The last status of every node, by attempt.
        run: The run's folder.
        checks: The sensor's recorded checks of this generation, oldest first.
        samples: Values of each metric over time, for percentiles.
    """
    attempts = [one for one in state.attempts_of(state.generation) if one.started_at is not None]
    ended = [one.ended_at for one in attempts if one.ended_at is not None]
    if not attempts or not ended:
        return None
    statuses, checks = tuple(statuses), tuple(checks)
    unit, units, speeds = _work(state, attempts, checks)
    last = attempts[-1]
    return RunProfile(
        run=run,
        generation=state.generation,
        at=max(ended),
        status=state.status,
        unit=unit,
        units=units,
        speeds=_first_keys(speeds),
        steps=_first_keys(_steps(statuses)),
        noise=_noise(statuses, checks),
        usage=_first_keys(_usage(statuses, samples or {})),
        memory_bytes=last.memory_bytes or int(min(p.offer.memory_gib for p in last.allocation.parts) * GIB),
        vcpus=last.vcpus or min(part.offer.vcpus for part in last.allocation.parts),
        out_of_memory_bytes=_out_of_memory(attempts),
        start_s=_parts(attempts),
        checkpoint_s=_median(save_s_of(one.end) for one in attempts),
        losses=_first_keys(losses_of(attempts)),
    )


GIB = 1 << 30
_Kept = TypeVar("_Kept")


def _first_keys(found: Mapping[str, _Kept]) -> dict[str, _Kept]:
    return dict(sorted(found.items())[:MOST_KEYS])


def _work(
    state: RunState, attempts: Sequence[AttemptState], checks: Sequence[Check]
) -> tuple[str, float | None, dict[str, Speed]]:
    """Unit, whole work, and speeds by machine; a stage that reports no steps is one unit of work itself."""
    known = knowledge_of(attempts)
    speeds = {machine_name(one.allocation): known.speeds.get(one.allocation.name) for one in attempts}
    found = {name: speed for name, speed in speeds.items() if speed is not None}
    total = next((float(one.end.total_steps) for one in reversed(attempts) if one.end.total_steps), None)
    if state.status == "succeeded" and total is not None and attempts[-1].step:
        total = float(attempts[-1].step)  # it may have announced more
    for seen in checks:  # measured by the sensor for longer, and apart for each change in place
        observed = seen.observation
        places = {one.name: one for one in (observed.current, *observed.candidates)}
        for name, speed in observed.speeds.items() if observed.unit == "steps" else ():
            if speed.source == "measured" and name in places and speed.seconds > 0:
                found[machine_name(places[name])] = speed
    if found or total is not None:
        return "steps", total, found
    [only, *others] = attempts
    if state.status != "succeeded" or others or only.ended_at is None or only.started_at is None:
        return "steps", None, {}
    ran_s = only.ended_at - only.started_at - (only.end.setup_s or 0.0)
    if ran_s < LEAST_S or only.earlier:
        return "stages", 1.0, {}
    mean = 1 / ran_s
    speed = Speed(mean, ONE_WINDOW_STDEV * mean, "measured", ran_s)
    return "stages", 1.0, {machine_name(only.allocation): speed}


def _steps(statuses: Iterable[tuple[AttemptState, Sequence[Status]]]) -> dict[str, StepTime]:
    found = {}
    for attempt, reported in statuses:
        step = step_of(reported[0].progress) if reported and not attempt.earlier else None
        if step is not None:
            found[machine_name(attempt.allocation)] = step
    return found


def step_of(progress: Progress) -> StepTime | None:
    """A step as the training measures it; None if it does not report its batch and time.

    Unreported synchronization counts as zero. What several GPUs take longer than one is learned from the
    measured steps.
    """
    if not progress.batch or not progress.step_time_s:
        return None
    sync_s = min(progress.sync_time_s or 0.0, progress.step_time_s)
    passes = max(1, progress.micro_batches or 1)
    return StepTime(progress.batch, progress.step_time_s, sync_s, progress.noise_scale, passes)


def _noise(
    statuses: Iterable[tuple[AttemptState, Sequence[Status]]], checks: Iterable[Check]
) -> tuple[tuple[float, float], ...]:
    """Gradient noise by the part of the work done, the newest value of each hundredth."""
    points: dict[int, float] = {}
    for seen in checks:
        observed = seen.observation
        step = observed.measured.get(observed.current.name)
        if step is not None and step.noise_scale is not None and observed.units_total:
            points[_hundredth((observed.units_done or 0.0) / observed.units_total)] = step.noise_scale
    for _, reported in statuses:
        progress = reported[0].progress if reported else None
        if progress is not None and progress.noise_scale is not None and progress.total_steps:
            points[_hundredth((progress.step or 0) / progress.total_steps)] = progress.noise_scale
    every = max(1, math.ceil(len(points) / MOST_KEYS))
    return tuple((part / 100, noise) for part, noise in sorted(points.items()))[::every]


def _hundredth(part: float) -> int:
    return min(100, max(0, int(100 * part)))


def _usage(
    statuses: Iterable[tuple[AttemptState, Sequence[Status]]], samples: Mapping[str, Sequence[float]]
) -> dict[str, Usage]:
    """Each metric over time and over nodes; where only the last statuses carry it, these alone."""
    values: dict[str, list[float]] = {name: list(found) for name, found in samples.items()}
    for _, reported in statuses:
        for status in reported:
            for name, value in status.usage.items():
                metric = profiled_metric(name)
                if metric is not None and value is not None and 0 <= value <= MOST_VALUE:
                    values.setdefault(metric, []).append(value)
    found = {}
    for name, all_values in values.items():
        ordered = sorted(all_values)
        if ordered:
            p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
            found[name] = Usage(statistics.median(ordered), p95, ordered[-1])
    return found


_PROFILED = re.compile(
    r"cpu_percent|memory_(bytes|rss_bytes|peak_bytes)|shm_\w*bytes|gpu_(memory_used_bytes|\w+_percent)"
)
"""Metrics that a profile keeps: what sizes and types of machines depend on."""


def profiled_metric(name: str) -> str | None:
    """Name of a metric in a profile, ``gpu_utilization_percent`` for any GPU; None if it is not kept."""
    metric = re.sub(r"\Agpu\d+_", "gpu_", name)
    return metric if _PROFILED.fullmatch(metric) else None


def _out_of_memory(attempts: Iterable[AttemptState]) -> int | None:
    """Memory of a node with which an attempt ran out of memory, the largest; None if none did."""
    full = [one for one in attempts if outcome_of(one.outcome).recovery == "more-memory"]
    least = [
        one.memory_bytes or int(min(p.offer.memory_gib for p in one.allocation.parts) * GIB) for one in full
    ]
    return max(least, default=None)


def _parts(attempts: Iterable[AttemptState]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, seconds in start_parts_s(attempt).items():
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def save_s_of(end: AttemptEnded) -> float | None:
    """Seconds of training lost to one checkpoint, as an ended attempt reported; None if it did not.

    If only the time of the last checkpoint is known, that time, including its upload.
    """
    return end.save_s / end.checkpoints if end.save_s is not None and end.checkpoints else end.checkpoint_s


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def losses_of(attempts: Iterable[AttemptState]) -> dict[str, Losses]:
    """Node-hours on spot and losses, by offer name."""
    found: dict[str, Losses] = {}
    for attempt in attempts:
        if attempt.started_at is None or attempt.ended_at is None:
            continue
        hours = max(0.0, attempt.ended_at - attempt.started_at) / 3600.0
        spot = [part for part in attempt.allocation.parts if part.offer.capacity_type == "spot"]
        is_lost = outcome_of(attempt.outcome).is_disruption
        for part in spot:
            before = found.get(part.offer.name, Losses(0.0, 0.0))
            found[part.offer.name] = Losses(before.hours + hours * part.nodes, before.losses + is_lost)
    return found
