"""The operator that owns a run: each of its executions calls the owner, and nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn
from urllib.parse import quote

from airflow.sdk import BaseOperator, BaseOperatorLink, get_parsing_context
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from envscaler_airflow.errors import BudgetError, EnvScalerError, NoOfferError, RunFailedError, SpecError

if TYPE_CHECKING:
    from airflow.sdk import Context
    from jinja2 import Environment

    from envscaler_airflow.operators.execution import Execution
    from envscaler_airflow.owner.stage import Delivered, Stage, Waiting


FAILURES_KEY = "envscaler_trigger_failures"
"""XCom in which a try counts how often its trigger failed."""
MAX_TRIGGER_FAILURES = 3
"""Trigger failures that one try survives. Chosen: a deployment of a broken triggerer is noticed."""


def store_page(url: str) -> str:
    """Return a page that shows a run's folder: the AWS console for ``s3://``, else the URL itself.

    >>> store_page("s3://ml-runs/prod/retrain/r1/train/-1")
    'https://s3.console.aws.amazon.com/s3/buckets/ml-runs?prefix=prod/retrain/r1/train/-1/'
    """
    if not url.startswith("s3://"):
        return url
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return f"https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={quote(prefix)}/"


class RunStoreLink(BaseOperatorLink):
    """Links to the run's folder in the store: events, decisions, logs, checkpoints, outputs."""

    name = "Run store"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Return the page of the folder that the last execution used; empty before it knew one."""
        del ti_key
        url = getattr(operator, "run_url", None)
        return store_page(url) if url else ""


class _Connected(BaseOperator):
    """Takes the argument that only some backends need, so that a stage's own arguments fit every backend.

    A separate class instead of ``kwargs.pop``: Airflow fills in ``default_args`` and checks ``partial`` by
    signatures.
    """

    def __init__(self, *, conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id


class EnvStageOperator(_Connected):
    """Runs one stage from its spec, on the machine with the lowest expected cost, counting your time.

    The task is deferred while the stage runs. A retry, a worker that dies and a restarted triggerer
    find the same run again; a clear after success begins a new generation of it.

    Args:
        spec: Path of the spec, relative to the DAG file.
        parameters: Values that override the spec's defaults and DAG params of the same names.
        inputs: Name to URI of what earlier stages made, usually ``other.output["name"]``.
        compute: Backend: ``local``, ``kubernetes``, or one from another package.
        conn_id: Connection of the backend, for ``kubernetes`` of the cncf.kubernetes provider; if not given,
            the kubeconfig. Backends without connections ignore it.
        target: Variant of the spec; the backend's name if not given.
        strategy: ``balanced``, ``cost``, ``performance`` or ``deadline``.
        value_of_hour: USD that an hour of waiting costs; if not given, the strategy's.
        deadline: ``4h`` from the first start of the generation, or a point in time (ISO 8601 or datetime).
        budget_usd: Maximum cost of one generation, over all its attempts.
        restart: ``fresh`` begins a generation at each clear instead of continuing.
        restore_from: URI of another run's checkpoint from which a fresh generation begins.
        store_url: Run store, instead of the connection's or ``[envscaler] store_url``.
        store_conn_id: Connection of type ``envscaler_store``.
        poll_interval: Seconds between two polls of the stage while it runs.
    """

    template_fields: Sequence[str] = (
        "spec", "parameters", "inputs", "compute", "conn_id", "target", "strategy", "value_of_hour",
        "deadline", "budget_usd", "restart", "restore_from", "store_url", "store_conn_id",
    )  # fmt: skip
    template_ext: Sequence[str] = ()
    template_fields_renderers: ClassVar[dict[str, str]] = {"parameters": "json", "inputs": "json"}
    ui_color = "#e8f3ec"
    operator_extra_links = (RunStoreLink(),)

    def __init__(  # noqa: PLR0913  (what DAG authors set, each by name)
        self,
        *,
        spec: str,
        parameters: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        compute: str = "local",
        target: str | None = None,
        strategy: str = "balanced",
        value_of_hour: float | str | None = None,
        deadline: str | datetime | None = None,
        budget_usd: float | str | None = None,
        restart: Literal["resume", "fresh"] = "resume",
        restore_from: str | None = None,
        store_url: str | None = None,
        store_conn_id: str | None = None,
        poll_interval: float = 5.0,
        retries: int | None = 3,
        retry_delay: timedelta | float = timedelta(minutes=1),
        **kwargs: Any,
    ) -> None:
        """Keep the arguments; nothing is read or checked here.

        Raises:
            TypeError: An argument has an unknown name; the message suggests the likely one.
        """
        try:
            super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        except TypeError as err:  # Airflow's message names the unknown argument, but not the intended one
            from envscaler_airflow.operators.arguments import meant  # noqa: PLC0415  (lazy)

            raise TypeError(f"{err}{meant(type(self), kwargs)}") from err
        self.spec = spec
        self.parameters = parameters
        self.inputs = inputs
        self.compute = compute
        self.target = target
        self.strategy: str = strategy
        self.value_of_hour: float | str | None = value_of_hour
        self.deadline = deadline
        self.budget_usd: float | str | None = budget_usd
        self.restart = restart
        self.restore_from = restore_from
        self.store_url = store_url
        self.store_conn_id = store_conn_id
        self.poll_interval = poll_interval

    @property
    def compute_place(self) -> str:
        """Return backend and connection in one text, as triggers store it."""
        from envscaler_airflow.hooks.settings import compute_place  # noqa: PLC0415  (DAG files do without)

        return compute_place(self.compute, self.conn_id)

    def prepare_template(self) -> None:
        """Refuse literals that can only be wrong, when the scheduler parses the DAG file.

        A worker parses the file too, for a stage that may be running. There the execution decides, and keeps
        the values that the generation began with.

        Raises:
            SpecError: Names each argument, what it got and what to write.
        """
        if get_parsing_context().task_id is None:
            from envscaler_airflow.operators.arguments import check_literals  # noqa: PLC0415  (lazy)

            check_literals(self)

    run_url: str | None = None
    """Folder of the run in the store, once an execution has opened it."""

    def render_template_fields(self, context: Context, jinja_env: Environment | None = None) -> None:
        """Render, and let *Rendered Templates* show the parameters that the run is made with."""
        from envscaler_airflow.operators.arguments import shown_parameters  # noqa: PLC0415  (DAG files do without)

        super().render_template_fields(context, jinja_env)
        self.parameters = shown_parameters(self, context)

    def execute(self, context: Context) -> Any:
        """Begin, adopt or deliver the run; defer while it does not need its owner."""
        return self._advance(context, None)

    def resume(self, context: Context, event: Mapping[str, Any] | None = None) -> Any:
        """Continue after what the trigger saw, in the same place: an edit of the DAG file moves no run."""
        wake = dict(event or {"kind": "status"})
        self._stay(wake.pop("place", None) or {})
        watched = wake.pop("watched", None)
        return self._advance(context, wake, watched)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue after a deferral: ask the stage to stop at a timeout, and replace a failed trigger."""
        if next_method != TRIGGER_FAIL_REPR:
            return super().resume_execution(next_method, next_kwargs, context)
        kwargs = next_kwargs or {}
        if kwargs.get("error") == TriggerFailureReason.TRIGGER_TIMEOUT:
            self._time_out(context)
        elif self._count_trigger_failure(context) <= MAX_TRIGGER_FAILURES:
            trace = "".join(kwargs.get("traceback") or ()) or kwargs.get("error")
            self.log.error("the trigger failed; the stage goes on and is looked at again:\n%s", trace)
            return self._advance(context, {"kind": "status", "detail": "the trigger failed"})
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Stop nothing: a SIGTERM does not tell who sent it.

        A worker that shuts down must not end a training that the next try adopts. After a user's kill, the
        lease ends the attempt.
        """

    def _advance(
        self, context: Context, event: dict[str, Any] | None, watched: Mapping[str, Any] | None = None
    ) -> Any:
        from envscaler_airflow.owner.stage import (  # noqa: PLC0415  (as above)
            SupersededError,
            Waiting,
            is_transient,
        )

        execution = None
        try:
            execution = self._open(context)
            stage = self._stage(context, execution, is_entry=event is None)
            result, is_ours, goes_on = None, True, False
            try:
                result = execution.advance(stage, event)
                goes_on = isinstance(result, Waiting)
            except EnvScalerError as err:
                is_ours = not isinstance(err, SupersededError)  # which writes nothing, not even its log's end
                goes_on = is_transient(err)
                raise
            finally:
                if is_ours:
                    execution.write_log(self.log.info, goes_on=goes_on)
        except (RunFailedError, BudgetError, SpecError, NoOfferError) as err:
            raise AirflowFailException(str(err)) from err
        except EnvScalerError as err:
            self._postpone(context, err, execution, event, watched)
            self._raise(err)
        if isinstance(result, Waiting):
            self._defer(context, execution, result)
        return self._deliver(context, execution, result)

    def _postpone(
        self,
        context: Context,
        err: EnvScalerError,
        execution: Execution | None,
        event: Mapping[str, Any] | None,
        watched: Mapping[str, Any] | None,
    ) -> None:
        """Defer again if *err* may pass and an attempt may run: that uses up no retry."""
        from envscaler_airflow.operators.execution import postponed  # noqa: PLC0415  (DAG files do without)

        found = postponed(err, execution, event, watched)
        if found is None:
            return
        prefix, watching = found
        self.log.warning(
            "no answer, %d in a row: %s; uses up no retry, and is tried again in %.0f s",
            watching.faults,
            err,
            watching.pause_s,
        )
        self._watch(context, prefix, watching.to_dict())

    @staticmethod
    def _raise(err: EnvScalerError) -> NoReturn:
        from envscaler_airflow.owner.stage import StoppedError, SupersededError  # noqa: PLC0415  (lazy)

        if isinstance(err, StoppedError | SupersededError):
            raise AirflowFailException(str(err)) from err
        raise AirflowException(str(err)) from err

    def _open(self, context: Context) -> Execution:
        from envscaler_airflow.operators.execution import Execution  # noqa: PLC0415  (DAG files do without)

        execution = Execution.open(
            context, compute=self.compute_place, store_url=self.store_url, store_conn_id=self.store_conn_id
        )
        self.run_url = execution.run.url
        return execution

    def _stage(self, context: Context, execution: Execution, *, is_entry: bool) -> Stage:
        from envscaler_airflow.operators.arguments import stage_of  # noqa: PLC0415  (DAG files do without)

        return stage_of(self, context, begun=None if is_entry else execution.begun, backend=execution.backend)

    def _defer(self, context: Context, execution: Execution, waiting: Waiting) -> NoReturn:
        self.log.info("deferred: %s", waiting.reason)
        self._watch(context, execution.run.prefix, waiting.watching.to_dict())

    def _watch(self, context: Context, prefix: str, watching: Mapping[str, Any]) -> NoReturn:
        from envscaler_airflow.triggers.stage_trigger import StageTrigger  # noqa: PLC0415  (DAG files do without)

        trigger = StageTrigger(
            prefix=prefix,
            watching={**watching, "try_number": context["ti"].try_number},
            ti_id=str(context["ti"].id),
            compute=self.compute_place,
            store_url=self.store_url,
            store_conn_id=self.store_conn_id,
            poll_s=self._poll_s(),
        )
        self.defer(trigger=trigger, method_name="resume", timeout=self._time_left(context))

    def _poll_s(self) -> float:
        from envscaler_airflow.operators.arguments import pause_s  # noqa: PLC0415  (DAG files do without)
        from envscaler_airflow.triggers.stage_trigger import POLL_S  # noqa: PLC0415  (as above)

        try:
            return pause_s("poll_interval", self.poll_interval)
        except SpecError as err:  # refused at an entry; here the file was edited while the stage runs
            self.log.warning("%s; the stage goes on with %g s", err, POLL_S)
            return POLL_S

    def _stay(self, place: Mapping[str, Any]) -> None:
        """Keep the machines and the store that the run has, as recorded by the trigger before."""
        if not place:  # a trigger of an older version
            return
        kept = (place["compute"], place["store_url"], place["store_conn_id"])
        if kept != (self.compute_place, self.store_url, self.store_conn_id):
            self.log.warning("compute or store were edited since the stage began; it stays with %s", kept)
        self.compute, _, conn_id = kept[0].partition(":")
        self.conn_id = conn_id or None
        self.store_url, self.store_conn_id = kept[1:]

    def _time_left(self, context: Context) -> timedelta | None:
        """Return the rest of ``execution_timeout``, counting deferred time, which Airflow does not count.

        At least the time that a deferral has to last: see ``settle_s``.
        """
        from envscaler_airflow.triggers.stage_trigger import settle_s  # noqa: PLC0415  (DAG files do without)

        if self.execution_timeout is None:
            return None
        used = datetime.now(UTC) - context["ti"].start_date
        return max(self.execution_timeout - used, timedelta(seconds=settle_s()))

    def _time_out(self, context: Context) -> None:
        """Ask the stage to stop; without an answer defer again, until Airflow ends that deferral too."""
        execution = None
        try:
            execution = self._open(context)
            execution.time_out(
                self._stage(context, execution, is_entry=False),
                f"the task's execution_timeout of {self.execution_timeout} is over",
            )
        except EnvScalerError as err:
            self._postpone(context, err, execution, None, None)
            self._raise(err)
        execution.write_log(self.log.info, goes_on=False)

    def _count_trigger_failure(self, context: Context) -> int:
        ti = context["ti"]
        count = int(ti.xcom_pull(key=FAILURES_KEY, map_indexes=ti.map_index) or 0) + 1
        ti.xcom_push(key=FAILURES_KEY, value=count)
        return count

    def _deliver(self, context: Context, execution: Execution, delivered: Delivered) -> dict[str, Any]:
        """Deliver the result, and record it as accepted once Airflow has counted the try as a success."""
        self.on_success_callback = [
            lambda _context: self._record_acceptance(execution),
            *self.on_success_callback,
        ]
        if self.do_xcom_push:
            for name, uri in delivered.outputs.items():
                context["ti"].xcom_push(key=name, value=uri)
        return {"outputs": delivered.outputs, "report": delivered.report.to_dict()}

    def _record_acceptance(self, execution: Execution) -> None:
        try:
            why_not = execution.accept_delivery()
        except EnvScalerError as err:
            why_not = str(err)
        if why_not is not None:
            self.log.warning(
                "the delivery is not recorded as accepted (%s): a clear delivers the same result "
                "again, restart='fresh' trains from the start",
                why_not,
            )
