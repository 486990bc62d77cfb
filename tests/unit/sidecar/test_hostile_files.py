"""Files that a training writes in order to stop or fill its sidecar: each is left out, refused or removed."""

import bz2
import errno
import inspect
import io
import json
import os
import struct
import sys
import tracemalloc
import zipfile

import pytest
from fakes.checkpoint_files import put
from hypothesis import example, given
from hypothesis import strategies as st

from envscaler_agent.protocol import Manifest
from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.sidecar import completeness, saver_layouts
from envscaler_airflow.sidecar.snapshots import Snapshots
from envscaler_airflow.sidecar.uploads import Checkpoints
from envscaler_airflow.store import manifests, root
from envscaler_airflow.store.root import Root

NAME = "g1-step-00000300-a2"
DEPTH = 1500
"""Folders inside each other: Python's own functions recurse at most 1,000 deep."""


def deep(folder, depth=DEPTH):
    """Put *depth* folders into each other below *folder*, with a file in the last."""
    folder.mkdir(parents=True, exist_ok=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.fixture
def deep_folder(tmp_path):
    """A folder deeper than ``shutil.rmtree`` can remove: it is gone before pytest tries."""
    deep(tmp_path / "deep")
    yield tmp_path / "deep"
    Root.real(tmp_path).remove("deep")


def with_header(header):
    """Return a safetensors file of that header alone."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def zipped(data, kind=zipfile.ZIP_DEFLATED):
    """Return a zip of one member, ``state.json``."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", kind) as file:
        file.writestr("state.json", data)
    return raw.getvalue()


def damaged(kind):
    """Return a zip whose only member cannot be decompressed."""
    data = bytearray(zipped(b'{"step": 1}' * 1000, kind))
    data[45:60] = b"\xff" * 15
    return bytes(data)


def judged(tmp_path, name, data):
    """Return what the sidecar finds out about a file of that content."""
    put(tmp_path / "ck", {name: data})
    (item,) = manifests.walk(tmp_path / "ck")
    return completeness.first_look(item)[1], completeness.has_end(item), completeness.steps_in(item)


@pytest.mark.parametrize("end", ["x", [1], None, {}], ids=str)
def test_a_header_whose_offsets_are_no_numbers_is_torn(tmp_path, end):
    """The file is never complete, and the sidecar goes on (B1)."""
    found = judged(tmp_path, "m.safetensors", with_header({"w": {"data_offsets": [0, end]}}))

    assert found == ("m.safetensors: its header is torn", False, frozenset())


def test_a_header_of_a_hundred_thousand_brackets_is_torn(tmp_path):
    """Python's JSON reader would recurse once for each (B1)."""
    assert judged(tmp_path, "m.safetensors", with_header(b"[" * 100_000))[1:] == (False, frozenset())


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_member_that_cannot_be_decompressed_has_no_step(tmp_path, kind):
    """Each decompressor has an error of its own (B1)."""
    assert judged(tmp_path, "m.pt", damaged(kind))[2] == frozenset()


def test_a_member_that_unpacks_to_more_than_it_says_is_not_unpacked(tmp_path):
    """bzip2 turns 45 bytes into 900,000; its declared size is 10 (B1)."""
    bomb = bz2.compress(bytes(32 << 20))
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("state.json", bytes(32 << 20))
    data = raw.getvalue().replace(struct.pack("<I", 32 << 20), struct.pack("<I", 10))
    assert len(bomb) < len(data) < 1000
    tracemalloc.start()
    try:
        found = judged(tmp_path, "m.pt", data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found[2] == frozenset()
    assert most < 8 << 20


def test_a_zip_that_lists_a_gigabyte_of_members_is_not_listed(tmp_path):
    """A sparse file of that size takes no space on the disk (B1)."""
    path = tmp_path / "ck" / "m.pt"
    path.parent.mkdir()
    size = 1 << 30
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, size - 4, 4, 0))
    (item,) = manifests.walk(path.parent)
    tracemalloc.start()
    try:
        found = completeness.steps_in(item)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found == frozenset()
    assert most < 8 << 20


def test_folders_too_deep_to_name_are_left_out_of_a_snapshot(deep_folder):
    """A path has at most 1,024 characters; the rest of the folder is kept (B1)."""
    put(deep_folder, {"weights.bin": b"mine"})

    found = saver_layouts.look(deep_folder)

    assert [item.path for item in found.files] == ["weights.bin"]
    assert list(found.left_out.values()) == ["its name cannot be kept; rename it"]


def test_folders_too_deep_to_name_are_refused_in_an_output(deep_folder):
    """An output is complete or absent (B1)."""
    with pytest.raises(CheckpointError, match="cannot be kept; rename it"):
        manifests.walk(deep_folder)


def test_folders_of_any_depth_are_removed(tmp_path):
    """Otherwise a restore into the folder, or the release of a machine, would fail for ever (B1)."""
    deep(tmp_path / "ck/inner", depth=200)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        Root.real(tmp_path).remove("ck")
    finally:
        sys.setrecursionlimit(before)

    assert not (tmp_path / "ck").exists()


def test_links_that_multiply_folders_are_counted(tmp_path, monkeypatch):
    """Twenty folders of two links each to the next are a million paths (B1)."""
    monkeypatch.setattr(manifests, "MOST_ENTRIES", 1000)
    for number in range(20):
        folder = tmp_path / f"out/d{number}"
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            (folder / name).symlink_to(f"../d{number + 1}")
    put(tmp_path / "out", {"d20/file": b"x"})

    with pytest.raises(CheckpointError, match=r"more than 1000 files and folders; pack them"):
        manifests.walk(tmp_path / "out")


@pytest.mark.parametrize("seen", [manifests.walk, saver_layouts.look])
def test_more_files_than_a_manifest_can_list_are_not_listed(tmp_path, monkeypatch, seen):
    """Neither in one folder nor in many (B1)."""
    monkeypatch.setattr(manifests, "MOST_ENTRIES", 10)
    put(tmp_path / "flat", {str(number): b"" for number in range(11)})
    put(tmp_path / "nested", {f"{number}/a": b"" for number in range(6)})

    for folder in ("flat", "nested"):
        with pytest.raises(CheckpointError, match=r"more than 10 files and folders"):
            seen(tmp_path / folder)


def test_a_folder_of_a_billion_names_is_listed_in_parts(tmp_path):
    """Only as many as the caller requests are read (B1)."""
    put(tmp_path, {str(number): b"" for number in range(9)})

    assert len(Root.real(tmp_path).scan(most=4)) == 4
    assert root.MOST_NAMES >= manifests.MOST_ENTRIES


def test_a_save_that_cannot_be_listed_is_abandoned_and_the_next_is_uploaded(bench, store, monkeypatch):
    """The reason is recorded (B1)."""
    monkeypatch.setattr(manifests, "MOST_ENTRIES", 10)
    bench.session_saves(NAME, {f"{number}.bin": b"" for number in range(20)}, step=300)
    bench.session_saves("g1-step-00000400-a2", step=400)
    uploads = Checkpoints(bench.context, keep=2)

    for _ in range(4):
        bench.clock.now += 1000
        uploads.step()

    assert store.size("checkpoints/g1-step-00000400-a2/manifest-c1.json") is not None
    assert "more than 10 files" in json.loads(bench.spool.done(NAME).read_bytes())["lost"]


def test_a_snapshot_of_a_folder_that_cannot_be_listed_is_not_taken(make_bench, tmp_path, monkeypatch):
    """The status contains the reason (B1)."""
    monkeypatch.setattr(manifests, "MOST_ENTRIES", 10)
    bench = make_bench(layout={"checkpoint_path": str(tmp_path / "ck")})
    put(tmp_path / "ck", {str(number): b"" for number in range(20)})
    bench.context.memory.update(is_laid_out=True, start_step=0)
    bench.context.remember_places()
    bench.wrapper_says(ended={"exit_code": 0, "reason": "succeeded"})

    Snapshots(bench.context, {"seconds": 1}).step()

    assert "more than 10 files" in bench.context.messages.text()


PATHS = st.lists(st.sampled_from(("a", "b", "c")), min_size=1, max_size=3).map("/".join)
TARGETS = st.lists(st.sampled_from(("a", "b", "c", "..", ".", "")), min_size=1, max_size=5).map("/".join)


@example(links={"a/b": "..", "c": "a/b/../d"})
@given(links=st.dictionaries(PATHS, TARGETS, max_size=5))
def test_no_links_that_a_manifest_accepts_lead_out_of_its_folder(tmp_path_factory, links):
    """Neither alone nor together: the kernel resolves each to a path below the folder (B1)."""
    folder = tmp_path_factory.mktemp("x") / "ck"
    folder.mkdir()
    try:
        manifest = Manifest(links=links)
    except ValueError:
        return

    manifests.lay_links(manifest, Root.real(folder))

    assert all((folder / path).resolve().is_relative_to(folder) for path in links if _ends(folder / path))


def _ends(path):
    """Return whether the links at *path* do not lead round in a circle, by the kernel."""
    try:
        path.stat()
    except OSError as err:
        return err.errno != errno.ELOOP
    return True
