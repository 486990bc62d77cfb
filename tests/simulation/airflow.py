"""Airflow as one DAG run sees it: task instances in a database, a scheduler, and what it shows.

The rules are those of Airflow 3.3.2 (DESIGN, section 8). Workers are in ``workers``, triggerers in
``triggerers``, what people and machines do to them in ``people``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason

from envscaler_airflow.store.keys import RunKey
from tests.simulation import clocks
from tests.simulation.kernel import Actor, Machine, World

if TYPE_CHECKING:
    from tests.simulation.triggerers import Row

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a worker. Source: ``[workers] min_heartbeat_interval``, its default."""
TIMEOUT_S = 300.0
"""Seconds without a heartbeat after which a task is taken for dead. Source: ``[scheduler]
task_instance_heartbeat_timeout``, its default; the check runs every 10 s."""
RETRY_S = 60.0
"""Seconds between two tries. Source: the operator's default ``retry_delay``."""
LOOP_S = (0.3, 6.0)
"""How long the scheduler takes for its next step, seconds. Chosen: a busy deployment."""
STAGE, SENSOR = "train", "autoscale"
KEY = RunKey("deployment", "retrain", "scheduled__1", STAGE)
"""The stage's run."""
OVER = frozenset({"success", "failed", "skipped", "removed"})


@dataclass(eq=False)
class TaskInstance:
    """One row of the database.

    Attributes:
        turn: Grows with each change of state: what was planned for an earlier one is void.
        exits_at: True time at which the scheduler learns that the last execution has ended.
    """

    task_id: str
    id: str
    max_tries: int
    try_number: int = 0
    state: str | None = None
    turn: int = 0
    start_date: datetime | None = None
    next_method: str | None = None
    next_kwargs: dict[str, Any] | None = None
    trigger: Row | None = None
    worker: Actor | None = None
    exits_at: float = 0.0
    xcom: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """What Airflow did, or a person.

    Attributes:
        at: True time, seconds since the epoch.
        kind: ``state`` (with the state as *detail*), ``retry``, ``cleared``, ``cancel``, ``move``,
            ``deleted``, ``created``, ``marked``, ``began`` (an execution), ``refused`` (its report).
        task_id, ti_id, try_number, max_tries: Which try.
        detail: More.
    """

    at: float
    kind: str
    task_id: str
    ti_id: str = ""
    try_number: int = 0
    max_tries: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Setup:
    """What the DAG file says, and how Airflow is configured.

    Attributes:
        spec: Text of the stage's spec.
        arguments: Of the EnvStageOperator.
        has_sensor: Whether a ScalingSensor runs beside the stage.
        poll_s, check_s: Seconds between two polls of the stage's and the sensor's triggers.
        lingers_s: How long its users look at what is over: they may clear it.
        retries: Of both tasks.
        skews_s: What each of Airflow's machines is ahead of the true time: scheduler, two workers, two
            triggerers.
    """

    spec: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_sensor: bool = False
    poll_s: float = 30.0
    check_s: float = 120.0
    lingers_s: float = 0.0
    retries: int = 3
    skews_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)


class Log:
    """A task's log: its lines are in the timeline."""

    def __init__(self, world: World) -> None:
        """Of the actor that writes."""
        self._world = world

    def info(self, words: str, *args: object, **_: object) -> None:
        """Add a line."""
        self._world.note("| " + (words % args if args else words))

    warning = error = exception = info

    def debug(self, words: str, *args: object) -> None:
        """Nothing is shown."""


class SimAirflow:
    """One DAG run with a stage.

    Attributes:
        tis: Task instances by task id; empty while the DAG run is deleted.
        kept: Its task state store; deleted with it.
        facts: What happened.
        clears: How often its task had been cleared, by id of the task instance; a new DAG run counts as one.
        params: DAG params of the next execution.
        pulled: XCom of the last success of each task.
    """

    def __init__(self, world: World, store: Any, cloud: Any, tmp: Path, setup: Setup) -> None:
        """Airflow beside a :class:`SimStore` and a :class:`SimCloud`; DAG file and spec are in *tmp*."""
        from tests.simulation.people import People
        from tests.simulation.triggerers import Triggerers
        from tests.simulation.workers import Workers

        self.world, self.store, self.cloud, self.setup = world, store, cloud, setup
        (tmp / "train.yaml").write_text(setup.spec)
        self.dag_file = tmp / "dag.py"
        names = ("scheduler", "worker-a", "worker-b", "triggerer-a", "triggerer-b")
        machines = [Machine(name, skew_s) for name, skew_s in zip(names, setup.skews_s, strict=True)]
        clocks.go_wrong(world, machines[1:])
        self.machine = machines[0]
        self.tis: dict[str, TaskInstance] = {}
        self.kept: dict[str, str] = {}
        self.facts: list[Fact] = []
        self.clears: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.pulled: dict[str, dict[str, Any]] = {}
        self.away_until = self.changed_at = 0.0
        self.random = world.stream("airflow")
        self.workers = Workers(self, machines[1:3])
        self.triggerers = Triggerers(self, machines[3:])
        self.people = People(self)

    # What others read

    @property
    def is_over(self) -> bool:
        """True once every task has for some time been in a state that it leaves only by a clear."""
        is_over = bool(self.tis) and all(ti.state in OVER for ti in self.tis.values())
        is_over = is_over and not self.people.plans
        return is_over and self.world.now >= self.changed_at + self.setup.lingers_s

    def states(self, task_id: str) -> dict[str, str | None]:
        """Airflow's answer on the states of a task: empty if it was deleted."""
        found = self.tis.get(task_id)
        return {} if found is None else {task_id: found.state}

    def knows(self, ti_id: str) -> bool:
        """True while a task instance of this id exists: a retry or a clear gives the task another one."""
        return any(ti.id == ti_id for ti in self.tis.values())

    def was_cleared(self, before: str, after: str) -> bool:
        """True if a person cleared the task, or made its DAG run again, between two ids of it."""
        return self.clears[before] != self.clears[after]

    def fact(self, kind: str, ti: TaskInstance, detail: str = "") -> None:
        """Note what happened to a task instance."""
        self.facts.append(Fact(self.world.now, kind, ti.task_id, ti.id, ti.try_number, ti.max_tries, detail))
        self.world.note(f"{ti.task_id} try {ti.try_number}: {kind} {detail}".rstrip(), who="airflow")

    # The scheduler

    def begin(self) -> None:
        """Create the DAG run; people and machines begin to do their worst."""
        self.create()
        self.people.start()

    def create(self) -> None:
        """Create the DAG run's task instances."""
        for task_id in (STAGE, SENSOR) if self.setup.has_sensor else (STAGE,):
            ti = TaskInstance(task_id, "", self.setup.retries)
            self.tis[task_id] = ti
            self.name(ti, is_cleared=True)
            self.fact("created", ti)
            self.later(ti, self._queue)

    def name(self, ti: TaskInstance, *, is_cleared: bool = False) -> None:
        """Give a task instance a new id, by the scheduler's clock."""
        before = self.clears.get(ti.id, max(self.clears.values(), default=0))
        ti.id = self._uuid7()
        self.clears[ti.id] = before + is_cleared

    def _uuid7(self) -> str:
        ms = int((self.world.now + self.machine.skew_s) * 1000)
        bits = self.random.getrandbits(74)
        number = ms << 80 | 7 << 76 | (bits >> 62) << 64 | 2 << 62 | bits & (1 << 62) - 1
        return str(uuid.UUID(int=number))

    def later(
        self, ti: TaskInstance, call: Callable[[TaskInstance], None], *, after_s: float | None = None
    ) -> None:
        """Let the scheduler do it, unless the task has changed its state by then."""
        turn = ti.turn
        delay_s = self.random.uniform(*LOOP_S) if after_s is None else after_s

        def act() -> None:
            if ti.turn != turn or self.tis.get(ti.task_id) is not ti:
                return
            if self.world.now < self.away_until:
                self.later(ti, call, after_s=self.away_until - self.world.now + self.random.uniform(*LOOP_S))
            else:
                call(ti)

        if ti.turn == turn:
            self.world.spawn("scheduler", act, machine=self.machine, after_s=delay_s)

    def set_state(self, ti: TaskInstance, state: str | None) -> None:
        """Change a task's state; what was planned for the last one is void."""
        ti.state, ti.turn, self.changed_at = state, ti.turn + 1, self.world.now
        if state != "deferred" and ti.trigger is not None:
            self.triggerers.unlink(ti.trigger)
            ti.trigger = None
        self.fact("state", ti, str(state))

    def _queue(self, ti: TaskInstance) -> None:
        if ti.next_method is None:
            ti.try_number += 1
        self.set_state(ti, "queued")
        if self.world.now < ti.exits_at:
            self.later(ti, self._taken_for_killed, after_s=ti.exits_at - self.world.now)
        launch_s = self.random.uniform(*LOOP_S)
        if self.world.strikes("queue-lost", ti.task_id):
            self.later(ti, self._taken_for_killed, after_s=self.random.uniform(1.0, 60.0))
            launch_s = self.random.uniform(60.0, 900.0)
        self.workers.launch(ti, after_s=launch_s)

    def _taken_for_killed(self, ti: TaskInstance) -> None:
        """The executor reports its end while the database has it as queued: an event came too early."""
        self.fact("lost", ti, "the executor reports an end, the task is queued")
        self.failed(ti)

    def failed(self, ti: TaskInstance, *, may_retry: bool = True) -> None:
        """A try failed: the next one, or the end."""
        can_retry = ti.state == "restarting" or ti.try_number <= ti.max_tries
        ti.next_method = ti.next_kwargs = None
        if not (may_retry and can_retry):
            self.set_state(ti, "failed")
            return
        if ti.state == "running":  # of one that was cleared, or never ran, Airflow keeps the id
            self.name(ti)
        self.set_state(ti, "up_for_retry")
        self.fact("retry", ti)
        self.later(ti, self._queue, after_s=RETRY_S + self.random.uniform(*LOOP_S))

    def resume(self, ti: TaskInstance, method: str, kwargs: dict[str, Any]) -> None:
        """A deferred task goes on with *method*."""
        ti.next_method, ti.next_kwargs = method, kwargs
        self.set_state(ti, "scheduled")
        self.later(ti, self._queue)

    def time_out(self, ti: TaskInstance) -> None:
        """The deferral has lasted as long as it may."""
        self.resume(ti, TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT})

    # What people do, as the API server carries it out

    def clear(self, ti: TaskInstance) -> None:
        """Clear a task."""
        worker = ti.worker
        was_running = ti.state == "running"
        self.name(ti, is_cleared=not was_running)
        if was_running:
            self.set_state(ti, "restarting")
            self.fact("cleared", ti, "while it runs: max_tries stays")
            self.workers.end(worker, then=lambda: self.later(ti, self.failed, after_s=1.0))
            self.later(ti, self.failed, after_s=TIMEOUT_S + 10.0)
            return
        ti.max_tries = ti.try_number + self.setup.retries
        ti.next_method = ti.next_kwargs = None
        self.set_state(ti, None)
        self.fact("cleared", ti)
        self.later(ti, self._queue)

    def mark(self, ti: TaskInstance, state: str) -> None:
        """Mark a task as success or failed."""
        worker = ti.worker if ti.state == "running" else None
        ti.next_method = ti.next_kwargs = None
        self.set_state(ti, state)
        self.fact("marked", ti, state)
        self.workers.end(worker)

    def delete(self) -> None:
        """Delete the DAG run; it is created again under the same name some time later."""
        for ti in self.tis.values():
            worker = ti.worker if ti.state == "running" else None
            self.set_state(ti, "removed")
            self.fact("deleted", ti)
            self.workers.end(worker)
        self.tis, self.kept = {}, {}
        self.world.spawn(
            "scheduler", self.create, machine=self.machine, after_s=self.random.uniform(1.0, 900.0)
        )

    def restart_scheduler(self, seconds: float) -> None:
        """Nothing is scheduled for a while; then what was queued or ran under the old one is reset."""
        self.away_until = self.world.now + seconds
        for ti in self.tis.values():
            if ti.state == "queued" or (ti.state == "running" and self.random.random() < 0.5):
                self.workers.kill(ti.worker if ti.state == "running" else None)
                self.name(ti)
                ti.next_method = ti.next_kwargs = None
                self.set_state(ti, None)
                self.fact("reset", ti, "orphaned by a scheduler that restarted")
                self.later(ti, self._queue, after_s=seconds)
