"""GCP's Cloud Billing Catalog: prices of cores, memory and GPUs, summed per machine.

Source: cloud.google.com/billing/docs/reference/rest/v1/services.skus/list (service 6F81-5844-456A is
Compute Engine); an API key or a token is needed. Tested against responses written from that page; not yet
tested against the live service.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from envscaler_airflow.clouds import (
    UNFINISHED_DAYS,
    Access,
    Cloud,
    Commitment,
    Fetched,
    PriceSource,
    Quote,
    Types,
    instant,
    is_in_force,
    usd_of,
    utc_now,
)
from envscaler_airflow.clouds.http import MAX_PAGES, Caller
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.planning.billing import Billing, Tariff
from envscaler_airflow.planning.offers import CapacityType, InstanceType
from envscaler_airflow.planning.table import Row

URL = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
_PART = re.compile(
    r"(?:Spot Preemptible )?(?:Commitment v1: )?"
    r"(?P<family>[A-Z]\d+[A-Z]?|Compute optimized)(?: Predefined)?(?: AMD| Arm)?(?: Instance)? "
    r"(?P<part>Core|Ram)(?: running)? in ",
    re.IGNORECASE,
)
_GPU = re.compile(
    r"(?:Commitment v1: )?Nvidia (?:Tesla )?(?P<name>[A-Z]\d+G?S?(?: \d+GB)?(?: Plus)?) GPU"
    r"(?: attached to Spot Preemptible VMs)?(?: running)? in ",
    re.IGNORECASE,
)
_GPU_NAMES = {"A100 80GB": "A100-80GB", "H100 80GB": "H100", "H100 80GB Plus": "H100", "H200 141GB": "H200"}
_USAGE: Mapping[str, tuple[CapacityType, Commitment]] = {
    "OnDemand": ("on-demand", ""),
    "Preemptible": ("spot", ""),
    "Commit1Yr": ("on-demand", "1y"),
    "Commit3Yr": ("on-demand", "3y"),
}
_PARTLY = ("e2-micro", "e2-small", "e2-medium", "f1-micro", "g1-small")
"""Shared-core types: their vCPUs are not the billed quantity."""

MOST: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "T4": {1: (48, 312), 2: (48, 312), 4: (96, 624)},
    "P4": {1: (24, 156), 2: (48, 312), 4: (96, 624)},
    "V100": {1: (12, 78), 2: (24, 156), 4: (48, 312), 8: (96, 624)},
    "P100": {1: (16, 104), 2: (32, 208), 4: (64, 208)},
}
"""Largest vCPUs and GiB of an N1 host by GPU and count.

Source: cloud.google.com/compute/docs/gpus, "N1 machine types with GPUs attached" (recalled; four P100 with 96
vCPUs exist in two zones only and are omitted).
"""

_Parts = dict[tuple[str, str, CapacityType, Commitment], float]


class GcpPrices:
    """Machines of the catalog, each priced as the sum of its parts."""

    cloud = "gcp"

    def __init__(
        self, access: Access, *, caller: Caller | None = None, kinds: Iterable[InstanceType] | None = None
    ) -> None:
        """Price *kinds*, by default those of the packaged snapshot, with the credentials of *access*.

        Raises:
            SpecError: *access* has neither key nor token.
        """
        from envscaler_airflow.catalog.packaged import packaged  # noqa: PLC0415  (the facts do without)

        if not (access.secret or access.token or access.endpoint_url):
            raise SpecError("gcp: set ENVSCALER_GCP_API_KEY to a key that may read the Cloud Billing Catalog")
        known = packaged().kinds if kinds is None else kinds
        self._kinds = tuple(kind for kind in known if kind.cloud == "gcp")
        self._caller = caller or Caller()
        self._url = access.endpoint_url or URL
        # In a header, because URLs are logged.
        if access.secret:
            self._caller.headers["X-Goog-Api-Key"] = access.secret
        if access.token:
            self._caller.headers["Authorization"] = f"Bearer {access.token}"
        self._skus: list[Mapping[str, Any]] | None = None

    def fetch(self, region: str) -> Fetched:
        """See :class:`~envscaler_airflow.clouds.PriceFeed`; the list of SKUs is read once."""
        if self._skus is None:
            with self._caller:
                self._skus = list(self._pages())
        parts, strange = read_parts(self._skus, region)
        quotes = tuple(quote for kind in self._kinds for quote in sum_parts(kind, region, parts))
        notes = ["local SSD, sole tenancy and extended memory are not counted in"]
        if strange:
            notes.append(f"{strange} prices are not in USD and were left out")
        return Fetched("gcp", region, quotes, "GCP Cloud Billing Catalog", notes=tuple(notes))

    def _pages(self) -> Iterator[Mapping[str, Any]]:
        token = ""
        for _ in range(MAX_PAGES):
            params = {"pageSize": "5000", **({"pageToken": token} if token else {})}
            page = self._caller.json(self._url, "GCP Cloud Billing Catalog", params)
            if not isinstance(page, dict) or not isinstance(page.get("skus"), list):
                raise BackendError("GCP Cloud Billing Catalog: the answer has no skus", transient=True)
            yield from (sku for sku in page["skus"] if isinstance(sku, dict))
            token = str(page.get("nextPageToken") or "")
            if not token:
                return
        raise BackendError(f"GCP Cloud Billing Catalog: more than {MAX_PAGES} pages", transient=True)


def read_parts(skus: Iterable[Mapping[str, Any]], region: str) -> tuple[_Parts, int]:
    """USD an hour of a core, a GiB and a GPU by (family or GPU, part, capacity, term).

    Also returns the number of prices that were not in USD.
    """
    parts: _Parts = {}
    strange = 0
    for sku in skus:
        regions = sku.get("serviceRegions")
        if not isinstance(regions, list) or region not in regions:
            continue
        found = _which(sku)
        if found is None:
            continue
        usd, currency = _unit_price(sku)
        strange += currency != "USD"
        if usd is not None:
            parts.setdefault(found, usd)
    return parts, strange


def _which(sku: Mapping[str, Any]) -> tuple[str, str, CapacityType, Commitment] | None:
    text = str(sku.get("description") or "")
    category = sku.get("category")
    usage = _USAGE.get(str(category.get("usageType")) if isinstance(category, dict) else "")
    if usage is None or "Sole Tenancy" in text or "Custom" in text or "DWS" in text or "Calendar" in text:
        return None
    part = _PART.match(text)
    if part is not None:
        family = "c2" if part["family"].lower() == "compute optimized" else part["family"].lower()
        return family, part["part"].lower(), *usage
    gpu = _GPU.match(text)
    if gpu is None:
        return None
    return _GPU_NAMES.get(gpu["name"].upper().replace("PLUS", "Plus"), gpu["name"].upper()), "gpu", *usage


def _current(prices: list[Any], now: datetime) -> Any:
    """The newest of *prices* in force *now*; if none has a time, the last one."""
    in_force = [item for item in prices if is_in_force(item.get("effectiveTime"), None, now)]
    dated = [item for item in in_force if instant(item.get("effectiveTime")) is not None]
    return max(dated, key=lambda item: instant(item["effectiveTime"]) or now) if dated else in_force[-1]


def _unit_price(sku: Mapping[str, Any]) -> tuple[float | None, object]:
    """USD an hour of one unit in the last tier: the first tiers are free."""
    try:
        expression = _current(sku["pricingInfo"], utc_now())["pricingExpression"]
        price = expression["tieredRates"][-1]["unitPrice"]
        currency = price.get("currencyCode", "USD")
        if expression["usageUnit"] not in ("h", "GiBy.h"):
            return None, currency
        return usd_of(
            float(price.get("units") or 0) + float(price.get("nanos") or 0) / 1e9, currency=currency
        ), currency
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None, "USD"


def sum_parts(kind: InstanceType, region: str, parts: _Parts) -> Iterator[Quote]:
    """Prices of one machine: cores, memory and GPUs together, if all of them are known."""
    if kind.instance_type in _PARTLY:
        return
    family = kind.instance_type.partition("-")[0]
    by_usage: dict[tuple[CapacityType, Commitment], list[float | None]] = defaultdict(list)
    for usage in _USAGE.values():
        wanted = [(family, "core", kind.vcpus), (family, "ram", kind.memory_gib)]
        if kind.gpu_name is not None:
            wanted.append((kind.gpu_name, "gpu", kind.gpus))
        for name, part, amount in wanted:
            usd = parts.get((name, part, *usage))
            by_usage[usage].append(None if usd is None else usd * amount)
    gpu = f"{kind.gpu_name}:{int(kind.gpus)}" if kind.is_attached else ""
    for (capacity, commitment), found in by_usage.items():
        known = [usd for usd in found if usd is not None]
        if len(known) == len(found):
            usd = round(sum(known), 6)
            yield Quote(kind.instance_type, region, "", capacity, usd, gpu, commitment)


def attached(hosts: Types, gpus: Types) -> dict[InstanceType, list[Row]]:
    """Every N1 host with the GPUs that may be attached to it, in the zones that have both.

    A price is known when both parts have one. A spot price needs a spot price of both.
    """
    by_zone: dict[str, list[tuple[InstanceType, Row]]] = {}
    for kind, rows in hosts.items():
        if kind.instance_type.startswith("n1-") and kind.gpu_name is None:
            for row in rows:
                by_zone.setdefault(row.zone, []).append((kind, row))
    made: dict[InstanceType, list[Row]] = {}
    for gpu, of_gpu in ((gpu, row) for gpu, rows in gpus.items() for row in rows):
        vcpus, memory_gib = MOST.get(gpu.gpu_name or "", {}).get(int(gpu.gpus), (0.0, 0.0))
        for host, row in by_zone.get(of_gpu.zone, ()):
            if host.vcpus <= vcpus and host.memory_gib <= memory_gib:
                kind = host._replace(
                    gpu_name=gpu.gpu_name,
                    gpus=gpu.gpus,
                    gpu_memory_gb=gpu.gpu_memory_gb,
                    is_attached=True,
                )
                made.setdefault(kind, []).append(_joined(row, of_gpu))
    return made


def _joined(host: Row, gpu: Row) -> Row:
    return host._replace(
        usd=_sum(host.usd, gpu.usd),
        spot_usd=_sum(host.spot_usd, gpu.spot_usd),
        has_spot=host.has_spot and gpu.has_spot,
        source=f"{host.source} + {gpu.source}",
        spot_source=f"{host.spot_source} + {gpu.spot_source}",
    )


def _sum(host: float | None, gpu: float | None) -> float | None:
    return None if host is None or gpu is None else round(host + gpu, 9)


def lifecycle(prefix: str, days: int) -> dict[str, Any]:
    """Rules for ``gcloud storage buckets update --lifecycle-file``; see :attr:`Cloud.lifecycle`.

    Source: Cloud Storage, *Object Lifecycle Management*.
    """
    below = {"matchesPrefix": [prefix]} if prefix else {}
    rules = [
        ("Delete", {"age": days}),
        ("Delete", {"daysSinceNoncurrentTime": UNFINISHED_DAYS}),
        ("AbortIncompleteMultipartUpload", {"age": UNFINISHED_DAYS}),
    ]
    return {
        "lifecycle": {"rule": [{"action": {"type": kind}, "condition": when | below} for kind, when in rules]}
    }


CLOUD = Cloud(
    name="gcp",
    tariff=Tariff(
        Billing(1.0, 60.0, source="Compute Engine pricing: by the second, a minute at least"),
        usd_per_gib_between=0.02,
        usd_per_gib_out=0.12,
        usd_per_gib_month=0.10,
    ),
    refusals={
        "ZONE_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": ("capacity", "offer"),
        "QUOTA_EXCEEDED": ("quota", "family"),
    },
    schemes=("gs", "gcs"),
    lifecycle=lifecycle,
    burstable=re.compile(r"e2-(micro|small|medium)|f1-|g1-"),
    provider_id="gce",
    attached=attached,
    prices=PriceSource(
        open=GcpPrices,
        regions=("us-central1",),
        conn_type="google_cloud_platform",
        conn_id="google_cloud_default",
    ),
)
"""Billing and data between regions: recalled 2026-11. Data out of the cloud:
cloudtoolstack.com/blog/cloud-egress-cost-optimization (2026). Disks: pd-balanced,
c3x.dev/blog/gcp-persistent-disk-types-cost (2026). Refusals: Compute Engine, error codes."""
