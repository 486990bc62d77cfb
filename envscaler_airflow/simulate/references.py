"""Spot policies to compare with, written from their papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envscaler_airflow.scaling.deadline.facts import ON_DEMAND, SpotJob, SpotView, is_safe, may_ask


class OnDemand:
    """On-demand from start to end."""

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:
        """Nothing to remember."""

    def choose(self, view: SpotView) -> str | None:  # noqa: ARG002  # looks at nothing
        """On-demand."""
        return ON_DEMAND


class Greedy:
    """Spot when up, else wait; the guard brings on-demand at the last moment, and it stays."""

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002  # learns nothing
        """Remember the job."""
        self._job = job

    def choose(self, view: SpotView) -> str | None:
        """The zone that runs, else any that is up, else none."""
        if view.running == ON_DEMAND:
            return ON_DEMAND
        return _zone(view) or next(iter(view.unknown()), None)


class UniformProgress:
    """Uniform Progress, and its failover when there are several zones.

    Keep to the line ``t * W / D``. Spot up: spot. Spot down: none when ahead of the line,
    on-demand when behind. From on-demand back to spot only when progress is at or above the
    line at ``t + 2 * overhead``; when spot is down, on-demand stays. Where zones are known only by asking,
    it asks one after the other whenever it wants spot.

    Source:
        Wu et al., Can't Be Late: Optimizing Spot Instance Savings under Deadlines, NSDI 2024, section 4.
    """

    def begin(self, job: SpotJob, history: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002  # learns nothing
        """Remember the job."""
        self._job = job

    def choose(self, view: SpotView) -> str | None:
        """By the line."""
        job = self._job
        progress, now_s = job.work_s - view.work_left_s, view.tick * job.gap_s
        slope = job.work_s / (job.ticks * job.gap_s)
        zone = _zone(view) or (view.unknown()[0] if view.unknown() and may_ask(job, view) else None)
        if view.running == ON_DEMAND:
            is_ahead = progress >= (now_s + 2 * job.overhead_s) * slope - 1e-6
            return zone if zone is not None and is_ahead else ON_DEMAND
        if zone is not None:
            return zone
        return None if progress >= now_s * slope - 1e-6 and is_safe(job, view, None) else ON_DEMAND


def _zone(view: SpotView) -> str | None:
    """The zone that runs, else the cheapest that is up, the first of equal ones."""
    if view.running is not None and view.running != ON_DEMAND:
        return view.running
    zones = [name for name, is_up in view.up.items() if is_up]
    return min(zones, key=lambda name: view.usd.get(name, 0.0), default=None)
