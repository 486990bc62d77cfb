"""``catalog refresh`` and ``catalog show``: live prices, and how old they are."""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Sequence

import click

from envscaler_airflow.catalog.packaged import packaged
from envscaler_airflow.catalog.prices import PriceCache
from envscaler_airflow.catalog.sources import cache_dir
from envscaler_airflow.cli.common import output_option
from envscaler_airflow.clouds import Access, price_sources
from envscaler_airflow.clouds.base import PriceFeed
from envscaler_airflow.errors import BackendError, SpecError


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
@click.option("--region", "regions", multiple=True, help="All that the catalog knows when not given.")
@click.option("--endpoint-url", help="Of a stand-in for the cloud's API.")
@click.option("--accept-outliers", is_flag=True, help="Use the outliers that are in quarantine.")
@output_option
def refresh(
    clouds: tuple[str, ...],
    regions: tuple[str, ...],
    *,
    endpoint_url: str | None,
    accept_outliers: bool,
    as_json: bool,
) -> None:
    """Ask clouds for their prices of today; what fails keeps its last good ones. Exit 2 if any failed."""
    cache = PriceCache(cache_dir())
    failed: list[str] = []
    asked = _asked(clouds, regions)
    for cloud, its_regions in asked.items():
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
    if as_json:
        price_lists = [one.to_dict() for one in cache.price_lists()]
        sizes = {"rows": len(table), "types": len(table.kinds), "folder": str(cache.folder)}
        click.echo(json.dumps({**sizes, "failed": failed, "price_lists": price_lists}))
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
    """Refresh a cloud's price lists, and say how; returns what failed."""
    failed = []
    feed = open_feed(cloud, endpoint_url=endpoint_url)
    for region in regions:
        price_list = cache.refresh(feed, region, clock=time.time, trust_outliers=accept_outliers)
        cache.compile()  # what is known counts, should the next region never come
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
        click.echo(json.dumps([{"age_s": one.at and now - one.at, **one.to_dict()} for one in price_lists]))
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

    A cloud that is named alone is asked for any region: it may have opened one since the snapshot.

    Raises:
        SpecError: A region is none.
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
