"""Where the product's Airflow code meets the simulated world: its store, its machines, Airflow's database."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import cache
from types import SimpleNamespace
from typing import Any

from airflow.sdk.bases.operator import ExecutorSafeguard

from envscaler_airflow.hooks import settings, states
from envscaler_airflow.operators import execution, stage
from envscaler_airflow.triggers import scaling_checks, scaling_trigger, stage_trigger, stage_watch
from tests.simulation import triggerers
from tests.simulation.airflow import KEY, SimAirflow
from tests.simulation.kernel import Machine
from tests.simulation.store import URL
from tests.simulation.workers import api_error

_airflow: SimAirflow | None = None
_SETTLE_S = 7.0
"""Source: ``settle_s()`` with Airflow's defaults."""


def _here() -> tuple[SimAirflow, Machine, str]:
    assert _airflow is not None, "no world runs"
    actor = _airflow.world.current
    return (_airflow, _airflow.machine, "outside") if actor is None else (_airflow, actor.machine, actor.name)


def _open_backend(_compute: str) -> Any:
    airflow, machine, _ = _here()
    return airflow.cloud.client(machine)


def _open_store(_place: settings.StorePlace) -> Any:
    airflow, machine, name = _here()
    return airflow.store.client(name, machine)


def _task_states(
    _dag_id: str, _run_id: str, task_id: str, _map_index: int | None
) -> Mapping[str, str | None]:
    airflow, _, _ = _here()
    airflow.world.point("task states")
    if airflow.world.strikes("api-error", "task states"):
        raise api_error(503)
    return airflow.states(task_id)


class _Now(datetime):
    """``datetime`` whose now is that of the actor's machine."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _Now:
        """The time."""
        return cls.fromtimestamp(time.time(), tz)


@cache
def install(store_url: str) -> None:
    """Put the simulated edges in place, once for this process."""
    os.environ["AIRFLOW__ENVSCALER__STORE_URL"] = store_url
    os.environ["AIRFLOW__ENVSCALER__DEPLOYMENT"] = KEY.deployment
    stage.datetime = _Now  # type: ignore[misc]
    ExecutorSafeguard.test_mode = True
    settings.StorePlace.open = _open_store  # type: ignore[method-assign]
    for module in (execution, stage_watch, scaling_checks):
        module.open_backend = _open_backend  # type: ignore[attr-defined]
    states.task_states = scaling_trigger.task_states = _task_states  # type: ignore[assignment,attr-defined]
    for module in (execution, stage_trigger, scaling_trigger):
        module.settle_s = lambda: _SETTLE_S  # type: ignore[attr-defined]
    for module in (stage_trigger, scaling_trigger):
        module.in_thread = triggerers.in_thread  # type: ignore[attr-defined]
        module.asyncio = SimpleNamespace(  # type: ignore[attr-defined]
            sleep=triggerers.sleep, CancelledError=asyncio.CancelledError
        )


@contextmanager
def connected(airflow: SimAirflow) -> Iterator[None]:
    """Let the product's code meet *airflow* meanwhile."""
    install(URL)
    global _airflow  # noqa: PLW0603  (the product's functions have no argument for it)
    _airflow = airflow
    stage_trigger.StageTrigger._is_warm = False
    try:
        yield
    finally:
        _airflow = None
