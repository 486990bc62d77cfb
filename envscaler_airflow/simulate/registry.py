"""Policies that other packages bring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from envscaler_airflow.errors import SpecError

SIMULATED = "envscaler_airflow.simulated_policies"
"""Group of classes with ``begin`` and ``choose``, for ``envscaler simulate spot`` and ``elastic``."""


def simulated_policies() -> dict[str, Callable[[], Any]]:
    """By name, to be made when asked for: one that is broken fails nobody else's simulation."""
    return {point.name: partial(_made, point) for point in entry_points(group=SIMULATED)}


def _made(point: EntryPoint) -> Any:
    try:
        return point.load()()
    except Exception as err:  # an edge: code of others
        raise SpecError(f"--policy: {point.name} ({point.value}) cannot be loaded: {err!r:.200}") from err
