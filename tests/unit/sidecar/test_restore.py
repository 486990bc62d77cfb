"""The checkpoint that a start uses: found, verified, published, restored."""

import hashlib
import os
import threading
import time

import pytest

from envscaler_agent.protocol import Control, Ended, Manifest, ManifestFile, Status, status_name
from envscaler_airflow.errors import CheckpointError, StoreError
from envscaler_airflow.sidecar import saver_layouts
from envscaler_airflow.sidecar import saver_layouts as trees
from envscaler_airflow.sidecar.context import SetupCancelledError
from envscaler_airflow.sidecar.restore import restore
from envscaler_airflow.sidecar.setup import lay_out
from envscaler_airflow.store.root import Root

OLD, NEW = "g1-step-00000100-a1", "g1-step-00000200-a1"


def tree(folder):
    """Return all files below *folder*."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(bench, name, path="model.bin"):
    """Return the store's path of a file."""
    return bench.root / "store/d/run/checkpoints" / name / path


def test_the_newest_good_one_is_laid_out(bench):
    """start.json names folder, step, epoch and samples."""
    bench.in_store(OLD)
    bench.in_store(NEW, {"a/w.bin": b"W"}, epoch=2, samples=6400)

    got = restore(bench.context, Control(candidates=(NEW, OLD)))

    folder = bench.spool.restored / NEW
    assert got.to_start() == {"path": str(folder), "name": NEW, "step": 200, "epoch": 2, "samples": 6400}
    assert tree(folder) == {"a/w.bin": b"W"}
    assert (bench.state.restored_from, bench.state.start_step, bench.state.rejected) == (NEW, 200, ())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"~"),
        lambda path: path.with_name("manifest-c1.json").unlink(),
        lambda path: path.with_name("manifest-c1.json").write_bytes(b"{torn"),
    ],
    ids=["missing", "truncated", "bit-flipped", "no manifest", "torn manifest"],
)
def test_a_bad_one_is_rejected_and_the_one_before_is_used(bench, damage):
    """The status has the reason; nothing of the bad checkpoint remains on the disk."""
    bench.in_store(OLD)
    bench.in_store(NEW)
    damage(stored(bench, NEW))

    got = restore(bench.context, Control(candidates=(NEW, OLD)))

    assert got.source == OLD
    assert bench.state.start_step == 100
    assert [line.partition(":")[0] for line in bench.state.rejected] == [NEW]
    assert [path.name for path in bench.spool.restored.iterdir()] == [OLD]


def test_own_checkpoints_come_before_the_candidates(bench):
    """A node that was replaced within the attempt continues from the attempt's own saves."""
    own = bench.in_store("g1-step-00000150-a2")
    bench.in_store(NEW)

    assert restore(bench.context, Control(candidates=(NEW,))).source == own


def test_a_zombies_checkpoint_is_not_chosen(make_bench):
    """Attempt 3 was declared lost and keeps saving; attempt 4 knows only what its owner listed."""
    bench = make_bench(attempt=4)
    known = bench.in_store("g1-step-00000200-a3")
    bench.in_store("g1-step-00000900-a3")

    assert restore(bench.context, Control(candidates=(known,))).source == known


def test_without_any_it_begins_fresh(bench):
    """Also when every candidate is bad: the status has the reasons."""
    bench.in_store(OLD)
    stored(bench, OLD).unlink()

    assert restore(bench.context, Control(candidates=(OLD,))) is None
    assert (bench.state.start_step, bench.state.restored_from, len(bench.state.rejected)) == (0, None, 1)


def test_another_runs_checkpoint_by_its_uri(make_bench, bench, tmp_path):
    """``restore_from`` begins a fresh run; the run begins at the checkpoint's step."""
    name = make_bench(generation=3, attempt=5).in_store("g3-step-00000700-a5", samples=9)
    uri = f"file://{tmp_path}/store/d/run/checkpoints/{name}"

    got = restore(bench.context, Control(restore_from=uri))

    assert got.to_start()["name"] == name
    assert got.to_start()["samples"] == 9
    assert (bench.state.restored_from, bench.state.start_step) == (uri, 700)


def test_own_work_comes_before_restore_from(bench, tmp_path):
    """The second attempt of such a run continues from its own checkpoint."""
    bench.in_store(NEW)

    assert restore(bench.context, Control(candidates=(NEW,), restore_from=f"{tmp_path}/none")).source == NEW


def test_a_bad_restore_from_fails_the_set_up(make_bench, bench, store, tmp_path):
    """It is verified first, and the message names the URI and the file."""
    name = make_bench(generation=3, attempt=5).in_store("g3-step-00000700-a5")
    stored(bench, name).write_bytes(b"x" * 19)
    uri = f"file://{tmp_path}/store/d/run/checkpoints/{name}"
    bench.owner_asks(restore_from=uri)

    lay_out(bench.context)

    assert bench.start()["failed"].startswith(f"restore_from {uri}: ")
    assert "model.bin has another sha256" in bench.start()["failed"]


def test_a_store_that_does_not_answer_rejects_nothing(bench, store):
    """Unknown is not bad: an outage does not make the attempt begin from an older checkpoint."""
    bench.in_store(OLD)
    bench.in_store(NEW)
    real = store._store.get_file

    def down(name, path):
        raise StoreError("down")

    store._store.get_file = down
    with pytest.raises(StoreError):
        restore(bench.context, Control(candidates=(NEW, OLD)))
    store._store.get_file = real
    assert bench.state.rejected == ()


def test_a_snapshot_is_laid_back_where_the_code_looks_for_it(make_bench, tmp_path):
    """The folder has exactly the snapshot; files of an earlier pod are gone."""
    ours = tmp_path / "ck"
    bench = make_bench(layout={"checkpoint_path": str(ours)})
    bench.in_store(NEW, {"checkpoint-200/trainer_state.json": b'{"global_step":200}'}, cooperative=False)
    (ours / "checkpoint-300").mkdir(parents=True)
    (ours / "checkpoint-300/torn.bin").write_bytes(b"x")

    got = restore(bench.context, Control(candidates=(NEW,)))

    assert got.path == ours
    assert tree(ours) == {"checkpoint-200/trainer_state.json": b'{"global_step":200}'}
    assert bench.state.snapshot is not None
    assert not list(bench.spool.restored.iterdir())


def test_links_of_a_snapshot_are_links_again(make_bench, tmp_path):
    """``latest`` is not a copied folder, so that the training can move it at its next save (C)."""
    ours = tmp_path / "ck"
    bench = make_bench(layout={"checkpoint_path": str(ours)})
    links = {"latest": "step_200", "best/model.bin": "../step_200/w.bin"}
    bench.in_store(NEW, {"step_200/w.bin": b"1"}, cooperative=False, links=links)

    restore(bench.context, Control(candidates=(NEW,)))

    assert {path: str((ours / path).readlink()) for path in links} == links
    assert (ours / "best/model.bin").read_bytes() == b"1"


def test_files_keep_the_order_in_which_they_were_modified(make_bench, tmp_path):
    """Code that resumes from the newest file finds it, and shards are never younger than their mark (C).

    Also where the clock of the machine that saved them is an hour ahead of this one's.
    """
    ours = tmp_path / "ck"
    bench = make_bench(layout={"checkpoint_path": str(ours)})
    files = {"last.ckpt": b"2", "best.ckpt": b"1", "step-200/.metadata": b"m", "step-200/__0_0.distcp": b"s"}
    bench.in_store(OLD, files, cooperative=False)
    ahead = time.time_ns() + 3600 * 10**9
    for count, path in enumerate(("best.ckpt", "step-200/__0_0.distcp", "step-200/.metadata", "last.ckpt")):
        os.utime(bench.root / "made" / OLD / path, ns=(ahead + count, ahead + count))
    bench.in_store(NEW, {}, source=bench.root / "made" / OLD, cooperative=False)

    restore(bench.context, Control(candidates=(NEW,)))

    found = {path: (ours / path).stat().st_mtime_ns for path in files}
    assert sorted(found, key=found.get) == [
        "best.ckpt",
        "step-200/__0_0.distcp",
        "step-200/.metadata",
        "last.ckpt",
    ]
    assert max(found.values()) <= time.time_ns()
    assert [unit.mark for unit in saver_layouts.units(trees.look(ours)) if unit.kind == "distributed"] == [
        True
    ]


def test_what_a_session_saved_stays_out_of_the_codes_folder(make_bench, tmp_path):
    """Cooperating code gets a separate path."""
    bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")})
    bench.in_store(NEW)

    assert restore(bench.context, Control(candidates=(NEW,))).path == bench.spool.restored / NEW


def test_a_lay_back_that_was_cut_short_is_done_again(make_bench, tmp_path, monkeypatch):
    """The sidecar dies after one of two files; the next one restores both."""
    ours = tmp_path / "ck"
    bench = make_bench(layout={"checkpoint_path": str(ours)})
    bench.in_store(NEW, {"a": b"1", "b": b"2"}, cooperative=False)
    moves = []

    real = Root.take

    def die(target, path, source):
        moves.append(path)
        if len(moves) == 2:
            raise KeyboardInterrupt
        real(target, path, source)

    with monkeypatch.context() as patch:
        patch.setattr(Root, "take", die)
        with pytest.raises(KeyboardInterrupt):
            restore(bench.context, Control(candidates=(NEW,)))

    restore(bench.restarted(), Control(candidates=(NEW,)))

    assert tree(ours) == {"a": b"1", "b": b"2"}


def test_other_nodes_take_what_node_0_chose(make_bench, store):
    """Node 1 waits until node 0's status names the choice; its own view does not count."""
    bench = make_bench(node=1, nodes=2)
    bench.in_store(OLD)
    bench.in_store(NEW)
    name = status_name(1, 2, 0)
    store.write(name, Status(generation=1, attempt=2, phase="restoring").to_json())
    decided = Status(generation=1, attempt=2, start_step=100, restored_from=OLD).to_json()
    waits = []

    def wait(_seconds):
        waits.append(1)
        if len(waits) == 3:
            store.write(name, decided)

    ending = threading.Event()
    ending.wait = wait
    bench.context.ending = ending

    got = restore(bench.context, Control(candidates=(NEW, OLD)))

    assert got.source == OLD
    assert len(waits) == 3


def test_other_nodes_begin_fresh_when_node_0_does(make_bench, store):
    """Step 0 without a name is a decision too."""
    bench = make_bench(node=1, nodes=2)
    bench.in_store(NEW)
    store.write(status_name(1, 2, 0), Status(start_step=0).to_json())

    assert restore(bench.context, Control(candidates=(NEW,))) is None


def test_other_nodes_do_not_wait_for_a_node_that_ended(make_bench, store):
    """Node 0's setup failed: node 1 fails too, at once."""
    bench = make_bench(node=1, nodes=2)
    ended = '{"schema":"2.0","phase":"ended","ended":{"reason":"setup-failed","detail":"no disk"}}'
    store.write(status_name(1, 2, 0), ended.encode())

    with pytest.raises(CheckpointError, match="node 0 has ended: setup-failed no disk"):
        restore(bench.context, Control())


@pytest.mark.parametrize("reason", ["drained", "stopped", "orphaned", "killed", "peer-lost", "succeeded"])
def test_a_node_0_that_had_to_go_is_no_fault_of_the_stage(make_bench, store, reason):
    """No pod replaced it in time, or this one replaces a pod that was lost at the end: setup stops, too."""
    bench = make_bench(node=1, nodes=2)
    bench.context.ending.wait = lambda _seconds: setattr(bench.clock, "now", bench.clock.now + 100)
    store.write(status_name(1, 2, 0), Status(phase="ended", ended=Ended(reason=reason)).to_json())

    with pytest.raises(SetupCancelledError, match=f"node 0 has ended: {reason}"):
        restore(bench.context, Control())


@pytest.mark.parametrize(
    "said", ["file:///etc", "/etc", "../../other", "g1-step-00000900-a1", "g2-step-00000100-a1", "nonsense"]
)
def test_what_node_0_names_must_be_what_the_owner_allows(make_bench, store, said):
    """Its status is untrusted data: neither an address of its choice nor a void checkpoint counts."""
    bench = make_bench(node=1, nodes=2)
    bench.in_store(OLD)
    store.write(status_name(1, 2, 0), Status(start_step=1, restored_from=said).to_json())

    with pytest.raises(CheckpointError, match="which the owner does not allow"):
        restore(bench.context, Control(candidates=(OLD,), restore_from="s3://bucket/checkpoints/x"))


class FakeFiles:
    """A store in which *names*, as an object store may contain them, are empty."""

    def __init__(self, store, names):
        """Pass everything else on."""
        self._store, self._names = store, names

    def __getattr__(self, name):
        """Return the attribute of the real store."""
        return getattr(self._store, name)

    def size(self, name):
        """Return 0 for an empty file."""
        return 0 if name in self._names else self._store.size(name)

    def get_file(self, name, path):
        """Return an empty file."""
        if name not in self._names:
            return self._store.get_file(name, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.write_bytes(b"")


@pytest.mark.parametrize(
    "paths",
    [("a", "a/b"), ("a/b", "a"), ("x" * 300,)],
    ids=["file and folder", "folder and file", "long name"],
)
def test_a_manifest_that_cannot_be_laid_out_is_torn(bench, store, paths):
    """The previous checkpoint is used, and the attempt does not fail."""
    bench.in_store(OLD)
    empty = hashlib.sha256(b"").hexdigest()
    files = tuple(ManifestFile(path=path, size=0, sha256=empty) for path in paths)
    fake = FakeFiles(store._store, {f"checkpoints/{NEW}/{path}" for path in paths})
    bench.context.run = fake
    manifest = Manifest(step=200, generation=1, attempt=int(NEW.rpartition("a")[2]), files=files)
    store.write(f"checkpoints/{NEW}/manifest-c1.json", manifest.to_json())

    got = restore(bench.context, Control(candidates=(NEW, OLD)))

    assert got.source == OLD
    assert bench.state.rejected[0].startswith(f"{NEW}: ")
