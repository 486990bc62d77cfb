"""Unit tests of what this process can know of a node: out of sight is never lost."""

import dataclasses
import os

import pytest

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.local_backend import LocalBackend
from envscaler_airflow.backends.local.machine import Identity, Machine
from envscaler_airflow.backends.local.processes import ProcessId
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import Handle

HERE = Identity("host-a", "machine-1", "boot-1", "pid:[1]")
GONE = {"pid": 2**22 + 1, "start": 1}
"""No process has this number: the kernel's maximum is 2**22."""


class Node:
    """A node that was started on HERE, with its files and its handle."""

    def __init__(self, tmp_path, main=GONE):
        """Lay out the folder of an attempt with one node."""
        self.folder = tmp_path / "root" / "attempt" / "n0"
        self.folder.mkdir(parents=True)
        (self.folder / "spool").mkdir()
        (self.folder / files.LOCK).touch()
        (self.folder.parent / "submit.lock").touch()
        body = {"id": "one", "main": main, "guard": GONE}
        self.handle = Handle(
            "local",
            "attempt",
            {"folder": str(self.folder.parent), "identity": HERE.to_dict(), "nodes": [body]},
        )
        files.write_json(self.folder / files.NODE, {**body, "identity": HERE.to_dict(), "started": 100.0})
        self.root = tmp_path / "root"

    def seen_from(self, here=HERE):
        """Return the backend of a process that is *here*."""
        return LocalBackend(self.root, machine=Machine((0,), 1 << 30, identity=here))

    def state(self, here=HERE):
        """Return the state of the node, seen from *here*."""
        [status] = self.seen_from(here).observe(self.handle).nodes
        return status.state

    def end(self, run_id="one"):
        """Write its end."""
        body = {"id": run_id, "exit_code": 3, "signal": None, "reason": "failed", "detail": "x"}
        files.write_json(self.folder / files.END, {**body, "started": 100.0, "ended": 160.0})


@pytest.fixture
def node(tmp_path):
    """A node whose processes are gone without an end."""
    return Node(tmp_path)


def test_gone_without_an_end_here_is_lost(node):
    """Same host, boot and process table: known to be gone."""
    assert node.state() == "lost"


@pytest.mark.parametrize(
    ("elsewhere", "state"),
    [
        ({"host": "host-b"}, "unknown"),
        ({"machine_id": "machine-2"}, "unknown"),
        ({"host": "host-b", "boot_id": "boot-2"}, "unknown"),
        ({"pid_namespace": "pid:[2]"}, "unknown"),
        ({"boot_id": "boot-2"}, "lost"),
        ({"boot_id": "boot-2", "pid_namespace": "pid:[2]"}, "lost"),
        ({"boot_id": ""}, "unknown"),
    ],
)
def test_from_elsewhere_only_another_boot_of_the_same_host_is_a_loss(node, elsewhere, state):
    """Absence says nothing where the process is not visible."""
    assert node.state(dataclasses.replace(HERE, **elsewhere)) == state


def test_an_end_is_an_end_wherever_it_is_read(node):
    """A shared folder shows it on another host too."""
    node.end()

    assert node.state(dataclasses.replace(HERE, host="host-b")) == "ended"
    [status] = node.seen_from().observe(node.handle).nodes
    assert (status.exit_code, status.reason, status.detail) == (3, "failed", "x")


def test_the_end_of_another_start_is_not_ours(node):
    """Unique ids distinguish two starts of the same name."""
    node.end(run_id="another")

    assert node.state() == "lost"


def test_a_held_lock_whose_holder_is_not_shown_is_unknown(node):
    """A process table that hides it (hidepid) does not prove its death."""
    fd = files.try_lock(node.folder / files.LOCK)

    assert node.state() == "unknown"

    os.close(fd)
    assert node.state() == "lost"


def test_a_live_main_is_starting_and_then_running(tmp_path):
    """Running once the sidecar has laid everything out."""
    node = Node(tmp_path, main=ProcessId.of(os.getpid()).to_dict())
    assert node.state() == "starting"

    (node.folder / "spool" / "start.json").touch()

    assert node.state() == "running"


def test_a_process_of_the_same_number_is_not_ours(tmp_path):
    """The number was reused: the start time tells them apart."""
    me = ProcessId.of(os.getpid())
    node = Node(tmp_path, main={"pid": me.pid, "start": me.start - 1})

    assert node.state() == "lost"


def test_a_stop_that_killed_is_an_end_not_a_loss(node):
    """The user requested it."""
    files.write_json(node.folder / files.STOP, {"grace_s": 0})

    assert node.state() == "ended"


def test_a_folder_that_was_removed_says_nothing_against_a_live_process(tmp_path):
    """The process decides."""
    import shutil

    node = Node(tmp_path, main=ProcessId.of(os.getpid()).to_dict())
    shutil.rmtree(node.folder.parent)

    assert node.state() == "starting"


def test_an_unreadable_file_is_no_answer(node):
    """Torn JSON is an error, not an end and not a death."""
    (node.folder / files.END).write_text('{"id": "on')

    with pytest.raises(BackendError, match=r"end\.json"):
        node.seen_from().observe(node.handle)


def test_a_loss_is_billed_until_it_was_last_seen_alive(node):
    """The lock file's time is the last sign of life."""
    os.utime(node.folder / files.LOCK, (130.0, 130.0))

    [interval] = node.seen_from().usage(node.handle)

    assert (interval.start, interval.end) == (100.0, 130.0)


def test_an_end_is_billed_by_the_node_s_own_times(node):
    """A minute, from 100 to 160."""
    node.end()

    [interval] = node.seen_from().usage(node.handle)

    assert (interval.start, interval.end) == (100.0, 160.0)


def test_what_cannot_be_told_is_billed_openly(node):
    """Unknown has not ended."""
    [interval] = node.seen_from(dataclasses.replace(HERE, host="host-b")).usage(node.handle)

    assert interval.end is None


def test_a_stop_from_elsewhere_leaves_a_note_and_kills_nobody(node):
    """In another process table the numbers belong to other processes."""
    backend = node.seen_from(dataclasses.replace(HERE, pid_namespace="pid:[2]"))

    backend.stop(node.handle, grace_s=7.0)

    assert files.read_json(node.folder / files.STOP)["grace_s"] == 7.0


def test_release_leaves_what_cannot_be_told(node):
    """An unknown node may be alive."""
    node.seen_from(dataclasses.replace(HERE, host="host-b")).release(node.handle)
    assert node.folder.exists()

    node.seen_from().release(node.handle)
    assert not node.folder.exists()


def test_attempts_lists_what_was_started(node):
    """For the check for orphans; an unrelated folder does not count."""
    files.write_json(node.folder / files.REQUEST, {})
    (node.root / "agent-123").mkdir()

    assert [handle.name for handle in node.seen_from().attempts()] == ["attempt"]
