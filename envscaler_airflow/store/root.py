"""Safe access to a folder that other processes write to: no path leads outside of it.

This works like ``os.Root`` of Go 1.24. The folder is an open descriptor. Every part of a name is opened below
the previous part with O_NOFOLLOW. This module resolves symbolic links itself, part by part, and only while
they stay inside. So even if the training swaps in a link at any moment, it cannot lead a process with more
rights to a file outside.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from envscaler_airflow.errors import CheckpointError
from envscaler_airflow.local_files import remove_tree

_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LINK = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""Errors with which systems refuse to open a link: ELOOP, with O_DIRECTORY ENOTDIR; on FreeBSD EMLINK."""
NEVER_SAVED = frozenset({errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Errors of names that no disk can store (a file and a folder of one name, too long), and of a link."""
COPY_BYTES = 1 << 20
"""Bytes copied at a time. Chosen: few calls, little memory."""
MOST_NAMES = 300_000
"""Most names of one folder that are listed at a time. Chosen: more than a manifest can list, in 150 MB."""
_MAX_LINKS = 40
"""Most links on the way to one file. Source: Linux, MAXSYMLINKS."""


class Found(NamedTuple):
    """An open file or folder below a root; the caller closes *descriptor*.

    ``real`` is its name relative to the root with every link resolved.
    """

    descriptor: int
    real: str


@dataclass(frozen=True, slots=True)
class Place:
    """A folder before the training ran.

    Attributes:
        path: Its path with every link resolved.
        seen_as: Another absolute path under which the training sees it; None if there is none.
    """

    path: Path
    seen_as: Path | None = None


class Root:
    """One folder, kept open until this object is garbage-collected.

    Attributes:
        path: Path of the folder when it was opened; for messages and for absolute links.
        aliases: Other absolute paths under which the training sees the same folder.
    """

    __slots__ = ("__weakref__", "_close", "_descriptor", "aliases", "path")

    def __init__(self, descriptor: int, path: Path, *, aliases: tuple[Path, ...] = ()) -> None:
        """Take ownership of the folder's *descriptor*."""
        self.path = path
        self.aliases = aliases
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def real(cls, path: Path) -> Root:
        """Open the absolute *path*; no part of it may be a link.

        Raises:
            OSError: A part is absent, is a link (ELOOP or ENOTDIR), or may not be read.
        """
        here = os.open("/", _FOLDER)
        parts = [part for part in path.parts[1:] if part]
        for index, part in enumerate(parts):
            try:
                inner = os.open(part, _FOLDER if index == len(parts) - 1 else _PASS, dir_fd=here)
            except OSError as err:
                err.filename = str(path)
                raise
            finally:
                os.close(here)
            here = inner
        return cls(here, path)

    @classmethod
    def of(cls, folder: Path, *, parent: Place | None = None) -> Root:
        """Open *folder*, which may itself be a link to a sibling folder.

        Args:
            folder: Absolute, or relative to the working directory.
            parent: Its parent folder; without it the links in the parent path are resolved once.

        Raises:
            CheckpointError: *folder* is a link that leads out of its parent, or in a circle.
            OSError: The folder is absent, or a part of its path was replaced by a link.
        """
        whole = Path(os.path.abspath(folder))  # noqa: PTH100  # resolve() would follow the last link
        if not whole.name:
            return cls.real(whole)
        return cls.above(whole, parent).enter(whole.name)

    @classmethod
    def above(cls, path: Path, parent: Place | None) -> Root:
        """The parent folder of *path*, with all known paths of it. Raises as :meth:`real`."""
        known = parent or Place(Path(os.path.realpath(path.parent, strict=True)))
        root = cls.real(known.path)
        named = Path(os.path.abspath(path.parent))  # noqa: PTH100  # as given, links and all
        root.aliases = (named,) if known.seen_as is None else (named, known.seen_as)
        return root

    # -- reading

    def enter(self, path: str) -> Root:
        """The folder *path* below, as a separate root; links inside are followed."""
        found = self._walk_to(path, _FOLDER)
        aliases = tuple(alias / found.real for alias in self.aliases)
        return Root(found.descriptor, self.path / found.real, aliases=aliases)

    def open_file(self, path: str) -> BufferedReader:
        """Open the regular file *path* for reading.

        Raises:
            CheckpointError: *path* is a folder, pipe, socket or device, or a link on the way leads outside.
            OSError: *path* is absent, or a part of it is a link.
        """
        found = self._walk_to(path, _READ, follow=False)
        if not stat.S_ISREG(os.fstat(found.descriptor).st_mode):
            os.close(found.descriptor)
            raise CheckpointError(f"{self.path / path} is not a regular file")
        return os.fdopen(found.descriptor, "rb")

    def resolve(self, path: str) -> str | None:
        """The name of *path* with every link resolved; None if the target is missing or the links loop.

        Raises:
            CheckpointError: *path* leads outside.
        """
        flags = getattr(os, "O_PATH", _READ) | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            found = self._walk_to(path, flags)
        except OSError:
            return None
        os.close(found.descriptor)
        return found.real

    def read_link(self, path: str) -> str:
        """Target of the link *path*, unresolved. Raises OSError if it is absent or not a link."""
        with self._parent(path) as (folder, last):
            return os.readlink(last, dir_fd=folder)

    def stat(self, path: str) -> os.stat_result:
        """Metadata of *path* itself, not of a link's target; ``""`` is the root."""
        if not path:
            return os.fstat(self._descriptor)
        with self._parent(path) as (folder, last):
            return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def scan(self, path: str = "", *, most: int = MOST_NAMES) -> list[tuple[str, os.stat_result]]:
        """Names and metadata (no link is followed) of *most* entries of the folder *path*, itself not a link.

        Raises:
            OSError: *path* is absent or not a folder, or a part of it is a link.
        """
        descriptor = self._walk_to(path, _FOLDER, follow=False).descriptor
        try:
            found = []
            with os.scandir(descriptor) as entries:
                for entry in islice(entries, most):
                    with suppress(FileNotFoundError):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
            return found
        finally:
            os.close(descriptor)

    # -- writing

    def make_folder(self, path: str) -> None:
        """Create the folder *path* and its parents; existing folders stay.

        Raises:
            OSError: A part is a link or a file.
        """
        here = os.dup(self._descriptor)
        try:
            for part in _parts(path):
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
                inner = os.open(part, _FOLDER, dir_fd=here)
                os.close(here)
                here = inner
        finally:
            os.close(here)

    @contextmanager
    def landing(
        self, path: str, *, temporary: str | None = None, mode: int = 0o666
    ) -> Iterator[BufferedRandom]:
        """Yield a new file, which is renamed to *path* if the block does not raise; creates parent folders.

        *temporary* is its name until then. A caller may set it to find the leftover of an earlier call.

        Raises:
            OSError: A folder on the way is a link or a file, or *path* is a folder.
        """
        with self._parent(path, make=True) as (folder, last):
            if temporary is None:
                temporary = f".{uuid.uuid4().hex}.tmp"
            else:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
            descriptor = os.open(temporary, _NEW, mode, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "w+b") as stream:
                    yield stream
                os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    @contextmanager
    def scratch(self) -> Iterator[BufferedRandom]:
        """Yield a new file on this disk that no name leads to. Raises OSError."""
        name = f".{uuid.uuid4().hex}.tmp"
        descriptor = os.open(name, _NEW, 0o600, dir_fd=self._descriptor)
        with os.fdopen(descriptor, "w+b") as stream:
            os.unlink(name, dir_fd=self._descriptor)
            yield stream

    def link(self, path: str, stream: BufferedReader) -> None:
        """Create *path* as a hard link to the same file that *stream* has open.

        Raises:
            OSError: *path* is on another file system, or the file system has no hard links.
        """
        # Source: open(2), O_TMPFILE: linking through /proc links the open file, even if its name was
        # replaced.
        with self._parent(path, make=True) as (folder, last):
            os.link(f"/proc/self/fd/{stream.fileno()}", last, dst_dir_fd=folder, follow_symlinks=True)

    def take(self, path: str, source: Root) -> None:
        """Move the file *path* of *source* into this folder, under the same name.

        Raises:
            OSError: A folder on the way is a link or a file, or the disk is full.
            CheckpointError: *path* is not a regular file.
        """
        try:
            with source._parent(path) as (there, first), self._parent(path, make=True) as (here, last):
                os.replace(first, last, src_dir_fd=there, dst_dir_fd=here)
        except OSError as err:
            if err.errno != errno.EXDEV:
                raise
            with source.open_file(path) as old, self.landing(path) as new:
                shutil.copyfileobj(old, new, COPY_BYTES)
                mtime_ns = os.fstat(old.fileno()).st_mtime_ns
            self.set_mtime(path, mtime_ns)
            source.remove(path)

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        """Set the modification time of the file *path*. Raises OSError, CheckpointError."""
        with self.open_file(path) as stream:
            os.utime(stream.fileno(), ns=(mtime_ns, mtime_ns))

    def symlink(self, path: str, target: str) -> None:
        """Create the link *path*. Raises OSError."""
        with self._parent(path, make=True) as (folder, last):
            os.symlink(target, last, dir_fd=folder)

    def rename(self, old: str, new: str) -> None:
        """Rename *old* to *new*; replaces an existing file."""
        with self._parent(old) as (there, first), self._parent(new) as (here, last):
            os.replace(first, last, src_dir_fd=there, dst_dir_fd=here)

    def remove(self, path: str) -> None:
        """Remove *path* and everything below it; if it is a link, only the link. Do nothing if it is absent.

        Raises:
            OSError: *path* cannot be removed.
        """
        with suppress(FileNotFoundError), self._parent(path) as (folder, last):
            if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                remove_tree(last, dir_fd=folder)
            else:
                os.unlink(last, dir_fd=folder)

    def empty(self) -> None:
        """Remove the content of the folder, but not the folder, which may be a mount."""
        while found := self.scan():
            for name, _ in found:
                self.remove(name)

    # -- how

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        above, _, last = path.rpartition("/")
        if make and above:
            self.make_folder(above)
        descriptor = self._walk_to(above, _PASS, follow=False).descriptor
        try:
            yield descriptor, last
        finally:
            os.close(descriptor)

    def _walk_to(self, path: str, flags: int, *, follow: bool = True) -> Found:
        """Open *path* with *flags*; without *follow* a link on the way is an OSError."""
        walk = _Walk(self, path)
        try:
            return walk.run(flags, follow=follow)
        except OSError as err:
            err.filename = str(self.path / path)
            raise
        finally:
            walk.close()


class _Walk:
    """One walk from the root to a file: the open folders, and the parts still to open."""

    def __init__(self, root: Root, path: str) -> None:
        self.root, self.path = root, path
        self.open = [os.dup(root._descriptor)]  # noqa: SLF001  # the other half of Root
        self.names: list[str] = []
        self.left = _parts(path)[::-1]
        self.above = 0  # folders above the root after ".." of a link; later parts may lead back
        self.links = 0

    def close(self) -> None:
        for descriptor in self.open:
            os.close(descriptor)

    def run(self, flags: int, *, follow: bool) -> Found:
        while self.left:
            part = self.left.pop()
            if part == ".." or self.above:
                self._climb(part)
                continue
            is_last = not self.left
            try:
                inner = os.open(part, flags if is_last else _PASS, dir_fd=self.open[-1])
            except OSError as err:
                if not follow or err.errno not in _LINK or not self._turn(part):
                    raise
                continue
            if is_last and follow and self._is_link(inner):
                os.close(inner)
                self._turn(part)
                continue
            self.names.append(part)
            if is_last:
                return Found(inner, "/".join(self.names))
            self.open.append(inner)
        if self.above:
            raise self._outside("..")
        real = "/".join(self.names)
        return Found(os.open(".", flags & ~os.O_NOFOLLOW, dir_fd=self.open[-1]), real)

    @staticmethod
    def _is_link(descriptor: int) -> bool:
        """True if O_PATH opened the link itself."""
        return stat.S_ISLNK(os.fstat(descriptor).st_mode)

    def _climb(self, part: str) -> None:
        """Step up. Leaving the root is allowed if the next parts lead back into it."""
        if part == "..":
            if self.names:
                self.names.pop()
                os.close(self.open.pop())
            else:
                self.above += 1
        elif self.above < len(self.root.path.parts) and part == self.root.path.parts[-self.above]:
            self.above -= 1
        else:
            raise self._outside(part)

    def _turn(self, part: str) -> bool:
        """Follow the link *part*; False when it is not a link."""
        try:
            target = os.readlink(part, dir_fd=self.open[-1])
        except OSError:
            return False
        self.links += 1
        if self.links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.startswith("/"):
            inside = self._inside(target)
            if inside is None:
                raise self._outside(target)
            for descriptor in self.open[1:]:
                os.close(descriptor)
            del self.open[1:]
            self.names, target = [], inside
        self.left += _parts(target)[::-1]
        return True

    def _inside(self, target: str) -> str | None:
        """An absolute *target* as a name below the root; None when it leads elsewhere."""
        for base in (self.root.path, *self.root.aliases):
            if target == str(base) or target.startswith(f"{base}/"):
                return target[len(str(base)) :].lstrip("/")
        return None

    def _outside(self, target: str) -> CheckpointError:
        root = self.root.path
        if not target.startswith("/"):
            here = root.joinpath(*(".." for _ in range(self.above)), *self.names)
            target = os.path.normpath(here / target)
        return CheckpointError(
            f"{root / self.path}: the link leads to {target}, outside {root}; put the file itself here"
        )


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
