"""Price lists of live prices: last good values, quarantine, and the catalog built from them."""

from __future__ import annotations

import json

import pytest

from envscaler_airflow.catalog.packaged import pack, unpack
from envscaler_airflow.catalog.prices import (
    Price,
    PriceCache,
    PriceList,
    committed_usd,
    known_prices,
    refreshed,
    unanswered,
    with_price_lists,
)
from envscaler_airflow.catalog.sources import open_catalog
from envscaler_airflow.clouds import Fetched, Quote, usd_of
from envscaler_airflow.clouds.aws import read_machine, read_product, read_type
from envscaler_airflow.clouds.azure import read_item
from envscaler_airflow.clouds.gcp import read_parts, sum_parts
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.planning import Requirements
from envscaler_airflow.planning.market import search
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import InstanceDetails, Row, build_table

G5 = InstanceType("aws", "g5.xlarge", 4, 16, "A10G", 1, 24, "x86_64")
TABLE = build_table(
    {G5: [Row("us-east-1", "us-east-1a", usd=1.006, has_spot=True), Row("eu-west-1", "eu-west-1a")]},
    label="packaged",
)
LISTED = Quote("g5.xlarge", "us-east-1", "", "on-demand", 1.1)
SPOT = Quote("g5.xlarge", "us-east-1", "us-east-1a", "spot", 0.45)
HOUR = 3600.0


def fetched(*quotes, **more):
    """A feed's prices for us-east-1."""
    return Fetched("aws", "us-east-1", quotes, "AWS", **more)


def refresh(last, *quotes, now=HOUR, **more):
    """The price list after an answer."""
    known = known_prices(TABLE, "aws", "us-east-1")
    return refreshed(last, fetched(*quotes), now=now, known=known, **more)


def test_live_prices_stand_over_the_snapshot_with_their_date():
    """On demand for the region, spot for the zone; a price that the feed lacks stays unknown."""
    table = with_price_lists(TABLE, [refresh(None, LISTED, SPOT)])

    offers = {offer.name: (offer.usd_per_hour, offer.price_source) for offer in table.offers()}
    assert offers["aws/us-east-1/us-east-1a/g5.xlarge/on-demand"] == (1.1, "AWS, 1970-01-01 01:00 UTC")
    assert offers["aws/us-east-1/us-east-1a/g5.xlarge/spot"] == (0.45, "AWS, 1970-01-01 01:00 UTC")
    assert offers["aws/eu-west-1/eu-west-1a/g5.xlarge/on-demand"] == (None, "")


def test_a_failure_keeps_the_last_good_prices_and_says_their_age():
    """The prices are three hours old, and the reason is named."""
    listed = unanswered(refresh(None, LISTED), "aws", "us-east-1", "AWS pricing answered 403", now=4 * HOUR)

    offers = [offer.usd_per_hour for offer in with_price_lists(TABLE, [listed]).offers()]
    assert 1.1 in offers
    assert listed.words(4 * HOUR) == (
        "aws us-east-1 3.0 h old (refresh failed 0.0 h ago: AWS pricing answered 403; "
        "the last good prices are kept)"
    )
    assert unanswered(None, "aws", "x", "no answer", now=0).words(0).startswith("aws x never answered")


def test_prices_that_the_newest_answer_left_out_go_on_and_are_said_to_be_older():
    """The price list is fresh, but a spot price that is no longer quoted is not."""
    listed = refresh(refresh(None, LISTED, SPOT), LISTED, now=49 * HOUR)

    sources = {
        offer.price_source for offer in with_price_lists(TABLE, [listed]).offers() if offer.usd_per_hour
    }
    assert sources == {"AWS, 1970-01-03 01:00 UTC", "AWS, 1970-01-01 01:00 UTC"}
    assert listed.words(49 * HOUR) == (
        "aws us-east-1 0.0 h old (1 prices are older: the newest answer left them out)"
    )
    assert PriceList.from_dict(listed.to_dict()) == listed
    assert "older" not in refresh(listed, LISTED, SPOT, now=50 * HOUR).words(50 * HOUR)


@pytest.mark.parametrize("usd", [1.1 * 5.01, 1.1 / 5.01, 0.00001])
def test_an_outlier_is_in_quarantine_and_the_last_one_goes_on(usd):
    """More than five times the last one, or less than a fifth of it."""
    listed = refresh(refresh(None, LISTED), LISTED._replace(usd=usd), now=2 * HOUR)

    assert listed.prices == {LISTED.key: Price(1.1, HOUR)}
    assert listed.quarantined == {LISTED.key: usd}
    assert "1 outliers are in quarantine" in listed.words(2 * HOUR)
    assert refresh(listed, LISTED._replace(usd=usd), now=3 * HOUR, trust_outliers=True).prices == {
        LISTED.key: Price(usd, 3 * HOUR)
    }


def test_a_first_price_is_held_against_the_snapshot_and_spot_against_on_demand():
    """A spot price of $0.00001 for a machine of $1.1 is not valid."""
    listed = refresh(None, LISTED._replace(usd=10.0), SPOT)
    odd = refresh(None, LISTED, SPOT._replace(usd=0.00001))

    assert listed.quarantined == {LISTED.key: 10.0}
    assert odd.quarantined == {SPOT.key: 0.00001}
    assert set(odd.prices) == {LISTED.key}


def test_a_spot_price_without_anything_to_hold_it_against_is_still_no_gift():
    """For a type without a known on-demand price, a thousandth of a cent is rejected."""
    odd = SPOT._replace(instance_type="g9.xlarge", usd=0.00001)

    assert refresh(None, odd).quarantined == {odd.key: 0.00001}
    assert refresh(None, odd._replace(usd=0.0013)).prices == {odd.key: Price(0.0013, HOUR)}


def test_quarantine_outlives_restarts_and_gradual_changes_do_not_enter_it(tmp_path):
    """Each process reads what the last one kept; outliers are compared with the last good price."""
    day = 24 * HOUR
    prices = [1.1, 50.0, 50.0, 4.0, 15.0]
    seen = []
    for number, usd in enumerate(prices):
        cache = PriceCache(tmp_path)  # a new process
        listed = cache.refresh(
            Feed(fetched(LISTED._replace(usd=usd))), "us-east-1", clock=lambda at=number: at * day
        )
        seen.append((listed.prices[LISTED.key].usd, listed.quarantined.get(LISTED.key)))

    assert seen == [(1.1, None), (1.1, 50.0), (1.1, 50.0), (4.0, None), (15.0, None)]
    assert PriceCache(tmp_path).price_list("aws", "us-east-1").prices[LISTED.key] == Price(15.0, 4 * day)


def test_spot_dearer_than_on_demand_is_a_price_and_not_chosen():
    """It happens when a zone is short of capacity; five times more is an outlier."""
    table = with_price_lists(TABLE, [refresh(None, LISTED, SPOT._replace(usd=2.0))])

    chosen = search(Requirements(gpus=1, region="us-east-1"), table).chosen

    assert (chosen.allocation.offer.capacity_type, chosen.usd_per_hour) == ("on-demand", 1.1)
    assert refresh(None, LISTED, SPOT._replace(usd=5.6)).quarantined == {SPOT.key: 5.6}


def test_new_machines_and_zones_become_offers():
    """A type that the snapshot lacks, in the zones that the cloud names."""
    new = InstanceType("aws", "g9.xlarge", 8, 32, "B200", 1, 180, "x86_64")
    zones = {"g9.xlarge": ("us-east-1b", "us-east-1c"), "g5.xlarge": ("us-east-1a", "us-east-1d")}
    quotes = (LISTED, LISTED._replace(instance_type="g9.xlarge", usd=9.0))
    listed = refreshed(
        None, fetched(*quotes, kinds=(new,), zones=zones, risks={"g9.xlarge": 5}), now=0, known={}
    )

    table = with_price_lists(TABLE, [PriceList.from_dict(json.loads(json.dumps(listed.to_dict())))])

    names = [offer.name for offer in table.offers() if offer.usd_per_hour is not None]
    assert sorted(names) == [
        "aws/us-east-1/us-east-1a/g5.xlarge/on-demand",
        "aws/us-east-1/us-east-1b/g9.xlarge/on-demand",
        "aws/us-east-1/us-east-1c/g9.xlarge/on-demand",
        "aws/us-east-1/us-east-1d/g5.xlarge/on-demand",
    ]
    assert search(Requirements(gpus=1, gpu_types=("B200",)), table).chosen.usd_per_hour == 9.0


def test_zones_that_become_known_replace_the_row_without_one():
    """Otherwise an offer of the whole region would be counted twice."""
    table = build_table({G5: [Row("us-east-1", usd=1.006)]})
    listed = refreshed(None, fetched(LISTED, zones={"g5.xlarge": ("us-east-1a",)}), now=0, known={})

    assert [offer.name for offer in with_price_lists(table, [listed]).offers()] == [
        "aws/us-east-1/us-east-1a/g5.xlarge/on-demand"
    ]


@pytest.mark.parametrize("value", ["", "nan", "-1", "0", "0.0000000000", None, True, "free", float("inf")])
def test_what_is_no_price_is_unknown(value):
    """The price is never 0 or NaN."""
    assert usd_of(value) is None
    assert usd_of("1", currency="EUR") is None
    assert usd_of("1.5") == 1.5


class Feed:
    """Returns scripted answers, or fails."""

    cloud = "aws"

    def __init__(self, *answers):
        """Store the answers, in order; an exception is raised."""
        self.answers = list(answers)

    def fetch(self, region):
        """The next answer."""
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_shelf_goes_through_good_and_bad_days(tmp_path, monkeypatch):
    """Refreshed, failed, torn: the catalog has the last good prices, and at worst the snapshot."""
    monkeypatch.setattr("time.time", lambda: 3 * HOUR)
    for module in ("prices", "sources"):
        monkeypatch.setattr(f"envscaler_airflow.catalog.{module}.packaged", lambda: TABLE)
    cache = PriceCache(tmp_path)
    refused = BackendError("AWS pricing answered 429", status=429, transient=True)
    price = LISTED._replace(usd=1.2)
    feed = Feed(fetched(price), refused)

    first = cache.refresh(feed, "us-east-1", clock=lambda: HOUR)
    second = cache.refresh(feed, "us-east-1", clock=lambda: 2 * HOUR)
    cache.compile()
    live = open_catalog(cache=tmp_path)

    assert (first.error, second.error) == (None, "AWS pricing answered 429")
    assert second.prices == first.prices == {price.key: Price(1.2, HOUR)}
    assert "aws us-east-1 2.0 h old (refresh failed 1.0 h ago: AWS pricing answered 429" in live.label
    need = Requirements(gpus=1, gpu_types=("A10G",), capacity="on-demand", region="us-east-1")
    assert search(need, live).chosen.usd_per_hour == 1.2

    (tmp_path / "catalog.bin").write_bytes(b"torn")
    torn = open_catalog(cache=tmp_path)
    assert search(need, torn).chosen.usd_per_hour == 1.006
    assert torn.label.startswith(f"packaged; the live prices in {tmp_path} are torn or of another version")
    (tmp_path / "prices-aws-us-east-1.json").write_text("{")
    assert cache.price_lists() == []


def test_a_shelf_that_cannot_be_written_says_where(tmp_path):
    """The error also names what to set."""
    (tmp_path / "file").write_text("")

    with pytest.raises(SpecError, match="set ENVSCALER_CACHE"):
        PriceCache(tmp_path / "file").refresh(Feed(fetched(LISTED)), "us-east-1", clock=lambda: 0)


def test_committed_prices_are_kept_for_reports_alone(tmp_path):
    """The plan uses pay-as-you-go prices; a report shows the terms on request, shortest first."""
    quotes = (
        LISTED,
        LISTED._replace(usd=0.4, commitment="3y"),
        LISTED._replace(usd=0.6, commitment="1y"),
    )
    cache = PriceCache(tmp_path)
    listed = cache.refresh(Feed(fetched(*quotes)), "us-east-1", clock=lambda: 0)
    offers = {offer.name: offer for offer in with_price_lists(TABLE, [listed]).offers()}
    here = "aws/us-east-1/us-east-1a/g5.xlarge"

    found = cache.commitments(
        [offers[f"{here}/on-demand"], offers["aws/eu-west-1/eu-west-1a/g5.xlarge/on-demand"]]
    )

    assert offers[f"{here}/on-demand"].usd_per_hour == 1.1
    assert found == {f"{here}/on-demand": {"1y": 0.6, "3y": 0.4}}
    assert list(found[f"{here}/on-demand"]) == ["1y", "3y"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"prices": []}', '{"prices": {"g5.xlarge||us-east-1||on-demand|1y": 3}}']
)
def test_a_torn_book_has_no_commitments(tmp_path, text):
    """It does not break a plan."""
    (tmp_path / "prices-aws-us-east-1.json").write_text(text)
    offer = next(offer for offer in TABLE.offers() if offer.region == "us-east-1")

    assert PriceCache(tmp_path).commitments([offer]) == {}


def test_committed_prices_that_are_none_are_left_out():
    """NaN, 0 and text."""
    key = LISTED._replace(commitment="1y").key
    offer = next(offer for offer in TABLE.offers() if offer.region == "us-east-1")

    for usd in (float("nan"), 0, -1, "free", None):
        assert committed_usd({key: {"usd": usd, "at": 0}}, offer) == {}
    assert committed_usd({key: {"usd": 0.6, "at": 0}}, offer) == {"1y": 0.6}


def aws_product(**changes):
    """A product of the price list, as the Price List Query API gives it."""
    attributes = {
        "instanceType": "g5.xlarge",
        "regionCode": "us-east-1",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    } | changes
    hourly = {"unit": "Hrs", "pricePerUnit": {"USD": "1.0060000000"}}
    year = {"LeaseContractLength": "1yr", "PurchaseOption": "No Upfront", "OfferingClass": "standard"}
    dear = {"LeaseContractLength": "1yr", "PurchaseOption": "All Upfront", "OfferingClass": "standard"}
    reserved = {"unit": "Hrs", "pricePerUnit": {"USD": "0.6340000000"}}
    return {
        "product": {"attributes": attributes},
        "terms": {
            "OnDemand": {"A": {"priceDimensions": {"B": hourly}}},
            "Reserved": {
                "C": {"termAttributes": year, "priceDimensions": {"D": reserved}},
                "E": {"termAttributes": dear, "priceDimensions": {"F": reserved}},
            },
        },
    }


def test_aws_products_give_list_and_committed_prices():
    """Linux on shared machines; reservations without upfront payment."""
    quotes = list(read_product(aws_product(), "us-east-1"))

    assert [(quote.usd, quote.commitment) for quote in quotes] == [(1.006, ""), (0.634, "1y")]
    assert list(read_product(aws_product(operatingSystem="Windows"), "us-east-1")) == []
    assert list(read_product(aws_product(capacitystatus="AllocatedCapacityReservation"), "us-east-1")) == []
    assert list(read_product({}, "us-east-1")) == []


def test_aws_machines_have_canonical_gpus():
    """The 80 GB of an A100 are not in its name; a machine without a size is skipped."""
    item = {
        "InstanceType": "p4de.24xlarge",
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": 96},
        "MemoryInfo": {"SizeInMiB": 1179648},
        "GpuInfo": {"Gpus": [{"Name": "A100", "Count": 8, "MemoryInfo": {"SizeInMiB": 81920}}]},
    }

    assert read_type(item) == InstanceType("aws", "p4de.24xlarge", 96, 1152, "A100-80GB", 8, 80, "x86_64")
    assert read_type({**item, "ProcessorInfo": {"SupportedArchitectures": ["i386"]}}) is None


def test_aws_machines_tell_network_disks_and_processor():
    """All network cards together; no local disk is 0 and not unknown."""
    cards = [{"BaselineBandwidthInGbps": 100.0, "PeakBandwidthInGbps": 200.0}] * 4
    item = {
        "NetworkInfo": {"NetworkCards": cards},
        "InstanceStorageInfo": {"TotalSizeInGB": 8000},
        "ProcessorInfo": {"Manufacturer": "Intel", "SustainedClockSpeedInGhz": 3.0},
    }

    assert read_machine(item, source="s") == InstanceDetails(400.0, 800.0, 8000.0, "Intel, 3 GHz", "s")
    assert read_machine({"InstanceStorageSupported": False}, source="s") == InstanceDetails(
        None, None, 0.0, None, "s"
    )


@pytest.mark.parametrize("strange", [None, "5 Gigabit", float("nan"), -1, True, {}])
def test_a_strange_fact_is_unknown(strange):
    """If one card reports nothing, the sum is unknown, not smaller."""
    cards = [{"BaselineBandwidthInGbps": 100.0}, {"BaselineBandwidthInGbps": strange}]
    item = {
        "NetworkInfo": {"NetworkCards": cards},
        "InstanceStorageInfo": {"TotalSizeInGB": strange},
        "ProcessorInfo": {"SustainedClockSpeedInGhz": strange},
    }

    assert read_machine(item, source="s") == InstanceDetails(source="s")


def test_facts_of_a_feed_stand_over_the_snapshot_and_outlive_a_failure():
    """They are cached with the prices, and packed with the catalog."""
    packed = build_table(
        {G5: [Row("us-east-1", "us-east-1a")]}, machines={("aws", "g5.xlarge"): InstanceDetails(1.0)}
    )
    live = InstanceDetails(2.5, 10.0, 250.0, "AMD, 3.3 GHz", "DescribeInstanceTypes")
    listed = refreshed(None, fetched(LISTED, machines={"g5.xlarge": live}), now=0, known={})
    later = refreshed(listed, fetched(LISTED), now=HOUR, known={})

    table = with_price_lists(packed, [PriceList.from_dict(json.loads(json.dumps(later.to_dict())))])

    dated = live._replace(source="DescribeInstanceTypes, 1970-01-01")
    assert table.machines == {("aws", "g5.xlarge"): dated}
    assert unpack(pack(table)).machines == {("aws", "g5.xlarge"): dated}
    assert with_price_lists(packed, []).machines == {("aws", "g5.xlarge"): InstanceDetails(1.0)}


def test_what_a_feed_does_not_tell_of_a_machine_stays_known():
    """A fact that is missing in an answer is unchanged; both sources are named."""
    old = InstanceDetails(1.0, 10.0, 250.0, "AMD, 3.3 GHz", "snapshot")
    packed = build_table({G5: [Row("us-east-1", "us-east-1a")]}, machines={("aws", "g5.xlarge"): old})

    def joined(live):
        listed = refreshed(None, fetched(LISTED, machines={"g5.xlarge": live}), now=0, known={})
        return with_price_lists(packed, [listed]).machines["aws", "g5.xlarge"]

    assert joined(InstanceDetails(source="feed")) == old
    assert joined(InstanceDetails(2.5, source="feed")) == InstanceDetails(
        2.5, 10.0, 250.0, "AMD, 3.3 GHz", "feed, 1970-01-01; snapshot"
    )


AZURE = {
    "currencyCode": "USD",
    "retailPrice": 0.526,
    "armRegionName": "eastus",
    "productName": "Virtual Machines NCasT4_v3 Series",
    "skuName": "NC4as T4 v3",
    "armSkuName": "Standard_NC4as_T4_v3",
    "unitOfMeasure": "1 Hour",
    "type": "Consumption",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("on-demand", 0.526, "")),
        ({"skuName": "NC4as T4 v3 Spot"}, ("spot", 0.526, "")),
        (
            {"type": "Reservation", "reservationTerm": "1 Year", "retailPrice": 876.0},
            ("on-demand", 0.1, "1y"),
        ),
        ({"skuName": "NC4as T4 v3 Low Priority"}, None),
        ({"productName": "Virtual Machines NCasT4_v3 Series Windows"}, None),
        ({"currencyCode": "EUR"}, None),
        ({"retailPrice": 0.0}, None),
        ({"unitOfMeasure": "1 Month"}, None),
        ({"type": "DevTestConsumption"}, None),
    ],
)
def test_azure_meters(changes, expected):
    """Only Linux, by the hour and in dollars."""
    quote = read_item({**AZURE, **changes})

    assert (quote and (quote.capacity, pytest.approx(quote.usd), quote.commitment)) == expected


def sku(description, usage, nanos, *, unit="h", units="0", region="us-central1", currency="USD"):
    """A SKU of the Cloud Billing Catalog."""
    price = {"currencyCode": currency, "units": units, "nanos": nanos}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": [region],
        "pricingInfo": [{"pricingExpression": expression}],
    }


GCP = [
    sku("N1 Predefined Instance Core running in Americas", "OnDemand", 31611000),
    sku("N1 Predefined Instance Ram running in Americas", "OnDemand", 4237000, unit="GiBy.h"),
    sku("Spot Preemptible N1 Predefined Instance Core running in Americas", "Preemptible", 6655000),
    sku(
        "Spot Preemptible N1 Predefined Instance Ram running in Americas",
        "Preemptible",
        892000,
        unit="GiBy.h",
    ),
    sku("Nvidia Tesla V100 GPU running in Americas", "OnDemand", 480000000, units="2"),
    sku("Nvidia Tesla V100 GPU running in Europe", "OnDemand", 990000000, region="europe-west4"),
    sku("N1 Custom Instance Core running in Americas", "OnDemand", 999),
    sku("N1 Sole Tenancy Instance Core running in Americas", "OnDemand", 999),
    sku("Compute optimized Core running in Americas", "OnDemand", 33982000),
    sku("Compute optimized Ram running in Americas", "OnDemand", 4554000, unit="GiBy.h", currency="EUR"),
]


@pytest.mark.parametrize("regions", [None, 5, "us-central1", {}])
def test_a_gcp_price_of_no_list_of_regions_is_none(regions):
    """It is not an error either: the other prices count."""
    assert read_parts([GCP[0] | {"serviceRegions": regions}], "us-central1") == ({}, 0)


def test_gcp_machines_cost_the_sum_of_their_parts():
    """Eight cores, 30 GiB and two V100 of $2.48: $5.34; no spot price where a part has none."""
    parts, strange = read_parts(GCP, "us-central1")
    host = InstanceType("gcp", "n1-standard-8", 8, 30, arch="x86_64")
    with_gpu = host._replace(gpu_name="V100", gpus=2.0, is_attached=True)

    quotes = [*sum_parts(host, "us-central1", parts), *sum_parts(with_gpu, "us-central1", parts)]

    assert [(q.gpu, q.capacity, q.usd) for q in quotes] == [
        ("", "on-demand", 0.379998),
        ("", "spot", 0.08),
        ("V100:2", "on-demand", 5.339998),
    ]
    assert strange == 1
    assert list(sum_parts(InstanceType("gcp", "c2-standard-4", 4, 16), "us-central1", parts)) == []
    assert list(sum_parts(InstanceType("gcp", "e2-micro", 2, 1), "us-central1", parts)) == []
