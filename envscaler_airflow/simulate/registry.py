"""Policies that other packages bring."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

SIMULATED = "envscaler_airflow.simulated_policies"
"""Group of classes with ``begin`` and ``choose``, for ``envscaler simulate spot`` and ``elastic``."""


def simulated_policies() -> dict[str, type[Any]]:
    """By name, loaded."""
    return {point.name: point.load() for point in entry_points(group=SIMULATED)}
