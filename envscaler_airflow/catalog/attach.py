"""GCP's N1 machines with GPUs that are attached to them: hosts and GPUs have prices of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from envscaler_airflow.planning.table import Kind, Row

MOST: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "T4": {1: (48, 312), 2: (48, 312), 4: (96, 624)},
    "P4": {1: (24, 156), 2: (48, 312), 4: (96, 624)},
    "V100": {1: (12, 78), 2: (24, 156), 4: (48, 312), 8: (96, 624)},
    "P100": {1: (16, 104), 2: (32, 208), 4: (64, 208)},
}
"""Most vCPUs and GiB of an N1 host by GPU and count.

Source: cloud.google.com/compute/docs/gpus, "N1 machine types with GPUs attached" (recalled; four P100
with 96 vCPUs exist in two zones only and are left out).
"""


class AttachedGpu(NamedTuple):
    """GPUs of a zone, without a host."""

    gpu_name: str
    gpus: int
    gpu_memory_gb: float | None
    row: Row


def compose(hosts: Mapping[Kind, Iterable[Row]], gpus: Iterable[AttachedGpu]) -> dict[Kind, list[Row]]:
    """Every N1 host with the GPUs that may be attached to it, in the zones that have both.

    A price is known when both parts are. Spot needs a spot price of both.
    """
    by_zone: dict[str, list[tuple[Kind, Row]]] = {}
    for kind, rows in hosts.items():
        if kind.cloud == "gcp" and kind.instance_type.startswith("n1-") and kind.gpu_name is None:
            for row in rows:
                by_zone.setdefault(row.zone, []).append((kind, row))
    made: dict[Kind, list[Row]] = {}
    for gpu in gpus:
        vcpus, memory_gib = MOST.get(gpu.gpu_name, {}).get(gpu.gpus, (0.0, 0.0))
        for host, row in by_zone.get(gpu.row.zone, ()):
            if host.vcpus <= vcpus and host.memory_gib <= memory_gib:
                kind = host._replace(
                    gpu_name=gpu.gpu_name,
                    gpus=float(gpu.gpus),
                    gpu_memory_gb=gpu.gpu_memory_gb,
                    is_attached=True,
                )
                made.setdefault(kind, []).append(_joined(row, gpu.row))
    return made


def _joined(host: Row, gpu: Row) -> Row:
    return host._replace(
        usd=_sum(host.usd, gpu.usd),
        spot_usd=_sum(host.spot_usd, gpu.spot_usd),
        has_spot=host.has_spot and gpu.has_spot,
        source=f"{host.source} + {gpu.source}",
        spot_source=f"{host.spot_source} + {gpu.spot_source}",
    )


def _sum(host: float | None, gpu: float | None) -> float | None:
    return None if host is None or gpu is None else round(host + gpu, 9)
