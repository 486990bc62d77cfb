"""Many offers in columns, for the planner to search.

An instance type is stored once, with its rows (place, prices) sorted by price, so that a search reads few
rows even if there are many offers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envscaler_airflow.planning.offers import Allocation, CapacityType, InstanceType, Offer

UNKNOWN = math.inf
"""An unknown price in the columns: it sorts last and is never chosen as the lowest."""

RISKS = ("", "<5%", "5-10%", "10-15%", "15-20%", ">20%")
"""Ranges of AWS Spot Advisor: fraction of the instances of a type interrupted in a month; "" is unknown."""

MONTH_H = 730.0
"""Hours per month."""

RATES_PER_HOUR: tuple[float | None, ...] = (
    None,
    *(-math.log1p(-part) / MONTH_H for part in (0.025, 0.075, 0.125, 0.175, 0.3)),
)
"""Interruptions per hour by index into :data:`RISKS`.

The middle of each range, used as the probability that a machine is lost within a month, at a constant rate;
30 % for the open range. Chosen: Spot Advisor publishes no finer figure.
"""

ANY_RATE_PER_HOUR = 0.05
"""Interruptions per hour of a spot offer of unknown risk. Chosen: one in 20 hours, which costs a stage with
checkpoints a few percent, and a stage without them everything."""


class InstanceDetails(NamedTuple):
    """Other published properties of an instance type; None is unknown.

    Attributes:
        network_gbps: Guaranteed Gbit/s, all network cards together.
        network_peak_gbps: Gbit/s in bursts.
        local_disk_gb: Local disks, GB together; 0 without any.
        processor: Vendor and sustained clock: ``Intel, 3.1 GHz``.
        source: Where this is from, with the date.
    """

    network_gbps: float | None = None
    network_peak_gbps: float | None = None
    local_disk_gb: float | None = None
    processor: str | None = None
    source: str = ""


class Row(NamedTuple):
    """One instance type at one place.

    Attributes:
        usd, spot_usd: On-demand and spot price; None is unknown.
        has_on_demand, has_spot: Available as such, whether or not the price is known.
        risk: Index into :data:`RISKS`.
        source, spot_source: Where the prices are from, with date.
    """

    region: str
    zone: str = ""
    usd: float | None = None
    spot_usd: float | None = None
    has_on_demand: bool = True
    has_spot: bool = False
    risk: int = 0
    source: str = ""
    spot_source: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class OfferTable:
    """Kinds and their rows, in columns.

    Attributes:
        kinds: By number.
        places: Distinct (cloud, region, zone), by number.
        sources: Distinct texts of where prices are from, by number.
        starts: First row of each kind, and the number of all rows at the end.
        ends: End of the rows of each kind that are available on demand; spot-only rows follow.
        place, usd, spot_usd, risk, source, spot_source: Of each row, rows of a kind by on-demand price
            (:data:`UNKNOWN` last), region and zone.
        spot_rows: Rows that are available as spot, those of a kind by spot price.
        spot_starts: As *starts*, into *spot_rows*.
        label: Description of these prices, shown with each plan.
        faults: Values that were rejected while the table was built.
        machines: Other properties by (cloud, instance type), if published.
    """

    kinds: Sequence[InstanceType]
    places: Sequence[tuple[str, str, str]]
    sources: Sequence[str]
    starts: array[int]
    ends: array[int]
    place: array[int]
    usd: array[float]
    spot_usd: array[float]
    risk: array[int]
    source: array[int]
    spot_source: array[int]
    spot_rows: array[int]
    spot_starts: array[int]
    label: str = ""
    faults: tuple[str, ...] = ()
    machines: Mapping[tuple[str, str], InstanceDetails] = field(default_factory=dict)
    _by_gpu: dict[str, list[int]] = field(init=False, default_factory=dict)
    _orders: dict[str, list[int]] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        """Number of rows: kinds times places."""
        return len(self.place)

    def rows_of(self, kind: int, capacity: CapacityType) -> Sequence[int]:
        """Rows of *kind* that are available as *capacity*, the cheapest first, unknown prices last."""
        if capacity == "on-demand":
            return range(self.starts[kind], self.ends[kind])
        return self.spot_rows[self.spot_starts[kind] : self.spot_starts[kind + 1]]

    def least_usd(self, kind: int, capacity: CapacityType) -> float | None:
        """Price of the first of :meth:`rows_of`; :data:`UNKNOWN` when unknown, None without rows."""
        if capacity == "on-demand":
            first = self.starts[kind]
            return self.usd[first] if first < self.ends[kind] else None
        first = self.spot_starts[kind]
        return self.spot_usd[self.spot_rows[first]] if first < self.spot_starts[kind + 1] else None

    def order(self, capacity: CapacityType) -> list[int]:
        """Kinds that are available as *capacity*, by lowest price."""
        if capacity not in self._orders:
            least = [(self.least_usd(kind, capacity), kind) for kind in range(len(self.kinds))]
            self._orders[capacity] = [
                kind for _, kind in sorted(pair for pair in least if pair[0] is not None)
            ]
        return self._orders[capacity]

    def of_gpu(self, name: str) -> list[int]:
        """Kinds with at least one whole GPU of this name, ignoring case."""
        if not self._by_gpu:
            for number, kind in enumerate(self.kinds):
                if kind.gpu_name is not None and kind.gpus >= 1:
                    self._by_gpu.setdefault(kind.gpu_name.casefold(), []).append(number)
        return self._by_gpu.get(name.casefold(), [])

    def offer(self, kind: int, row: int, capacity: CapacityType) -> Offer:
        """One row as an offer."""
        facts, (_, region, zone) = self.kinds[kind], self.places[self.place[row]]
        is_spot = capacity == "spot"
        usd = self.spot_usd[row] if is_spot else self.usd[row]
        is_whole = facts.gpus >= 1
        return Offer(
            cloud=facts.cloud,
            region=region,
            instance_type=facts.instance_type,
            capacity_type=capacity,
            vcpus=facts.vcpus,
            memory_gib=facts.memory_gib,
            zone=zone or None,
            gpu_name=facts.gpu_name if is_whole else None,
            gpus=int(facts.gpus) if is_whole else 0,
            gpu_memory_gb=facts.gpu_memory_gb if is_whole else None,
            usd_per_hour=None if usd == UNKNOWN else usd,
            price_source=self.sources[self.spot_source[row] if is_spot else self.source[row]],
            arch=facts.arch,
            is_attached=facts.is_attached,
        )

    def rate_per_hour(self, row: int) -> float | None:
        """Interruptions per hour of the row as spot; None when unknown."""
        return RATES_PER_HOUR[self.risk[row]]

    def rates_of(self, allocation: Allocation) -> dict[str, float]:
        """Interruptions per hour per node of each spot part, by offer name; a chosen rate where unknown."""
        found = {}
        for part in allocation.parts:
            if part.offer.capacity_type == "spot":
                known = RATES_PER_HOUR[self._risk_of(part.offer)]
                found[part.offer.name] = ANY_RATE_PER_HOUR if known is None else known
        return found

    def range_of(self, offer: Offer) -> str | None:
        """Range of :data:`RISKS` for the interruptions of a spot offer within a month; None is unknown."""
        return RISKS[self._risk_of(offer)] or None if offer.capacity_type == "spot" else None

    def _risk_of(self, offer: Offer) -> int:
        place = (offer.cloud, offer.region, offer.zone or "")
        for number, kind in enumerate(self.kinds):
            if (kind.cloud, kind.instance_type) == (offer.cloud, offer.instance_type):
                for row in self.rows_of(number, "spot"):
                    if self.places[self.place[row]] == place:
                        return self.risk[row]
        return 0

    def offers(self) -> Iterator[Offer]:
        """Every offer; slow."""
        for kind in range(len(self.kinds)):
            for capacity in CAPACITIES:
                for row in self.rows_of(kind, capacity):
                    yield self.offer(kind, row, capacity)


CAPACITIES: tuple[CapacityType, CapacityType] = ("on-demand", "spot")


def build_table(
    rows: Mapping[InstanceType, Iterable[Row]],
    *,
    label: str = "",
    faults: Iterable[str] = (),
    machines: Mapping[tuple[str, str], InstanceDetails] | None = None,
) -> OfferTable:
    """Build the columns of *rows*; kinds are identified by cloud, type and GPU."""
    columns = _Columns()
    kinds = sorted(rows, key=_kind_key)
    for kind in kinds:
        columns.add(kind.cloud, sorted(rows[kind], key=_row_key))
    return OfferTable(
        kinds=kinds,
        places=tuple(columns.places),
        sources=tuple(columns.sources),
        starts=columns.starts,
        ends=columns.ends,
        place=columns.place,
        usd=columns.usd,
        spot_usd=columns.spot_usd,
        risk=columns.risk,
        source=columns.source,
        spot_source=columns.spot_source,
        spot_rows=columns.spot_rows,
        spot_starts=columns.spot_starts,
        label=label,
        faults=tuple(faults),
        machines=machines or {},
    )


class _Columns:
    """The columns of a table under construction."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, str, str], int] = {}
        self.sources: dict[str, int] = {}
        self.starts, self.ends, self.place = array("I", [0]), array("I"), array("I")
        self.usd, self.spot_usd = array("d"), array("d")
        self.risk, self.source, self.spot_source = array("B"), array("I"), array("I")
        self.spot_rows, self.spot_starts = array("I"), array("I", [0])

    def add(self, cloud: str, ordered: Sequence[Row]) -> None:
        """Add the rows of the next kind, in their order."""
        first, places, sources = len(self.place), self.places, self.sources
        for row in ordered:
            self.place.append(places.setdefault((cloud, row.region, row.zone), len(places)))
            self.usd.append(UNKNOWN if row.usd is None else row.usd)
            self.spot_usd.append(UNKNOWN if row.spot_usd is None else row.spot_usd)
            self.risk.append(row.risk)
            self.source.append(sources.setdefault(row.source, len(sources)))
            self.spot_source.append(sources.setdefault(row.spot_source, len(sources)))
        self.starts.append(len(self.place))
        self.ends.append(first + sum(row.has_on_demand for row in ordered))
        spot = [first + at for at, row in enumerate(ordered) if row.has_spot or row.spot_usd is not None]
        self.spot_rows.extend(sorted(spot, key=lambda at: (self.spot_usd[at], at)))
        self.spot_starts.append(len(self.spot_rows))


def _kind_key(kind: InstanceType) -> tuple[str, str, str, float, str]:
    return kind.cloud, kind.instance_type, kind.gpu_name or "", kind.gpus, repr(kind)


def _row_key(row: Row) -> tuple[bool, float, str, str]:
    return not row.has_on_demand, UNKNOWN if row.usd is None else row.usd, row.region, row.zone


def table_of(offers: Iterable[Offer], *, label: str = "") -> OfferTable:
    """Columns of a list of offers: the nodes of a cluster, the user's own machines, or test data."""
    rows: dict[InstanceType, dict[tuple[str, str], Row]] = {}
    for offer in offers:
        at = (offer.region, offer.zone or "")
        row = rows.setdefault(offer.machine, {}).get(at, Row(*at, has_on_demand=False))
        usd, source = offer.usd_per_hour, offer.price_source
        if offer.capacity_type == "spot":
            row = row._replace(spot_usd=usd, has_spot=True, spot_source=source)
        else:
            row = row._replace(usd=usd, has_on_demand=True, source=source)
        rows[offer.machine][at] = row
    return build_table({kind: found.values() for kind, found in rows.items()}, label=label)


def joined(first: OfferTable, second: OfferTable) -> OfferTable:
    """All offers of two tables, those of *second* after the others; label and faults are from both."""
    rows, places, sources = len(first), len(first.places), len(first.sources)

    def after(name: str, shift: int = 0) -> Any:
        column = getattr(first, name)[:]
        column.extend(item + shift for item in getattr(second, name))
        return column

    def bounds(name: str, shift: int) -> Any:
        column = getattr(first, name)[:]
        column.extend(item + shift for item in getattr(second, name)[1:])
        return column

    return OfferTable(
        kinds=[*first.kinds, *second.kinds],
        places=(*first.places, *second.places),
        sources=(*first.sources, *second.sources),
        starts=bounds("starts", rows),
        ends=after("ends", rows),
        place=after("place", places),
        usd=after("usd"),
        spot_usd=after("spot_usd"),
        risk=after("risk"),
        source=after("source", sources),
        spot_source=after("spot_source", sources),
        spot_rows=after("spot_rows", rows),
        spot_starts=bounds("spot_starts", len(first.spot_rows)),
        label="; ".join(label for label in (first.label, second.label) if label),
        faults=(*first.faults, *second.faults),
        machines={**first.machines, **second.machines},
    )
