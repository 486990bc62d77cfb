"""Differences between the filesystems of fsspec."""

import pytest
from fsspec.implementations.local import LocalFileSystem

from envscaler_airflow.errors import SpecError, StoreError
from envscaler_airflow.store import check_store, open_store


@pytest.fixture
def weak(tmp_path):
    """A filesystem without an exclusive create: fsspec's own local one."""
    return open_store(f"local://{tmp_path}/store")


def test_the_strength_of_create_is_reported(weak):
    """In memory and the large object stores only one wins; for others, the file is checked and read back."""
    assert open_store("memory://strength").create_is_atomic
    assert not weak.create_is_atomic


def test_a_weak_create_refuses_what_exists(weak):
    """This is sufficient for one owner."""
    check_store(weak)

    assert weak.create("a/b", b"1") is True
    assert weak.create("a/b", b"2") is False
    assert weak.read("a/b") == b"1"


def test_a_weak_create_that_was_overwritten_is_lost(weak, monkeypatch):
    """The read returns another writer's bytes: that one won."""
    real = LocalFileSystem.pipe_file

    def overtaken(self, path, value, **mode):
        real(self, path, value, **mode)
        real(self, path, b"theirs", **mode)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", overtaken)

    assert weak.create("a", b"mine") is False
    assert weak.read("a") == b"theirs"


@pytest.mark.parametrize("error", [OSError("broken"), TimeoutError("late"), RuntimeError("odd")])
def test_what_cannot_be_told_is_an_error_and_never_absent(weak, monkeypatch, error):
    """For any exception of a filesystem."""

    def fail(*_args, **_kwargs):
        raise error

    for name in ["info", "find", "pipe_file"]:
        monkeypatch.setattr(LocalFileSystem, name, fail)

    calls = [
        lambda: weak.read("a"),
        lambda: weak.size("a"),
        lambda: weak.names("a"),
        lambda: weak.write("a", b""),
        lambda: weak.create("a", b""),
        lambda: weak.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=str(error)) as caught:
            call()
        assert caught.value.transient


def test_permission_denied_does_not_pass_by_itself(weak, monkeypatch):
    """It is not retried."""

    def refuse(*_args, **_kwargs):
        raise PermissionError("denied")

    monkeypatch.setattr(LocalFileSystem, "info", refuse)

    with pytest.raises(StoreError, match="denied") as caught:
        weak.read("a")
    assert not caught.value.transient


def test_an_upload_that_arrived_short_is_an_error(weak, tmp_path, monkeypatch):
    """Fsspec's generic copy closes, and so publishes, a partial file when it fails."""
    (tmp_path / "up").write_bytes(b"whole")
    monkeypatch.setattr(
        LocalFileSystem, "put_file", lambda self, _source, target: self.pipe_file(target, b"who")
    )
    weak.write("other", b"")

    with pytest.raises(StoreError, match="3 of 5 bytes arrived"):
        weak.put_file("a", tmp_path / "up")


def test_a_missing_package_is_named():
    """Google's filesystem is not part of the test environment."""
    with pytest.raises(SpecError, match="gcsfs"):
        open_store("gs://bucket/x")


def test_an_unknown_protocol_says_what_to_write():
    """A typo in the scheme."""
    with pytest.raises(SpecError, match=r"s4.*write file:///path"):
        open_store("s4://bucket/x")


def test_a_server_that_cannot_be_reached_is_named(monkeypatch):
    """Some filesystems connect when they are opened; a retry may succeed."""

    def refuse(*_url, **_options):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr("envscaler_airflow.store.filesystem.url_to_fs", refuse)

    with pytest.raises(StoreError, match="store ftp://host/x: ConnectionRefusedError: refused") as told:
        open_store("ftp://host/x")
    assert told.value.transient


def test_the_first_level_is_listed_without_what_is_below(monkeypatch):
    """A bucket with a million objects has a few folders at each level: only these are requested."""
    store = open_store("memory://first-level")
    for name in ("a/b/c/1", "a/b/d/2", "a/e", "f/g/h/3"):
        store.write(name, b"1")
    asked, real = [], type(store._fs).ls
    monkeypatch.setattr(type(store._fs), "async_impl", True)  # as object stores are
    monkeypatch.setattr(
        type(store._fs), "ls", lambda fs, path, *more, **k: asked.append(path) or real(fs, path, *more, **k)
    )

    assert (store.children(""), store.children("a"), store.children("a/e")) == (["a", "f"], ["b", "e"], [])
    assert len(asked) == 3
