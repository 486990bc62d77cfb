"""A stage that has saved nothing after its interval reports that."""

import pytest
from fakes.checkpoint_files import ZIP, put
from fakes.snapshots import notice, run, saved

from envscaler_airflow.sidecar.snapshots import Snapshots


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no files; does the training save there?"),
        ({"model.pt": ZIP[:-9]}, "waits for model.pt (zip without its end)"),
        ({"model.pt.tmp": b"x"}, "waits for model.pt.tmp (a temporary name)"),
        (
            {"checkpoint-5/training_args.bin": b"x"},
            "waits for checkpoint-5 (its saver has not finished it)",
        ),
    ],
)
def test_a_stage_that_saves_nothing_says_so(trained, files, reason):
    """After one and a half intervals: in the status and for the log, with the files and the reason (C)."""
    bench = trained(every={"seconds": 60})
    put(bench.ck, files)

    run(bench, 89)
    assert (bench.context.messages.text(), notice(bench)) == ("", None)
    run(bench, 2)

    expected = f"no checkpoint after its interval of 60 s: {bench.ck}: {reason}"
    assert (bench.context.messages.text(), notice(bench)) == (expected, expected)


def test_what_is_saved_after_all_takes_the_words_back(trained):
    """A training that later stops saving reports it again (C)."""
    bench = trained(every={"seconds": 60})
    run(bench, 100)
    put(bench.ck, {"model.bin": b"1"})
    run(bench, 7)
    assert (bench.context.messages.text(), notice(bench)) == ("", None)

    bench.spool.done(saved(bench)[0]).touch()
    run(bench, 100)

    assert notice(bench).endswith(f"{bench.ck}: nothing new since the last one (model.bin)")


def test_steps_that_nobody_reports_are_named(trained):
    """The sidecar cannot count ``100 steps`` (C)."""
    bench = trained(every={"steps": 100})
    bench.wrapper_says()

    run(bench, 902)

    assert notice(bench).startswith("no checkpoint after its interval (100 steps, and no step is reported): ")


@pytest.mark.parametrize("saves", [True, False])
def test_code_that_saves_by_itself_or_not_at_all_says_so_too(make_bench, saves):
    """It has no folder to check (C)."""
    bench = make_bench()
    bench.context.memory.update(is_laid_out=True, start_step=0)
    bench.wrapper_says(progress={"step": 0})
    if saves:
        (bench.spool.root / "progress").mkdir()
        (bench.spool.root / "progress/rank-0.json").write_text('{"schema":"2.0","saves":true}')
    bench.snapshots = Snapshots(bench.context, {"seconds": 60})

    run(bench, 100)

    assert notice(bench).startswith("no checkpoint after its interval of 60 s: the training")
    says = (
        "Session has saved nothing in that time; it saves at the next checkpoint(), with align: epoch at the"
    )
    assert (says in notice(bench)) is saves


def test_a_stage_without_checkpoints_is_not_reproached(make_bench):
    """Neither an interval nor a path (C)."""
    bench = make_bench()
    bench.context.memory.update(is_laid_out=True, start_step=0)
    bench.wrapper_says()
    bench.snapshots = Snapshots(bench.context, None)

    run(bench, 2000)

    assert (bench.context.messages.text(), notice(bench)) == ("", None)
