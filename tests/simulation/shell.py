"""People who run a stage from a shell: they start it, start it again, cancel it, move it, and reap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envscaler_airflow.cli.shell_owner import shell_actor
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    EnvScalerError,
    NoOfferError,
    RunFailedError,
    SpecError,
    StoreError,
)
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.reap import reap
from envscaler_airflow.owner.request import request_move, request_stop
from envscaler_airflow.owner.stage import Stage, StoppedError, SupersededError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Action
from envscaler_airflow.store.keys import SHELL_DAG, RunKey
from envscaler_airflow.store.run import Run
from tests.simulation import clocks
from tests.simulation.cloud import SimCloud
from tests.simulation.kernel import Actor, Machine, World
from tests.simulation.store import SimStore

KEY = RunKey("deployment", SHELL_DAG, "simulated", "train")
REAP_EVERY_S = 3600.0
"""How often the simulated `envscaler reap` runs, seconds. Source: the example of ReapOperator."""
LOOKS_EVERY_S = (300.0, 3600.0)
"""How often a person looks at the run, seconds. Chosen."""


@dataclass(frozen=True)
class Wishes:
    """What the person who started the run wants of it: see ``Stage``."""

    budget_usd: float | None = None
    deadline_s: float | None = None
    strategy: str = "balanced"


class Shell:
    """A person who starts a run from a shell, and starts it again by its name when its process is gone.

    Attributes:
        end: How the run ended for that person; None while it goes on.
    """

    def __init__(self, world: World, store: SimStore, cloud: SimCloud, spec: EnvSpec, wishes: Wishes) -> None:
        """Prepare; :meth:`begin` starts the people."""
        self.world, self.store, self.cloud, self.spec, self.wishes = world, store, cloud, spec, wishes
        skews = (0.0, -400.0, 130.0, 3600.0)
        self.machine = Machine("laptop", world.stream("clocks").choice(skews))
        self.other = Machine("desktop", world.stream("clocks").choice(skews))
        clocks.go_wrong(world, (self.machine, self.other))
        self.random = world.stream("people")
        self.end: str | None = None
        self._processes: list[Actor] = []
        self._clients = 0

    def begin(self) -> None:
        """Start the people."""
        self.world.spawn("person", self._keep, machine=self.machine, name="person")
        self.world.spawn("person", self._look, machine=self.other, name="colleague")

    @property
    def is_over(self) -> bool:
        """True once the run has ended for the person, and no process of it is left."""
        return self.end is not None and not any(one.is_alive for one in self._processes)

    def _keep(self) -> None:
        """Start the run, and again while it has not ended."""
        while self.end is None:
            process = self._start(self.machine)
            self.world.wait(lambda: not process.is_alive, every_s=30.0)  # noqa: B023  (used before the next)
            if self.end is None:
                self.world.sleep(self.random.uniform(10.0, 2400.0))

    def _look(self) -> None:
        """Do something from time to time, as the world's rates say."""
        acts: dict[str, Callable[[], object]] = {
            "cancel": self._cancel,
            "move": self._move,
            "second-shell": lambda: self._start(self.other),
        }
        while not self.is_over:
            self.world.sleep(self.random.uniform(*LOOKS_EVERY_S))
            for name, act in acts.items():
                if self.world.strikes(name):
                    try:
                        act()
                    except (StoreError, BackendError) as err:
                        self.world.note(f"{name} does not work: {err}")

    def _start(self, machine: Machine) -> Actor:
        process = self.world.spawn("shell", lambda: self._own(machine), machine=machine, name="shell")
        self._processes.append(process)
        return process

    def _run(self, machine: Machine, *, snapshots: bool = False) -> Run:
        self._clients += 1
        return Run(self.store.client(f"shell-{self._clients}", machine), KEY, snapshots=snapshots)

    def _own(self, machine: Machine) -> None:
        """What `envscaler submit` does, in one process."""
        run = self._run(machine, snapshots=True)
        wishes = self.wishes
        stage = Stage(
            spec=self.spec,
            spec_source="train.yaml",
            budget_usd=wishes.budget_usd,
            deadline_s=wishes.deadline_s,
            strategy=wishes.strategy,
        )
        try:
            owner = Owner(
                run=run,
                backend=self.cloud.client(machine),
                actor=shell_actor(run),
                stage=stage,
                before=self._note,
            )
            self._end(f"delivered {ForegroundOwner(owner).own().outputs}")
        except StoppedError as err:
            if not self.world.strikes("taken-up-again"):
                self._end(f"stopped: {err}")
        except (RunFailedError, BudgetError, SpecError, NoOfferError) as err:
            self._end(f"{type(err).__name__}: {err}")
        except SupersededError as err:
            self.world.note(f"superseded: {err}")
        except EnvScalerError as err:
            self.world.note(f"the shell ends: {type(err).__name__}: {err}")

    def _end(self, how: str) -> None:
        self.end = how
        self.world.note(f"the run is over: {how}")

    def _note(self, action: Action) -> None:
        self.world.note(f"action {action.kind}: {action.stop_reason} {action.reason}")

    def _cancel(self) -> None:
        run = self._run(self.other)
        if run.events.load().status == "active":
            request_stop(run, reason="cancelled from a shell", by="a colleague")

    def _move(self) -> None:
        run = self._run(self.other)
        state = run.events.load()
        live = state.live or state.current
        if live is None or state.status != "active":
            return
        offers = self.cloud.client(self.other).offers()
        others = [offer for offer in offers if offer != live.allocation.offer] or offers
        target = Allocation(self.random.choice(others), live.allocation.nodes)
        because = {"reason": "a person wants it", "numbers": {}, "check": None, "forced": True}
        request_move(run, target=target, from_attempt=live.key, because=because)


def reap_now(world: World, store: SimStore, cloud: SimCloud, machine: Machine) -> int:
    """What `envscaler reap` does; returns how many it found."""
    found = 0
    for orphan in reap(store.client("reap", machine), cloud.client(machine)):
        world.note(f"reaped {orphan.handle.name}: {orphan.reason}")
        found += 1
    return found


def reap_always(world: World, store: SimStore, cloud: SimCloud) -> None:
    """Reap every hour, as a task of Airflow does."""
    machine = Machine("reaper")
    while True:
        world.sleep(REAP_EVERY_S)
        try:
            reap_now(world, store, cloud, machine)
        except EnvScalerError as err:
            world.note(f"reap does not work: {err}")
