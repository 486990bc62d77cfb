"""``offers``: what is for sale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from envscaler_airflow.cli.common import output_option
from envscaler_airflow.cli.market import (
    ARCHES,
    CAPACITIES,
    Committed,
    accelerators,
    billing_body,
    fault_notes,
    infra,
    machine_body,
    market_options,
    number,
    offer_body,
    places,
    print_table,
    quantity,
)
from envscaler_airflow.envspec import gpus as gpu_names
from envscaler_airflow.envspec.quantities import cpu_cores, gpu_memory_gb, memory_bytes
from envscaler_airflow.envspec.resources import GIB
from envscaler_airflow.errors import NoOfferError, SpecError
from envscaler_airflow.planning import Offer, Requirements
from envscaler_airflow.planning.market import Scope, Search, search
from envscaler_airflow.planning.near_misses import unknown_gpus
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import OfferTable

COLUMNS = ("INFRA", "INSTANCE", "vCPUs", "MEM", "GPUs", "GPU MEM", "SPOT", "$/h", "PRICE FROM")
_SIZES = ("gpu", "count", "gpu_memory", "cpus", "memory")
NEARLY = 0.9
"""A machine with so much of another's vCPUs and memory stands in for it. Chosen."""


@click.command("offers")
@click.option("--gpu", help="GPU type, such as H100.")
@click.option("--count", type=click.IntRange(1, 64), help="Minimum number of GPUs per machine.")
@click.option("--gpu-memory", help="Minimum memory of one GPU, such as 80GB.")
@click.option("--cpus", help="Minimum number of CPUs.")
@click.option("--memory", help="Minimum memory, such as 64Gi.")
@click.option("--capacity", default="auto", type=click.Choice(CAPACITIES))
@click.option("--arch", default="any", type=click.Choice(ARCHES))
@click.option("--like", metavar="CLOUD:TYPE", help="List equivalents of this type on other clouds.")
@click.option("--limit", default=25, type=click.IntRange(1, 100_000), help="Maximum number of types to list.")
@output_option
@market_options
def offers_command(
    *, table: OfferTable, scope: Scope, committed: Committed, limit: int, as_json: bool, **asked: Any
) -> None:
    """List offers by price, with place, size, market and the source of the price."""
    need = _need(asked) if asked["like"] is None else _like(table, asked)
    found = search(need, table, how=Search(scope=scope, limit=limit * 8, explain=False))
    if found.chosen is None:
        for note in unknown_gpus((need,), table):
            raise NoOfferError(note)
        for note in fault_notes(table.faults):
            click.echo(f"note: {note}", err=True)
        found.pick()
    if as_json:
        offers = [item.allocation.offer for item in found.candidates[:limit]]
        terms = committed(offers)
        bodies = [_body(offer, table, terms.get(offer.name, {})) for offer in offers]
        click.echo(
            json.dumps({"offers": bodies, "label": table.label, "notes": fault_notes(table.faults)}, indent=1)
        )
        return
    lines = []
    for item, count in places(found.candidates)[:limit]:
        offer = item.allocation.offer
        memory = "-" if offer.gpu_name is None else number(offer.gpu_memory_gb, "g")
        lines.append(
            [
                infra(offer, count - 1),
                offer.instance_type,
                f"{offer.vcpus:g}",
                f"{offer.memory_gib:g}",
                accelerators(offer),
                memory,
                "yes" if offer.capacity_type == "spot" else "-",
                number(offer.usd_per_hour, ".4f"),
                offer.price_source,
            ]
        )
    print_table(COLUMNS, lines)
    for note in (f"prices: {table.label}", *fault_notes(table.faults)):
        click.echo(f"note: {note}")


def _body(offer: Offer, table: OfferTable, terms: Mapping[str, float]) -> dict[str, Any]:
    """An offer with all that is known of its type, of how its cloud bills and of commitments."""
    machine = table.machines.get((offer.cloud, offer.instance_type))
    return {
        **offer_body(offer),
        **machine_body(machine),
        **billing_body(offer.cloud),
        "interruption_range": table.range_of(offer),
        "committed_usd_per_node_hour": dict(terms),
    }


def _need(asked: dict[str, Any]) -> Requirements:
    memory_gb = quantity("--gpu-memory", gpu_memory_gb, asked["gpu_memory"])
    types: tuple[str, ...] = ()
    if asked["gpu"] is not None:
        try:
            types = gpu_names.resolve(asked["gpu"], memory_gb)
        except ValueError as err:
            raise SpecError(f"--gpu: {err}") from err
    has_gpu = bool(types) or memory_gb is not None or asked["count"] is not None
    return Requirements(
        vcpus=quantity("--cpus", cpu_cores, asked["cpus"]) or 0.0,
        memory_gib=(quantity("--memory", memory_bytes, asked["memory"]) or 0.0) / GIB,
        gpus=(asked["count"] or 1) if has_gpu else 0,
        gpu_types=types,
        gpu_memory_gb=memory_gb,
        capacity=asked["capacity"],
        arch=None if asked["arch"] == "any" else asked["arch"],
    )


def _like(table: OfferTable, asked: dict[str, Any]) -> Requirements:
    also = [f"--{name.replace('_', '-')}" for name in _SIZES if asked[name] is not None]
    if also or asked["arch"] != "any":
        raise SpecError(f"--like says what is needed: leave out {', '.join(also) or '--arch'}")
    cloud, _, name = str(asked["like"]).partition(":")
    kinds = [kind for kind in table.kinds if (kind.cloud, kind.instance_type) == (cloud, name)]
    if not kinds:
        raise SpecError(f"--like {asked['like']}: no such type in the catalog; write aws:g5.12xlarge")
    return stand_in(kinds[0], table, capacity=asked["capacity"])


def stand_in(kind: InstanceType, table: OfferTable, **more: Any) -> Requirements:
    """What another machine must have to stand in for *kind*.

    The same GPU where another cloud has it, else as much memory on each of as many GPUs; nearly as many
    vCPUs and nearly as much memory.
    """
    has_gpu = kind.gpu_name is not None and kind.gpus >= 1
    same = has_gpu and any(
        table.kinds[item].cloud != kind.cloud for item in table.of_gpu(kind.gpu_name or "")
    )
    return Requirements(
        vcpus=NEARLY * kind.vcpus,
        memory_gib=NEARLY * kind.memory_gib,
        gpus=int(kind.gpus),
        gpu_types=(kind.gpu_name,) if same and kind.gpu_name else (),
        gpu_memory_gb=kind.gpu_memory_gb if has_gpu and not same else None,
        arch=kind.arch,
        **more,
    )
