"""Files on this machine: the user's folders, and writes that a reader sees in full or not at all."""

import errno
import shutil
from pathlib import Path

import pytest

from envscaler_airflow.cli.common import default_store_url
from envscaler_airflow.local_files import cache_folder, data_folder, landing, remove_tree, write_atomic


def test_folders_lie_below_what_the_environment_names(monkeypatch):
    """Cache and data each have their own variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")

    assert (cache_folder(), data_folder()) == (Path("/c/envscaler"), Path("/d/envscaler"))


@pytest.mark.parametrize("value", [None, "", "not/absolute"])
def test_what_names_no_absolute_folder_does_not_count(monkeypatch, value):
    """Unset, empty and relative variables leave the home's folders."""
    monkeypatch.setenv("HOME", "/h")
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    assert cache_folder() == Path("/h/.cache/envscaler")
    assert data_folder() == Path("/h/.local/share/envscaler")


def test_a_store_that_is_named_needs_no_home(monkeypatch):
    """Without a home, a store set by its variable is sufficient."""

    def homeless():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("ENVSCALER_STORE_URL", "s3://runs/here")

    assert default_store_url() == "s3://runs/here"


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    """Neither a part of the new content nor a temporary file remains."""
    path = tmp_path / "table"
    write_atomic(path, b"old")

    def write_half():
        with landing(path) as temporary:
            temporary.write_bytes(b"ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()

    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("table", b"old")]


@pytest.mark.parametrize("fault", [RecursionError(), OSError(errno.EMFILE, "Too many open files")])
def test_a_folder_that_is_too_deep_for_shutil_is_flattened_and_removed(tmp_path, monkeypatch, fault):
    """It may need more levels, or more open files, than the process has; no link is followed on the way."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run/a/b/c").mkdir(parents=True)
    (tmp_path / "run/a/b/link").symlink_to(outside)
    (tmp_path / "run/a/b/c/file").touch()
    real, calls = shutil.rmtree, []

    def rmtree(path, **options):
        calls.append(max(len(item.relative_to(path).parts) for item in path.rglob("*")))
        if len(calls) == 1:
            raise fault
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)

    remove_tree(tmp_path / "run")

    assert calls == [4, 2]
    assert [item.name for item in tmp_path.iterdir()] == ["outside"]


def test_a_folder_that_may_not_be_removed_is_reported(tmp_path):
    """An absent one too."""
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "absent")


@pytest.mark.parametrize("temporary", [None, "list.new"])
def test_a_write_follows_no_link(tmp_path, temporary):
    """Neither in place of the file, nor of its temporary name, nor of its folder (B1)."""
    (tmp_path / "secret").write_bytes(b"of others")
    (tmp_path / "outside").mkdir()
    (tmp_path / "spool").mkdir()
    for name in ("list", "list.new"):
        (tmp_path / "spool" / name).symlink_to(tmp_path / "secret")

    write_atomic(tmp_path / "spool/list", b"new", temporary=temporary)

    assert (tmp_path / "spool/list").read_bytes() == b"new"
    assert (tmp_path / "secret").read_bytes() == b"of others"
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="link"):
        write_atomic(tmp_path / "link/list", b"new", temporary=temporary, follow=False)
    assert list((tmp_path / "outside").iterdir()) == []
