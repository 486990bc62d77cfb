"""The run store in a folder: ``file://`` URLs and absolute paths."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.local_files import remove_tree
from envscaler_airflow.store.clock import DatedStore
from envscaler_airflow.store.keys import (
    AT_ONCE,
    MAX_BYTES,
    arriving,
    check_name,
    check_prefix,
    check_tree,
    is_manifest,
    is_name,
    join,
    reading,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp\Z")
_TRIES = 16
"""Retries of a write whose folder a concurrent delete removes. Chosen: each retry needs another delete."""
_NAMELESS = getattr(os, "O_TMPFILE", 0)
_COPY_BYTES = 1 << 20  # chosen: few calls, little memory
_LASTING = frozenset(
    {
        errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENOTSUP,
        errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
"""Errors that a retry does not fix; all others (full or stale disks, too many files) may pass."""


class FileStore(DatedStore):
    """Files below one folder.

    ``write`` uses a temporary file, fsync and rename; ``create`` uses a temporary file, fsync and link. So a
    reader sees a complete file or none, and exactly one of two creators wins. Every part of a name is opened
    without following symbolic links, so nothing in the tree can lead outside; the root itself may be a link.
    Empty folders are removed, because an object store has none.

    Once seen, the root must stay the same folder (its inode). While a store is unmounted, renamed or
    replaced, calls raise; it never looks empty, and a write does not recreate it.

    The folder must be on a filesystem with hard links (ext4, xfs, btrfs, NFS, EFS, ...).
    """

    def __init__(self, root: Path, *, must_exist: bool = False) -> None:
        """Use *root*. The first write creates it, unless *must_exist*.

        Raises:
            ProtocolError: *root* is not absolute.
        """
        super().__init__()
        if not root.is_absolute():
            raise ProtocolError(f"store folder {str(root)!r} is not absolute: write file:///path")
        self.root = Path("/" + os.path.normpath(root).lstrip("/"))
        self.url = f"file://{self.root}"
        self._must_exist = must_exist
        self._inode: int | None = None

    at_once = AT_ONCE
    _max_age_s = 3600.0  # chosen: a monotonic clock stops while a machine sleeps

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """Bytes of *name* and its mtime; None when it is absent."""
        with self._store_errors(name):
            file = self._open(name)
            if file is None:
                return None
            with file:
                facts = os.fstat(file.fileno())
                size = facts.st_size
                data = file.read(max_bytes + 1) if size <= max_bytes else b""
        size = max(size, len(data))
        self._check_size(name, size, max_bytes)
        return data, facts.st_mtime

    def _ask_date(self) -> None:
        """Create an unnamed file, or one that is removed at once; on NFS its time is the server's."""
        folder = self._open_root(make=False)
        try:
            self._dates.seen(_date_in(folder))
        finally:
            os.close(folder)

    def write(self, name: str, data: bytes) -> None:
        """Write *data* to *name*, atomically; replaces an existing file."""
        self._put(name, lambda file: file.write(data), exclusive=False)

    def create(self, name: str, data: bytes) -> bool:
        """Write *data* to *name* unless it exists; return True if this call created it."""
        return self._put(name, lambda file: file.write(data), exclusive=True)

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """Copy a local file to *name*, atomically."""

        def fill(file: BinaryIO) -> None:
            stream.seek(0)
            shutil.copyfileobj(stream, file, _COPY_BYTES)

        with reading(source) as stream:
            self._put(name, fill, exclusive=False)

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """Copy *name* to a local file; atomically if the target is a path."""
        with self._store_errors(name):
            file = self._open(name)
        if file is None:
            raise StoreError(f"{self.uri(name)} is absent")
        with file, arriving(target) as stream:
            while chunk := self._chunk(file, name):
                stream.write(chunk)

    def size(self, name: str) -> int | None:
        """Bytes of *name*; None when it is absent."""
        with self._store_errors(name):
            file = self._open(name)
            if file is None:
                return None
            with file:
                return os.fstat(file.fileno()).st_size

    def delete(self, name: str) -> None:
        """Delete *name*; do nothing if it is absent."""
        *folders, last = check_name(name).split("/")
        with self._store_errors(name), self._folder(folders) as folder:
            if folder is None:
                return
            # A name cannot delete a folder, as in an object store.
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(last, dir_fd=folder)
        self._prune(folders)

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below *prefix*, manifests first; if it is a link, delete the link."""
        *folders, last = check_tree(prefix).split("/")
        with self._store_errors(prefix), self._folder(folders) as folder:
            if folder is not None:
                manifests = [name for name, _ in _walk_into(folder, last) if is_manifest(name)]
                for name in manifests:
                    self.delete("/".join([*folders, name]))
                _remove_tree(last, folder)
        self._prune(folders)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every name below *prefix*."""
        bare = check_prefix(prefix)
        with self._store_errors(bare), self._folder(bare.split("/") if bare else []) as folder:
            return {} if folder is None else {join(bare, name): size for name, size in _walk_sizes(folder)}

    def children(self, prefix: str) -> list[str]:
        """First parts of the names below *prefix*, sorted."""
        bare = check_prefix(prefix)
        with self._store_errors(bare), self._folder(bare.split("/") if bare else []) as folder:
            return [] if folder is None else sorted(_children(folder))

    def uri(self, name: str) -> str:
        """``file://`` and the path of *name*, not percent-encoded, as fsspec and Airflow read it."""
        bare = check_prefix(name)
        return f"{self.url}/{bare}" if bare else self.url

    def _put(self, name: str, fill: Callable[[BinaryIO], object], *, exclusive: bool) -> bool:
        *folders, last = check_name(name).split("/")
        if _TEMPORARY.match(last):
            raise ProtocolError(f"name {name!r} has the form of this store's temporary files: use another")
        with self._store_errors(name):
            for _ in range(_TRIES):
                # A delete may remove the empty folder after we create it and before we create our first file
                # in it.
                with suppress(FileNotFoundError), self._folder(folders, make=True) as folder:
                    assert folder is not None
                    placed, date = _place(folder, last, fill, exclusive=exclusive)
                    self._dates.seen(date)
                    return placed
            raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again")

    def _open(self, name: str) -> BinaryIO | None:
        *folders, last = check_name(name).split("/")
        with self._folder(folders) as folder:
            if folder is None:
                return None
            try:
                descriptor = os.open(last, _READ, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError:
                _refuse_link(last, folder)
                raise
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            return None
        raise ProtocolError(f"{self.uri(name)} is neither a file nor a folder: remove it")

    def _chunk(self, file: BinaryIO, name: str) -> bytes:
        with self._store_errors(name):
            return file.read(_COPY_BYTES)

    @contextmanager
    def _folder(self, parts: list[str], *, make: bool = False) -> Iterator[int | None]:
        """Descriptor of the folder; None when it is absent and *make* is False."""
        descriptor: int | None = self._open_root(make=make)
        try:
            for part in parts:
                assert descriptor is not None
                inner = _enter(descriptor, part, make=make)
                os.close(descriptor)
                descriptor = inner
                if descriptor is None:
                    break
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_root(self, *, make: bool) -> int:
        seen = self._inode  # read first: another thread may make the folder meanwhile
        try:
            descriptor = os.open(self.root, _FOLDER & ~os.O_NOFOLLOW)
        except FileNotFoundError:
            if not make or self._must_exist or seen is not None:
                # An unmounted folder must not look like a store without runs.
                raise StoreError(
                    f"store folder {self.root} does not exist: nothing was written yet, or it is not mounted "
                    "here; mount it, or name the store that the runs are in",
                    transient=True,
                ) from None
            self._make_root()
            descriptor = os.open(self.root, _FOLDER & ~os.O_NOFOLLOW)
        inode = os.fstat(descriptor).st_ino
        if self._inode not in (None, inode):
            os.close(descriptor)
            fault = "is another folder than before: was it unmounted, or replaced? restart to use this one"
            raise StoreError(f"store folder {self.root} {fault}", transient=True)
        self._inode = inode
        return descriptor

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            why = (
                "its name is a link to what does not exist" if self.root.is_symlink() else err.strerror or err
            )
            fault = f"store folder {self.root} cannot be created: {why}"
            raise StoreError(
                fault, transient=err.errno not in {*_LASTING, errno.ENOENT, errno.EEXIST}
            ) from err

    def _prune(self, parts: list[str]) -> None:
        for depth in range(len(parts), 0, -1):
            with suppress(OSError, ProtocolError), self._folder(parts[: depth - 1]) as folder:
                if folder is not None:
                    os.rmdir(parts[depth - 1], dir_fd=folder)
                    continue
            return

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            lasting = err.errno in _LASTING
            raise StoreError(f"{self.uri(name)}: {err.strerror or err}", transient=not lasting) from err


def _enter(folder: int, part: str, *, make: bool) -> int | None:
    """Open the folder *part* of *folder*; None when it is a file, or absent and *make* is False."""
    try:
        return os.open(part, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            return None
    except OSError as err:
        _refuse_link(part, folder)
        if err.errno == errno.ENOTDIR and not make:
            return None
        raise
    with suppress(FileExistsError):
        os.mkdir(part, dir_fd=folder)
    return os.open(part, _FOLDER, dir_fd=folder)


def _refuse_link(part: str, folder: int) -> None:
    """Raise a clear error if opening *part* failed because it is a symbolic link.

    Raises:
        ProtocolError: It is a symbolic link.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise ProtocolError(f"{part!r} is a symbolic link: the run store must not contain one; remove it")


def _date_in(folder: int) -> float:
    """The modification time that a file written in *folder* now gets."""
    if _NAMELESS:
        with suppress(OSError):  # NFS and some others have no unnamed files
            return _written(os.open(f"/proc/self/fd/{folder}", os.O_WRONLY | _NAMELESS | os.O_CLOEXEC, 0o600))
    temporary = f".{uuid.uuid4().hex}.tmp"
    try:
        return _written(os.open(temporary, _NEW, 0o600, dir_fd=folder))
    finally:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def _written(descriptor: int) -> float:
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _place(
    folder: int, last: str, fill: Callable[[BinaryIO], object], *, exclusive: bool
) -> tuple[bool, float]:
    """Return whether this call created the file, and its write time by the filesystem's clock."""
    temporary = f".{uuid.uuid4().hex}.tmp"
    try:
        with os.fdopen(os.open(temporary, _NEW, 0o666, dir_fd=folder), "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            date = os.fstat(file.fileno()).st_mtime
        if exclusive:
            placed = _link(temporary, last, folder)
        else:
            os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            placed = True
        os.fsync(folder)
        return placed, date
    finally:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def _link(temporary: str, last: str, folder: int) -> bool:
    try:
        os.link(temporary, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        # NFS repeats a request whose response was lost, and then reports "exists" for our own link.
        return os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1
    return True


def _remove_tree(last: str, folder: int) -> None:
    try:
        mode = os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        os.unlink(last, dir_fd=folder)
    elif stat.S_ISDIR(mode):
        with suppress(FileNotFoundError):
            remove_tree(last, dir_fd=folder)


def _walk_sizes(folder: int) -> Iterator[tuple[str, int]]:
    """Names and sizes of the regular files below *folder*; links are not followed."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk_into(folder, entry.name)
        else:
            with suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False).st_size


def _walk_into(folder: int, part: str) -> Iterator[tuple[str, int]]:
    try:
        inner = os.open(part, _FOLDER, dir_fd=folder)
    except OSError as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return  # deleted, or replaced by a file or link
        raise
    try:
        for name, size in _walk_sizes(inner):
            yield f"{part}/{name}", size
    finally:
        os.close(inner)


def _children(folder: int) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.is_file(follow_symlinks=False) or next(_walk_into(folder, entry.name), None) is not None:
            yield entry.name


def _entries(folder: int) -> list[os.DirEntry[str]]:
    """Folders and regular files that a store's name may have."""
    with os.scandir(folder) as entries:
        named = [entry for entry in entries if is_name(entry.name)]
    return [
        entry
        for entry in named
        if entry.is_dir(follow_symlinks=False)
        or (entry.is_file(follow_symlinks=False) and not _TEMPORARY.match(entry.name))
    ]
