"""A pod does not fetch again what an earlier pod of the machine fetched, if it is unchanged."""

import pytest

from envscaler_airflow.sidecar.setup import copy_in
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.store import open_store
from envscaler_airflow.store.filesystem import FilesystemStore


@pytest.fixture
def bucket(request):
    """An object store of its own with two files."""
    store = open_store(f"memory://{request.node.name}/data")
    store.write("a/one", b"1111")
    store.write("two", b"2222")
    return store


@pytest.fixture
def fetched(monkeypatch):
    """Record the names that were fetched from a store."""
    found, real = [], FilesystemStore.get_file

    def get_file(self, name, path):
        found.append(name)
        real(self, name, path)

    monkeypatch.setattr(FilesystemStore, "get_file", get_file)
    return found


@pytest.fixture
def brought(make_bench, bucket, tmp_path):
    """Lay the volume out as a new pod of the same machine would, and return its content."""

    def once():
        folder = tmp_path / "machine" / "data"
        index = str(tmp_path / "machine" / "index.json")
        mount = Mount(name="d", source=bucket.url, path=str(folder), read_only=True, index=index)
        copy_in(make_bench().context, mount)
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    return once


def test_a_second_pod_fetches_nothing(brought, fetched):
    """Every file is already there."""
    first = brought()
    del fetched[:]

    assert brought() == first == {"a/one": b"1111", "two": b"2222"}
    assert fetched == []


def test_what_changed_comes_again_though_it_has_the_same_size(brought, bucket, fetched):
    """By its version; a file that is gone at the source is removed here."""
    brought()
    del fetched[:]
    bucket.write("two", b"3333")
    bucket.write("new", b"4")
    bucket.delete("a/one")

    assert brought() == {"two": b"3333", "new": b"4"}
    assert fetched == ["new", "two"]


def test_a_fetch_that_was_cut_off_goes_on(brought, fetched, tmp_path):
    """One file was lost, and the record of all: files that cannot be verified are fetched again."""
    first = brought()
    (tmp_path / "machine" / "data" / "two").unlink()
    del fetched[:]
    assert brought() == first
    assert fetched == ["two"]
    (tmp_path / "machine" / "index.json").write_text("{torn")
    del fetched[:]

    assert brought() == first
    assert fetched == ["a/one", "two"]
