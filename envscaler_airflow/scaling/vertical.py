"""Set the CPU and memory of a node by its usage; never its GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling.decision import Policy, Proposal, ScalingPolicy, Want
from envscaler_airflow.scaling.observation import Metric, Observation
from envscaler_airflow.scaling.outlook import outlook

HIGH, LOW = 85.0, 40.0
"""Usage in percent: above the first the node has too little, below the second too much. Chosen."""
WINDOW_S, LONG_WINDOW_S = 300.0, 1200.0
"""Seconds that the need for more, or less, must persist. Chosen: a decrease takes four times as long."""
HEADROOM = 1.3
"""Margin of the request over the peak. Chosen: activation checkpointing makes memory vary."""
LEAD_S = 600.0
"""An out-of-memory forecast sooner than a move plus this time triggers a move. Chosen: ten minutes."""
LOOKS, FEWEST = 6, 3
"""Points of a rise that are sufficient, and the minimum that counts when it is too steep for more. Chosen:
two points are always on one line."""
CAPPED = 0.95
"""Fraction of the spec's limit from which a node's limit is considered equal to it. Chosen: limits are
rounded to MiB."""
_GIB = float(1 << 30)

Points = Sequence[tuple[float, float]]


def vertical(observation: Observation, policy: Policy) -> Proposal:
    """Propose the smallest candidate with the same GPUs and nodes that fits the usage.

    Memory is judged by its peak in a window over all nodes, CPU by its mean. A steady slope of memory gives a
    time to out-of-memory. If that is less than the duration of a move, the move is urgent, and cooldowns do
    not delay it.
    """
    here = observation.current
    memory = _peaks(observation, "memory_bytes")
    busy = [(at_s, value / 100) for at_s, value in _peaks(observation, "cpu_percent")]
    if not memory and not busy:
        return Proposal(reason="memory_bytes and cpu_percent are missing")
    limit, lead_s = _limit(observation), observation.overheads.start_s
    oom_s = time_to_limit(memory, limit, soon_s=lead_s)
    used = {"memory_gib": _need(memory, limit), "vcpus": _need(busy, here.offer.vcpus)}
    numbers: dict[str, Any] = {"time_to_out_of_memory_s": oom_s, **used}
    if oom_s is not None and oom_s < lead_s + LEAD_S:
        why = f"memory will be full in {oom_s:.0f} s"
        cap = policy.memory_cap_gib
        if cap is not None and limit >= CAPPED * cap * _GIB:
            reason = f"{why}, and resources.limits.memory allows {cap:.3g} GiB; raise it or leave it out"
            return Proposal(reason=reason, numbers=numbers)
        grown = max(memory[-1][1] * HEADROOM * 1.25 / _GIB, here.offer.memory_gib * 1.25)
        wanted = (grown if cap is None else min(grown, cap), 0.0)
        return _propose(observation, policy, wanted, why, numbers, is_urgent=True)
    sizes = (
        _size(limit / _GIB, used["memory_gib"], is_memory=True),
        _size(here.offer.vcpus, used["vcpus"], is_memory=False),
    )
    if all(size is None for size in sizes):
        return Proposal(reason="CPU and memory are used as they should be", numbers=numbers)
    wanted = (sizes[0] or 0.0, sizes[1] or 0.0)
    return _propose(observation, policy, wanted, "what is used", numbers, is_urgent=False)


def time_to_limit(points: Points, limit: float, *, soon_s: float = 0.0) -> float | None:
    """Seconds until a steady rise reaches *limit*; None without one.

    Least squares over the window; a rise is steady when the line explains nine tenths of the variance
    (chosen). Fewer than :data:`LOOKS` points count if waiting for that many, plus *soon_s* to act, would be
    too late.
    """
    if points and points[-1][1] >= limit:
        return 0.0
    count = len(points)
    if count < FEWEST:
        return None
    left_s = _left_s(points, limit)
    step_s = (points[-1][0] - points[0][0]) / (count - 1)
    if left_s is None or count >= LOOKS or left_s <= (LOOKS - count) * step_s + soon_s:
        return left_s
    return None


def _left_s(points: Points, limit: float) -> float | None:
    count = len(points)
    mean_t = math.fsum(at_s for at_s, _ in points) / count
    mean_y = math.fsum(value for _, value in points) / count
    spread = math.fsum((at_s - mean_t) ** 2 for at_s, _ in points)
    across = math.fsum((at_s - mean_t) * (value - mean_y) for at_s, value in points)
    total = math.fsum((value - mean_y) ** 2 for _, value in points)
    if spread == 0 or total == 0 or across <= 0 or across**2 / (spread * total) < 0.9:
        return None
    return (limit - points[-1][1]) * spread / across


def _limit(observation: Observation) -> float:
    """Bytes at which a node is OOM-killed: the machine's memory, or the lower limit that it last reported."""
    whole = observation.current.offer.memory_gib * _GIB
    latest = {
        item.node: item.value
        for item in sorted(observation.samples, key=lambda item: item.at_s)
        if item.metric == "memory_limit_bytes" and item.value > 0
    }
    return min([whole, *latest.values()])


def _peaks(observation: Observation, metric: str) -> Points:
    """Usage of the highest node at each sample of this attempt, oldest first."""
    since_s = observation.elapsed_s - LONG_WINDOW_S
    if observation.since_move_s is not None:
        since_s = max(since_s, observation.elapsed_s - observation.since_move_s)
    by_look: dict[float, float] = {}
    for item in observation.samples:
        if item.metric == metric and item.at_s >= since_s:
            by_look[item.at_s] = max(item.value, by_look.get(item.at_s, 0.0))
    return sorted(by_look.items())


def _need(points: Points, limit: float) -> dict[str, float | None]:
    """Percent used: the minimum and the peak of the short window, and the peak of the long one."""
    if not points:
        return {"least": None, "peak": None, "long_peak": None}
    recent = [value for at_s, value in points if points[-1][0] - at_s <= WINDOW_S]
    is_long = points[-1][0] - points[0][0] >= 0.9 * LONG_WINDOW_S
    is_short = points[-1][0] - points[0][0] >= 0.9 * WINDOW_S
    long_peak = max(value for _, value in points)
    return {
        "least": 100 * min(recent) / limit if is_short else None,
        "peak": 100 * max(recent) / limit,
        "long_peak": 100 * long_peak / limit if is_long else None,
    }


def _size(has: float, used: dict[str, float | None], *, is_memory: bool) -> float | None:
    """The size to request, in the unit of *has*; None: unchanged."""
    peak, least, long_peak = used["peak"], used["least"], used["long_peak"]
    if peak is not None and least is not None and (peak if is_memory else least) > HIGH:
        return float(has * peak / 100 * HEADROOM)
    if long_peak is not None and long_peak < LOW:
        return float(has * long_peak / 100 * HEADROOM)
    return None


def _propose(
    observation: Observation,
    policy: Policy,
    wanted: tuple[float, float],
    why: str,
    numbers: dict[str, Any],
    *,
    is_urgent: bool,
) -> Proposal:
    here = observation.current
    memory, cpus = wanted[0] or here.offer.memory_gib, wanted[1] or here.offer.vcpus
    fitting = [item for item in observation.others() if _is_alike(item, here) and _holds(item, memory, cpus)]
    if _holds(here, memory, cpus):
        fitting = [here, *(item for item in fitting if not _is_dearer(item, here))]
    asked = f"{memory:.3g} GiB and {cpus:.3g} CPUs"
    numbers = {**numbers, "asked_memory_gib": memory, "asked_vcpus": cpus}
    if not fitting:
        return Proposal(reason=f"{why} asks for {asked} a node, and no candidate has that", numbers=numbers)
    target = min(fitting, key=_rank)
    if (target.offer.memory_gib, target.offer.vcpus) == (here.offer.memory_gib, here.offer.vcpus):
        return Proposal(
            reason=f"{why} asks for {asked} a node, and nothing nearer is offered", numbers=numbers
        )
    view = outlook(observation, policy)
    moving = view.moving(target, speed=view.slowest(target) or view.speeds.get(here.name))
    want = Want(target, f"{why} asks for {asked} a node", view.staying, moving, is_urgent=is_urgent)
    return Proposal((want,), numbers=numbers)


def _is_alike(item: Allocation, here: Allocation) -> bool:
    mine, its = here.offer, item.offer
    same_gpus = (its.gpu_name, its.gpus) == (mine.gpu_name, mine.gpus)
    return same_gpus and item.nodes == here.nodes and its.capacity_type == mine.capacity_type


def _rank(item: Allocation) -> tuple[float, float, bool, float, str]:
    """Sort key: smallest first, then cheapest; an unknown price comes after all known ones."""
    price, offer = item.usd_per_hour, item.offer
    return offer.memory_gib, offer.vcpus, price is None, price or 0.0, item.name


def _is_dearer(item: Allocation, here: Allocation) -> bool:
    mine, its = here.usd_per_hour, item.usd_per_hour
    return mine is not None and its is not None and its > mine


def _holds(item: Allocation, memory_gib: float, cpus: float) -> bool:
    return item.offer.memory_gib >= memory_gib and item.offer.vcpus >= cpus


VERTICAL = ScalingPolicy(
    "vertical",
    vertical,
    metrics=(Metric("memory_bytes"), Metric("memory_limit_bytes"), Metric("cpu_percent")),
    window_s=LONG_WINDOW_S,
    changes_in_place=True,
)
