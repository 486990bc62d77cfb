"""Attempts as processes of this machine; each node in a session and cgroup of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envscaler_airflow.backends.local.backend import LocalBackend as LocalBackend

__all__ = ["LocalBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use: node main starts without it."""
    if name == "LocalBackend":
        from envscaler_airflow.backends.local.backend import LocalBackend  # noqa: PLC0415  # lazy on purpose

        return LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
