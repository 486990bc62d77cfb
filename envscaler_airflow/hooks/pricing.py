"""Live cloud prices for DAG code, with Airflow connections of the clouds' own types."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException, AirflowRuntimeError

from envscaler_airflow.clouds import Access, PriceFeed, price_sources
from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.connections import access_of, extra_of
from envscaler_airflow.hooks.settings import setting, store_place

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from envscaler_airflow.catalog.prices import PriceList


_GCP_SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"
_GOOGLE_PLAIN = frozenset({"project", "num_retries"})
"""Extras of a Google connection that are not credentials."""
_GOOGLE_PROVIDER = (
    "only the Google provider reads this: pip install apache-airflow-providers-google, or remove it and give "
    "the process google-auth's application default credentials (GOOGLE_APPLICATION_CREDENTIALS)"
)
_GOOGLE_MISSING = (
    "pip install 'envscaler-airflow[google]', or put an api_key that may read the Cloud Billing Catalog into "
    "the connection's extra"
)


class CloudPricingHook(BaseHook):
    """Reads prices of a cloud and stores them for plans.

    ::

        price_lists = CloudPricingHook("aws").refresh(["us-east-1", "eu-west-1"])

    Args:
        cloud: ``aws``, ``gcp``, ``azure``, or one from another package.
        conn_id: Connection of the cloud's own type, ``aws`` or ``google_cloud_platform``. Other clouds
            use its login, password and extras ``api_key``, ``token``, ``endpoint_url`` and ``verify``. None:
            the usual default.
        endpoint_url: Of a substitute for the cloud's API.
        store_conn_id: Run store through which workers and shells get the prices; None:
            ``[envscaler] store_url``.
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
        store_conn_id: str | None = None,
        cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Send no request yet.

        Raises:
            SpecError: Prices of that cloud cannot be read.
        """
        super().__init__(**kwargs)
        known = price_sources()
        if cloud not in known:
            raise SpecError(f"cloud {cloud!r}: prices are read from {', '.join(known)}")
        self.cloud = cloud
        self.conn_id = conn_id or known[cloud].conn_id
        self.endpoint_url = endpoint_url
        self.store_conn_id = store_conn_id
        self.cache = cache

    def get_conn(self) -> PriceFeed:
        """Return the cloud's price feed.

        Raises:
            SpecError: The connection has no credentials that the cloud accepts.
        """
        return self._feed

    @cached_property
    def _feed(self) -> PriceFeed:
        prices = price_sources()[self.cloud]
        access = {"aws": self._amazon, "google_cloud_platform": self._google}.get(
            prices.conn_type, self._plain
        )
        return prices.open(access(self._connection() if prices.conn_type else None))

    def refresh(self, regions: Iterable[str]) -> list[PriceList]:
        """Request prices of *regions*, store the valid ones, and rebuild the catalog.

        A region that fails keeps its last good prices; its price list says why and since when.

        Raises:
            SpecError: *regions* is a single text, so that each of its letters would be requested.
        """
        if isinstance(regions, str):
            raise SpecError(f"regions {regions!r:.60}: write a list, such as [{regions!r:.60}]")
        from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.catalog.sources import cache_dir  # noqa: PLC0415  (as above)

        cache = PriceCache(Path(self.cache) if self.cache else cache_dir())
        price_lists = [cache.refresh(self._feed, region, clock=time.time) for region in regions]
        cache.compile()
        self._share(price_lists)
        return price_lists

    def _share(self, price_lists: Iterable[PriceList]) -> None:
        """Put the prices into the run store, if one is configured."""
        from envscaler_airflow.catalog.shared_prices import publish  # noqa: PLC0415  (DAG files do without)

        if self.store_conn_id is None and not setting("store_url"):
            return
        store = store_place(store_conn_id=self.store_conn_id).open()
        for price_list in price_lists:
            publish(store, price_list)

    def test_connection(self) -> tuple[bool, str]:
        """Request the prices of one region."""
        region = price_sources()[self.cloud].regions[0]
        try:
            found = self._feed.fetch(region)
        except EnvScalerError as err:
            return False, str(err)
        return True, f"{len(found.quotes)} prices of {self.cloud} {region}"

    def _amazon(self, connection: Connection | None) -> Access:
        """Return a boto3 session, for clouds with connections of type ``aws``."""
        from envscaler_airflow.hooks.connections import aws_hook, aws_session  # noqa: PLC0415  (DAG files do without)

        hook = aws_hook(connection)
        return Access(
            session=aws_session(hook),
            endpoint_url=self.endpoint_url or hook.conn_config.endpoint_url,
            verify=True if hook.verify is None else hook.verify,
        )

    def _google(self, connection: Connection | None) -> Access:
        """Return the API key, else a token, for clouds with connections of type ``google_cloud_platform``."""
        key = None if connection is None else extra_of(connection).get("api_key")
        token = None if key else _google_token(connection)
        return Access(secret=key, token=token, endpoint_url=self.endpoint_url)

    def _plain(self, connection: Connection | None) -> Access:
        """Return the fields of a connection of any other type."""
        access = Access() if connection is None else access_of(connection)
        return replace(access, endpoint_url=self.endpoint_url or access.endpoint_url)

    def _connection(self) -> Connection | None:
        """Return the connection; None, for the machine's own identity, if the default one does not exist."""
        if self.conn_id is None:
            return None
        try:
            return self.get_connection(self.conn_id)
        except (AirflowNotFoundException, AirflowRuntimeError):
            if self.conn_id != price_sources()[self.cloud].conn_id:
                raise
            return None


def _google_token(connection: Connection | None) -> str:
    """Return a token of the Google provider's hook, or else of google-auth's application default credentials.

    Raises:
        SpecError: Neither is installed, there are no credentials, or only the provider could read them.
    """
    where = "gcp" if connection is None else f"connection {connection.conn_id!r}"
    try:
        auth: Any = import_module("google.auth")
        request: Any = import_module("google.auth.transport.requests").Request()
        if connection is None:
            found, _ = auth.default(scopes=[_GCP_SCOPE])
        elif find_spec("airflow.providers.google"):
            hooks: Any = import_module("airflow.providers.google.common.hooks.base_google")
            found = hooks.GoogleBaseHook(gcp_conn_id=connection.conn_id).get_credentials()
        elif given := sorted(extra_of(connection).keys() - _GOOGLE_PLAIN):
            raise SpecError(f"{where}: {', '.join(given)}: {_GOOGLE_PROVIDER}")
        else:
            found, _ = auth.default(scopes=[_GCP_SCOPE])
        found.refresh(request)
    except ImportError as err:
        raise SpecError(f"{where}: {err}: {_GOOGLE_MISSING}") from err
    except (auth.exceptions.GoogleAuthError, AirflowException, OSError, ValueError) as err:
        raise SpecError(f"{where}: {err}") from err
    return str(found.token)
