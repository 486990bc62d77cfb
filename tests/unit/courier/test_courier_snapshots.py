"""Checkpoints of code that knows nothing of us: when they are taken, and that they are whole."""

import errno
import json
import os

import pytest
from fakes.checkpoint_files import STATE, ZIP, put, safetensors

from envscaler_airflow.courier import layouts
from envscaler_airflow.courier.snapshots import QuietWatch, Snapshots
from envscaler_airflow.protocol import Progress
from envscaler_airflow.store.root import Root


def test_quiet_is_measured_since_the_last_change():
    """By the watcher's own clock, whatever the files say."""
    now = [0.0]
    watch = QuietWatch(lambda: now[0])

    seen = []
    for at, fingerprint in [(0, "a"), (3, "a"), (4, "b"), (10, "b"), (11, "a")]:
        now[0] = at
        quiet_s, progress = watch.look(fingerprint, Progress(step=at))
        seen.append((quiet_s, progress.step))

    assert seen == [(0, 0), (3, 0), (0, 4), (6, 4), (0, 11)]


# -- when


@pytest.fixture
def trained(make_bench, tmp_path):
    """A running attempt whose code saves into ``ck``, and its snapshots."""

    def make(every=None, **options):
        bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")}, **options)
        bench.ck = tmp_path / "ck"
        bench.ck.mkdir(exist_ok=True)
        bench.site.memory.update(is_laid_out=True, start_step=0)
        bench.wrapper_says(progress={"step": 0})
        bench.snapshots = Snapshots(bench.site, every or {"seconds": 60})
        return bench

    return make


def run(bench, seconds):
    """Let *seconds* pass, a look every second."""
    for _ in range(seconds):
        bench.clock.now += 1
        bench.snapshots.step()


def saved(bench):
    """Names of the local saves."""
    return bench.exchange.saved(bench.who)


def facts(bench, name):
    """What is known of a snapshot."""
    return json.loads((bench.exchange.checkpoints / f"{name}.snapshot.json").read_bytes())


def answer(bench):
    """What snapshot.done says."""
    return json.loads(bench.exchange.snapshot_done.read_bytes())


def test_a_periodic_snapshot(trained):
    """Due after a minute, quiet for five seconds, named by the training's step."""
    bench = trained()
    put(bench.ck, {"model.pt": b"weights"})
    bench.wrapper_says(progress={"step": 40, "epoch": 1, "samples": 640})

    run(bench, 59)
    assert saved(bench) == []
    run(bench, 7)

    assert saved(bench) == ["g1-step-00000040-a2"]
    assert (bench.exchange.checkpoints / "g1-step-00000040-a2/model.pt").read_bytes() == b"weights"
    assert facts(bench, "g1-step-00000040-a2") == {
        "schema": "1.0", "step": 40, "epoch": 1, "samples": 640, "save_s": 0.0,
    }  # fmt: skip


def test_a_snapshot_claims_no_step_that_was_made_after_its_save(trained):
    """Saved at step 40, copied at step 50 when it is due and quiet: it holds step 40."""
    bench = trained(every={"seconds": 60})
    run(bench, 30)
    bench.wrapper_says(progress={"step": 40})
    put(bench.ck, {"model.pt": b"weights"})
    run(bench, 3)
    bench.wrapper_says(progress={"step": 50})

    run(bench, 30)

    assert saved(bench) == ["g1-step-00000040-a2"]


def test_nothing_new_is_not_copied_twice(trained):
    """A hundred seconds without a change after a snapshot: still one, also after the courier was killed."""
    bench = trained()
    put(bench.ck, {"model.pt": b"weights"})
    run(bench, 66)
    name = saved(bench)[0]
    bench.exchange.done(name).touch()

    run(bench, 100)
    bench.snapshots = Snapshots(bench.restarted(), {"seconds": 60})
    run(bench, 100)

    assert saved(bench) == []


def test_by_steps_and_by_epochs(trained):
    """``100 steps`` and ``2 epochs`` count what the training reports since the last one."""
    bench = trained(every={"steps": 100})
    put(bench.ck, {"model.pt": b"1"})
    bench.wrapper_says(progress={"step": 99})
    run(bench, 20)
    assert saved(bench) == []
    bench.wrapper_says(progress={"step": 100})
    run(bench, 7)
    assert saved(bench) == ["g1-step-00000099-a2"]

    bench = trained(every={"epochs": 2}, attempt=3)
    put(bench.ck, {"model.pt": b"22"})
    bench.wrapper_says(progress={"epoch": 1, "step": 107})
    run(bench, 20)
    assert saved(bench) == []
    bench.wrapper_says(progress={"epoch": 2, "step": 114})
    run(bench, 7)
    assert saved(bench) == ["g1-step-00000107-a3"]


def test_a_slow_writer_is_waited_for(trained):
    """It appends every three seconds for a minute; the snapshot comes five quiet seconds later, whole."""
    bench = trained(every={"seconds": 1})
    path = bench.ck / "model.bin"
    for count in range(20):
        path.write_bytes(b"x" * (count + 1))
        run(bench, 3)
        assert saved(bench) == []

    run(bench, 6)

    assert (bench.exchange.checkpoints / saved(bench)[0] / "model.bin").read_bytes() == b"x" * 20


def test_a_zip_that_stopped_growing_is_not_a_checkpoint(trained):
    """The writer hangs in the middle of ``torch.save``: quiet, and torn all the same."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"model.pt": ZIP[:-9]})

    run(bench, 60)
    assert saved(bench) == []
    assert bench.site.messages.text() == "no snapshot: incomplete: model.pt: zip without its end"

    put(bench.ck, {"model.pt": ZIP})
    run(bench, 7)
    assert len(saved(bench)) == 1
    assert bench.site.messages.text() == ""


def test_without_steps_the_names_count_up(trained):
    """Code that reports no step: names grow from the one restored, and the facts claim no step."""
    bench = trained(every={"seconds": 1})
    bench.wrapper_says()
    bench.site.memory.update(name_step=7)

    names = []
    for count in range(2):
        put(bench.ck, {"model.pt": b"%d" % count})
        (bench.ck / "model.pt").touch()
        run(bench, 8)
        names.append(saved(bench)[-1])
        bench.exchange.done(names[-1]).touch()

    assert names == ["g1-step-00000008-a2", "g1-step-00000009-a2"]
    assert facts(bench, names[0])["step"] is None


def test_a_known_layout_says_its_own_step(trained):
    """The training is at step 13, what is saved is of step 10."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"checkpoint-10/trainer_state.json": STATE})
    bench.wrapper_says(progress={"step": 13, "epoch": 1, "samples": 99})

    run(bench, 7)

    assert saved(bench) == ["g1-step-00000010-a2"]
    assert (facts(bench, saved(bench)[0])["step"], facts(bench, saved(bench)[0])["samples"]) == (10, None)


def test_two_states_at_one_step_never_share_a_name(trained):
    """The training saved again without a new step: the first snapshot stays as it was."""
    bench = trained(every={"seconds": 1})
    bench.wrapper_says(progress={"step": 5})
    for data in (b"1", b"22"):
        put(bench.ck, {"model.pt": data})
        run(bench, 8)
        bench.exchange.done(saved(bench)[0]).touch()

    names = sorted(path.name for path in bench.exchange.checkpoints.iterdir() if path.is_dir())
    assert names == ["g1-step-00000005-a2", "g1-step-00000006-a2"]
    assert facts(bench, names[1])["step"] == 5


def test_no_second_snapshot_while_the_first_goes_up(trained):
    """A slow store does not fill the disk with copies."""
    bench = trained(every={"seconds": 1})
    for count in range(3):
        put(bench.ck, {"model.pt": b"x" * (count + 1)})
        run(bench, 8)

    assert len(saved(bench)) == 1


def test_asked_to_leave_it_copies_what_is_new_and_answers(trained):
    """The wrapper waits for the answer before it sends SIGTERM."""
    bench = trained()
    put(bench.ck, {"model.pt": b"1"})
    bench.wrapper_says(progress={"step": 3})
    bench.heard(sequence=9, action="leave")

    run(bench, 5)
    assert not bench.exchange.snapshot_done.exists()
    run(bench, 1)

    assert answer(bench) == {"schema": "1.0", "sequence": 9, "taken": True, "name": "g1-step-00000003-a2"}


def test_asked_with_nothing_new_it_answers_at_once(trained):
    """The training need not wait for a copy of what is there already."""
    bench = trained()
    bench.heard(sequence=9, action="leave")

    run(bench, 1)

    assert answer(bench) == {"schema": "1.0", "sequence": 9, "taken": False, "name": None}


def test_asked_at_an_epoch_it_waits_for_the_next_save(trained):
    """Such code's own save is its boundary: what lies there now is older than need be."""
    bench = trained()
    put(bench.ck, {"model.pt": b"old"})
    bench.heard(sequence=9, action="leave", align="epoch", align_timeout_s=600)
    run(bench, 100)
    assert not bench.exchange.snapshot_done.exists()

    put(bench.ck, {"model.pt": b"fresh"})
    run(bench, 7)

    assert answer(bench)["taken"]
    assert (bench.exchange.checkpoints / answer(bench)["name"] / "model.pt").read_bytes() == b"fresh"


def test_asked_at_an_epoch_that_never_comes_it_takes_what_is_there(trained):
    """After align_timeout."""
    bench = trained()
    put(bench.ck, {"model.pt": b"old"})
    bench.heard(sequence=9, action="leave", align="epoch", align_timeout_s=60)

    run(bench, 62)

    assert answer(bench)["taken"]


def test_a_tree_that_is_never_quiet_does_not_hold_up_a_leave(trained):
    """After the grace it answers without one, and says why."""
    bench = trained()
    bench.heard(sequence=9, action="leave", grace_s=30)
    for count in range(40):
        (bench.ck / "log").write_bytes(b"x" * (count + 1))
        run(bench, 1)

    assert answer(bench)["taken"] is False
    assert "was not quiet for 5 s" in bench.site.messages.text()


def test_a_checkpoint_that_is_asked_for_is_taken_and_answered_once(trained):
    """``checkpoint``: save now and go on."""
    bench = trained()
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=4, action="checkpoint")
    run(bench, 7)
    first = answer(bench)
    bench.exchange.done(first["name"]).touch()
    put(bench.ck, {"model.pt": b"22"})

    run(bench, 30)

    assert first["taken"]
    assert saved(bench) == []


def test_code_that_saves_by_itself_is_left_alone(trained):
    """Session saves: no copies, and an ask is answered at once."""
    bench = trained(every={"seconds": 1})
    (bench.exchange.root / "progress").mkdir()
    (bench.exchange.root / "progress/rank-0.json").write_text(
        '{"schema":"1.0","cooperates":true,"saves":true}'
    )
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=2, action="leave")

    run(bench, 20)

    assert saved(bench) == []
    assert answer(bench)["sequence"] == 2


def test_code_that_only_reports_is_copied(trained):
    """A Session that never saves does not protect anything."""
    bench = trained(every={"seconds": 1})
    (bench.exchange.root / "progress").mkdir()
    (bench.exchange.root / "progress/rank-0.json").write_text('{"schema":"1.0","cooperates":true}')
    put(bench.ck, {"model.pt": b"1"})

    run(bench, 8)

    assert len(saved(bench)) == 1


def test_other_nodes_copy_nothing(trained):
    """Node 0's folder is the checkpoint; the others only answer."""
    bench = trained(every={"seconds": 1}, node=1, nodes=2)
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=2, action="leave")

    run(bench, 20)

    assert saved(bench) == []
    assert answer(bench)["sequence"] == 2


# -- the last one


def end(bench, *, age_s, **ended):
    """The command ends *age_s* seconds after the last write."""
    newest = max(path.stat().st_mtime for path in bench.ck.rglob("*") if path.is_file())
    bench.wrapper_says(ended=ended, progress={"step": 8})
    os.utime(bench.exchange.wrapper, (newest + age_s,) * 2)
    run(bench, 1)


@pytest.mark.parametrize(
    ("age_s", "ended", "is_taken"),
    [
        (0, {"exit_code": 0, "reason": "succeeded"}, True),
        (6, {"signal": 9, "reason": "killed"}, True),
        (4, {"signal": 9, "reason": "killed"}, False),
        (4, {"exit_code": 1, "reason": "failed"}, False),
        (4, {"signal": 15, "reason": "left"}, False),
        (6, {"exit_code": 1, "reason": "failed"}, True),
    ],
)
def test_the_last_snapshot_is_of_a_writer_that_was_done(trained, age_s, ended, is_taken):
    """A command that was killed within five seconds of a write may have been in the middle of it."""
    bench = trained()
    put(bench.ck, {"model.bin": b"1"})

    end(bench, age_s=age_s, **ended)

    assert bool(saved(bench)) is is_taken
    assert ("before the command died" in bench.site.messages.text()) is not is_taken
    assert bench.state.is_final_snapshot_done


def test_the_last_snapshot_takes_no_room(trained, monkeypatch):
    """Nobody writes any more: the files are linked, however full the disk is."""
    bench = trained()
    put(bench.ck, {"model.bin": b"1"})
    monkeypatch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))

    end(bench, age_s=0, exit_code=0, reason="succeeded")

    name = saved(bench)[0]
    assert (bench.exchange.checkpoints / name / "model.bin").stat().st_ino == (
        bench.ck / "model.bin"
    ).stat().st_ino


def test_a_folder_that_is_none_any_more_holds_no_end(trained):
    """The training laid a file in its place: a minute later the attempt ends without a last snapshot."""
    bench = trained()
    bench.ck.rmdir()
    bench.ck.write_bytes(b"weights")
    run(bench, 5)
    assert "no snapshot: " in bench.site.messages.text()
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})

    run(bench, 50)
    assert not bench.state.is_final_snapshot_done
    run(bench, 10)

    assert bench.state.is_final_snapshot_done


def test_a_folder_that_can_be_read_again_is_copied_at_the_end(trained):
    """What cannot be read for a moment is not given up."""
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
    """And kills no courier."""
    bench = trained()
    bench.ck.rmdir()
    bench.ck.symlink_to(bench.ck.name)

    run(bench, 2)

    assert "no snapshot: " in bench.site.messages.text()


def test_a_writer_killed_in_the_middle_of_a_save(trained):
    """Step 20 is half written when the machine's out-of-memory killer comes; step 10 is what counts."""
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
    folder = bench.exchange.checkpoints / "g1-step-00000010-a2"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10"]


def test_a_file_torn_by_a_kill_long_ago_is_found(trained):
    """Quiet for a minute, then the command dies: the zip still has no end."""
    bench = trained()
    put(bench.ck, {"model.pt": ZIP[:-9]})

    end(bench, age_s=60, signal=9, reason="killed")

    assert saved(bench) == []
    assert "zip without its end" in bench.site.messages.text()
    assert bench.state.is_final_snapshot_done


# -- a full disk


def test_a_full_disk_costs_a_snapshot_and_nothing_else(trained, monkeypatch):
    """No half copy is left, the reason is said, and the next one works."""
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
        assert bench.site.messages.text() == "no snapshot: [Errno 28] No space left on device"
        assert list(bench.exchange.checkpoints.iterdir()) == []

    run(bench, 8)
    assert len(saved(bench)) == 1
    assert bench.site.messages.text() == ""


def test_a_disk_that_would_be_full_is_left_to_the_training(trained, monkeypatch):
    """A copy that leaves less than a twentieth of the disk free is not begun."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"a": b"x" * 100})

    class Room:
        f_frsize, f_blocks, f_bavail = 1, 2000, 199

    monkeypatch.setattr(layouts.os, "statvfs", lambda _: Room)
    run(bench, 8)

    assert saved(bench) == []
    expected = (
        "no snapshot: disk full: a snapshot takes 100 bytes, 199 are free and 100 are left to the training"
    )
    assert bench.site.messages.text() == expected
