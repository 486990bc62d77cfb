"""``plan``: where a stage would run, what that costs, and why not elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from envscaler_airflow.backends import backend_names
from envscaler_airflow.catalog.packaged import gpu_facts, job, jobs
from envscaler_airflow.cli.common import NOT_NEGATIVE, POSITIVE, echo_json, output_option
from envscaler_airflow.cli.follow import bar
from envscaler_airflow.cli.offer_options import (
    ARCHES,
    Committed,
    candidate_body,
    fault_notes,
    infra,
    market_options,
    offer_cells,
    places,
    quantity,
    rejected_body,
    spot,
)
from envscaler_airflow.cli.profile_commands import stage_profile
from envscaler_airflow.cli.specs import SpecSource, spec_options
from envscaler_airflow.cli.tables import number, print_table
from envscaler_airflow.clouds import all_clouds, price_sources, schemes, tariffs
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.quantities import duration_s
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import (
    Candidate,
    Goal,
    Knowledge,
    Misfit,
    Offer,
    Overheads,
    Plan,
    Requirements,
    is_ordered,
    requirements_of,
)
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.data import DataPlace, data_places
from envscaler_airflow.planning.jobs import JobModel, job_model
from envscaler_airflow.planning.knowledge import first_known
from envscaler_airflow.planning.market import MisfitOf, Scope, Search, search
from envscaler_airflow.planning.near_misses import unknown_gpus, unpriced_offers
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.stockouts import against
from envscaler_airflow.planning.table import OfferTable
from envscaler_airflow.store import Store, open_store
from envscaler_airflow.store.availability import stockouts

SHOWN = 12
"""Lines of candidates, and half as many of the others, that a terminal shows. Chosen."""

START_S = 240.0
START_STDEV_S = 90.0
"""From the order of a machine to the first step, seconds. Chosen: boot, image, data; runs measure it."""

CHECKPOINT_S = 10.0
"""Standstill of one checkpoint, seconds. Chosen; runs measure it."""

LEAST_VCPUS = 4
"""vCPUs per GPU below which the plan gives advice. Chosen: data loaders of common training codes."""

TERM_WORDS = {"1m": "a month", "1y": "a year", "3y": "three years"}
"""Terms of committed prices."""

COLUMNS = (
    "INFRA", "INSTANCE", "vCPUs", "MEM", "GPUs", "SPOT", "$/h", "EST. TIME", "EST. COST", "WHY NOT",
    "CHOSEN",
)  # fmt: skip


@click.command("plan")
@spec_options
@click.option("--target", help="What to check for gaps (a backend, docker, vm), or a variant to plan.")
@click.option(
    "--strategy", default="balanced", type=click.Choice(["cost", "balanced", "performance", "deadline"])
)
@click.option("--value-of-hour", type=NOT_NEGATIVE, help="Value of an hour of waiting, USD.")
@click.option("--budget", "budget_usd", type=NOT_NEGATIVE, help="Maximum cost of the stage, USD.")
@click.option("--max-usd-per-hour", type=NOT_NEGATIVE, help="Maximum price of all nodes together, USD.")
@click.option("--deadline", help="Time left, such as 4h.")
@click.option("--arch", default="x86_64", type=click.Choice(ARCHES), help="Architecture of the image.")
@click.option("--exact", is_flag=True, help="Refuse nodes with more GPUs than requested.")
@click.option("--job", "job_name", help="Known job that the stage runs; `--job list` lists them.")
@click.option("--stage", help="Stage (`dag/task`) whose earlier runs in --store measured work and speeds.")
@click.option("--work", "units", type=POSITIVE, help="Total number of samples or tokens; steps for --stage.")
@click.option("--batch", type=POSITIVE, help="Batch of all GPUs together.")
@click.option(
    "--data",
    "data",
    multiple=True,
    metavar="CLOUD:REGION[:GIB]",
    help="Location and size of the data.",
)
@click.option("--store", "store_url", help="Run store, to skip what its runs found sold out.")
@click.option("--limit", default=100, type=click.IntRange(1, 10_000), help="Number of candidates in --json.")
@output_option
@market_options
def plan_command(
    *,
    source: SpecSource,
    target: str | None,
    table: OfferTable,
    scope: Scope,
    committed: Committed,
    **options: Any,
) -> None:
    """Print the plan of a spec: the chosen offer, its price, and why not the others.

    With --target docker or a backend, show what is missing there, like `dry-run`. Exit 0 or 1. With
    --target vm, show what is missing, and then the offers to rent.
    """
    if options["job_name"] == "list":
        print_jobs(as_json=options["as_json"])
        return
    _check_together(options)
    spec = source.load(target).spec
    if _told_missing(spec, target, as_json=options["as_json"]):
        return
    needs = _needs(spec, options)
    with bar("comparing offers"):
        made = _search(spec, needs, table, scope=scope, options=options)
    has_none = options["strategy"] == "deadline" and options["deadline"] is None
    notes = [
        *(["no --deadline was given: --strategy deadline is cost here"] if has_none else []),
        *_unused(options, made),
        *_missing_on_vm(spec, target),
        *made.notes,
        *unknown_gpus(needs, table),
        *_advice(made),
        *_commitment(made, committed),
        *_unpriced(unpriced_offers(needs, table, scope.has, data_places(spec, schemes()))),
        *fault_notes(table.faults),
    ]
    if options["as_json"]:
        echo_json(plan_body(made, notes), indent=1)
    else:
        print_plan(made, [*notes, *_fleet_words(made.fleets)])
    if made.chosen is None:
        made.pick()


def _check_together(options: Mapping[str, Any]) -> None:
    """Refuse options that say nothing without another, rather than pass over them."""
    if options["stage"] is not None and (options["job_name"] is not None or options["store_url"] is None):
        raise SpecError(f"--stage {options['stage']}: goes with --store, and not with --job")
    if options["job_name"] is None:
        for option, name in (("--work", "units"), ("--batch", "batch")):
            if options[name] is not None and (name == "batch" or options["stage"] is None):
                raise SpecError(
                    f"{option} says nothing without a speed: add --job NAME (--job list has the names)"
                )


def _unused(options: Mapping[str, Any], made: Plan) -> list[str]:
    """The limits that say nothing where the time that the stage takes is unknown."""
    if made.chosen is None or made.chosen.estimate is not None:
        return []
    limits = (("--budget", "budget_usd"), ("--deadline", "deadline"), ("--value-of-hour", "value_of_hour"))
    given = ", ".join(option for option, name in limits if options[name])
    why = "how long the stage takes is unknown: add --job NAME and --work UNITS (--job list has the names)"
    return [f"{given}: without effect, since {why}"] if given else []


def _told_missing(spec: EnvSpec, target: str | None, *, as_json: bool) -> bool:
    """Print what *target* lacks, and return True, if *target* is a place to run and not a variant."""
    if target is None:
        return False
    from envscaler_airflow.cli.specs import tell_missing  # noqa: PLC0415  (a plan has no time for it)

    if target not in backend_names() and target != "docker":
        return False
    tell_missing(spec, target, as_json=as_json)
    return True


def _missing_on_vm(spec: EnvSpec, target: str | None) -> list[str]:
    if target != "vm":
        return []
    from envscaler_airflow.images.dry_run import missing_on  # noqa: PLC0415  (as above)

    return missing_on(target, spec)


def _needs(spec: EnvSpec, options: dict[str, Any]) -> tuple[Requirements, ...]:
    """Needs of *spec* where machines of every architecture are for sale."""
    arch = None if options["arch"] == "any" else options["arch"]
    more = {"max_usd_per_hour": options["max_usd_per_hour"], "exact_gpus": options["exact"]}
    return tuple(replace(need, arch=arch, **more) for need in requirements_of(spec))


def _search(
    spec: EnvSpec,
    needs: tuple[Requirements, ...],
    table: OfferTable,
    *,
    scope: Scope,
    options: dict[str, Any],
) -> Plan:
    """The plan of what the options ask for."""
    name = options["job_name"]
    model = None if name is None else job_model(job(name), gpu_facts(), batch=options["batch"])
    how = Search(
        scope=scope,
        speed_of=model,
        misfit_of=_misfit_of(spec, model),
        avoid=_sold_out(options["store_url"]),
        limit=options["limit"],
        explain=True,
        is_mixed=True,
    )
    known = Knowledge(
        options["units"],
        model.job.unit if model else "units",
        overheads=overheads_of(spec),
        data=(*data_places(spec, schemes()), *(_data(text) for text in options["data"])),
        tariffs=tariffs(),
    )
    if options["stage"] is not None:
        known = _learned(known, options["stage"], open_store(options["store_url"]))
    made = search(needs, table, goal=_goal(options), knowledge=known, how=how, is_ordered=is_ordered(spec))
    told = [f"{part} of {options['stage']}: {source}" for part, source in known.sources.items()]
    return replace(made, notes=(*told, *made.notes))


def _learned(known: Knowledge, stage: str, store: Store) -> Knowledge:
    """*known* with what earlier runs of *stage* measured."""
    found = stage_profile(store, stage)
    learned, over = found.knowledge(), known.overheads
    if (start := found.start_s.get("whole")) is not None:
        over = replace(over, start_s=start.value, start_stdev_s=start.value * start.spread)
    if found.checkpoint_s is not None and over.checkpoint_every_s is not None:
        over = replace(over, checkpoint_s=found.checkpoint_s.value)
    base = replace(known, unit=learned.unit, overheads=over, steps=learned.steps, is_guess=learned.is_guess)
    return first_known((base, learned))


def _misfit_of(spec: EnvSpec, model: JobModel | None) -> MisfitOf | None:
    """What the job, and the CUDA that the stage's packages are built for, cannot run on."""
    of_job = None if model is None else model.misfit
    if not spec.runtimes and spec.base is None:
        return of_job
    from envscaler_airflow.images.cuda import software_faults  # noqa: PLC0415  (as above)
    from envscaler_airflow.images.requirement_files import read_requirements  # noqa: PLC0415  (as above)

    told = software_faults(spec, read_requirements(spec))
    if told is None:
        return of_job

    def misfit(kind: InstanceType, nodes: int) -> Misfit | None:
        found = None if of_job is None else of_job(kind, nodes)
        fault = None if found is not None or kind.gpu_name is None else told(kind.gpu_name)
        return found if fault is None else Misfit("cuda", fault, 0.0)  # the machine itself lacks nothing

    return misfit


def _commitment(made: Plan, committed: Committed) -> list[str]:
    """When a committed price would be less than the chosen one on demand: it is paid whether used or not."""
    if made.chosen is None:
        return []
    offer, notes = made.chosen.allocation.offer, []
    for term, usd in committed((offer,)).get(offer.name, {}).items():
        if offer.usd_per_hour is not None and usd < offer.usd_per_hour:
            share = usd / offer.usd_per_hour
            notes.append(
                f"a commitment of {TERM_WORDS[term]} to {offer.instance_type} costs ${usd:.4f} every hour: "
                f"less than on demand if it is used for over {share:.0%} of that time"
            )
    return notes


def _sold_out(store_url: str | None) -> Callable[[Offer], str | None] | None:
    if store_url is None:
        return None
    store = open_store(store_url)
    now = store.now()
    found = stockouts(store, now=now)
    return lambda offer: against(offer, found, now)


def _data(text: str) -> DataPlace:
    found = re.fullmatch(r"([a-z]+):([a-z0-9-]+)(?::(\d{1,9}(?:\.\d{1,9})?))?", text)
    if found is None:
        raise SpecError(f"--data {text!r}: write aws:us-east-1 or aws:us-east-1:200 (GiB)")
    cloud, region, gib = found.groups()
    if cloud not in all_clouds():
        raise SpecError(f"--data {text!r}: no cloud is named {cloud}; there are {', '.join(all_clouds())}")
    return DataPlace(text, cloud, region, float(gib) if gib else None)


def _fleet_words(fleets: Sequence[Candidate]) -> list[str]:
    """The best mixed fleet in a line."""
    words = []
    for item in fleets[:1]:
        cost = "" if item.estimate is None else f", {_amount(item.estimate.usd)} in all"
        parts = " and ".join(
            f"{part.nodes} {'on spot' if part.offer.capacity_type == 'spot' else 'on demand'}"
            for part in item.allocation.parts
        )
        offer = item.allocation.offer
        words.append(
            f"mixed fleet: {parts} of {offer.instance_type} in {infra(offer)}, "
            f"${number(item.usd_per_hour, '.4f')}/h{cost}"
        )
    return words


def overheads_of(spec: EnvSpec) -> Overheads:
    """Seconds without training of a stage on rented machines."""
    every = spec.checkpoint.every.seconds if spec.checkpoint else None
    return Overheads(START_S, START_STDEV_S, CHECKPOINT_S if spec.checkpoint else 0.0, every)


def print_jobs(*, as_json: bool) -> None:
    """What ``--job`` takes."""
    if as_json:
        names = ("name", "title", "unit", "is_measured", "source")
        found = [{name: getattr(item, name) for name in names} for item in jobs().values()]
        echo_json({"jobs": found}, indent=1)
        return
    columns = ("JOB", "WHAT", "WORK IN", "SPEED", "SOURCE")
    lines = [
        (item.name, item.title, item.unit, "measured" if item.is_measured else "datasheet", item.source)
        for item in jobs().values()
    ]
    print_table(columns, lines)


def _unpriced(found: dict[tuple[str, str], list[str]]) -> list[str]:
    """What would do and has no price, and how to get one."""
    notes = []
    for (cloud, capacity), regions in found.items():
        some = ", ".join(region for region in regions[:3] if region) or "any region"
        more = f" and {len(regions) - 3} more" if len(regions) > 3 else ""
        text = f"{cloud} {capacity} in {some}{more} would do and has no known price, so it comes last"
        if cloud in price_sources():
            text += f": envscaler catalog refresh --cloud {cloud} --region {regions[0]}"
        notes.append(text)
    return notes


def _advice(made: Plan) -> list[str]:
    """Advice about the chosen machine, as an expert would give it."""
    if made.chosen is None:
        return []
    offer, notes = made.chosen.allocation.offer, []
    name = offer.instance_type
    if offer.gpus and offer.vcpus < LEAST_VCPUS * offer.gpus:
        size = f"{offer.vcpus:g} vCPUs and {offer.memory_gib:g} GiB for {offer.gpus} GPUs"
        notes.append(f"{name} has {size}: ask for cpu and memory if reading data takes more")
    cloud = all_clouds().get(offer.cloud)
    if cloud is not None and cloud.burstable is not None and cloud.burstable.match(name):
        notes.append(f"{name} has its full speed for a while only (burstable, or part of a core)")
    return notes


def _goal(options: dict[str, Any]) -> Goal:
    deadline_s = quantity("--deadline", duration_s, options["deadline"])
    if deadline_s == 0:
        raise SpecError("--deadline 0s: no time is left to plan for; write 4h")
    try:
        return Goal(options["strategy"], options["value_of_hour"], options["budget_usd"], deadline_s)
    except ValueError as err:
        raise SpecError(str(err)) from err


def plan_body(made: Plan, notes: list[str]) -> dict[str, Any]:
    """What tools read of a plan."""
    return {
        "chosen": candidate_body(made.chosen) if made.chosen else None,
        "candidates": [candidate_body(item) for item in made.candidates],
        "rejected": [rejected_body(item) for item in made.rejected],
        "fleets": [candidate_body(item) for item in made.fleets],
        "value_of_hour_usd": made.value_of_hour_usd,
        "notes": notes,
    }


def print_plan(made: Plan, notes: list[str]) -> None:
    """Print the table that users of SkyPilot and dstack know, and the notes."""
    lines = []
    first = (made.chosen,) if made.chosen is not None and made.chosen.allocation.is_mixed else ()
    for at, (item, count) in enumerate(places((*first, *made.candidates))[:SHOWN]):
        why = "" if made.chosen is None or at == 0 else _why_not(item, made.chosen)
        nodes = "" if item.allocation.nodes == 1 else f"{item.allocation.nodes} x "
        expected = item.estimate
        lines.append(
            [
                *offer_cells(item.allocation.offer, count - 1, nodes=nodes),
                f"{rest} of them" if (rest := item.allocation.rest_nodes) else spot(item.allocation.offer),
                number(item.usd_per_hour, ".4f"),
                "-" if expected is None else f"{expected.hours:.2f} h",
                "-" if expected is None else _amount(expected.usd),
                why,
                "" if at else "*",
            ]
        )
    for missed in made.rejected[: SHOWN // 2]:
        offer, price = missed.allocation.offer, number(missed.allocation.usd_per_hour, ".4f")
        lines.append([*offer_cells(offer, 0), spot(offer), price, "-", "-", missed.reason, ""])
    if lines:
        print_table(COLUMNS, lines)
    for note in notes:
        click.echo(f"note: {note}")


def _amount(usd: float | None) -> str:
    return "?" if usd is None else usd_text(usd)


def _why_not(item: Candidate, chosen: Candidate) -> str:
    """What it has against it beside the chosen one."""
    if item.usd_per_hour is None:
        return "price unknown"
    if not item.is_safe and chosen.is_safe:
        return "may miss deadline or budget"
    if item.estimate is not None and chosen.estimate is not None:
        later_h = item.estimate.hours - chosen.estimate.hours
        worth, best = item.estimate.objective, chosen.estimate.objective
        # If no offer is sure to meet the deadline, the sooner one was chosen, regardless of its cost.
        is_later = later_h > 0 and worth is not None and best is not None and worth <= best
        return f"+{later_h:.2f} h" if is_later else _dearer(worth, best, "")
    if item.estimate is None and chosen.estimate is not None:
        return "speed unknown"
    return _dearer(item.usd_per_hour, chosen.usd_per_hour, "/h")


def _dearer(value: float | None, least: float | None, unit: str) -> str:
    if value is None or least is None:
        return ""
    return f"+${value - least:.4f}{unit}" if value > least else "same, later by name"
