"""Outputs: a folder or a file, whose manifest is written last, and what a reader finds."""

import os

import pytest
from fakes.store_reader import fetch_output, read_output

from envscaler_airflow.errors import CheckpointError, StoreError
from envscaler_airflow.store import manifests
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.manifests import stored_path, walk
from envscaler_airflow.store.outputs import Hooks, is_output_uri, open_folder, put_output
from envscaler_airflow.store.run import Run

WHO = {"attempt": (1, 2), "claim": 1}


@pytest.fixture
def store(tmp_path):
    """The store of one run."""
    (tmp_path / "store/d/run").mkdir(parents=True)
    return Run(FileStore(tmp_path / "store"), "d/run")


@pytest.fixture
def model(tmp_path):
    """A folder to deliver; it contains one of our reserved names."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"123")
    (folder / "manifest.json").write_text('{"the training": "has one too"}')
    (folder / "sub/manifest.json").write_text("{}")
    return folder


def tree(folder):
    """All files below *folder*."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_handed_over_by_its_uri(store, model, tmp_path):
    """It arrives unchanged, including the training's own file called manifest.json."""
    uri = put_output(store, "model", model, **WHO)

    manifest = fetch_output(uri, tmp_path / "in")

    assert uri == f"file://{tmp_path}/store/d/run/outputs/g1-a2-c1/model"
    assert is_output_uri(uri)
    assert tree(tmp_path / "in") == tree(model)
    assert (manifest.kind, manifest.generation, manifest.attempt) == ("directory", 1, 2)


def test_a_file_is_handed_over_under_its_name(store, tmp_path):
    """An output that is one file arrives as that file."""
    (tmp_path / "pred.csv").write_text("a,b")

    uri = put_output(store, "predictions", tmp_path / "pred.csv", **WHO)

    assert fetch_output(uri, tmp_path / "in").kind == "file"
    assert tree(tmp_path / "in") == {"pred.csv": b"a,b"}


def test_what_does_not_exist_is_named(store, tmp_path):
    """The command must write it; the message names the output and its path."""
    with pytest.raises(CheckpointError, match=r"output 'model': .*/nothing does not exist"):
        put_output(store, "model", tmp_path / "nothing", **WHO)


def test_an_empty_folder_is_an_output(store, tmp_path):
    """It exists; only the stage decides whether it may be empty."""
    (tmp_path / "empty").mkdir()

    uri = put_output(store, "empty", tmp_path / "empty", **WHO)

    assert read_output(uri).files == ()


def test_an_output_that_was_never_written_is_absent(store):
    """The run exists but its output does not: that is certain, so no reader waits for the store."""
    with pytest.raises(CheckpointError, match="never completed"):
        read_output(store.uri("outputs/g1-a2-c1/model"))


def test_without_its_manifest_it_does_not_count(store, model, monkeypatch):
    """The sidecar dies before the manifest: a reader gets the error that it was never completed."""
    monkeypatch.setattr(
        manifests, "write_manifest", lambda *_, **__: (_ for _ in ()).throw(StoreError("down"))
    )
    with pytest.raises(StoreError):
        put_output(store, "model", model, **WHO)

    with pytest.raises(CheckpointError, match="never completed"):
        read_output(store.uri("outputs/g1-a2-c1/model"))


def test_a_repeated_upload_never_mixes_with_the_old_one(store, model, monkeypatch):
    """While a pod uploads its output again, there is none."""
    put_output(store, "model", model, **WHO)
    (model / "weights.bin").write_bytes(b"456")

    def down(*_):
        raise StoreError("down")

    monkeypatch.setattr(store.store, "put_file", down)
    with pytest.raises(StoreError):
        put_output(store, "model", model, **WHO)

    with pytest.raises(CheckpointError, match="never completed"):
        read_output(store.uri("outputs/g1-a2-c1/model"))


@pytest.mark.parametrize("newer", [{"attempt": (1, 2), "claim": 2}, {"attempt": (1, 3), "claim": 1}])
def test_a_pod_that_wakes_late_leaves_the_output_of_a_newer_one_alone(store, model, tmp_path, newer):
    """It slept between its check and its first write, and the newer pod stored the run's output (D14)."""
    stored = []

    def sleeps():
        if not stored:
            stored.append(put_output(store, "model", model, **newer))
            return
        raise CheckpointError("another pod has claimed this node")

    (tmp_path / "late").mkdir()
    (tmp_path / "late/weights.bin").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="another pod"):
        put_output(store, "model", tmp_path / "late", **WHO, hooks=Hooks(check=sleeps))

    fetch_output(stored[0], tmp_path / "in")
    assert tree(tmp_path / "in") == tree(model)


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json.file", "sub/manifest.json"])
def test_damage_is_found_at_the_fetch(store, model, tmp_path, name):
    """Every file is checked, also one with a reserved name."""
    uri = put_output(store, "model", model, **WHO)
    path = tmp_path / "store/d/run/outputs/g1-a2-c1/model" / name
    path.write_bytes(path.read_bytes()[:-1] + b"~")

    with pytest.raises(CheckpointError, match="another sha256"):
        fetch_output(uri, tmp_path / "in")


def test_a_fetch_that_was_cut_short_goes_on(store, model, tmp_path, monkeypatch):
    """Complete files are not fetched again; a damaged one is."""
    monkeypatch.setattr(FileStore, "at_once", 1)
    (tmp_path / "in").mkdir()
    uri = put_output(store, "model", model, **WHO)
    seen = []

    def cut():
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    reader, prefix = open_folder(uri)
    with pytest.raises(KeyboardInterrupt):
        manifests.fetch(reader, prefix, read_output(uri), tmp_path / "in", between=cut)
    (tmp_path / "in/manifest.json").write_text("torn")
    got = []
    reader.get_file = lambda name, path, get=reader.get_file: (got.append(name), get(name, path))

    manifests.fetch(reader, prefix, read_output(uri), tmp_path / "in")

    assert [name.rpartition("/")[2] for name in got] == ["manifest.json.file", "weights.bin"]
    assert tree(tmp_path / "in") == tree(model)


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("model.bin", "model.bin"),
        ("manifest.json", "manifest.json.file"),
        ("manifest.json.node-1", "manifest.json.node-1.file"),
        ("manifest.json.file", "manifest.json.file.file"),
        ("manifest.json/x", "manifest.json.file/x"),
        ("sub/manifest.json", "sub/manifest.json"),
    ],
)
def test_names_of_ours_are_kept_apart(path, stored):
    """No file of the training can replace a manifest or a node's list."""
    assert stored_path(path) == stored


def test_links_inside_are_followed_and_loops_end(tmp_path):
    """``latest -> step-2`` is stored as a copy; a link to a parent folder is omitted."""
    folder = tmp_path / "out"
    (folder / "step-2").mkdir(parents=True)
    (folder / "step-2/a").write_text("x")
    (folder / "latest").symlink_to("step-2")
    (folder / "step-2/up").symlink_to("..")
    (folder / "dangling").symlink_to("nothing")
    os.mkfifo(folder / "pipe")

    assert [item.path for item in walk(folder)] == ["latest/a", "step-2/a"]


def test_a_link_that_leads_outside_is_refused(store, model, tmp_path):
    """The sidecar may read more than the training may, so it follows no link out of the folder."""
    (tmp_path / "secret").write_text("token")
    (model / "stolen").symlink_to("../secret")

    with pytest.raises(CheckpointError, match=r"the link leads to .*/secret, outside"):
        put_output(store, "model", model, **WHO)


def test_an_output_that_is_a_link_stays_beside_it(store, model, tmp_path):
    """``best -> model`` is treated as a folder; ``best -> /etc`` is rejected."""
    (tmp_path / "out").mkdir()
    (tmp_path / "best").symlink_to("model")
    (tmp_path / "out/stolen").symlink_to(model)

    assert read_output(put_output(store, "best", tmp_path / "best", **WHO)).files
    with pytest.raises(CheckpointError, match=r"the link leads to .*/model, outside"):
        put_output(store, "stolen", tmp_path / "out/stolen", **WHO)


def test_a_file_that_is_a_link_stays_beside_it(store, model, tmp_path):
    """``best.bin -> model/weights.bin`` is treated as a file; ``-> /etc/shadow`` is rejected."""
    (tmp_path / "out").mkdir()
    (tmp_path / "best.bin").symlink_to("model/weights.bin")
    (tmp_path / "out/stolen.bin").symlink_to(model / "weights.bin")

    uri = put_output(store, "best", tmp_path / "best.bin", **WHO)

    assert fetch_output(uri, tmp_path / "in").kind == "file"
    assert tree(tmp_path / "in") == {"best.bin": (model / "weights.bin").read_bytes()}
    with pytest.raises(CheckpointError, match=r"the link leads to .*/weights.bin, outside"):
        put_output(store, "stolen", tmp_path / "out/stolen.bin", **WHO)


def test_a_file_that_grows_meanwhile_is_refused(store, model):
    """Its hash would match no version of the file."""

    def grow():
        with (model / "weights.bin").open("ab") as file:
            file.write(b"4")

    with pytest.raises(CheckpointError, match=r"weights.bin changed while it was uploaded"):
        put_output(store, "model", model, **WHO, hooks=Hooks(between=grow))


@pytest.mark.parametrize("name", ["../up", "a/b", "", "x" * 200])
def test_a_name_that_is_no_folder_name_is_refused(store, model, name):
    """Output names become folders of the store."""
    with pytest.raises(CheckpointError, match=r"use letters, digits"):
        put_output(store, name, model, **WHO)
