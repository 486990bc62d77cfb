"""Live prices over real HTTP: every fault, and moto where it is correct.

What moto lacks (the Price List) or answers wrongly (each spot price is 0.00001) comes from a server of
the test's own, whose answers are written after the clouds' API documents. None was recorded.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import boto3
import httpx
import pytest
from click.testing import CliRunner
from moto.server import ThreadedMotoServer

from envscaler_airflow.catalog.packaged import packaged
from envscaler_airflow.catalog.prices import PriceCache
from envscaler_airflow.cli import main
from envscaler_airflow.clouds import Access
from envscaler_airflow.clouds.aws import AwsPrices
from envscaler_airflow.clouds.azure import AzurePrices
from envscaler_airflow.clouds.gcp import GcpPrices
from envscaler_airflow.clouds.http import Caller
from envscaler_airflow.errors import BackendError
from envscaler_airflow.planning.offers import InstanceType

SESSION = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1")
"""One for all tests: each session reads the descriptions of the services again, which takes 0.3 s of CPU."""
AZURE_ITEM = {
    "currencyCode": "USD",
    "tierMinimumUnits": 0.0,
    "retailPrice": 0.526,
    "unitPrice": 0.526,
    "armRegionName": "eastus",
    "location": "US East",
    "effectiveStartDate": "2026-06-01T00:00:00Z",
    "meterName": "NC4as T4 v3",
    "productName": "Virtual Machines NCasT4_v3 Series",
    "skuName": "NC4as T4 v3",
    "serviceName": "Virtual Machines",
    "serviceFamily": "Compute",
    "unitOfMeasure": "1 Hour",
    "type": "Consumption",
    "isPrimaryMeterRegion": True,
    "armSkuName": "Standard_NC4as_T4_v3",
}
REFUSED = b"""<Response><Errors><Error><Code>UnauthorizedOperation</Code><Message>no</Message></Error>
</Errors></Response>"""
SPOT_HISTORY = """<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<requestId>1</requestId><nextToken/><spotPriceHistorySet>{items}</spotPriceHistorySet>
</DescribeSpotPriceHistoryResponse>"""
SPOT_ITEM = """<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>{usd}</spotPrice><timestamp>2026-11-29T{hour:02d}:00:00.000Z</timestamp>
<availabilityZone>{zone}</availabilityZone></item>"""


class Cloud(ThreadingHTTPServer):
    """Answers by a test's script: ``answer(method, path, query, headers, body)`` returns status and body."""

    daemon_threads = True

    def __init__(self):
        """Listen on a free port."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen = []
        self.answer = lambda *_: (404, b"")


class Handler(BaseHTTPRequestHandler):
    """Passes each request to the script."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for the confirmation of the headers

    def _do(self):
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.server.seen.append((parts.path, query))
        status, answer = self.server.answer(self.command, parts.path, query, self.headers, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _do  # noqa: N815 - names of http.server

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def cloud():
    """A server on loopback, stopped at the end."""
    server = Cloud()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def caller():
    """Short timeouts and no pauses."""
    with httpx.Client(timeout=0.3) as client:
        yield Caller(client, sleep=lambda _: None)


def test_azure_follows_the_pages(cloud, caller):
    """The link of the first page contains the query."""
    spot = {**AZURE_ITEM, "skuName": "NC4as T4 v3 Spot", "retailPrice": 0.1}

    def answer(_method, _path, query, *_):
        if "$skip" in query:
            return 200, {"Items": [spot], "NextPageLink": None, "Count": 1}
        assert query["$filter"] == "serviceName eq 'Virtual Machines' and armRegionName eq 'eastus'"
        return 200, {"Items": [AZURE_ITEM], "NextPageLink": f"{cloud.url}/prices?$skip=1", "Count": 1}

    cloud.answer = answer

    got = AzurePrices(Access(endpoint_url=f"{cloud.url}/prices"), caller=caller).fetch("eastus")

    assert [(quote.capacity, quote.usd) for quote in got.quotes] == [("on-demand", 0.526), ("spot", 0.1)]
    assert len(cloud.seen) == 2


def test_gcp_reads_the_list_of_skus_once(cloud, caller):
    """Two regions need one pass over the pages."""
    skus = [
        {
            "description": f"G2 Instance {part} running in Americas",
            "category": {"usageType": "OnDemand"},
            "serviceRegions": ["us-central1", "us-east1"],
            "pricingInfo": [
                {
                    "pricingExpression": {
                        "usageUnit": unit,
                        "tieredRates": [{"unitPrice": {"currencyCode": "USD", "units": "0", "nanos": nanos}}],
                    }
                }
            ],
        }
        for part, unit, nanos in (("Core", "h", 25000000), ("Ram", "GiBy.h", 3000000))
    ]
    gpu = json.loads(
        json.dumps(skus[0]).replace("G2 Instance Core", "Nvidia L4 GPU").replace("25000000", "560000000")
    )

    def answer(_method, _path, query, headers, _body):
        assert headers["X-Goog-Api-Key"] == "secret"
        if query.get("pageToken") == "2":
            return 200, {"skus": [gpu], "nextPageToken": ""}
        return 200, {"skus": skus, "nextPageToken": "2"}

    cloud.answer = answer
    kind = InstanceType("gcp", "g2-standard-4", 4, 16, "L4", 1, 24, "x86_64")
    feed = GcpPrices(Access(secret="secret", endpoint_url=cloud.url), caller=caller, kinds=[kind])

    prices = [quote.usd for region in ("us-central1", "us-east1") for quote in feed.fetch(region).quotes]

    assert prices == [pytest.approx(0.1 + 0.048 + 0.56)] * 2
    assert len(cloud.seen) == 2


@pytest.mark.parametrize(
    ("status", "body", "words", "transient", "asked"),
    [
        (403, b"no", "answered 403", False, 1),
        (429, b"slower", "answered 429", True, 3),
        (500, b"oh", "answered 500", True, 3),
        (200, b'{"Items": [{"curren', "not complete JSON", True, 1),
        (200, b"<html>", "not complete JSON", True, 1),
        (200, b'{"error": {}}', "has no Items", True, 1),
        (200, b"[]", "has no Items", True, 1),
    ],
)
def test_every_bad_answer_is_an_error_and_never_a_price(cloud, caller, status, body, words, transient, asked):
    """The error has the answer and whether to retry; only a temporary failure is retried."""
    cloud.answer = lambda *_: (status, body)

    with pytest.raises(BackendError, match=words) as caught:
        AzurePrices(Access(endpoint_url=cloud.url), caller=caller).fetch("eastus")

    assert caught.value.transient is transient
    assert len(cloud.seen) == asked


def test_a_cloud_that_says_nothing_is_given_up(cloud, caller):
    """Its silence ends the request: the server answers only after that."""
    given_up = threading.Event()
    cloud.answer = lambda *_: (given_up.wait(), (200, b"{}"))[1]

    with pytest.raises(BackendError, match="no answer within") as caught:
        AzurePrices(Access(endpoint_url=cloud.url), caller=caller).fetch("eastus")
    given_up.set()

    assert caught.value.transient
    assert len(cloud.seen) == 1


def test_aws_that_says_nothing_is_given_up(cloud, caller, monkeypatch):
    """After the SDK's own retry; no price of the region is used."""
    monkeypatch.setattr("envscaler_airflow.clouds.aws.TIMEOUT_S", 0.4)
    given_up = threading.Event()
    cloud.answer = lambda *_: (given_up.wait(), (200, b"{}"))[1]

    with pytest.raises(BackendError, match=r"AWS pricing in us-east-1.*[Tt]ime") as caught:
        aws_feed(cloud, caller).fetch("us-east-1")
    given_up.set()

    assert caught.value.transient
    assert len(cloud.seen) == 2


@pytest.mark.parametrize(
    ("status", "body", "words", "transient"),
    [
        (403, b"no", "answered 403", False),
        (429, b"slower", "answered 429", True),
        (500, b"oh", "answered 500", True),
        (200, b'{"skus": [{"descr', "not complete JSON", True),
        (200, b'{"error": {}}', "has no skus", True),
    ],
)
def test_every_bad_answer_of_gcp_is_an_error(cloud, caller, status, body, words, transient):
    """And the next refresh requests the list again."""
    cloud.answer = lambda *_: (status, body)
    feed = GcpPrices(Access(secret="secret", endpoint_url=cloud.url), caller=caller, kinds=[])

    with pytest.raises(BackendError, match=words) as caught:
        feed.fetch("us-central1")
    asked = len(cloud.seen)
    cloud.answer = lambda *_: (200, {"skus": []})

    assert caught.value.transient is transient
    assert "secret" not in str(caught.value)
    assert feed.fetch("us-central1").quotes == ()
    assert len(cloud.seen) == asked + 1


def test_an_endless_list_of_pages_ends(cloud, caller, monkeypatch):
    """A link that leads to itself."""
    monkeypatch.setattr("envscaler_airflow.clouds.azure.MAX_PAGES", 5)
    cloud.answer = lambda *_: (200, {"Items": [], "NextPageLink": cloud.url})

    with pytest.raises(BackendError, match="more than 5 pages"):
        AzurePrices(Access(endpoint_url=cloud.url), caller=caller).fetch("eastus")


def aws_answer(seen, *, spot="0.3500", fail=None):
    """AWS as far as prices need it: price list in two pages, spot history, types, offerings, Spot Advisor."""
    types = """<DescribeInstanceTypesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><instanceTypeSet>
<item><instanceType>g5.xlarge</instanceType><processorInfo><supportedArchitectures><item>x86_64</item>
</supportedArchitectures></processorInfo><vCpuInfo><defaultVCpus>4</defaultVCpus></vCpuInfo><memoryInfo>
<sizeInMiB>16384</sizeInMiB></memoryInfo><gpuInfo><gpus><item><name>A10G</name><manufacturer>NVIDIA</manufacturer>
<count>1</count><memoryInfo><sizeInMiB>24576</sizeInMiB></memoryInfo></item></gpus></gpuInfo></item>
</instanceTypeSet></DescribeInstanceTypesResponse>"""
    offerings = """<DescribeInstanceTypeOfferingsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<instanceTypeOfferingSet><item><instanceType>g5.xlarge</instanceType><locationType>availability-zone</locationType>
<location>us-east-1a</location></item></instanceTypeOfferingSet></DescribeInstanceTypeOfferingsResponse>"""
    items = "".join(
        SPOT_ITEM.format(name="g5.xlarge", zone="us-east-1a", usd=usd, hour=hour)
        for usd, hour in (("0.9000", 1), (spot, 9), ("0.8000", 2))
    )

    def product(name, usd):
        wanted = {
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        hourly = {"unit": "Hrs", "pricePerUnit": {"USD": usd}, "rateCode": "x"}
        year = {"LeaseContractLength": "1yr", "PurchaseOption": "No Upfront", "OfferingClass": "standard"}
        less = {"unit": "Hrs", "pricePerUnit": {"USD": f"{float(usd) / 2:.4f}"}}
        return json.dumps(
            {
                "product": {
                    "attributes": {"instanceType": name, **wanted},
                    "productFamily": "Compute Instance",
                },
                "terms": {
                    "OnDemand": {"A": {"priceDimensions": {"B": hourly}, "termAttributes": {}}},
                    "Reserved": {"C": {"priceDimensions": {"D": less}, "termAttributes": year}},
                },
            }
        )

    def answer(_method, path, _query, headers, body):
        if path.endswith("spot-advisor-data.json"):
            seen.append("advisor")
            return 200, {"spot_advisor": {"us-east-1": {"Linux": {"g5.xlarge": {"s": 66, "r": 4}}}}}
        target = headers.get("X-Amz-Target") or parse_qs(body.decode())["Action"][0]
        seen.append(target)
        if fail is not None and target.endswith(fail[0]):
            return fail[1], fail[2]
        if target == "AWSPriceListService.GetProducts":
            if "NextToken" in json.loads(body):
                return 200, {"FormatVersion": "aws_v1", "PriceList": [product("g5.2xlarge", "0.0000000000")]}
            return 200, {
                "FormatVersion": "aws_v1",
                "PriceList": [product("g5.xlarge", "1.0060")],
                "NextToken": "2",
            }
        xml = {
            "DescribeSpotPriceHistory": SPOT_HISTORY.format(items=items),
            "DescribeInstanceTypes": types,
            "DescribeInstanceTypeOfferings": offerings,
        }
        return 200, xml[target].encode()

    return answer


def aws_feed(cloud, caller):
    """The feed against the server of the test."""
    return AwsPrices(Access(session=SESSION, endpoint_url=cloud.url), caller=caller)


def test_aws_list_spot_types_zones_and_risks(cloud, caller):
    """The newest spot price of each zone; a list price of 0 is not a price."""
    seen = []
    cloud.answer = aws_answer(seen)

    got = aws_feed(cloud, caller).fetch("us-east-1")

    assert {quote[:4] + quote[6:]: quote.usd for quote in got.quotes} == {
        ("g5.xlarge", "us-east-1", "", "on-demand", ""): 1.006,
        ("g5.xlarge", "us-east-1", "", "on-demand", "1y"): 0.503,
        ("g5.xlarge", "us-east-1", "us-east-1a", "spot", ""): 0.35,
    }
    assert got.kinds == (InstanceType("aws", "g5.xlarge", 4, 16, "A10G", 1, 24, "x86_64"),)
    assert got.zones == {"g5.xlarge": ("us-east-1a",)}
    assert got.risks == {"g5.xlarge": 5}
    assert seen.count("AWSPriceListService.GetProducts") == 2


@pytest.mark.parametrize(
    ("action", "status", "body", "transient"),
    [
        ("GetProducts", 400, {"__type": "AccessDeniedException", "message": "no"}, False),
        ("GetProducts", 400, {"__type": "ThrottlingException", "message": "slower"}, True),
        ("GetProducts", 500, {"__type": "InternalErrorException"}, True),
        ("GetProducts", 200, b'{"PriceList": ["{\\"prod', True),
        ("GetProducts", 200, {"PriceList": ["{torn"]}, True),
        ("GetProducts", 200, {"PriceList": ["null"]}, True),
        ("GetProducts", 200, {"PriceList": ['{"product": null}']}, True),
        ("DescribeSpotPriceHistory", 403, REFUSED, False),
        ("DescribeSpotPriceHistory", 200, b"<DescribeSpot", True),
    ],
)
def test_what_aws_refuses_is_an_error(cloud, caller, action, status, body, transient):
    """No price of the region is taken from an incomplete answer."""
    cloud.answer = aws_answer([], fail=(action, status, body))

    with pytest.raises(BackendError) as caught:
        aws_feed(cloud, caller).fetch("us-east-1")

    assert caught.value.transient is transient


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        ((503, b""), "answered 503"),
        ((200, {"spot_advisor": {"us-east-1": None}}), "in us-east-1: 'NoneType' object"),
        ((200, {"spot_advisor": {"us-east-1": {"Linux": {"g5.xlarge": 4}}}}), "in us-east-1: 'int' object"),
    ],
)
def test_an_advisor_that_fails_leaves_the_risks_unknown(cloud, caller, advice, words):
    """Prices are used nevertheless, and the failure is reported."""
    answer = aws_answer([])

    def without_advisor(method, path, *more):
        return advice if path.endswith(".json") else answer(method, path, *more)

    cloud.answer = without_advisor

    got = aws_feed(cloud, caller).fetch("us-east-1")

    assert len(got.quotes) == 3
    assert got.risks == {}
    assert f"interruption ranges are unknown: AWS Spot Advisor {words}" in got.notes[0]


def test_moto_answers_types_and_offerings_as_aws_does(cloud, caller):
    """Machines, GPUs and zones of a whole region; its spot prices of 0.00001 are quarantined."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        feed = AwsPrices(Access(session=SESSION, endpoint_url=f"http://{host}:{port}"), caller=caller)
        kinds, machines, zones = feed._call("ec2", "us-east-1", _types_and_zones)
        spot = feed._call("ec2", "us-east-1", _spot_of_t4)
    finally:
        server.stop()

    by_name = {kind.instance_type: kind for kind in kinds}
    assert len(by_name) > 500
    assert by_name["g4dn.xlarge"] == InstanceType("aws", "g4dn.xlarge", 4, 16, "T4", 1, 16, "x86_64")
    assert by_name["p4d.24xlarge"].gpu_name == "A100"
    assert machines["p4d.24xlarge"][:4] == (400.0, 400.0, 8000.0, "Intel, 3 GHz")
    assert machines["m5.large"][:4] == (0.75, 10.0, 0.0, "Intel, 3.1 GHz")
    assert "us-east-1a" in zones["g4dn.xlarge"]
    assert {quote.usd for quote in spot} <= {0.00001}


def _types_and_zones(api):
    from envscaler_airflow.clouds.aws import _types, _zones

    return *_types(api), _zones(api)


def _spot_of_t4(api):
    from envscaler_airflow.clouds.aws import _spot

    return list(_spot(api, "us-east-1"))


def test_the_shell_refreshes_and_plans_on_it(cloud, tmp_path, monkeypatch):
    """A good answer, then a bad one: the good one's price stays, with its age (feature B2)."""
    monkeypatch.setenv("ENVSCALER_CACHE", str(tmp_path))
    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(name, value)
    refresh = ["catalog", "refresh", "--cloud", "aws", "--region", "us-east-1", "--endpoint-url", cloud.url]
    cloud.answer = aws_answer([])

    good = CliRunner().invoke(main, refresh)
    cloud.answer = lambda *_: (403, {"__type": "AccessDeniedException", "message": "no"})
    bad = CliRunner().invoke(main, refresh)
    offers = CliRunner().invoke(main, ["offers", "--gpu", "A10G", "--capacity", "spot", "--json"])
    listed = CliRunner().invoke(
        main, ["offers", "--gpu", "A10G", "--capacity", "on-demand", "--clouds", "aws", "--json"]
    )
    (tmp_path / "s.yaml").write_text(
        '{version: v1, name: x, resources: {accelerators: "A10G:1", use_spot: false}, entrypoint: [a]}'
    )
    plan = CliRunner().invoke(main, ["plan", "-f", str(tmp_path / "s.yaml"), "--clouds", "aws"])
    shown = CliRunner().invoke(main, ["catalog", "show"])

    assert good.exit_code == 0, good.output
    assert bad.exit_code == 2
    assert "AccessDenied" in bad.output
    first = json.loads(offers.stdout)["offers"][0]
    assert (first["zone"], first["usd_per_node_hour"]) == ("us-east-1a", 0.35)
    offer = json.loads(listed.stdout)["offers"][0]
    assert (offer["usd_per_node_hour"], offer["committed_usd_per_node_hour"]) == (1.006, {"1y": 0.503})
    assert (offer["local_disk_gb"], offer["billing_minimum_s"]) == (250.0, 60.0)
    assert (
        "a commitment of a year to g5.xlarge costs $0.5030 every hour: "
        "less than on demand if it is used for over 50% of that time"
    ) in plan.output
    assert "refresh failed 0.0 h ago" in json.loads(offers.stdout)["label"]
    assert "aws us-east-1 0.0 h old (refresh failed" in shown.output
    assert PriceCache(tmp_path).price_list("aws", "us-east-1").prices
    assert packaged().label in shown.output


def test_the_hook_asks_as_the_connection_says(cloud, tmp_path, monkeypatch):
    """A connection of type aws, with keys and an endpoint; GCP by the API key in its extra (feature E3)."""
    from airflow.sdk import Connection

    from envscaler_airflow.errors import SpecError
    from envscaler_airflow.hooks.pricing import CloudPricingHook

    extra = json.dumps({"endpoint_url": cloud.url, "region_name": "us-east-1"})
    aws = Connection(conn_id="aws_default", conn_type="aws", login="test", password="test", extra=extra)
    gcp = Connection(conn_id="g", conn_type="google_cloud_platform", extra='{"api_key": "k"}')
    known = {"aws_default": aws, "g": gcp}
    monkeypatch.setattr(CloudPricingHook, "get_connection", classmethod(lambda _, name: known[name]))
    cloud.answer = aws_answer([])

    (price_list,) = CloudPricingHook("aws", cache=str(tmp_path)).refresh(["us-east-1"])
    ok, words = CloudPricingHook("aws").test_connection()
    feed = CloudPricingHook("gcp", "g").get_conn()

    assert price_list.error is None
    assert len(price_list.prices) == 3
    assert (ok, words) == (True, "3 prices of aws us-east-1")
    assert feed._caller.headers == {"X-Goog-Api-Key": "k"}
    with pytest.raises(SpecError, match="prices are read from aws, azure, gcp"):
        CloudPricingHook("tencent")
