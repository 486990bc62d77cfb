"""Problems that only a folder has: links, pipes, crashes, full disks, folders that vanish."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.store import file as module
from envscaler_airflow.store import open_store
from envscaler_airflow.store.file import FileStore


@pytest.fixture
def store(tmp_path):
    """A store with one file ``a/b``."""
    store = FileStore(tmp_path / "store")
    store.write("a/b", b"1")
    return store


def calls(store, name, tmp_path):
    """Every call with a file name."""
    (tmp_path / "up").write_bytes(b"x")
    return [
        lambda: store.read(name),
        lambda: store.size(name),
        lambda: store.get_file(name, tmp_path / "down"),
    ]


def test_a_link_to_a_file_outside_is_not_followed(store, tmp_path):
    """If training code links ``status`` to a secret, nothing is read through the link."""
    (tmp_path / "secret").write_bytes(b"secret")
    (store.root / "link").symlink_to(tmp_path / "secret")

    for call in calls(store, "link", tmp_path):
        with pytest.raises(ProtocolError, match="'link' is a symbolic link"):
            call()
    assert store.names("") == ["a/b"]
    assert store.children("") == ["a"]


def test_a_link_to_a_folder_outside_is_not_followed(store, tmp_path):
    """Neither for reading, nor for writing, nor for a listing."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (store.root / "link").symlink_to(outside)

    writes = [
        lambda: store.write("link/new", b"x"),
        lambda: store.create("link/new", b"x"),
        lambda: store.put_file("link/new", tmp_path / "up"),
        lambda: store.delete("link/file"),
        lambda: store.names("link"),
        lambda: store.children("link"),
        lambda: store.delete_tree("link/sub"),
    ]
    for call in calls(store, "link/file", tmp_path) + writes:
        with pytest.raises(ProtocolError, match="'link' is a symbolic link"):
            call()
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_a_tree_is_deleted_without_what_its_links_point_to(store, tmp_path):
    """The links are deleted, their targets are not."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_bytes(b"kept")
    (store.root / "a/link").symlink_to(outside)
    (store.root / "whole").symlink_to(outside)

    store.delete_tree("a")
    store.delete_tree("whole")

    assert list(store.root.iterdir()) == []
    assert (outside / "manifest.json").read_bytes() == b"kept"


def test_writing_replaces_a_link_and_not_its_target(store, tmp_path):
    """A link with the same name is overwritten like a file, and counts as existing."""
    (tmp_path / "outside").write_bytes(b"kept")
    (store.root / "link").symlink_to(tmp_path / "outside")

    assert store.create("link", b"x") is False
    store.write("link", b"new")

    assert store.read("link") == b"new"
    assert (tmp_path / "outside").read_bytes() == b"kept"


def test_the_root_itself_may_be_a_link(tmp_path):
    """The person who sets the store's URL may use one; both names show what is written."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")

    FileStore(tmp_path / "store").write("a", b"1")

    assert FileStore(tmp_path / "disk").read("a") == b"1"


def test_a_pipe_blocks_nobody(store):
    """A named pipe in place of a status is rejected at once."""
    os.mkfifo(store.root / "pipe")

    with pytest.raises(ProtocolError, match="neither a file nor a folder"):
        store.read("pipe")
    assert store.names("") == ["a/b"]


def test_a_folder_that_is_not_there_is_not_an_empty_store(tmp_path):
    """An unmounted disk must not look like a store without runs."""
    store = FileStore(tmp_path / "unmounted")

    for call in [lambda: store.read("a"), lambda: store.size("a"), lambda: store.names("")]:
        with pytest.raises(StoreError, match="does not exist") as caught:
            call()
        assert caught.value.transient
    assert not (tmp_path / "unmounted").exists()


def test_two_first_writers_make_the_folder_together(tmp_path, monkeypatch):
    """One finds no folder; before it looks at what this store has seen, the other has made and used it."""
    store = FileStore(tmp_path / "new")
    others = [lambda: store.write("b", b"2")]
    really = os.open

    def open_late(path, *arguments, **options):
        try:
            return really(path, *arguments, **options)
        except FileNotFoundError:
            if path == store.root and others:
                others.pop()()
            raise

    monkeypatch.setattr(module.os, "open", open_late)
    store.write("a", b"1")

    assert not others
    assert (store.read("a"), store.read("b")) == (b"1", b"2")


def test_what_a_killed_writer_left_is_not_seen(store):
    """A temporary file is not listed, does not keep its folder in listings, and cannot be named."""
    temporary = f".{'0' * 32}.tmp"
    (store.root / "c").mkdir()
    (store.root / "c" / temporary).write_bytes(b"torn")
    (store.root / "a" / temporary).write_bytes(b"torn")

    assert store.names("") == ["a/b"]
    assert store.children("") == ["a"]
    with pytest.raises(ProtocolError, match="temporary"):
        store.write(temporary, b"x")


def test_no_temporary_file_is_left(store, tmp_path):
    """After a write, a create that won, one that lost, and a copy."""
    (tmp_path / "up").write_bytes(b"x")

    store.write("a/b", b"2")
    store.create("a/c", b"1")
    store.create("a/c", b"2")
    store.put_file("a/d", tmp_path / "up")

    assert sorted(path.name for path in (store.root / "a").iterdir()) == ["b", "c", "d"]


@pytest.mark.parametrize(("code", "transient"), [(errno.ENOSPC, True), (errno.EROFS, False)])
def test_a_failed_write_keeps_the_old_file(store, monkeypatch, code, transient):
    """A full disk may become free; a read-only one stays so. Neither damages the old file."""

    def refuse(_descriptor):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", refuse)
        for call in [lambda: store.write("a/b", b"2"), lambda: store.create("a/c", b"1")]:
            with pytest.raises(StoreError, match=os.strerror(code)) as caught:
                call()
            assert caught.value.transient is transient

    assert store.read("a/b") == b"1"
    assert store.read("a/c") is None
    assert [path.name for path in (store.root / "a").iterdir()] == ["b"]


def test_a_file_is_on_the_disk_before_its_name_is(store, monkeypatch):
    """Fsync of all three bytes, then the name, then fsync of the folder: a power cut leaves old or new."""
    done = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def record_fsync(descriptor):
        facts = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(facts.st_mode) else f"{facts.st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(module.os, "fsync", record_fsync)
    monkeypatch.setattr(module.os, "replace", lambda *a, **k: (done.append("replace"), replace(*a, **k)))
    monkeypatch.setattr(module.os, "link", lambda *a, **k: (done.append("link"), link(*a, **k)))

    store.write("a/b", b"123")
    store.create("a/c", b"123")

    assert done == ["3 bytes", "replace", "folder", "3 bytes", "link", "folder"]


def test_a_folder_that_became_empty_is_removed(store):
    """Up to the first folder that is not empty, never the root."""
    store.write("a/c/d/e", b"1")

    store.delete("a/c/d/e")
    assert [path.name for path in (store.root / "a").iterdir()] == ["b"]
    store.delete_tree("a")
    assert list(store.root.iterdir()) == []


def test_a_folder_that_is_removed_under_a_write_is_made_again(store, tmp_path, monkeypatch):
    """Another process deletes the folder's last file just before our first one is created in it."""
    (tmp_path / "up").write_bytes(b"1")
    real, raced = module._place, []

    def place(folder, last, fill, *, exclusive):
        if last not in raced:
            raced.append(last)
            (store.root / "new").rmdir()
        return real(folder, last, fill, exclusive=exclusive)

    monkeypatch.setattr(module, "_place", place)

    store.put_file("new/copy", tmp_path / "up")

    assert store.read("new/copy") == b"1"
    store.delete("new/copy")
    assert store.create("new/created", b"2") is True


def test_a_link_whose_answer_was_lost_counts_as_ours(store, monkeypatch):
    """NFS repeats the request and then returns "exists" for the link that we created."""
    real = os.link

    def link_and_lose(*args, **kwargs):
        real(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(module.os, "link", link_and_lose)

    assert store.create("a/new", b"1") is True
    assert store.read("a/new") == b"1"


def test_a_filesystem_without_links_is_an_error_that_lasts(store, monkeypatch):
    """An error is better than a create that two writers can win."""

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(module.os, "link", refuse)

    with pytest.raises(StoreError) as caught:
        store.create("a/new", b"1")
    assert not caught.value.transient
    assert store.read("a/new") is None


def test_below_a_file_nothing_can_be_written(store):
    """``a/b`` is a file; an object store would allow ``a/b/c``, but a folder does not."""
    with pytest.raises(StoreError, match="Not a directory"):
        store.write("a/b/c", b"1")


def test_of_many_creators_one_wins(store):
    """Eight threads, fifty names: each name is won once and contains the winner's bytes."""
    wins: dict[str, list[bytes]] = {f"events/{number}": [] for number in range(50)}
    start = threading.Barrier(8)

    def create_all(writer):
        start.wait()
        for name, winners in wins.items():
            if store.create(name, writer):
                winners.append(writer)

    threads = [threading.Thread(target=create_all, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {name: [store.read(name)] for name in wins} == wins


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(store):
    """The folder vanishes whenever it is empty, and each write creates it again."""
    failures = []

    def write_and_delete(name):
        try:
            for _ in range(50):
                store.write(name, b"x")
                assert store.read(name) == b"x"
                store.delete(name)
        except (AssertionError, StoreError) as err:
            failures.append(err)

    threads = [threading.Thread(target=write_and_delete, args=(f"deep/er/{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert store.names("") == ["a/b"]


def test_a_manifest_goes_before_its_files(store, monkeypatch):
    """An interrupted deletion leaves a folder that does not count."""
    store.write("c/manifest.json", b"{}")
    store.write("c/weights", b"1")

    def cut_short(*_args, **_kwargs):
        raise OSError(errno.EIO, "cut short")

    monkeypatch.setattr(module.shutil, "rmtree", cut_short)

    with pytest.raises(StoreError):
        store.delete_tree("c")
    assert store.names("c") == ["c/weights"]


def test_descriptors_are_given_back(store, tmp_path):
    """After any call, successful or not, no descriptor stays open."""
    os.mkfifo(store.root / "pipe")
    (store.root / "link").symlink_to(tmp_path)
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))

    for name in ["a/b", "a", "a/b/c", "none", "none/x", "link", "link/x", "pipe"]:
        for call in [store.read, store.size, store.names, store.children, store.delete]:
            if call == store.delete and name == "a/b":
                continue
            try:
                call(name)
            except (ProtocolError, StoreError):
                continue

    assert len(list(opened.iterdir())) == before


def test_a_local_full_disk_is_not_the_stores_fault(store, tmp_path):
    """A failure at the target of a download is the caller's own OSError."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(OSError, match="exists"):
        store.get_file("a/b", tmp_path / "file" / "down")


def test_the_path_is_taken_as_it_stands(tmp_path):
    """There is no percent-decoding: a run's folder contains percent signs and its URI opens it again."""
    store = open_store(f"file://{tmp_path}/%41//x/")
    store.write("a", b"1")

    assert (tmp_path / "%41/x/a").read_bytes() == b"1"
    assert store.url == f"file://{tmp_path}/%41/x"
    assert open_store(f"{tmp_path}/%41/x").read("a") == b"1"
    assert open_store(f"file://localhost{tmp_path}/%41/x").read("a") == b"1"
