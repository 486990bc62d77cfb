"""A store in a folder that disappears for a while: no answer, and never an empty store."""

from __future__ import annotations

import pytest

from envscaler_airflow.errors import StoreError
from envscaler_airflow.run import Actor
from envscaler_airflow.run.event_bodies import StopRequested, read_body
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.logs import MAX_CHUNK_BYTES, read_logs
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store

BODY = {"generation": 1, "spec_hash": "A"}


@pytest.fixture
def folder(tmp_path):
    """The folder of the store while it is available."""
    return tmp_path / "store"


@pytest.fixture
def store(folder):
    """A store with content."""
    made = FileStore(folder)
    made.write("a", b"1")
    return made


def calls(store):
    """Every read of the store."""
    return {
        "read": lambda: store.read("a"),
        "write": lambda: store.write("a", b"2"),
        "create": lambda: store.create("b", b"2"),
        "names": lambda: store.names(""),
        "children": lambda: store.children(""),
        "size": lambda: store.size("a"),
        "delete": lambda: store.delete("a"),
        "delete_tree": lambda: store.delete_tree("a"),
    }


@pytest.mark.parametrize("call", sorted(calls(None)))
@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_a_folder_that_went_away_gives_no_answer_and_is_not_made_again(store, folder, tmp_path, call, left):
    """Renamed, or unmounted so that the bare mount point shows; afterwards everything is unchanged."""
    folder.rename(tmp_path / "away")
    if left == "an empty folder":
        folder.mkdir()

    with pytest.raises(StoreError) as caught:
        calls(store)[call]()

    assert caught.value.transient
    assert folder.exists() == (left == "an empty folder")
    if left == "an empty folder":
        folder.rmdir()
    (tmp_path / "away").rename(folder)
    assert store.read("a") == b"1"


def test_an_event_is_never_appended_to_a_store_that_is_not_the_runs(store, folder, tmp_path):
    """The owner knows event 1 and would create number 2 in an empty folder."""
    log = Run(store, "run").events
    log.append(0, read_body("generation", BODY), actor=Actor("ti"))
    folder.rename(tmp_path / "away")
    folder.mkdir()

    with pytest.raises(StoreError, match="another folder than before"):
        log.append(1, StopRequested())

    assert list(folder.iterdir()) == []


def test_a_sidecar_never_makes_the_store(tmp_path):
    """It was restarted while the store was unavailable."""
    store = open_store(f"file://{tmp_path}/store", must_exist=True)

    with pytest.raises(StoreError, match="does not exist"):
        store.write("a", b"1")

    assert not (tmp_path / "store").exists()


def test_a_chunk_that_is_no_chunk_hides_nothing_of_the_log(store):
    """It is too large, or not a file: this is reported, and the next one follows."""
    store.write("run/logs/g1-a1-n0-c1-000001.log", b"one\n")
    store.write("run/logs/g1-a1-n0-c1-000002.log", b"x" * (MAX_CHUNK_BYTES + 1))
    store.write("run/logs/g1-a1-n0-c1-000003.log", b"three\n")

    text, cursor = read_logs(Run(store, "run"), attempt=(1, 1), node=0)

    first, middle, last = text.decode().splitlines()
    assert (first, last, cursor) == ("one", "three", (4, 0))
    assert middle.startswith("[chunk 2 of the log is left out: ")
