"""Every rule of the sensor's life, against a scripted backend: no Airflow services, no sleep."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, ExecutorSafeguard, TriggerFailureReason
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRuntimeError,
    AirflowSensorTimeout,
    AirflowSkipException,
    ErrorType,
    TaskDeferralError,
    TaskDeferred,
)
from airflow.sdk.execution_time.comms import ErrorResponse

from envscaler_agent.protocol import Progress, Status, status_name
from envscaler_airflow import EnvStageOperator, ScalingSensor
from envscaler_airflow.envspec import load_spec
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.owner.owner import Owner
from envscaler_airflow.owner.request import request_move
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import MoveRequested, Succeeded, read_body
from envscaler_airflow.store import EventLog, RunKey, check_store, open_store
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import ManualClock, ScriptedBackend
from envscaler_airflow.triggers import scaling_checks as checks_module
from envscaler_airflow.triggers import scaling_trigger
from envscaler_airflow.triggers.scaling_checks import Checks
from envscaler_airflow.triggers.scaling_trigger import ScalingTrigger

FOLDER = "unit/dag/run/train"
PREFIX = f"{FOLDER}/-1"
SPEC = """\
version: v1
name: train
resources: {requests: {cpu: 1, memory: 1Gi}}
entrypoint: [python, train.py]
scaling:
  {policy: cost-to-finish, cooldown: 10s, stabilization: 0s, warmup: 10s, speedup: [
  {offer: scripted/cpu-2/on-demand, relative_to: scripted/cpu-1/on-demand, mean: 1.9, stdev: 0.05,
   source: test}]}
"""


class World:
    """A stage that may move, and its observer."""

    def __init__(self, tmp_path):
        """Start with nothing begun."""
        (tmp_path / "train.yaml").write_text(SPEC)
        self.spec = load_spec(tmp_path / "train.yaml")
        self.url = f"file://{tmp_path}/store"
        self.store = open_store(self.url)
        check_store(self.store)
        self.clock = ManualClock()
        self.backend = ScriptedBackend(clock=self.clock)
        self.said = 0

    def log(self, map_index=-1):
        """Return the events of a run of the stage."""
        return Run(self.store, f"{FOLDER}/{map_index}").events

    def begin(self, map_index=-1, *, deadline_s=None):
        """Start the run's first attempt."""
        controller = Owner(
            run=Run(self.store, RunKey("unit", "dag", "run", "train", map_index), clock=self.clock.time),
            backend=self.backend,
            actor=Actor("ti-1", 1, 3),
            stage=Stage(self.spec, "train.yaml", value_of_hour=100.0, deadline_s=deadline_s),
        )
        controller.enter()

    def train(self, seconds, *, steps_per_s=1.0, total=10_000):
        """Let the training run for *seconds* and report it."""
        self.clock.advance(seconds)
        self.said += 1
        now = self.clock.time()
        step = int(now * steps_per_s) % total
        progress = Progress(step=step, total_steps=total, steps_per_s=steps_per_s, elapsed_s=now)
        status = Status(
            generation=1, attempt=1, sequence=self.said, phase="running", progress=progress, start_step=0
        )
        self.store.write(f"{PREFIX}/{status_name(1, 1, 0)}", status.to_json())

    def checks(self, map_index=-1):
        """Return the observer that a trigger makes."""
        return Checks(
            self.store,
            self.backend,
            FOLDER,
            map_index,
            "sensor",
            monotonic=self.clock.monotonic,
            clock=self.clock.time,
        )

    def wanted(self):
        """Return the event of a trigger that wants a move."""
        checks = self.checks()
        for _ in range(10):
            self.train(10.0)
            event = checks.once({"train": "deferred"})
            if event is not None:
                return event
        raise AssertionError("no move was wanted")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Settings of a deployment, and sensors that can run outside a task."""
    made = World(tmp_path)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", made.url)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "unit")
    monkeypatch.setattr(checks_module, "open_backend", lambda _name: made.backend)
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    return made


def sensor_of(world, *, group=False, **more):
    """A sensor beside its stage, in a TaskGroup or not."""
    del world
    with DAG("dag", schedule=None):
        if group:
            EnvStageOperator(task_id="train", spec="other.yaml")
            with TaskGroup("group"):
                EnvStageOperator(task_id="train", spec="train.yaml")
                return ScalingSensor(task_id="autoscale", stage="train", **more)
        EnvStageOperator(task_id="train", spec="train.yaml")
        return ScalingSensor(task_id="autoscale", **{"stage": "train", **more})


def context_of(*, number=1, max_tries=3, map_index=-1):
    """Return what a worker passes to an execution of the sensor."""
    ti = SimpleNamespace(
        id=f"s-{number}",
        try_number=number,
        max_tries=max_tries,
        dag_id="dag",
        run_id="run",
        task_id="autoscale",
        map_index=map_index,
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return {"ti": ti, "dag_run": SimpleNamespace(team_name=None), "params": {}}


def deferred(call):
    """Return the arguments of the trigger that *call* deferred to."""
    with pytest.raises(TaskDeferred) as caught:
        call()
    return caught.value.trigger.serialize()[1]


def test_no_run_yet_keeps_looking(world):
    """No event and no error."""
    assert world.checks().once({"train": "scheduled"}) is None


@pytest.mark.parametrize("state", ["skipped", "upstream_failed", "removed", "failed"])
def test_a_stage_that_is_over_without_a_run_skips_the_sensor(world, state):
    """There was nothing to scale."""
    event = world.checks().once({"train": state})

    assert event == {"kind": "absent", "states": [state]}
    with pytest.raises(AirflowSkipException, match=state):
        sensor_of(world).resume(context_of(), event)


@pytest.mark.parametrize("status", ["succeeded", "failed", "stopped"])
def test_a_stage_that_ended_lets_the_sensor_succeed(world, status):
    """The outcome does not matter; the summary is the return value."""
    world.begin()
    body = {"generation": 1, "outputs": {}, "reason": "r"}
    log = world.log()
    log.append(log.load().number, read_body(status, body), actor=Actor("ti-1", 1, 3))

    event = world.checks().once({"train": "deferred"})
    result = sensor_of(world).resume(context_of(), event)

    assert result["runs"]["-1"]["status"] == status
    assert result["runs"]["-1"]["allocations"] == ["scripted/cpu-1/on-demand"]


def test_a_task_marked_by_hand_ends_the_sensor_though_the_run_goes_on(world):
    """Its events do not show the mark; Airflow does."""
    world.begin()

    assert world.checks().once({"train": "failed"})["kind"] == "ended"


def test_a_retry_of_the_stage_is_the_same_run(world):
    """The sensor continues."""
    world.begin()

    assert world.checks().once({"train": "up_for_retry"}) is None


def test_asks_for_the_move_that_pays_and_defers_again(world):
    """One request, with the reason and numbers, from the watched attempt."""
    world.begin()
    event = world.wanted()

    arguments = deferred(lambda: sensor_of(world).resume(context_of(), {**event, "until": None}))

    request = world.log().load().pending[0]
    assert isinstance(request.body, MoveRequested)
    assert request.body.target.offer.instance_type == "cpu-2"
    assert request.body.from_attempt == (1, 1)
    assert request.body.reason == event["reason"]
    assert arguments["folder"] == FOLDER


def test_sends_no_second_request_before_the_answer(world):
    """The check wants none, and an execution that was late appends none."""
    world.begin()
    event = world.wanted()
    target = Allocation.from_dict(event["target"])
    request_move(
        Run(world.store, PREFIX), target=target, from_attempt=(1, 1), because={"reason": "r", "numbers": {}}
    )

    deferred(lambda: sensor_of(world).resume(context_of(), event))
    checks = world.checks()
    world.train(10.0)

    assert len(world.log().load().pending) == 1
    assert checks.once({"train": "deferred"}) is None
    assert "has no answer yet" in checks.news()[0]


def test_asks_nothing_of_an_attempt_that_is_gone(world):
    """The status takes precedence over the request."""
    world.begin()
    event = {**world.wanted(), "from_attempt": [1, 7]}

    deferred(lambda: sensor_of(world).resume(context_of(), event))

    assert world.log().load().pending == ()


def test_every_check_is_recorded(world):
    """Also "keep", as a counter; a move closes the chunk at once."""
    world.begin()
    world.wanted()

    (name,) = world.store.children(f"{PREFIX}/decisions")
    lines = world.store.read(f"{PREFIX}/decisions/{name}").decode().splitlines()
    actions = [json.loads(line)["check"]["decision"]["action"] for line in lines]
    assert actions[-1] == "move"
    assert set(actions[:-1]) <= {"keep"}


def test_says_a_decision_once_while_it_stays_the_same(world):
    """The trigger's log does not repeat equal lines."""
    world.begin()
    checks = world.checks()
    world.train(1.0)
    checks.once({})

    assert len(checks.news()) == 1
    assert checks.news() == []


def test_all_map_indexes_of_a_mapped_stage_are_looked_at(world):
    """The sensor ends when Airflow reports the end of every index, and summarizes each run."""
    world.begin(0)
    world.begin(1)
    checks = world.checks(None)

    assert checks.once({"train_0": "success", "train_1": "deferred"}) is None
    event = checks.once({"train_0": "success", "train_1": "success"})

    assert (event["kind"], sorted(event["runs"])) == ("ended", ["0", "1"])


def test_a_mapped_stage_is_not_over_while_an_index_has_not_begun(world):
    """The existing runs have ended, but Airflow has one more to start."""
    world.begin(0)
    log = world.log(0)
    log.append(log.load().number, Succeeded(generation=1), actor=Actor("ti-1", 1, 3))

    assert world.checks(None).once({"train_0": "success", "train_1": "scheduled"}) is None


def test_timeout_is_an_hour_after_the_deadline_by_default(world):
    """Deadline 100 s after the start; then an hour more."""
    world.begin(deadline_s=100.0)
    checks = world.checks()
    world.clock.advance(3699)
    assert checks.once({"train": "deferred"}) is None

    world.clock.advance(2)

    assert checks.once({"train": "deferred"})["kind"] == "timeout"


def test_without_a_deadline_there_is_no_timeout(world):
    """Not even Airflow's default of seven days."""
    world.begin()
    checks = world.checks()
    world.clock.advance(30 * 86400)

    assert checks.once({"train": "deferred"}) is None
    assert deferred(lambda: sensor_of(world).execute(context_of()))["until"] is None


def test_a_given_timeout_is_kept_as_an_absolute_time(world, monkeypatch):
    """It counts from the sensor's start, and does not restart when the sensor is deferred again."""
    monkeypatch.setattr(type(world.store), "now", lambda _self: 1000.0)
    sensor = sensor_of(world, timeout=timedelta(hours=1))
    first = deferred(lambda: sensor.execute(context_of()))
    world.begin()
    event = {**world.wanted(), "until": first["until"]}

    again = deferred(lambda: sensor.resume(context_of(), event))

    assert first["until"] == 4600.0
    assert again["until"] == first["until"]


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
def test_a_timeout_goes_by_the_clock_of_the_store(world, monkeypatch, skew_s):
    """The triggerer's clock is hours off; the sensor neither ends early nor stays too long (A6)."""
    world.begin()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew_s)
    checks = world.checks()
    checks.until = checks.now() + 3600.0
    early = checks.once({"train": "deferred"})

    world.clock.advance(3601)

    assert early is None
    assert checks.once({"train": "deferred"})["kind"] == "timeout"


def test_a_timeout_skips_by_default_and_fails_without_soft_fail(world):
    """Through Airflow's own path for sensors."""
    event = {"kind": "timeout", "reason": "over"}

    with pytest.raises(AirflowSkipException):
        sensor_of(world).resume_execution("resume", {"event": event}, context_of())
    with pytest.raises(AirflowSensorTimeout):
        sensor_of(world, soft_fail=False).resume_execution("resume", {"event": event}, context_of())


def test_own_errors_are_retried_and_then_skip(world, monkeypatch):
    """Three retries first, since scaling is worth them; then the stage continues without the sensor."""
    monkeypatch.setattr(EventLog, "load", lambda _self: (_ for _ in ()).throw(StoreError("503")))
    event = {"kind": "move", "prefix": PREFIX, "from_attempt": [1, 1], "target": {}, "until": None}

    with pytest.raises(AirflowException, match="503"):
        sensor_of(world).resume(context_of(number=1), event)
    with pytest.raises(AirflowSkipException, match="503"):
        sensor_of(world).resume(context_of(number=4), event)


def test_a_failed_trigger_is_retried_and_then_skips(world):
    """Airflow's soft_fail would skip it at once; the sensor does not."""
    failure = {"error": TriggerFailureReason.TRIGGER_FAILURE, "traceback": ["Boom"]}

    with pytest.raises(TaskDeferralError):
        sensor_of(world).resume_execution(TRIGGER_FAIL_REPR, failure, context_of(number=1))
    with pytest.raises(AirflowSkipException):
        sensor_of(world).resume_execution(TRIGGER_FAIL_REPR, failure, context_of(number=4))


def test_the_stage_of_its_own_task_group_comes_first(world):
    """``train`` means ``group.train`` for a sensor in that group."""
    assert deferred(lambda: sensor_of(world, group=True).execute(context_of()))["task_id"] == "group.train"


def test_the_stage_may_be_given_as_its_operator(world):
    """The sensor uses its task id."""
    stage = EnvStageOperator(task_id="train", spec="train.yaml")

    assert ScalingSensor(task_id="autoscale", stage=stage).stage == "train"
    assert deferred(lambda: sensor_of(world).execute(context_of()))["map_index"] == -1


def test_a_stage_given_as_its_operator_is_no_namesake_in_the_group(world):
    """A task id is looked up in the sensor's own TaskGroup first; an operator is unambiguous."""
    del world
    with DAG("dag", schedule=None):
        meant = EnvStageOperator(task_id="train", spec="other.yaml")
        with TaskGroup("group"):
            EnvStageOperator(task_id="train", spec="train.yaml")
            by_operator = ScalingSensor(task_id="autoscale", stage=meant)
            by_name = ScalingSensor(task_id="named", stage="train")

    assert by_operator._task() is meant
    assert by_name._task().task_id == "group.train"


@pytest.mark.parametrize("value", ["output", None, ["train"]])
def test_a_stage_of_another_kind_is_told_where_the_dag_file_is_read(world, value):
    """As an import error with a correction."""
    del world
    with DAG("dag", schedule=None):
        train = EnvStageOperator(task_id="train", spec="train.yaml")

        with pytest.raises(SpecError, match=r"stage: got .*, expected a task id or the stage's operator"):
            ScalingSensor(task_id="autoscale", stage=train.output if value == "output" else value)


@pytest.mark.parametrize("value", [None, timedelta(seconds=30), 0, -1])
def test_checks_without_a_pause_are_refused(world, value):
    """Their trigger would fail, or check without a pause."""
    with pytest.raises(AirflowException, match=r"check_interval: got .*, expected seconds above 0"):
        sensor_of(world, check_interval=value).execute(context_of())


def test_an_unknown_stage_is_told_with_what_there_is(world):
    """A retry and a skip for a typing error would leave the DAG run green (F7)."""
    with pytest.raises(AirflowFailException, match="'trian' is not a stage of DAG dag; write one of: train"):
        sensor_of(world, stage="trian").execute(context_of())


@pytest.mark.parametrize(("own", "seen"), [(-1, None), (2, 2)])
def test_a_mapped_stage_is_seen_whole_or_at_the_same_index(world, own, seen):
    """An unmapped sensor watches all of it; index 2 of a mapped sensor watches index 2."""
    with DAG("dag", schedule=None):
        EnvStageOperator.partial(task_id="train", spec="train.yaml").expand(parameters=[{}, {}, {}])
        sensor = ScalingSensor(task_id="autoscale", stage="train")

    assert deferred(lambda: sensor.execute(context_of(map_index=own)))["map_index"] == seen


@pytest.mark.parametrize("mapped", [False, True])
def test_cluster_and_store_are_those_of_the_stage(world, mapped):
    """As the stage itself gets them: rendered, from default_args, and per index when it is mapped."""
    with DAG("dag", schedule=None, default_args={"conn_id": "{{ params.team }}"}):
        given = {"task_id": "train", "spec": "s.yaml", "compute": "kubernetes", "store_url": world.url}
        if mapped:
            EnvStageOperator.partial(**given).expand(parameters=[{}, {}])
        else:
            EnvStageOperator(**given)
        sensor = ScalingSensor(task_id="autoscale", stage="train")

    context = {**context_of(), "params": {"team": "ml"}}
    arguments = deferred(lambda: sensor.execute(context))

    assert (arguments["compute"], arguments["store_url"]) == ("kubernetes:ml", world.url)


def test_a_mapped_stage_s_group_has_the_word_before_the_dag(world):
    """Airflow's order: the argument itself, else the group's default, else the DAG's."""
    with DAG("dag", schedule=None, default_args={"conn_id": "dag", "owner": "us"}):
        with TaskGroup("group", default_args={"conn_id": "group"}):
            given = {"task_id": "train", "spec": "s.yaml", "compute": "kubernetes", "store_url": world.url}
            EnvStageOperator.partial(**given).expand(parameters=[{}, {}])
        sensor = ScalingSensor(task_id="autoscale", stage="group.train")

    assert deferred(lambda: sensor.execute(context_of()))["compute"] == "kubernetes:group"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "kubernetes:ml"),
        ({"compute": "kubernetes:own"}, "kubernetes:own"),
        ({"compute": "local"}, "local"),
    ],
)
def test_backend_and_connection_may_stand_in_default_args(world, given, seen):
    """They also reach the sensor's own argument, which then names the stage's cluster."""
    with DAG("dag", schedule=None, default_args={"compute": "kubernetes", "conn_id": "ml"}):
        EnvStageOperator(task_id="train", spec="s.yaml")
        sensor = ScalingSensor(task_id="autoscale", stage="train", **given)

    assert deferred(lambda: sensor.execute(context_of()))["compute"] == seen


def test_the_trigger_comes_back_from_its_serialized_arguments(world):
    """They contain all state."""
    arguments = deferred(lambda: sensor_of(world).execute(context_of()))

    again = ScalingTrigger(**json.loads(json.dumps(arguments))).serialize()

    assert again == ("envscaler_airflow.triggers.scaling_trigger.ScalingTrigger", arguments)


def test_the_trigger_asks_the_server_of_the_sensors_connection(world, monkeypatch):
    """Through settings and connections of the triggerer, when there is a query."""
    asked = []
    monkeypatch.setattr("envscaler_airflow.triggers.scaling_checks.asks", asked.append)
    monkeypatch.setattr(scaling_trigger, "task_states", lambda *_: {"train": "skipped"})

    for more in ({"prometheus_conn_id": "metrics"}, {}):
        arguments = deferred(lambda more=more: sensor_of(world, **more).execute(context_of()))
        trigger = ScalingTrigger(**{**arguments, "settle": 0.0})
        asyncio.run(trigger.run().__anext__())

    assert asked == ["metrics", None]


def test_the_trigger_fires_once_and_carries_the_timeout(world, monkeypatch):
    """The event has what the next execution needs, and nothing follows it."""
    arguments = deferred(lambda: sensor_of(world, timeout=1e9).execute(context_of()))
    monkeypatch.setattr(scaling_trigger, "task_states", lambda *_: {"train": "skipped"})
    trigger = ScalingTrigger(**{**arguments, "settle": 0.0})

    async def collect():
        return [event.payload async for event in trigger.run()]

    assert asyncio.run(collect()) == [{"kind": "absent", "states": ["skipped"], "until": arguments["until"]}]


@pytest.mark.parametrize(
    "fault", [StoreError("503"), AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR))]
)
def test_the_trigger_goes_on_after_a_store_or_airflow_that_gives_no_answer(world, monkeypatch, fault):
    """Unknown is not over: an upgrade of the API server uses up no retry of the sensor."""
    arguments = deferred(lambda: sensor_of(world).execute(context_of()))
    answers = [fault, {"kind": "ended", "runs": {}}]

    def once(_self, _states):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(scaling_trigger, "task_states", lambda *_: {})
    monkeypatch.setattr(Checks, "once", once)
    trigger = ScalingTrigger(**{**arguments, "settle": 0.0, "check_s": 0.0})

    async def first():
        return [event.payload["kind"] async for event in trigger.run()]

    assert asyncio.run(first()) == ["ended"]


def test_a_sensor_under_dag_test_looks_once(world, monkeypatch):
    """``dag.test()`` runs one task at a time: a sensor waiting for its stage would wait for ever (F13)."""
    from airflow.sdk.execution_time import task_runner

    comms = type("InProcessSupervisorComms", (), {})()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)

    before = sensor_of(world).execute(context_of())
    world.begin()
    after = sensor_of(world).execute(context_of())

    assert before == {"stage": "train", "runs": {}}
    assert after["runs"]["-1"]["attempts"] == 1
