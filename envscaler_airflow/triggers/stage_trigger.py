"""The trigger that watches a run while its task is deferred."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError
from airflow.triggers.base import BaseTrigger, TriggerEvent

from envscaler_airflow.errors import EnvScalerError, SpecError
from envscaler_airflow.hooks.states import OVER, task_state

if TYPE_CHECKING:
    from envscaler_airflow.triggers.stage_watch import StageWatcher


T = TypeVar("T")

CALL_TIMEOUT_S = 120.0
"""Longest wait for one round of store and backend calls, seconds. Chosen: S3's own retries end before."""
_THREADS = 32
"""Threads for all triggers of this process that do one kind of work. Chosen: a round takes some 20 ms of
every 5 s."""

Kind = Literal["stage", "scaling"]
"""Whose call it is: if another package's policy hangs in a check, leases are still renewed."""


async def in_thread(
    call: Callable[..., T], *args: object, timeout_s: float = CALL_TIMEOUT_S, kind: Kind = "stage"
) -> T:
    """Return the result of ``call(*args)``, run in a thread of our own with this task's context (its log).

    A call that times out keeps its thread; a pool of our own keeps such calls from
    starving other triggers' threads.

    Raises:
        TimeoutError: No result within *timeout_s*.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(_pool(kind), partial(context.run, call, *args))
    return await asyncio.wait_for(future, timeout_s)


@cache
def _pool(kind: Kind) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"envscaler-{kind}")


POLL_S = 5.0
"""Seconds between two polls of the run. Chosen: a small part of any pause between attempts."""
STATE_S = 19.0
KILL_S = 9.0
"""Longest parts of ``on_kill``, seconds: asking Airflow for the state, and asking the attempt to stop.

Source: Airflow cuts it after 30 s ([triggerer] on_kill_timeout).
"""


def settle_s() -> float:
    """Seconds for which an event must be delayed after a deferral.

    Airflow 3.3.2 may report the execution that deferred as finished up to one
    ``[workers] min_heartbeat_interval`` later. If the task has been queued again by then,
    Airflow takes it for killed and fails it.
    """
    return float(conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0)) + 2.0


class StageTrigger(BaseTrigger):
    """Watches one run; fires exactly one event: a ``Wake``, its place, and what was watched.

    Starts and stops nothing.

    Args:
        prefix: The run's folder in the store.
        watching: What to watch, ``Watching.to_dict()``.
        ti_id: Task instance that deferred; ``on_kill`` acts only while it owns the run.
        compute: Name of the backend.
        store_url, store_conn_id: As the operator has them.
        poll_s: Seconds between two polls.
        settle: Seconds before which no event fires; None for :func:`settle_s`.
    """

    _is_warm: ClassVar[bool] = False

    def __init__(
        self,
        *,
        prefix: str,
        watching: Mapping[str, Any],
        ti_id: str,
        compute: str = "local",
        store_url: str | None = None,
        store_conn_id: str | None = None,
        poll_s: float = POLL_S,
        settle: float | None = None,
    ) -> None:
        """Keep the arguments: all state is in them and in the store."""
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's has no types
        self.prefix = prefix
        self.watching = dict(watching)
        self.ti_id = ti_id
        self.compute = compute
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.poll_s = poll_s
        self.settle = settle
        self._fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("prefix", "watching", "ti_id", "compute", "store_url", "store_conn_id", "poll_s", "settle")
        arguments = {name: getattr(self, name) for name in names}
        return "envscaler_airflow.triggers.stage_trigger.StageTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Watch until the owner is needed, and report why."""
        began = time.monotonic()
        wake = await self._watched()
        hold = settle_s() if self.settle is None else self.settle
        await asyncio.sleep(max(0.0, began + hold - time.monotonic()))
        self._fired = True
        place = {name: getattr(self, name) for name in ("compute", "store_url", "store_conn_id")}
        watched_s = time.monotonic() - began
        watched = {"prefix": self.prefix, "watching": self.watching, "watched_s": watched_s}
        yield TriggerEvent({**wake, "place": place, "watched": watched})  # type: ignore[no-untyped-call]  # Airflow's has no types

    async def on_kill(self) -> None:
        """Handle the user's end of the task: ask the attempt to save and stop; wait for nothing.

        Airflow 3.3.2 also calls this after another triggerer has taken the trigger over, or has fired
        its event, so it acts only if the task is over. A cleared task is left to its new try, which
        adopts the attempt.
        """
        if self._fired:
            return
        try:
            state = await in_thread(self._task_state, timeout_s=STATE_S)
            is_over = state in OVER
            acted = await in_thread(self._kill, timeout_s=KILL_S) if is_over else False
        except (EnvScalerError, AirflowException, AirflowRuntimeError, TimeoutError) as err:
            reason = str(err) or type(err).__name__
            self.log.warning("kill: %s; the lease will end the attempt", reason)
            return
        why = "asked to stop" if acted else "not ours any more" if is_over else f"the task is {state}"
        self.log.info("kill: %s", why)

    def _task_state(self) -> str | None:
        """Return Airflow's state of the task; ``removed`` if it was deleted with its DAG run."""
        ti = self.task_instance
        return None if ti is None else task_state(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)

    async def _watched(self) -> dict[str, Any]:
        watcher: StageWatcher | None = None
        fault = ""
        while True:
            try:
                if watcher is None:
                    watcher = await in_thread(self._open)
                wake = await in_thread(self._poll, watcher)
                fault = ""
            except SpecError:
                raise  # another store than the operator's, or none: waiting changes nothing
            except (EnvScalerError, AirflowRuntimeError, TimeoutError) as err:
                wake = None
                if isinstance(err, TimeoutError):
                    watcher = None  # its thread may still run, and see what we would then miss
                if fault != (fault := str(err) or "timed out"):
                    self.log.warning("the run cannot be read: %s", fault)
            if wake is not None:
                return wake
            await self._warm_up()
            await asyncio.sleep(self.poll_s)

    async def _warm_up(self) -> None:
        """Request the task's state once per process: the first answer is slow, and a kill has little time."""
        if not StageTrigger._is_warm:
            StageTrigger._is_warm = True
            with contextlib.suppress(AirflowException, AirflowRuntimeError, TimeoutError):
                await in_thread(self._task_state)

    def _open(self) -> StageWatcher:
        from envscaler_airflow.triggers.stage_watch import StageWatcher  # noqa: PLC0415  (in the thread, not in the loop)

        return StageWatcher.open(
            self.prefix,
            self.watching,
            compute=self.compute,
            holder=f"trigger of {self.ti_id}",
            store_url=self.store_url,
            store_conn_id=self.store_conn_id,
            poll_s=self.poll_s,
        )

    def _poll(self, watcher: StageWatcher) -> dict[str, Any] | None:
        return watcher.once(lambda line: self.log.info("%s", line))

    def _kill(self) -> bool:
        from envscaler_airflow.triggers.stage_watch import kill  # noqa: PLC0415  (same)

        return kill(
            self.prefix,
            ti_id=self.ti_id,
            try_number=self.watching.get("try_number"),
            compute=self.compute,
            store_url=self.store_url,
            store_conn_id=self.store_conn_id,
        )
