"""Where a stage's data lie: which places that leaves, what it costs to bring them elsewhere, and disks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envscaler_airflow.planning.billing import UNKNOWN_TARIFF, Tariffs
from envscaler_airflow.planning.record import Record, check_finite

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec

MONTH_H = 730.0
"""Hours of a month, as clouds count them."""

GIB_PER_S = 0.25
"""Speed of a copy from another region or cloud. Chosen: a few parallel streams; runs measure it."""


@dataclass(frozen=True, slots=True)
class DataPlace(Record):
    """Data of a stage.

    Attributes:
        name: Of the volume.
        cloud, region: Where they lie.
        gib: How much is read once; None: unknown, and then the copy counts as nothing, which the plan says.
        zone: Of a claim that is bound to it.
        is_bound: They can be used in this region (and zone) alone.
    """

    name: str
    cloud: str
    region: str
    gib: float | None = None
    zone: str | None = None
    is_bound: bool = False

    def __post_init__(self) -> None:
        """Refuse NaN."""
        check_finite(gib=self.gib)

    @property
    def place(self) -> str:
        """``aws/us-east-1/us-east-1b``."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    def allows(self, cloud: str, region: str, zone: str) -> bool:
        """True when a stage can use them there; machines that do not say where they are may be there."""
        if not self.is_bound:
            return True
        is_there = self._is_at(cloud, region) if self.region and region else self._is_in(cloud)
        return is_there and (self.zone in (None, zone) or not zone)

    def usd_to(self, cloud: str, region: str, tariffs: Tariffs) -> float | None:
        """Price of the copy; None when size or the cloud's is not known, or the cloud of a cluster is not."""
        if self.is_bound or self._is_at(cloud, region) or self.gib == 0:
            return 0.0
        if cloud == "kubernetes" or self.gib is None:
            return None
        tariff = tariffs.get(self.cloud, UNKNOWN_TARIFF)
        each = tariff.usd_per_gib_between if cloud == self.cloud else tariff.usd_per_gib_out
        return None if each is None else each * self.gib

    def seconds_to(self, cloud: str, region: str) -> float:
        """Seconds of the copy beyond what one within the region takes."""
        is_here = self.is_bound or self._is_at(cloud, region)
        return 0.0 if is_here else (self.gib or 0.0) / GIB_PER_S

    def _is_at(self, cloud: str, region: str) -> bool:
        return region == self.region and self._is_in(cloud)

    def _is_in(self, cloud: str) -> bool:
        """A cluster is in the cloud that has a region of that name; a claim is in whichever has its zone."""
        return not self.cloud or cloud in (self.cloud, "kubernetes")


def data_places(spec: EnvSpec, clouds: Mapping[str, str]) -> tuple[DataPlace, ...]:
    """Where the volumes of *spec* lie, as far as it says; *clouds* are those of URL schemes.

    What is copied in may come from anywhere, at a price; a claim, an export or a folder is used where it is.
    """
    found = []
    for volume in spec.volumes:
        if volume.region is None and volume.zone is None:
            continue
        found.append(
            DataPlace(
                volume.name,
                clouds.get(volume.kind, ""),
                volume.region or "",
                gib=volume.gib,
                zone=volume.zone,
                is_bound=not volume.is_copied,
            )
        )
    return tuple(found)
