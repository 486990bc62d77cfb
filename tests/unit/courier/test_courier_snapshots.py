"""Checkpoints of code that knows nothing of us: when they are taken, and that they are whole."""

import errno
import json
import os

import pytest
from fakes.checkpoint_files import STATE, ZIP, put, safetensors

from envscaler_airflow.courier import copying
from envscaler_airflow.courier.snapshots import Snapshots
from envscaler_airflow.store.root import Root

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
    assert bench.site.messages.text() == (
        f"no checkpoint after its interval of 1 s: {bench.ck}: waits for model.pt (zip without its end)"
    )

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
    assert "no snapshot: log: changed less than 5 s ago" in bench.site.messages.text()


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
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))

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

    monkeypatch.setattr(copying.os, "statvfs", lambda _: Room)
    run(bench, 8)

    assert saved(bench) == []
    expected = (
        "no snapshot: disk full: a snapshot takes 100 bytes, 199 are free and 100 are left to the training"
    )
    assert bench.site.messages.text() == expected


# -- saved all the time, logs, links, silence


def notice(bench):
    """What the training's log is to say; None when nothing."""
    body = bench.exchange.read_json(bench.exchange.root / "notice.json")
    return body and body["text"]


def replace_with(bench, **files):
    """Save each file under another name and rename it."""
    for name, data in files.items():
        (bench.ck / f"{name}.tmp").write_bytes(data)
        (bench.ck / f"{name}.tmp").replace(bench.ck / name)


def test_saves_that_are_renamed_every_two_seconds_are_kept(trained):
    """Never quiet for five: ten seconds after it was due one instant is taken (C21)."""
    bench = trained(every={"seconds": 5})
    for count in range(10):
        replace_with(bench, weights=b"w%d" % count, meta=b"m%d" % count)
        run(bench, 2)

    folder = bench.exchange.checkpoints / saved(bench)[0]
    assert (folder / "weights").read_bytes()[1:] == (folder / "meta").read_bytes()[1:]


def test_a_log_in_the_folder_holds_up_no_snapshot(trained):
    """It is left out, and the next snapshot is not taken for its sake alone (C2)."""
    bench = trained(every={"seconds": 5})
    for count in range(30):
        (bench.ck / "progress").write_bytes(b"x" * (count + 1))
        if count == 8:
            replace_with(bench, ckpt=b"saved")
        run(bench, 1)

    names = saved(bench)
    assert len(names) == 1
    assert [path.name for path in (bench.exchange.checkpoints / names[0]).iterdir()] == ["ckpt"]
    assert bench.site.messages.text() == "left out of the snapshot: progress: written all the time"


def test_a_command_killed_while_it_logs_leaves_its_last_save(trained):
    """The log was written to the end, the checkpoint was not (C2)."""
    bench = trained()
    replace_with(bench, ckpt=b"saved")
    for count in range(10):
        (bench.ck / "log.txt").write_bytes(b"x" * (count + 1))
        run(bench, 1)
    os.utime(bench.ck / "ckpt", (0, 0))

    end(bench, age_s=0, signal=9, reason="killed")

    assert [path.name for path in (bench.exchange.checkpoints / saved(bench)[0]).iterdir()] == ["ckpt"]


def test_links_go_into_the_facts_and_not_into_the_copy(trained):
    """The manifest has them; the store has none (C)."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"step_20/w.bin": b"1"})
    (bench.ck / "latest").symlink_to("step_20")

    run(bench, 8)

    name = saved(bench)[0]
    assert facts(bench, name)["links"] == {"latest": "step_20"}
    assert [path.name for path in (bench.exchange.checkpoints / name).iterdir()] == ["step_20"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "holds no files; does the training save there?"),
        ({"model.pt": ZIP[:-9]}, "waits for model.pt (zip without its end)"),
        ({"model.pt.tmp": b"x"}, "waits for model.pt.tmp (a temporary name)"),
        (
            {"checkpoint-5/training_args.bin": b"x"},
            "waits for checkpoint-5 (its saver has not finished it)",
        ),
    ],
)
def test_a_stage_that_saves_nothing_says_so(trained, files, reason):
    """After its interval and half of it: in the status and for the log, with the files and why (C)."""
    bench = trained(every={"seconds": 60})
    put(bench.ck, files)

    run(bench, 89)
    assert (bench.site.messages.text(), notice(bench)) == ("", None)
    run(bench, 2)

    expected = f"no checkpoint after its interval of 60 s: {bench.ck}: {reason}"
    assert (bench.site.messages.text(), notice(bench)) == (expected, expected)


def test_what_is_saved_after_all_takes_the_words_back(trained):
    """And a training that saves nothing more says so again (C)."""
    bench = trained(every={"seconds": 60})
    run(bench, 100)
    put(bench.ck, {"model.bin": b"1"})
    run(bench, 7)
    assert (bench.site.messages.text(), notice(bench)) == ("", None)

    bench.exchange.done(saved(bench)[0]).touch()
    run(bench, 100)

    assert notice(bench).endswith(f"{bench.ck}: nothing new since the last one (model.bin)")


def test_steps_that_nobody_reports_are_named(trained):
    """``100 steps`` cannot be counted (C)."""
    bench = trained(every={"steps": 100})
    bench.wrapper_says()

    run(bench, 902)

    assert notice(bench).startswith("no checkpoint after its interval (100 steps, and no step is reported): ")


@pytest.mark.parametrize("saves", [True, False])
def test_code_that_saves_by_itself_or_not_at_all_says_so_too(make_bench, saves):
    """No folder to look at (C)."""
    bench = make_bench()
    bench.site.memory.update(is_laid_out=True, start_step=0)
    bench.wrapper_says(progress={"step": 0})
    if saves:
        (bench.exchange.root / "progress").mkdir()
        (bench.exchange.root / "progress/rank-0.json").write_text('{"schema":"1.0","saves":true}')
    bench.snapshots = Snapshots(bench.site, {"seconds": 60})

    run(bench, 100)

    assert notice(bench).startswith("no checkpoint after its interval of 60 s: the training")
    assert ("the training's Session has saved nothing" in notice(bench)) is saves


def test_a_stage_without_checkpoints_is_not_reproached(make_bench):
    """Neither an interval nor a path (C)."""
    bench = make_bench()
    bench.site.memory.update(is_laid_out=True, start_step=0)
    bench.wrapper_says()
    bench.snapshots = Snapshots(bench.site, None)

    run(bench, 2000)

    assert (bench.site.messages.text(), notice(bench)) == ("", None)
