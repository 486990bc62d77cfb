"""``simulate``: policies on traces, on measured trainings, and on a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from envscaler_airflow.cli.common import echo_json, find_run, output_option, store_option
from envscaler_airflow.cli.follow import Bar, bar
from envscaler_airflow.errors import SpecError
from envscaler_airflow.scaling import all_policies
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.run_store import Store

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def simulate() -> None:
    """Replay policies, and show what they would have cost."""


@simulate.command()
@click.option(
    "--traces", "traces_file", type=_FILE, required=True, help="CSV: tick, then one column per zone."
)
@click.option("--windows", "windows_file", type=_FILE, required=True, help="CSV file of starts.")
@click.option("--work-h", type=float, default=48.0, show_default=True, help="Hours of work.")
@click.option(
    "--deadline-h", type=float, multiple=True, default=(52.0,), show_default=True, help="Repeatable."
)
@click.option(
    "--overhead-h", type=float, multiple=True, default=(0.2,), show_default=True, help="Repeatable."
)
@click.option("--on-demand", type=float, default=3.06, show_default=True, help="$/h.")
@click.option("--spot", "spot_usd", type=float, default=0.9731, show_default=True, help="$/h.")
@click.option("--policy", default="deadline", show_default=True, help="A policy or a baseline, see above.")
@click.option("--zones", default="", help="Comma-separated: one job over all of them.")
@click.option("--dataset", help="Which starts; the default is the prefix of the traces' file name.")
@click.option("--history", "history_file", type=_FILE, help="Earlier traces, to learn from.")
@click.option("--price-changes", type=_FILE, help="CSV file with zone, tick, spot_usd_per_h.")
@click.option("--ask-s", type=click.FloatRange(0), help="Seconds that it takes to learn a zone's state.")
@click.option("--optimum", is_flag=True, help="Add the exact offline optimum of every job.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG plot of the first job.")
@output_option
def spot(  # noqa: PLR0913  # one argument for each option
    *,
    traces_file: Path,
    windows_file: Path,
    work_h: float,
    deadline_h: Sequence[float],
    overhead_h: Sequence[float],
    on_demand: float,
    spot_usd: float,
    policy: str,
    zones: str,
    dataset: str | None,
    history_file: Path | None,
    price_changes: Path | None,
    ask_s: float | None,
    optimum: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run jobs with a deadline on spot traces. Policies: deadline, uniform-progress, greedy, on-demand."""
    from envscaler_airflow.simulate import reports, spot  # noqa: PLC0415  # for this command alone

    made = _policy(policy, reports.SPOT_POLICIES)
    seen = spot.read_traces(traces_file)
    windows = spot.of_dataset(spot.read_windows(windows_file), traces_file, dataset)
    cells = [
        reports.SpotCell(work_h, deadline, overhead, on_demand, spot_usd, ask_s)
        for deadline in deadline_h
        for overhead in overhead_h
    ]
    given: dict[str, Any] = {
        "earlier": spot.read_traces(history_file) if history_file else None,
        "price_changes": spot.read_price_changes(price_changes) if price_changes else None,
    }
    more = {"zones": _zones(zones, traces_file, seen.zones), "with_optimum": optimum, **given}
    jobs: list[dict[str, Any]] = []
    with bar(f"simulating {policy}") as shown:
        for cell in cells:
            jobs += reports.spot_jobs(seen, windows, cell, made, on_job=_counted(shown, len(cells)), **more)
    if plot is not None:
        reports.plot_spot(plot, seen, jobs[0], cells[0], made, **given)
    _print({"policy": policy, "jobs": jobs, "summary": reports.spot_summary(jobs)}, as_json=as_json)


@simulate.command()
@click.option("--profiles", type=_FOLDER, required=True, help="Folder with measured step times.")
@click.option(
    "--prices",
    "prices_file",
    type=_FILE,
    help="CSV file with gpu, usd_per_gpu_hour; T4, V100-32GB and A100-40GB have fixed prices.",
)
@click.option("--models", default="imagenet,cifar10,yolov3", show_default=True, help="Comma-separated.")
@click.option("--track", type=click.Choice(["count", "type"]), default="count", show_default=True)
@click.option("--length", type=click.Choice(["short", "long"]), default="long", show_default=True)
@click.option("--work", default="", help="MODEL=K,...: work as multiples of the original.")
@click.option(
    "--types", default="", help="Comma-separated GPU types; the default is T4, V100-32GB, A100-40GB."
)
@click.option("--policy", default="cost-to-finish", show_default=True)
@click.option("--value-of-hour", type=float, multiple=True, help="USD; the default is four values.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG plot of the first job.")
@output_option
def elastic(  # noqa: PLR0913  # one argument for each option
    *,
    profiles: Path,
    prices_file: Path | None,
    models: str,
    track: str,
    length: str,
    work: str,
    types: str,
    policy: str,
    value_of_hour: Sequence[float],
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run elastic trainings. Policies: cost-to-finish, hpa, or-et-al, pollux, stay."""
    from envscaler_airflow.simulate import elastic as world  # noqa: PLC0415  # only here
    from envscaler_airflow.simulate import reports  # noqa: PLC0415  # only here

    made = _policy(policy, reports.ELASTIC_POLICIES)
    gpus = [name for name in types.split(",") if name] or list(reports.TYPES)
    known = world.load_models(profiles, gpus)
    names = [name for name in models.split(",") if name]
    unknown = [name for name in names if name not in known]
    if not known:
        raise SpecError(f"{profiles}: has no model that was measured on {', '.join(gpus)}")
    if unknown or not names:
        asked = ", ".join(unknown) or "without a name"
        raise SpecError(f"{profiles}: has no model {asked}; it has {', '.join(sorted(known))}")
    multiples = _multiples(work)
    if idle := sorted(multiples.keys() - set(known)):
        raise SpecError(f"--work: {', '.join(idle)} is not simulated; --models has {', '.join(names)}")
    for name in names:
        if rows := known[name].unknown_noise:
            click.echo(
                f"{name}: {rows} rows have grad_sqr 0; their noise is that of their neighbors", err=True
            )
    with bar(f"simulating {policy}") as shown:
        tuned, kept = (
            reports.elastic_jobs(
                [known[name] for name in names],
                world.gpu_prices(prices_file, gpus),
                reports.Track(track == "type", length == "long", multiples),
                made,
                seeds=seeds,
                values_of_hour=value_of_hour,
                is_kept=is_kept,
                on_job=_counted(shown, 2),
            )
            for is_kept in (False, True)
        )
    if plot is not None:
        reports.plot_elastic(plot, tuned[0])
    report = {
        "policy": policy,
        "jobs": [*tuned, *kept],
        "summary": reports.elastic_summary(tuned),
        "summary_kept_batch": reports.elastic_summary(kept),
    }
    _print(report, as_json=as_json)
    if not as_json:
        click.echo("with the global batch kept:")
        _print({"summary": report["summary_kept_batch"]}, as_json=False)


def _counted(shown: Bar, times: int) -> Callable[[int], None]:
    """Moves *shown* on by one job of the number given times *times*."""
    return lambda many: shown.to(shown.done + 1, many * times)


def _zones(text: str, file: Path, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if len(set(names)) < len(names):
        raise SpecError(f"--zones: names a zone twice: {text}")
    if unknown:
        raise SpecError(f"{file}: has no zone {', '.join(unknown)}; it has {', '.join(known)}")
    return names


def _policy(name: str, known: Mapping[str, type[Any]]) -> Any:
    others = {key: found.simulated for key, found in all_policies().items() if found.simulated}
    made = known.get(name) or others.get(name)
    if made is None:
        raise SpecError(f"--policy: got {name!r}; known are {', '.join(sorted({*known, *others}))}")
    try:
        return made()
    except Exception as err:  # an edge: code of others
        raise SpecError(f"--policy: {name} cannot be simulated: {err!r:.500}") from err


def _multiples(text: str) -> dict[str, float]:
    multiples = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, _, value = part.partition("=")
        try:
            multiples[name.strip()] = float(value)
        except ValueError:
            raise SpecError(f"--work: got {part!r}; write MODEL=K, as in cifar10=40") from None
        if not 0 < multiples[name.strip()] < math.inf:
            raise SpecError(f"--work: got {part!r}; a multiple must be finite and > 0")
    return multiples


def _print(report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        echo_json(report)
        return
    for name, value in report["summary"].items():
        click.echo(f"{name:>18}  {value:.4f}" if isinstance(value, float) else f"{name:>18}  {value}")


@simulate.command("run")
@click.argument("run")
@click.option("--policy", "policy_name", help="Policy to use; the default is the recorded one.")
@output_option
@store_option
def recorded_run(run: str, *, policy_name: str | None, as_json: bool, store: Store) -> None:
    """Decide RUN's recorded checks again, and label what follows a different decision."""
    from envscaler_airflow.owner.policies import policies_of  # noqa: PLC0415  # entry points
    from envscaler_airflow.simulate.reports import replay_run  # noqa: PLC0415  # only here

    found = find_run(store, run)
    found.events.load()  # refuses a run of another schema
    checks = [check for check, _ in read_decisions(found)]
    if not checks:
        raise SpecError(
            f"{run}: no scaling check is recorded, so there is nothing to replay; name a run whose DAG has a "
            "ScalingSensor for the stage"
        )
    known = policies_of(found)
    if policy_name is not None and policy_name not in known:
        raise SpecError(f"--policy: got {policy_name!r}; known are {', '.join(sorted(known))}")
    foreign = sorted({check.policy.name for check in checks} - set(known))
    if policy_name is None and foreign:
        raise SpecError(
            f"{run}: was decided by {', '.join(foreign)}, which is not installed here; give another --policy"
        )
    report = replay_run(checks, policy_name, policies=known)
    _print(report, as_json=as_json)
    if not as_json:
        for row in report["jobs"]:
            if row["recorded"] != row["replayed"]:
                label = " (counterfactual)" if row["counterfactual"] else ""
                said = f"{row['replayed']} instead of {row['recorded']}{label}: {row['reason']}"
                click.echo(f"{row['elapsed_s']:8.0f} s  {said}")
