"""Writable volumes of an object store: written back with checkpoints, and at the end."""

import os

import pytest

from envscaler_airflow.sidecar import setup
from envscaler_airflow.sidecar.uploads import Checkpoints, WriteBack
from envscaler_airflow.store import open_store
from envscaler_airflow.store.checkpoints import complete_checkpoints

NAME = "g1-step-00000300-a2"


@pytest.fixture
def bucket(request):
    """An object store of its own with one file."""
    url = f"memory://{request.node.name}/data"
    store = open_store(url)
    store.write("a/old.txt", b"old")
    return store


@pytest.fixture
def bench(make_bench, bucket, tmp_path):
    """A node whose volume was laid out."""
    mounts = [
        {"name": "data", "source": bucket.url, "path": str(tmp_path / "data")},
        {"name": "raw", "source": bucket.url, "path": str(tmp_path / "raw"), "read_only": True},
    ]
    made = make_bench(layout={"mounts": mounts})
    made.owner_asks()
    setup.lay_out(made.context)
    made.data = tmp_path / "data"
    return made


def puts_of(bucket, monkeypatch):
    """Record the names that are uploaded from here on."""
    found = []
    kind = type(bucket)
    real = kind.put_file

    def put_file(self, name, path):
        if self.url == bucket.url:
            found.append(name)
        real(self, name, path)

    monkeypatch.setattr(kind, "put_file", put_file)
    return found


def test_what_changed_goes_up_once(bench, bucket, monkeypatch):
    """New and changed files; files that were only read, and those of the other volume, are not uploaded."""
    mark = bench.spool.root / "volume-0.mark"
    os.utime(mark, ns=(mark.stat().st_mtime_ns + 20_000_000,) * 2)  # more than the error of the coarse clock
    (bench.data / "b").mkdir()
    for path, text in (("b/new.txt", "new"), ("a/old.txt", "changed")):
        (bench.data / path).write_text(text)
        while (bench.data / path).stat().st_ctime_ns <= mark.stat().st_mtime_ns:
            (bench.data / path).chmod(0o644)
    (bench.data.parent / "raw" / "a" / "old.txt").write_text("read-only, and written all the same")
    puts = puts_of(bucket, monkeypatch)

    assert WriteBack(bench.context).step()

    assert puts == ["a/old.txt", "b/new.txt"]
    assert bucket.read("a/old.txt") == b"changed"
    assert bucket.read("b/new.txt") == b"new"
    assert mark.stat().st_mtime_ns >= (bench.data / "b/new.txt").stat().st_ctime_ns  # not uploaded again


@pytest.mark.parametrize(("behind_ms", "goes"), [(5, True), (20, False)])
def test_a_clock_that_is_coarse_hides_no_change(bench, bucket, monkeypatch, behind_ms, goes):
    """A file may have a time up to 10 ms before the mark that it was written after; at 20 ms it is older."""
    (bench.data / "b.txt").write_text("new")
    at = (bench.data / "b.txt").stat().st_ctime_ns + behind_ms * 1_000_000
    os.utime(bench.spool.root / "volume-0.mark", ns=(at, at))
    puts = puts_of(bucket, monkeypatch)

    WriteBack(bench.context).flush()

    assert ("b.txt" in puts) is goes


def test_an_old_time_hides_no_change(bench, bucket):
    """Unpacked with the times of an archive: ctime shows the change."""
    (bench.data / "unpacked").write_text("x")
    os.utime(bench.data / "unpacked", (1, 1))

    WriteBack(bench.context).flush()

    assert bucket.read("unpacked") == b"x"


def test_a_checkpoint_counts_only_after_its_volumes_are_up(bench, bucket, monkeypatch):
    """Their store does not answer: no manifest; later both are there."""
    (bench.data / "index").write_text("1")
    bench.session_saves(NAME)
    uploads = Checkpoints(bench.context, keep=3)
    kind = type(bucket)
    real = kind.put_file

    def refuse(self, name, path):
        raise OSError("away")

    monkeypatch.setattr(kind, "put_file", refuse)
    assert not uploads.step()
    assert bench.store.read(f"checkpoints/{NAME}/manifest-c1.json") is None
    monkeypatch.setattr(kind, "put_file", real)
    bench.clock.now += 60

    assert uploads.step()

    assert bucket.read("index") == b"1"
    assert bench.store.read(f"checkpoints/{NAME}/manifest-c1.json") is not None


def test_a_sidecar_that_was_killed_meanwhile_uploads_again(bench, bucket, monkeypatch):
    """The mark moves only after every upload."""
    (bench.data / "one").write_text("1")
    kind, real = type(bucket), type(bucket).put_file
    monkeypatch.setattr(kind, "put_file", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    assert not WriteBack(bench.context).step()
    monkeypatch.setattr(kind, "put_file", real)

    assert WriteBack(bench.restarted()).step()

    assert bucket.read("one") == b"1"


def test_a_link_out_of_the_volume_is_refused(bench, tmp_path):
    """Its target is not the training's."""
    (tmp_path / "secret").write_text("x")
    (bench.data / "link").symlink_to(tmp_path / "secret")

    assert WriteBack(bench.context).step()

    assert "leads to" in bench.state.failed


def test_a_volume_that_cannot_be_kept_costs_no_checkpoint(bench, bucket, tmp_path):
    """The status reports it for as long as it lasts, and the end fails; until then checkpoints count."""
    link = bench.data / "link"
    link.symlink_to(tmp_path)
    bench.session_saves(NAME)
    uploads = Checkpoints(bench.context, keep=3)

    assert uploads.step()

    assert complete_checkpoints(bench.store, 1) == (NAME,)
    assert "not written back: " in bench.context.messages.text()
    link.unlink()
    (bench.data / "new").write_text("1")
    bench.session_saves("g1-step-00000400-a2")
    assert uploads.step()
    assert bucket.read("new") == b"1"
    assert bench.context.messages.text() == ""


def test_an_empty_volume_that_may_be_written_is_an_empty_folder(make_bench, tmp_path):
    """A read-only one must not be empty."""
    mount = {"name": "out", "source": "memory://nothing/there", "path": str(tmp_path / "out")}
    made = make_bench(layout={"mounts": [mount]})
    made.owner_asks()

    setup.lay_out(made.context)

    assert made.start().get("failed") is None
    assert list((tmp_path / "out").iterdir()) == []
