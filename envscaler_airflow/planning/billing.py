"""What clouds charge besides the price of a machine: whole units of time, data transfer, disks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from envscaler_airflow.planning.record import NotNegative, Positive, Record

_SLACK_S = 1e-6
"""Tolerance in seconds for rounding errors of a sum of floats above a whole unit. Chosen."""


@dataclass(frozen=True, slots=True)
class Billing(Record):
    """Time is billed in whole units, with a minimum for each machine.

    Attributes:
        unit_s: Seconds per unit, > 0.
        minimum_s: Minimum seconds billed.
        source: Where the provider states it.
    """

    unit_s: Positive[float]
    minimum_s: NotNegative[float] = 0.0
    source: str = ""

    def billed_s(self, held_s: float) -> float:
        """Seconds billed for a machine that is allocated for *held_s*."""
        units = math.ceil((held_s - _SLACK_S) / self.unit_s)
        return max(self.minimum_s, units * self.unit_s)


@dataclass(frozen=True, slots=True)
class Charges(Record):
    """Charges besides price x time.

    Attributes:
        once_usd: One-time charge, such as copying the data to the machines.
        disk_usd_per_hour: Charge for the disks of all nodes while they are allocated.
        billing: How the time is rounded up; None: no rounding.
    """

    once_usd: NotNegative[float] = 0.0
    billing: Billing | None = None
    disk_usd_per_hour: NotNegative[float] = 0.0

    def usd(self, held_s: float, usd_per_hour: float) -> float:
        """Total charge for machines that cost *usd_per_hour* together and are allocated for *held_s*."""
        paid_s = held_s if self.billing is None else self.billing.billed_s(held_s)
        return paid_s * usd_per_hour / 3600.0 + self.once_usd + self.disk_usd(held_s)

    def disk_usd(self, held_s: float) -> float:
        """Charge for the disks of machines that are allocated for *held_s*."""
        return held_s * self.disk_usd_per_hour / 3600.0


@dataclass(frozen=True, slots=True)
class Tariff(Record):
    """A cloud's charges besides the price of a machine; None is unknown.

    Attributes:
        billing: How a machine's time is rounded up; None: no rounding.
        usd_per_gib_between: Transfer to another region of the same continent; across continents costs more.
        usd_per_gib_out: Transfer out of the cloud, first tier.
        usd_per_gib_month: Disk price.
    """

    billing: Billing | None = None
    usd_per_gib_between: NotNegative[float] | None = None
    usd_per_gib_out: NotNegative[float] | None = None
    usd_per_gib_month: NotNegative[float] | None = None


Tariffs = Mapping[str, Tariff]
"""By cloud; the charges of a missing cloud are unknown."""
UNKNOWN_TARIFF = Tariff()
