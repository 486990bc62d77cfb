"""Many simulated jobs, or a recorded run under another policy, as one JSON report; plots of single jobs.

The CLI prints the report and the benchmarks average it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning.record import check_finite
from envscaler_airflow.scaling import Check, ScalingPolicy, decide
from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND, SpotJob
from envscaler_airflow.simulate.compared_policies import (
    Greedy,
    Hpa,
    OnDemand,
    OrEtAl,
    Pollux,
    Stay,
    UniformProgress,
    spot_optimum,
)
from envscaler_airflow.simulate.elastic import (
    START_TYPE,
    Config,
    ElasticJob,
    ElasticPolicy,
    Model,
    elastic_optimum,
    simulate_elastic,
)
from envscaler_airflow.simulate.live_decision import LiveDecision
from envscaler_airflow.simulate.spot import SpotPolicy, SpotRun, Traces, Window, excerpt, simulate_spot
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy

SPOT_POLICIES: Mapping[str, type[SpotPolicy]] = {
    "deadline": DeadlinePolicy,
    "uniform-progress": UniformProgress,
    "greedy": Greedy,
    "on-demand": OnDemand,
}
ELASTIC_POLICIES: Mapping[str, type[ElasticPolicy]] = {
    "cost-to-finish": LiveDecision,
    "hpa": Hpa,
    "or-et-al": OrEtAl,
    "pollux": Pollux,
    "stay": Stay,
}
TYPES = ("T4", "V100-32GB", "A100-40GB")
VALUES = (0.25, 1.0, 4.0, 16.0)
"""Values of an hour, in $/h of the cheapest configuration."""
MOST_TICKS = 1_000_000
"""Longest simulated job. Chosen: nineteen years of ten-minute ticks; more indicates a wrong unit."""
LONG = {"cifar10": 40.0, "yolov3": 6.0, "imagenet": 1.0}
"""Work of the long track, as multiples of the original."""


@dataclass(frozen=True, slots=True)
class SpotCell:
    """One deadline and overhead, at one pair of prices, over windows of one file of traces.

    *ask_s*: only a request reveals whether a zone is up, and it takes this long; None: everything is visible.
    """

    work_h: float
    deadline_h: float
    overhead_h: float
    on_demand_usd: float
    spot_usd: float
    ask_s: float | None = None

    def job(self, gap_s: float) -> SpotJob:
        """The job at this tick.

        Raises:
            SpecError: The deadline cannot be met, or a number is not valid.
        """
        try:
            check_finite(ask_s=self.ask_s)
            return SpotJob(
                ticks=_ticks(self.deadline_h, gap_s),
                gap_s=gap_s,
                work_s=self.work_h * 3600,
                overhead_s=self.overhead_h * 3600,
                on_demand_usd=self.on_demand_usd,
                spot_usd=self.spot_usd,
            )
        except (ValueError, OverflowError) as err:
            raise SpecError(f"{self.work_h:g} h of work by {self.deadline_h:g} h: {err}") from err


def _ticks(deadline_h: float, gap_s: float) -> int:
    ticks = int(deadline_h * 3600 / gap_s + 1e-9)
    if ticks > MOST_TICKS:
        raise ValueError(f"{ticks} ticks of {gap_s:g} s are more than {MOST_TICKS}")
    return ticks


def _quiet(_many: int) -> None:
    pass


def spot_jobs(  # noqa: PLR0913  # what a job is made of
    traces: Traces,
    windows: Iterable[Window],
    cell: SpotCell,
    policy: SpotPolicy,
    *,
    zones: Sequence[str] = (),
    earlier: Traces | None = None,
    price_changes: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    with_optimum: bool = False,
    on_job: Callable[[int], None] = _quiet,
) -> list[dict[str, Any]]:
    """One job for each window whose zone the traces contain; with *zones*, one over all zones per start.

    *on_job* is called after each with the total number.

    Raises:
        SpecError: No window fits the traces.
    """
    jobs = []
    starts = _starts(traces, windows, zones)
    many = sum(len(by_tick) for by_tick in starts.values())
    for names, by_tick in starts.items():
        for start, window in sorted(by_tick.items()):
            job = cell.job(window.gap_s)
            met = excerpt(traces, names, start, job.ticks, earlier=earlier, price_changes=price_changes)
            run = simulate_spot(job, met.zones, policy, history=met.past, prices=met.prices, ask_s=cell.ask_s)
            row = _spot_row(window, names, cell, run)
            if with_optimum:
                row["optimum_usd"] = round(spot_optimum(job, met.zones, met.prices), 6)
            jobs.append(row)
            on_job(many)
    return jobs


def _starts(
    traces: Traces, windows: Iterable[Window], zones: Sequence[str]
) -> dict[tuple[str, ...], dict[int, Window]]:
    """Windows, grouped by the zones of their job and by start."""
    starts: dict[tuple[str, ...], dict[int, Window]] = {}
    for window in windows:
        if window.zone in (zones or traces.zones) and window.zone in traces.zones:
            starts.setdefault(tuple(zones) or (window.zone,), {})[window.start_tick] = window
    ends = traces.first + max(len(row) for row in traces.zones.values())
    outside = [start for rows in starts.values() for start in rows if not traces.first <= start < ends]
    if outside:
        raise SpecError(f"start_tick {outside[0]} is outside of the traces, {traces.first} to {ends - 1}")
    if not starts:
        raise SpecError(f"no window is of a zone of the traces: {', '.join(zones or traces.zones)}")
    return starts


def _spot_row(window: Window, names: Sequence[str], cell: SpotCell, run: SpotRun) -> dict[str, Any]:
    return {
        "dataset": window.dataset,
        "zone": "+".join(names),
        "start_tick": window.start_tick,
        "gap_s": window.gap_s,
        "deadline_h": cell.deadline_h,
        "overhead_h": cell.overhead_h,
        "cost_usd": round(run.cost_usd, 6),
        "finished_h": round(run.finished_h, 6),
        "late": run.is_late,
        "launches": run.launches,
    }


def spot_summary(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, worst case, and number of late jobs."""
    costs = [job["cost_usd"] for job in jobs]
    summary = {
        "jobs": len(jobs),
        "mean_cost_usd": sum(costs) / len(costs),
        "worst_cost_usd": max(costs),
        "mean_finished_h": sum(job["finished_h"] for job in jobs) / len(jobs),
        "late": sum(bool(job["late"]) for job in jobs),
    }
    if all("optimum_usd" in job for job in jobs):
        optimum = sum(job["optimum_usd"] for job in jobs)
        summary["mean_optimum_usd"] = optimum / len(jobs)
        if optimum > 0:
            summary["over_optimum"] = sum(costs) / optimum
    return summary


@dataclass(frozen=True, slots=True)
class Track:
    """Which configurations a job may use and how long it is.

    Attributes:
        is_type: All types, not only the one it starts on.
        is_long: Work multiplied as in :data:`LONG`.
        work: Multiples by model, applied before the others.
    """

    is_type: bool
    is_long: bool
    work: Mapping[str, float]

    @property
    def name(self) -> str:
        """``count-long``."""
        return f"{'type' if self.is_type else 'count'}-{'long' if self.is_long else 'short'}"

    def job(
        self, model: Model, prices: Mapping[str, float], value_of_hour: float | None, at: float
    ) -> ElasticJob:
        """A job of *model*; *at* multiplies the $/h of its cheapest configuration unless a value is given.

        Raises:
            SpecError: There is no measurement of one GPU of the start type.
        """
        configs = tuple(c for c in model.steps if c.gpu in prices and (self.is_type or c.gpu == START_TYPE))
        start = Config(START_TYPE, 1, 1)
        if start not in configs:
            raise SpecError(f"{model.name}: one {START_TYPE} was not measured, and jobs start there")
        cheapest = min(prices[c.gpu] * c.gpus for c in configs)
        value = at * cheapest if value_of_hour is None else value_of_hour
        factor = self.work.get(model.name, LONG.get(model.name, 1.0) if self.is_long else 1.0)
        if not 0 <= value < math.inf:
            raise SpecError(f"--value-of-hour: must be finite and >= 0, got {value}")
        return ElasticJob(model, configs, prices, value, factor, start)


def elastic_jobs(
    models: Sequence[Model],
    prices: Mapping[str, float],
    track: Track,
    policy: ElasticPolicy,
    *,
    seeds: int,
    values_of_hour: Sequence[float] = (),
    is_kept: bool = False,
    on_job: Callable[[int], None] = _quiet,
) -> list[dict[str, Any]]:
    """Every model at every value of an hour and seed; *on_job* is called after each with the total number.

    With *is_kept* the global batch is fixed, as in a stage; otherwise each place runs the best one.
    """
    jobs = []
    values: list[tuple[float | None, float]] = [(value, 0.0) for value in values_of_hour]
    for model in models:
        for value, at in values or [(None, at) for at in VALUES]:
            job = track.job(model.kept() if is_kept else model, prices, value, at)
            optimum = elastic_optimum(job)
            for seed in range(seeds):
                run = simulate_elastic(job, policy, seed=seed)
                jobs.append(
                    {
                        "model": model.name,
                        "track": track.name,
                        "batch": "kept" if is_kept else "tuned",
                        "value_of_hour": round(job.value_of_hour, 6),
                        "seed": seed,
                        "cost_usd": round(run.cost_usd, 6),
                        "time_h": round(run.time_h, 6),
                        "restarts": run.restarts,
                        "objective": round(run.objective, 6),
                        "optimum": round(optimum, 6),
                        "regret": round(run.objective / optimum - 1, 6),
                        "path": [[round(at_s / 3600, 3), name] for at_s, name in run.path],
                    }
                )
                on_job(len(models) * len(values or VALUES) * seeds)
    return jobs


def elastic_summary(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and worst case."""
    regrets = [job["regret"] for job in jobs]
    return {
        "jobs": len(jobs),
        "mean_regret": sum(regrets) / len(jobs),
        "worst_regret": max(regrets),
        "mean_restarts": sum(job["restarts"] for job in jobs) / len(jobs),
        "mean_cost_usd": sum(job["cost_usd"] for job in jobs) / len(jobs),
        "mean_time_h": sum(job["time_h"] for job in jobs) / len(jobs),
    }


def plot_spot(
    path: Path,
    traces: Traces,
    row: Mapping[str, Any],
    cell: SpotCell,
    policy: SpotPolicy,
    *,
    earlier: Traces | None = None,
    price_changes: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> None:
    """Plot the availability of each zone and what the policy ran, over the hours of the job in *row*.

    Raises:
        SpecError: matplotlib is not installed.
    """
    names, start = row["zone"].split("+"), row["start_tick"]
    gap_s = float(row["gap_s"])
    job = cell.job(gap_s)
    met = excerpt(traces, names, start, job.ticks, earlier=earlier, price_changes=price_changes)
    zones = met.zones
    run = simulate_spot(job, zones, policy, history=met.past, prices=met.prices, ask_s=cell.ask_s)
    figure, axes = _pyplot().subplots(len(names) + 1, 1, figsize=(10, 1.2 * (len(names) + 1)), sharex=True)
    hours = [tick * gap_s / 3600 for tick in range(job.ticks)]
    for axis, name in zip(axes, names, strict=False):
        axis.fill_between(hours[: len(zones[name])], [float(up > 0) for up in zones[name]], step="post")
        axis.set_ylabel(name, rotation=0, ha="right", fontsize=7)
        axis.set_yticks([])
    lanes = {None: 0.0, ON_DEMAND: 2.0}
    axes[-1].step(hours[: len(run.answers)], [lanes.get(a, 1.0) for a in run.answers], where="post")
    axes[-1].set_yticks([0, 1, 2], ["none", "spot", "on-demand"], fontsize=7)
    axes[-1].set_xlabel(
        f"hours; ${run.cost_usd:.2f}, done after {run.finished_h:.1f} h of {cell.deadline_h:g} h"
    )
    _save(figure, path)


def plot_elastic(path: Path, row: Mapping[str, Any]) -> None:
    """Plot where one job ran, over its hours.

    Raises:
        SpecError: matplotlib is not installed.
    """
    figure, axis = _pyplot().subplots(figsize=(10, 3))
    names = sorted(
        {name for _, name in row["path"]}, key=lambda name: (name.split("x")[1], int(name.split("x")[0]))
    )
    hours = [at_h for at_h, _ in row["path"]] + [row["time_h"]]
    lanes = [names.index(name) for _, name in row["path"]]
    axis.step(hours, [*lanes, lanes[-1]], where="post")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel(
        f"hours; {row['model']}, ${row['cost_usd']:.2f}, regret {row['regret']:.1%}, {row['restarts']} moves"
    )
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415  # an extra
    except ImportError as err:
        raise SpecError("--plot needs matplotlib: pip install 'envscaler-airflow[simulate]'") from err
    return plt


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    _pyplot().close(figure)


def replay_run(
    checks: Iterable[Check],
    policy_name: str | None = None,
    *,
    policies: Mapping[str, ScalingPolicy] | None = None,
) -> dict[str, Any]:
    """Repeat the decision of every recorded check, under the recorded policy or another one.

    Up to the first decision that differs, the results are facts. After it, the run would have continued
    differently: the later checks still use the recorded observations and are labelled ``counterfactual``. The
    hours and $ of a move are estimates from the policy's own numbers.

    Raises:
        ValueError: No policy of that name.
    """
    rows: list[dict[str, Any]] = []
    is_fact = True
    wanted: Mapping[str, float] = {}
    for check in checks:
        observation, policy = check.observation, check.policy
        if policy_name is not None and policy_name != policy.name:
            policy = replace(policy, name=policy_name)
            observation = replace(observation, wanted=dict(wanted))
        decision = decide(observation, policy, policies=policies)
        wanted = decision.wanted
        same = (decision.action, decision.target.name) == (check.decision.action, check.decision.target.name)
        is_fact = is_fact and same
        rows.append(
            {
                "elapsed_s": observation.elapsed_s,
                "recorded": _said(check.decision.action, check.decision.target.name),
                "replayed": _said(decision.action, decision.target.name),
                "reason": decision.reason,
                "numbers": dict(decision.numbers),
                "counterfactual": not is_fact,
            }
        )
    return {"policy": policy_name, "jobs": rows, "summary": _summary(rows)}


def _said(action: str, target: str) -> str:
    return action if action == "keep" else f"{action} {target}"


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    different = [row for row in rows if row["recorded"] != row["replayed"]]
    return {
        "checks": len(rows),
        "different": len(different),
        "counterfactual": sum(row["counterfactual"] for row in rows),
        "first_different_s": different[0]["elapsed_s"] if different else None,
    }
