"""One world from one seed: draw a scenario, run it, end the faults, wait for its end, check what is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from envscaler_airflow.cli.foreground import shell_actor
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import (
    BackendError,
    NoOfferError,
    RunFailedError,
    SpecError,
)
from envscaler_airflow.owner import foreground
from envscaler_airflow.owner.foreground import ForegroundOwner
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.stage import Stage, StoppedError, SupersededError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.store.keys import SHELL_DAG, RunKey
from envscaler_airflow.store.run import Run
from tests.simulation import patches
from tests.simulation.cloud import SimCloud
from tests.simulation.kernel import EPOCH, Machine, Violation, World
from tests.simulation.node import SimNode
from tests.simulation.store import SimStore

POLL_S = 20.0
"""How often a simulated shell polls, seconds. Chosen: between the product's 2 s and a trigger's 30 s."""
REAP_EVERY_S = 3600.0
"""How often the simulated `envscaler reap` runs, seconds. Chosen."""
FAULTS_S = 12 * 3600.0
"""Longest time with faults, seconds. Chosen: the longest training, with several losses."""
CALM_S = 24 * 3600.0
"""Time without faults in which every run must end, seconds. Chosen."""
KEY = RunKey("deployment", SHELL_DAG, "simulated", "train")


@dataclass(frozen=True)
class Scenario:
    """What a seed decides of a world.

    Attributes:
        nodes: Of each attempt.
        steps: Of the whole training.
        step_s: Seconds of one step on one node.
        every: Interval of checkpoints, as in a spec.
        budget_usd, deadline_s: Limits; None for none.
        replaces: The cloud recreates lost nodes.
        rates: Chance of each kind of fault.
    """

    nodes: int = 1
    style: str = "session"
    steps: int = 400
    step_s: float = 5.0
    every: str = "10m"
    budget_usd: float | None = None
    deadline_s: float | None = None
    replaces: bool = False
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a world went.

    Attributes:
        seed: Its seed.
        violation: What did not hold; None if everything did.
        lines: The timeline.
        struck: Faults that occurred.
        counts: How often what occurred.
        true_s: Simulated seconds.
        cpu_s: CPU seconds that it took.
    """

    seed: int
    violation: str | None
    lines: list[str]
    struck: list[str]
    counts: Counter[str]
    true_s: float
    cpu_s: float


def offers() -> tuple[Offer, ...]:
    """Two machine types, on demand and spot."""
    return tuple(
        Offer("aws", "us-east-1", name, kind, vcpus, 4.0 * vcpus, usd_per_hour=usd, price_source="simulated")
        for name, vcpus, usd_on_demand, usd_spot in (("small", 2.0, 1.0, 0.4), ("large", 4.0, 1.8, 0.7))
        for kind, usd in (("on-demand", usd_on_demand), ("spot", usd_spot))
    )


class Shell:
    """A person who starts a run from a shell, and starts it again by its name when its process is gone."""

    def __init__(
        self, world: World, store: SimStore, cloud: SimCloud, scenario: Scenario, spec: EnvSpec
    ) -> None:
        """Prepare."""
        self.world, self.store, self.cloud, self.scenario, self.spec = world, store, cloud, scenario, spec
        self.machine = Machine("laptop", world.stream("clocks").choice((0.0, -400.0, 130.0, 3600.0)))
        self.end: str | None = None
        self.starts = 0

    def live(self) -> None:
        """Until the run has ended."""
        world = self.world
        while self.end is None:
            self.starts += 1
            process = world.spawn("shell", self._own, machine=self.machine, name="shell")
            world.wait(lambda actor=process: not actor.is_alive, every_s=30.0)
            if self.end is None:
                world.sleep(world.stream("person").uniform(10.0, 2400.0))

    def _own(self) -> None:
        world = self.world
        client = self.store.client(f"shell-{self.starts}", self.machine)
        run = Run(client, KEY, snapshots=True)
        stage = Stage(
            spec=self.spec,
            spec_source="train.yaml",
            budget_usd=self.scenario.budget_usd,
            deadline_s=self.scenario.deadline_s,
        )
        try:
            owner = Owner(
                run=run,
                backend=self.cloud.client(self.machine),
                actor=shell_actor(run),
                stage=stage,
                before=_noted(world),
            )
            delivered = ForegroundOwner(owner, on_wait=lambda wait: world.note(f"waits: {wait.reason}")).own()
            self.end = f"delivered {delivered.outputs}"
        except (RunFailedError, StoppedError, SpecError, NoOfferError) as err:
            self.end = f"{type(err).__name__}: {err}"
        except SupersededError as err:
            world.note(f"superseded: {err}")
        except BackendError as err:
            world.note(f"the shell ends: {type(err).__name__}: {err}")
        if self.end is not None:
            world.note(f"the run is over: {self.end}")


def _noted(world: World):
    return lambda action: world.note(f"action {action.kind}: {action.reason or action.stop_reason}")


@contextmanager
def _poll_slowly() -> Iterator[None]:
    poll_s, foreground.POLL_S = foreground.POLL_S, POLL_S
    try:
        yield
    finally:
        foreground.POLL_S = poll_s


def simulate(seed: int, *, muted: frozenset[str] = frozenset(), scenario: Scenario | None = None) -> Result:
    """Run the world of *seed* to its end."""
    began = time.process_time()
    drawn = scenario or Scenario()
    world = World(seed, rates=drawn.rates, muted=muted)
    violation = None
    with _poll_slowly(), patches.running(world):
        try:
            _run(world, drawn)
        except Violation as err:
            violation = str(err)
    return Result(
        seed,
        violation,
        [str(line) for line in world.lines],
        world.struck,
        world.counts,
        world.now - EPOCH,
        time.process_time() - began,
    )


def _spec(scenario: Scenario) -> EnvSpec:
    return EnvSpec.from_dict(
        {
            "version": "v1",
            "name": "train",
            "resources": {"requests": {"cpu": 2, "memory": "4Gi"}},
            "num_nodes": scenario.nodes,
            "entrypoint": ["python", "train.py"],
            "outputs": {"model": "/output/model"},
            "checkpoint": {"path": "/output/checkpoints", "every": scenario.every},
            "env": [
                {"name": f"SIM_{name.upper()}", "value": str(value)}
                for name, value in (
                    ("style", scenario.style),
                    ("steps", scenario.steps),
                    ("step_s", scenario.step_s),
                )
            ],
        }
    )


def _run(world: World, scenario: Scenario) -> None:
    store = SimStore(world, skew_s=world.stream("clocks").uniform(-100.0, 100.0))
    cloud = SimCloud(
        world,
        store,
        offers=offers(),
        node_type=SimNode,
        replaces=scenario.replaces,
        skew_s=world.stream("clocks").uniform(-100, 100),
    )
    shell = Shell(world, store, cloud, scenario, _spec(scenario))
    world.spawn("person", shell.live, machine=shell.machine, name="person")
    world.run(until=EPOCH + FAULTS_S, is_over=lambda: shell.end is not None)
    world.end_faults()
    world.run(until=world.now + CALM_S, is_over=lambda: shell.end is not None)
    if shell.end is None:
        raise Violation("liveness: the run has not ended a day after the last fault")
