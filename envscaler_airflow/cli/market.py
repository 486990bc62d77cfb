"""Options and tables that ``plan`` and ``offers`` share."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from envscaler_airflow.catalog.sources import cache_dir, open_catalog, read_scope
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Candidate, Offer, Rejected
from envscaler_airflow.planning.billing import BILLING
from envscaler_airflow.planning.table import Machine, OfferTable, joined, table_of
from envscaler_airflow.spec import gpus as gpu_names
from envscaler_airflow.spec.quantities import cpu_cores, memory_bytes

_F = TypeVar("_F", bound=Callable[..., Any])

ARCHES = ("x86_64", "arm64", "any")
CAPACITIES = ("spot", "on-demand", "auto")
OWN = "own"
"""Cloud of machines that one has."""


def market_options(command: _F) -> _F:
    """Add ``--offers``, ``--scope``, ``--clouds``; the command gets ``table, scope, committed``."""

    @click.option(
        "--offers",
        "offers_path",
        type=click.Path(path_type=Path),
        help="Tables of offers (CSV) to plan on instead of the catalog, for exercise.",
    )
    @click.option(
        "--scope", "scope_path", type=click.Path(path_type=Path), help="JSON file of regions by cloud."
    )
    @click.option("--clouds", help="Look at these clouds alone: aws,gcp.")
    @click.option(
        "--nodes",
        "nodes_file",
        type=click.File(encoding="utf-8"),
        help="Look at a cluster's nodes alone: `kubectl get nodes -o json`, a file or -.",
    )
    @click.option(
        "--node-price",
        "node_prices",
        multiple=True,
        metavar="POOL=USD",
        help="What a node costs you an hour, by pool, type or *; before the catalog's price.",
    )
    @click.option(
        "--own",
        "owned",
        multiple=True,
        metavar="NAME,cpus=N,memory=QTY[,gpu=TYPE:N][,usd=N]",
        help="A machine of your own among the others; it costs nothing unless told.",
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
        table = open_catalog(offers_path)
        if nodes_file is not None:
            table = _nodes_table(nodes_file, table, node_prices)
        if owned:
            table = joined(table, table_of((_own(text) for text in owned), label="your own machines"))
        names = None if clouds is None else [name.strip() for name in clouds.split(",") if name.strip()]
        known = {cloud for cloud, _, _ in table.places}
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise SpecError(f"--clouds {', '.join(unknown)}: there are {', '.join(sorted(known))}")
        scope = read_scope(scope_path, names)
        committed = _commitments if offers_path is None and nodes_file is None else _no_commitments
        return command(*args, table=table, scope=scope, committed=committed, **kwargs)

    return with_market  # type: ignore[return-value]  # click's decorators keep the command's own type


def _nodes_table(file: TextIO, prices: OfferTable, own: Sequence[str]) -> OfferTable:
    """The nodes of a cluster as offers."""
    from envscaler_airflow.catalog.kubernetes import node_pools  # noqa: PLC0415  (few look at a cluster)

    try:
        body = json.load(file)
        nodes = body["items"] if isinstance(body, dict) and "items" in body else [body]
        pools = node_pools(nodes, prices=prices, cluster_prices=_own_prices(own))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise SpecError(
            f"--nodes {file.name}: write the output of `kubectl get nodes -o json` ({err})"
        ) from err
    if not pools:
        raise SpecError(f"--nodes {file.name}: no node there is ready and lets pods in")
    label = f"nodes of a cluster, unless told at the prices of: {prices.label}"
    return table_of((pool.offer for pool in pools), label=label)


def _own(text: str) -> Offer:
    """A machine that one has: ``box,cpus=32,memory=128Gi,gpu=A100:2,usd=0.3``."""
    name, *more = text.split(",")
    given = dict(item.partition("=")[::2] for item in more)
    known = {"cpus", "memory", "gpu", "usd"}
    if not name or "=" in name or not given.keys() <= known or not {"cpus", "memory"} <= given.keys():
        raise SpecError(f"--own {text!r}: write box,cpus=32,memory=128Gi,gpu=A100:2,usd=0")
    gpu, _, count = given.get("gpu", "").partition(":")
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
            usd_per_hour=float(given.get("usd", "0")),
            price_source="yours",
        )
    except ValueError as err:
        raise SpecError(f"--own {text!r}: {err}") from err


def _own_prices(texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, number_text = text.rpartition("=")
        try:
            usd = float(number_text)
        except ValueError:
            usd = -1.0
        if not name or not 0 <= usd < math.inf:
            raise SpecError(f"--node-price {text!r}: write POOL=USD, such as gpu-pool=1.20")
        found[name] = usd
    return found


Committed = Callable[[Iterable[Offer]], Mapping[str, Mapping[str, float]]]
"""USD an hour under a commitment, by offer name and term, where it is known."""


def _commitments(offers: Iterable[Offer]) -> Mapping[str, Mapping[str, float]]:
    folder = cache_dir()
    if not (folder / "catalog.json").exists():
        return {}
    from envscaler_airflow.catalog.shelf import Shelf  # noqa: PLC0415  (only who refreshed prices waits for it)

    return Shelf(folder).commitments(offers)


def _no_commitments(_: Iterable[Offer]) -> Mapping[str, Mapping[str, float]]:
    """Tables of one's own have none."""
    return {}


def quantity(option: str, read: Callable[[str], float], text: str | None) -> float | None:
    """What an option says; None when it says nothing.

    Raises:
        SpecError: It cannot be read; says what to write.
    """
    if not text:
        return None
    try:
        return read(text)
    except ValueError as err:
        raise SpecError(f"{option}: {err}") from err


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


def machine_body(machine: Machine | None) -> dict[str, Any]:
    """What else is published of an instance type; null is unknown."""
    known = machine or Machine()
    return {
        "network_gbps": known.network_gbps,
        "network_peak_gbps": known.network_peak_gbps,
        "local_disk_gb": known.local_disk_gb,
        "processor": known.processor,
        "facts_source": known.source or None,
    }


def billing_body(cloud: str) -> dict[str, Any]:
    """What a cloud rounds time up to; null where that is unknown."""
    known = BILLING.get(cloud)
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
        return (
            offer.cloud,
            offer.instance_type,
            offer.capacity_type,
            offer.gpus,
            item.allocation.nodes,
            item.allocation.rest_nodes,
            item.usd_per_hour,
            item.estimate,
        )

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


def number(value: float | None, form: str) -> str:
    """``?`` for what is unknown."""
    return "?" if value is None else format(value, form)


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """As wide as its contents, so that nothing is cut when it is piped."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    for line in itertools.chain([columns], lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo(text.rstrip())
