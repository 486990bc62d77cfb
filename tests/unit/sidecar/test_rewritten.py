"""Saves that a library writes over the previous one, in the same place, all the time."""

import pickle

import pytest
from fakes.checkpoint_files import hdf5, put
from fakes.snapshots import end, notice, replace_with, run, saved


def test_saves_that_are_written_anew_in_place_every_second_are_kept(trained):
    """As joblib and Keras' BackupAndRestore do: a closed file counts when the save is overdue (C21)."""
    bench = trained(every={"seconds": 5})
    for count in range(20):
        (bench.ck / "model.joblib").write_bytes(b"%03d" % count + b"w" * 2000)
        run(bench, 1)

    name = saved(bench)[0]
    assert (bench.spool.checkpoints / name / "model.joblib").read_bytes()[3:] == b"w" * 2000


def test_a_save_that_is_being_written_in_place_is_not_copied(trained):
    """Its writer has it open at each check (C21)."""
    bench = trained(every={"seconds": 5})
    for count in range(20):
        with (bench.ck / "model.joblib").open("wb") as file:
            file.write(b"%03d" % count + b"w" * 1000)
            file.flush()
            run(bench, 1)
            file.write(b"w" * 1000)

    assert saved(bench) == []
    assert "model.joblib (changed less than 5 s ago)" in notice(bench)


def test_a_kill_leaves_the_newest_save_whose_format_says_where_it_ends(trained):
    """Both were written a moment before; HDF5 and JSON files show whether they are complete (C21)."""
    bench = trained()
    put(bench.ck, {"latest.weights.h5": hdf5(100), "meta.json": b'{"epoch": 7}'})

    end(bench, age_s=0, signal=9, reason="killed")

    names = sorted(path.name for path in (bench.spool.checkpoints / saved(bench)[0]).iterdir())
    assert names == ["latest.weights.h5", "meta.json"]


def test_a_counter_that_is_kept_open_holds_up_no_snapshot(trained):
    """Rewritten from its first byte each time and never closed: not a save (C2)."""
    bench = trained(every={"seconds": 5})
    with (bench.ck / "counter").open("wb") as counter:
        for count in range(30):
            counter.seek(0)
            counter.write(b"%03d" % count)
            counter.flush()
            if count == 8:
                replace_with(bench, ckpt=b"saved")
            run(bench, 1)

    names = [path.name for path in (bench.spool.checkpoints / saved(bench)[0]).iterdir()]
    assert names == ["ckpt"]


@pytest.mark.parametrize(
    "files",
    [
        {"latest.weights.h5": hdf5(100, claimed=2048), "meta.json": b'{"epoch": 7}'},
        {"latest.weights.h5": hdf5(100), "meta.json": b'{"epo'},
        {"latest.weights.h5": hdf5(100)[:9], "meta.json": b'{"epoch": 7}'},
        {"model.pkl": pickle.dumps({"epoch": 7})[:-1]},
    ],
)
def test_a_kill_within_a_save_leaves_nothing_of_it(trained, files):
    """A restore of half a save would be wrong (C21)."""
    bench = trained()
    put(bench.ck, files)

    end(bench, age_s=0, signal=9, reason="killed")

    assert saved(bench) == []
