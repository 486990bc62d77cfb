"""The backend that a stage runs on, made from settings and connections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from airflow.sdk.exceptions import AirflowException

from envscaler_airflow.backends import create_backend
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.settings import setting

_IN_CLUSTER = ("in_cluster", "extra__kubernetes__in_cluster")
"""Extra by which a connection requests the pod's own identity; the second as Airflow 2.2 wrote it."""


def compute_place(compute: str, conn_id: str | None) -> str:
    """Return ``kubernetes:ID`` for a cluster reached by a connection; otherwise the backend's name alone.

    A ``kubernetes_conn_id`` in ``default_args`` is also set on stages of other backends, where it is ignored.
    """
    return f"{compute}:{conn_id}" if conn_id and compute == "kubernetes" else compute


def open_backend(compute: str) -> Backend:
    """Return the backend *compute* (see :func:`compute_place`), with the settings of this deployment.

    Raises:
        SpecError: There is no backend of that name, or its settings or connection cannot be used.
    """
    if not isinstance(compute, str):
        raise SpecError(f"compute: got {compute!r:.80}, expected the name of a backend")
    name, _, conn_id = compute.partition(":")
    if name == "local":
        root = setting("local_root")
        return create_backend(name, {"root": Path(root)} if root else None)
    if name == "kubernetes":
        return create_backend(name, kubernetes_config(conn_id or None))
    return create_backend(name)


def kubernetes_config(conn_id: str | None) -> dict[str, Any]:
    """Arguments of the Kubernetes backend: ``[envscaler] kubernetes`` (JSON), overridden by the connection's.

    A connection of the cncf.kubernetes provider gives the client. Its extra ``envscaler`` (JSON) gives
    fields of the backend's settings, and its namespace is used. Without one: the kubeconfig, or the pod's
    own identity if ``in_cluster`` is set.

    Raises:
        SpecError: The setting is not a JSON object, or the provider is not installed.
    """
    config = _object(setting("kubernetes") or "{}", "[envscaler] kubernetes")
    if conn_id is None:
        return config
    try:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import (  # noqa: PLC0415  (another provider)
            KubernetesHook,
        )
    except ImportError as err:
        raise SpecError(
            f"kubernetes_conn_id={conn_id!r} needs apache-airflow-providers-cncf-kubernetes ({err})"
        ) from err
    hook = KubernetesHook(conn_id=conn_id)
    config |= _object(hook.conn_extras.get("envscaler") or {}, f"connection {conn_id}: envscaler")
    namespace = hook.get_namespace()
    return config | {"api_client": _client(hook)} | ({"namespace": namespace} if namespace else {})


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
    except ValueError as err:
        raise SpecError(f"{where}: is no JSON: {err}") from err
    if not isinstance(body, Mapping):
        raise SpecError(f'{where}: is no object; write {{"namespace": "training"}}')
    return dict(body)
