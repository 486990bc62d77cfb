"""The sensor that moves a running stage to another machine when that saves money or time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, get_parsing_context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
)

from envscaler_airflow.errors import EnvScalerError, NoOfferError, ProtocolError, SpecError

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

    from envscaler_airflow.hooks.settings import StorePlace


class ScalingSensor(BaseSensorOperator):
    """Checks a stage while it trains, and asks its owner to move it; starts and stops nothing itself.

    It is deferred all the while and needs a worker slot for a moment at each request. It succeeds
    when the stage has ended, in any way, with a summary in XCom; it is skipped if the stage
    never ran. Failed checks are retried, then it is skipped (``soft_fail``); a wrong argument fails it at
    once. Under ``dag.test()``, which runs one task at a time, it checks once and succeeds.

    Args:
        stage: Task id of the stage (looked up in the sensor's own TaskGroup first), or its operator.
        check_interval: Seconds between two checks.
        compute: Backend of the stage, if its operator does not show it; ``kubernetes:ID`` for
            that of a connection.
        timeout: Seconds from the first start of this task; by default an hour more than the stage's
            deadline, else no limit.
        store_url, store_conn_id: As the stage has them, if its operator does not show them.
        prometheus_conn_id: Connection of the Prometheus server that answers the queries of rules; by default
            ``[envscaler] prometheus_url``.
    """

    template_fields: Sequence[str] = ("stage", "compute", "store_url", "store_conn_id", "prometheus_conn_id")
    ui_color = "#f3efe0"

    def __init__(  # noqa: PLR0913  (what DAG authors set, each by name)
        self,
        *,
        stage: str | BaseOperator,
        check_interval: float = 30.0,
        compute: str | None = None,
        timeout: timedelta | float | None = None,
        store_url: str | None = None,
        store_conn_id: str | None = None,
        prometheus_conn_id: str | None = None,
        soft_fail: bool = True,
        retries: int | None = 3,
        retry_delay: timedelta | float = timedelta(minutes=1),
        **kwargs: Any,
    ) -> None:
        """Keep the arguments; parsing the DAG file reads nothing else.

        Raises:
            SpecError: *stage* is neither a task id nor an operator, or *timeout* is not a time.
        """
        super().__init__(soft_fail=soft_fail, retries=retries, retry_delay=retry_delay, **kwargs)
        self.is_whole_id = not isinstance(stage, str)
        name = stage if isinstance(stage, str) else getattr(stage, "task_id", None)
        if not isinstance(name, str):
            raise SpecError(f"stage: got {stage!r:.80}, expected a task id or the stage's operator")
        self.stage = name
        self.check_interval = check_interval
        self.compute = compute
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.prometheus_conn_id = prometheus_conn_id
        try:
            self.gives_up_after_s = None if timeout is None else self._coerce_timeout(timeout).total_seconds()
        except ValueError as err:
            raise SpecError(
                f"task {self.task_id}: timeout: got {timeout!r:.40}; write seconds or timedelta(hours=4)"
            ) from err

    def prepare_template(self) -> None:
        """Refuse literals that can only be wrong, when the scheduler parses the DAG file.

        Raises:
            SpecError: *stage* names no stage of the DAG, or one that never runs beside this sensor, or the
                pause between checks is not valid.
        """
        if get_parsing_context().task_id is not None:  # a worker: an edit ends no running sensor
            return
        from envscaler_airflow.operators.arguments import is_literal, pause_s  # noqa: PLC0415  (lazy)

        if is_literal(self.stage):
            self._refuse_order(self._task().task_id)
        pause_s(f"task {self.task_id}: check_interval", self.check_interval)

    def execute(self, context: Context) -> Any:
        """Defer until the stage should move or has ended."""
        if _is_dag_test():
            return self._look_once(context)
        return self._guarded(context, None)

    def resume(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Request the move, or finish."""
        return self._guarded(context, event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume as Airflow does, but retry our own errors before ``soft_fail`` skips the task."""
        soft_fail = self.soft_fail
        self.soft_fail = soft_fail and _is_last_try(context)
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except AirflowSensorTimeout as err:
            if not soft_fail:
                raise
            raise AirflowSkipException(str(err)) from err
        finally:
            self.soft_fail = soft_fail

    def _guarded(self, context: Context, event: Mapping[str, Any] | None) -> Any:
        try:
            return self._go_on(context, event)
        except (SpecError, NoOfferError) as err:  # soft_fail is for failed checks, not for wrong arguments
            raise AirflowFailException(str(err)) from err
        except EnvScalerError as err:
            if self.soft_fail and _is_last_try(context):
                self.log.exception("the last try failed; the stage goes on without scaling")
                raise AirflowSkipException(str(err)) from err
            raise AirflowException(str(err)) from err

    def _go_on(self, context: Context, event: Mapping[str, Any] | None) -> Any:
        if event is not None:
            kind = event["kind"]
            if kind == "ended":
                return {"stage": self.stage, "runs": event["runs"]}
            if kind == "absent":
                raise AirflowSkipException(f"stage {self.stage} never ran: {', '.join(event['states'])}")
            if kind == "timeout":
                raise AirflowSensorTimeout(str(event["reason"]))
            if kind != "move":
                raise ProtocolError(f"event {kind!r} is not known to this version")
            self._ask(context, event)
        return self._defer(context, event.get("until") if event else None)

    def _look_once(self, context: Context) -> dict[str, Any]:
        """Check once for ``dag.test()``, which runs one task at a time, never a stage beside its sensor."""
        from envscaler_airflow.operators.execution import run_key  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.store import Run  # noqa: PLC0415  (as above)
        from envscaler_airflow.triggers.scaling_checks import summary  # noqa: PLC0415  (as above)

        place, task = self._place(context), self._task()
        store = place.open()
        folder = run_key(context, place.deployment(store), task_id=task.task_id).prefix.rsplit("/", 1)[0]
        states = {name: Run(store, f"{folder}/{name}").events.load() for name in store.children(folder)}
        self.log.warning(
            "dag.test() runs one task at a time, so stage %s is not checked while it trains", task.task_id
        )
        return {"stage": self.stage, "runs": {name: summary(state) for name, state in states.items()}}

    def _task(self) -> Any:
        """Return the stage's operator, found in the sensor's own TaskGroup first, unless *stage* is one."""
        dag, group = self.dag, self.task_group
        # The SDK has no types for child_id.
        own = group.child_id(self.stage) if group is not None else self.stage  # type: ignore[no-untyped-call]
        for name in (self.stage,) if self.is_whole_id else (own, self.stage):
            if name in dag.task_dict and _is_stage(dag.task_dict[name]):
                return dag.task_dict[name]
        stages = sorted(name for name, task in dag.task_dict.items() if _is_stage(task))
        raise SpecError(
            f"task {self.task_id}: stage {self.stage!r} is not a stage of DAG {dag.dag_id}; "
            f"write one of: {', '.join(stages) or '(the DAG has no EnvStageOperator)'}"
        )

    def _refuse_order(self, stage: str) -> None:
        """Refuse a sensor that cannot run beside its stage."""
        for way, result in (("before", "would wait for it for ever"), ("after", "would never check it")):
            if stage in self.get_flat_relative_ids(upstream=way == "after"):
                raise SpecError(
                    f"task {self.task_id}: it comes {way} its stage {stage!r} and {result}; let both begin "
                    f"together: what_comes_first >> [{stage}, {self.task_id}]"
                )

    def _map_index(self, context: Context, task: Any) -> int | None:
        """Return -1 for an unmapped stage, this task's own index if both are mapped alike, None for all."""
        if not task.is_mapped and next(iter(task.iter_mapped_task_groups()), None) is None:
            return -1
        index = context["ti"].map_index
        return index if index is not None and index >= 0 else None

    def _of_stage(self, name: str, context: Context) -> Any:
        """Return argument *name* as the stage itself gets it, mapped or templated; None if it has none."""
        task = self._task()
        if task.is_mapped:  # Airflow builds each index from these three
            group = task.task_group.default_args if task.task_group else {}
            places = (task.partial_kwargs, group, self.dag.default_args)
            given = next((place[name] for place in places if name in place), None)
        else:
            given = getattr(task, name, None)
        return self.render_template(given, context) if given else None

    def _store(self, context: Context) -> tuple[str | None, str | None]:
        """Return ``store_url`` and ``store_conn_id``: this sensor's own, else the stage's."""
        url = self.store_url or self._of_stage("store_url", context)
        return url, self.store_conn_id or self._of_stage("store_conn_id", context)

    def _place(self, context: Context) -> StorePlace:
        from envscaler_airflow.hooks.settings import store_place  # noqa: PLC0415  (DAG files do without)

        return store_place(*self._store(context))

    def _compute(self, context: Context) -> str:
        """Return backend and connection of the stage, in one text."""
        from envscaler_airflow.hooks.settings import compute_place  # noqa: PLC0415  (DAG files do without)

        compute = self.compute or self._of_stage("compute", context) or "local"
        return compute_place(compute, self._of_stage("conn_id", context))

    def _ask(self, context: Context, event: Mapping[str, Any]) -> None:
        """Append the request, unless one is under way or the attempt has changed since."""
        from envscaler_airflow.owner.request import request_move  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.planning import Allocation  # noqa: PLC0415  (as above)
        from envscaler_airflow.store import Run  # noqa: PLC0415  (as above)

        run = Run(self._place(context).open(), event["prefix"])
        state = run.events.load()
        live = state.live
        generation, attempt = event["from_attempt"]
        if live is None or live.phase != "started" or live.key != (generation, attempt):
            self.log.info("not asked: attempt %s.%s is not running any more", generation, attempt)
        elif state.pending:
            self.log.info("not asked: request %d has no answer yet", state.pending[0].number)
        else:
            target = Allocation.from_dict(event["target"])
            request = request_move(
                run,
                target=target,
                from_attempt=(generation, attempt),
                because={name: event[name] for name in ("reason", "numbers", "check")},
            )
            self.log.info("requested a move (event %d): %s", request.number, event["reason"])

    def _defer(self, context: Context, until: float | None = None) -> NoReturn:
        from envscaler_airflow.operators.arguments import pause_s  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.operators.execution import run_key  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.triggers.scaling_trigger import ScalingTrigger  # noqa: PLC0415  (as above)

        check_s = pause_s("check_interval", self.check_interval)
        ti, place, task = context["ti"], self._place(context), self._task()
        store = place.open()
        key = run_key(context, place.deployment(store), task_id=task.task_id)
        if until is None and self.gives_up_after_s is not None:
            until = store.now() + self.gives_up_after_s
        store_url, store_conn_id = self._store(context)
        trigger = ScalingTrigger(
            folder=key.prefix.rsplit("/", 1)[0],
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            task_id=task.task_id,
            map_index=self._map_index(context, task),
            compute=self._compute(context),
            check_s=check_s,
            until=until,
            writer=f"{self.task_id}-{ti.map_index}-{ti.try_number}".replace("/", "_"),
            store_url=store_url,
            store_conn_id=store_conn_id,
            prometheus_conn_id=self.prometheus_conn_id or None,
        )
        self.log.info("stage=%s is checked every %g s", task.task_id, check_s)
        self.defer(trigger=trigger, method_name="resume")


def _is_stage(task: Any) -> bool:
    """Return True for an EnvStageOperator or a subclass, mapped or not."""
    from envscaler_airflow.operators.stage import EnvStageOperator  # noqa: PLC0415  (lazy, as the package is)

    kind = task.operator_class if task.is_mapped else type(task)
    return isinstance(kind, type) and issubclass(kind, EnvStageOperator)


def _is_dag_test() -> bool:
    """Return True inside ``dag.test()``, whose supervisor is in this very process."""
    from airflow.sdk.execution_time import task_runner  # noqa: PLC0415  (workers have it loaded)

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return type(comms).__name__ == "InProcessSupervisorComms"


def _is_last_try(context: Context) -> bool:
    ti = context["ti"]
    return bool(ti.try_number > ti.max_tries)
