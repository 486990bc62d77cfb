"""Which checkpoints count, which one is resumed from, and which may be deleted."""

import itertools
from collections import Counter

import pytest
from fakes.store_reader import newest_good

from envscaler_agent.protocol import Control, Manifest, control_name
from envscaler_airflow.errors import CheckpointError, StoreError
from envscaler_airflow.store import manifests
from envscaler_airflow.store.checkpoints import (
    complete_checkpoints,
    fence_of,
    prune,
    read_checkpoint,
    resume_order,
)
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.run import Run
from envscaler_airflow.testing import FaultyStore

A1, A2, A3 = "g1-step-00000100-a1", "g1-step-00000200-a1", "g1-step-00000300-a1"
SECOND = "g1-step-00000250-a2"
BYTES = b"0123456789"


@pytest.fixture
def store(tmp_path):
    """The store of one run."""
    (tmp_path / "store").mkdir()
    return Run(FileStore(tmp_path / "store"), "d/run")


@pytest.fixture
def save(store, tmp_path):
    """Save a checkpoint of two files, by default complete."""
    count = itertools.count()

    def put(name, *, complete=True):
        folder = tmp_path / f"save-{next(count)}"
        (folder / "sub").mkdir(parents=True)
        (folder / "model.bin").write_bytes(BYTES)
        (folder / "sub/rng.bin").write_bytes(name.encode())
        generation, _, step, attempt = name.split("-")
        files = manifests.upload(store, f"checkpoints/{name}", manifests.walk(folder))
        if complete:
            manifest = Manifest(
                files=files, step=int(step), generation=int(generation[1:]), attempt=int(attempt[1:])
            )
            manifests.write_manifest(store, f"checkpoints/{name}", manifest, name="manifest-c1.json")
        return name

    return put


def file_of(tmp_path, name, path="model.bin"):
    """Where the store keeps a file of a checkpoint."""
    return tmp_path / "store/d/run/checkpoints" / name / path


def flip(path):
    """Change one bit, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "bit-flipped": flip,
}


def test_own_ones_come_first_then_the_candidates_in_their_order():
    """Attempt 2 prefers its own; the owner's order is kept; other generations are excluded."""
    got = resume_order(
        [A1, SECOND, "g1-step-00000260-a2", "g2-step-00000900-a2"],
        generation=1,
        attempt=2,
        candidates=[A2, A1, "g2-step-00000900-a1", "g1-step-00000999-a3"],
    )

    assert got == ("g1-step-00000260-a2", SECOND, A2, A1)


def test_what_a_zombie_saves_later_is_never_chosen(store, save):
    """Attempt 4 began with step 200; what attempt 3 completes after that is void at any step."""
    known = save("g1-step-00000200-a3")
    save("g1-step-00000999-a3")

    good, rejected = newest_good(store, attempt=4, candidates=[known])

    assert (good, rejected) == (known, [])


def test_complete_ones_are_listed_newest_attempt_first(store, save):
    """A later attempt at a smaller step is valid: it found the newer ones torn."""
    for name in (A1, A3, SECOND, "g2-step-00000001-a1"):
        save(name)
    save("g1-step-00000400-a2", complete=False)
    store.write("checkpoints/notes/manifest-c1.json", b"{}")

    assert complete_checkpoints(store, 1) == (SECOND, A3, A1)


@pytest.mark.parametrize("path", ["model.bin", "sub/rng.bin"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_found_and_the_one_before_is_used(store, save, tmp_path, damage, path):
    """Missing, truncated, empty or bit-flipped: the error names the file, and step 100 is resumed from."""
    save(A1)
    save(A2)
    DAMAGE[damage](file_of(tmp_path, A2, path))

    good, rejected = newest_good(store, attempt=2, candidates=[A2, A1])

    assert good == A1
    assert len(rejected) == 1
    assert rejected[0].startswith(f"{A2}: ")
    assert path in rejected[0]


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema":"9.0"}',
        b'{"schema":"2.0","files":[{"path":"../x"}]}',
        b"\xff",
        b"x" * (17 << 20),
    ],
)
def test_a_torn_manifest_is_found(store, save, tmp_path, manifest):
    """Any damage raises a CheckpointError and is not a crash."""
    save(A1)
    file_of(tmp_path, A1, "manifest-c1.json").write_bytes(manifest)

    with pytest.raises(CheckpointError):
        read_checkpoint(store, A1)


def test_a_manifest_of_another_attempt_is_refused(store, save, tmp_path):
    """A folder that was copied to another name is a different checkpoint."""
    save(A1)
    save(SECOND)
    file_of(tmp_path, SECOND, "manifest-c1.json").write_bytes(
        file_of(tmp_path, A1, "manifest-c1.json").read_bytes()
    )

    with pytest.raises(CheckpointError, match="generation 1, attempt 1"):
        read_checkpoint(store, SECOND)


def test_a_store_that_does_not_answer_rejects_nothing(store, save, monkeypatch):
    """Unknown is never bad: the caller gets a StoreError and tries again."""
    save(A1)

    def down(*_):
        raise StoreError("down")

    monkeypatch.setattr(store.store, "size", down)
    with pytest.raises(StoreError):
        newest_good(store, attempt=2, candidates=[A1])


def pruned(store, **changes):
    """Prune as attempt 1 that keeps two."""
    options = {"generation": 1, "attempt": 1, "claim": 1, "candidates": (), "keep": 2} | changes
    return prune(store, **options)


def test_the_newest_are_kept_by_count(store, save):
    """Two of three stay."""
    for name in (A1, A2, A3):
        save(name)

    assert pruned(store) == (A1,)
    assert complete_checkpoints(store, 1) == (A3, A2)
    assert store.names(f"checkpoints/{A1}") == []


def test_a_damaged_one_does_not_count(store, save, tmp_path):
    """With the newest truncated, the two before it are kept: the last good one is never deleted."""
    for name in (A1, A2, A3):
        save(name)
    file_of(tmp_path, A3).write_bytes(b"")

    assert pruned(store) == ()
    assert complete_checkpoints(store, 1) == (A3, A2, A1)


def test_one_that_was_rejected_at_the_restore_does_not_count(store, save):
    """Its sizes look right, but its bytes are wrong."""
    for name in (A1, A2, A3, "g1-step-00000400-a1"):
        save(name)

    assert pruned(store, attempt=2, candidates=("g1-step-00000400-a1", A3, A2, A1), rejected=[A3]) == (A1,)


@pytest.mark.parametrize("keep", [0, 1])
def test_the_two_newest_good_ones_stay_whatever_keep_says(store, save, keep):
    """A deletion during the owner's listing spares what the next attempt needs (A5)."""
    for name in (A1, A2, A3):
        save(name)

    assert pruned(store, keep=keep) == (A1,)


def test_one_that_is_being_written_stays(store, save):
    """It has no manifest yet and is of this attempt: it is still being written, at any step."""
    save("g1-step-00000050-a1", complete=False)
    for name in (A1, A2, A3):
        save(name)

    assert pruned(store) == (A1,)
    assert store.names("checkpoints/g1-step-00000050-a1")


def test_what_an_older_attempt_left_half_done_goes_when_it_is_old(store, save):
    """It can never be chosen; at a step above the kept ones it is kept for inspection."""
    save("g1-step-00000050-a1", complete=False)
    save("g1-step-00000999-a1", complete=False)
    save(SECOND)
    save("g1-step-00000260-a2")

    assert pruned(store, attempt=2) == ("g1-step-00000050-a1",)


@pytest.mark.parametrize(("keep", "gone"), [(100, 0), (20, 0), (17, 4), (3, 18)])
def test_more_than_the_candidates_are_kept_where_the_user_wants_more(store, save, keep, gone):
    """The owner names 16 to resume from; older ones do not become void because of that."""
    names = [save(f"g1-step-{step:08d}-a1") for step in range(1, 21)]
    save(SECOND)

    deleted = pruned(store, attempt=2, candidates=tuple(names[:3:-1]), keep=keep)

    assert sorted(deleted) == names[:gone]
    assert len(complete_checkpoints(store, 1)) == 21 - gone


def test_a_zombies_checkpoints_do_not_push_out_good_ones(store, save):
    """Attempt 1 runs beside attempt 2 and saves at higher steps; attempt 2 counts only what it may use."""
    for name in (A1, A2):
        save(name)
    for step in (500, 600, 700):
        save(f"g1-step-{step:08d}-a1")
    save(SECOND)

    assert pruned(store, attempt=2, candidates=(A2, A1)) == (A1,)
    assert A2 in complete_checkpoints(store, 1)


def test_a_zombie_deletes_nothing(store, save):
    """From attempt 2's control on, attempt 1 may not delete what attempt 2 resumed from."""
    for name in (A1, A2, A3):
        save(name)
    store.write(control_name(1, 2), Control().to_json())

    assert pruned(store) == ()
    assert fence_of(store, 1, 1) == "over"
    assert fence_of(store, 1, 2) == "open"


@pytest.mark.parametrize("text", [Control(action="hold").to_json(), b'{"schema":"9.0"}', b"torn"])
def test_an_attempt_that_is_prepared_holds_the_older_one(store, save, text):
    """On ``hold`` the older attempt deletes nothing and runs on; also for a later version's control (A5)."""
    for name in (A1, A2, A3):
        save(name)
    store.write(control_name(1, 2), text)

    assert pruned(store) == ()
    assert fence_of(store, 1, 1) == "held"


def test_a_new_generation_supersedes_too(store):
    """The number of its attempt does not matter."""
    store.write(control_name(2, 1), Control().to_json())

    assert fence_of(store, 1, 7) == "over"


def test_a_checkpoint_half_deleted_never_looks_complete(store, save, monkeypatch):
    """The sidecar dies right after the first delete: the manifest is deleted first."""
    for name in (A1, A2, A3):
        save(name)
    monkeypatch.setattr(store.store, "delete_tree", lambda _: (_ for _ in ()).throw(StoreError("down")))

    with pytest.raises(StoreError):
        pruned(store)
    assert complete_checkpoints(store, 1) == (A3, A2)


@pytest.mark.parametrize("files", [3, 300])
def test_a_prune_asks_as_little_however_many_files_a_checkpoint_has(store, tmp_path, files):
    """One list returns all sizes: 100,000 files are not 100,000 requests at each prune (B7)."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.bin").write_bytes(BYTES)
    for step in (100, 200, 300, 400):
        name = f"checkpoints/g1-step-{step:08d}-a1"
        sent = manifests.upload(store, name, manifests.walk(folder))
        manifest = Manifest(files=sent, step=step, generation=1, attempt=1)
        manifests.write_manifest(store, name, manifest, name="manifest-c1.json")
    counted = FaultyStore(store)

    gone = prune(counted, generation=1, attempt=1, claim=1, candidates=(), keep=2)

    asked = Counter(method for method, _ in counted.calls)
    assert gone == (A2, A1)
    assert asked["sizes"] == 2
    assert asked["size"] <= 16  # of manifests, controls and claims: 4 checkpoints have few
