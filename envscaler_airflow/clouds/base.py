"""What a cloud's price feed gives, and what its answers may not be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Protocol

from envscaler_airflow.planning.offers import CapacityType
from envscaler_airflow.planning.table import Kind, Machine, Row

Commitment = Literal["", "1m", "1y", "3y"]


class Quote(NamedTuple):
    """One price.

    Attributes:
        zone: "" for the whole region.
        gpu: Attached GPU, ``T4:1``; "" for a host as it is.
        commitment: Term of a committed price, which is for reports alone; "" for none.
    """

    instance_type: str
    region: str
    zone: str
    capacity: CapacityType
    usd: float
    gpu: str = ""
    commitment: Commitment = ""

    @property
    def key(self) -> str:
        """What one price is compared with the next by."""
        where = f"{self.region}|{self.zone}"
        return f"{self.instance_type}|{self.gpu}|{where}|{self.capacity}|{self.commitment}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one feed gave for one region.

    Attributes:
        cloud, region: Of what.
        quotes: Prices.
        source: Where they are from, without the date.
        kinds: Machines that the region has, where the feed tells.
        zones: Zones by instance type, where the feed tells.
        risks: Index into :data:`~envscaler_airflow.planning.table.RISKS` by instance type.
        notes: What was left out and why, for people.
        machines: What else the feed tells of instance types.
    """

    cloud: str
    region: str
    quotes: tuple[Quote, ...]
    source: str
    kinds: tuple[Kind, ...] = ()
    zones: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    risks: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    machines: Mapping[str, Machine] = field(default_factory=dict)


class AttachedGpu(NamedTuple):
    """GPUs of a zone, without a host."""

    cloud: str
    gpu_name: str
    gpus: int
    gpu_memory_gb: float | None
    row: Row


class PriceFeed(Protocol):
    """Live prices of one cloud."""

    cloud: str

    def fetch(self, region: str) -> Fetched:
        """Every price of the region.

        Raises:
            BackendError: The cloud said no, nothing, or what cannot be read.
        """


def instant(value: object) -> datetime | None:
    """A time of a price list, UTC; None when none is given, or it is not a time."""
    if not isinstance(value, str) or not value:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def is_in_force(begin: object, end: object, now: datetime) -> bool:
    """True for a price in force at *now*; a list keeps ended prices and names future ones."""
    begins, ends = instant(begin), instant(end)
    return (begins is None or begins <= now) and (ends is None or now < ends)


def utc_now() -> datetime:
    """The clock of price feeds where none is given."""
    return datetime.now(UTC)


def usd_of(value: object, *, currency: object = "USD") -> float | None:
    """A price as a number; None when it is none: empty, NaN, negative, zero, not in USD.

    Zero is "not sold so" in price lists and never a price.
    """
    if currency != "USD" or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
