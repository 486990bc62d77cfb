"""The backend that a stage runs on, made from settings and connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException

from envscaler_airflow.backends import all_backends, backend_type
from envscaler_airflow.backends.base import Backend, SharesWatch
from envscaler_airflow.clouds import Access
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.connections import access_of, extra_of
from envscaler_airflow.hooks.settings import setting

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
