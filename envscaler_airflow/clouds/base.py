"""What a cloud's price feed returns, and checks of its responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Protocol

from envscaler_airflow.planning.offers import CapacityType, InstanceType
from envscaler_airflow.planning.table import InstanceDetails

Commitment = Literal["", "1m", "1y", "3y"]


class Quote(NamedTuple):
    """One price.

    Attributes:
        zone: "" for the whole region.
        gpu: Attached GPU, ``T4:1``; "" for a host without one.
        commitment: Term of a committed price, which is only for reports; "" for none.
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
        """Key by which a price is compared with the next one."""
        where = f"{self.region}|{self.zone}"
        return f"{self.instance_type}|{self.gpu}|{where}|{self.capacity}|{self.commitment}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a feed returned for one region.

    Attributes:
        cloud, region: Cloud and region of the prices.
        quotes: Prices.
        source: Source of the prices, without the date.
        kinds: Machines of the region, if the feed reports them.
        zones: Zones by instance type, if the feed reports them.
        risks: Index into :data:`~envscaler_airflow.planning.table.RISKS` by instance type.
        notes: What was skipped and why, human-readable.
        machines: Other facts that the feed reports of instance types.
    """

    cloud: str
    region: str
    quotes: tuple[Quote, ...]
    source: str
    kinds: tuple[InstanceType, ...] = ()
    zones: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    risks: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    machines: Mapping[str, InstanceDetails] = field(default_factory=dict)


class PriceFeed(Protocol):
    """Live prices of one cloud."""

    cloud: str

    def fetch(self, region: str) -> Fetched:
        """Fetch every price of the region.

        Raises:
            BackendError: The cloud refused, did not respond, or sent an unreadable response.
        """


def instant(value: object) -> datetime | None:
    """Parse a time of a price list as UTC; None if it is absent or not a time."""
    if not isinstance(value, str) or not value:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def is_in_force(begin: object, end: object, now: datetime) -> bool:
    """True for a price in force at *now*; a list also contains ended and future prices."""
    begins, ends = instant(begin), instant(end)
    return (begins is None or begins <= now) and (ends is None or now < ends)


def utc_now() -> datetime:
    """The default clock of price feeds."""
    return datetime.now(UTC)


def usd_of(value: object, *, currency: object = "USD") -> float | None:
    """Parse a price; None if it is not one: empty, NaN, negative, zero, or not in USD.

    In price lists zero means "not sold like this", never a price.
    """
    if currency != "USD" or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
