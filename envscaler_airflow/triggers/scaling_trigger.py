"""The trigger that runs the scaling checks of a stage while it trains."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.triggers.base import BaseTrigger, TriggerEvent

from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.states import task_states
from envscaler_airflow.triggers.stage_trigger import in_thread, settle_s

if TYPE_CHECKING:
    from envscaler_airflow.triggers.scaling_checks import Checks

CHECK_S = 30.0
"""Seconds between two checks. Chosen: two statuses of a node; also the sensor's own default."""

_ARGUMENTS = (
    "folder", "dag_id", "run_id", "map_index", "compute", "check_s", "until", "writer", "store_url",
    "store_conn_id", "settle", "prometheus_conn_id",
)  # fmt: skip
"""Arguments that are kept under their own names; Airflow's base class has a ``task_id``."""


class ScalingTrigger(BaseTrigger):
    """Checks a stage repeatedly; fires exactly one event: a move that pays, or that the stage is over.

    Args:
        folder: Folder of the stage's runs in the store.
        dag_id, run_id, task_id: Of the stage.
        map_index: Only this index; None for all.
        compute: Backend of the stage.
        check_s: Seconds between two checks.
        until: When it times out, by the store's clock; None: an hour after the stage's deadline, if any.
        writer: Name of this sensor in ``decisions/``.
        store_url, store_conn_id, prometheus_conn_id: As the sensor has them.
        settle: Seconds before which no event fires; None for :func:`settle_s`.
    """

    def __init__(  # noqa: PLR0913  (all state travels in arguments)
        self,
        *,
        folder: str,
        dag_id: str,
        run_id: str,
        task_id: str,
        map_index: int | None = None,
        compute: str = "local",
        check_s: float = CHECK_S,
        until: float | None = None,
        writer: str = "sensor",
        store_url: str | None = None,
        store_conn_id: str | None = None,
        settle: float | None = None,
        prometheus_conn_id: str | None = None,
    ) -> None:
        """Keep the arguments: all state is in them and in the store."""
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's has no types
        self.folder = folder
        self.dag_id = dag_id
        self.run_id = run_id
        self.stage_id = task_id
        self.map_index = map_index
        self.compute = compute
        self.check_s = check_s
        self.until = until
        self.writer = writer
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.settle = settle
        self.prometheus_conn_id = prometheus_conn_id
        self._checks: Checks | None = None
        self._busy = threading.Lock()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments = {name: getattr(self, name) for name in _ARGUMENTS}
        path = "envscaler_airflow.triggers.scaling_trigger.ScalingTrigger"
        return path, {**arguments, "task_id": self.stage_id}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Check until the sensor is needed, and report why."""
        began = time.monotonic()
        event = await self._seen()
        hold = settle_s() if self.settle is None else self.settle
        await asyncio.sleep(max(0.0, began + hold - time.monotonic()))
        yield TriggerEvent({**event, "until": self.until})  # type: ignore[no-untyped-call]  # Airflow's has no types

    async def cleanup(self) -> None:
        """Write the last checks; the stage is left alone."""
        if self._checks is not None:
            await in_thread(self._checks.close, timeout_s=10.0, kind="scaling")

    async def _seen(self) -> dict[str, Any]:
        fault = ""
        while True:
            try:
                event = await in_thread(self._check, kind="scaling")
                fault = ""
            except SpecError:
                raise  # no store, or the backend does not exist: waiting changes nothing
            except (EnvScalerError, AirflowRuntimeError, TimeoutError) as err:
                event = None
                if fault != (fault := str(err) or "timed out"):
                    self.log.warning("stage=%s cannot check: %s", self.stage_id, fault)
            if event is not None:
                return event
            await asyncio.sleep(self.check_s)

    def _check(self) -> dict[str, Any] | None:
        """Run one check at a time: if one hangs, as in another package's policy, no second one starts."""
        if not self._busy.acquire(blocking=False):
            raise TimeoutError("the last check has not come back")
        try:
            return self._checked()
        finally:
            self._busy.release()

    def _checked(self) -> dict[str, Any] | None:
        if self._checks is None:
            from envscaler_airflow.triggers.scaling_checks import Checks  # noqa: PLC0415  (in the thread)

            self._checks = Checks.open(
                self.folder,
                map_index=self.map_index,
                writer=self.writer,
                compute=self.compute,
                store_url=self.store_url,
                store_conn_id=self.store_conn_id,
                prometheus_conn_id=self.prometheus_conn_id,
                until=self.until,
            )
        event = self._checks.once(task_states(self.dag_id, self.run_id, self.stage_id, self.map_index))
        for line in self._checks.news():
            self.log.info("stage=%s %s", self.stage_id, line)
        return event
