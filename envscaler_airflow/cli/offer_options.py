"""Options and tables that ``plan`` and ``offers`` share."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import click

from envscaler_airflow.catalog.sources import cache_dir, has_live_prices, open_catalog, read_scope
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.envspec import gpus as gpu_names
from envscaler_airflow.envspec.quantities import cpu_cores, memory_bytes
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Candidate, Offer, Rejected
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.planning.market import Scope
from envscaler_airflow.planning.table import InstanceDetails, OfferTable, joined, table_of

OWN = "own"
"""Cloud of machines that one has."""

MOST_USD = 1e12
"""No machine costs more an hour. Chosen: the most that options of dollars take."""


def nodes_table(file: TextIO, prices: OfferTable, own: Sequence[str]) -> OfferTable:
    """The nodes of a cluster as offers."""
    from envscaler_airflow.catalog.nodes import keeps_off, node_offers, read_node  # noqa: PLC0415  (few look at a cluster)

    try:
        body = json.load(file)
        nodes = body["items"] if isinstance(body, dict) and "items" in body else [body]
        told = _own_prices(own)
        offers = node_offers(nodes, prices=prices, cluster_prices=told)
        known = {name for node in map(read_node, nodes) for name in (node.pool, node.instance_type) if name}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise SpecError(
            f"--nodes {file.name}: write the output of `kubectl get nodes -o json` ({err})"
        ) from err
    if not offers:
        reasons = Counter(reason for node in nodes if (reason := keeps_off(node)))
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "there is no node"
        raise SpecError(f"--nodes {file.name}: no node there takes pods of stages: {found}")
    known |= {offer.instance_type for offer in offers}
    if unknown := sorted(told.keys() - known - {"*"}):
        listed = ", ".join(sorted(known))
        raise SpecError(f"--node-price {unknown[0]}: no node there is of {unknown[0]}; there are {listed}")
    label = f"nodes of a cluster, unless given with the prices of: {prices.label}"
    return table_of(offers, label=label)


def own_offer(text: str) -> Offer:
    """A machine that one has: ``box,cpus=32,memory=128Gi,gpu=A100:2,usd=0.3``."""
    name, *more = text.split(",")
    given = dict(item.partition("=")[::2] for item in more)
    known = {"cpus", "memory", "gpu", "usd"}
    gpu, _, count = given.get("gpu", "").partition(":")
    is_whole = given.keys() <= known and {"cpus", "memory"} <= given.keys() and len(given) == len(more)
    is_whole = is_whole and ("gpu" not in given or bool(gpu))
    if not name or "=" in name or not is_whole or not re.fullmatch(r"[0-9]{0,3}", count):
        raise SpecError(f"--own {text!r}: write box,cpus=32,memory=128Gi,gpu=A100:2,usd=0")
    gpu_name = gpu_names.canonical(gpu) or gpu or None
    try:
        return Offer(
            cloud=OWN,
            region="",
            instance_type=name,
            capacity_type="on-demand",
            vcpus=cpu_cores(given["cpus"]),
            memory_gib=memory_bytes(given["memory"]) / 2**30,
            gpu_name=gpu_name,
            gpus=int(count or 1) if gpu_name else 0,
            gpu_memory_gb=gpu_names.MEMORY_GB.get(gpu_name or ""),
            usd_per_hour=_usd(given.get("usd", "0")),
            price_source="yours",
        )
    except ValueError as err:
        raise SpecError(f"--own {text!r}: {err}") from err


def _own_prices(texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, number_text = text.rpartition("=")
        try:
            usd = _usd(number_text)
        except ValueError:
            name = ""
        if not name:
            raise SpecError(f"--node-price {text!r}: write POOL=USD, such as gpu-pool=1.20")
        found[name] = usd
    return found


def _usd(text: str) -> float:
    usd = float(text)
    if not 0 <= usd <= MOST_USD:
        raise ValueError(f"usd {text}: write dollars an hour, 0 or more")
    return usd


_F = TypeVar("_F", bound=Callable[..., Any])

ARCHES = ("x86_64", "arm64", "any")
CAPACITIES = ("spot", "on-demand", "auto")

SHOWN_FAULTS = 3
"""Refused values of a table that are named. Chosen."""


class Readable(click.File):
    """A file, or - where there is a standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Open it."""
        if value == "-" and sys.stdin is None:
            self.fail("the standard input is closed; name a file", param, ctx)
        if isinstance(value, str) and value != "-" and not Path(value).exists():
            self.fail(f"{value!r}: no such file; `kubectl get nodes -o json > {value}` writes it", param, ctx)
        return super().convert(value, param, ctx)


def market_options(command: _F) -> _F:
    """Add options for what is on the market; the command gets ``table``, ``scope`` and ``committed``."""

    @click.option(
        "--offers",
        "offers_path",
        type=click.Path(path_type=Path),
        help="CSV tables of offers to plan with instead of the catalog, as an exercise.",
    )
    @click.option(
        "--scope", "scope_path", type=click.Path(path_type=Path), help="JSON file of regions by cloud."
    )
    @click.option("--clouds", help="Only use these clouds: aws,gcp.")
    @click.option(
        "--nodes",
        "nodes_file",
        type=Readable(encoding="utf-8"),
        help="Only use a cluster's nodes: `kubectl get nodes -o json`, a file or -.",
    )
    @click.option(
        "--node-price",
        "node_prices",
        multiple=True,
        metavar="POOL=USD",
        help="Your price of a node per hour, by pool, type or *; overrides the catalog's price.",
    )
    @click.option(
        "--own",
        "owned",
        multiple=True,
        metavar="NAME,cpus=N,memory=QTY[,gpu=TYPE:N][,usd=N]",
        help="Include your own machine; it costs nothing unless usd is given.",
    )
    @functools.wraps(command)
    def with_market(
        *args: Any,
        offers_path: Path | None,
        scope_path: Path | None,
        clouds: str | None,
        nodes_file: TextIO | None,
        node_prices: tuple[str, ...],
        owned: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        if node_prices and nodes_file is None:
            raise SpecError("--node-price says nothing without the nodes: add --nodes FILE")
        if offers_path is None and kwargs.get("store_url") is not None:
            _pull_prices(kwargs["store_url"])
        table = open_catalog(offers_path)
        if nodes_file is not None:
            table = nodes_table(nodes_file, table, node_prices)
        if owned:
            table = joined(table, table_of((own_offer(text) for text in owned), label="your own machines"))
        scope = read_scope(scope_path, _known_clouds(clouds, table))
        _check_scope(scope, scope_path, table)
        committed = _commitments if offers_path is None and nodes_file is None else lambda _: {}
        return command(*args, table=table, scope=scope, committed=committed, **kwargs)

    return cast("_F", with_market)


def _pull_prices(store_url: str) -> None:
    """Copy newer live prices from the run store, and print what is wrong with them."""
    from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (a plan without a store does without)
    from envscaler_airflow.catalog.shared_prices import pull  # noqa: PLC0415  (as above)
    from envscaler_airflow.store.run_store import open_store  # noqa: PLC0415  (as above)

    store = open_store(store_url)
    for fault in pull(store, PriceCache(cache_dir()), now=store.now()):
        click.echo(f"ignored: {fault}", err=True)


def _known_clouds(text: str | None, table: OfferTable) -> list[str] | None:
    """Names of ``--clouds``; None when all will do."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {cloud for cloud, _, _ in table.places}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SpecError(f"--clouds {', '.join(unknown) or repr(text)}: there are {', '.join(sorted(known))}")
    return names


def _check_scope(scope: Scope, path: Path | None, table: OfferTable) -> None:
    """Refuse a file that leaves no offer at all; an empty table has its own error."""
    if path is None or not table.places or any(scope.has(cloud, place) for cloud, place, _ in table.places):
        return
    known = sorted({cloud for cloud, _, _ in table.places})
    raise SpecError(
        f"{path}: no offer is in any of its regions; there are offers of {', '.join(known)}, and "
        "`envscaler offers --json` shows how their regions are written"
    )


Committed = Callable[[Iterable[Offer]], Mapping[str, Mapping[str, float]]]
"""USD an hour under a commitment, by offer name and term, where it is known."""


def _commitments(offers: Iterable[Offer]) -> Mapping[str, Mapping[str, float]]:
    folder = cache_dir()
    if not has_live_prices(folder):
        return {}
    from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (only who refreshed prices waits for it)

    return PriceCache(folder).commitments(offers)


def quantity(option: str, read: Callable[[str], float], text: str | None) -> float | None:
    """What an option says; None when it says nothing.

    Raises:
        SpecError: It cannot be read; says what to write.
    """
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as err:
        raise SpecError(f"{option}: {err}") from err


def fault_notes(faults: Sequence[str]) -> list[str]:
    """What was refused of a table, the first of many."""
    more = [] if len(faults) <= SHOWN_FAULTS else [f"and {len(faults) - SHOWN_FAULTS} more lines like that"]
    return [f"refused: {fault}" for fault in faults[:SHOWN_FAULTS]] + more


def offer_body(offer: Offer) -> dict[str, Any]:
    """What tools read of an offer."""
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zone": offer.zone,
        "instance_type": offer.instance_type,
        "capacity_type": offer.capacity_type,
        "vcpus": offer.vcpus,
        "memory_gib": offer.memory_gib,
        "arch": offer.arch,
        "accelerators": {offer.gpu_name: offer.gpus} if offer.gpu_name else None,
        "gpu_memory_gb": offer.gpu_memory_gb,
        "usd_per_node_hour": offer.usd_per_hour,
        "price_source": offer.price_source,
    }


def machine_body(machine: InstanceDetails | None) -> dict[str, Any]:
    """What else is published of an instance type; null is unknown."""
    known = machine or InstanceDetails()
    return {
        "network_gbps": known.network_gbps,
        "network_peak_gbps": known.network_peak_gbps,
        "local_disk_gb": known.local_disk_gb,
        "processor": known.processor,
        "facts_source": known.source or None,
    }


def billing_body(cloud: str) -> dict[str, Any]:
    """What a cloud rounds time up to; null where that is unknown."""
    known = tariffs().get(cloud, UNKNOWN_TARIFF).billing
    return {
        "billing_unit_s": None if known is None else known.unit_s,
        "billing_minimum_s": None if known is None else known.minimum_s,
    }


def candidate_body(item: Candidate) -> dict[str, Any]:
    """What tools read of a candidate."""
    expected, rest = item.estimate, item.allocation.rest
    mixed = {"rest": offer_body(rest), "rest_nodes": item.allocation.rest_nodes} if rest else {}
    return {
        **offer_body(item.allocation.offer),
        **mixed,
        "name": item.allocation.name,
        "nodes": item.allocation.nodes,
        "usd_per_hour": item.usd_per_hour,
        "expected_time_h": expected and expected.hours,
        "expected_time_h_low": expected and expected.hours_low,
        "expected_time_h_high": expected and expected.hours_high,
        "expected_cost_usd": expected and expected.usd,
        "expected_cost_usd_low": expected and expected.usd_low,
        "expected_cost_usd_high": expected and expected.usd_high,
        "data_usd": expected and expected.data_usd,
        "disk_usd": expected and expected.disk_usd,
        "speed": item.speed and item.speed.mean,
        "speed_source": item.speed and item.speed.source,
        "is_safe": item.is_safe,
    }


def rejected_body(item: Rejected) -> dict[str, Any]:
    """What tools read of an allocation that will not do."""
    return {
        **offer_body(item.allocation.offer),
        "name": item.allocation.name,
        "nodes": item.allocation.nodes,
        "usd_per_hour": item.allocation.usd_per_hour,
        "reason": item.reason,
        "misses": [{"need": miss.need, "reason": miss.reason} for miss in item.misfits],
    }


def places(items: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
    """Neighbours that differ in place alone as one: the first of them, and how many there are."""

    def key(item: Candidate) -> tuple[object, ...]:
        offer = item.allocation.offer
        nodes = (item.allocation.nodes, item.allocation.rest_nodes)
        kind = (offer.cloud, offer.instance_type, offer.capacity_type, offer.gpus)
        return (*kind, *nodes, item.usd_per_hour, item.estimate)

    found: dict[tuple[object, ...], list[Candidate]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return [(same[0], len(same)) for same in found.values()]


def infra(offer: Offer, others: int = 0) -> str:
    """``aws/us-east-1/us-east-1a (+5)``."""
    place = "/".join(part for part in (offer.cloud, offer.region, offer.zone) if part)
    return f"{place} (+{others})" if others else place


def accelerators(offer: Offer) -> str:
    """``A100:8``, ``-`` without."""
    return f"{offer.gpu_name}:{offer.gpus}" if offer.gpu_name else "-"


def spot(offer: Offer) -> str:
    """``yes`` for a spot offer, ``-`` for others."""
    return "yes" if offer.capacity_type == "spot" else "-"


def offer_cells(offer: Offer, others: int, *, nodes: str = "") -> list[str]:
    """Place, type, size and GPUs of an offer as a table shows them."""
    size = (f"{offer.vcpus:g}", f"{offer.memory_gib:g}", accelerators(offer))
    return [infra(offer, others), nodes + offer.instance_type, *size]
