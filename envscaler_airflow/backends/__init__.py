"""The backends local, kubernetes and vm behind one interface, created by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import SpecError

BACKENDS = ("local", "kubernetes")
"""Names that :func:`create_backend` knows."""


def create_backend(name: str, config: Mapping[str, Any] | None = None) -> Backend:
    """Create the backend of that name; its SDK is imported only here.

    Args:
        name: One of :data:`BACKENDS`.
        config: Arguments of the backend, JSON.

    Raises:
        SpecError: There is no backend of that name.
    """
    if name == "local":
        from envscaler_airflow.backends.local import LocalBackend  # noqa: PLC0415  # only on request

        return LocalBackend(**dict(config or {}))
    if name == "kubernetes":
        from envscaler_airflow.backends.kubernetes import KubernetesBackend  # noqa: PLC0415  # only on request

        return KubernetesBackend(**dict(config or {}))
    raise SpecError(f"compute={name!r}: there is no such backend; write one of {', '.join(BACKENDS)}")
