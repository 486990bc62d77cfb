"""Checkpoints of code that does not use the library: when they are taken, and that they are complete."""

import os

from fakes.checkpoint_files import STATE, ZIP, put
from fakes.snapshots import end, facts, replace_with, run, saved

from envscaler_airflow.sidecar.snapshots import Snapshots


def test_a_periodic_snapshot(trained):
    """Due after a minute, quiet for five seconds, named by the training's step."""
    bench = trained()
    put(bench.ck, {"model.pt": b"weights"})
    bench.wrapper_says(progress={"step": 40, "epoch": 1, "samples": 640})

    run(bench, 59)
    assert saved(bench) == []
    run(bench, 7)

    assert saved(bench) == ["g1-step-00000040-a2"]
    assert (bench.spool.checkpoints / "g1-step-00000040-a2/model.pt").read_bytes() == b"weights"
    assert facts(bench, "g1-step-00000040-a2") == {
        "schema": "2.0", "step": 40, "epoch": 1, "samples": 640, "save_s": 0.0,
    }  # fmt: skip


def test_a_snapshot_claims_no_step_that_was_made_after_its_save(trained):
    """Saved at step 40, copied at step 50 when it is due and quiet: its step is 40."""
    bench = trained(every={"seconds": 60})
    run(bench, 30)
    bench.wrapper_says(progress={"step": 40})
    put(bench.ck, {"model.pt": b"weights"})
    run(bench, 3)
    bench.wrapper_says(progress={"step": 50})

    run(bench, 30)

    assert saved(bench) == ["g1-step-00000040-a2"]


def test_nothing_new_is_not_copied_twice(trained):
    """A hundred seconds without a change after a snapshot: still one, also after the sidecar was killed."""
    bench = trained()
    put(bench.ck, {"model.pt": b"weights"})
    run(bench, 66)
    name = saved(bench)[0]
    bench.spool.done(name).touch()

    run(bench, 100)
    bench.snapshots = Snapshots(bench.restarted(), {"seconds": 60})
    run(bench, 100)

    assert saved(bench) == []


def test_by_steps_and_by_epochs(trained):
    """``100 steps`` and ``2 epochs`` count what the training has reported since the last snapshot."""
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
    """It appends every three seconds for a minute; the complete snapshot follows five seconds later."""
    bench = trained(every={"seconds": 1})
    path = bench.ck / "model.bin"
    for count in range(20):
        path.write_bytes(b"x" * (count + 1))
        run(bench, 3)
        assert saved(bench) == []

    run(bench, 6)

    assert (bench.spool.checkpoints / saved(bench)[0] / "model.bin").read_bytes() == b"x" * 20


def test_a_zip_that_stopped_growing_is_not_a_checkpoint(trained):
    """The writer hangs in the middle of ``torch.save``: quiet, but torn."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"model.pt": ZIP[:-9]})

    run(bench, 60)
    assert saved(bench) == []
    assert bench.context.messages.text() == (
        f"no checkpoint after its interval of 1 s: {bench.ck}: waits for model.pt (zip without its end)"
    )

    put(bench.ck, {"model.pt": ZIP})
    run(bench, 7)
    assert len(saved(bench)) == 1
    assert bench.context.messages.text() == ""


def test_without_steps_the_names_count_up(trained):
    """Code that reports no step: names count up from the restored one, and the facts claim no step."""
    bench = trained(every={"seconds": 1})
    bench.wrapper_says()
    bench.context.memory.update(name_step=7)

    names = []
    for count in range(2):
        put(bench.ck, {"model.pt": b"%d" % count})
        (bench.ck / "model.pt").touch()
        run(bench, 8)
        names.append(saved(bench)[-1])
        bench.spool.done(names[-1]).touch()

    assert names == ["g1-step-00000008-a2", "g1-step-00000009-a2"]
    assert facts(bench, names[0])["step"] is None


def test_a_known_layout_says_its_own_step(trained):
    """The training is at step 13, the save is of step 10."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"checkpoint-10/trainer_state.json": STATE})
    bench.wrapper_says(progress={"step": 13, "epoch": 1, "samples": 99})

    run(bench, 7)

    assert saved(bench) == ["g1-step-00000010-a2"]
    assert (facts(bench, saved(bench)[0])["step"], facts(bench, saved(bench)[0])["samples"]) == (10, None)


def test_two_states_at_one_step_never_share_a_name(trained):
    """The training saved again without a new step: the first snapshot stays unchanged."""
    bench = trained(every={"seconds": 1})
    bench.wrapper_says(progress={"step": 5})
    for data in (b"1", b"22"):
        put(bench.ck, {"model.pt": data})
        run(bench, 8)
        bench.spool.done(saved(bench)[0]).touch()

    names = sorted(path.name for path in bench.spool.checkpoints.iterdir() if path.is_dir())
    assert names == ["g1-step-00000005-a2", "g1-step-00000006-a2"]
    assert facts(bench, names[1])["step"] == 5


def test_no_second_snapshot_while_the_first_goes_up(trained):
    """A slow store does not let copies fill the disk."""
    bench = trained(every={"seconds": 1})
    for count in range(3):
        put(bench.ck, {"model.pt": b"x" * (count + 1)})
        run(bench, 8)

    assert len(saved(bench)) == 1


def test_saves_that_are_renamed_every_two_seconds_are_kept(trained):
    """Never quiet for five seconds: a consistent copy follows ten seconds after it was due (C21)."""
    bench = trained(every={"seconds": 5})
    for count in range(10):
        replace_with(bench, weights=b"w%d" % count, meta=b"m%d" % count)
        run(bench, 2)

    folder = bench.spool.checkpoints / saved(bench)[0]
    assert (folder / "weights").read_bytes()[1:] == (folder / "meta").read_bytes()[1:]


def test_a_log_in_the_folder_holds_up_no_snapshot(trained):
    """It is excluded, and does not trigger the next snapshot by itself (C2)."""
    bench = trained(every={"seconds": 5})
    for count in range(30):
        (bench.ck / "progress").write_bytes(b"x" * (count + 1))
        if count == 8:
            replace_with(bench, ckpt=b"saved")
        run(bench, 1)

    names = saved(bench)
    assert len(names) == 1
    assert [path.name for path in (bench.spool.checkpoints / names[0]).iterdir()] == ["ckpt"]
    assert bench.context.messages.text() == "left out of the snapshot: progress: written all the time"


def test_a_command_killed_while_it_logs_leaves_its_last_save(trained):
    """The log was written to the end, the checkpoint was not (C2)."""
    bench = trained()
    replace_with(bench, ckpt=b"saved")
    for count in range(10):
        (bench.ck / "log.txt").write_bytes(b"x" * (count + 1))
        run(bench, 1)
    os.utime(bench.ck / "ckpt", (0, 0))

    end(bench, age_s=0, signal=9, reason="killed")

    assert [path.name for path in (bench.spool.checkpoints / saved(bench)[0]).iterdir()] == ["ckpt"]


def test_links_go_into_the_facts_and_not_into_the_copy(trained):
    """The manifest lists them; the store has none (C)."""
    bench = trained(every={"seconds": 1})
    put(bench.ck, {"step_20/w.bin": b"1"})
    (bench.ck / "latest").symlink_to("step_20")

    run(bench, 8)

    name = saved(bench)[0]
    assert facts(bench, name)["links"] == {"latest": "step_20"}
    assert [path.name for path in (bench.spool.checkpoints / name).iterdir()] == ["step_20"]
