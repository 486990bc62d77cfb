"""The packaged snapshot, the user's tables, and what is rejected in them."""

from __future__ import annotations

import gzip
import json

import pytest

from envscaler_airflow.catalog.packaged import MAGIC, pack, packaged, unpack
from envscaler_airflow.catalog.sources import (
    COLUMNS,
    EXERCISE,
    Published,
    open_catalog,
    read_scope,
    read_tables,
)
from envscaler_airflow.errors import NoOfferError, SpecError
from envscaler_airflow.planning import Requirements
from envscaler_airflow.planning.market import Scope, Search, search
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import Row, build_table

HEAD = ",".join(COLUMNS)
G5 = "aws,us-east-1,us-east-1a,g5.xlarge,4.0,16.0,A10G,1.0,22.35,1.006,0.4,x86_64,>20%,list,derived-2025"
TOKYO = (
    "aws,ap-northeast-1,ap-northeast-1a,g5.xlarge,4,16,A10G,1,22.35,1.4,0.5,x86_64,<5%,estimated,derived-2025"
)
N1 = "gcp,us-central1,us-central1-a,n1-standard-8,8,30,,,,0.38,0.08,x86_64,,list,list"
BIG_N1 = "gcp,us-central1,us-central1-a,n1-standard-16,16,60,,,,0.76,0.16,x86_64,,list,list"
V100 = "gcp,us-central1,us-central1-a,,,,V100,1,16,2.48,0.74,,,list-attach,list-attach"
LIST_ONLY = Published({("aws", "list"): "AWS list price of 2026-07-20"})


def write(folder, *lines, name="offers-x.csv", head=HEAD):
    """A table of offers in *folder*."""
    path = folder / name
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_a_table_is_taken_as_it_is_and_labelled(tmp_path):
    """Every number with its meaning; the nominal memory replaces the usable one."""
    table = read_tables(write(tmp_path, G5, TOKYO))

    prices = {offer.name: offer.usd_per_hour for offer in table.offers()}
    assert prices == {
        "aws/us-east-1/us-east-1a/g5.xlarge/on-demand": 1.006,
        "aws/us-east-1/us-east-1a/g5.xlarge/spot": 0.4,
        "aws/ap-northeast-1/ap-northeast-1a/g5.xlarge/on-demand": 1.4,
        "aws/ap-northeast-1/ap-northeast-1a/g5.xlarge/spot": 0.5,
    }
    assert {offer.gpu_memory_gb for offer in table.offers()} == {24}
    assert table.label == EXERCISE
    assert all(offer.price_source.startswith(EXERCISE) for offer in table.offers())


def test_only_published_prices_are_prices(tmp_path):
    """A machine with an estimate has no price; the same applies to a derived spot price."""
    table = read_tables(write(tmp_path, G5, TOKYO), published=LIST_ONLY, label="list")

    prices = {offer.name: (offer.usd_per_hour, offer.price_source) for offer in table.offers()}
    assert prices == {
        "aws/us-east-1/us-east-1a/g5.xlarge/on-demand": (1.006, "AWS list price of 2026-07-20"),
        "aws/us-east-1/us-east-1a/g5.xlarge/spot": (None, "no published price"),
        "aws/ap-northeast-1/ap-northeast-1a/g5.xlarge/on-demand": (None, "no published price"),
        "aws/ap-northeast-1/ap-northeast-1a/g5.xlarge/spot": (None, "no published price"),
    }


@pytest.mark.parametrize("price", ["nan", "-1", "0", "inf", "1,5", "free", "1e308"])
def test_a_price_that_is_none_is_unknown_and_said(tmp_path, price):
    """NaN, negative, zero, infinite, or text."""
    line = G5.replace(",1.006,", f',"{price}",')

    table = read_tables(write(tmp_path, line))

    offer = next(offer for offer in table.offers() if offer.capacity_type == "on-demand")
    assert offer.usd_per_hour is None
    assert table.faults == (f"offers-x.csv:2: {price!r} is not a price; it counts as unknown",)


def test_a_strange_currency_is_no_price(tmp_path):
    """0.5 of something is not $0.5."""
    table = read_tables(write(tmp_path, G5 + ",CNY", head=HEAD + ",currency"))

    assert {offer.usd_per_hour for offer in table.offers()} == {None}
    assert table.faults == ("offers-x.csv:2: currency 'CNY' is not USD: no price taken",)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("aws,us-east-1", "2 cells where the first line has 15"),
        (G5.replace(",4.0,", ",,"), "no machine"),
        (G5.replace(",16.0,", ",-16,"), "no machine"),
        (G5.replace(",A10G,", ",,"), "no machine"),
    ],
)
def test_a_line_that_is_no_machine_is_left_out_and_said(tmp_path, line, fault):
    """The other lines count."""
    table = read_tables(write(tmp_path, line, N1))

    assert {offer.instance_type for offer in table.offers()} == {"n1-standard-8"}
    assert len(table.faults) == 1
    assert fault in table.faults[0]


def test_gpus_of_gcp_are_attached_to_hosts_that_may_have_them(tmp_path):
    """One V100 attaches to up to 12 vCPUs: $0.38 + $2.48 an hour, and there is no second one on 16 vCPUs."""
    table = read_tables(write(tmp_path, N1, BIG_N1, V100))

    attached = [offer for offer in table.offers() if offer.is_attached]
    assert [(o.name, o.usd_per_hour, o.gpu_name, o.vcpus) for o in attached] == [
        ("gcp/us-central1/us-central1-a/n1-standard-8+V100:1/on-demand", 2.86, "V100", 8.0),
        ("gcp/us-central1/us-central1-a/n1-standard-8+V100:1/spot", 0.82, "V100", 8.0),
    ]


def test_a_table_in_the_compact_form_is_the_same(tmp_path):
    """Offers, label, faults and rows by price."""
    table = read_tables(write(tmp_path, G5, TOKYO, N1, V100, "aws,x"))

    again = unpack(pack(table))

    assert list(again.offers()) == list(table.offers())
    assert (again.label, again.faults, len(again)) == (table.label, table.faults, len(table))
    assert again.order("spot") == table.order("spot")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", MAGIC, MAGIC + b"torn", pack(packaged())[:-100]])
def test_a_torn_file_is_an_error_and_no_catalog(data):
    """A plan never uses half of the offers."""
    with pytest.raises(SpecError, match="make it again"):
        unpack(data)


def test_tables_are_read_once_and_again_when_they_change(tmp_path):
    """The second read uses the compact form; a new price is noticed."""
    folder, cache = tmp_path / "offers", tmp_path / "cache"
    folder.mkdir()
    write(folder, G5)
    first = open_catalog(folder, cache=cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(pack(read_tables(write(tmp_path, N1))))  # what a second look takes

    assert {kind.instance_type for kind in open_catalog(folder, cache=cache).kinds} == {"n1-standard-8"}

    write(folder, G5.replace("1.006", "1.0070"))
    again = open_catalog(folder, cache=cache)
    assert [offer.usd_per_hour for offer in first.offers()] == [1.006, 0.4]
    assert [offer.usd_per_hour for offer in again.offers()] == [1.007, 0.4]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("offers.csv", b"cloud,region\n", "no column zone"),
        ("offers.csv.gz", b"no gzip", "cannot be read"),
        ("offers.csv.gz", gzip.compress(HEAD.encode())[:-9], "cannot be read"),
        ("offers.csv", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_an_error(tmp_path, name, data, words):
    """The error names what, where, and what to write."""
    (tmp_path / name).write_bytes(data)

    with pytest.raises(SpecError, match=words):
        read_tables(tmp_path)


def test_a_folder_without_tables_is_an_error(tmp_path):
    """It is not an empty catalog."""
    with pytest.raises(SpecError, match="no table of offers"):
        read_tables(tmp_path)


def test_a_table_without_rows_offers_nothing(tmp_path):
    """The plan reports it."""
    with pytest.raises(NoOfferError, match="there is no offer at all"):
        search(Requirements(), read_tables(write(tmp_path))).pick()


def test_a_scope_file_names_regions_by_cloud(tmp_path):
    """A cloud that it does not name is excluded."""
    path = tmp_path / "scope.json"
    path.write_text(json.dumps({"aws": ["us-east-1"], "gcp": ["us-central1"]}))

    both, one = read_scope(path, None), read_scope(path, ["aws"])

    assert (both.has("aws", "us-east-1"), both.has("aws", "eu-west-1"), both.has("azure", "eastus")) == (
        True,
        False,
        False,
    )
    assert (one.has("aws", "us-east-1"), one.has("gcp", "us-central1")) == (True, False)
    with pytest.raises(SpecError, match="names none of azure"):
        read_scope(path, ["azure"])


@pytest.mark.parametrize("text", ["", "[]", '{"aws": 3}', "{"])
def test_a_scope_file_that_is_none_is_an_error(tmp_path, text):
    """It does not mean a scope of everything."""
    path = tmp_path / "scope.json"
    path.write_text(text)

    with pytest.raises(SpecError, match="no scope"):
        read_scope(path, None)


def test_the_snapshot_has_published_prices_alone():
    """AWS: list prices of one region and no spot price. Tencent: machines without prices. No price is 0."""
    offers = list(packaged().offers())

    by_cloud = {offer.cloud: 0 for offer in offers}
    for offer in offers:
        by_cloud[offer.cloud] += offer.usd_per_hour is not None
        assert offer.usd_per_hour is None or 0 < offer.usd_per_hour < 1000
    assert set(by_cloud) == {"alibaba", "aws", "azure", "gcp", "lambda", "nebius", "tencent"}
    assert by_cloud["tencent"] == 0
    priced = [offer for offer in offers if offer.cloud == "aws" and offer.usd_per_hour is not None]
    assert {(offer.region, offer.capacity_type) for offer in priced} == {("us-east-1", "on-demand")}
    assert {offer.price_source for offer in priced} == {"AWS list price of 2026-07-20"}


def test_the_snapshot_answers_by_nominal_memory():
    """141 GB is an H200; 96 GB of eight are H200 or larger."""
    h200 = search(Requirements(gpus=8, gpu_memory_gb=141, gpu_memory_max_gb=141), packaged())
    large = search(
        Requirements(gpus=8, gpu_memory_gb=96), packaged(), how=Search(Scope({"azure", "aws"}), limit=300)
    )

    assert {item.allocation.offer.gpu_name for item in h200.candidates} == {"H200"}
    names = {item.allocation.offer.gpu_name for item in large.candidates}
    assert names == {"MI300X", "H200", "B200", "B300", "RTXPRO6000"}


def test_an_offer_that_is_listed_twice_has_the_first_lines_price(tmp_path):
    """Two prices of one offer cannot both be right; a fault names the second."""
    line = "aws,us-east-1,us-east-1a,g4dn.xlarge,4,16,T4,1,16,{usd},,x86_64,,list,"
    (tmp_path / "offers.csv").write_text(
        "\n".join([",".join(COLUMNS), line.format(usd=0.5), line.format(usd=0.1)])
    )

    table = read_tables(tmp_path)

    assert [offer.usd_per_hour for offer in table.offers()] == [0.5]
    assert table.faults == ("offers.csv:3: 'g4dn.xlarge' there is listed twice; the first counts",)


def test_a_table_may_have_more_places_than_a_short_number_counts(tmp_path):
    """66,000 regions of one type."""
    rows = {
        InstanceType("own", "box", 4, 16): [
            Row(f"r{number}", usd=1.0, source=f"s{number}") for number in range(66_000)
        ]
    }

    table = build_table(rows)

    assert len(table) == len(table.places) == 66_000
    assert table.offer(0, 65_999, "on-demand").price_source == f"s{table.places[65_999][1][1:]}"
