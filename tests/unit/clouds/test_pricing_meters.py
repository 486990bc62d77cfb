"""Other meters than the one that bills a machine: other services, other times, other systems."""

from datetime import UTC, datetime

import pytest

from envscaler_airflow.clouds import Access
from envscaler_airflow.clouds.aws import read_product
from envscaler_airflow.clouds.azure import AzurePrices
from envscaler_airflow.clouds.gcp import read_parts

NOW = datetime(2026, 6, 1, tzinfo=UTC)
VM = {
    "currencyCode": "USD", "retailPrice": 0.096, "armRegionName": "eastus", "armSkuName": "Standard_D2s_v3",
    "skuName": "D2s v3", "meterName": "D2s v3", "productName": "Virtual Machines Dsv3 Series",
    "serviceName": "Virtual Machines", "unitOfMeasure": "1 Hour", "type": "Consumption",
    "effectiveStartDate": "2023-01-01T00:00:00Z", "isPrimaryMeterRegion": True, "tierMinimumUnits": 0.0,
}  # fmt: skip
OTHERS = {
    "cloud_services": {"productName": "Dsv3 Series Cloud Services"},
    "cloud_services_together": {"productName": "Dsv3 Series CloudServices"},
    "dedicated_host": {"productName": "Dsv3 Series Dedicated Host", "skuName": "Dsv3_Type1"},
    "windows": {"productName": "Virtual Machines Dsv3 Series Windows"},
    "low_priority": {"meterName": "D2s v3 Low Priority"},
    "expired_by_name": {"skuName": "D2s v3 - Expired"},
    "expired_by_date": {"effectiveEndDate": "2026-05-31T23:59:59Z"},
    "to_come": {"effectiveStartDate": "2026-07-01T00:00:00Z"},
    "promotion": {"meterName": "D2s v3 Promo"},
    "licence": {"productName": "Virtual Machines Dsv3 Series Red Hat"},
    "database": {"productName": "SQL Server on Virtual Machines"},
    "other_service": {"serviceName": "Azure Databricks"},
    "larger_amounts": {"tierMinimumUnits": 1000.0},
    "development": {"type": "DevTestConsumption"},
}


class Pages:
    """Answers of a price list: one page."""

    headers: dict = {}  # noqa: RUF012  (of the caller that it stands for)

    def __init__(self, items):
        """Store *items*."""
        self.items = items

    def __enter__(self):
        """As a caller."""
        return self

    def __exit__(self, *_):
        """Nothing to close."""

    def json(self, *_):
        """Return the page."""
        return {"Items": self.items, "NextPageLink": None}


def azure(*items):
    """Prices that the feed gives for *items*."""
    feed = AzurePrices(Access(), caller=Pages(list(items)), clock=lambda: NOW)
    return [(quote.capacity, quote.usd) for quote in feed.fetch("eastus").quotes]


@pytest.mark.parametrize("changes", OTHERS.values(), ids=list(OTHERS))
def test_azure_s_other_meters_are_no_price_of_a_machine(changes):
    """They may come before or after it, or alone (E)."""
    other = {**VM, "retailPrice": 0.188, **changes}

    assert azure(other, VM) == [("on-demand", 0.096)]
    assert azure(VM, other) == [("on-demand", 0.096)]
    assert azure(other) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"effectiveStartDate": "2022-01-01T00:00:00Z"},
        {"isPrimaryMeterRegion": False, "effectiveStartDate": "2026-01-01T00:00:00Z"},
        {"productName": "Dsv3 Series", "effectiveStartDate": "2026-01-01T00:00:00Z"},
    ],
)
def test_of_two_meters_of_a_machine_the_current_one_counts(changes):
    """The newest of the primary region, named as a virtual machine's (E)."""
    older = {**VM, "retailPrice": 0.2, **changes}

    assert azure(older, VM) == azure(VM, older) == [("on-demand", 0.096)]
    assert azure(older) == [("on-demand", 0.2)]


def test_spot_and_reservations_stay_prices_of_their_own():
    """They are listed beside the price on demand (E)."""
    spot = {**VM, "retailPrice": 0.02, "skuName": "D2s v3 Spot", "meterName": "D2s v3 Spot"}
    year = {**VM, "retailPrice": 438.0, "type": "Reservation", "reservationTerm": "1 Year"}

    assert azure(VM, spot, year) == [("on-demand", 0.096), ("spot", 0.02), ("on-demand", 0.05)]


def product(terms, **attributes):
    """A product of AWS' price list with on-demand *terms*."""
    ordinary = {
        "instanceType": "g5.xlarge", "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
        "capacitystatus": "Used", "operation": "RunInstances", "licenseModel": "No License required",
    }  # fmt: skip
    return {"product": {"attributes": {**ordinary, **attributes}}, "terms": {"OnDemand": terms}}


def term(usd, begins="2025-01-01T00:00:00Z", **dimension):
    """A term with one price."""
    price = {"unit": "Hrs", "pricePerUnit": {"USD": usd}, "beginRange": "0", **dimension}
    return {"effectiveDate": begins, "priceDimensions": {"D": price}}


def aws(terms, **attributes):
    """The feed's prices."""
    return [quote.usd for quote in read_product(product(terms, **attributes), "us-east-1")]


def test_aws_s_current_term_counts():
    """Not the previous or the next term, nor one for larger amounts (E)."""
    terms = {
        "A": term("1.0"),
        "B": term("1.2", "2026-01-01T00:00:00Z"),
        "C": term("9.0", "2999-01-01T00:00:00Z"),
    }

    assert aws(terms) == [1.2]
    assert aws({"A": term("1.0", beginRange="1000")}) == []


@pytest.mark.parametrize(
    "attributes",
    [
        {"marketoption": "CapacityBlock"},
        {"operation": "RunInstances:0002"},
        {"licenseModel": "Bring your own license"},
        {"tenancy": "Dedicated"},
        {"preInstalledSw": "SQL Std"},
    ],
)
def test_aws_s_other_products_are_no_price_of_a_machine(attributes):
    """Capacity blocks, other systems and licences share its name (E)."""
    assert aws({"A": term("1.0")}, **attributes) == []
    assert aws({"A": term("1.0")}, marketoption="OnDemand") == [1.0]


def test_gcp_s_current_price_counts():
    """One of several dated prices, in any order (E)."""

    def price(nanos, begins):
        rates = [{"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": nanos}}]
        return {"effectiveTime": begins, "pricingExpression": {"usageUnit": "h", "tieredRates": rates}}

    sku = {
        "description": "N1 Predefined Instance Core running in Americas",
        "category": {"usageType": "OnDemand"},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [
            price(30_000_000, "2026-01-01T00:00:00Z"),
            price(20_000_000, "2020-01-01T00:00:00Z"),
            price(90_000_000, "2999-01-01T00:00:00Z"),
        ],
    }

    assert read_parts([sku], "us-central1") == ({("n1", "core", "on-demand", ""): 0.03}, 0)
