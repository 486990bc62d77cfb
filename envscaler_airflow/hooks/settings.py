"""Where the run store is and what this deployment is called, from settings and connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.configuration import conf

from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.servers import object_of, verify_of
from envscaler_airflow.store import Store, deployment_of, open_store

CONN_TYPE = "envscaler_store"
_OPTIONS = ("region_name", "endpoint_url", "profile_name", "verify", "config", "extra_args")
"""Extras of a connection that go to the store and to the machines; none of them is a secret."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A run store and how to open it.

    Attributes:
        url: As given by operator, connection or setting.
        options: Connection options without secrets; machines get these too.
        secrets: Credentials. They stay in this process.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def open(self) -> Store:
        """The store, not yet checked.

        Raises:
            SpecError: The URL or an option cannot be used.
        """
        try:
            return open_store(self.url, {**self.options, **self.secrets} or None)
        except (TypeError, ValueError) as err:  # what SDKs say of an option; names alone, no values
            names = ", ".join(self.options) or "no options"
            raise SpecError(f"store {self.url}: cannot be opened with {names}: {err}") from err

    def deployment(self, store: Store) -> str:
        """``[envscaler] deployment``, or the name kept in a file store.

        Raises:
            SpecError: The store may be shared and the setting is empty.
        """
        return deployment_of(store, setting("deployment"))


def setting(name: str) -> str | None:
    """Value of ``[envscaler] name``, None when it is not set."""
    return conf.get("envscaler", name, fallback="") or None


def store_place(store_url: str | None = None, store_conn_id: str | None = None) -> StorePlace:
    """The store to use: *store_url*, else the connection's, else ``[envscaler] store_url``.

    Raises:
        SpecError: None of the three names one, or the connection is of another type.
    """
    options: dict[str, Any] = {}
    secrets: dict[str, str] = {}
    url = store_url
    if store_conn_id:
        from_connection, options, secrets = _connection(store_conn_id)
        url = url or from_connection
    url = url or setting("store_url")
    if not url:
        raise SpecError(
            "no run store: set [envscaler] store_url (AIRFLOW__ENVSCALER__STORE_URL) to a folder or bucket "
            "that operators, triggerer, API server and machines all see, or give store_url or store_conn_id"
        )
    if not isinstance(url, str):
        raise SpecError(f"store_url: got {url!r:.80}, expected text: an absolute path or a URL")
    return StorePlace(url, options, secrets)


def _option(name: str, value: object) -> object:
    """A value of an extra; a connection's URI has only text."""
    return verify_of(value) if name == "verify" else object_of(value)


def _url(host: str | None, schema: str | None) -> str | None:
    """The store URL in the form's first field; of a connection's URI the bucket and its prefix come apart."""
    if not host:
        return None
    return f"{host}/{schema}" if schema and "://" in host else host


def _connection(conn_id: str) -> tuple[str | None, dict[str, Any], dict[str, str]]:
    from airflow.sdk import BaseHook  # noqa: PLC0415  (a shell that only reads settings does without)

    connection = BaseHook.get_connection(conn_id)
    if connection.conn_type != CONN_TYPE:
        raise SpecError(f"connection {conn_id!r} is of type {connection.conn_type!r}, expected {CONN_TYPE!r}")
    extra: object = connection.extra_dejson
    if not isinstance(extra, Mapping):
        raise SpecError(f"connection {conn_id!r}: its extra is no JSON object")
    options = {name: _option(name, extra[name]) for name in _OPTIONS if extra.get(name) not in (None, "")}
    secrets = {"aws_access_key_id": connection.login, "aws_secret_access_key": connection.password}
    url = _url(connection.host, connection.schema) or extra.get("store_url") or None
    return url, options, {name: text for name, text in secrets.items() if text}
