"""Where a stage's data lie: which places that leaves, and what it costs to bring them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envscaler_airflow.planning.record import Record, check_finite

USD_PER_GIB_BETWEEN_REGIONS: Mapping[str, float] = {"aws": 0.02, "azure": 0.02, "gcp": 0.02}
"""List prices between two regions of one continent. Source: the clouds' network pricing pages (recalled
2026-11, not re-read): EC2 data transfer, Azure bandwidth, VPC network pricing. More across continents."""

USD_PER_GIB_OUT: Mapping[str, float] = {
    "alibaba": 0.081,
    "aws": 0.09,
    "azure": 0.087,
    "gcp": 0.12,
    "lambda": 0.0,
    "nebius": 0.0,
}
"""List prices out of a cloud, first tier. Source: as above; Lambda and Nebius state no charge."""

GIB_PER_S = 0.25
"""Speed of a copy from another region or cloud. Chosen: a few parallel streams; runs measure it."""


@dataclass(frozen=True, slots=True)
class DataPlace(Record):
    """Data of a stage.

    Attributes:
        name: Of the volume.
        cloud, region: Where they lie.
        gib: How much is read once; None: unknown, and then the copy is not counted.
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

    def allows(self, cloud: str, region: str, zone: str) -> bool:
        """True when a stage can use them there."""
        if not self.is_bound:
            return True
        return (cloud, region) == (self.cloud, self.region) and (self.zone in (None, zone) or not zone)

    def usd_to(self, cloud: str, region: str) -> float | None:
        """Price of the copy; None when the cloud's is not known."""
        if (cloud, region) == (self.cloud, self.region) or not self.gib:
            return 0.0
        table = USD_PER_GIB_BETWEEN_REGIONS if cloud == self.cloud else USD_PER_GIB_OUT
        each = table.get(self.cloud)
        return None if each is None else each * self.gib

    def seconds_to(self, cloud: str, region: str) -> float:
        """Seconds of the copy beyond what one within the region takes."""
        return 0.0 if (cloud, region) == (self.cloud, self.region) else (self.gib or 0.0) / GIB_PER_S
