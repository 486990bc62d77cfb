"""Executions of the operator against a scripted backend: no Airflow services, no process, no sleep."""

from __future__ import annotations

import shutil
from datetime import timedelta

import pytest
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    TaskDeferralError,
    TaskDeferralTimeout,
)
from airflow.sdk.log import mask_secret
from fakes.operator_world import PREFIX, SPEC, Ti, operator_world

from envscaler_agent.protocol import log_name
from envscaler_airflow import EnvStageOperator, spec_params
from envscaler_airflow.backends.kubernetes.kubernetes_backend import KubernetesBackend
from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.operators import arguments as asked
from envscaler_airflow.operators.arguments import chosen_parameters, spec_path
from envscaler_airflow.operators.stage import RunStoreLink, store_page
from envscaler_airflow.store import EventLog, open_store
from envscaler_airflow.store.logs import read_task_log
from envscaler_airflow.store.run import Run


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stage's operator with its store and machines."""
    with operator_world(tmp_path, monkeypatch) as made:
        yield made


def test_nothing_is_read_while_the_dag_file_is_parsed():
    """No spec, no store: parsing a DAG file with an operator only checks its arguments (feature E8)."""
    operator = EnvStageOperator(task_id="train", spec="no/such/file.yaml", deadline="nonsense")

    assert operator.retries == 3
    assert operator.retry_delay == timedelta(minutes=1)
    assert operator.template_ext == ()
    assert {"spec", "parameters", "inputs"} <= set(operator.template_fields)


def test_the_log_says_where_the_attempt_runs(world, capsys):
    """Machine, price and the name to search for there; on a cluster also its namespace."""
    world.execute(world.operator())

    log = capsys.readouterr().out
    assert "attempt 1 on scripted/cpu-1/on-demand ($0.0500/h): first attempt of the generation" in log
    assert f"attempt 1 runs as {world.handle.name}" in log


def test_a_stage_on_a_cluster_runs_in_an_image_that_has_its_packages(world, tmp_path):
    """Named by the deployment's repository; without one, refused before any request to the cluster."""
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
    with pytest.raises(SpecError, match="needs an image"):
        asked.stage_of(operator, context, begun=None, backend=KubernetesBackend())


def test_has_fewer_than_fifteen_arguments_of_its_own():
    """Arguments of BaseOperator are not counted."""
    import inspect

    names = set(inspect.signature(EnvStageOperator.__init__.__wrapped__).parameters)

    assert len(names - {"self", "kwargs", "retries", "retry_delay"}) < 15


def test_execute_starts_an_attempt_and_defers(world):
    """The trigger gets what to watch and who owns it."""
    deferral = world.execute(world.operator())

    path, arguments = deferral.trigger.serialize()
    assert path == "envscaler_airflow.triggers.stage_trigger.StageTrigger"
    assert (arguments["prefix"], arguments["ti_id"]) == (PREFIX, "ti-1")
    assert (arguments["watching"]["attempt"], arguments["watching"]["try_number"]) == (1, 1)
    assert deferral.method_name == "resume"
    assert deferral.timeout is None
    assert len(world.backend.live) == 1


def test_an_execution_opens_the_event_log_once(world, monkeypatch):
    """The owner, the task's log and the stage's terms share it: none reads the events again (F1)."""
    opened, init = [], EventLog.__init__

    def counted(self, run, **options):
        opened.append(run.prefix)
        init(self, run, **options)

    monkeypatch.setattr(EventLog, "__init__", counted)
    operator = world.operator()
    world.execute(operator)
    assert opened == [PREFIX]

    world.deferral(lambda: world.resume(operator, Ti()))
    assert opened == [PREFIX] * 2


def test_success_pushes_each_output_and_returns_the_report(world):
    """``train.output["model"]`` is the output's URI (feature E9)."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.end(outputs={"model": "file:///model"})

    result = world.resume(operator, ti)

    where = world.store.uri(f"{PREFIX}/outputs/g1-a1-c1/model")
    assert ti.pushed == {"model": where}
    assert result["outputs"] == {"model": where}
    assert result["report"]


def test_failure_is_never_retried_and_tells_the_last_lines(world):
    """Airflow's retries are for crashes of Airflow; the run has used up its own retries."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.end(reason="failed", exit_code=3, lines=["no such file: data.csv"])

    with pytest.raises(AirflowFailException, match="exit code 3") as caught:
        world.resume(operator, ti)

    assert "no such file: data.csv" in str(caught.value)


def test_an_error_of_the_store_is_retried_by_airflow(world, monkeypatch):
    """The next try finds the run again; training continues meanwhile."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    monkeypatch.setattr(EventLog, "load", lambda _self: (_ for _ in ()).throw(StoreError("503")))

    with pytest.raises(AirflowException, match="503") as caught:
        world.resume(operator, ti)

    assert not isinstance(caught.value, AirflowFailException)


def test_a_execution_of_an_old_try_does_nothing(world):
    """A new try owns the run: the old one ends without a retry, and changes nothing."""
    operator, old = world.operator(), Ti(1)
    world.execute(operator, old)
    world.execute(operator, Ti(2))
    before = world.log.load().number

    with pytest.raises(AirflowFailException, match="owned by ti-2"):
        world.resume(operator, old)

    assert world.log.load().number == before


def test_a_changed_spec_file_does_not_disturb_a_resumed_execution(world):
    """A generation runs on its frozen spec; a DAG file broken meanwhile counts from the next clear."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    (world.dag_file.parent / "train.yaml").write_text("this is: [no spec")

    deferral = world.deferral(lambda: world.resume(operator, ti, kind="request"))

    assert deferral.method_name == "resume"


def test_the_log_of_the_ended_attempt_is_shown_to_its_end(world, capsys):
    """Output after the trigger's last check is in the execution's log, once."""
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    world.store.write(f"{PREFIX}/{log_name(1, 1, 0, 1)}", b"step 1\nstep 2\n")
    world.end(outputs={"model": "file:///model"})

    world.resume(operator, ti)

    assert capsys.readouterr().out.count("step 2") == 1
    assert read_task_log(Run(world.store, PREFIX)).kept == {"g1-a1-n0": (2, 0)}


def test_on_kill_stops_nothing(world):
    """A SIGTERM does not name its sender."""
    operator = world.operator()
    world.execute(operator)

    operator.on_kill()

    assert len(world.backend.live) == 1
    assert world.log.read()[-1].type == "attempt-started"


def test_execution_timeout_covers_deferred_time(world):
    """The rest of it is the deferral's timeout; when it expires the owner asks the attempt to stop."""
    operator, ti = world.operator(execution_timeout=timedelta(seconds=100)), Ti()
    ti.start_date -= timedelta(seconds=40)
    deferral = world.execute(operator, ti)

    assert timedelta(seconds=58) < deferral.timeout <= timedelta(seconds=60)
    with pytest.raises(TaskDeferralTimeout):
        operator.resume_execution(
            TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, world.context(operator, ti)
        )
    assert world.log.load().live.stop_reason == "timeout"


def test_a_failed_trigger_is_replaced_three_times(world):
    """A triggerer upgrade must not end a training; a trigger that never works must not loop for ever."""
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
    """DAG params count only if the spec knows their names (feature A3)."""
    world.params = {"rate": 0.5, "other": 1, "note": None}

    world.execute(world.operator(parameters={"note": "mine"}))

    [name] = [name for name in world.files() if name.startswith(f"{PREFIX}/spec-")]
    spec = world.store.read(name).decode()
    assert '"rate": 0.5' in spec
    assert '"note": "mine"' in spec
    assert chosen_parameters({"a": {}, "b": {}}, {"a": 1, "b": 2, "c": 3}, {"b": 9}) == {"a": 1, "b": 9}


@pytest.mark.parametrize("field", ["parameters", "inputs"])
def test_what_airflow_masks_is_refused_in_any_field(world, field):
    """The masker would hide it in the log; the store and the machine would not."""
    mask_secret("hunter2-hunter2")

    with pytest.raises(AirflowFailException, match="note: contains a secret") as caught:
        world.execute(world.operator(**{field: {"note": "is hunter2-hunter2"}}))

    assert "hunter2" not in str(caught.value)
    assert world.log.read() == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://bucket/hunter2-hunter2/g1", "restore_from: contains a secret"),
        ("s3://key:hunter3-hunter3@bucket/g1", "restore_from: credentials in a URL end up in logs"),
    ],
)
def test_a_checkpoint_to_begin_from_holds_no_secret(world, uri, words):
    """Its URI is in the run's events and in what its machines read."""
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

    with pytest.raises(AirflowFailException, match=r"entrypoint\[1\]: contains a secret") as caught:
        world.execute(world.operator())

    assert "hunter2" not in str(caught.value)


def test_a_secret_that_the_stage_reads_by_reference_is_refused_in_the_form(world, monkeypatch):
    """Airflow's masker learns it first; nothing is stored before that (B5)."""
    monkeypatch.setenv("UNIT_OWN_TOKEN", "w0rd-of-this-test")
    text = SPEC.replace("env: [", "env: [{name: OWN_TOKEN, value_from: 'env:UNIT_OWN_TOKEN'}, ")
    (world.dag_file.parent / "train.yaml").write_text(text)

    with pytest.raises(AirflowFailException, match=r"parameters.note: contains a secret") as caught:
        world.execute(world.operator(parameters={"note": "w0rd-of-this-test"}))

    assert "w0rd" not in str(caught.value)
    assert world.log.read() == []


def test_a_reference_to_what_is_no_secret_hides_nothing_of_the_spec(world, monkeypatch):
    """``REGION`` may also appear in the spec (B5)."""
    monkeypatch.setenv("UNIT_REGION", "train")
    text = SPEC.replace("env: [", "env: [{name: REGION, value_from: 'env:UNIT_REGION'}, ")
    (world.dag_file.parent / "train.yaml").write_text(text)

    world.execute(world.operator(parameters={"note": "train"}))

    assert len(world.backend.live) == 1


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
    """Its upstream was cleared meanwhile: the running stage uses its frozen inputs."""
    (world.dag_file.parent / "train.yaml").write_text(SPEC + "inputs: [data]\n")
    operator, ti = world.operator(inputs={"data": "file:///tmp"}), Ti()
    world.execute(operator, ti)
    operator.inputs = {"data": None}

    world.deferral(lambda: world.resume(operator, ti))


def test_a_spec_that_is_wrong_is_never_retried(world):
    """And nothing begins."""
    (world.dag_file.parent / "train.yaml").write_text(SPEC + "nonsense: 1\n")

    with pytest.raises(AirflowFailException, match="nonsense"):
        world.execute(world.operator())

    assert world.log.read() == []


def test_a_missing_store_is_named(world, monkeypatch):
    """The message names the setting."""
    monkeypatch.delenv("AIRFLOW__ENVSCALER__STORE_URL")

    with pytest.raises(AirflowFailException, match="AIRFLOW__ENVSCALER__STORE_URL"):
        world.execute(world.operator())


def test_restart_by_the_form_begins_a_generation_at_a_clear(world):
    """The DAG param ``restart`` is ``fresh``: the run begins from the start, not from the last checkpoint."""
    world.execute(world.operator(), Ti(1, max_tries=3))
    world.params = {"restart": "fresh"}

    world.deferral(lambda: world.operator().execute(world.context(world.operator(), Ti(2, max_tries=5))))

    assert world.log.load().generation == 2


def test_a_parameter_named_restart_is_the_specs_own(world):
    """A training's own parameter of that name begins no generation, which would skip its checkpoints."""
    path = world.dag_file.parent / "train.yaml"
    path.write_text(SPEC.replace("{rate:", "{restart: {type: string, default: fresh}, rate:"))
    world.params = {"restart": "fresh"}
    world.execute(world.operator(), Ti(1, max_tries=3))

    world.execute(world.operator(), Ti(2, max_tries=5))

    assert world.log.load().generation == 1
    with pytest.raises(SpecError, match=r"parameter 'restart' .* rename it, or leave out restart=True"):
        spec_params(str(path), restart=True)


def test_a_spec_is_relative_to_the_dag_file():
    """A registry reference and an absolute path stay unchanged."""
    assert spec_path("envs/a.yaml", "/dags/one/dag.py") == "/dags/one/envs/a.yaml"
    assert spec_path("/envs/a.yaml", "/dags/one/dag.py") == "/envs/a.yaml"
    assert spec_path("registry://team/a@1", "/dags/one/dag.py") == "registry://team/a@1"


def test_the_link_leads_to_the_runs_folder(world):
    """To the console for S3, otherwise to the folder itself; no link before it is known."""
    operator = world.operator()
    link = RunStoreLink()
    assert link.get_link(operator, ti_key=None) == ""

    world.execute(operator)

    assert link.get_link(operator, ti_key=None) == world.store.uri(PREFIX)
    assert store_page("s3://b/a b/c").startswith(
        "https://s3.console.aws.amazon.com/s3/buckets/b?prefix=a%20b/c/"
    )


def test_the_first_run_of_all_makes_the_stores_folder(world, tmp_path):
    """Nothing exists yet: a store in a folder begins this way (F3)."""
    shutil.rmtree(tmp_path / "store")

    world.execute(world.operator())

    assert open_store(f"file://{tmp_path}/store").children(PREFIX)


class TestRenderedTemplates:
    """*Rendered Templates* shows the parameters that a run starts with (F14)."""

    def rendered(self, world, **arguments):
        """Return the field after Airflow has rendered it, before the first execution."""
        operator = world.operator(**arguments)
        operator.render_template_fields(world.context(operator, Ti()) | {"note": "by hand"})
        return operator.parameters

    def test_defaults_the_form_and_the_operators_own_are_one_mapping(self, world):
        """The operator's own value overrides the form's, which overrides the spec's default."""
        world.params = {"rate": 0.5, "other": 1}

        assert self.rendered(world) == {"rate": 0.5, "note": ""}
        assert self.rendered(world, parameters={"note": "{{ note }}"}) == {"rate": 0.5, "note": "by hand"}
        assert self.rendered(world, parameters={"rate": 0.7})["rate"] == 0.7

    def test_what_cannot_be_known_stays_as_it_was_given(self, world):
        """A missing spec is refused by the execution, which names the reason."""
        assert self.rendered(world, spec="absent.yaml", parameters={"rate": 1}) == {"rate": 1}
        assert self.rendered(world, spec="absent.yaml") is None

    def test_the_run_is_made_with_what_is_shown(self, world):
        """The frozen spec has the same values."""
        world.params = {"rate": 0.5}
        operator = world.operator()
        operator.render_template_fields(world.context(operator, Ti()))

        world.execute(operator)

        spec_hash = world.log.load().spec_hash
        assert Run(world.store, PREFIX).parameters(spec_hash) == operator.parameters
