"""Unit tests of the spool folder: reads are checked, writes are complete."""

import json
import os

import pytest

from envscaler_agent.spool import (
    Restore,
    SetupFailedError,
    Spool,
    Start,
    Watched,
    parse_report,
    parse_start,
    snapshot_sequence,
    write_atomic,
    write_json,
)
from envscaler_airflow.errors import ProtocolError


def start(**body):
    """Write a start.json."""
    return json.dumps({"schema": "2.0", **body}).encode()


def test_reads_what_the_sidecar_lays_out():
    """Known fields are read, unknown ones are ignored."""
    got = parse_start(
        start(
            cwd="/w",
            env={"A": 1},
            restore={"path": "/r", "name": "g1-step-00000005-a1", "step": 5, "new": 1},
            session={"generation": 1, "attempt": 2, "every": {"steps": 9}, "secret_env": ["K"], "new": 1},
        )
    )

    assert got == Start(
        cwd="/w",
        env={"A": "1"},
        restore=Restore("/r", "g1-step-00000005-a1", 5),
        generation=1,
        attempt=2,
        every={"steps": 9},
        secret_env=("K",),
    )


def test_an_empty_start_means_the_defaults():
    """A bare command needs nothing."""
    assert parse_start(start()) == Start()


def test_a_failed_setup_is_said():
    """The message has the sidecar's reason."""
    with pytest.raises(SetupFailedError, match="no such input") as caught:
        parse_start(start(failed="no such input"))
    assert caught.value.reason == "setup-failed"


@pytest.mark.parametrize(
    ("said", "reason"),
    [("stopped", "stopped"), ("orphaned", "orphaned"), ("succeeded", "setup-failed"), ([5], "setup-failed")],
)
def test_a_setup_that_was_not_to_be_is_told_from_a_failed_one(said, reason):
    """Stopped or orphaned during setup; any other reason there counts as a failed setup."""
    with pytest.raises(SetupFailedError) as caught:
        parse_start(start(failed="asked to drain", reason=said))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"schema": "3.0"}',
        start(restore={"path": 5}),
        start(session=[1]),
        start(env=5),
        start(session={"nodes": "2"}),
        start(cwd=5),
        start(restore=[1]),
    ],
)
def test_nonsense_is_a_protocol_error(data):
    """For every invalid file the wrapper names the error."""
    with pytest.raises(ProtocolError, match=r"start\.json"):
        parse_start(data)


def test_a_report_carries_progress_and_more():
    """The session's file is a Progress with additional fields."""
    report = parse_report(start(step=5, cooperates=True, saving=True, pid=9))

    assert report.progress.step == 5
    assert (report.cooperates, report.saving, report.drained) == (True, True, False)


@pytest.mark.parametrize("field", [{"at": "soon"}, {"first_step_at": [1]}, {"saving": "yes"}, {"step": 1.5}])
def test_a_report_of_other_types_is_a_protocol_error(field):
    """The training wrote it: the wrapper must not compute with it."""
    with pytest.raises(ProtocolError, match=next(iter(field))):
        parse_report(start(**field))


def test_a_watched_file_is_read_when_it_changed(tmp_path):
    """Absent, new, the same, replaced, deleted."""
    path = tmp_path / "x" / "f.json"
    watched = Watched(path)

    assert watched.changed() is None
    write_json(path, {"a": 1, "b": None})
    assert json.loads(watched.changed()) == {"schema": "2.0", "a": 1}
    assert watched.changed() is None
    write_json(path, {"a": 2})
    assert json.loads(watched.changed())["a"] == 2
    path.unlink()
    assert watched.changed() is None


def test_a_file_that_took_the_inode_and_time_of_the_one_before_is_seen(tmp_path):
    """Replaced within a tick of the kernel's clock, same size: the mark is equal, the bytes are not."""
    path = tmp_path / "f"
    watched = Watched(path)
    path.write_bytes(b"one")
    stat = path.stat()
    assert watched.changed() == b"one"

    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert watched.changed() == b"two"
    assert watched.changed() is None


def test_an_old_file_is_not_read_again(tmp_path, monkeypatch):
    """The check costs one ``stat``."""
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    watched = Watched(path)
    assert watched.changed() == b"one"

    monkeypatch.setattr(type(path), "open", lambda *_: pytest.fail("read again"))

    assert watched.changed() is None


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    """The disk is full: the previous content stays."""
    path = tmp_path / "f.json"
    write_atomic(path, b"old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")

    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"old"]


def test_a_number_that_is_not_finite_cannot_be_written(tmp_path):
    """No reader could parse it."""
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "f.json", {"loss": float("nan")})


@pytest.mark.parametrize(
    ("text", "sequence"),
    [('{"sequence": 7, "taken": false}', 7), ("7", 7), ("{}", -1), ("{", -1), ('{"sequence": "x"}', -1)],
)
def test_the_sidecars_answer_is_read(tmp_path, text, sequence):
    """An invalid answer does not count."""
    path = tmp_path / "snapshot.done"
    path.write_text(text, encoding="utf-8")

    assert snapshot_sequence(path) == sequence
    assert snapshot_sequence(tmp_path / "absent") == -1


def test_the_environment_names_the_folder():
    """Without it there is no spool."""
    assert Spool.from_env({}) is None
    assert str(Spool.from_env({"ENVSCALER_SPOOL": "/e"}).control) == "/e/control.json"
