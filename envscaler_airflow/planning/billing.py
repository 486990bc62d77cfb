"""What clouds charge besides the price of a machine: whole units of time, data transfer, disks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from envscaler_airflow.planning.record import Record, check_finite

_SLACK_S = 1e-6
"""Seconds that a sum of floats may be above a whole unit. Chosen."""


@dataclass(frozen=True, slots=True)
class Billing(Record):
    """Time is billed in whole units, and at least a minimum for each machine.

    Attributes:
        unit_s: Seconds of a unit, > 0.
        minimum_s: Seconds billed at least.
        source: Where it is stated.
    """

    unit_s: float
    minimum_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse NaN and a unit of nothing."""
        check_finite(unit_s=self.unit_s, minimum_s=self.minimum_s)
        if self.unit_s == 0:
            raise ValueError("unit_s must be > 0")

    def billed_s(self, held_s: float) -> float:
        """Seconds that are paid for when a machine is held for *held_s*."""
        units = math.ceil((held_s - _SLACK_S) / self.unit_s)
        return max(self.minimum_s, units * self.unit_s)


@dataclass(frozen=True, slots=True)
class Charges(Record):
    """What is paid besides price x time.

    Attributes:
        once_usd: Once, such as for bringing data there.
        disk_usd_per_hour: For the disks of all nodes, as long as they are held.
        billing: What the time is rounded up to; nothing when None.
    """

    once_usd: float = 0.0
    billing: Billing | None = None
    disk_usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        """Refuse NaN."""
        check_finite(once_usd=self.once_usd, disk_usd_per_hour=self.disk_usd_per_hour)

    def usd(self, held_s: float, usd_per_hour: float) -> float:
        """Of machines held for *held_s* at *usd_per_hour* together."""
        paid_s = held_s if self.billing is None else self.billing.billed_s(held_s)
        return paid_s * usd_per_hour / 3600.0 + self.once_usd + self.disk_usd(held_s)

    def disk_usd(self, held_s: float) -> float:
        """Of the disks of machines held for *held_s*."""
        return held_s * self.disk_usd_per_hour / 3600.0


@dataclass(frozen=True, slots=True)
class Tariff(Record):
    """Charges of a cloud besides the price of a machine; None is unknown.

    Attributes:
        billing: Rounds a machine's time up; None: unrounded.
        usd_per_gib_between: Of data into another region of the same continent; more across continents.
        usd_per_gib_out: Of data out of the cloud, first tier.
        usd_per_gib_month: Of a disk.
    """

    billing: Billing | None = None
    usd_per_gib_between: float | None = None
    usd_per_gib_out: float | None = None
    usd_per_gib_month: float | None = None

    def __post_init__(self) -> None:
        """Refuse NaN."""
        check_finite(
            usd_per_gib_between=self.usd_per_gib_between,
            usd_per_gib_out=self.usd_per_gib_out,
            usd_per_gib_month=self.usd_per_gib_month,
        )


Tariffs = Mapping[str, Tariff]
"""By cloud; nothing is known of an absent one."""
UNKNOWN_TARIFF = Tariff()
