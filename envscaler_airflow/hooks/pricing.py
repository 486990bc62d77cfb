"""Live prices of clouds for DAG code, by Airflow connections of the clouds' own types."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.servers import verify_of

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from envscaler_airflow.catalog.prices import Book
    from envscaler_airflow.clouds.base import PriceFeed

CONNECTIONS = {"aws": "aws_default", "gcp": "google_cloud_default", "azure": None}
"""Connection of each cloud that prices come from; Azure's retail prices need none."""

_GCP_SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"


class CloudPricingHook(BaseHook):
    """Reads prices of a cloud and keeps them for plans.

    ::

        books = CloudPricingHook("aws").refresh(["us-east-1", "eu-west-1"])

    Args:
        cloud: ``aws``, ``gcp`` or ``azure``. Alibaba Cloud's and Tencent Cloud's prices come later.
        conn_id: Connection of type ``aws`` or ``google_cloud_platform``; None: the usual default.
        endpoint_url: Of a stand-in for the cloud's API.
        cache: Folder of the prices; None: ``ENVSCALER_CACHE``, else the user's cache folder.
    """

    conn_name_attr = "conn_id"
    hook_name = "Cloud prices"

    def __init__(
        self,
        cloud: str,
        conn_id: str | None = None,
        *,
        endpoint_url: str | None = None,
        cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask nothing yet.

        Raises:
            SpecError: No prices of that cloud can be read.
        """
        super().__init__(**kwargs)
        if cloud not in CONNECTIONS:
            raise SpecError(f"cloud {cloud!r}: prices are read from {', '.join(CONNECTIONS)}")
        self.cloud = cloud
        self.conn_id = conn_id or CONNECTIONS[cloud]
        self.endpoint_url = endpoint_url
        self.cache = cache

    def get_conn(self) -> PriceFeed:
        """The cloud's price feed.

        Raises:
            SpecError: The connection has nothing that the cloud would let in.
        """
        return self._feed

    @cached_property
    def _feed(self) -> PriceFeed:
        return {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.cloud]()

    def refresh(self, regions: Iterable[str]) -> list[Book]:
        """Ask for *regions*, keep what is good, and make the catalog anew.

        A region that fails keeps its last good prices; its book says why and since when.

        Raises:
            SpecError: *regions* is one text, each letter of which would be asked for.
        """
        if isinstance(regions, str):
            raise SpecError(f"regions {regions!r:.60}: write a list, such as [{regions!r:.60}]")
        from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.catalog.sources import cache_dir  # noqa: PLC0415  (as above)

        cache = PriceCache(Path(self.cache) if self.cache else cache_dir())
        books = [cache.refresh(self._feed, region, clock=time.time) for region in regions]
        cache.compile()
        return books

    def test_connection(self) -> tuple[bool, str]:
        """Ask for the prices of one region."""
        region = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}[self.cloud]
        try:
            found = self._feed.fetch(region)
        except EnvScalerError as err:
            return False, str(err)
        return True, f"{len(found.quotes)} prices of {self.cloud} {region}"

    def _aws(self) -> PriceFeed:
        from envscaler_airflow.clouds.aws import ADVISOR_URL, AwsPrices  # noqa: PLC0415  (boto3 is an extra)

        try:
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (as above)
        except ImportError as err:
            raise SpecError(f"aws: {err}: pip install 'envscaler-airflow[amazon]'") from err
        connection = self._connection()
        extra = _extra(connection)
        endpoint = self.endpoint_url or extra.get("endpoint_url")
        advisor = f"{endpoint}/spot-advisor-data.json" if endpoint else ADVISOR_URL
        try:
            session = _aws_session(connection, extra)
        except (BotoCoreError, ClientError) as err:
            raise SpecError(f"connection {self.conn_id!r}: {err}") from err
        verify = verify_of(extra.get("verify"))
        return AwsPrices(session, endpoint_url=endpoint, advisor_url=advisor, verify=verify)

    def _azure(self) -> PriceFeed:
        from envscaler_airflow.clouds.azure import URL, AzurePrices  # noqa: PLC0415  (as above)

        return AzurePrices(url=self.endpoint_url or URL)

    def _gcp(self) -> PriceFeed:
        from envscaler_airflow.catalog.tables import packaged  # noqa: PLC0415  (as above)
        from envscaler_airflow.clouds.gcp import URL, GcpPrices  # noqa: PLC0415  (as above)

        extra = _extra(self._connection())
        key, token = extra.get("api_key"), None
        if not key:
            token = _google_token(extra)
        url = self.endpoint_url or URL
        return GcpPrices(packaged().kinds, api_key=key, token=token, url=url)

    def _connection(self) -> Connection | None:
        """The connection; None when the default one does not exist: the machine's own identity then."""
        if self.conn_id is None:
            return None
        try:
            return self.get_connection(self.conn_id)
        except (AirflowNotFoundException, AirflowRuntimeError):
            if self.conn_id != CONNECTIONS[self.cloud]:
                raise
            return None


def _extra(connection: Connection | None) -> Mapping[str, Any]:
    extra: object = {} if connection is None else connection.extra_dejson
    if not isinstance(extra, Mapping):
        raise SpecError(f"connection {connection and connection.conn_id!r}: its extra is no JSON object")
    return extra


def _aws_session(connection: Connection | None, extra: Mapping[str, Any]) -> Any:
    """A boto3 session with the connection's keys and role; None: the machine's own identity."""
    if connection is None:
        return None
    import boto3  # noqa: PLC0415  (an extra)

    session = boto3.Session(
        aws_access_key_id=connection.login or extra.get("aws_access_key_id"),
        aws_secret_access_key=connection.password or extra.get("aws_secret_access_key"),
        aws_session_token=extra.get("aws_session_token"),
        profile_name=extra.get("profile_name"),
        region_name=extra.get("region_name"),
    )
    role = extra.get("role_arn")
    if not role:
        return session
    verify = verify_of(extra.get("verify"))
    sts: Any = session.client(
        "sts", endpoint_url=extra.get("endpoint_url"), verify=None if verify is True else verify
    )
    given = sts.assume_role(RoleArn=role, RoleSessionName="envscaler-prices")["Credentials"]
    return boto3.Session(
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["SessionToken"],
        region_name=extra.get("region_name"),
    )


def _google_token(extra: Mapping[str, Any]) -> str:
    """A token by the connection's key file, else by the machine's own identity."""
    try:
        auth: Any = import_module("google.auth")
        transport: Any = import_module("google.auth.transport.requests")
        accounts: Any = import_module("google.oauth2.service_account")
    except ImportError as err:
        raise SpecError(
            "gcp: put an api_key that may read the Cloud Billing Catalog into the connection's extra, "
            "or pip install google-auth requests"
        ) from err
    keys, path = extra.get("keyfile_dict"), extra.get("key_path")
    if keys:
        body = json.loads(keys) if isinstance(keys, str) else keys
        made = accounts.Credentials.from_service_account_info(body, scopes=[_GCP_SCOPE])
    elif path:
        made = accounts.Credentials.from_service_account_file(path, scopes=[_GCP_SCOPE])
    else:
        made, _ = auth.default(scopes=[_GCP_SCOPE])
    made.refresh(transport.Request())
    return str(made.token)
