"""Plots of single jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envscaler_airflow.errors import SpecError
from envscaler_airflow.scaling.deadline.spot_job import ON_DEMAND
from envscaler_airflow.simulate.spot import SpotPolicy, simulate_spot
from envscaler_airflow.simulate.traces import Traces, excerpt

if TYPE_CHECKING:
    from envscaler_airflow.simulate.reports import SpotCell


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
