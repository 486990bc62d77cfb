"""AWS: Price List Query API, spot price history, Spot Advisor, instance types and their zones.

Sources: docs.aws.amazon.com/aws-cost-management (AWSPriceListService.GetProducts) and
docs.aws.amazon.com/AWSEC2/latest/APIReference. Instance types and offerings are tested against moto, which
replays recorded responses; the rest against responses written from those documents. Not yet tested against
the live service.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from envscaler_airflow.clouds import (
    UNFINISHED_DAYS,
    Access,
    Cloud,
    Commitment,
    Fetched,
    PriceSource,
    Quote,
    is_in_force,
    usd_of,
    utc_now,
)
from envscaler_airflow.clouds.http import TIMEOUT_S, Caller
from envscaler_airflow.envspec.gpus import MEMORY_GB, canonical
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.planning.billing import Billing, Tariff
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import InstanceDetails

PRICING_REGION = "us-east-1"
"""Region whose Price List Query API has the prices of every region."""

ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
PRODUCT = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
_ORDINARY = {
    "marketoption": "OnDemand",
    "operation": "RunInstances",
    "licenseModel": "No License required",
}
"""Attributes that distinguish capacity blocks, other operations and own licences; absent counts as ordinary.

Source: docs.aws.amazon.com/awsaccountbilling/latest/aboutv2, "Reading the service price list files".
"""
TERMS: Mapping[str, Commitment] = {"1yr": "1y", "3yr": "3y"}
_STRANGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that a response raises if its shape differs from AWS' documentation."""

_ARCHES = {"x86_64": "x86_64", "arm64": "arm64"}


class AwsPrices:
    """Linux machines of one region: on demand, spot by zone, reservations without upfront payment."""

    cloud = "aws"

    def __init__(self, access: Access, *, caller: Caller | None = None) -> None:
        """Use the session of *access*, or the machine's identity; *caller* fetches Spot Advisor."""
        url = access.endpoint_url
        self._access = access
        self._advisor_url = f"{url}/spot-advisor-data.json" if url else ADVISOR_URL
        self._caller = caller or Caller()
        self._advice: Mapping[str, Any] | None = None

    def fetch(self, region: str) -> Fetched:
        """See :class:`~envscaler_airflow.clouds.PriceFeed`."""
        notes: list[str] = []
        quotes = list(self._call("pricing", PRICING_REGION, lambda api: list(_on_demand(api, region))))
        kinds, machines = self._call("ec2", region, _types)
        zones = self._call("ec2", region, _zones)
        quotes += self._call("ec2", region, lambda api: list(_spot(api, region)))
        try:
            risks = self._risks(region)
        except BackendError as err:
            risks = {}
            notes.append(f"interruption ranges are unknown: {err}")
        return Fetched(
            "aws",
            region,
            tuple({quote.key: quote for quote in quotes}.values()),
            "AWS Price List and spot price history",
            kinds=kinds,
            zones=zones,
            risks=risks,
            notes=tuple(notes),
            machines=machines,
        )

    def _call(self, service: str, region: str, work: Any) -> Any:
        """Call *work* with a client of *service*; convert errors of the SDK to ours."""
        try:
            import boto3  # noqa: PLC0415  (an extra; only who asks AWS needs it)
            from botocore.config import Config  # noqa: PLC0415  (as above)
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (as above)
            from botocore.parsers import ResponseParserError  # noqa: PLC0415  (as above)
        except ImportError as err:
            raise SpecError("AWS's prices need boto3: pip install 'envscaler-airflow[amazon]'") from err

        config = Config(
            connect_timeout=TIMEOUT_S / 4,
            read_timeout=TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 2},
        )
        session: Any = self._access.session or boto3.Session()
        verify = None if self._access.verify is True else self._access.verify  # None: AWS_CA_BUNDLE applies
        try:
            client = session.client(
                service,
                region_name=region,
                endpoint_url=self._access.endpoint_url,
                verify=verify,
                config=config,
            )
            with contextlib.closing(client):
                return work(client)
        except ClientError as err:
            status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(err.response.get("Error", {}).get("Code"))
            transient = "Throttl" in code or status in (429, None) or (status or 0) >= 500
            text = f"AWS {service} in {region}: {err}"
            raise BackendError(text, status=status, transient=transient) from err
        except (BotoCoreError, ResponseParserError, *_STRANGE) as err:
            raise BackendError(f"AWS {service} in {region}: {err}", transient=True) from err

    def _risks(self, region: str) -> dict[str, int]:
        if self._advice is None:
            with self._caller:
                body = self._caller.json(self._advisor_url, "AWS Spot Advisor")
            if not isinstance(body, dict) or not isinstance(body.get("spot_advisor"), dict):
                raise BackendError("AWS Spot Advisor: the answer has no spot_advisor", transient=True)
            self._advice = body["spot_advisor"]
        try:
            linux = self._advice.get(region, {}).get("Linux", {})
            # Spot Advisor numbers its five ranges 0 to 4; our index 0 is "unknown".
            return {name: int(item["r"]) + 1 for name, item in linux.items() if item.get("r") in range(5)}
        except _STRANGE as err:
            raise BackendError(f"AWS Spot Advisor in {region}: {err}", transient=True) from err


def _on_demand(api: Any, region: str) -> Iterator[Quote]:
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}]
    filters += [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in PRODUCT.items()]
    pages = api.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
    for page in pages:
        for text in page["PriceList"]:
            yield from read_product(json.loads(text), region)


def read_product(product: Mapping[str, Any], region: str) -> Iterator[Quote]:
    """On-demand price of a product of the price list, and its reservations without upfront payment."""
    attributes = product.get("product", {}).get("attributes", {})
    name = attributes.get("instanceType")
    if not name or any(attributes.get(key) not in (value, None) for key, value in PRODUCT.items()):
        return
    if any(attributes.get(key) not in (value, None) for key, value in _ORDINARY.items()):
        return
    terms = product.get("terms", {})
    for term in _current(terms.get("OnDemand", {}).values(), utc_now()):
        for usd in _hourly(term):
            yield Quote(name, region, "", "on-demand", usd)
    for term in terms.get("Reserved", {}).values():
        how = term.get("termAttributes", {})
        length = TERMS.get(str(how.get("LeaseContractLength")))
        if length and how.get("PurchaseOption") == "No Upfront" and how.get("OfferingClass") == "standard":
            for usd in _hourly(term):
                yield Quote(name, region, "", "on-demand", usd, commitment=length)


def _current(terms: Iterable[Mapping[str, Any]], now: datetime) -> list[Mapping[str, Any]]:
    """The newest of *terms* in force *now*; the list also contains future ones."""
    in_force = [term for term in terms if is_in_force(term.get("effectiveDate"), None, now)]
    return sorted(in_force, key=lambda term: str(term.get("effectiveDate") or ""))[-1:]


def _hourly(term: Mapping[str, Any]) -> Iterator[float]:
    for dimension in term.get("priceDimensions", {}).values():
        if dimension.get("beginRange") not in (None, "0"):
            continue  # a price for larger quantities
        usd = usd_of(dimension.get("pricePerUnit", {}).get("USD"))
        if usd is not None and dimension.get("unit") in ("Hrs", "Hours"):
            yield usd


def _spot(api: Any, region: str) -> Iterator[Quote]:
    """The newest price of each type and zone."""
    now = datetime.now(UTC)
    pages = api.get_paginator("describe_spot_price_history").paginate(
        ProductDescriptions=["Linux/UNIX"], StartTime=now - timedelta(hours=1), EndTime=now
    )
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for page in pages:
        for item in page["SpotPriceHistory"]:
            usd = usd_of(item.get("SpotPrice"))
            key = (item["InstanceType"], item["AvailabilityZone"])
            if usd is not None and (key not in newest or item["Timestamp"] > newest[key][0]):
                newest[key] = (item["Timestamp"], usd)
    for (name, zone), (_, usd) in newest.items():
        yield Quote(name, region, zone, "spot", usd)


def _types(api: Any) -> tuple[tuple[InstanceType, ...], dict[str, InstanceDetails]]:
    """Machines, and other facts that AWS reports of them."""
    kinds, machines = [], {}
    for page in api.get_paginator("describe_instance_types").paginate():
        for item in page["InstanceTypes"]:
            kind = read_type(item)
            if kind is not None:
                kinds.append(kind)
                machines[kind.instance_type] = read_machine(item)
    return tuple(kinds), machines


def read_machine(item: Mapping[str, Any], *, source: str = "DescribeInstanceTypes") -> InstanceDetails:
    """Network, disks and processor from ``DescribeInstanceTypes``, as far as AWS reports them."""
    cards = (item.get("NetworkInfo") or {}).get("NetworkCards") or ()
    always = [_amount(card.get("BaselineBandwidthInGbps")) for card in cards]
    peaks = [_amount(card.get("PeakBandwidthInGbps")) for card in cards]
    disk_gb = _amount((item.get("InstanceStorageInfo") or {}).get("TotalSizeInGB"))
    if disk_gb is None and item.get("InstanceStorageSupported") is False:
        disk_gb = 0.0
    chip = item.get("ProcessorInfo") or {}
    clock = _amount(chip.get("SustainedClockSpeedInGhz"))
    words = [str(chip["Manufacturer"])] if chip.get("Manufacturer") else []
    words += [f"{clock:g} GHz"] if clock else []
    return InstanceDetails(_sum(always), _sum(peaks), disk_gb, ", ".join(words) or None, source)


def _amount(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < math.inf else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known and len(known) == len(values) else None


def read_type(item: Mapping[str, Any]) -> InstanceType | None:
    """A machine of ``DescribeInstanceTypes``; None for one with a part of a GPU, or without a size."""
    arches = [_ARCHES[name] for name in item["ProcessorInfo"]["SupportedArchitectures"] if name in _ARCHES]
    vcpus, memory_mib = item["VCpuInfo"]["DefaultVCpus"], item["MemoryInfo"]["SizeInMiB"]
    gpus = item.get("GpuInfo", {}).get("Gpus", [])
    if not arches or not vcpus or not memory_mib or len(gpus) > 1:
        return None
    name, count, memory_gb = None, 0.0, None
    if gpus:
        reported, count = str(gpus[0]["Name"]), float(gpus[0]["Count"])
        mib = gpus[0].get("MemoryInfo", {}).get("SizeInMiB")
        is_large = reported == "A100" and (mib or 0) > 50_000  # 80 GB is not in the name
        large = "A100-80GB" if is_large else reported
        name = canonical(large) or reported
        memory_gb = MEMORY_GB.get(name, round(mib / 1024, 2) if mib else None)
        if count <= 0:
            return None
    return InstanceType(
        "aws", item["InstanceType"], float(vcpus), memory_mib / 1024, name, count, memory_gb, arches[0]
    )


def _zones(api: Any) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    pages = api.get_paginator("describe_instance_type_offerings").paginate(LocationType="availability-zone")
    for page in pages:
        for item in page["InstanceTypeOfferings"]:
            found.setdefault(item["InstanceType"], []).append(item["Location"])
    return {name: tuple(sorted(zones)) for name, zones in found.items()}


def lifecycle(prefix: str, days: int) -> dict[str, Any]:
    """Rules for ``aws s3api put-bucket-lifecycle-configuration``; see :attr:`Cloud.lifecycle`.

    Source: Amazon S3 API reference, *PutBucketLifecycleConfiguration*.
    """
    rules: dict[str, dict[str, Any]] = {
        "envscaler-old-runs": {"Expiration": {"Days": days}},
        "envscaler-old-versions": {
            "NoncurrentVersionExpiration": {"NoncurrentDays": UNFINISHED_DAYS},
            "Expiration": {"ExpiredObjectDeleteMarker": True},
        },
        "envscaler-unfinished-uploads": {
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UNFINISHED_DAYS}
        },
    }
    common = {"Status": "Enabled", "Filter": {"Prefix": prefix}}
    return {"Rules": [{"ID": name, **common, **rule} for name, rule in rules.items()]}


CLOUD = Cloud(
    name="aws",
    tariff=Tariff(
        Billing(1.0, 60.0, source="EC2 pricing, Linux: by the second, a minute at least"),
        usd_per_gib_between=0.02,
        usd_per_gib_out=0.09,
        usd_per_gib_month=0.08,
    ),
    refusals={
        "InsufficientInstanceCapacity": ("capacity", "offer"),
        "InsufficientHostCapacity": ("capacity", "offer"),
        "SpotMaxPriceTooLow": ("capacity", "offer"),
        "UnfulfillableCapacity": ("capacity", "offer"),
        "MaxSpotInstanceCountExceeded": ("quota", "region"),
        "VcpuLimitExceeded": ("quota", "family"),
        "InstanceLimitExceeded": ("quota", "offer"),
    },
    schemes=("s3",),
    lifecycle=lifecycle,
    burstable=re.compile(r"t\d"),
    provider_id="aws",
    prices=PriceSource(open=AwsPrices, regions=("us-east-1",), conn_type="aws", conn_id="aws_default"),
)
"""Billing: recalled 2026-11. Data: cloudtoolstack.com/blog/cloud-egress-cost-optimization (2026). Disks: gp3
in us-east-1, github.com/aws/agent-toolkit-for-aws, ebs-optimization.md (early 2026).
Refusals: EC2 API, error codes."""
