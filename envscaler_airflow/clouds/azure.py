"""Azure Retail Prices; this API needs no account.

Source: learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. Tested against
responses written from that page; not yet tested against the live service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from envscaler_airflow.clouds import (
    Access,
    Cloud,
    Commitment,
    Fetched,
    PriceSource,
    Quote,
    instant,
    is_in_force,
    usd_of,
    utc_now,
)
from envscaler_airflow.clouds.http import MAX_PAGES, Caller
from envscaler_airflow.errors import BackendError
from envscaler_airflow.planning.billing import Billing, Tariff

URL = "https://prices.azure.com/api/retail/prices"
HOURS = {"1 Year": 8760.0, "3 Years": 26280.0}
TERMS: Mapping[str, Commitment] = {"1 Year": "1y", "3 Years": "3y"}
_OTHER = re.compile(
    r"Windows|Cloud ?Services|Dedicated Host|\bSQL\b|Red Hat|RHEL|SUSE|Ubuntu Pro|BareMetal|VMware|"
    r"Low Priority|Expired|Promo",
    re.IGNORECASE,
)
"""Products and meters with the same armSkuName that are not the ordinary price of a Linux virtual machine:
classic cloud services, hosts, licences, discontinued products. Source: names in Azure Retail Prices.
"""
_HOURLY = frozenset({"1 Hour", "1/Hour"})


class AzurePrices:
    """Linux virtual machines of one region: pay as you go, spot, and reservations."""

    cloud = "azure"

    def __init__(
        self, access: Access, *, caller: Caller | None = None, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """Use *caller*, or create one."""
        self._caller = caller or Caller()
        self._clock = clock
        self._url = access.endpoint_url or URL

    def fetch(self, region: str) -> Fetched:
        """See :class:`~envscaler_airflow.clouds.PriceFeed`."""
        quotes: dict[str, Quote] = {}
        ranks: dict[str, tuple[bool, bool, float]] = {}
        strange = 0
        with self._caller:
            items = list(self._items(region))
        now = self._clock()
        for item in items:
            quote = read_item(item, now=now)
            strange += item.get("currencyCode") != "USD"
            if quote is not None and quote.region == region:
                rank = _rank(item)
                if quote.key not in ranks or rank > ranks[quote.key]:
                    quotes[quote.key], ranks[quote.key] = quote, rank
        notes = (f"{strange} prices are not in USD and were left out",) if strange else ()
        return Fetched("azure", region, tuple(quotes.values()), "Azure Retail Prices", notes=notes)

    def _items(self, region: str) -> Iterator[Mapping[str, Any]]:
        wanted = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}'"
        url: str | None = self._url
        params: dict[str, str] | None = {"$filter": wanted, "api-version": "2023-01-01-preview"}
        for _ in range(MAX_PAGES):
            if url is None:
                return
            page = self._caller.json(url, "Azure Retail Prices", params)
            if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
                raise BackendError("Azure Retail Prices: the answer has no Items", transient=True)
            yield from (item for item in page["Items"] if isinstance(item, dict))
            url, params = page.get("NextPageLink") or None, None  # the link contains the query
            if not isinstance(url, str | None):
                raise BackendError(f"Azure Retail Prices: {url!r:.100} is not a valid URL", transient=True)
        raise BackendError(f"Azure Retail Prices: more than {MAX_PAGES} pages", transient=True)


def _rank(item: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Rank of a meter among those of one machine: a VM's by name, of the primary region, the newest."""
    begins = instant(item.get("effectiveStartDate"))
    is_machine = str(item.get("productName") or "").startswith("Virtual Machines")
    is_primary = item.get("isPrimaryMeterRegion") is not False
    return is_machine, is_primary, begins.timestamp() if begins is not None else 0.0


def read_item(item: Mapping[str, Any], *, now: datetime | None = None) -> Quote | None:
    """Convert a meter to a quote; None for other services, systems, units, and prices not in force *now*."""
    name, sku, product = (str(item.get(key) or "") for key in ("armSkuName", "skuName", "productName"))
    usd = usd_of(item.get("retailPrice"), currency=item.get("currencyCode"))
    words = f"{product} | {sku} | {item.get('meterName') or ''}"
    if not name or usd is None or _OTHER.search(words):
        return None
    if item.get("serviceName") not in (None, "Virtual Machines") or usd_of(item.get("tierMinimumUnits")):
        return None
    if str(item.get("unitOfMeasure")) not in _HOURLY:
        return None
    if not is_in_force(item.get("effectiveStartDate"), item.get("effectiveEndDate"), now or utc_now()):
        return None
    region, kind = str(item.get("armRegionName") or ""), item.get("type")
    if kind == "Reservation":
        term = str(item.get("reservationTerm"))
        if term not in HOURS or "Spot" in sku:
            return None
        return Quote(name, region, "", "on-demand", usd / HOURS[term], commitment=TERMS[term])
    if kind != "Consumption":
        return None
    return Quote(name, region, "", "spot" if sku.endswith(" Spot") else "on-demand", usd)


CLOUD = Cloud(
    name="azure",
    tariff=Tariff(
        Billing(1.0, source="Azure virtual machines pricing: by the second"),
        usd_per_gib_between=0.02,
        usd_per_gib_out=0.087,
    ),
    refusals={
        "SkuNotAvailable": ("capacity", "offer"),
        "AllocationFailed": ("capacity", "offer"),
        "OutOfCapacity": ("capacity", "offer"),
        "QuotaExceeded": ("quota", "family"),
    },
    schemes=("az", "abfs", "abfss"),
    burstable=re.compile("Standard_B"),
    provider_id="azure",
    prices=PriceSource(open=AzurePrices, regions=("eastus",)),
)
"""Billing and data between regions: recalled 2026-11. Data out of the cloud:
cloudtoolstack.com/blog/cloud-egress-cost-optimization (2026).
Refusals: Azure Resource Manager, error codes."""
