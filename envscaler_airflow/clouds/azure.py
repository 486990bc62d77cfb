"""Azure Retail Prices: no account is needed.

Source: learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. Tested against
answers written after that page; never run against the live service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from envscaler_airflow.clouds.base import Commitment, Fetched, Quote, usd_of
from envscaler_airflow.clouds.http import MAX_PAGES, Caller
from envscaler_airflow.errors import BackendError

URL = "https://prices.azure.com/api/retail/prices"
HOURS = {"1 Year": 8760.0, "3 Years": 26280.0}
TERMS: Mapping[str, Commitment] = {"1 Year": "1y", "3 Years": "3y"}


class AzurePrices:
    """Linux virtual machines of one region: pay as you go, spot, and reservations."""

    cloud = "azure"

    def __init__(self, *, caller: Caller | None = None, url: str = URL) -> None:
        """Take a caller, or make one."""
        self._caller = caller or Caller()
        self._url = url

    def fetch(self, region: str) -> Fetched:
        """See :class:`~envscaler_airflow.clouds.base.PriceFeed`."""
        quotes: dict[str, Quote] = {}
        strange = 0
        with self._caller:
            items = list(self._items(region))
        for item in items:
            quote = read_item(item)
            strange += item.get("currencyCode") != "USD"
            if quote is not None and quote.region == region:
                quotes.setdefault(quote.key, quote)
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
            url, params = page.get("NextPageLink") or None, None  # the link carries the query
            if not isinstance(url, str | None):
                raise BackendError(f"Azure Retail Prices: {url!r:.100} is no address", transient=True)
        raise BackendError(f"Azure Retail Prices: more than {MAX_PAGES} pages", transient=True)


def read_item(item: Mapping[str, Any]) -> Quote | None:
    """One meter as a quote; None for Windows, low priority, other units and what is no price."""
    name, sku, product = (str(item.get(key) or "") for key in ("armSkuName", "skuName", "productName"))
    usd = usd_of(item.get("retailPrice"), currency=item.get("currencyCode"))
    if not name or usd is None or "Windows" in product or "Low Priority" in sku:
        return None
    if str(item.get("unitOfMeasure")) != "1 Hour":
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
