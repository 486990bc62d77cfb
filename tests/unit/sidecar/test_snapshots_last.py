"""The last snapshot, after the end of the command, and snapshots on a full disk."""

import errno
import os

import pytest
from fakes.checkpoint_files import ZIP, put, safetensors
from fakes.snapshots import end, run, saved

from envscaler_airflow.sidecar import snapshots
from envscaler_airflow.store.root import Root


@pytest.mark.parametrize(
    ("age_s", "ended", "is_taken"),
    [
        (0, {"exit_code": 0, "reason": "succeeded"}, True),
        (6, {"signal": 9, "reason": "killed"}, True),
        (4, {"signal": 9, "reason": "killed"}, False),
        (4, {"exit_code": 1, "reason": "failed"}, False),
        (4, {"signal": 15, "reason": "drained"}, False),
        (6, {"exit_code": 1, "reason": "failed"}, True),
    ],
)
def test_the_last_snapshot_is_of_a_writer_that_was_done(trained, age_s, ended, is_taken):
    """A command that was killed within five seconds of a write may have been in the middle of it."""
    bench = trained()
    put(bench.ck, {"model.bin": b"1"})

    end(bench, age_s=age_s, **ended)

    assert bool(saved(bench)) is is_taken
    assert ("before the command died" in bench.context.messages.text()) is not is_taken
    assert bench.state.is_final_snapshot_done


def test_the_last_snapshot_takes_no_room(trained, monkeypatch):
    """No process writes any more: the files are linked, however full the disk is."""
    bench = trained()
    put(bench.ck, {"model.bin": b"1"})
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))

    end(bench, age_s=0, exit_code=0, reason="succeeded")

    name = saved(bench)[0]
    assert (bench.spool.checkpoints / name / "model.bin").stat().st_ino == (
        bench.ck / "model.bin"
    ).stat().st_ino


def test_a_folder_that_is_none_any_more_holds_no_end(trained):
    """The training put a file in its place: a minute later the attempt ends without a last snapshot."""
    bench = trained()
    bench.ck.rmdir()
    bench.ck.write_bytes(b"weights")
    run(bench, 5)
    assert "no snapshot: " in bench.context.messages.text()
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})

    run(bench, 50)
    assert not bench.state.is_final_snapshot_done
    run(bench, 10)

    assert bench.state.is_final_snapshot_done


def test_a_folder_that_can_be_read_again_is_copied_at_the_end(trained):
    """The sidecar retries a folder that is unreadable for a moment."""
    bench = trained()
    put(bench.ck, {"model.pt": b"weights"})
    away = bench.ck.with_name("away")
    bench.ck.rename(away)
    bench.ck.write_bytes(b"")
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    run(bench, 10)
    bench.ck.unlink()
    away.rename(bench.ck)

    run(bench, 1)

    assert (len(saved(bench)), bench.state.is_final_snapshot_done) == (1, True)


def test_a_folder_that_leads_in_a_circle_is_said(trained):
    """It does not crash the sidecar."""
    bench = trained()
    bench.ck.rmdir()
    bench.ck.symlink_to(bench.ck.name)

    run(bench, 2)

    assert "no snapshot: " in bench.context.messages.text()


def test_a_writer_killed_in_the_middle_of_a_save(trained):
    """Step 20 is half written when the out-of-memory killer ends the command; step 10 counts."""
    bench = trained()
    put(
        bench.ck,
        {
            "checkpoint-10/model.safetensors": safetensors(64),
            "checkpoint-10/trainer_state.json": b'{"global_step": 10}',
            "checkpoint-20/model.safetensors": safetensors(64)[:50],
        },
    )

    end(bench, age_s=0, signal=9, reason="out-of-memory")

    assert saved(bench) == ["g1-step-00000010-a2"]
    folder = bench.spool.checkpoints / "g1-step-00000010-a2"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10"]


def test_a_file_torn_by_a_kill_long_ago_is_found(trained):
    """Quiet for a minute, then the command dies: the zip still has no end."""
    bench = trained()
    put(bench.ck, {"model.pt": ZIP[:-9]})

    end(bench, age_s=60, signal=9, reason="killed")

    assert saved(bench) == []
    assert "zip without its end" in bench.context.messages.text()
    assert bench.state.is_final_snapshot_done


def test_a_full_disk_costs_a_snapshot_and_nothing_else(trained, monkeypatch):
    """No partial copy remains, the status has the reason, and the next snapshot works."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"a": b"1", "b": b"2"})
    real = Root.landing

    def full(root, path, **options):
        if path == "b":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(root, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Root, "landing", full)
        run(bench, 8)
        assert bench.context.messages.text() == "no snapshot: [Errno 28] No space left on device"
        assert list(bench.spool.checkpoints.iterdir()) == []

    run(bench, 8)
    assert len(saved(bench)) == 1
    assert bench.context.messages.text() == ""


def test_a_disk_that_would_be_full_is_left_to_the_training(trained, monkeypatch):
    """The sidecar starts no copy that would leave less than a twentieth of the disk free."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"a": b"x" * 100})

    class Room:
        f_frsize, f_blocks, f_bavail = 1, 2000, 199

    monkeypatch.setattr(snapshots.os, "statvfs", lambda _: Room)
    run(bench, 8)

    assert saved(bench) == []
    expected = (
        "no snapshot: disk full: a snapshot takes 100 bytes, 199 are free and 100 are left to the training"
    )
    assert bench.context.messages.text() == expected
