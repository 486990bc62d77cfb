"""Profiles of stages in the store: nothing is lost to concurrent runs, and nothing torn is believed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from envscaler_airflow.planning.profile import MOST_RUNS, RunProfile
from envscaler_airflow.store.keys import RunKey
from envscaler_airflow.store.profiles import (
    KEPT,
    add_profile,
    reset_profiles,
    stage_folder,
    stage_folders,
    stored_profiles,
)
from envscaler_airflow.store.run import run_prefixes
from envscaler_airflow.store.run_store import open_store

KEY = RunKey("deployment", "dag", "run", "train")
FOLDER = stage_folder(KEY)


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return open_store(f"file://{tmp_path}/store")


def profile(number, **fields):
    """What one run measured."""
    return RunProfile(f"deployment/dag/run-{number}/train/-1", 1, float(number), "succeeded", **fields)


def test_the_runs_and_mapped_tasks_of_a_stage_share_a_folder_and_others_do_not():
    """Deployment, team, DAG and task make a stage."""
    assert stage_folder(RunKey("deployment", "dag", "later", "train", 7)) == FOLDER
    others = [("other", "dag", "train"), ("deployment", "other", "train"), ("deployment", "dag", "other")]
    assert all(stage_folder(RunKey(one, dag, "run", task)) != FOLDER for one, dag, task in others)
    assert stage_folder(RunKey("deployment", "dag", "run", "train", team="blue")) != FOLDER


def test_concurrent_runs_lose_nothing(store):
    """Ten at once."""
    with ThreadPoolExecutor(10) as writers:
        added = list(writers.map(lambda number: add_profile(store, FOLDER, profile(number)), range(10)))

    assert all(added)
    assert [one.at for one in stored_profiles(store, FOLDER, now=99.0).runs] == [float(n) for n in range(10)]


def test_the_end_of_a_run_counts_once(store):
    """A second execution that delivers the same end writes the same name."""
    assert add_profile(store, FOLDER, profile(1))
    assert not add_profile(store, FOLDER, profile(1))

    assert len(stored_profiles(store, FOLDER, now=9.0).runs) == 1


def test_the_number_of_files_is_bounded_and_the_newest_are_read(store):
    """Twice as many are kept as are read."""
    for number in range(KEPT + 5):
        add_profile(store, FOLDER, profile(number))

    assert len(store.names(FOLDER)) == KEPT
    found = stored_profiles(store, FOLDER, now=1e6)
    assert [one.at for one in found.runs] == [float(n) for n in range(KEPT + 5 - MOST_RUNS, KEPT + 5)]
    assert found.faults == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"schema": "2.0", "run": "d', "not JSON"),
        (b"[]", "expected an object"),
        (b'{"schema": "9.0"}', "schema '9.0'"),
        (b'{"schema": "2.0", "run": "r"}', "is missing"),
        (b'{"schema": "2.0", "run":"r","generation":1,"at":1,"status":"x","units":-5}', "units must be"),
        (b'{"schema": "2.0", "run":"r","generation":1,"at":1,"status":"x","units":NaN}', "not JSON"),
        (b'{"schema": "2.0", "run":"r","generation":1,"at":9e9,"status":"x"}', "a wrong clock"),
        (b" " * (1 << 19), "larger|bytes"),
    ],
)
def test_a_file_that_is_torn_poisoned_or_of_another_version_is_named_and_ignored(store, text, why):
    """The others count."""
    add_profile(store, FOLDER, profile(1))
    store.write(f"{FOLDER}/000000000002000-bad.json", text)

    found = stored_profiles(store, FOLDER, now=100.0)

    assert [one.at for one in found.runs] == [1.0]
    [fault] = found.faults
    assert "bad.json" in fault
    assert any(part in fault for part in why.split("|"))


def test_a_later_minor_version_is_read_without_its_new_fields(store):
    """Readable after an upgrade, and after a downgrade."""
    add_profile(store, FOLDER, profile(1))
    [name] = store.names(FOLDER)
    body = json.loads(store.read(name)) | {"schema": "2.7", "new_field": [1]}
    store.write(name, json.dumps(body).encode())

    assert stored_profiles(store, FOLDER, now=9.0).runs == (profile(1),)


def test_stages_are_listed_by_name_and_are_no_runs(store):
    """``prune`` and ``status`` list runs, and a profile outlives them."""
    add_profile(store, FOLDER, profile(1))

    assert list(stage_folders(store)) == [("deployment/dag/train", FOLDER)]
    assert run_prefixes(store) == []
    assert (reset_profiles(store, FOLDER), list(stage_folders(store))) == (1, [])


def test_names_with_slashes_are_other_stages():
    """Task ``c/t`` of DAG ``b`` is not task ``t`` of DAG ``b/c``; the same for deployments and teams."""
    keys = [
        RunKey("a", "b", "run", "c/t"),
        RunKey("a", "b/c", "run", "t"),
        RunKey("a/b", "c", "run", "t"),
        RunKey("a", "c", "run", "t", team="b"),
        RunKey("a/", "c", "run", "t"),
        RunKey("a", "c", "run", "t", team="/"),
        RunKey("a", "b%2Fc", "run", "t"),
    ]

    assert len({stage_folder(key) for key in keys}) == len(keys)


def test_runs_of_a_wrong_clock_displace_no_others(store):
    """A full folder of runs that ended in the year 2286, and one file without a time: the new run counts."""
    store.write(f"{FOLDER}/²²-notes.json", b"{}")
    for number in range(KEPT):
        add_profile(store, FOLDER, profile(10**10 + number))

    assert add_profile(store, FOLDER, profile(1))

    found = stored_profiles(store, FOLDER, now=9.0)
    assert [one.at for one in found.runs] == [1.0]
    assert len(store.names(FOLDER)) == KEPT


def test_a_stage_that_is_reset_meanwhile_is_not_listed(store, monkeypatch):
    """Its folder is listed, and is empty when it is read."""
    add_profile(store, FOLDER, profile(1))
    children = store.children
    monkeypatch.setattr(store, "children", lambda name: [] if name == FOLDER else children(name))

    assert list(stage_folders(store)) == []
