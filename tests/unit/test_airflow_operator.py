"""The operator's slices against a scripted backend: no Airflow services, no process, no sleep."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.sdk._shared.secrets_masker import reset_secrets_masker
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, ExecutorSafeguard, TriggerFailureReason
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
)
from airflow.sdk.log import mask_secret

from envscaler_airflow import EnvStageOperator, spec_params
from envscaler_airflow.backends.base import Handle
from envscaler_airflow.backends.kubernetes import KubernetesBackend
from envscaler_airflow.build.registry import SpecRegistry
from envscaler_airflow.controller.stage import Stage
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.hooks.compute import open_backend
from envscaler_airflow.lifecycle import Actor
from envscaler_airflow.operators import asked, slices
from envscaler_airflow.operators.asked import chosen_parameters
from envscaler_airflow.operators.links import RunStoreLink, store_page
from envscaler_airflow.operators.stage import deadline_of, spec_path
from envscaler_airflow.protocol import Ended, Status, log_name, status_name
from envscaler_airflow.store import EventLog, check_store, open_store, read_lease
from envscaler_airflow.testing import ScriptedBackend

SPEC = """\
version: v1
name: train
parameters: {rate: {type: number, default: 0.1}, note: {type: string, default: ""}}
resources: {requests: {cpu: 1, memory: 1Gi}}
env: [{name: NOTE, value: "{{ parameters.note }}"}]
entrypoint: [python, train.py, "--rate={{ parameters.rate }}"]
outputs: {model: /output/model}
"""
PREFIX = "unit/dag/run/train/-1"


class Ti:
    """As much of a task instance as a slice uses."""

    def __init__(self, number=1, max_tries=3):
        """Try *number*."""
        self.id, self.try_number, self.max_tries = f"ti-{number}", number, max_tries
        self.dag_id, self.run_id, self.task_id, self.map_index = "dag", "run", "train", -1
        self.start_date = datetime.now(UTC)
        self.pushed = {}

    def xcom_push(self, key, value):
        """Keep it."""
        self.pushed[key] = value

    def xcom_pull(self, key, **_):
        """What was pushed."""
        return self.pushed.get(key)


class World:
    """A stage's operator with its store and machines."""

    def __init__(self, tmp_path):
        """Nothing begun."""
        (tmp_path / "train.yaml").write_text(SPEC)
        self.dag_file = tmp_path / "dag.py"
        self.store = open_store(f"file://{tmp_path}/store")
        check_store(self.store)
        self.backend = ScriptedBackend(ends_on_stop=False)
        self.log = EventLog(self.store, PREFIX)
        self.params = {}

    def operator(self, *, spec="train.yaml", **more):
        """The operator of the stage, in a DAG of this folder."""
        dag = DAG("dag", schedule=None)
        dag.fileloc = str(self.dag_file)
        return EnvStageOperator(task_id="train", spec=spec, dag=dag, **more)

    def context(self, operator, ti):
        """What a worker hands to a slice."""
        return {
            "ti": ti,
            "dag": operator.dag,
            "dag_run": SimpleNamespace(team_name=None),
            "params": self.params,
        }

    def execute(self, operator, ti=None):
        """First slice; returns the deferral."""
        return self.deferral(lambda: operator.execute(self.context(operator, ti or Ti())))

    def resume(self, operator, ti, kind="status"):
        """A later slice."""
        return operator.resume(self.context(operator, ti), {"kind": kind})

    @staticmethod
    def deferral(call):
        """What *call* deferred for."""
        with pytest.raises(TaskDeferred) as caught:
            call()
        return caught.value

    @property
    def handle(self):
        """Of the live attempt."""
        return Handle.from_dict(self.log.load().live.handle)

    def end(self, *, reason="succeeded", exit_code=0, lines=(), outputs=None):
        """Let the live attempt end."""
        live = self.log.load().live
        ended = Ended(exit_code=exit_code, reason=reason, last_lines=tuple(lines))
        status = Status(
            generation=live.generation,
            attempt=live.number,
            sequence=9,
            phase="ended",
            ended=ended,
            outputs=outputs or {},
        )
        self.store.write(f"{PREFIX}/{status_name(live.generation, live.number, 0)}", status.to_json())
        self.backend.end(self.handle, exit_code=exit_code, reason=reason)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Settings of a deployment, and operators that may be run outside a task."""
    made = World(tmp_path)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "unit")
    monkeypatch.setattr(slices, "open_backend", lambda _name: made.backend)
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    yield made
    reset_secrets_masker()


def test_the_run_is_told_when_its_dag_run_began_and_how_often_it_was_cleared(world):
    """By both a DAG run that was deleted and made again is known: begun at second 5, after two clears."""
    operator, ti = world.operator(), Ti()
    context = world.context(operator, ti)
    context["dag_run"].start_date = datetime.fromtimestamp(5, UTC)
    context["dag_run"].clear_number = 2

    world.deferral(lambda: operator.execute(context))

    assert world.log.load().owner == Actor("ti-1", 1, 3, run_started_at=5.0, clears=2)


def test_nothing_is_read_while_the_dag_file_is_parsed():
    """No spec, no store: a DAG file with an operator costs its arguments."""
    operator = EnvStageOperator(task_id="train", spec="no/such/file.yaml", deadline="nonsense")

    assert operator.retries == 3
    assert operator.retry_delay == timedelta(minutes=1)
    assert operator.template_ext == ()
    assert {"spec", "parameters", "inputs"} <= set(operator.template_fields)


def test_the_log_says_where_the_attempt_runs(world, capsys):
    """Machine, price and the name to look for there; on a cluster with its namespace."""
    world.execute(world.operator())

    handle = {"name": "train-1", "details": {"namespace": "ml"}}
    attempt = replace(world.log.load().live, handle=handle)
    assert (
        f"attempt 1 on scripted/cpu-1/on-demand ($0.0500/h) is {world.handle.name}" in capsys.readouterr().out
    )
    assert slices._whereabouts(attempt).endswith(" is ml/train-1")


def test_a_stage_on_a_cluster_runs_in_an_image_that_has_its_packages(world, tmp_path):
    """Named by the deployment's repository; refused before anything is asked of the cluster without one."""
    (tmp_path / "requirements.txt").write_text("numpy==2.1.0\n")
    (tmp_path / "train.yaml").write_text(
        SPEC + "runtimes: [{type: python, requirements: requirements.txt}]\n"
    )
    operator = world.operator(compute="kubernetes")
    context = world.context(operator, Ti())

    made = asked.stage_of(
        operator,
        context,
        begun=None,
        backend=KubernetesBackend(image_repository="registry.example.com/team"),
    )

    assert made.spec.base.image.startswith("registry.example.com/team/train:env-")
    with pytest.raises(SpecError, match="no image to run"):
        asked.stage_of(operator, context, begun=None, backend=KubernetesBackend())


def test_has_fewer_than_fifteen_arguments_of_its_own():
    """What is BaseOperator's is not counted."""
    import inspect

    names = set(inspect.signature(EnvStageOperator.__init__.__wrapped__).parameters)

    assert len(names - {"self", "kwargs", "retries", "retry_delay"}) < 15


def test_execute_starts_an_attempt_and_defers(world):
    """The trigger is told what to watch and who owns it."""
    deferral = world.execute(world.operator())

    path, arguments = deferral.trigger.serialize()
    assert path == "envscaler_airflow.triggers.stage.StageTrigger"
    assert (arguments["prefix"], arguments["ti_id"]) == (PREFIX, "ti-1")
    assert arguments["watching"]["attempt"] == 1
    assert deferral.method_name == "resume"
    assert deferral.timeout is None
    assert len(world.backend.live) == 1


def test_success_pushes_each_output_and_returns_the_report(world):
    """``train.output["model"]`` is the output's URI."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.end(outputs={"model": "file:///model"})

    result = world.resume(operator, ti)

    where = world.store.uri(f"{PREFIX}/outputs/g1/model")
    assert ti.pushed == {"model": where}
    assert result["outputs"] == {"model": where}
    assert result["report"]


def test_failure_is_never_retried_and_tells_the_last_lines(world):
    """Airflow's retries are for crashes of Airflow; the run's own retries are over."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.end(reason="failed", exit_code=3, lines=["no such file: data.csv"])

    with pytest.raises(AirflowFailException, match="exit code 3") as caught:
        world.resume(operator, ti)

    assert "no such file: data.csv" in str(caught.value)


def test_an_error_of_the_store_is_retried_by_airflow(world, monkeypatch):
    """The next try finds the run again; training goes on meanwhile."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    monkeypatch.setattr(EventLog, "load", lambda _self: (_ for _ in ()).throw(StoreError("503")))

    with pytest.raises(AirflowException, match="503") as caught:
        world.resume(operator, ti)

    assert not isinstance(caught.value, AirflowFailException)


def test_a_slice_of_an_old_try_does_nothing(world):
    """A new try owns the run: the old one ends without a retry, and touches nothing."""
    operator, old = world.operator(), Ti(1)
    world.execute(operator, old)
    world.execute(operator, Ti(2))
    before = world.log.load().number

    with pytest.raises(AirflowFailException, match="owned by ti-2"):
        world.resume(operator, old)

    assert world.log.load().number == before


def test_a_changed_spec_file_does_not_disturb_a_resumed_slice(world):
    """A generation runs on its frozen spec; a DAG file broken meanwhile counts from the next clear."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    (world.dag_file.parent / "train.yaml").write_text("this is: [no spec")

    deferral = world.deferral(lambda: world.resume(operator, ti, kind="request"))

    assert deferral.method_name == "resume"


def test_the_log_of_the_ended_attempt_is_shown_to_its_end(world, capsys):
    """What came after the trigger's last look is in the slice's log, once."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.store.write(f"{PREFIX}/{log_name(1, 1, 0, 1)}", b"step 1\nstep 2\n")
    world.end(outputs={"model": "file:///model"})

    world.resume(operator, ti)

    assert capsys.readouterr().out.count("step 2") == 1
    assert read_lease(world.store, PREFIX).log_cursor == {"0": [2, 0]}


def test_on_kill_stops_nothing(world):
    """A SIGTERM does not say who sent it."""
    operator = world.operator()
    world.execute(operator)

    operator.on_kill()

    assert len(world.backend.live) == 1
    assert world.log.read()[-1].type == "attempt-started"


def test_execution_timeout_covers_deferred_time(world):
    """What is left of it is the deferral's timeout; when it is over the attempt is asked to go."""
    operator, ti = world.operator(execution_timeout=timedelta(seconds=100)), Ti()
    ti.start_date -= timedelta(seconds=40)
    deferral = world.execute(operator, ti)

    assert timedelta(seconds=58) < deferral.timeout <= timedelta(seconds=60)
    with pytest.raises(TaskDeferralTimeout):
        operator.resume_execution(
            TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, world.context(operator, ti)
        )
    assert world.log.load().live.stop_why == "timeout"


def test_a_failed_trigger_is_replaced_three_times(world):
    """A triggerer upgrade must not end a training; one that never works must not loop for ever."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    failure = {"error": TriggerFailureReason.TRIGGER_FAILURE, "traceback": ["Boom\n"]}

    def resume():
        return operator.resume_execution(TRIGGER_FAIL_REPR, dict(failure), world.context(operator, ti))

    for _ in range(3):
        assert world.deferral(resume).method_name == "resume"
    with pytest.raises(TaskDeferralError):
        resume()
    assert len(world.backend.live) == 1


def test_parameters_come_from_the_form_and_then_from_the_operator(world):
    """Only names that the spec knows are taken from DAG params."""
    world.params = {"rate": 0.5, "other": 1, "note": None}

    world.execute(world.operator(parameters={"note": "mine"}))

    spec = world.store.read(f"{PREFIX}/spec.yaml").decode()
    assert '"rate": 0.5' in spec
    assert '"note": "mine"' in spec
    assert chosen_parameters({"a": {}, "b": {}}, {"a": 1, "b": 2, "c": 3}, {"b": 9}) == {"a": 1, "b": 9}


@pytest.mark.parametrize("field", ["parameters", "inputs"])
def test_what_airflow_masks_is_refused_in_any_field(world, field):
    """The masker would hide it in the log; the store and the machine would not."""
    mask_secret("hunter2-hunter2")

    with pytest.raises(AirflowFailException, match="note: holds a secret") as caught:
        world.execute(world.operator(**{field: {"note": "is hunter2-hunter2"}}))

    assert "hunter2" not in str(caught.value)
    assert world.log.read() == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://bucket/hunter2-hunter2/g1", "restore_from: holds a secret"),
        ("s3://key:hunter3-hunter3@bucket/g1", "restore_from: credentials in a URL end up in logs"),
    ],
)
def test_a_checkpoint_to_begin_from_holds_no_secret(world, uri, words):
    """It stands in the run's events and in what its machines read."""
    mask_secret("hunter2-hunter2")

    with pytest.raises(AirflowFailException, match=words) as caught:
        world.execute(world.operator(restore_from=uri))

    assert "hunter" not in str(caught.value)
    assert world.log.read() == []


def test_what_airflow_masks_is_refused_in_the_spec_file_too(world):
    """A template may have put it there, or the author."""
    mask_secret("hunter2-hunter2")
    text = SPEC.replace("train.py", "train-hunter2-hunter2.py")
    (world.dag_file.parent / "train.yaml").write_text(text)

    with pytest.raises(AirflowFailException, match=r"entrypoint\[1\]: holds a secret") as caught:
        world.execute(world.operator())

    assert "hunter2" not in str(caught.value)


def test_a_masked_value_of_the_wrong_type_is_not_repeated(world):
    """The loader's message would name it."""
    mask_secret("hunter2-hunter2")

    with pytest.raises(AirflowFailException) as caught:
        world.execute(world.operator(parameters={"rate": "hunter2-hunter2"}))

    assert "hunter2" not in str(caught.value)


def test_an_input_that_is_no_uri_is_refused(world):
    """The upstream stage was skipped or pushed nothing."""
    with pytest.raises(AirflowFailException, match=r"inputs\['data'\]: got None"):
        world.execute(world.operator(inputs={"data": None}))


def test_an_input_that_is_gone_ends_no_stage_that_runs(world):
    """Its upstream was cleared meanwhile: what runs goes by what was frozen."""
    operator, ti = world.operator(inputs={"data": "file:///tmp"}), Ti()
    world.execute(operator, ti)
    operator.inputs = {"data": None}

    world.deferral(lambda: world.resume(operator, ti))


def test_a_spec_that_is_wrong_is_never_retried(world):
    """Nor is anything begun."""
    (world.dag_file.parent / "train.yaml").write_text(SPEC + "nonsense: 1\n")

    with pytest.raises(AirflowFailException, match="nonsense"):
        world.execute(world.operator())

    assert world.log.read() == []


def test_a_missing_store_is_named(world, monkeypatch):
    """The message says what to set."""
    monkeypatch.delenv("AIRFLOW__ENVSCALER__STORE_URL")

    with pytest.raises(AirflowFailException, match="AIRFLOW__ENVSCALER__STORE_URL"):
        world.execute(world.operator())


def test_restart_by_the_form_begins_a_generation_at_a_clear(world):
    """DAG param ``restart`` is ``fresh``: not the last checkpoint but the start."""
    world.execute(world.operator(), Ti(1, max_tries=3))
    world.params = {"restart": "fresh"}

    world.deferral(lambda: world.operator().execute(world.context(world.operator(), Ti(2, max_tries=5))))

    assert world.log.load().generation == 2


def test_a_parameter_named_restart_is_the_specs_own(world):
    """What the training calls so begins no generation: its checkpoints would be passed over."""
    path = world.dag_file.parent / "train.yaml"
    path.write_text(SPEC.replace("{rate:", "{restart: {type: string, default: fresh}, rate:"))
    world.params = {"restart": "fresh"}
    world.execute(world.operator(), Ti(1, max_tries=3))

    world.execute(world.operator(), Ti(2, max_tries=5))

    assert world.log.load().generation == 1
    with pytest.raises(SpecError, match=r"parameter 'restart' .* rename it, or leave out restart=True"):
        spec_params(str(path), restart=True)


@pytest.mark.parametrize(
    ("given", "seconds", "point"),
    [
        (None, None, None),
        ("", None, None),
        ("4h", 14400.0, None),
        ("90m", 5400.0, None),
        ("1970-01-01T00:10:00+00:00", None, 600.0),
        ("1970-01-01T00:10:00", None, 600.0),
        (datetime(1970, 1, 1, 1, 10, tzinfo=UTC), None, 4200.0),
    ],
)
def test_a_deadline_is_a_duration_or_a_point_in_time(given, seconds, point):
    """A point without a zone is UTC, as Airflow's own."""
    assert deadline_of(given) == (seconds, point)


@pytest.mark.parametrize("again", ["resume", "retry"])
def test_a_point_in_time_stays_where_it_is(world, monkeypatch, again):
    """Every later slice, a retry's first one too, counts from the start of the generation."""
    seen = []
    real = Stage.since
    monkeypatch.setattr(
        Stage, "since", lambda self, at: seen.append(real(self, at).deadline_s) or real(self, at)
    )
    deadline = datetime.now(UTC) + timedelta(hours=1)
    operator, ti = world.operator(deadline=deadline), Ti()
    world.execute(operator, ti)
    recorded, begun = world.log.load().begun["deadline_s"], world.log.load().begun_at
    del seen[:]

    if again == "resume":
        world.deferral(lambda: world.resume(operator, ti))
    else:
        world.execute(operator, Ti(2))

    assert recorded == pytest.approx(3600, abs=5)
    assert seen == [pytest.approx(deadline.timestamp() - begun, abs=1e-6)]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"strategy": "fastest"}, "strategy: 'fastest' must be one of"),
        ({"strategy": "None"}, "strategy: 'None' must be one of"),
        ({"restart": "Fresh"}, "restart: 'Fresh' must be one of resume, fresh"),
    ],
)
def test_a_word_that_is_not_known_is_told_and_nothing_begins(world, argument, words):
    """Never retried; and a run that was to begin afresh does not go on instead."""
    with pytest.raises(AirflowFailException, match=words):
        world.execute(world.operator(**argument), Ti())

    assert world.log.load().number == 0


@pytest.mark.parametrize("given", ["tomorrow", timedelta(hours=4), 14400, ["4h"]])
def test_a_deadline_that_is_neither_is_told(given):
    """With both forms; whatever a template, a form or an upstream task made of it."""
    with pytest.raises(SpecError, match="write '4h' or"):
        deadline_of(given)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"deadline": "soon"}, "deadline: 'soon': write '4h' or .* goes on with deadline_s=14400"),
        ({"deadline": timedelta(hours=1)}, "deadline: .* goes on with deadline_s=14400"),
        ({"budget_usd": "lots"}, "budget_usd: 'lots' .* goes on with budget_usd=25"),
        ({"budget_usd": [5]}, "budget_usd: .* goes on with budget_usd=25"),
        ({"strategy": "fastest"}, "strategy: 'fastest' .* goes on with strategy=cost"),
        ({"value_of_hour": "much"}, "value_of_hour: 'much' .* goes on without value_of_hour"),
        ({"parameters": "None"}, None),
        ({"spec": None}, None),
    ],
)
def test_an_argument_edited_into_nonsense_ends_no_stage_that_runs(
    world, monkeypatch, capsys, argument, words
):
    """It keeps what it was begun with, and its log says so; the DAG file counts from the next entry."""
    seen = []
    real = Stage.since
    monkeypatch.setattr(Stage, "since", lambda self, at: seen.append(self) or real(self, at))
    operator, ti = world.operator(deadline="4h", budget_usd=25, strategy="cost"), Ti()
    world.execute(operator, ti)
    for name, value in argument.items():
        setattr(operator, name, value)

    world.deferral(lambda: world.resume(operator, ti))

    stage = seen[-1]
    assert (stage.deadline_s, stage.budget_usd, stage.strategy) == (14400.0, 25.0, "cost")
    assert words is None or re.search(words, capsys.readouterr().out)
    assert len(world.backend.live) == 1


def test_compute_and_store_edited_meanwhile_move_no_run(world, monkeypatch, capsys):
    """Elsewhere nobody knows the run: its task would fail, or a second attempt begin, while it trains."""
    opened = []
    monkeypatch.setattr(slices, "open_backend", lambda name: opened.append(name) or world.backend)
    operator, ti = world.operator(compute="kubernetes", kubernetes_conn_id="eu"), Ti()
    deferral = world.execute(operator, ti)
    trigger = deferral.trigger.serialize()[1]
    place = {name: trigger[name] for name in ("compute", "store_url", "store_conn_id")}
    edited = world.operator(compute="local", store_url=f"file://{world.dag_file.parent}/other")

    again = world.deferral(
        lambda: edited.resume(world.context(edited, ti), {"kind": "status", "place": place})
    )

    assert set(opened) == {"kubernetes:eu"}
    assert again.trigger.serialize()[1]["store_url"] == trigger["store_url"]
    assert again.trigger.serialize()[1]["compute"] == "kubernetes:eu"
    assert "it stays with" in capsys.readouterr().out


def test_a_stage_whose_file_nobody_edited_says_nothing_of_it(world, capsys):
    """The usual case, after a trigger of this version and of one before."""
    operator, ti = world.operator(kubernetes_conn_id="eu"), Ti()
    deferral = world.execute(operator, ti)
    arguments = deferral.trigger.serialize()[1]
    place = {name: arguments[name] for name in ("compute", "store_url", "store_conn_id")}

    for event in ({"kind": "status", "place": place}, {"kind": "status"}):
        world.deferral(lambda event=event: operator.resume(world.context(operator, ti), event))

    assert "it stays with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"spec": None}, "spec: got None, expected text"),
        ({"spec": Path("train.yaml")}, "spec: got PosixPath.*, expected text"),
        ({"parameters": "None"}, "parameters: got 'None', expected names with their values"),
        ({"inputs": ["file:///a"]}, "inputs: got .*, expected names with their values"),
        ({"restore_from": 5}, "restore_from: got 5, expected the URI"),
        ({"store_url": Path("/mnt/store")}, "store_url: got .*, expected text"),
        ({"deadline": timedelta(hours=4)}, "deadline: .*: write '4h'"),
        ({"budget_usd": {}}, "budget_usd: {} is no number of USD"),
    ],
)
def test_an_argument_of_another_type_is_told_and_nothing_begins(world, argument, words):
    """As templates, forms and mapped values make them: never retried, in words."""
    operator = world.operator(**{"spec": "train.yaml", **argument})

    with pytest.raises(AirflowFailException, match=words):
        world.execute(operator, Ti())

    assert world.log.load().number == 0


@pytest.mark.parametrize("value", [None, "5", timedelta(seconds=5), 0, -1, float("nan"), float("inf"), True])
def test_a_pause_that_is_none_is_told_and_kept_from_a_trigger(world, capsys, value):
    """Its trigger would fail, while the training that nobody looks at runs, or look without a pause."""
    with pytest.raises(AirflowFailException, match=r"poll_interval: got .*, expected seconds above 0"):
        world.execute(world.operator(poll_interval=value))
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    operator.poll_interval = value

    deferral = world.deferral(lambda: world.resume(operator, ti))

    assert deferral.trigger.serialize()[1]["poll_s"] == 5.0
    assert "the stage goes on with 5 s" in capsys.readouterr().out


def test_the_form_knows_parameters_of_the_registry(world, monkeypatch):
    """What a spec extends is found where the operator finds it, also by a reference to the whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.dag_file.parent / "cache"))
    registry = SpecRegistry(lambda: world.store)
    registry.publish("team/base", "1.0.0", SPEC)
    path = world.dag_file.parent / "train.yaml"
    path.write_text("version: v1\nname: train\nextends: registry://team/base@1.0.0\n")

    assert spec_params(str(path))["rate"].value == 0.1
    assert spec_params("registry://team/base@1.0.0")["rate"].value == 0.1


def test_a_quantity_without_a_unit_is_a_field_of_text(world):
    """As the form and the schema of the others have it; a schedule with it is allowed."""
    path = world.dag_file.parent / "train.yaml"
    path.write_text(SPEC.replace("{rate:", "{cores: {type: quantity, default: 4}, rate:"))

    dag = DAG("dag", schedule="@daily", params=spec_params(str(path)))

    assert dag.params.validate()["cores"] == "4"


@pytest.mark.parametrize(("deadline", "times"), [(None, 1), ("", 1), ("4h", 0)])
def test_strategy_deadline_without_a_deadline_is_told(world, capsys, deadline, times):
    """Once, where the stage begins: nothing is kept, and an hour is worth nothing."""
    operator, ti = world.operator(strategy="deadline", deadline=deadline), Ti()
    world.execute(operator, ti)
    world.deferral(lambda: world.resume(operator, ti))

    assert capsys.readouterr().out.count("strategy 'deadline' is 'cost' here") == times


def test_a_backend_of_another_type_is_told():
    """A mapped value may be None."""
    with pytest.raises(SpecError, match="compute: got None, expected the name of a backend"):
        open_backend(None)


def test_an_empty_checkpoint_to_begin_from_is_none(world):
    """What an empty field of the trigger form renders to; a machine would look for it, and fail."""
    world.execute(world.operator(restore_from=""))

    assert "restore_from" not in world.log.load().begun


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "lots"])
def test_money_that_makes_no_sense_is_refused(value):
    """It would make every comparison lie."""
    with pytest.raises(SpecError, match="budget_usd"):
        asked._usd("budget_usd", value)


def test_a_spec_is_relative_to_the_dag_file():
    """A registry reference and an absolute path stay as they are."""
    assert spec_path("envs/a.yaml", "/dags/one/dag.py") == "/dags/one/envs/a.yaml"
    assert spec_path("/envs/a.yaml", "/dags/one/dag.py") == "/envs/a.yaml"
    assert spec_path("registry://team/a@1", "/dags/one/dag.py") == "registry://team/a@1"


def test_the_link_leads_to_the_runs_folder(world):
    """To the console for S3, to the folder itself otherwise; to nothing before it is known."""
    operator = world.operator()
    link = RunStoreLink()
    assert link.get_link(operator, ti_key=None) == ""

    world.execute(operator)

    assert link.get_link(operator, ti_key=None) == world.store.uri(PREFIX)
    assert store_page("s3://b/a b/c").startswith(
        "https://s3.console.aws.amazon.com/s3/buckets/b?prefix=a%20b/c/"
    )
