"""Attempts as Indexed Jobs of a Kubernetes cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envscaler_airflow.backends.kubernetes.backend import KubernetesBackend as KubernetesBackend

__all__ = ["KubernetesBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use: the sidecar and the install step start without it."""
    if name == "KubernetesBackend":
        from envscaler_airflow.backends.kubernetes.backend import KubernetesBackend  # noqa: PLC0415  # lazy on purpose

        return KubernetesBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
