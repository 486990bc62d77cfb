"""Attempts as processes of this machine; each node in its own session and cgroup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envscaler_airflow.backends.local.backend import LocalBackend as LocalBackend

__all__ = ["LocalBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use, so that node main starts without it."""
    if name == "LocalBackend":
        from envscaler_airflow.backends.local.backend import LocalBackend  # noqa: PLC0415  # lazy on purpose

        return LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
