"""CPU and memory that the next run of a stage should request, from what its runs used. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from envscaler_airflow.planning.profile import StageProfile, runs_text
from envscaler_airflow.planning.record import NotNegative, Record

MARGIN = 0.1
"""Memory above the largest peak. Chosen: a peak between two samples is rarely higher by more."""
MARGIN_OF_RUN = 0.3
"""More memory above it, divided by the number of runs. Chosen: after three runs the request is within a fifth
of the need."""
MARGIN_OF_CHANGE = 0.25
"""More memory if code or image have changed since. Chosen."""
OUT_OF_MEMORY_FACTOR = 1.5
"""Memory above one that was too little. Source: ``failure.oom_memory_factor``."""
CPU_MARGIN = 0.1
"""CPUs above the 95th percentile. Chosen: too few slow a stage down, and end nothing."""
MEMORY_STEP, CPU_STEP = 64 << 20, 0.25
"""Requests are multiples of these: bytes, and CPUs. Chosen."""
MEMORY_METRICS = ("memory_bytes", "memory_rss_bytes")
"""What counts as used, the best first: without the pages that the kernel can drop."""


@dataclass(frozen=True, slots=True)
class Sizing(Record):
    """What a node of the next run should request; None: nothing was measured.

    Attributes:
        memory_bytes, vcpus: The request.
        reasons: Why, one sentence each.
    """

    memory_bytes: NotNegative[int] | None = None
    vcpus: NotNegative[float] | None = None
    reasons: tuple[str, ...] = ()


def recommended(
    profile: StageProfile,
    *,
    image: str = "",
    least_memory_bytes: int | None = None,
    most_memory_bytes: int | None = None,
    most_vcpus: float | None = None,
) -> Sizing:
    """Sizes from *profile*, within the author's bounds.

    Memory is the peak of the runs with a margin: larger after few runs, and after a change of code or image.
    As long as a run that ran out of memory is among the newest, it is never less than what was too little
    then, with a factor, nor less than *least_memory_bytes*.

    Args:
        profile: What the runs used.
        image: Base image of the next run.
        least_memory_bytes: What the stage requests now.
        most_memory_bytes: Limit of the spec; None: none.
        most_vcpus: Limit of the spec; None: none.
    """
    memory, memory_why = _memory(profile, image, least_memory_bytes)
    if memory is not None:
        memory = MEMORY_STEP * max(1, math.ceil(memory / MEMORY_STEP))
        memory = memory if most_memory_bytes is None else min(memory, most_memory_bytes)
    used = profile.usage.get("cpu_percent")
    vcpus, cpu_why = None, []
    if used is not None:
        vcpus = max(CPU_STEP, CPU_STEP * math.ceil((1 + CPU_MARGIN) * used.p95 / 100 / CPU_STEP))
        vcpus = vcpus if most_vcpus is None else min(vcpus, most_vcpus)
        cpu_why = [f"95 % of the time at most {used.p95 / 100:.2f} CPUs were busy"]
    return Sizing(memory, vcpus, (*memory_why, *cpu_why))


def _memory(profile: StageProfile, image: str, least_bytes: int | None) -> tuple[float | None, list[str]]:
    used = next((profile.usage[name] for name in MEMORY_METRICS if name in profile.usage), None)
    need, why = None, []
    if used is not None:
        margin = MARGIN + MARGIN_OF_RUN / max(1, profile.runs)
        why.append(f"memory peaked at {used.peak / 2**30:.2f} GiB in {runs_text(profile.runs)}")
        if not profile.same or (profile.image and image != profile.image):
            margin += MARGIN_OF_CHANGE
            why.append("code or image have changed since")
        need = used.peak * (1 + margin)
    if profile.out_of_memory_bytes is not None:
        too_little = profile.out_of_memory_bytes
        need = max(need or 0.0, OUT_OF_MEMORY_FACTOR * too_little, least_bytes or 0)
        why.append(f"{too_little / 2**30:.2f} GiB were too little in one of the newest runs")
    return need, why
