"""Errors that clouds return when no capacity is available, and how long they are assumed to apply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.planning.offers import CapacityType, Offer
from envscaler_airflow.planning.record import NotNegative, Record

Scope = Literal["offer", "family", "region"]

Refusals = Mapping[str, tuple[Literal["capacity", "quota"], Scope]]
"""Error codes of clouds, with their meaning and scope."""

_UNSCHEDULABLE = re.compile(r"Insufficient (nvidia\.com|amd\.com)/[\w-]+|Insufficient (cpu|memory)\b")

FIRST_S = 600.0
"""How long the first stock-out applies. Chosen: capacity comes back within minutes to hours."""
LONGEST_S = 4 * 3600.0
"""Upper limit of the doubling after repeated stock-outs. Chosen."""
QUOTA_S = 6 * 3600.0
"""How long a quota error applies: a person must raise the quota. Chosen: two attempts per working day."""


@dataclass(frozen=True, slots=True)
class StockOut(Record):
    """A refusal by the provider.

    Attributes:
        cloud, region, capacity: From the offer.
        zone: "" for an offer of the whole region.
        instance_type: From the offer.
        gpu: Its GPU; "" without.
        code: The cloud's error code.
        kind: ``capacity`` or ``quota``.
        scope: ``offer``: this type and place; ``family``: types that begin with the same letters, in the
            region; ``region``: everything of this capacity type in the region.
        at: Time of the latest refusal, seconds since the epoch on the clock of the process that recorded it.
        times: Consecutive refusals without a start between them.
    """

    cloud: str
    region: str
    capacity: CapacityType
    instance_type: str
    code: str
    kind: Literal["capacity", "quota"]
    scope: Scope
    at: NotNegative[float]
    zone: str = ""
    gpu: str = ""
    times: int = 1

    @property
    def lasts_s(self) -> float:
        """Doubles with each consecutive refusal, up to four hours; six hours for a quota."""
        return QUOTA_S if self.kind == "quota" else wait_s(self.times, first_s=FIRST_S, most_s=LONGEST_S)

    def left_s(self, now: float) -> float:
        """Seconds that it still applies, at most its full duration even if the recording clock was wrong."""
        return min(self.lasts_s, self.at + self.lasts_s - now)

    def excludes(self, offer: Offer, now: float) -> str | None:
        """Why *offer* is skipped now; None when it is not."""
        left = self.left_s(now)
        if left <= 0 or not self._is_about(offer):
            return None
        times = "" if self.times == 1 else f", {self.times} times in a row"
        ago = f"{max(0.0, now - self.at) / 60:.0f} min ago"
        return f"{self.code} {ago}{times}: tried again in {left / 60:.0f} min"

    def _is_about(self, offer: Offer) -> bool:
        if (offer.cloud, offer.region, offer.capacity_type) != (self.cloud, self.region, self.capacity):
            return False
        if self.scope == "region":
            return True
        if self.scope == "family":
            return _family(offer.instance_type) == _family(self.instance_type)
        same = (offer.zone or "", offer.instance_type, offer.gpu_name or "")
        return same == (self.zone, self.instance_type, self.gpu)


def _family(instance_type: str) -> str:
    """``g`` of ``g5.xlarge``, ``a2`` of ``a2-highgpu-1g``: roughly the family that a quota covers."""
    return re.split(r"[.\-]|(?<=[a-z])(?=\d)", instance_type.removeprefix("Standard_"), maxsplit=1)[
        0
    ].casefold()


def classify(
    code: str, message: str, refusals: Refusals
) -> tuple[str, Literal["capacity", "quota"], Scope] | None:
    """The error code, its kind and its scope; None when the error is about something else.

    The codes of *refusals* are searched in *code* and in *message*, where SDKs and events contain them. An
    Unschedulable pod is recognized by the scheduler's message.
    """
    for text in (code, message):
        for name, (kind, scope) in refusals.items():
            if re.search(rf"(?<![A-Za-z_.]){re.escape(name)}(?![A-Za-z_])", text):
                return name, kind, scope
    found = _UNSCHEDULABLE.search(message)
    return None if found is None else (f"Unschedulable: {found[0]}", "capacity", "offer")


def met(
    offer: Offer,
    code: str,
    message: str = "",
    *,
    refusals: Refusals,
    now: float,
    before: StockOut | None = None,
) -> StockOut | None:
    """The stock-out that a refusal of *offer* means; None when it was refused for another reason."""
    found = classify(code, message, refusals)
    if found is None:
        return None
    name, kind, scope = found
    return StockOut(
        cloud=offer.cloud,
        region=offer.region,
        capacity=offer.capacity_type,
        instance_type=offer.instance_type,
        code=name,
        kind=kind,
        scope=scope,
        at=now,
        zone=offer.zone or "",
        gpu=offer.gpu_name or "",
        times=1 if before is None else before.times + 1,
    )


def against(offer: Offer, stockouts: Iterable[StockOut], now: float) -> str | None:
    """The first reason among *stockouts* to skip *offer*; None when there is none."""
    return next((text for item in stockouts if (text := item.excludes(offer, now)) is not None), None)
