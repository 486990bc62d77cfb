"""Unit tests of a node's files: complete or absent, and locks that end with their process."""

import fcntl
import os
from pathlib import Path

import pytest

from envscaler_airflow.backends.local import files
from envscaler_airflow.errors import BackendError


def test_json_is_replaced_as_a_whole(tmp_path):
    """The old bytes stay until the new ones are complete; no draft remains."""
    path = tmp_path / "node.json"

    files.write_json(path, {"a": 1})
    files.write_json(path, {"a": 2})

    assert files.read_json(path) == {"schema": "2.0", "a": 2}
    assert [found.name for found in tmp_path.iterdir()] == ["node.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_what_is_no_object_is_an_error(tmp_path, text):
    """Torn or foreign: never 'absent'."""
    path = tmp_path / "node.json"
    path.write_text(text, errors="surrogateescape")

    with pytest.raises(BackendError, match=r"node\.json"):
        files.read_json(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_plain_file_is_an_error_at_once(tmp_path, kind):
    """Opening a pipe would wait for a writer; a link leads where the training wants."""
    path = tmp_path / "end.json"
    files.write_json(tmp_path / "other.json", {})
    {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind, lambda at: at.symlink_to(tmp_path / "other.json"))(path)
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(BackendError, match=r"end\.json"):
        files.read_json(path)

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_absent_is_none(tmp_path):
    """And not an error."""
    assert files.read_json(tmp_path / "node.json") is None


def test_a_lock_is_held_once_and_seen_without_being_taken(tmp_path):
    """Locked, free, absent."""
    path = tmp_path / "lock"
    assert files.lock_state(path) == "absent"

    fd = files.try_lock(path)

    assert files.lock_state(path) == "held"
    assert files.try_lock(path) is None
    os.close(fd)
    assert files.lock_state(path) == "free"


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """Remove a lock file after it was opened and before it is first locked."""
    path = tmp_path / "lock"
    real, calls = fcntl.flock, []

    def flock(fd, operation):
        if not calls:
            path.unlink()
        calls.append(operation)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    return path


def test_a_lock_waited_for_is_of_the_file_that_others_find(removed):
    """The owner of the lock removed the file: the waiter locks the new file, not the removed one."""
    with files.locked(removed):
        assert files.lock_state(removed) == "held"


def test_a_lock_tried_is_of_the_file_that_others_find(removed):
    """The same without waiting."""
    fd = files.try_lock(removed)

    assert files.lock_state(removed) == "held"
    os.close(fd)


def test_the_root_is_ours_alone(tmp_path):
    """Created with access for us alone; a link or a file in its place is refused."""
    files.make_root(tmp_path / "a" / "root")
    (tmp_path / "link").symlink_to(tmp_path / "a")

    assert (tmp_path / "a" / "root").stat().st_mode & 0o777 == 0o700
    with pytest.raises(BackendError, match="local_root"):
        files.make_root(Path(tmp_path / "link"))
