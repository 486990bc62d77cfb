"""The operator's arguments: valid values, and what happens when the user edits them while a stage runs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import (
    AirflowFailException,
)
from fakes.operator_world import SPEC, Ti, operator_world

from envscaler_airflow import spec_params
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks.settings import open_backend
from envscaler_airflow.images.spec_registry import SpecRegistry
from envscaler_airflow.operators import arguments as argument_values
from envscaler_airflow.operators import execution
from envscaler_airflow.operators.arguments import deadline_of
from envscaler_airflow.owner.stage import Stage


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stage's operator with its store and machines."""
    with operator_world(tmp_path, monkeypatch) as made:
        yield made


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
    """A point in time without a zone is UTC, as in Airflow."""
    assert deadline_of(given) == (seconds, point)


@pytest.mark.parametrize("again", ["resume", "retry"])
def test_a_point_in_time_stays_where_it_is(world, monkeypatch, again):
    """Every later execution, also the first one of a retry, counts from the start of the generation."""
    seen = []
    real = Stage.since
    monkeypatch.setattr(
        Stage, "since", lambda self, at: seen.append(real(self, at).deadline_s) or real(self, at)
    )
    deadline = datetime.now(UTC) + timedelta(hours=1)
    operator, ti = world.operator(deadline=deadline), Ti()
    world.execute(operator, ti)
    recorded, begun = world.log.load().begun.deadline_s, world.log.load().begun_at
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
    """Never retried, and a run that was meant to restart does not continue instead."""
    with pytest.raises(AirflowFailException, match=words):
        world.execute(world.operator(**argument), Ti())

    assert world.log.load().number == 0


@pytest.mark.parametrize("given", ["tomorrow", timedelta(hours=4), 14400, ["4h"]])
def test_a_deadline_that_is_neither_is_reported(given):
    """The message shows both forms, no matter which template, form or upstream task made the value."""
    with pytest.raises(SpecError, match="write '4h' or"):
        deadline_of(given)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"deadline": "soon"}, "deadline: 'soon': write '4h' or .* goes on with deadline_s=14400"),
        ({"deadline": timedelta(hours=1)}, "deadline: .* goes on with deadline_s=14400"),
        ({"budget_usd": "lots"}, "budget_usd: got 'lots'.* goes on with budget_usd=25"),
        ({"budget_usd": [5]}, "budget_usd: .* goes on with budget_usd=25"),
        ({"strategy": "fastest"}, "strategy: 'fastest' .* goes on with strategy=cost"),
        ({"value_of_hour": "much"}, "value_of_hour: got 'much'.* goes on without value_of_hour"),
        ({"parameters": "None"}, None),
        ({"spec": None}, None),
    ],
)
def test_an_argument_edited_into_nonsense_ends_no_stage_that_runs(
    world, monkeypatch, capsys, argument, words
):
    """It keeps what it began with, and its log names the edit; the DAG file counts from the next entry."""
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
    """Another store does not know the run: its task would fail, or a second attempt would begin."""
    opened = []
    monkeypatch.setattr(execution, "open_backend", lambda name: opened.append(name) or world.backend)
    operator, ti = world.operator(compute="kubernetes", conn_id="eu"), Ti()
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
    """The usual case, after a trigger of this version and after one of the version before."""
    operator, ti = world.operator(conn_id="eu"), Ti()
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
        ({"restore_from": "None"}, "restore_from: 'None' is not a URI; write .* or '' }}"),
        ({"restore_from": "checkpoints/g1"}, "restore_from: 'checkpoints/g1' is not a URI"),
        ({"inputs": {"data": "None"}}, r"inputs\['data'\]: got 'None', expected the URI of an output"),
        ({"inputs": {"data": "null"}}, r"inputs\['data'\]: got 'null'"),
        ({"budget_usd": "None"}, "budget_usd: got 'None', expected an amount in USD"),
        ({"value_of_hour": "None"}, "value_of_hour: got 'None', expected an amount in USD"),
        ({"deadline": "None"}, "deadline: .*: write '4h'"),
        ({"target": "None"}, "no target 'None'"),
        ({"store_url": "None"}, "store 'None' is not an absolute path"),
        ({"store_url": Path("/mnt/store")}, "store_url: got .*, expected text"),
        ({"deadline": timedelta(hours=4)}, "deadline: .*: write '4h'"),
        ({"budget_usd": {}}, "budget_usd: got {}, expected an amount in USD"),
    ],
)
def test_an_argument_of_another_type_is_told_and_nothing_begins(world, argument, words):
    """As templates, forms and mapped values make them, also ``None``: never retried, with an error (E)."""
    operator = world.operator(**{"spec": "train.yaml", **argument})

    with pytest.raises(AirflowFailException, match=words):
        world.execute(operator, Ti())

    assert world.log.load().number == 0


@pytest.mark.parametrize("value", [None, "5", timedelta(seconds=5), 0, -1, float("nan"), float("inf"), True])
def test_a_pause_that_is_none_is_told_and_kept_from_a_trigger(world, capsys, value):
    """Its trigger would fail while the training runs unobserved, or check without a pause."""
    with pytest.raises(AirflowFailException, match=r"poll_interval: got .*, expected seconds above 0"):
        world.execute(world.operator(poll_interval=value))
    operator, ti = world.operator(), Ti()
    world.execute(operator, ti)
    operator.poll_interval = value

    deferral = world.deferral(lambda: world.resume(operator, ti))

    assert deferral.trigger.serialize()[1]["poll_s"] == 5.0
    assert "the stage goes on with 5 s" in capsys.readouterr().out


def test_the_form_knows_parameters_of_the_registry(world, monkeypatch):
    """The form finds what a spec extends where the operator finds it, also by a whole-spec reference."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.dag_file.parent / "cache"))
    registry = SpecRegistry(lambda: world.store)
    registry.publish("team/base", "1.0.0", SPEC)
    path = world.dag_file.parent / "train.yaml"
    path.write_text("version: v1\nname: train\nextends: registry://team/base@1.0.0\n")

    assert spec_params(str(path))["rate"].value == 0.1
    assert spec_params("registry://team/base@1.0.0")["rate"].value == 0.1


def test_a_quantity_without_a_unit_is_a_field_of_text(world):
    """As in the form and the schema of the other parameters; a schedule accepts it."""
    path = world.dag_file.parent / "train.yaml"
    path.write_text(SPEC.replace("{rate:", "{cores: {type: quantity, default: 4}, rate:"))

    dag = DAG("dag", schedule="@daily", params=spec_params(str(path)))

    assert dag.params.validate()["cores"] == "4"


@pytest.mark.parametrize(("deadline", "times"), [(None, 1), ("", 1), ("4h", 0)])
def test_strategy_deadline_without_a_deadline_is_reported(world, capsys, deadline, times):
    """Once, where the stage begins: the policy has no deadline to meet, and an hour has no value."""
    operator, ti = world.operator(strategy="deadline", deadline=deadline), Ti()
    world.execute(operator, ti)
    world.deferral(lambda: world.resume(operator, ti))

    assert capsys.readouterr().out.count("strategy 'deadline' is 'cost' here") == times


def test_a_backend_of_another_type_is_reported():
    """A mapped value may be None."""
    with pytest.raises(SpecError, match="compute: got None, expected the name of a backend"):
        open_backend(None)


def test_an_empty_checkpoint_to_begin_from_is_none(world):
    """An empty field of the trigger form renders to an empty string; a machine would look for it and fail."""
    world.execute(world.operator(restore_from=""))

    assert world.log.load().begun.restore_from is None


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "lots"])
def test_money_that_makes_no_sense_is_refused(value):
    """It would make every comparison wrong."""
    with pytest.raises(SpecError, match="budget_usd"):
        argument_values.usd("budget_usd", value)


def parsed(monkeypatch, tmp_path, text, *, task=None):
    """Parse a DAG file as a scheduler, or as a worker for *task*, and return the import errors."""
    from airflow.dag_processing.dagbag import DagBag

    (tmp_path / "train.yaml").write_text(SPEC)
    (tmp_path / "a_dag.py").write_text(
        "from datetime import timedelta\n"
        "from airflow.sdk import DAG\n"
        "from envscaler_airflow import EnvStageOperator, ScalingSensor\n"
        f"with DAG('d', schedule=None):\n    {text}\n"
    )
    if task is not None:
        monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", "d")
        monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_TASK_ID", task)
    bag = DagBag(str(tmp_path / "a_dag.py"))
    return "".join(bag.import_errors.values())


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("strategy='fast'", "strategy: 'fast' must be one of cost, balanced"),
        ("budget_usd=-1", "budget_usd: got -1.0, expected an amount in USD that is finite and >= 0"),
        ("value_of_hour='much'", "value_of_hour: got 'much', expected an amount in USD"),
        ("deadline='soon'", "deadline: 'soon': write '4h'"),
        ("compute='mars'", "compute: 'mars' must be one of kubernetes, local"),
        ("restart='again'", "restart: 'again' must be one of resume"),
        ("poll_interval=0", "poll_interval: got 0, expected seconds above 0"),
        ("deadline=timedelta(hours=4)", "deadline: datetime.timedelta(seconds=14400): write '4h'"),
        (
            "inputs=['s3://b/x']",
            "inputs: got ['s3://b/x'], expected names: write {'data': other.output['data']}",
        ),
        (
            "inputs={'data': None}",
            "inputs['data']: got None; write the URI of an output: other.output['data']",
        ),
    ],
)
def test_a_literal_that_can_only_be_wrong_fails_where_the_dag_file_is_parsed(
    monkeypatch, tmp_path, arguments, words
):
    """The author sees an import error, not a task that fails at night (F7)."""
    text = f"EnvStageOperator(task_id='train', spec='train.yaml', {arguments})"

    assert f"task train: {words}" in parsed(monkeypatch, tmp_path, text)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("spec='train.yaml', startegy='cost'", "; startegy: write strategy"),
        ("spec='train.yaml', num_nodes=2", "; num_nodes: it is a field of the spec, write it there"),
        ("spec={'version': 'v1'}", "spec: got {'version': 'v1'}, expected text: the path of a spec file"),
    ],
)
def test_what_was_meant_is_said_where_the_dag_file_is_parsed(monkeypatch, tmp_path, arguments, words):
    """Airflow's own message is only "Invalid arguments" (F7)."""
    assert words in parsed(monkeypatch, tmp_path, f"EnvStageOperator(task_id='train', {arguments})")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
@pytest.mark.parametrize(
    ("order", "words"),
    [
        (
            "sensor >> train",
            "task scale: it comes before its stage 'train' and would wait for it for ever; let",
        ),
        (
            "train >> other >> sensor",
            "task scale: it comes after its stage 'train' and would never check it; ",
        ),
        ("other >> [train, sensor]", ""),
    ],
)
def test_a_sensor_that_never_runs_beside_its_stage_is_refused(monkeypatch, tmp_path, order, words):
    """Before its stage it waited for ever, after it it checked nothing, both without a message (F7)."""
    text = (
        "train = EnvStageOperator(task_id='train', spec='train.yaml')\n"
        "    other = EnvStageOperator(task_id='other', spec='train.yaml')\n"
        f"    sensor = ScalingSensor(task_id='scale', stage='train'); {order}"
    )

    found = parsed(monkeypatch, tmp_path, text)

    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_a_spec_that_is_missing_fails_where_the_dag_file_is_parsed(monkeypatch, tmp_path):
    """With the path where the parser looked (F7)."""
    found = parsed(monkeypatch, tmp_path, "EnvStageOperator(task_id='train', spec='trian.yaml')")

    assert f"spec: {tmp_path}/trian.yaml: no such file" in found


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "ScalingSensor(task_id='scale', stage='trian')",
            "stage 'trian' is not a stage of DAG d; write one of: train",
        ),
        ("ScalingSensor(task_id='scale', stage='scale')", "stage 'scale' is not a stage of DAG d"),
        (
            "ScalingSensor(task_id='scale', stage='train', check_interval=0)",
            "task scale: check_interval: got 0",
        ),
        (
            "ScalingSensor(task_id='scale', stage='train', timeout='4h')",
            "task scale: timeout: got '4h'; write",
        ),
    ],
)
def test_a_sensor_of_no_stage_fails_where_the_dag_file_is_parsed(monkeypatch, tmp_path, text, words):
    """The order of the tasks in the file does not matter (F7)."""
    stage = "EnvStageOperator(task_id='train', spec='train.yaml')"

    assert words in parsed(monkeypatch, tmp_path, f"{text}; {stage}")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_templates_outputs_and_registry_are_left_to_the_run(monkeypatch, tmp_path):
    """Values that only a run knows are not refused earlier."""
    first = "a = EnvStageOperator(task_id='a', spec='registry://team/base@1', budget_usd='{{ 3 }}')"
    second = (
        "EnvStageOperator(task_id='b', spec='{{ params.x }}', deadline=a.output['d'], strategy='{{ 1 }}')"
    )
    third = "ScalingSensor(task_id='c', stage='{{ params.stage }}')"

    assert parsed(monkeypatch, tmp_path, f"{first}; {second}; {third}") == ""


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_a_worker_goes_on_with_a_dag_file_that_was_edited_into_nonsense(monkeypatch, tmp_path):
    """A stage that trains keeps what its generation began with; the scheduler reports the error."""
    text = "EnvStageOperator(task_id='train', spec='gone.yaml', strategy='fast')"

    assert parsed(monkeypatch, tmp_path, text, task="train") == ""


def test_a_deadline_that_is_over_is_refused_before_anything_begins(world):
    """A generation that can only be late would spend money for nothing (F7)."""
    deadline = datetime.now(UTC) - timedelta(minutes=1)

    with pytest.raises(AirflowFailException, match=r"deadline: .* is over \(it is .*'4h'"):
        world.execute(world.operator(deadline=deadline))

    assert world.log.read() == []


def test_a_retry_after_the_deadline_goes_on(world, monkeypatch):
    """The generation began in time: the owner does not abandon the running attempt (F7)."""
    deadline = datetime.now(UTC) + timedelta(hours=1)
    world.execute(world.operator(deadline=deadline), Ti(1))
    monkeypatch.setattr(Stage, "check_deadline", _refuse)

    world.execute(world.operator(deadline=deadline), Ti(2))

    assert world.log.load().generation == 1


def _refuse(*_):
    raise SpecError("deadline: over")


def test_a_deadline_without_a_zone_is_in_airflows_own(world, monkeypatch, capsys):
    """``[core] default_timezone`` applies, and the log names it (F7)."""
    from airflow.sdk._shared.timezones import timezone

    timezone.initialize("Europe/Berlin")
    try:
        assert deadline_of("2026-07-01T12:00:00")[1] == datetime(2026, 7, 1, 10, tzinfo=UTC).timestamp()
        world.execute(world.operator(deadline="2126-07-01T12:00:00"))
    finally:
        timezone.initialize("UTC")

    assert "has no time zone; it is taken as 2126-07-01T12:00:00+02:00" in capsys.readouterr().out
