"""Where the data of a stage are: which places can use them, the cost of copying them elsewhere, and disks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envscaler_airflow.planning.billing import UNKNOWN_TARIFF, Tariffs
from envscaler_airflow.planning.record import NotNegative, Record

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec

MONTH_H = 730.0
"""Hours per month, as clouds bill them."""

GIB_PER_S = 0.25
"""Speed of a copy from another region or cloud. Chosen: a few parallel streams; runs measure it."""


@dataclass(frozen=True, slots=True)
class DataPlace(Record):
    """Location of a stage's data.

    Attributes:
        name: Name of the volume.
        cloud, region: Where the data are.
        gib: Size that is read once; None: unknown. The copy then counts as free, and the plan notes it.
        zone: Zone of a PersistentVolumeClaim that is bound to it.
        is_bound: The data can be used only in this region (and zone).
    """

    name: str
    cloud: str
    region: str
    gib: NotNegative[float] | None = None
    zone: str | None = None
    is_bound: bool = False

    @property
    def place(self) -> str:
        """``aws/us-east-1/us-east-1b``."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    def allows(self, cloud: str, region: str, zone: str) -> bool:
        """True when a stage can use the data there; machines of unknown location pass."""
        if not self.is_bound:
            return True
        is_there = self._is_at(cloud, region) if self.region and region else self._is_in(cloud)
        return is_there and (self.zone in (None, zone) or not zone)

    def usd_to(self, cloud: str, region: str, tariffs: Tariffs) -> float | None:
        """Price of the copy; None when the size, the cloud's tariff or the cloud of a cluster is unknown."""
        if self.is_bound or self._is_at(cloud, region) or self.gib == 0:
            return 0.0
        if cloud == "kubernetes" or self.gib is None:
            return None
        tariff = tariffs.get(self.cloud, UNKNOWN_TARIFF)
        each = tariff.usd_per_gib_between if cloud == self.cloud else tariff.usd_per_gib_out
        return None if each is None else each * self.gib

    def seconds_to(self, cloud: str, region: str) -> float:
        """Extra seconds for the copy compared with a copy within the region."""
        is_here = self.is_bound or self._is_at(cloud, region)
        return 0.0 if is_here else (self.gib or 0.0) / GIB_PER_S

    def _is_at(self, cloud: str, region: str) -> bool:
        return region == self.region and self._is_in(cloud)

    def _is_in(self, cloud: str) -> bool:
        """True for the data's cloud, and for a cluster, whose region or zone decides."""
        return not self.cloud or cloud in (self.cloud, "kubernetes")


def data_places(spec: EnvSpec, clouds: Mapping[str, str]) -> tuple[DataPlace, ...]:
    """Where the volumes of *spec* are, as far as it states that; *clouds* maps URL schemes to clouds.

    Copied volumes may come from anywhere, at a price. A claim, an export or a folder is used in place.
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
