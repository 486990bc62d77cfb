"""Where a stage's data lie: which places that leaves, what it costs to bring them elsewhere, and disks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envscaler_airflow.planning.record import Record, check_finite

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec

USD_PER_GIB_BETWEEN_REGIONS: Mapping[str, float] = {"aws": 0.02, "azure": 0.02, "gcp": 0.02}
"""Between two regions of one continent; more across continents. Source: recalled of the clouds' network
pricing pages, 2026-11; cloudtoolstack.com/blog/cloud-egress-cost-optimization (2026) has the same for AWS."""

USD_PER_GIB_OUT: Mapping[str, float] = {
    "alibaba": 0.081,
    "aws": 0.09,
    "azure": 0.087,
    "gcp": 0.12,
    "lambda": 0.0,
    "nebius": 0.0,
}
"""Out of a cloud, first tier. Source: cloudtoolstack.com/blog/cloud-egress-cost-optimization (2026) for AWS,
Azure and GCP; the others are recalled, 2026-11: Alibaba's list price, and that Lambda and Nebius state no
charge."""

CLOUDS = frozenset({*USD_PER_GIB_OUT, "tencent"})
"""Clouds that the catalog knows; what it costs to leave Tencent is not known."""

USD_PER_GIB_MONTH: Mapping[str, float] = {"aws": 0.08, "gcp": 0.10}
"""Disks: gp3 in us-east-1, pd-balanced. Source: github.com/aws/agent-toolkit-for-aws, ebs-optimization.md
(early 2026); c3x.dev/blog/gcp-persistent-disk-types-cost (2026). Of other clouds none is known."""

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

    def usd_to(self, cloud: str, region: str) -> float | None:
        """Price of the copy; None when size or the cloud's is not known, or the cloud of a cluster is not."""
        if self.is_bound or self._is_at(cloud, region) or self.gib == 0:
            return 0.0
        if cloud == "kubernetes" or self.gib is None:
            return None
        table = USD_PER_GIB_BETWEEN_REGIONS if cloud == self.cloud else USD_PER_GIB_OUT
        each = table.get(self.cloud)
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


@dataclass(frozen=True, slots=True)
class Extras(Record):
    """What a stage needs besides machines, at one place.

    Attributes:
        data_usd, data_s: Of bringing its data there; what is unknown of the price is not in it.
        disk_gib: Of each node.
    """

    data_usd: float = 0.0
    data_s: float = 0.0
    disk_gib: float = 0.0

    def __post_init__(self) -> None:
        """Refuse NaN."""
        check_finite(data_usd=self.data_usd, data_s=self.data_s, disk_gib=self.disk_gib)


def extras_at(cloud: str, region: str, *, data: Iterable[DataPlace] = (), disk_gib: float = 0.0) -> Extras:
    """What data and disks cost at a place."""
    found = tuple(data)
    return Extras(
        data_usd=sum(item.usd_to(cloud, region) or 0.0 for item in found),
        data_s=sum(item.seconds_to(cloud, region) for item in found),
        disk_gib=disk_gib,
    )


def disk_usd_per_hour(cloud: str, gib: float) -> float:
    """Price of a disk an hour; 0 where it is not known, which the plan says."""
    return USD_PER_GIB_MONTH.get(cloud, 0.0) * gib / MONTH_H


def data_places(spec: EnvSpec) -> tuple[DataPlace, ...]:
    """Where the volumes of *spec* lie, as far as it says.

    What is copied in may come from anywhere, at a price; a claim, an export or a folder is used where it is.
    """
    found = []
    for volume in spec.volumes:
        if volume.region is None and volume.zone is None:
            continue
        found.append(
            DataPlace(
                volume.name,
                _CLOUDS.get(volume.kind, ""),
                volume.region or "",
                gib=volume.gib,
                zone=volume.zone,
                is_bound=not volume.is_copied,
            )
        )
    return tuple(found)


_CLOUDS = {
    "s3": "aws",
    "gs": "gcp",
    "gcs": "gcp",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "oss": "alibaba",
    "cos": "tencent",
}
"""Cloud of each kind of object store. An S3 that is none of AWS has no region that an offer has."""
