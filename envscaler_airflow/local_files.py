"""Files on this machine: the user's folders, atomic writes, reads that nothing blocks, and removal.

Source of the folders: XDG Base Directory Specification 0.8 (freedesktop.org): a variable that is unset, empty
or not an absolute path does not count.
"""

from __future__ import annotations

import codecs
import csv
import errno
import getpass
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; UTF-32's begins with that of UTF-16, so the longer ones come first."""


def cache_folder() -> Path:
    """``envscaler`` below XDG_CACHE_HOME, else ``~/.cache``: what can be recreated.

    Raises:
        RuntimeError: Neither the variable nor a home is there.
    """
    return _below("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """``envscaler`` below XDG_DATA_HOME, else ``~/.local/share``: what is to stay.

    Raises:
        RuntimeError: Neither the variable nor a home is there.
    """
    return _below("XDG_DATA_HOME", ".local/share")


def _below(variable: str, default: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    return (base if base.is_absolute() else Path.home() / default) / "envscaler"


def user_name() -> str:
    """This process's user; its number where that has no name."""
    with suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return f"uid {os.getuid()}"


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a packaged CSV file by column; lines that begin with ``#`` are comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@contextmanager
def landing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to *path*, which is renamed to *path* if the block does not raise."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_atomic(path: Path, data: bytes, *, temporary: str | None = None, follow: bool = True) -> None:
    """Replace *path* in one step; the data is on disk before it is visible.

    Args:
        path: The file. A link in its place is replaced, not followed.
        data: Its new content.
        temporary: Its name until then, where a lock keeps others out: a fixed name leaves nothing behind, as
            the next write replaces the leftover of a killed one.
        follow: False where a training can put a link in place of the folder itself.

    Raises:
        OSError: Not written, for example because its folder is absent; the old file stays.
    """
    folder = os.open(path.parent, _FOLDER & ~os.O_NOFOLLOW if follow else _FOLDER)
    name = temporary or f".{uuid.uuid4().hex}.tmp"
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        with os.fdopen(os.open(name, _NEW, 0o666, dir_fd=folder), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def read_bytes(path: Path, most: int) -> bytes | None:
    """Content of a plain file of at most *most* bytes; None when it is absent.

    A training can put a pipe or a link in the place of any file that it can reach; neither blocks this call.

    Raises:
        OSError: It cannot be read, or is larger, or is not a plain file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a plain file")
    with os.fdopen(fd, "rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes")
    return text


def remove_tree(path: Path | str, *, dir_fd: int | None = None) -> None:
    """Remove the folder *path* (below the open folder *dir_fd*) at any depth; follow no link.

    ``shutil.rmtree`` recurses once, and keeps one folder open, for each level. A training can create more
    levels than a process may have of either.

    Raises:
        OSError: It is absent, or cannot be removed.
    """
    try:
        shutil.rmtree(path, dir_fd=dir_fd)
    except RecursionError:
        pass
    except OSError as err:
        if err.errno != errno.EMFILE:
            raise
    else:
        return
    _flatten(path, dir_fd)
    shutil.rmtree(path, dir_fd=dir_fd)


def _flatten(path: Path | str, dir_fd: int | None) -> None:
    """Move every folder below *path* directly into it, with two folders open at a time."""
    top = os.open(path, _FOLDER, dir_fd=dir_fd)
    try:
        waiting = _folders(top)
        while waiting:
            inner = os.open(waiting.pop(), _FOLDER, dir_fd=top)
            try:
                for name in _folders(inner):
                    moved = uuid.uuid4().hex
                    os.rename(name, moved, src_dir_fd=inner, dst_dir_fd=top)
                    waiting.append(moved)
            finally:
                os.close(inner)
    finally:
        os.close(top)


def _folders(descriptor: int) -> list[str]:
    with os.scandir(descriptor) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def real_path(path: Path) -> Path:
    """Resolve *path* with every link followed.

    Raises:
        OSError: Its links form a loop.
    """
    try:
        return path.resolve()
    except RuntimeError as err:  # as Python before 3.13 reports it
        raise OSError(errno.ELOOP, "its links lead round in a circle") from err


def read_plain(path: Path, most: int) -> str:
    """Read the text of *path*, at most *most* bytes, as UTF-8 or as its byte order mark declares.

    Links are followed. Editors on Windows write such a mark, and PowerShell writes UTF-16.

    Raises:
        OSError: The file cannot be read, is larger, or is not a regular file.
        UnicodeDecodeError: The text is in neither encoding.
    """
    data = read_bytes(real_path(path), most)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode("utf-8")
