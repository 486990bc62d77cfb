"""Machines that are not rented: nodes of a cluster, and those that one has."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Offer
from envscaler_airflow.planning.table import OfferTable, table_of
from envscaler_airflow.spec import gpus as gpu_names
from envscaler_airflow.spec.quantities import cpu_cores, memory_bytes

OWN = "own"
"""Cloud of machines that one has."""

MOST_USD = 1e12
"""No machine costs more an hour. Chosen: the most that options of dollars take."""


def nodes_table(file: TextIO, prices: OfferTable, own: Sequence[str]) -> OfferTable:
    """The nodes of a cluster as offers."""
    from envscaler_airflow.catalog.kubernetes import keeps_off, node_pools, read_node  # noqa: PLC0415  (few look at a cluster)

    try:
        body = json.load(file)
        nodes = body["items"] if isinstance(body, dict) and "items" in body else [body]
        told = _own_prices(own)
        pools = node_pools(nodes, prices=prices, cluster_prices=told)
        known = {name for node in map(read_node, nodes) for name in (node.pool, node.instance_type) if name}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise SpecError(
            f"--nodes {file.name}: write the output of `kubectl get nodes -o json` ({err})"
        ) from err
    if not pools:
        reasons = Counter(reason for node in nodes if (reason := keeps_off(node)))
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "there is no node"
        raise SpecError(f"--nodes {file.name}: no node there takes pods of stages: {found}")
    known |= {pool.offer.instance_type for pool in pools}
    if unknown := sorted(told.keys() - known - {"*"}):
        listed = ", ".join(sorted(known))
        raise SpecError(f"--node-price {unknown[0]}: no node there is of {unknown[0]}; there are {listed}")
    label = f"nodes of a cluster, unless told at the prices of: {prices.label}"
    return table_of((pool.offer for pool in pools), label=label)


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
