"""``profile`` and ``advise``: what earlier runs of a stage taught, and what the next one should request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import click

from envscaler_airflow.cli.common import Group, echo_json, echo_result, output_option, store_option
from envscaler_airflow.cli.tables import print_table
from envscaler_airflow.errors import ProtocolError, SpecError
from envscaler_airflow.owner.choose import in_words
from envscaler_airflow.planning import Plan, feasible
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.knowledge import first_known, with_ratios
from envscaler_airflow.planning.planner import PlanInputs
from envscaler_airflow.planning.profile import Figure, RunProfile, StageProfile, merge
from envscaler_airflow.planning.sizing import Sizing, recommended
from envscaler_airflow.scaling.from_spec import speedups_of
from envscaler_airflow.store.profiles import (
    StoredProfiles,
    reset_profiles,
    stage_folders,
    stored_profiles,
)
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store


@click.group(cls=Group)
def profile() -> None:
    """What the runs of a stage measured, from which its next run is planned."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage with a profile: ``deployment/dag/task``."""

    name: str
    folder: str
    stored: StoredProfiles


def _stage(store: Store, text: str) -> _Stage:
    """The stage that *text* names: the end of ``deployment/dag/task`` that is unique.

    Raises:
        SpecError: None or several end so.
    """
    known = list(stage_folders(store))
    found = [(name, folder) for name, folder in known if f"/{name}".endswith(f"/{text.strip('/')}")]
    if len(found) == 1:
        [(name, folder)] = found
        return _Stage(name, folder, stored_profiles(store, folder, now=store.now()))
    listed = ", ".join(name for name, _ in (found or known)[:20]) or "none yet: a run adds to it when it ends"
    which = "several stages end so" if found else "no stage with a profile ends so"
    raise SpecError(f"{text}: {which}; there are {listed}")


@profile.command("show")
@click.argument("stage", required=False)
@output_option
@store_option
def show(stage: str | None, *, as_json: bool, store: Store) -> None:
    """Show what the runs of STAGE (``dag/task``) measured, or list the stages."""
    if stage is None:
        names = [name for name, _ in stage_folders(store)]
        if as_json:
            echo_json({"stages": names})
        else:
            click.echo("\n".join(names) or f"no profile in {store.url}: a run adds to it when it ends")
        return
    found = _stage(store, stage)
    merged = _merged(found.stored)
    if as_json:
        runs = [one.to_dict() for one in found.stored.runs]
        echo_json(
            {"stage": found.name, **merged.to_dict(), "measured": runs, "ignored": list(found.stored.faults)}
        )
        return
    click.echo(f"{found.name}: {merged.source}, {_day(merged.first_at)} to {_day(merged.last_at)}")
    print_table(("WHAT", "NEXT RUN", "+-", "RUNS"), _rows(merged))
    for fault in found.stored.faults:
        click.echo(f"ignored: {fault}")


def stage_profile(store: Store, text: str) -> StageProfile:
    """What the runs of the stage that *text* names measured.

    Raises:
        SpecError: None or several stages are named so, or nothing of it can be read.
    """
    return _readable(_stage(store, text))


def _readable(found: _Stage) -> StageProfile:
    if not found.stored.runs:
        raise SpecError(f"{found.name}: none of its profiles can be read: {'; '.join(found.stored.faults)}")
    return _merged(found.stored)


def _merged(stored: StoredProfiles) -> StageProfile:
    """The merge for the code of the newest run."""
    return merge(stored.runs, code=stored.runs[-1].code if stored.runs else "")


def _day(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()


def _rows(found: StageProfile) -> list[tuple[str, str, str, str]]:
    rows = [_row("work", found.units, found.unit)]
    rows += [_row(f"speed on {name}", one, f"{found.unit}/s") for name, one in found.speeds.items()]
    rows += [_row(f"start: {name}", one, "s") for name, one in found.start_s.items()]
    rows += [_row("checkpoint", found.checkpoint_s, "s"), _row("checkpoint", found.checkpoint_bytes, "bytes")]
    for name, used in found.usage.items():
        numbers = f"{used.median:.4g}, 95 % below {used.p95:.4g}, peak {used.peak:.4g}"
        rows.append((name, numbers, "", str(found.runs)))
    for name, lost in found.losses.items():
        rows.append((f"losses on {name}", f"{lost.losses:g} in {lost.hours:.1f} h", "", str(found.runs)))
    if found.forecast_error is not None and found.inside is not None:
        text = f"{found.forecast_error.value:.2f} x the forecast, {found.inside:.0%} within its range"
        rows.append(("time taken", text, "", str(found.forecast_error.runs)))
    return [row for row in rows if row is not None]


def _row(what: str, figure: Figure | None, unit: str) -> tuple[str, str, str, str] | None:
    if figure is None:
        return None
    return what, f"{figure.value:.4g} {unit}", f"{figure.spread:.0%}", str(figure.runs)


@profile.command("diff")
@click.argument("stage")
@output_option
@store_option
def diff(stage: str, *, as_json: bool, store: Store) -> None:
    """Compare the newest run of STAGE with the runs before it."""
    found = _stage(store, stage)
    if len(found.stored.runs) < 2:
        raise SpecError(f"{found.name}: one run is measured; a second one can be compared with it")
    newest, before = found.stored.runs[-1], merge(found.stored.runs[:-1], code=found.stored.runs[-2].code)
    rows = _differences(newest, before)
    if as_json:
        names = ("what", "newest", "before", "ratio")
        same = {"is_same_code": newest.code == found.stored.runs[-2].code}
        echo_json(
            {"stage": found.name, **same, "differences": [dict(zip(names, row, strict=True)) for row in rows]}
        )
        return
    changed = "" if newest.code == found.stored.runs[-2].code else "; what runs has changed"
    click.echo(f"{found.name}: {newest.run} against {before.runs} before{changed}")
    lines = [(what, f"{new:.4g}", f"{old:.4g}", f"{ratio:.2f} x") for what, new, old, ratio in rows]
    print_table(("WHAT", "NEWEST", "BEFORE", "RATIO"), lines)


def _differences(newest: RunProfile, before: StageProfile) -> list[tuple[str, float, float, float]]:
    """What both measured: its name, the newest value, the earlier median, and their ratio."""
    pairs: list[tuple[str, float | None, Figure | None]] = [("work", newest.units, before.units)]
    pairs += [(f"speed on {name}", one.mean, before.speeds.get(name)) for name, one in newest.speeds.items()]
    pairs += [(f"start: {name}", one, before.start_s.get(name)) for name, one in newest.start_s.items()]
    pairs.append(("checkpoint, s", newest.checkpoint_s, before.checkpoint_s))
    rows = [
        (what, new, old.value, new / old.value)
        for what, new, old in pairs
        if new is not None and old is not None and old.value > 0
    ]
    rows += [
        (f"peak {name}", used.peak, before.usage[name].peak, used.peak / before.usage[name].peak)
        for name, used in newest.usage.items()
        if name in before.usage and before.usage[name].peak > 0
    ]
    return rows


@profile.command("reset")
@click.argument("stage")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_option
@store_option
def reset(stage: str, *, yes: bool, as_json: bool, store: Store) -> None:
    """Forget what the runs of STAGE measured, such as after its code or data have changed entirely."""
    found = _stage(store, stage)
    if not yes:
        click.confirm(f"forget {found.name}, {len(found.stored.runs)} runs?", abort=True, err=True)
    forgot = reset_profiles(store, found.folder)
    echo_result(
        {"stage": found.name, "forgot": forgot}, f"{found.name}: forgot {forgot} runs", as_json=as_json
    )


@click.command()
@click.argument("stage")
@output_option
@store_option
def advise(stage: str, *, as_json: bool, store: Store) -> None:
    """Advise what the next run of STAGE (``dag/task``) should request, and where it would run.

    The plan is that of its newest run, with the offers and prices of that time and what all runs measured.
    """
    found = _stage(store, stage)
    merged = _readable(found)
    run = Run(store, found.stored.runs[-1].run)
    sizing, made, last = _sized(run, merged), _replanned(run, merged), found.stored.runs[-1]
    if as_json:
        plan = None if made is None else made.to_dict()
        echo_json({"stage": found.name, "sizing": sizing.to_dict(), "plan": plan})
        return
    has = f"{_gib(last.memory_bytes)} and {last.vcpus or 0:g} CPUs"
    click.echo(f"{found.name}: {merged.source}; the last run had {has}")
    if sizing.memory_bytes is not None:
        click.echo(f"request memory: {sizing.memory_bytes // 2**20}Mi")
    if sizing.vcpus is not None:
        click.echo(f"request cpu: {sizing.vcpus:g}")
    for reason in sizing.reasons:
        click.echo(f"  {reason}")
    for line in _plan_words(made):
        click.echo(line)


def _gib(memory_bytes: int | None) -> str:
    return "? GiB" if memory_bytes is None else f"{memory_bytes / 2**30:.2f} GiB"


def _sized(run: Run, merged: StageProfile) -> Sizing:
    """Sizes within the limits of the newest run's spec; without limits if that run was removed."""
    try:
        spec = run.spec(run.events.load().spec_hash)
    except ProtocolError:
        return recommended(merged, image=merged.image)
    asked = spec.resources.alternatives[0]
    return recommended(
        merged,
        image=(spec.base.image or "") if spec.base is not None else "",
        least_memory_bytes=asked.requests.memory_bytes,
        most_memory_bytes=asked.limits.memory_bytes,
        most_vcpus=asked.limits.cpu_cores,
    )


def _replanned(run: Run, merged: StageProfile) -> Plan | None:
    """The newest run's plan with what all runs measured; None if it was not recorded with its inputs."""
    try:
        inputs = PlanInputs.from_dict(run.plan()["inputs"])
        stated = speedups_of(run.spec(run.events.load().spec_hash))
    except (KeyError, ValueError, ProtocolError):
        return None
    fresh = replace(inputs.knowledge, units=None, speeds={}, sources={})
    places = feasible(inputs.needs, inputs.offers)
    known = with_ratios(first_known((fresh, merged.knowledge())), stated, places)
    return replace(inputs, knowledge=known).plan()


def _plan_words(made: Plan | None) -> list[str]:
    """The chosen allocation, and what it saves against the cheapest machine per hour."""
    if made is None or made.chosen is None:
        return ["no plan of its newest run is recorded, so where it would run is unknown"]
    words = [in_words(replace(made, notes=()))]
    cheapest = min(made.candidates, key=lambda item: (item.usd_per_hour is None, item.usd_per_hour or 0.0))
    best, other = made.chosen.estimate, cheapest.estimate
    if best is not None and other is not None and cheapest.allocation != made.chosen.allocation:
        saved_h = other.hours - best.hours
        usd = (
            ""
            if best.usd is None or other.usd is None
            else f" and {usd_text(max(0.0, other.usd - best.usd))}"
        )
        words.append(f"  it saves {max(0.0, saved_h):.2f} h{usd} against {cheapest.allocation.name}")
    return words
