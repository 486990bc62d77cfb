"""Packaged price tables, read once."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from envscaler_airflow.planning.offers import Offer

PRICES_AS_OF = "2026-07-20"
"""Date of the packaged list prices; the table's first lines name the source and its licence."""

_TABLE = "aws-us-east-1.csv"
_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class PriceRow:
    """A published on-demand price.

    Attributes:
        offer: One node of it, with price and source.
        arch: ``x86_64`` or ``arm64``.
    """

    offer: Offer
    arch: str


@cache
def price_rows() -> tuple[PriceRow, ...]:
    """Every row of the packaged table, in its order."""
    text = resources.files("envscaler_airflow.catalog").joinpath(_TABLE).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(_row(cells) for cells in csv.DictReader(lines))


def _row(cells: dict[str, str]) -> PriceRow:
    gpu_memory = cells["gpu_memory_gb"]
    offer = Offer(
        cloud="aws",
        region=_REGION,
        instance_type=cells["instance_type"],
        capacity_type="on-demand",
        vcpus=float(cells["vcpus"]),
        memory_gib=float(cells["memory_gib"]),
        gpu_name=cells["gpu_name"] or None,
        gpus=int(cells["gpus"] or 0),
        gpu_memory_gb=float(gpu_memory) if gpu_memory else None,
        usd_per_hour=float(cells["usd_per_hour"]),
        price_source=f"list price of {PRICES_AS_OF}",
    )
    return PriceRow(offer, cells["arch"])
