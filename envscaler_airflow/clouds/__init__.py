"""One object per cloud, and the registry that finds them by entry point in all installed packages.

A cloud is a module with a :class:`Cloud` and an entry point that names it. Its SDK and its HTTP client are
imported only when its prices are requested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

from envscaler_airflow.installed import installed
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF, Tariff, Tariffs
from envscaler_airflow.planning.offers import CapacityType, InstanceType
from envscaler_airflow.planning.stockouts import Refusals
from envscaler_airflow.planning.table import InstanceDetails, Row

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


UNFINISHED_DAYS = 7
"""Days after which a bucket's rules drop an unfinished upload, or an overwritten or deleted version. Chosen:
no upload takes a week, and until then a mistake can be undone."""

GROUP = "envscaler_airflow.clouds"
"""Entry points of :class:`Cloud` objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials and endpoint of a cloud's API, as plain values and clients.

    Attributes:
        login: User or key id.
        secret: API key or password.
        token: Bearer token.
        session: Session of the cloud's own SDK, such as ``boto3.Session``.
        endpoint_url: URL of a substitute for the cloud's API; None for the cloud's own.
        verify: False trusts any certificate; a string is the path of the certificates to trust.
    """

    login: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    session: Any = None
    endpoint_url: str | None = None
    verify: bool | str = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSource:
    """Source of a cloud's live prices.

    Attributes:
        open: Creates the feed without a request. Raises SpecError if a credential is missing.
        regions: Regions to refresh if the packaged snapshot has no region of the cloud. The connection test
            uses the first one.
        conn_type: Type of the Airflow connections with its credentials; "" if it needs none.
        conn_id: Default connection; None if there is none.
    """

    open: Callable[[Access], PriceFeed]
    regions: tuple[str, ...]
    conn_type: str = ""
    conn_id: str | None = None


Types = Mapping[InstanceType, Iterable[Row]]
"""Instance types, each with its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """The facts of one cloud; unknown facts keep their defaults.

    Attributes:
        name: Name in offers, scopes and ``--cloud``; lower-case letters.
        tariff: Charges in addition to the price of a machine.
        refusals: Error codes for missing capacity and for exceeded quotas.
        schemes: URL schemes of its object store.
        lifecycle: Rules, as the cloud's own tool reads them, by which a bucket deletes objects below a prefix
            after so many days, and what no reader sees: unfinished uploads and old versions.
        burstable: Matches names of instance types that share or throttle their vCPUs.
        attached: Combines hosts with GPUs that are sold separately, as types without a name; None if the
            cloud sells none so.
        provider_id: Scheme of ``providerID`` on its Kubernetes nodes.
        prices: Live prices; None if only the packaged snapshot has prices.
    """

    name: str
    tariff: Tariff = UNKNOWN_TARIFF
    refusals: Refusals = field(default_factory=dict)
    schemes: tuple[str, ...] = ()
    lifecycle: Callable[[str, int], Mapping[str, Any]] | None = None
    burstable: re.Pattern[str] | None = None
    attached: Callable[[Types, Types], Types] | None = None
    provider_id: str | None = None
    prices: PriceSource | None = None


@cache
def all_clouds() -> Mapping[str, Cloud]:
    """Installed clouds by name, sorted; read once. See :func:`~envscaler_airflow.installed.installed`."""
    return installed(GROUP, Cloud)


def tariffs() -> Tariffs:
    """Charges in addition to the price of a machine, by cloud."""
    return {name: cloud.tariff for name, cloud in all_clouds().items()}


def schemes() -> Mapping[str, str]:
    """Cloud by URL scheme of an object store. S3 outside of AWS is not in a region of any offer."""
    return {scheme: name for name, cloud in all_clouds().items() for scheme in cloud.schemes}


def refusals() -> Refusals:
    """Error codes of all clouds: a cluster reports the codes of the cloud that it runs on."""
    return {code: what for cloud in all_clouds().values() for code, what in cloud.refusals.items()}


def price_sources() -> Mapping[str, PriceSource]:
    """Sources of live prices, by cloud; clouds without one are omitted."""
    return {name: cloud.prices for name, cloud in all_clouds().items() if cloud.prices is not None}
