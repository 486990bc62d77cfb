"""Shadow prices: what a share of your own machine would cost in a cloud."""

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

    The nearest type has the smallest sum of |log2| ratios: of GPUs per node first, then of vCPUs and memory
    together. Ties go to the cheaper type, then to the first name.

    Args:
        vcpus: vCPUs of the whole machine, > 0.
        memory_gib: Memory of the whole machine, > 0.
        gpu_name: Canonical name; None without GPU.
        gpus: GPUs of the whole machine.
        arch: ``x86_64`` or ``arm64``; only types of the same architecture match.
    """

    def distance(offer: Offer) -> tuple[float, float, float, str]:
        by_gpus = abs(math.log2(offer.gpus / gpus)) if gpus else 0.0
        by_size = abs(math.log2(offer.vcpus / vcpus)) + abs(math.log2(offer.memory_gib / memory_gib))
        return (by_gpus, by_size, offer.usd_per_hour or 0.0, offer.name)

    fitting = [row.offer for row in price_rows() if row.arch == arch and row.offer.gpu_name == gpu_name]
    return min(fitting, key=distance, default=None)


def scaled_price(shadow: Offer, *, vcpus: float, gpus: int = 0) -> float | None:
    """USD per hour of a share: the type's price times its share of the GPUs, or without GPUs of the vCPUs."""
    if shadow.usd_per_hour is None:
        return None
    share = gpus / shadow.gpus if shadow.gpus else vcpus / shadow.vcpus
    return round(shadow.usd_per_hour * share, 6)
