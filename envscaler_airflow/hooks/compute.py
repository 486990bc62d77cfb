"""The backend that a stage runs on, made from settings and connections."""

from __future__ import annotations

from pathlib import Path

from envscaler_airflow.backends import create_backend
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.hooks.settings import setting


def open_backend(compute: str) -> Backend:
    """The backend *compute*, as the settings of this deployment want it.

    Raises:
        SpecError: There is no backend of that name.
    """
    root = setting("local_root") if compute == "local" else None
    return create_backend(compute, {"root": Path(root)} if root else None)
