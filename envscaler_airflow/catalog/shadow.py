"""Shadow prices: what a slice of a machine of one's own would cost in a cloud."""

from __future__ import annotations

import math

from envscaler_airflow.catalog.tables import price_rows
from envscaler_airflow.planning.offers import Offer


def shadow_offer(
    vcpus: float,
    memory_gib: float,
    *,
    gpu_name: str | None = None,
    gpus: int = 0,
    arch: str = "x86_64",
) -> Offer | None:
    """The published on-demand type nearest to a machine; None when no type has its GPU.

    Nearest is the least sum of |log2| ratios: of GPUs per node first, then of vCPUs and memory
    together. Equal distances go to the cheaper, then to the first name.

    Args:
        vcpus: Of the whole machine, > 0.
        memory_gib: Of the whole machine, > 0.
        gpu_name: Canonical name; None without GPU.
        gpus: GPUs of the whole machine.
        arch: ``x86_64`` or ``arm64``; types of the same one only.
    """

    def distance(offer: Offer) -> tuple[float, float, float, str]:
        by_gpus = abs(math.log2(offer.gpus / gpus)) if gpus else 0.0
        by_size = abs(math.log2(offer.vcpus / vcpus)) + abs(math.log2(offer.memory_gib / memory_gib))
        return (by_gpus, by_size, offer.usd_per_hour or 0.0, offer.name)

    fitting = [row.offer for row in price_rows() if row.arch == arch and row.offer.gpu_name == gpu_name]
    return min(fitting, key=distance, default=None)


def scaled_price(shadow: Offer, *, vcpus: float, gpus: int = 0) -> float | None:
    """USD per hour of a slice: the type's price times the slice's share of its GPUs, else of its vCPUs."""
    if shadow.usd_per_hour is None:
        return None
    share = gpus / shadow.gpus if shadow.gpus else vcpus / shadow.vcpus
    return round(shadow.usd_per_hour * share, 6)
