"""What people and machines do to an Airflow: clears, marks, cancels, moves, restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowRuntimeError

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.cli.cancel import _Cancel
from envscaler_airflow.errors import EnvScalerError
from envscaler_airflow.hooks.states import why_over
from envscaler_airflow.owner.reap import reap
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import RunState
from envscaler_airflow.store.run import Run
from tests.simulation.airflow import KEY, STAGE
from tests.simulation.kernel import Machine

if TYPE_CHECKING:
    from tests.simulation.airflow import SimAirflow, TaskInstance
    from tests.simulation.store import Effect

EVERY_S = (120.0, 900.0)
"""How often somebody looks at the run, seconds. Chosen: some twenty occasions in a run of hours."""
CLEAR_S = (1.0, 900.0)
"""When a person clears what has succeeded, seconds. Chosen: before its callbacks ran, or long after."""
IN_CHANGE = ("clear", "restart-fresh", "delete-dag-run", "mark-failed", "cancel", "move")
IN_CHANGE_S = (0.0, 120.0)
"""What a person does during a change in place, and when, seconds. Chosen: a change lasts some minutes."""
REAP_EVERY_S = 3600.0
"""How often `reap` runs, seconds. Chosen: as its documentation advises."""


class Cancel(_Cancel):
    """`envscaler cancel` with simulated machines.

    Attributes:
        reach: Returns them.
    """

    reach: Callable[[], Backend]

    def _backend_of(self, state: RunState) -> Backend:
        del state
        return self.reach()


class People:
    """Users and operators of one deployment, on a machine of their own.

    Attributes:
        plans: Clears that a person is about to do.
    """

    def __init__(self, airflow: SimAirflow) -> None:
        """They do nothing before :meth:`start`."""
        self.airflow, self.random = airflow, airflow.world.stream("people")
        self.machine = Machine("laptop", airflow.setup.skews_s[0])
        self.plans = 0
        self.acts: dict[str, Callable[[], None]] = {
            "clear": lambda: airflow.clear(airflow.tis[STAGE]),
            "mark-success": lambda: airflow.mark(airflow.tis[STAGE], "success"),
            "mark-failed": lambda: airflow.mark(airflow.tis[STAGE], "failed"),
            "delete-dag-run": airflow.delete,
            "edit-params": self._edit,
            "restart-fresh": self._fresh,
            "cancel": self._cancel,
            "move": self._move,
            "kill-triggerer": self._kill_triggerer,
            "triggers-moved": self._move_triggers,
            "restart-scheduler": lambda: airflow.restart_scheduler(self.random.uniform(20.0, 600.0)),
        }

    def start(self) -> None:
        """Begin to look at the run from time to time, and at each change in place."""
        self.airflow.store.watchers.append(self._notice)
        self.airflow.world.spawn("person", self._look, machine=self.machine)
        self.airflow.world.spawn("person", self._reap, machine=self.machine, name="reap")

    def _look(self) -> None:
        world = self.airflow.world
        while True:
            world.sleep(self.random.uniform(*EVERY_S))
            for kind, act in self.acts.items():
                if STAGE in self.airflow.tis and world.strikes(kind):
                    with suppress(EnvScalerError):
                        act()

    def _notice(self, effect: Effect) -> None:
        """While CPU and memory are being changed, a person may do something else with the stage."""
        is_event = effect.data is not None and "/events/" in effect.name
        if not is_event or json.loads(effect.data or b"")["type"] != "change-intended":
            return
        world = self.airflow.world
        if not world.strikes("act-in-change"):
            return
        name = self.random.choice(IN_CHANGE)

        def act() -> None:
            if STAGE in self.airflow.tis:
                with suppress(EnvScalerError):
                    self.acts[name]()

        after_s = self.random.uniform(*IN_CHANGE_S)
        world.spawn("person", act, machine=self.machine, after_s=after_s, name=f"{name} in a change")

    def clear_later(self, ti: TaskInstance) -> None:
        """A person wants its success again, in some minutes; until then the DAG run is not over."""
        self.plans += 1

        def act() -> None:
            self.plans -= 1
            if ti.state == "success" and self.airflow.tis.get(ti.task_id) is ti:
                self.airflow.clear(ti)

        after_s = self.random.uniform(*CLEAR_S)
        self.airflow.world.spawn("person", act, machine=self.machine, after_s=after_s)

    def _reap(self) -> None:
        air = self.airflow
        while True:
            air.world.sleep(REAP_EVERY_S)
            self.reap()

    def reap(self) -> None:
        """Run `reap` once, as its operator does."""
        air = self.airflow
        store, backend = air.store.client("reap", self.machine), air.cloud.client(self.machine)
        with suppress(EnvScalerError, AirflowRuntimeError):  # the task fails, and is retried an hour later
            for orphan in reap(store, backend, task_is_over=why_over):
                air.world.note(f"reaps {orphan.handle.name}: {orphan.reason}", who="reap")

    def _run(self) -> Run:
        return Run(self.airflow.store.client("person", self.machine), KEY)

    def _edit(self) -> None:
        """Other params, then a clear: the next attempt has another spec."""
        self.airflow.params["rate"] = round(self.random.uniform(0.1, 0.9), 3)
        self.airflow.clear(self.airflow.tis[STAGE])

    def _fresh(self) -> None:
        self.airflow.params["restart"] = "fresh"
        self.airflow.clear(self.airflow.tis[STAGE])

    def _cancel(self) -> None:
        """`envscaler cancel`, with or without ``--wait``, in a process of its own."""
        self.airflow.fact("cancel", self.airflow.tis[STAGE])
        self.airflow.world.spawn("person", self._carry_out_cancel, machine=self.machine, name="cancel")

    def _carry_out_cancel(self) -> None:
        run, world = self._run(), self.airflow.world
        backend = self.airflow.cloud.client(self.machine)
        with suppress(EnvScalerError):
            state = run.events.load()
            if state.status == "active":
                process = Cancel(run, say=world.note)
                process.reach = lambda: backend
                process.carry_out(state, wait=self.random.random() < 0.5)

    def _move(self) -> None:
        run, ti = self._run(), self.airflow.tis[STAGE]  # the DAG run may be deleted meanwhile
        state = run.events.load()
        live = state.live or state.current
        if live is None or state.status != "active":
            return
        offers = self.airflow.cloud.client(self.machine).offers()
        others = [offer for offer in offers if offer != live.allocation.offer] or offers
        target = Allocation(self.random.choice(others), live.allocation.nodes)
        because = {"reason": "a person wants it", "numbers": {}, "check": None, "forced": True}
        event = request_move(run, target=target, from_attempt=live.key, because=because)
        self.airflow.fact("move", ti, f"event {event.number} to {target.name}")

    def _move_triggers(self) -> None:
        self.airflow.triggerers.move(self.random.choice(self.airflow.triggerers.processes))

    def _kill_triggerer(self) -> None:
        process = self.random.choice(self.airflow.triggerers.processes)
        if process.main is not None:
            self.airflow.world.kill(process.main, "a node is drained")
