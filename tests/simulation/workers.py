"""Workers: each execution of a task is an actor that runs the real operator or sensor."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRuntimeError,
    AirflowSensorTimeout,
    AirflowSkipException,
    ErrorType,
    TaskDeferred,
)
from airflow.sdk.execution_time.comms import ErrorResponse

from envscaler_airflow.operators.stage import EnvStageOperator
from envscaler_airflow.sensors.scaling import ScalingSensor
from tests.simulation.airflow import HEARTBEAT_S, KEY, SENSOR, STAGE, TIMEOUT_S, Log
from tests.simulation.kernel import Actor, Machine, Violation

if TYPE_CHECKING:
    from tests.simulation.airflow import SimAirflow, TaskInstance


def api_error(status: int) -> AirflowRuntimeError:
    """The error of a worker when the API server answers with *status*."""
    return AirflowRuntimeError(
        ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": status})
    )


class Try:
    """The task instance as its worker has it: what it was when the execution began."""

    def __init__(self, airflow: SimAirflow, ti: TaskInstance, try_number: int) -> None:
        """Copy what the worker was given."""
        self._airflow, self._xcom = airflow, ti.xcom
        self.id, self.try_number, self.max_tries = ti.id, try_number, ti.max_tries
        self.dag_id, self.run_id, self.task_id, self.map_index = KEY.dag_id, KEY.run_id, ti.task_id, -1
        self.start_date = ti.start_date

    def xcom_push(self, key: str, value: Any) -> None:
        """Store the value, if Airflow knows this try."""
        self._airflow.world.point("push XCom")
        if not self._airflow.knows(self.id):
            raise api_error(404)
        self._xcom[key] = json.loads(json.dumps(value))

    def xcom_pull(self, key: str, **_: Any) -> Any:
        """Return a pushed value."""
        self._airflow.world.point("pull XCom")
        return self._xcom.get(key)


class TaskState:
    """Airflow's task state store, as the accessor of 3.3.2 behaves in a worker."""

    def __init__(self, airflow: SimAirflow, ti_id: str) -> None:
        """Of the DAG run's task, for the try *ti_id*."""
        self._airflow, self._ti_id = airflow, ti_id

    def get(self, key: str, default: str | None = None) -> str | None:
        """A try without a task instance finds nothing, and gets no error."""
        self._ask("get")
        return self._airflow.kept.get(key, default) if self._airflow.knows(self._ti_id) else default

    def set(self, key: str, value: str, *, retention: object = None) -> None:
        """A try without a task instance is refused."""
        self._ask("set")
        if not self._airflow.knows(self._ti_id):
            raise api_error(404)
        self._airflow.kept[key] = value

    def _ask(self, what: str) -> None:
        self._airflow.world.point(f"task state {what}")
        if self._airflow.world.strikes("api-error", f"task state {what}"):
            self._airflow.world.sleep(self._airflow.random.choice((0.0, 20.0)))
            raise api_error(503)


class Workers:
    """Two machines on which executions run."""

    def __init__(self, airflow: SimAirflow, machines: list[Machine]) -> None:
        """Workers of *airflow*."""
        self.airflow, self.machines = airflow, machines

    def launch(self, ti: TaskInstance, *, after_s: float) -> None:
        """Let a worker run the try that is queued now; a late one begins only if the database still waits."""
        ti_id, try_number, air = ti.id, ti.try_number, self.airflow

        def begin() -> None:
            if ti.state == "queued" and ti.id == ti_id and air.tis.get(ti.task_id) is ti:
                self._begin(ti, try_number)

        air.world.spawn("scheduler", begin, machine=air.machine, after_s=after_s)

    def _begin(self, ti: TaskInstance, try_number: int) -> None:
        air = self.airflow
        ti.start_date = ti.start_date or datetime.fromtimestamp(air.world.now, UTC)
        air.set_state(ti, "running")
        now = Try(air, ti, try_number)
        machine = air.random.choice(self.machines)
        method, kwargs = ti.next_method, ti.next_kwargs
        actor = air.world.spawn(
            "worker", lambda: self._run(ti, now, method, kwargs), machine=machine, name=f"worker {ti.task_id}"
        )
        ti.worker = actor
        self._watch(ti, actor)

    def _watch(self, ti: TaskInstance, actor: Actor) -> None:
        """Without heartbeats, since the process died or its machine stands still, the try has failed."""
        air, began = self.airflow, self.airflow.world.now

        def check(ti: TaskInstance) -> None:
            if actor.is_alive and actor.paused_until < began + TIMEOUT_S:
                self._watch(ti, actor)
                return
            air.fact("lost", ti, "no heartbeats")
            air.failed(ti)
            self.end(actor)

        air.later(ti, check, after_s=TIMEOUT_S + air.random.uniform(0.0, 10.0))

    def end(self, actor: Actor | None, *, then: Callable[[], None] = lambda: None) -> None:
        """End a process whose heartbeat is refused, after its next one; a zombie goes on for longer."""
        air = self.airflow
        if actor is None or not actor.is_alive:
            return
        wait_s = max(0.0, actor.paused_until - air.world.now) + air.random.uniform(0.0, 2 * HEARTBEAT_S)
        if air.world.strikes("zombie", actor.name):
            wait_s += air.random.uniform(30.0, 1800.0)

        def act() -> None:
            air.world.kill(actor, "its heartbeat was refused")
            then()

        air.world.spawn("scheduler", act, machine=air.machine, after_s=wait_s)

    def kill(self, actor: Actor | None) -> None:
        """End a process at once, with its executor."""
        if actor is not None:
            self.airflow.world.kill(actor, "with its executor")

    def _run(self, ti: TaskInstance, now: Try, method: str | None, kwargs: dict[str, Any] | None) -> None:
        air = self.airflow
        air.world.point("begin the execution")
        operator = self._operator(now)
        context = self._context(operator, now)
        air.fact("began", ti, method or "execute")
        self._report(ti, now, operator, context, *self._outcome(operator, context, method, kwargs))

    def _outcome(
        self, operator: Any, context: Any, method: str | None, kwargs: dict[str, Any] | None
    ) -> tuple[str, Any]:
        try:
            if method is None:
                return "success", operator.execute(context)
            return "success", operator.resume_execution(method, kwargs, context)
        except TaskDeferred as err:
            return "deferred", err
        except AirflowSkipException as err:
            return "skipped", err
        except (AirflowFailException, AirflowSensorTimeout) as err:
            return "failed", err
        except (AirflowException, AirflowRuntimeError) as err:
            return "up_for_retry", err
        except Exception as err:
            where = traceback.format_exc(limit=-12)
            kind = type(err).__name__
            raise Violation(f"unexpected error: a task ends with {kind}: {err}\n{where}") from err

    def _report(
        self, ti: TaskInstance, now: Try, operator: Any, context: Any, state: str, result: Any
    ) -> None:
        air = self.airflow
        air.world.point(f"report {state}")
        self._say(state, result)
        is_known = ti.id == now.id and ti.state == "running" and air.tis.get(ti.task_id) is ti
        if not is_known:
            air.fact("refused", ti, f"of try {now.try_number}: {state}")
        else:
            ti.exits_at = air.world.now + air.random.uniform(0.1, HEARTBEAT_S)
            self._accept(ti, state, result)
        if state == "success":  # these run even if the report was refused
            air.world.point("success callbacks")
            if ti.task_id == STAGE and air.world.strikes("crash-accepting"):
                self.kill(air.world.current)
            for callback in operator.on_success_callback:
                callback(context)

    def _accept(self, ti: TaskInstance, state: str, result: Any) -> None:
        air = self.airflow
        if state == "deferred":
            ti.next_method = result.method_name
            ti.trigger = air.triggerers.insert(ti, result.trigger)
            air.set_state(ti, "deferred")
            if result.timeout is not None:
                check_s = air.random.uniform(0.0, 15.0)  # Airflow checks so often by default
                air.later(ti, air.time_out, after_s=result.timeout.total_seconds() + check_s)
        elif state in ("failed", "up_for_retry"):
            air.failed(ti, may_retry=state == "up_for_retry")
        else:
            if state == "success":
                air.pulled[ti.task_id] = {**ti.xcom, "return_value": json.loads(json.dumps(result))}
            ti.next_method = ti.next_kwargs = None
            air.set_state(ti, state)
            if state == "success" and ti.task_id == STAGE and air.world.strikes("clear-delivered"):
                air.people.clear_later(ti)

    def _say(self, state: str, result: Any) -> None:
        words = f": {result}".splitlines()[0] if isinstance(result, Exception) else ""
        self.airflow.world.note(f"ends with {state}{words}")

    def _operator(self, now: Try) -> Any:
        air = self.airflow
        dag = DAG(KEY.dag_id, schedule=None)
        dag.fileloc = str(air.dag_file)
        stage: Any = EnvStageOperator(
            task_id=STAGE,
            spec="train.yaml",
            dag=dag,
            poll_interval=air.setup.poll_s,
            **air.setup.arguments,
        )
        task = stage
        if now.task_id == SENSOR:
            task = ScalingSensor(task_id=SENSOR, stage=stage, check_interval=air.setup.check_s, dag=dag)
        task._cached_logger = Log(air.world)
        return task

    def _context(self, operator: Any, now: Try) -> dict[str, Any]:
        return {
            "task_state_store": TaskState(self.airflow, now.id),
            "ti": now,
            "dag": operator.dag,
            "dag_run": SimpleNamespace(team_name=None),
            "params": dict(self.airflow.params),
        }
