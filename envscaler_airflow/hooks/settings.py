"""Where the run store is and what this deployment is called, from settings and connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.errors import BackendError, SpecError, StoreError
from envscaler_airflow.hooks.connections import aws_hook, aws_session, extra_of, store_login
from envscaler_airflow.store import Store, deployment_of, open_store

if TYPE_CHECKING:
    from airflow.sdk import Connection

CONN_TYPE = "envscaler_store"
_TYPES = (CONN_TYPE, "aws")
_OPTIONS = {
    **{name: name for name in ("region_name", "endpoint_url", "verify", "extra_args")},
    "config_kwargs": "config",
}
"""Extras of a connection that are options of a store, none of them a secret."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A run store and how to open it.

    Attributes:
        url: As given by operator, connection or setting.
        options: Connection options without secrets; machines get these too.
        login: Credentials of the connection for machines without their own.
        hook: The Amazon provider's, whose session opens the store in this process; None: its own identity.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    login: StoreLogin = field(default_factory=StoreLogin)
    hook: Any = field(default=None, repr=False)

    def open(self) -> Store:
        """Return the store, not yet checked.

        Raises:
            SpecError: The URL, an option or the connection cannot be used.
            StoreError: AWS refuses the connection's role, or does not answer.
        """
        try:
            session = {} if self.hook is None else {"session": aws_session(self.hook)}
            return open_store(self.url, {**self.options, **session} or None)
        except BackendError as err:
            raise StoreError(f"store {self.url}: {err}", status=err.status, transient=err.transient) from err
        except (TypeError, ValueError) as err:  # what SDKs raise for an option; only names, no values
            names = ", ".join(self.options) or "no options"
            raise SpecError(f"store {self.url}: cannot be opened with {names}: {err}") from err

    def deployment(self, store: Store) -> str:
        """Return ``[envscaler] deployment``, or the name stored in a file store.

        Raises:
            SpecError: The store may be shared and the setting is empty.
        """
        return deployment_of(store, setting("deployment"))


def setting(name: str) -> str | None:
    """Return the value of ``[envscaler] name``, None if it is not set."""
    return conf.get("envscaler", name, fallback="") or None


def store_place(store_url: str | None = None, store_conn_id: str | None = None) -> StorePlace:
    """Return the store to use: *store_url*, else the connection's, else ``[envscaler] store_url``.

    Raises:
        SpecError: None of the three names a store, or the connection cannot be used for it.
    """
    connection = _connection(store_conn_id) if store_conn_id else None
    url = store_url or (connection and _url(connection)) or setting("store_url")
    if not url:
        raise SpecError(
            "no run store: set [envscaler] store_url (AIRFLOW__ENVSCALER__STORE_URL) to a folder or bucket "
            "that operators, triggerer, API server and machines all see, or give store_url or store_conn_id"
        )
    if not isinstance(url, str):
        raise SpecError(f"store_url: got {url!r:.80}, expected text: an absolute path or a URL")
    if connection is None:
        return StorePlace(url)
    extra = extra_of(connection)
    options = {option: extra[name] for name, option in _OPTIONS.items() if name in extra}
    if url.startswith("s3://"):
        hook = aws_hook(connection)
        if endpoint := hook.conn_config.get_service_endpoint_url("s3"):
            options["endpoint_url"] = endpoint
        return StorePlace(url, options, store_login(hook), hook)
    if (connection.login or connection.password) and not url.startswith(("/", "file://")):
        raise SpecError(
            f"connection {store_conn_id!r} has keys, which only an s3:// store takes: remove login and "
            f"password; {url.partition(':')[0]}:// is opened by the identity of each process and machine"
        )
    return StorePlace(url, options)


def _connection(conn_id: str) -> Connection:
    from airflow.sdk import BaseHook  # noqa: PLC0415  (a shell that only reads settings does without)

    connection = BaseHook.get_connection(conn_id)
    if connection.conn_type not in _TYPES:
        raise SpecError(
            f"connection {conn_id!r} is of type {connection.conn_type!r}, expected {' or '.join(_TYPES)}"
        )
    return connection


def _url(connection: Connection) -> Any:
    """Return the store URL from the form's first field; a URI gives bucket and prefix separately."""
    host, schema = connection.host, connection.schema
    if not host or connection.conn_type != CONN_TYPE:
        return extra_of(connection).get("store_url")
    return f"{host}/{schema}" if schema and "://" in host else host
