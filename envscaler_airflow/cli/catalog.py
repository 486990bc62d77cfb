"""``offers``, what is available; ``catalog``, its live prices and how old they are."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from envscaler_airflow.catalog.packaged import packaged
from envscaler_airflow.catalog.prices import PriceCache
from envscaler_airflow.catalog.shared_prices import publish
from envscaler_airflow.catalog.sources import cache_dir
from envscaler_airflow.cli.common import echo_json, output_option
from envscaler_airflow.cli.offer_options import (
    ARCHES,
    CAPACITIES,
    Committed,
    billing_body,
    fault_notes,
    machine_body,
    market_options,
    offer_body,
    offer_cells,
    places,
    quantity,
    spot,
)
from envscaler_airflow.cli.tables import number, print_table
from envscaler_airflow.clouds import Access, PriceFeed, price_sources
from envscaler_airflow.envspec import gpus as gpu_names
from envscaler_airflow.envspec.quantities import cpu_cores, gpu_memory_gb, memory_bytes
from envscaler_airflow.envspec.resources import GIB
from envscaler_airflow.errors import BackendError, NoOfferError, SpecError
from envscaler_airflow.planning import Offer, Requirements
from envscaler_airflow.planning.market import Scope, Search, search
from envscaler_airflow.planning.near_misses import unknown_gpus
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import OfferTable
from envscaler_airflow.store.run_store import open_store


@click.group()
def catalog() -> None:
    """Look after the prices that plans are made with."""


@catalog.command()
@click.option(
    "--cloud",
    "clouds",
    multiple=True,
    type=click.Choice(list(price_sources())),
    help="All of them when not given.",
)
@click.option("--region", "regions", multiple=True, help="Every region of the catalog by default.")
@click.option("--endpoint-url", help="Of a stand-in for the cloud's API.")
@click.option("--accept-outliers", is_flag=True, help="Use the outliers that are in quarantine.")
@click.option("--store", "store_url", help="Run store; share the prices with its workers and shells.")
@output_option
def refresh(
    clouds: tuple[str, ...],
    regions: tuple[str, ...],
    *,
    endpoint_url: str | None,
    accept_outliers: bool,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Fetch current prices; a cloud that fails keeps its last good ones. Exit 2 if any failed."""
    cache = PriceCache(cache_dir())
    failed: list[str] = []
    asked = _asked(clouds, regions)
    for place, (cloud, its_regions) in enumerate(asked.items()):
        if place:
            cache.compile()  # what is known counts, should the next cloud never answer
        try:
            failed += _refresh(
                cache,
                cloud,
                its_regions,
                endpoint_url=endpoint_url,
                accept_outliers=accept_outliers,
                is_quiet=as_json,
            )
        except SpecError as err:  # it lacks a key or an SDK: the other clouds need neither
            failed.append(str(err))
    table = cache.compile()
    if store_url is not None:
        store = open_store(store_url)
        for price_list in cache.price_lists():
            publish(store, price_list)
    if as_json:
        price_lists = [one.to_dict() for one in cache.price_lists()]
        sizes = {"rows": len(table), "types": len(table.kinds), "folder": str(cache.folder)}
        echo_json({**sizes, "failed": failed, "price_lists": price_lists})
    else:
        click.echo(f"catalog: {len(table)} rows of {len(table.kinds)} types in {cache.folder}")
    if failed:
        raise BackendError("; ".join(failed))


def _refresh(
    cache: PriceCache,
    cloud: str,
    regions: Sequence[str],
    *,
    endpoint_url: str | None,
    accept_outliers: bool,
    is_quiet: bool,
) -> list[str]:
    """Refresh a cloud's price lists and print the results; returns the failures."""
    failed = []
    feed = open_feed(cloud, endpoint_url=endpoint_url)
    for place, region in enumerate(regions):
        if place:
            cache.compile()  # what is known counts, should the next region never come
        price_list = cache.refresh(feed, region, clock=time.time, trust_outliers=accept_outliers)
        click.echo(f"{price_list.words(time.time())}: {len(price_list.prices)} prices", err=is_quiet)
        for note in price_list.notes:
            click.echo(f"  {note}", err=is_quiet)
        if price_list.error is not None:
            failed.append(f"{cloud} {region}: {price_list.error}")
    return failed


@catalog.command()
@output_option
def show(*, as_json: bool) -> None:
    """List the live prices that are kept: how old, what failed, what is in quarantine."""
    now = time.time()
    price_lists = PriceCache(cache_dir()).price_lists()
    if as_json:
        echo_json([{"age_s": one.at and now - one.at, **one.to_dict()} for one in price_lists])
        return
    click.echo(f"snapshot: {packaged().label}")
    for price_list in price_lists:
        click.echo(f"{price_list.words(now)}: {len(price_list.prices)} prices")
        for key, usd in sorted(price_list.quarantined.items()):
            last = price_list.prices.get(key)
            before = "the snapshot's" if last is None else f"{last.usd:g}"
            click.echo(f"  {key}: {usd:g} instead of {before}")


def _asked(clouds: Sequence[str], regions: Sequence[str]) -> dict[str, list[str]]:
    """Regions to refresh, by cloud; of several clouds each takes those that it has.

    A cloud that is named alone accepts any region: it may have opened one since the snapshot.

    Raises:
        SpecError: A region does not exist.
    """
    places, lists = packaged().places, price_sources()
    known = {
        cloud: {region for one, region, _ in places if one == cloud} or set(lists[cloud].regions)
        for cloud in clouds or lists
    }
    if not regions:
        return {cloud: sorted(has) for cloud, has in known.items()}
    anywhere = set().union(*known.values())
    for region in regions:
        if not re.fullmatch(r"[a-z0-9-]+", region) or (len(known) > 1 and region not in anywhere):
            near = difflib.get_close_matches(region, anywhere, n=1)
            hint = f"did you mean {near[0]}?" if near else "write one such as us-east-1"
            raise SpecError(f"--region {region!r}: no such region of {', '.join(known)}; {hint}")
    if len(known) == 1:
        return {cloud: list(dict.fromkeys(regions)) for cloud in known}
    found = {
        cloud: [region for region in dict.fromkeys(regions) if region in known[cloud]] for cloud in known
    }
    return {cloud: its_own for cloud, its_own in found.items() if its_own}


def open_feed(cloud: str, *, endpoint_url: str | None = None) -> PriceFeed:
    """The feed of a cloud with this shell's credentials: its identity, ``ENVSCALER_<CLOUD>_API_KEY``.

    Raises:
        SpecError: The cloud needs more than that.
    """
    key = os.environ.get(f"ENVSCALER_{cloud.upper()}_API_KEY")
    return price_sources()[cloud].open(Access(secret=key, endpoint_url=endpoint_url))


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
        echo_json({"offers": bodies, "label": table.label, "notes": fault_notes(table.faults)}, indent=1)
        return
    lines = []
    for item, count in places(found.candidates)[:limit]:
        offer = item.allocation.offer
        memory = "-" if offer.gpu_name is None else number(offer.gpu_memory_gb, "g")
        price = (number(offer.usd_per_hour, ".4f"), offer.price_source)
        lines.append([*offer_cells(offer, count - 1), memory, spot(offer), *price])
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
