"""What the ended attempts of a generation measured: speeds, the work left, start-up. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from envscaler_airflow.planning.knowledge import Knowledge
from envscaler_airflow.planning.performance import ONE_WINDOW_STDEV, Speed, merged
from envscaler_airflow.run.state import AttemptState

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
