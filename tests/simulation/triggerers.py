"""Triggerers: each trigger is an actor that runs the real coroutine, its blocking calls in threads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason

from envscaler_airflow.triggers.scaling_trigger import ScalingTrigger
from envscaler_airflow.triggers.stage_trigger import CALL_TIMEOUT_S, StageTrigger
from tests.simulation import patches
from tests.simulation.airflow import KEY, Log
from tests.simulation.kernel import Actor, Machine

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

    from tests.simulation.airflow import SimAirflow, TaskInstance

T = TypeVar("T")
KINDS = {kind.__module__ + "." + kind.__name__: kind for kind in (StageTrigger, ScalingTrigger)}
LOST_S = (30.0, 60.0)
"""How long triggers of a dead triggerer wait for the other one, seconds. Source: ``[triggerer]
triggerer_health_check_threshold``, 30 by default."""
NEXT_LOOK_S = 1.0
"""From one look of a triggerer at the database to the next, seconds. Source: its main loop."""
KILL_S = 30.0
"""Longest ``on_kill``. Source: ``[triggerer] on_kill_timeout``, its default."""
BY_USER = "user"


async def sleep(seconds: float) -> None:
    """``asyncio.sleep``, without a loop."""
    world = patches.active
    assert world is not None
    world.sleep(seconds)


async def in_thread(
    call: Callable[..., T], *args: object, timeout_s: float = CALL_TIMEOUT_S, kind: str = "stage"
) -> T:
    """The product's ``in_thread``: a thread that runs on when its caller is cancelled or waits no longer."""
    del kind
    world = patches.active
    assert world is not None
    caller, found = world.current, []
    assert caller is not None

    def body() -> None:
        try:
            found.append((call(*args), None))
        except Exception as err:  # noqa: BLE001  (as a future does)
            found.append((None, err))
        if is_awaited:
            world.wake(caller)

    is_awaited = True
    world.spawn("triggerer", body, machine=caller.machine, name=f"{caller.name}/call", within=caller)
    until = world.now + timeout_s
    try:
        while not found:
            if world.now >= until:
                raise TimeoutError
            world.park(most_s=until - world.now)
    finally:
        is_awaited = False
    result, error = found[0]
    if error is not None:
        raise error
    return result


@dataclass(eq=False)
class Row:
    """One trigger in the database, and whose it is.

    Attributes:
        path, arguments: As the trigger serialized itself.
        ti: The task that waits for it.
        ti_id, try_number: What they were when it deferred.
        at: The triggerer that it is assigned to.
    """

    number: int
    path: str
    arguments: str
    ti: TaskInstance
    ti_id: str
    try_number: int
    at: Triggerer | None = None
    is_linked: bool = True


class Triggerer:
    """One triggerer process.

    Attributes:
        main: Its main actor; None while it is down.
        running: Actors of the triggers that it runs.
        cancelled: Those of them that were cancelled; once.
    """

    def __init__(self, all_: Triggerers, machine: Machine) -> None:
        """On *machine*, down."""
        self._all, self.machine = all_, machine
        self.main: Actor | None = None
        self.running: dict[Row, Actor] = {}
        self.cancelled: set[Row] = set()

    def start(self) -> None:
        """Begin."""
        world = self._all.airflow.world
        self.main = world.spawn("triggerer", world.park, machine=self.machine, name=self.machine.name)

    def notice_death(self, actor: Actor) -> None:
        """Its process is gone."""
        if actor is self.main:
            self.main = None
            self.running.clear()
            self.cancelled.clear()
            self._all.died(self)

    def run(self, row: Row) -> None:
        """Run a trigger, from its serialized arguments."""
        if self.main is None or not row.is_linked or row.at is not self or row in self.running:
            return
        self.running[row] = self._all.airflow.world.spawn(
            "triggerer",
            lambda: self._run(row),
            machine=self.machine,
            name=f"{self.machine.name}/{row.number}",
            within=self.main,
        )

    def cancel(self, row: Row) -> None:
        """Cancel a trigger if the database no longer assigns it to this triggerer, as a user's act would."""
        actor, is_mine = self.running.get(row), row.is_linked and row.at is self
        if actor is not None and row not in self.cancelled and not is_mine:
            self.cancelled.add(row)
            self._all.airflow.world.wake(actor, asyncio.CancelledError(BY_USER))

    def _run(self, row: Row) -> None:
        trigger, is_cancelled = self._all.load(row), False
        try:
            self._watch(row, trigger)
        except asyncio.CancelledError:
            is_cancelled = True
            self._log(trigger.on_kill(), "on_kill")
        self.running.pop(row, None)
        self.cancelled.discard(row)
        self._log(trigger.cleanup(), "cleanup")
        if is_cancelled:  # it may be this triggerer's again: the next look at the database finds it
            self._all.later(lambda: self.run(row), NEXT_LOOK_S)

    def _log(self, awaitable: Any, what: str) -> None:
        """Run it; of an error Airflow only logs."""
        try:
            done(awaitable)
        except Exception as err:  # noqa: BLE001  (as the triggerer does)
            self._all.airflow.world.note(f"{what} fails: {type(err).__name__}: {err}")

    def _watch(self, row: Row, trigger: BaseTrigger) -> None:
        airflow = self._all.airflow
        airflow.world.note("starts", who=f"{self.machine.name}/{row.number}")
        try:
            event = done(anext(trigger.run()))
        except Exception as err:  # noqa: BLE001  (as the triggerer does)
            self._all.fail(row, f"{type(err).__name__}: {err}")
            return
        self._all.submit(row, event.payload)
        if airflow.random.random() < 0.3:
            done(trigger.on_kill())  # it has fired, and still runs when its row is gone


def done(awaitable: Any) -> Any:
    """Drive what never gives control to a loop to its end."""
    try:
        awaitable.__await__().send(None) if not hasattr(awaitable, "send") else awaitable.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it waits for a loop")


class Triggerers:
    """Two triggerers, and the triggers in the database."""

    def __init__(self, airflow: SimAirflow, machines: list[Machine]) -> None:
        """Start both."""
        self.airflow = airflow
        self.rows: list[Row] = []
        self._number = 0
        self.processes = [Triggerer(self, machine) for machine in machines]
        for process in self.processes:
            process.start()
            airflow.world.after_death.append(process.notice_death)

    def insert(self, ti: TaskInstance, trigger: BaseTrigger) -> Row:
        """Store a trigger for *ti*; a triggerer takes it soon."""
        path, arguments = trigger.serialize()
        self._number += 1
        row = Row(self._number, path, json.dumps(arguments), ti, ti.id, ti.try_number)
        self.rows.append(row)
        self._assign(row, after_s=self.airflow.random.uniform(0.2, 3.0))
        return row

    def load(self, row: Row) -> BaseTrigger:
        """The trigger of *row*, as the triggerer makes it."""
        arguments = json.loads(row.arguments)
        if self.airflow.world.strikes("old-trigger"):
            arguments = _as_older(arguments)
        trigger = KINDS[row.path](**arguments)
        trigger._log = Log(self.airflow.world)  # type: ignore[assignment]
        task_id = row.ti.task_id
        trigger.task_instance = SimpleNamespace(
            dag_id=KEY.dag_id, run_id=KEY.run_id, task_id=task_id, map_index=-1, id=row.ti_id
        )
        return trigger

    def unlink(self, row: Row) -> None:
        """No task waits for it any more: it is deleted, and cancelled where it runs."""
        if not row.is_linked:
            return
        row.is_linked = False
        self.rows.remove(row)
        after_s = self.airflow.random.uniform(0.5, 3.0)
        if self.airflow.world.strikes("late-kill"):
            after_s += self.airflow.random.uniform(10.0, 120.0)
        for process in self.processes:
            if row in process.running:
                self.later(lambda process=process: process.cancel(row), after_s)

    def submit(self, row: Row, payload: Any) -> None:
        """An event: the first one of a trigger resumes the task that waits for it."""
        late_s = 0.0
        if self.airflow.world.strikes("late-event"):
            late_s = self.airflow.random.uniform(30.0, 1800.0)
        text = json.dumps(payload)
        self.airflow.world.note(f"fires {payload.get('kind')} {payload.get('detail', '')}".rstrip())

        def act() -> None:
            ti = row.ti
            if row.is_linked and ti.trigger is row and ti.state == "deferred":
                self.airflow.resume(ti, ti.next_method or "", {"event": json.loads(text)})

        self.later(act, late_s + self.airflow.random.uniform(0.1, 2.0))

    def fail(self, row: Row, why: str) -> None:
        """The trigger raised an error."""
        self.airflow.world.note(f"failed: {why}")
        kwargs = {"error": TriggerFailureReason.TRIGGER_FAILURE, "traceback": [why]}

        def act() -> None:
            if row.is_linked and row.ti.state == "deferred":
                self.airflow.resume(row.ti, TRIGGER_FAIL_REPR, kwargs)

        self.later(act, self.airflow.random.uniform(0.1, 2.0))

    def died(self, process: Triggerer) -> None:
        """One died: the other takes its triggers, and it restarts."""
        random = self.airflow.random
        self.later(process.start, random.uniform(10.0, 120.0))
        for row in [row for row in self.rows if row.at is process]:
            self._assign(row, after_s=random.uniform(*LOST_S))

    def move(self, process: Triggerer) -> None:
        """Take one for dead that lives or stands still: both run its triggers until it notices."""
        random, paused_s = self.airflow.random, 0.0
        if process.main is not None and random.random() < 0.5:
            paused_s = random.uniform(60.0, 3600.0)
            self.airflow.world.pause(process.main, paused_s)
        for row in list(process.running):
            if row.is_linked:
                row.at = None
                self._assign(row, after_s=random.uniform(*LOST_S) if paused_s else 0.0, unlike=process)
            self.later(lambda row=row: process.cancel(row), paused_s + random.uniform(1.0, 60.0))

    def _assign(self, row: Row, *, after_s: float, unlike: Triggerer | None = None) -> None:
        def act() -> None:
            alive = [one for one in self.processes if one.main is not None and one is not unlike]
            if not row.is_linked:
                return
            if not alive:
                self._assign(row, after_s=10.0)
                return
            row.at = self.airflow.random.choice(alive)
            row.at.run(row)

        self.later(act, after_s)

    def later(self, call: Callable[[], Any], after_s: float) -> None:
        """Have *call* done in a moment, by an actor of its own."""
        air = self.airflow
        air.world.spawn("scheduler", call, machine=air.machine, after_s=after_s)


def _as_older(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that have defaults: as a release before would have written them."""
    return {name: value for name, value in arguments.items() if name not in ("poll_s", "settle", "check_s")}
