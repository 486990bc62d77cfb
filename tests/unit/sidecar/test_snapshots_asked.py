"""Checkpoints of code that does not use the library: on the owner's request, and when none is taken."""

from fakes.checkpoint_files import put
from fakes.snapshots import answer, run, saved


def test_asked_to_leave_it_copies_what_is_new_and_answers(trained):
    """The wrapper waits for the answer before it sends SIGTERM."""
    bench = trained()
    put(bench.ck, {"model.pt": b"1"})
    bench.wrapper_says(progress={"step": 3})
    bench.heard(sequence=9, action="drain")

    run(bench, 5)
    assert not bench.spool.snapshot.exists()
    run(bench, 1)

    assert answer(bench) == {"schema": "2.0", "sequence": 9, "taken": True, "name": "g1-step-00000003-a2"}


def test_asked_with_nothing_new_it_answers_at_once(trained):
    """The training need not wait for a copy that already exists."""
    bench = trained()
    bench.heard(sequence=9, action="drain")

    run(bench, 1)

    assert answer(bench) == {"schema": "2.0", "sequence": 9, "taken": False, "name": None}


def test_asked_at_an_epoch_it_waits_for_the_next_save(trained):
    """A save by such code marks the boundary: the existing one is older than necessary."""
    bench = trained()
    put(bench.ck, {"model.pt": b"old"})
    bench.heard(sequence=9, action="drain", align="epoch", align_timeout_s=600)
    run(bench, 100)
    assert not bench.spool.snapshot.exists()

    put(bench.ck, {"model.pt": b"fresh"})
    run(bench, 7)

    assert answer(bench)["taken"]
    assert (bench.spool.checkpoints / answer(bench)["name"] / "model.pt").read_bytes() == b"fresh"


def test_asked_at_an_epoch_that_never_comes_it_takes_what_is_there(trained):
    """After align_timeout."""
    bench = trained()
    put(bench.ck, {"model.pt": b"old"})
    bench.heard(sequence=9, action="drain", align="epoch", align_timeout_s=60)

    run(bench, 62)

    assert answer(bench)["taken"]


def test_a_tree_that_is_never_quiet_does_not_hold_up_a_leave(trained):
    """After the grace it answers without a snapshot, and reports the reason."""
    bench = trained()
    bench.heard(sequence=9, action="drain", grace_s=30)
    for count in range(40):
        (bench.ck / "log").write_bytes(b"x" * (count + 1))
        run(bench, 1)

    assert answer(bench)["taken"] is False
    assert "no snapshot: log: changed less than 5 s ago" in bench.context.messages.text()


def test_a_checkpoint_that_is_asked_for_is_taken_and_answered_once(trained):
    """``checkpoint``: save now and continue."""
    bench = trained()
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=4, action="checkpoint")
    run(bench, 7)
    first = answer(bench)
    bench.spool.done(first["name"]).touch()
    put(bench.ck, {"model.pt": b"22"})

    run(bench, 30)

    assert first["taken"]
    assert saved(bench) == []


def test_code_that_saves_by_itself_is_left_alone(trained):
    """Session saves: no copies, and a request is answered at once."""
    bench = trained(every={"seconds": 1})
    (bench.spool.root / "progress").mkdir()
    (bench.spool.root / "progress/rank-0.json").write_text('{"schema":"2.0","cooperates":true,"saves":true}')
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=2, action="drain")

    run(bench, 20)

    assert saved(bench) == []
    assert answer(bench)["sequence"] == 2


def test_code_that_only_reports_is_copied(trained):
    """A Session that never saves protects nothing."""
    bench = trained(every={"seconds": 1})
    (bench.spool.root / "progress").mkdir()
    (bench.spool.root / "progress/rank-0.json").write_text('{"schema":"2.0","cooperates":true}')
    put(bench.ck, {"model.pt": b"1"})

    run(bench, 8)

    assert len(saved(bench)) == 1


def test_other_nodes_copy_nothing(trained):
    """Node 0's folder is the checkpoint; the others only answer."""
    bench = trained(every={"seconds": 1}, node=1, nodes=2)
    put(bench.ck, {"model.pt": b"1"})
    bench.heard(sequence=2, action="drain")

    run(bench, 20)

    assert saved(bench) == []
    assert answer(bench)["sequence"] == 2
