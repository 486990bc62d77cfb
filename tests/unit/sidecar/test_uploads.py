"""Uploads of checkpoints: files first, manifest last, old ones pruned, other nodes awaited."""

import pytest

from envscaler_agent import saving
from envscaler_agent.protocol import Control, ManifestFile, Status, control_name, status_name
from envscaler_airflow.sidecar import spool_state
from envscaler_airflow.sidecar.context import WorkInterruptedError
from envscaler_airflow.sidecar.loop import compose
from envscaler_airflow.sidecar.restore import restore
from envscaler_airflow.sidecar.snapshots import snapshot_facts
from envscaler_airflow.sidecar.uploads import OTHERS_AT_END_S, OTHERS_S, Checkpoints, _merge
from envscaler_airflow.store import manifests
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_checkpoint
from envscaler_airflow.store.manifests import TreeFile
from envscaler_airflow.store.root import Root

NAME = "g1-step-00000300-a2"


MANIFEST = f"checkpoints/{NAME}/manifest-c1.json"


def test_files_first_then_the_manifest_then_done(bench, store):
    """The manifest has the facts from Session; agent.json is not uploaded."""
    bench.session_saves(
        NAME,
        {"model.bin": b"W", "rng/0.bin": b"R"},
        step=300,
        epoch=2,
        samples=9600,
        world_size=2,
        global_batch=32,
        save_s=1.5,
    )

    assert Checkpoints(bench.context, 3).step()

    part = f"checkpoints/{NAME}/n0-c1"
    assert sorted(store.puts[:2]) == [f"{part}/model.bin", f"{part}/rng/0.bin"]
    assert store.puts[2:] == [MANIFEST]
    manifest = read_checkpoint(store, NAME)
    assert [(item.path, item.size, item.node) for item in manifest.files] == [
        ("model.bin", 1, 0),
        ("rng/0.bin", 1, 0),
    ]
    assert (manifest.step, manifest.epoch, manifest.samples) == (300, 2, 9600)
    assert (manifest.world_size, manifest.global_batch, manifest.cooperative) == (2, 32, True)
    assert bench.spool.done(NAME).exists()
    state = bench.state
    assert (state.last_checkpoint, state.last_checkpoint_step, state.checkpoints, state.checkpoint_s) == (
        NAME,
        300,
        1,
        1.5,
    )


def test_the_newest_local_save_stays_until_the_next_is_done(bench):
    """A restart of the command on this machine may need it."""
    checkpoints = Checkpoints(bench.context, 3)
    bench.session_saves(NAME, step=300)
    checkpoints.step()
    assert (bench.spool.checkpoints / NAME / "model.bin").exists()

    bench.session_saves("g1-step-00000400-a2", step=400)
    checkpoints.step()

    assert not (bench.spool.checkpoints / NAME).exists()
    assert bench.spool.done(NAME).exists()
    assert bench.state.checkpoints == 2


def test_marks_of_old_checkpoints_are_removed(bench, monkeypatch):
    """Four checkpoints, two marks: the training never saves the first two again."""
    monkeypatch.setattr(spool_state, "MOST_DONE", 2)
    checkpoints = Checkpoints(bench.context, 3)
    names = [f"g1-step-00000{step}-a2" for step in (100, 200, 300, 400)]
    for number, name in enumerate(names, start=1):
        bench.session_saves(name, step=100 * number)
        checkpoints.step()

    assert [name for name in names if bench.spool.done(name).exists()] == names[2:]
    assert bench.state.checkpoints == 4


def test_a_save_made_again_without_its_mark_is_found_in_the_store(bench, store):
    """It is not uploaded a second time."""
    checkpoints = Checkpoints(bench.context, 3)
    bench.session_saves(NAME, step=300)
    checkpoints.step()
    bench.spool.remove(bench.spool.done(NAME))
    uploads = len(store.puts)

    assert checkpoints.step()

    assert len(store.puts) == uploads
    assert bench.spool.done(NAME).exists()


def test_a_save_that_is_going_on_is_not_touched(bench, store):
    """Session assembles it under another name; a writer that is killed there leaves no checkpoint."""
    folder = bench.session_saves(NAME, step=300)
    folder.rename(folder.with_name(f".saving-{NAME}"))

    assert Checkpoints(bench.context, 3).step()

    assert store.puts == []


@pytest.mark.parametrize("name", ["g1-step-00000300-a1", "g2-step-00000300-a2", "notes"])
def test_only_saves_of_this_attempt_go_up(bench, store, name):
    """Any other file there does not count as a checkpoint."""
    bench.session_saves(name, step=300)

    assert Checkpoints(bench.context, 3).step()

    assert store.puts == []


def test_a_sidecar_killed_in_the_middle_leaves_nothing_that_counts(bench, store):
    """One of two files is up, no manifest: not complete. The next sidecar finishes it."""
    bench.session_saves(NAME, {"a": b"1", "b": b"2"}, step=300)
    real = bench.context.between
    calls = []

    def cut():
        calls.append(1)
        if len(calls) == 2:
            raise WorkInterruptedError("killed")
        real()

    bench.context.__class__.between, before = lambda _: cut(), bench.context.__class__.between
    try:
        with pytest.raises(WorkInterruptedError):
            Checkpoints(bench.context, 3).step()
    finally:
        bench.context.__class__.between = before
    assert complete_checkpoints(store, 1) == ()

    assert Checkpoints(bench.restarted(), 3).step()
    assert complete_checkpoints(store, 1) == (NAME,)


def test_a_sidecar_killed_before_done_counts_once(bench, store):
    """The manifest was written and the mark was not: nothing is uploaded again."""
    bench.session_saves(NAME, step=300)
    Checkpoints(bench.context, 3).step()
    bench.spool.done(NAME).unlink()
    store.puts.clear()

    Checkpoints(bench.restarted(), 3).step()

    assert store.puts == []
    assert bench.spool.done(NAME).exists()
    assert bench.state.checkpoints == 1


def test_a_store_outage_keeps_the_save(bench, store):
    """It waits on the disk, the last good one stays, and it is uploaded later."""
    bench.in_store("g1-step-00000200-a2")
    bench.session_saves(NAME, step=300)
    bench.heard()
    checkpoints = Checkpoints(bench.context, 1)
    store.down = True
    assert not checkpoints.step()
    assert bench.context.messages.text() == f"checkpoint {NAME} waits: the store is down"
    store.down = False
    assert complete_checkpoints(store, 1) == ("g1-step-00000200-a2",)

    bench.clock.now += 60
    assert checkpoints.step()

    assert complete_checkpoints(store, 1) == (NAME, "g1-step-00000200-a2")
    assert bench.context.messages.text() == ""


def test_a_full_store_disk_keeps_the_last_good_one(bench, store):
    """ENOSPC while step 300 is uploaded: no manifest, step 200 stays, the status has the reason."""
    bench.in_store("g1-step-00000200-a2")
    bench.session_saves(NAME, step=300)

    def full(name, path):
        raise OSError(28, "No space left on device")

    store._store.put_file = full
    assert not Checkpoints(bench.context, 1).step()

    assert complete_checkpoints(store, 1) == ("g1-step-00000200-a2",)
    assert bench.context.messages.text() == f"checkpoint {NAME} waits: [Errno 28] No space left on device"


def test_a_save_that_cannot_be_kept_is_given_up_and_said(bench, store, tmp_path):
    """A link out of the folder: the training continues, and the previous checkpoint stays."""
    folder = bench.session_saves(NAME, step=300)
    (folder / "link").symlink_to(tmp_path)

    assert Checkpoints(bench.context, 3).step()

    assert f"checkpoint {NAME} is lost: " in bench.context.messages.text()
    assert bench.state.last_checkpoint is None


def test_saves_that_are_given_up_hold_back_no_later_ones(bench, store, tmp_path):
    """They block neither a Session, which skips saves while two others wait, nor space on the disk."""
    checkpoints = Checkpoints(bench.context, 3)
    for step in (100, 200, 300):
        name = f"g1-step-{step:08d}-a2"
        (bench.session_saves(name, step=step) / "link").symlink_to(tmp_path)
        checkpoints.step()

    assert saving.waiting(bench.spool.checkpoints) == []
    names = sorted(path.name for path in bench.spool.checkpoints.iterdir())
    assert [name for name in names if not name.endswith(".done")] == [NAME]
    assert Checkpoints(bench.context, 3).step()  # a restarted sidecar
    assert complete_checkpoints(store, 1) == ()


def test_a_snapshot_that_is_given_up_holds_back_no_later_ones(bench, tmp_path):
    """Later snapshots wait only while one is on its way."""
    folder = bench.session_saves(NAME)
    snapshot_facts(bench.spool, NAME).write_text("{}")
    (folder / "link").symlink_to(tmp_path)

    assert Checkpoints(bench.context, 3).step()

    assert bench.spool.saved(bench.who) == []


def test_old_ones_go_by_count(bench, store):
    """Keep two: the candidate of attempt 1 is deleted when attempt 2 has two of its own."""
    old = bench.in_store("g1-step-00000200-a1")
    bench.heard(candidates=(old,))
    checkpoints = Checkpoints(bench.context, 2)
    for step in (300, 400):
        bench.session_saves(f"g1-step-{step:08d}-a2", step=step)
        checkpoints.step()

    assert complete_checkpoints(store, 1) == ("g1-step-00000400-a2", "g1-step-00000300-a2")


def test_one_that_was_rejected_at_the_restore_is_not_the_last_good_one(bench, store):
    """Keep one besides the new one: the restored one, not the newer one with wrong bytes."""
    good, torn = bench.in_store("g1-step-00000100-a1"), bench.in_store("g1-step-00000200-a1")
    bench.heard(candidates=(torn, good))
    bench.context.memory.update(rejected=(f"{torn}: another sha256",))
    bench.session_saves(NAME, step=300)

    Checkpoints(bench.context, 2).step()

    assert set(complete_checkpoints(store, 1)) == {NAME, torn, good}


def test_a_zombie_that_saves_after_attempt_4_began(make_bench, store):
    """It may write, but no later attempt uses it, and it deletes nothing that attempt 4 needs."""
    zombie = make_bench(attempt=3)
    known = zombie.in_store("g1-step-00000200-a3")
    zombie.heard(candidates=())
    store.write(control_name(1, 4), Control(candidates=(known,)).to_json())
    for step in (500, 600, 700):
        zombie.session_saves(f"g1-step-{step:08d}-a3", step=step)

    Checkpoints(zombie.context, 1).step()

    assert known in complete_checkpoints(store, 1)


def test_a_snapshot_says_that_nobody_cooperated(bench, store):
    """Its facts are beside it; a file of the training called agent.json is uploaded."""
    bench.session_saves(NAME, {"model.bin": b"W"})
    bench.spool.write_json(bench.spool.checkpoints / f"{NAME}.snapshot.json", {"step": None, "save_s": 2.0})

    Checkpoints(bench.context, 3).step()

    manifest = read_checkpoint(store, NAME)
    assert (manifest.cooperative, manifest.step) == (False, None)
    assert [item.path for item in manifest.files] == ["agent.json", "model.bin"]
    assert bench.state.last_checkpoint_step == 300
    assert not (bench.spool.checkpoints / NAME).exists()


@pytest.mark.parametrize(
    "facts", ['{"save_s": NaN}', '{"save_s": 1e999}', f'{{"save_s": {"9" * 400}}}', f'{{"step": {2**70}}}']
)
def test_facts_that_are_no_numbers_end_no_sidecar(bench, store, facts):
    """They come from the training: the checkpoint counts, and the status stays writable and readable."""
    (bench.session_saves(NAME) / "agent.json").write_text(facts)

    assert Checkpoints(bench.context, 3).step()

    assert read_checkpoint(store, NAME).step == 300
    said = Status.from_json(compose(bench.context, None, is_over=False).to_json(), where="test")
    assert (said.last_checkpoint, said.last_checkpoint_step, said.checkpoint_s) == (NAME, 300, 0.0)


def test_node_0_writes_the_manifest_when_all_lists_are_there(make_bench, store):
    """Each node uploads its own files; a file that both have counts once."""
    first, second = make_bench(nodes=2), make_bench(node=1, nodes=2)
    first.session_saves(NAME, {"shard-0": b"0", "config": b"c"}, step=300)
    second.session_saves(NAME, {"shard-1": b"1", "config": b"c"}, step=300)
    mine, theirs = Checkpoints(first.context, 3), Checkpoints(second.context, 3)

    assert not mine.step()
    assert first.context.messages.text() == f"checkpoint {NAME} waits for the files of nodes [1]"
    assert not theirs.step()
    assert second.context.messages.text() == f"checkpoint {NAME} waits for node 0's manifest"
    assert complete_checkpoints(store, 1) == ()
    assert mine.step()
    assert theirs.step()

    manifest = read_checkpoint(store, NAME)
    assert [(item.path, item.node) for item in manifest.files] == [
        ("config", 0),
        ("shard-0", 0),
        ("shard-1", 1),
    ]
    assert second.spool.done(NAME).exists()


def test_two_nodes_that_save_different_files_under_one_name(make_bench, store):
    """Both are kept, and the message says what to do before the number of nodes changes (D7)."""
    first, second = make_bench(nodes=2), make_bench(node=1, nodes=2)
    first.session_saves(NAME, {"model.bin": b"0"}, step=300)
    second.session_saves(NAME, {"model.bin": b"1"}, step=300)
    Checkpoints(second.context, 3).step()

    assert Checkpoints(first.context, 3).step()

    assert "several nodes saved different files as model.bin" in first.context.messages.text()
    assert complete_checkpoints(store, 1) == (NAME,)
    assert [(item.path, item.node) for item in read_checkpoint(store, NAME).files] == [
        ("model.bin", 0),
        ("model.bin", 1),
    ]


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(("has_ended", "patience"), [(False, OTHERS_S), (True, OTHERS_AT_END_S)])
def test_a_node_that_never_comes_is_not_waited_for_for_ever(make_bench, node, has_ended, patience):
    """Ten minutes while training, two when this node is done; then the checkpoint is abandoned."""
    bench = make_bench(node=node, nodes=2)
    bench.session_saves(NAME, step=300)
    if has_ended:
        bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    checkpoints = Checkpoints(bench.context, 3)
    checkpoints.step()
    bench.clock.now += patience - 1
    assert not checkpoints.step()

    bench.clock.now += 1

    assert checkpoints.step()
    assert f"is lost: {'the files' if node == 0 else 'node 0'}" in bench.context.messages.text()


@pytest.mark.parametrize("node", [0, 1])
def test_a_slower_node_that_still_uploads_is_waited_for_at_the_end(make_bench, store, node):
    """Its part of the checkpoint that a move needs is under way; ten minutes are the limit."""
    bench = make_bench(node=node, nodes=2)
    bench.session_saves(NAME, step=300)
    bench.wrapper_says(ended={"exit_code": 85, "reason": "drained"})
    checkpoints = Checkpoints(bench.context, 3)
    store.write(status_name(1, 2, 1 - node), Status(phase="uploading").to_json())
    checkpoints.step()

    bench.clock.now += OTHERS_AT_END_S + 1
    assert not checkpoints.step()
    bench.clock.now += OTHERS_S - OTHERS_AT_END_S - 1
    assert checkpoints.step()

    assert "did not come within 600 s" in bench.context.messages.text()


@pytest.mark.parametrize(
    ("nodes", "layout", "stays"),
    [(2, {}, True), (1, {"processes_per_node": 1}, True), (1, {}, False)],
)
def test_what_an_attempt_began_from_stays_while_nodes_can_come(make_bench, store, nodes, layout, stays):
    """A lost node is recreated in the same attempt, and begins from the same checkpoint as the others."""
    began, saved = "g1-step-00000100-a1", [f"g1-step-00000{step}-a2" for step in (200, 300, 400)]
    first = make_bench(nodes=nodes, layout=layout)
    for name in (began, *saved):
        first.in_store(name)
    control = first.heard(candidates=(began,))
    first.context.memory.update(restored_from=began, start_step=100)
    first.session_saves("g1-step-00000500-a2", step=500, world_size=1)
    last = Checkpoints(first.context, 3)
    if nodes > 1:
        other = make_bench(node=1, nodes=2)
        other.session_saves("g1-step-00000500-a2", step=500)
        Checkpoints(other.context, 3).step()

    assert last.step()

    store.write(status_name(1, 2, 0), Status(start_step=100, restored_from=began).to_json())
    assert complete_checkpoints(store, 1) == (
        "g1-step-00000500-a2",
        *reversed(saved[1:]),
        *([began] if stays else []),
    )
    if stays:
        again = make_bench(node=1, nodes=2)
        assert restore(again.context, control).source == began


@pytest.mark.parametrize(("processes", "waits"), [(6, "[1, 2]"), (4, "[1]"), (2, None), (None, "[1, 2, 3]")])
def test_where_nodes_come_and_go_those_that_saved_it_are_awaited(make_bench, processes, waits):
    """Four nodes of two processes began; a save by fewer processes is of fewer nodes. Unknown: all four."""
    bench = make_bench(nodes=4, layout={"processes_per_node": 2})
    bench.session_saves(NAME, **({"world_size": processes} if processes else {}))
    uploads = Checkpoints(bench.context, keep=3)

    is_done = uploads.step()

    expected = "" if waits is None else f"checkpoint {NAME} waits for the files of nodes {waits}"
    assert (is_done, bench.context.messages.text()) == (waits is None, expected)


def test_links_of_a_snapshot_stand_in_the_manifest(bench, store):
    """Links that lead out of the folder are dropped: the training can change its facts (C)."""
    for step, links in ((1, {"latest": "step_1"}), (2, {"latest": "../../etc"})):
        name = f"g1-step-0000000{step}-a2"
        folder = bench.session_saves(name, {"step_1/w": b"1"})
        (folder / "agent.json").unlink()
        bench.spool.write_json(snapshot_facts(bench.spool, name), {"step": step, "links": links})

    Checkpoints(bench.context, 3).step()

    manifest = read_checkpoint(store, "g1-step-00000001-a2")
    assert (manifest.links, manifest.cooperative) == ({"latest": "step_1"}, False)
    assert complete_checkpoints(store, 1) == ("g1-step-00000001-a2",)
    assert "leaves the folder" in bench.context.messages.text()


class Counted(str):
    """A path that counts how often any of them is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        """Equal, and counted."""
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_files_of_two_nodes_that_differ_are_merged_in_one_pass():
    """1,000 each: to look each path up in a list would compare it with 500 others on average (B7)."""
    files = [
        [ManifestFile(Counted(f"{number:05d}"), 1, f"{node}" * 64, node, 1) for number in range(1_000)]
        for node in (0, 1)
    ]

    merged, differ = _merge([tuple(part) for part in files])

    assert Counted.compared < 20 * 1_000  # most of them by sorting
    assert (len(merged), len(differ)) == (2_000, 1_000)
    assert [(item.path, item.node) for item in merged[:3]] == [("00000", 0), ("00000", 1), ("00001", 0)]


def test_a_hundred_thousand_files_fit_into_a_manifest(store, tmp_path):
    """With paths of 150 letters: a refusal would come before the first file (B7)."""
    root = Root.of(tmp_path)
    path = "x" * 144
    files = [TreeFile(f"{path}{number:06d}", root, "", 100, 0, 0) for number in range(100_000)]

    def stop():
        raise WorkInterruptedError("the first file goes up")

    with pytest.raises(WorkInterruptedError):
        manifests.upload(store, "checkpoints/x", files, between=stop)
