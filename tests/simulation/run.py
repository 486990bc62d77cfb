"""One world from one seed: draw a scenario, run it, end the faults, wait for its end, check what is left."""

from __future__ import annotations

import datetime as dt
import io
import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner import foreground
from envscaler_airflow.planning.offers import Offer
from tests.simulation import in_place, patches
from tests.simulation.cloud import SimCloud
from tests.simulation.cloud_client import ReplacingBackend, SimBackend
from tests.simulation.freeze import Freezer
from tests.simulation.invariants import Invariants
from tests.simulation.kernel import EPOCH, Line, Violation, World
from tests.simulation.node import Disk, SimNode
from tests.simulation.pod_losses import PodLosses
from tests.simulation.shell import REAP_EVERY_S, Shell, Wishes, reap_always
from tests.simulation.store import SimStore

POLL_S = 30.0
"""How often a simulated shell polls, seconds. Chosen: as often as a trigger."""
FAULTS_S = 12 * 3600.0
"""Longest time with faults, seconds. Chosen: the longest training, with several losses."""
CALM_S = 36 * 3600.0
"""Time without faults in which every run must end, seconds. Chosen: the longest training, several times."""
RATES = {
    "store-refuse": 0.002,
    "store-lost-answer": 0.002,
    "store-conflict": 0.01,
    "store-slow": 0.001,
    "store-away": 0.0003,
    "store-credentials": 0.0001,
    "store-late": 0.002,
    "store-twice": 0.001,
    "listing-lags": 0.01,
    "cloud-refuse": 0.01,
    "cloud-lost-answer": 0.03,
    "cloud-late": 0.03,
    "cloud-slow": 0.003,
    "cloud-away": 0.002,
    "cloud-unknown": 0.005,
    "cloud-stale": 0.01,
    "preempt": 0.7,
    "storm": 0.2,
    "sold-out": 0.1,
    "hardware": 0.1,
    "cut-off": 0.2,
    "slow-start": 0.1,
    "crash-shell": 0.001,
    "pause-shell": 0.0003,
    "crash-sidecar": 0.0005,
    "pause-sidecar": 0.0001,
    "train-error": 0.001,
    "train-cuda-memory": 0.0005,
    "train-host-memory": 0.001,
    "train-segfault": 0.001,
    "train-stall": 0.0005,
    "train-deaf": 0.001,
    "train-nan": 0.01,
    "train-stale": 0.002,
    "crash-wrapper": 0.0005,
    "train-torn-save": 0.05,
    "torn-checkpoint": 0.02,
    "disk-full": 0.001,
    "cancel": 0.05,
    "taken-up-again": 0.5,
    "move": 0.1,
    "second-shell": 0.05,
}
"""Chance of each fault, by kind. Chosen: a run of two hours meets a few of each kind that its seed has."""


AIRFLOW_RATES = {
    "crash-worker": 0.006,
    "pause-worker": 0.002,
    "zombie": 0.3,
    "late-kill": 0.2,
    "late-event": 0.04,
    "queue-lost": 0.03,
    "api-error": 0.03,
    "crash-triggerer": 0.0004,
    "pause-triggerer": 0.0002,
    "kill-triggerer": 0.04,
    "triggers-moved": 0.05,
    "restart-scheduler": 0.05,
    "clear": 0.06,
    "mark-success": 0.01,
    "mark-failed": 0.02,
    "delete-dag-run": 0.02,
    "edit-params": 0.03,
    "restart-fresh": 0.02,
    "cancel": 0.05,
    "move": 0.1,
    "old-trigger": 0.05,
}
"""Chance of each fault of Airflow and each act of its users: crashes and pauses at each effect, the others at
each occasion. Chosen: a run of some hours meets a few of each kind that its seed has."""


RARE_RATES = {
    "clock-behind": 0.1,
    "clock-back": 0.1,
    "freeze": 0.03,
    "freeze-save": 0.15,
    "crash-accepting": 0.3,
    "clear-delivered": 0.5,
    "release-refuse": 0.3,
}
"""Chance of what other worlds meet too seldom: wrong clocks, first and each half hour; a frozen machine
at each fence, deletion and manifest; a crash and a clear, after each success in Airflow; a refusal of each
release. Chosen: each is met in some hundred worlds."""


PODS = 0.05
"""Share of the worlds of three nodes, whose cloud recreates those lost after a checkpoint. Chosen."""
RESIZING = 0.1
"""Share of the worlds whose cloud changes CPU and memory in place. Chosen."""


class Owner(Protocol):
    """Who runs the stage."""

    @property
    def is_over(self) -> bool:
        """True once the run has ended for its users."""

    def begin(self) -> None:
        """Start."""


@dataclass(frozen=True)
class Scenario:
    """What a seed decides of a world.

    Attributes:
        nodes: Of each attempt.
        style, steps, step_s: Of the training: see ``training.Program``.
        every: Interval of checkpoints, as in a spec.
        capacity: ``spot``, ``on-demand`` or ``auto``.
        wishes: Limits.
        replaces: The cloud recreates lost nodes.
        rates: Chance of each kind of fault.
        owner: Who runs it: ``shell``, or a DAG of ``airflow``.
        has_sensor: A ScalingSensor runs beside the stage.
        lingers_s: How long Airflow's users look at what is over: they may clear it.
        timeout_s: The task's ``execution_timeout``; None for none.
        resizes: The cloud changes CPU and memory in place, and the policy is ``vertical``.
    """

    nodes: int = 1
    style: str = "session"
    steps: int = 400
    step_s: float = 7.0
    every: str = "10m"
    capacity: str = "auto"
    wishes: Wishes = field(default_factory=Wishes)
    replaces: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    owner: str = "shell"
    has_sensor: bool = False
    lingers_s: float = 0.0
    timeout_s: float | None = None
    resizes: bool = False

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Draw one: half of the kinds of faults never occur, the others more or less often."""
        random, others = Random(f"{seed}/scenario"), Random(f"{seed}/airflow")
        rates = _drawn(RATES, random)
        owner = others.choice(("shell", "airflow", "airflow"))
        if owner == "airflow":
            rates |= _drawn(AIRFLOW_RATES, others)
        rates |= _drawn(RARE_RATES, Random(f"{seed}/rare"))
        if resizes := Random(f"{seed}/resizes").random() < RESIZING:
            rates |= {"move": 0.6, "act-in-change": 0.5}  # chosen: changes in place in most runs
        nodes = random.choice((1, 1, 1, 2, 3))
        if loses_pods := Random(f"{seed}/pods").random() < PODS:
            nodes, rates["lose-pod"] = 3, 0.5  # chosen: one in most runs
        steps = int(random.choice((200, 400, 1000, 2000)))
        hours = steps * 7.0 / 3600.0 / nodes**0.9
        budget = random.choice((None, None, 0.5, 1.2, 3.0))
        deadline = random.choice((None, None, None, 3.0))
        timeout = others.choice((None, None, None, 0.5, 2.0))
        wishes = Wishes(
            budget_usd=None if budget is None or resizes else round(budget * hours * nodes, 2),
            deadline_s=None if deadline is None or resizes else deadline * hours * 3600.0 + 1800.0,
            strategy=random.choice(("balanced", "cost")),
        )
        style = random.choice(("session", "session", "saver"))
        every = random.choice(("5m", "10m", "30m"))
        capacity = random.choice(("auto", "spot", "on-demand"))
        return cls(
            nodes=nodes,
            style="session" if loses_pods else style,
            steps=steps,
            every=every,
            capacity="auto" if resizes else capacity,
            wishes=wishes,
            replaces=random.random() < 0.5 or loses_pods,
            rates=rates,
            owner=owner,
            has_sensor=others.random() < 0.5,
            lingers_s=others.choice((0.0, 7200.0)),
            timeout_s=None if timeout is None else timeout * hours * 3600.0 + 1800.0,
            resizes=resizes,
        )

    @property
    def document(self) -> dict[str, Any]:
        """The spec of its stage, as a user writes it."""
        env = {"SIM_STYLE": self.style, "SIM_STEPS": self.steps, "SIM_STEP_S": self.step_s}
        by_form = {
            "parameters": {"rate": {"type": "number", "default": 0.1}},
            "entrypoint": ["python", "train.py", "--rate={{ parameters.rate }}"],
        }
        most = {"policy": "vertical"} if self.resizes else {"max_nodes": self.nodes + 1}
        scaling = {"scaling": {"min_nodes": 1, "max_nodes": self.nodes, "cooldown": "20m"} | most}
        plain = {
            "version": "v1",
            "name": "train",
            "resources": {"requests": {"cpu": 2, "memory": "4Gi"}},
            "num_nodes": self.nodes,
            "entrypoint": ["python", "train.py"],
            "outputs": {"model": "/output/model"},
            "checkpoint": {"path": "/output/checkpoints", "every": self.every},
            "capacity": self.capacity,
            "env": [{"name": name, "value": str(value)} for name, value in env.items()],
        }
        return (
            plain
            | (by_form if self.owner == "airflow" else {})
            | (scaling if self.has_sensor or self.resizes else {})
        )


def _drawn(rates: Mapping[str, float], random: Random) -> dict[str, float]:
    """Half of *rates*, each up to four times lower or higher."""
    return {
        kind: min(1.0, rate * 4.0 ** random.uniform(-1.0, 1.0))
        for kind, rate in rates.items()
        if random.random() < 0.5
    }


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
    types = (("small", 2.0, 1.0, 0.4), ("large", 4.0, 1.8, 0.7))
    return tuple(
        Offer("aws", "us-east-1", name, kind, vcpus, 4.0 * vcpus, usd_per_hour=usd, price_source="simulated")
        for name, vcpus, usd_on_demand, usd_spot in types
        for kind, usd in (("on-demand", usd_on_demand), ("spot", usd_spot))  # type: ignore[arg-type]
    )


def simulate(seed: int, *, muted: frozenset[str] = frozenset(), scenario: Scenario | None = None) -> Result:
    """Run the world of *seed* to its end."""
    began = time.process_time()
    drawn = scenario or Scenario.of(seed)
    world = World(seed, rates=dict(drawn.rates), muted=muted)
    world.note(f"{drawn.nodes} nodes, {drawn}", who="scenario")
    violation = None
    with _quietly(), patches.running(world):
        try:
            _run(world, drawn)
        except Violation as err:
            violation = str(err)
        except Exception as err:  # noqa: BLE001  (what no code of the world expects is a violation too)
            violation = f"error: {type(err).__name__}: {err}"
            world.lines += [Line(world.now, "error", line) for line in traceback.format_exc().splitlines()]
    violation = world.violation or violation
    lines, true_s = [str(line) for line in world.lines], world.now - EPOCH
    return Result(seed, violation, lines, world.struck, world.counts, true_s, time.process_time() - began)


@contextmanager
def _quietly() -> Iterator[None]:
    """Poll seldom, and print nothing: what matters is in the timeline."""
    poll_s, foreground.POLL_S = foreground.POLL_S, POLL_S
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        foreground.POLL_S = poll_s
        logging.disable(logging.NOTSET)


def _run(world: World, scenario: Scenario) -> None:
    skew = world.stream("clocks").uniform
    store = SimStore(world, skew_s=skew(-100.0, 100.0))
    plain = ReplacingBackend if scenario.replaces else SimBackend
    cloud = SimCloud(
        world,
        store,
        offers=in_place.offers() if scenario.resizes else offers(),
        node_type=SimNode,
        tells_time=world.stream("clocks").random() < 0.5,
        replaces=scenario.replaces or scenario.resizes,
        backend_type=in_place.ResizingBackend if scenario.resizes else plain,
        skew_s=skew(-100.0, 100.0),
    )
    invariants = Invariants(world, store, cloud, reap_every_s=REAP_EVERY_S)
    PodLosses(world, store, cloud)
    freezer = Freezer(world, store, cloud)
    with _owner(world, store, cloud, scenario) as owner:
        invariants.was_cleared = getattr(owner, "was_cleared", None)
        owner.begin()
        world.run(until=EPOCH + FAULTS_S, is_over=lambda: owner.is_over)
        end_faults(world, store, cloud)
        freezer.end_faults()
        world.run(until=world.now + CALM_S, is_over=lambda: owner.is_over)
        if not owner.is_over:
            raise Violation(f"liveness: the run has not ended {CALM_S:.0f} s after the last fault")
        world.run(until=world.now + 3 * REAP_EVERY_S)
        invariants.finish()


@contextmanager
def _owner(world: World, store: SimStore, cloud: SimCloud, scenario: Scenario) -> Iterator[Owner]:
    if scenario.owner == "shell":
        shell = Shell(world, store, cloud, EnvSpec.from_dict(scenario.document), scenario.wishes)
        world.spawn("reap", lambda: reap_always(world, store, cloud), machine=shell.machine, name="reap")
        yield shell
        return
    from tests.simulation.airflow import Setup, SimAirflow  # seconds, for Airflow itself
    from tests.simulation.edges import connected

    wishes, clocks = scenario.wishes, world.stream("clocks")
    arguments = {
        "strategy": wishes.strategy,
        "budget_usd": wishes.budget_usd,
        "deadline": None if wishes.deadline_s is None else f"{wishes.deadline_s:.0f}s",
        "execution_timeout": None if scenario.timeout_s is None else dt.timedelta(seconds=scenario.timeout_s),
    }
    setup = Setup(
        spec=json.dumps(scenario.document),
        arguments=arguments,
        has_sensor=scenario.has_sensor,
        skews_s=tuple(clocks.choice((0.0, 0.0, -200.0, 90.0, 3600.0)) for _ in range(5)),
        lingers_s=scenario.lingers_s,
    )
    airflow = SimAirflow(world, store, cloud, world.only(Disk).new("dags"), setup)
    with connected(airflow):
        yield airflow


def end_faults(world: World, store: SimStore, cloud: SimCloud) -> None:
    """Let no fault occur any more, and end those that last."""
    world.end_faults()
    store.end_faults()
    cloud.end_faults()
