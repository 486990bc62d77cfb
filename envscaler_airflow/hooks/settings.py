"""Where a stage runs and where its run store is, from settings and connections."""

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
import json
from collections.abc import Callable
from importlib import import_module

from airflow.sdk.exceptions import AirflowException

from envscaler_airflow.backends import all_backends, backend_type
from envscaler_airflow.backends.base import Backend, SharesWatch
from envscaler_airflow.clouds import Access
from envscaler_airflow.hooks.connections import access_of

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


_IN_CLUSTER = ("in_cluster", "extra__kubernetes__in_cluster")
"""Extra by which a connection requests the pod's own identity; the second as Airflow 2.2 wrote it."""


def compute_place(compute: str, conn_id: str | None) -> str:
    """Return ``kubernetes:ID`` for a backend that is opened with a connection; otherwise its name alone.

    A ``conn_id`` in ``default_args`` is also set on stages of backends without connections, which ignore it.
    """
    kind = all_backends().get(compute) if conn_id else None
    return f"{compute}:{conn_id}" if kind is not None and kind.conn_type else compute


def open_backend(compute: str) -> Backend:
    """Return the backend *compute* (see :func:`compute_place`), with the settings of this deployment.

    These are ``[envscaler] NAME`` (JSON) and the backend's own options there, overridden by the extra
    ``envscaler`` (JSON) of the connection.

    Raises:
        SpecError: There is no backend of that name, or its settings or connection cannot be used.
    """
    if not isinstance(compute, str):
        raise SpecError(f"compute: got {compute!r:.80}, expected the name of a backend")
    name, _, conn_id = compute.partition(":")
    kind = backend_type(name)
    settings = _object(setting(name) or "{}", f"[envscaler] {name}")
    settings |= {key: value for key, option in kind.options.items() if (value := setting(option))}
    if not conn_id:
        return kind.create(settings, None)
    own, access = _BY_CONN_TYPE.get(kind.conn_type, _plain)(conn_id)
    return kind.create(settings | own, access)


def with_shared_watch(backend: Backend) -> Backend:
    """Return *backend*, which from now on uses the watch that this process shares, if it has one.

    A triggerer polls the stages of all deployments: one watch costs fewer requests than a poll of each.
    """
    if isinstance(backend, SharesWatch):
        backend.share_watch()
    return backend


def _plain(conn_id: str) -> tuple[dict[str, Any], Access]:
    """Return the settings and the credentials of a connection."""
    from airflow.sdk import BaseHook  # noqa: PLC0415  (a shell that only reads settings does without)

    connection = BaseHook.get_connection(conn_id)
    own = extra_of(connection).get("envscaler") or {}
    return _object(own, f"connection {conn_id}: envscaler"), access_of(connection)


def _cluster(conn_id: str) -> tuple[dict[str, Any], Access]:
    """Return the settings and the client of a connection of the cncf.kubernetes provider.

    Raises:
        SpecError: The provider is not installed, or the connection leads nowhere.
    """
    try:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import (  # noqa: PLC0415  (another provider)
            KubernetesHook,
        )
    except ImportError as err:
        raise SpecError(
            f"conn_id={conn_id!r}: needs apache-airflow-providers-cncf-kubernetes ({err})"
        ) from err
    hook = KubernetesHook(conn_id=conn_id)
    own = _object(hook.conn_extras.get("envscaler") or {}, f"connection {conn_id}: envscaler")
    namespace = hook.get_namespace()
    return own | ({"namespace": namespace} if namespace else {}), Access(session=_client(hook))


_BY_CONN_TYPE: Mapping[str, Callable[[str], tuple[dict[str, Any], Access]]] = {"kubernetes": _cluster}
"""Readers of connections that the hook of another provider opens, by type."""


def _client(hook: Any) -> Any:
    """Return the ``ApiClient`` of *hook*, a KubernetesHook, with a configuration of its own.

    By default the hook uses the Kubernetes package's default configuration, which a process has once: two
    threads of a triggerer that open two connections would get each other's cluster. Only a pod's own
    identity, which is the same for all, cannot be set separately (provider 10.25).

    Raises:
        SpecError: The connection does not describe a way to a cluster.
    """
    client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
    in_cluster = any(hook.conn_extras.get(name) for name in _IN_CLUSTER)
    hook.client_configuration = None if in_cluster else client.Configuration()
    try:
        return hook.get_conn()
    except (config.ConfigException, AirflowException) as err:
        raise SpecError(f"connection {hook.conn_id!r}: {err}") from err


def _object(given: object, where: str) -> dict[str, Any]:
    try:
        body = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as err:
        raise SpecError(f"{where}: is not valid JSON: {err}") from err
    if not isinstance(body, Mapping):
        raise SpecError(f'{where}: is not an object; write {{"namespace": "training"}}')
    return dict(body)
