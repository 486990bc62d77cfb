"""``envscaler prune`` and the operator: what they list, remove and print."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from fakes.run_events import SUCCEEDED, begun, life

from envscaler_airflow import PruneOperator
from envscaler_airflow.cli import main
from envscaler_airflow.cli.cancel import _lifecycle
from envscaler_airflow.errors import SpecError
from envscaler_airflow.hooks import states
from envscaler_airflow.run import Event
from envscaler_airflow.run.event_bodies import read_body
from envscaler_airflow.store.events import event_name
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.run import Run

DAY_S = 86_400.0
RESULT = b"x" * 2048


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Runs of two deployments: of each one that ended 40 days ago and one of yesterday."""
    store = FileStore(tmp_path / "store")
    for name in ("prod", "lab.eu"):
        for run_id, days in (("old", 40), ("new", 1)):
            make(store, RunKey(name, "dag", run_id, "train"), days)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__STORE_URL", store.url)
    monkeypatch.setenv("AIRFLOW__ENVSCALER__DEPLOYMENT", "prod")
    return store


def make(store, key, days):
    """A run with an output, all of it so many days old."""
    run = Run(store, key)
    run.write("run.json", json.dumps({"schema": "2.0", "key": key.to_dict()}).encode())
    run.write("outputs/g1-a1-c1/model/manifest.json", RESULT)
    for number, step in enumerate([begun(), *life("succeeded"), SUCCEEDED], start=1):
        run.create(event_name(number), Event(number, read_body(step[0], step[1])).to_json())
    then = store.now() - days * DAY_S
    for path in (store.root / key.prefix).rglob("*"):
        os.utime(path, (then, then))


def shell(store, *words):
    """Output of the command."""
    done = CliRunner().invoke(main, ["prune", "--store", store.url, *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_nothing_is_removed_without_yes(store):
    """The list names what goes, its size and its outputs, and how to remove it."""
    before = store.sizes("")

    said = shell(store, "--match", "prod/").splitlines()

    assert said[0].startswith("prod/dag/old/train/-1: succeeded 40 d ago; 7 objects, 3.")
    assert said[0].endswith("KiB; outputs: model")
    assert said[1].startswith("1 runs, 7 objects, 3.")
    assert said[1].endswith("KiB: removed by --yes")
    assert store.sizes("") == before


def test_yes_removes_them(store):
    """Of all deployments on the store; as JSON with every number."""
    said = json.loads(shell(store, "--yes", "--json"))

    assert said["dry_run"] is False
    assert [(one["prefix"], one["kept"], one["objects"]) for one in said["runs"]] == [
        ("lab%2Eeu/dag/old/train/-1", "", 7),
        ("prod/dag/old/train/-1", "", 7),
    ]
    assert {name.split("/")[2] for name in store.names("")} == {"new"}


def test_the_age_is_the_users(store):
    """Sixty days: nothing is so old."""
    assert shell(store, "--older-than", "60d", "--yes") == "0 runs, 0 objects, 0 bytes: removed\n"


def test_the_operator_asks_airflow_about_its_own_deployment(store, monkeypatch):
    """Its DAG run of yesterday was deleted, so it goes; the other deployment's runs are not touched."""
    asked = []

    def task_states(*key):
        asked.append(key)
        return {}

    monkeypatch.setattr(states, "task_states", task_states)
    other = store.sizes("lab%2Eeu")

    found = PruneOperator(task_id="prune").execute({})

    assert [(one["prefix"], one["reason"], one["kept"]) for one in found] == [
        ("prod/dag/new/train/-1", "its DAG run was deleted in Airflow", ""),
        ("prod/dag/old/train/-1", "succeeded 40 d ago", ""),
    ]
    assert asked == [("dag", "new", "train", -1)]
    assert store.sizes("") == other


def test_a_dag_run_that_airflow_has_is_not_gone(store, monkeypatch):
    """In any state of its task: it may be cleared."""
    monkeypatch.setattr(states, "task_states", lambda *_key: {"-1": "success"})

    found = PruneOperator(task_id="prune", dry_run=True).execute({})

    assert [one["prefix"] for one in found] == ["prod/dag/old/train/-1"]


def test_the_operator_refuses_an_age_without_a_unit():
    """The message says what to write."""
    with pytest.raises(SpecError, match=r'older_than: .*write "30s" or "30m"'):
        PruneOperator(task_id="prune", older_than="30").execute({})


def test_rules_for_a_bucket_of_s3():
    """Below the store's folder only, and 30 days later, since the first objects of a live run are old too."""
    rules = _lifecycle("s3://bucket/team/ml/", 30 * DAY_S)["Rules"]

    assert [rule["Filter"] for rule in rules] == [{"Prefix": "team/ml/"}] * 3
    assert rules[0]["Expiration"] == {"Days": 60}
    assert rules[2]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}


def test_rules_for_a_bucket_of_gcs():
    """A store that is the whole bucket has no prefix, which Cloud Storage would refuse as an empty text."""
    whole = _lifecycle("gs://bucket", 90 * DAY_S)["lifecycle"]["rule"]
    below = _lifecycle("gs://bucket/ml", 90 * DAY_S)["lifecycle"]["rule"]

    assert whole[0] == {"action": {"type": "Delete"}, "condition": {"age": 120}}
    assert below[0]["condition"] == {"age": 120, "matchesPrefix": ["ml/"]}


def test_a_folder_has_no_rules(store):
    """The message names the stores that have."""
    with pytest.raises(
        SpecError, match=r"in no bucket whose rules are known; they are for s3://, gs://, gcs://"
    ):
        _lifecycle(store.url, 30 * DAY_S)
