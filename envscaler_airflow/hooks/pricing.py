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

from envscaler_airflow.clouds import Access, price_lists
from envscaler_airflow.clouds.base import PriceFeed
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.servers import verify_of

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from envscaler_airflow.catalog.prices import Book


_GCP_SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"


class CloudPricingHook(BaseHook):
    """Reads prices of a cloud and keeps them for plans.

    ::

        books = CloudPricingHook("aws").refresh(["us-east-1", "eu-west-1"])

    Args:
        cloud: ``aws``, ``gcp``, ``azure``, or one that another package brings.
        conn_id: Connection of the cloud's own type, ``aws`` or ``google_cloud_platform``; of other clouds its
            login, password and extras ``api_key``, ``token``, ``endpoint_url`` and ``verify`` count. None:
            the usual default.
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
        known = price_lists()
        if cloud not in known:
            raise SpecError(f"cloud {cloud!r}: prices are read from {', '.join(known)}")
        self.cloud = cloud
        self.conn_id = conn_id or known[cloud].conn_id
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
        prices = price_lists()[self.cloud]
        access = {"aws": self._amazon, "google_cloud_platform": self._google}.get(
            prices.conn_type, self._plain
        )
        return prices.open(access(self._connection() if prices.conn_type else None))

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
        region = price_lists()[self.cloud].regions[0]
        try:
            found = self._feed.fetch(region)
        except EnvScalerError as err:
            return False, str(err)
        return True, f"{len(found.quotes)} prices of {self.cloud} {region}"

    def _amazon(self, connection: Connection | None) -> Access:
        """Session of boto3, for clouds with connections of type ``aws``."""
        try:
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (boto3 is an extra)
        except ImportError as err:
            raise SpecError(f"{self.cloud}: {err}: pip install 'envscaler-airflow[amazon]'") from err
        extra = _extra(connection)
        try:
            session = _aws_session(connection, extra)
        except (BotoCoreError, ClientError) as err:
            raise SpecError(f"connection {self.conn_id!r}: {err}") from err
        endpoint, verify = self.endpoint_url or extra.get("endpoint_url"), verify_of(extra.get("verify"))
        return Access(session=session, endpoint_url=endpoint, verify=verify)

    def _google(self, connection: Connection | None) -> Access:
        """API key, else token, for clouds with connections of type ``google_cloud_platform``."""
        extra = _extra(connection)
        key = extra.get("api_key")
        token = None if key else _google_token(extra)
        return Access(secret=key, token=token, endpoint_url=self.endpoint_url)

    def _plain(self, connection: Connection | None) -> Access:
        """Fields of a connection of any other type."""
        extra = _extra(connection)
        return Access(
            login=connection.login if connection else None,
            secret=extra.get("api_key") or (connection.password if connection else None),
            token=extra.get("token"),
            endpoint_url=self.endpoint_url or extra.get("endpoint_url"),
            verify=verify_of(extra.get("verify")),
        )

    def _connection(self) -> Connection | None:
        """The connection; None when the default one does not exist: the machine's own identity then."""
        if self.conn_id is None:
            return None
        try:
            return self.get_connection(self.conn_id)
        except (AirflowNotFoundException, AirflowRuntimeError):
            if self.conn_id != price_lists()[self.cloud].conn_id:
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
