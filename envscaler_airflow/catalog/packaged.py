"""What the package carries: offers and prices, shadow prices from them, facts of GPUs and common jobs."""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path

from envscaler_airflow.errors import SpecError
from envscaler_airflow.local_files import read_table
from envscaler_airflow.planning.jobs import Job
from envscaler_airflow.planning.offers import InstanceType, Offer
from envscaler_airflow.planning.table import InstanceDetails, OfferTable
from envscaler_airflow.planning.throughput import Gpu

_FOLDER = Path(__file__).parent
MAGIC = b"ESOFFER4"
SNAPSHOT = "offers.bin"
_COLUMNS = {
    "starts": "I",
    "ends": "I",
    "place": "I",
    "usd": "d",
    "spot_usd": "d",
    "risk": "B",
    "source": "I",
    "spot_source": "I",
    "spot_rows": "I",
    "spot_starts": "I",
}


def pack(table: OfferTable) -> bytes:
    """Serialize *table*: magic, length of the head, head (JSON), columns (little-endian), compressed."""
    columns = {name: _little(getattr(table, name)) for name in _COLUMNS}
    head = {
        "kinds": [list(kind) for kind in table.kinds],
        "places": [list(place) for place in table.places],
        "sources": list(table.sources),
        "label": table.label,
        "faults": list(table.faults),
        "machines": [[*key, *machine] for key, machine in sorted(table.machines.items())],
        "sizes": {name: len(data) for name, data in columns.items()},
    }
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    body = b"".join(columns.values())
    return MAGIC + zlib.compress(len(text).to_bytes(4, "little") + text + body, level=9)


def unpack(data: bytes, *, name: str = "catalog") -> OfferTable:
    """Read what :func:`pack` wrote.

    Raises:
        SpecError: The data is not such a file, or is torn.
    """
    if not data.startswith(MAGIC):
        raise SpecError(f"{name}: no table of offers of this version; make it again")
    try:
        body = memoryview(zlib.decompress(data[len(MAGIC) :]))
        at = 4 + int.from_bytes(body[:4], "little")
        head = json.loads(bytes(body[4:at]))
        columns: dict[str, array[int] | array[float]] = {}
        for column, code in _COLUMNS.items():
            size = head["sizes"][column]
            columns[column] = _read(code, body[at : at + size])
            at += size
        return OfferTable(
            kinds=[InstanceType(*kind) for kind in head["kinds"]],
            places=[(cloud, region, zone) for cloud, region, zone in head["places"]],
            sources=head["sources"],
            label=head["label"],
            faults=tuple(head["faults"]),
            machines={(cells[0], cells[1]): InstanceDetails(*cells[2:]) for cells in head["machines"]},
            **columns,  # type: ignore[arg-type]  # the codes above say which is which
        )
    except (zlib.error, KeyError, TypeError, ValueError, RecursionError) as err:
        raise SpecError(f"{name}: the table of offers is torn ({err}); make it again") from err


def _little(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _read(code: str, data: memoryview) -> array[int] | array[float]:
    values: array[int] | array[float] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


@cache
def packaged() -> OfferTable:
    """The snapshot that comes with the package; its README gives the source of each value."""
    return unpack((_FOLDER / SNAPSHOT).read_bytes(), name=SNAPSHOT)


def labelled(table: OfferTable, label: str) -> OfferTable:
    """The same offers under another label."""
    return replace(table, label=label)


PRICES_AS_OF = "2026-07-20"
"""Date of the packaged list prices; the table's first lines name the source and its licence."""

_TABLE = "aws-us-east-1.csv"
_REGION = "us-east-1"


@cache
def listed_offers() -> tuple[Offer, ...]:
    """Every row of the packaged table as one node on demand with its published price, in order."""
    return tuple(map(_listed, read_table(_FOLDER / _TABLE)))


def _listed(cells: dict[str, str]) -> Offer:
    gpu_memory = cells["gpu_memory_gb"]
    return Offer(
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
        arch=cells["arch"],
    )


_PRECISIONS = ("fp32", "tf32", "fp16", "fp8")


@cache
def gpu_facts() -> dict[str, Gpu]:
    """Datasheet facts of GPUs by canonical name."""
    return {
        cells["gpu"]: Gpu(
            name=cells["gpu"],
            memory_gb=float(cells["memory_gb"]),
            bandwidth_gb_s=float(cells["bandwidth_gb_s"]),
            tflops={name: float(cells[name]) for name in _PRECISIONS if cells[name]},
            link_gb_s=float(cells["link_gb_s"]),
            has_direct_link=cells["direct"] == "yes",
            source=f"{cells['source']} ({cells['checked']})",
        )
        for cells in read_table(_FOLDER / "gpus.csv")
    }


@cache
def jobs() -> dict[str, Job]:
    """Common jobs by name."""
    return {body["name"]: Job.from_dict(body) for body in json.loads((_FOLDER / "jobs.json").read_bytes())}


def job(name: str) -> Job:
    """One of :func:`jobs`.

    Raises:
        SpecError: No job has that name; lists the names.
    """
    found = jobs().get(name)
    if found is None:
        raise SpecError(f"no job is named {name!r}; there are {', '.join(jobs())}")
    return found


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

    fitting = [offer for offer in listed_offers() if offer.arch == arch and offer.gpu_name == gpu_name]
    return min(fitting, key=distance, default=None)


def scaled_price(shadow: Offer, *, vcpus: float, gpus: int = 0) -> float | None:
    """USD per hour of a share: the type's price times its share of the GPUs, or without GPUs of the vCPUs."""
    if shadow.usd_per_hour is None:
        return None
    share = gpus / shadow.gpus if shadow.gpus else vcpus / shadow.vcpus
    return round(shadow.usd_per_hour * share, 6)
