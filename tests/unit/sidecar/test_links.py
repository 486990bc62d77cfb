"""A hostile training swaps in links, hard links, pipes and folders: no foreign file gets into the store."""

import json
import os
import random
import threading

import pytest
from fakes.checkpoint_files import put

from envscaler_agent.protocol import Control
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.sidecar.restore import restore
from envscaler_airflow.sidecar.setup import copy_in, lay_out
from envscaler_airflow.sidecar.snapshots import Snapshots
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.sidecar.uploads import Checkpoints, Chunks, Outputs, WriteBack
from envscaler_airflow.store import manifests
from envscaler_airflow.store.archive import pack_workdir
from envscaler_airflow.store.manifests import TreeFile
from envscaler_airflow.store.root import Place
from envscaler_airflow.store.run_store import open_store

NAME = "g1-step-00000300-a2"
SECRET = b"of another user"
OWN = b"of the training"
"""As long as the secret, so that its size does not reveal a swap."""
SENT, MET, MOST_TRIES = 15, 15, 5000
"""Uploads of a race that succeed, that a link stops, and tries for both. Chosen: 400 tries were enough."""


@pytest.fixture
def secret(tmp_path):
    """Return a file that the sidecar may read and the training may not."""
    path = tmp_path / "others" / "inner" / "weights.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(SECRET)
    return path


def everything(store):
    """Return all bytes in the store."""
    return [store.read(name) for name in store.names("")]


def swap_file(path, secret):
    """Put a link to the secret in the file's place."""
    path.unlink()
    path.symlink_to(secret)


def swap_folder(path, secret):
    """Put a link to a folder with a file of the same name in place of the file's folder."""
    path.parent.rename(path.parent.with_name("gone"))
    path.parent.symlink_to(secret.parent)


def swap_above(path, secret):
    """Do the same one folder further up."""
    above = path.parent.parent
    above.rename(above.with_name("gone-too"))
    above.symlink_to(secret.parent.parent)


def swap_hard_link(path, secret):
    """Put another name of the secret itself in the file's place."""
    path.unlink()
    os.link(secret, path)


def swap_pipe(path, _):
    """Put a pipe in the file's place, which would block a reader for ever."""
    path.unlink()
    os.mkfifo(path)


SWAPS = (swap_file, swap_folder, swap_above, swap_hard_link, swap_pipe)


@pytest.fixture
def swapping(monkeypatch):
    """Run *act* between the check of the folder and the opening of the file."""

    def make(act):
        real = TreeFile.open
        acts = [act]

        def swapped(item, **options):
            if acts:
                acts.pop()()
            return real(item, **options)

        monkeypatch.setattr(TreeFile, "open", swapped)

    return make


@pytest.mark.parametrize("swap", SWAPS)
def test_a_checkpoint_swapped_after_the_look_is_not_followed(bench, store, secret, swapping, swap):
    """The save is abandoned or waits; the foreign file is not in the store (B1)."""
    folder = bench.session_saves(NAME, {"sub/inner/weights.bin": b"mine"}, step=300)
    swapping(lambda: swap(folder / "sub/inner/weights.bin", secret))

    Checkpoints(bench.context, keep=2).step()

    assert SECRET not in everything(store)
    assert bench.context.messages.text() != ""


@pytest.mark.parametrize("swap", SWAPS)
def test_an_output_swapped_after_the_look_is_not_followed(
    make_bench, store, tmp_path, secret, swapping, swap
):
    """Also where the folder of the output itself, or its parent, is swapped (B1)."""
    bench = make_bench(layout={"outputs": {"model": str(tmp_path / "out/model")}})
    put(tmp_path / "out/model", {"inner/weights.bin": b"mine"})
    bench.context.remember_places()
    swapping(lambda: swap(tmp_path / "out/model/inner/weights.bin", secret))

    Outputs(bench.context).step()

    assert SECRET not in everything(store)


@pytest.mark.parametrize("swap", SWAPS)
def test_a_snapshot_swapped_after_the_look_holds_nothing_of_others(
    make_bench, tmp_path, secret, swapping, swap
):
    """No copy is made, neither at an interval nor at the end, when files are linked (B1)."""
    bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")})
    put(tmp_path / "ck", {"inner/weights.bin": b"mine"})
    bench.context.memory.update(is_laid_out=True, start_step=0)
    bench.context.remember_places()
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})
    swapping(lambda: swap(tmp_path / "ck/inner/weights.bin", secret))

    Snapshots(bench.context, {"seconds": 1}).step()

    copies = [path for path in bench.spool.checkpoints.rglob("*") if path.is_file()]
    assert SECRET not in [path.read_bytes() for path in copies]


@pytest.mark.parametrize("swap", SWAPS)
def test_a_volume_swapped_after_the_look_is_not_followed(make_bench, tmp_path, secret, swapping, swap):
    """Only files below the volume are written back to a bucket (B1)."""
    mount = {"name": "data", "source": "memory://links-back/data", "path": str(tmp_path / "data")}
    bench = make_bench(layout={"mounts": [mount]})
    put(tmp_path / "data", {"sub/inner/weights.bin": b"mine"})
    bench.context.remember_places()
    swapping(lambda: swap(tmp_path / "data/sub/inner/weights.bin", secret))

    WriteBack(bench.context).step()

    assert SECRET not in everything(open_store(mount["source"]))


@pytest.mark.parametrize("swap", [swap_file, swap_hard_link, swap_pipe])
def test_a_chunk_swapped_after_the_look_is_not_sent(bench, store, secret, monkeypatch, swap):
    """A swapped log chunk does not delay later chunks (B1)."""
    first = bench.spool.root / "logs/000001.log"
    first.write_text("line 1")
    (bench.spool.root / "logs/000002.log").write_text("line 2")
    seen = bench.spool.chunks("logs")
    swap(first, secret)
    monkeypatch.setattr(type(bench.spool), "chunks", lambda _, folder: seen if folder == "logs" else [])

    Chunks(bench.context).step(has_ended=False)

    assert everything(store) == [b"line 2"]


def test_a_folder_of_chunks_that_became_a_link_is_not_read(bench, store, secret):
    """The folder of logs leads to a folder with a file of a chunk's name (B1)."""
    (secret.parent / "000001.log").write_bytes(SECRET)
    (bench.spool.root / "logs").rmdir()
    (bench.spool.root / "logs").symlink_to(secret.parent)

    Chunks(bench.context).step(has_ended=True)

    assert everything(store) == []


def test_what_was_hashed_is_what_is_sent(bench, store, secret):
    """A swap between hash and transfer changes nothing: the sidecar sends the open file (B1)."""
    folder = bench.session_saves(NAME, {"weights.bin": b"mine"}, step=300)
    real = store._store.put_file

    def put_file(name, source):
        swap_file(folder / "weights.bin", secret)
        real(name, source)

    store._store.put_file = put_file

    Checkpoints(bench.context, keep=2).step()

    assert store.read(f"checkpoints/{NAME}/n0-c1/weights.bin") == b"mine"
    assert SECRET not in everything(store)


def test_names_in_one_folder_may_share_a_file(tmp_path, store):
    """A hard link between two names of the same tree is the training's own, and both are kept."""
    put(tmp_path / "ck", {"last.pt": b"mine"})
    os.link(tmp_path / "ck/last.pt", tmp_path / "ck/best.pt")

    files = manifests.upload(store, "checkpoints/x", manifests.walk(tmp_path / "ck"))

    assert [item.path for item in files] == ["best.pt", "last.pt"]


def test_links_inside_are_followed_by_whatever_way(tmp_path):
    """Relative, absolute, out of the folder and back, through another link (B1)."""
    put(tmp_path / "ck", {"step-3/a": b"A"})
    (tmp_path / "ck/absolute").symlink_to(tmp_path / "ck/step-3")
    (tmp_path / "ck/back").symlink_to("../ck/step-3")
    (tmp_path / "ck/chain").symlink_to("back/a")

    found = {item.path: item.real for item in manifests.walk(tmp_path / "ck")}

    paths = ("absolute/a", "back/a", "chain", "step-3/a")
    assert found == dict.fromkeys(paths, "step-3/a")


def test_a_restore_writes_through_no_link(make_bench, tmp_path, secret):
    """A link in the checkpoint's folder is removed, not followed (B1)."""
    bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")})
    name = bench.in_store("g1-step-00000100-a1", {"inner/weights.bin": b"old"}, cooperative=False)
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/inner").symlink_to(secret.parent)
    bench.context.remember_places()

    restore(bench.context, Control(candidates=(name,)))

    assert secret.read_bytes() == SECRET
    assert (tmp_path / "ck/inner/weights.bin").read_bytes() == b"old"
    assert not (tmp_path / "ck/inner").is_symlink()


def test_a_restore_is_not_laid_into_a_foreign_folder(bench, secret):
    """A link at the destination of the restored files is refused, and nothing is written (B1)."""
    name = bench.in_store("g1-step-00000100-a1", {"inner/weights.bin": b"old"})
    (bench.spool.restored / name).mkdir()
    (bench.spool.restored / name / "inner").symlink_to(secret.parent)

    assert restore(bench.context, Control(candidates=(name,))) is None

    assert secret.read_bytes() == SECRET
    assert bench.state.rejected


def test_where_folders_were_is_remembered_where_the_training_cannot_write(make_bench, tmp_path, secret):
    """A restarted sidecar reads it from its own folder, even if sidecar.json changed (B1)."""
    layout = {"outputs": {"model": str(tmp_path / "out/model")}, "private_folder": str(tmp_path / "own")}
    bench = make_bench(layout=layout)
    (tmp_path / "out").mkdir()
    bench.context.remember_places()
    body = json.loads(bench.spool.sidecar.read_bytes())
    body["places"] = {str(tmp_path / "out/model"): str(secret.parent)}
    bench.spool.write_json(bench.spool.sidecar, body)

    context = bench.restarted()

    assert context.place(tmp_path / "out/model") == Place(tmp_path / "out")


def test_a_machine_s_cache_is_not_written_through_a_link(bench, tmp_path, secret):
    """Neither is anything removed behind one (B1)."""
    store = open_store("memory://links-cached/data")
    store.write("inner/weights.bin", b"of the bucket")
    folder = tmp_path / "machine/data"
    folder.mkdir(parents=True)
    (folder / "inner").symlink_to(secret.parent)
    index = str(tmp_path / "machine/index.json")
    mount = Mount(name="d", source=store.url, path=str(folder), read_only=True, index=index)

    with pytest.raises(OSError, match="inner"):
        copy_in(bench.context, mount)

    assert secret.read_bytes() == SECRET


@pytest.fixture
def started(make_bench, store, tmp_path):
    """Return a node that was set up, with its code and a folder of the sidecar's own."""
    put(tmp_path / "code", {"train.py": b"print(1)"})
    archive = pack_workdir(tmp_path / "code", scratch=tmp_path)
    store.put_file(archive.name, archive.path)
    layout = {"work": str(tmp_path / "w"), "workdir_archive": archive.name}
    bench = make_bench(layout=layout | {"private_folder": str(tmp_path / "own")})
    bench.owner_asks()
    lay_out(bench.context)
    return bench


def test_a_training_that_removes_start_json_is_not_set_up_again(started, tmp_path, secret):
    """A restarted sidecar would empty and fill folders where the training can put links by then (B1)."""
    before = started.spool.start.read_bytes()
    started.spool.start.unlink()
    started.spool.sidecar.unlink()
    (tmp_path / "w").rename(tmp_path / "gone")
    (tmp_path / "w").symlink_to(secret.parent)

    lay_out(started.restarted())

    assert secret.read_bytes() == SECRET
    assert started.spool.start.read_bytes() == before
    assert (started.state.is_laid_out, list((tmp_path / "own").glob("*.tmp"))) == (True, [])


def test_the_archive_of_the_code_is_fetched_through_no_link(make_bench, store, tmp_path, secret):
    """The spool folder was replaced by a link: its archive has no name that a link could take (B1)."""
    put(tmp_path / "code", {"train.py": b"print(1)"})
    archive = pack_workdir(tmp_path / "code", scratch=tmp_path)
    store.put_file(archive.name, archive.path)
    bench = make_bench(layout={"work": str(tmp_path / "w"), "workdir_archive": archive.name})
    bench.owner_asks()
    (bench.spool.root / archive.name).symlink_to(secret)

    lay_out(bench.context)

    assert secret.read_bytes() == SECRET
    assert (tmp_path / "w/train.py").read_bytes() == b"print(1)"
    assert (bench.spool.root / archive.name).is_symlink()


@pytest.mark.parametrize("depth", [3, 2, 1], ids=["file", "folder", "above"])
def test_links_that_race_with_uploads_leak_nothing(tmp_path, store, secret, depth):
    """A thread swaps a link in and out in each upload of the same folder (B1)."""
    folder, begun, stop = tmp_path / "race", threading.Event(), threading.Event()
    path = folder / "sub/inner/weights.bin"
    put(folder, {"sub/inner/weights.bin": OWN})
    place = [path, *path.parents][3 - depth]
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    foreign.symlink_to([secret, *secret.parents][3 - depth])

    def race():
        swaps = random.Random(depth)
        while not stop.is_set():
            begun.wait()
            begun.clear()
            for _ in range(swaps.choice((1, 10, 100))):
                for away, back in ((own, foreign), (foreign, own)):
                    place.rename(away)
                    back.rename(place)

    thread = threading.Thread(target=race, daemon=True)
    thread.start()
    sent = met = 0
    try:
        for number in range(MOST_TRIES):
            if sent >= SENT and met >= MET:
                break
            begun.set()
            try:
                files = manifests.walk(folder)
                manifests.upload(store, f"checkpoints/{number}", files)
            except (CheckpointError, OSError):
                met += 1
            else:
                sent += len(files)
    finally:
        stop.set()
        begun.set()
        thread.join()

    assert sent >= SENT
    assert met >= MET
    assert SECRET not in everything(store)
