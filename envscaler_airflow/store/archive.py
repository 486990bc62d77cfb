"""The user's code, shipped with a run: a deterministic, content-hashed ``tar.zst``.

Packing skips what ``.gitignore`` files exclude, unless git's index lists it. Nested ignore files count, and
so do those of parent folders up to the repository's root. Packing always skips ``.git``, caches, virtual
environments, and the run store if it is inside the folder. Equal content gives an equal hash: names are
sorted, times and owners are constant, and modes keep only the executable bit.

Symbolic links stay links when they are relative and stay inside the folder. Packing and unpacking both
refuse links that are absolute or lead outside, because the machine that unpacks has no such path. Sockets,
pipes and devices are skipped when packing and refused when unpacking.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import zstandard

from envscaler_airflow.errors import CheckpointError, SpecError
from envscaler_airflow.store.gitignore import (
    IgnoreFile,
    info_exclude,
    is_tracked,
    read_ignore_file,
    tracked_names,
)
from envscaler_airflow.store.keys import reading
from envscaler_airflow.store.root import COPY_BYTES, NEVER_SAVED, Root

ALWAYS_LEFT_OUT = frozenset(
    {
        ".git", ".hg", ".svn", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache",
        ".ipynb_checkpoints", "node_modules",
    }
)  # fmt: skip
"""Folders that no training reads as code. Chosen: the names in the usual .gitignore templates."""
MAX_BYTES = 256 << 20
"""Largest archive, unpacked bytes. Chosen: code, not data; data belongs in volumes."""
MAX_FILES = 50_000
MAX_NAME = 1024
"""Longest path in an archive, characters. Source: as a manifest's, ``is_safe_relative_path``."""
"""Largest number of entries in an archive. Chosen: ten times a large monorepo's Python package."""
_TRIES = 3
"""Attempts to pack a folder while files vanish from it. Chosen: an editor or a log rotation finishes within
them; a retry that continues a running attempt must not fail because of a temporary file.
"""
_LEVEL = 6  # zstd level; chosen: source text packs in well under a second


@dataclass(frozen=True, slots=True)
class Archive:
    """A packed folder.

    Attributes:
        path: The archive file; the caller moves or deletes it.
        sha256: Hash of the unpacked tar stream, so it does not depend on the compressor.
        size: Size of the archive, bytes.
        unpacked: Size of the tar stream, bytes.
        files: Number of files and links.
    """

    path: Path
    sha256: str
    size: int
    unpacked: int
    files: int

    @property
    def name(self) -> str:
        """Name in the store: ``workdir-<sha>.tar.zst``."""
        return f"workdir-{self.sha256}.tar.zst"


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    source: Path
    size: int
    executable: bool
    link: str | None


def pack_workdir(
    folder: Path, *, max_bytes: int = MAX_BYTES, scratch: Path | None = None, store: Path | None = None
) -> Archive:
    """Pack *folder* into a new file in *scratch* (the system's temporary folder when None).

    *store* is the folder of the run store. It is skipped, because each run changes it.

    Raises:
        SpecError: *folder* does not exist, cannot be read, is larger than *max_bytes*, is the store itself,
            or contains a link that leads outside.
    """
    if not folder.is_dir():
        raise SpecError(f"workdir: {folder} is not a folder")
    root, left_out = folder.resolve(), None if store is None else store.resolve()
    if root == left_out:
        raise SpecError(
            f"workdir: {folder} is the run store itself, which each run changes; put the store into a folder "
            "of its own"
        )
    for _ in range(_TRIES - 1):
        with suppress(_ChangedError):
            return _packed(folder, left_out, max_bytes=max_bytes, scratch=scratch)
    return _packed(folder, left_out, max_bytes=max_bytes, scratch=scratch)


def _packed(folder: Path, store: Path | None, *, max_bytes: int, scratch: Path | None) -> Archive:
    root = folder.resolve()
    try:
        entries = sorted(_below(root, "", _rules_above(root), store), key=lambda item: item.path)
    except OSError as err:
        raise _unreadable(folder, err) from err
    total = sum(item.size for item in entries)
    if total > max_bytes or len(entries) > MAX_FILES:
        raise SpecError(_too_large(folder, entries, total, max_bytes))
    handle, name = tempfile.mkstemp(suffix=".tar.zst", dir=scratch)
    try:
        with os.fdopen(handle, "wb") as out:
            digest, unpacked = _write(Root.real(root), entries, out)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    path = Path(name)
    return Archive(path, digest, path.stat().st_size, unpacked, len(entries))


class _ChangedError(SpecError):
    """A file vanished or shrank between listing the folder and packing it."""


def _unreadable(path: Path, err: OSError) -> SpecError:
    which, why = err.filename or path, err.strerror or err
    kind = _ChangedError if isinstance(err, FileNotFoundError) else SpecError
    return kind(
        f"workdir: {which} cannot be read: {why}; let the stage's user read it, or name it in .gitignore"
    )


def _too_large(folder: Path, entries: list[_Entry], total: int, max_bytes: int) -> str:
    largest = sorted(entries, key=lambda item: -item.size)[:5]
    names = ", ".join(f"{item.path} ({item.size} bytes)" for item in largest)
    return (
        f"workdir: {folder} has {len(entries)} files of {total} bytes, at most {MAX_FILES} of {max_bytes} "
        f"are shipped; add data to .gitignore and bring it as a volume. Largest: {names}"
    )


class _Hashing:
    """A stream that hashes and counts the bytes written through it."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.sha256 = hashlib.sha256()
        self.count = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.count += len(data)
        self.out.write(data)
        return len(data)


def _write(root: Root, entries: list[_Entry], out: IO[bytes]) -> tuple[str, int]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    with compressor.stream_writer(out, closefd=False) as packed:
        stream = _Hashing(packed)
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for item in entries:
                _add(tar, root, item)
    return stream.sha256.hexdigest(), stream.count


def _add(tar: tarfile.TarFile, root: Root, item: _Entry) -> None:
    info = tarfile.TarInfo(item.path)
    info.mode = 0o755 if item.executable else 0o644
    if item.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, item.link
        tar.addfile(info)
        return
    try:
        opened = root.open_file(item.path)  # does not follow a link that replaced the file
    except CheckpointError as err:
        raise SpecError(f"workdir: {err}") from err
    except OSError as err:
        raise _unreadable(item.source, err) from err
    with opened as stream:
        info.size = os.fstat(stream.fileno()).st_size
        try:
            tar.addfile(info, stream)
        except OSError as err:
            raise _ChangedError(f"workdir: {item.path} changed while it was packed: {err}") from err


@dataclass(frozen=True, slots=True)
class _Rules:
    """Which files of a folder git ignores and tracks.

    Attributes:
        files: Ignore files of the folder and its parents, outermost first, each with its own folder.
        repository: Root of the git repository; None outside of one.
        tracked: Paths in its index; git tracks these even if an ignore file matches them.
    """

    files: tuple[tuple[Path, IgnoreFile], ...] = ()
    repository: Path | None = None
    tracked: frozenset[bytes] = frozenset()

    def within(self, folder: Path) -> _Rules:
        """Return these rules plus the ignore file of *folder*."""
        found = read_ignore_file(folder / ".gitignore")
        return self if found is None else replace(self, files=(*self.files, (folder, found)))

    def leaves_out(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether *path* is ignored; the deepest ignore file that matches it decides."""
        for folder, file in reversed(self.files):
            verdict = file.verdict(path.relative_to(folder).as_posix(), is_folder=is_folder)
            if verdict is not None:
                return verdict
        return False

    def keeps(self, path: Path, *, is_folder: bool) -> bool:
        """True for a path in the index, or a folder of one."""
        if self.repository is None or not self.tracked:
            return False
        return is_tracked(self.tracked, path.relative_to(self.repository).as_posix(), is_folder=is_folder)


def _rules_above(root: Path) -> _Rules:
    """Rules of the folders above *root*, if it is in a git repository, and of the repository itself."""
    chain = [root, *root.parents]
    at = next((index for index, folder in enumerate(chain) if (folder / ".git").exists()), None)
    if at is None:
        return _Rules()
    repository = chain[at]
    rules = _Rules((), repository, tracked_names(repository))
    exclude = read_ignore_file(info_exclude(repository))
    if exclude is not None:
        rules = replace(rules, files=((repository, exclude),))
    for folder, below in pairwise(reversed(chain[: at + 1])):
        rules = rules.within(folder)
        if rules.leaves_out(below, is_folder=True):
            # A workdir that git itself ignores (build/experiment) is still shipped.
            return _Rules()
    return rules


def _below(
    here: Path, prefix: str, rules: _Rules, store: Path | None, *, is_left_out: bool = False
) -> Iterator[_Entry]:
    """Files below *here*, without *store*; in an ignored folder, only the files that the index lists."""
    rules = rules.within(here)
    with os.scandir(here) as found:
        entries = list(found)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        path = Path(entry.path)
        is_out = is_left_out or rules.leaves_out(path, is_folder=is_folder)
        is_never_shipped = entry.name in ALWAYS_LEFT_OUT or path == store
        if is_never_shipped or (is_out and not rules.keeps(path, is_folder=is_folder)):
            continue
        name = prefix + entry.name
        _check_name(name)
        if is_folder:
            yield from _below(path, name + "/", rules, store, is_left_out=is_out)
        elif entry.is_symlink():
            yield _Entry(name, path, 0, executable=False, link=_link_inside(name, path))
        elif entry.is_file(follow_symlinks=False):
            seen = entry.stat(follow_symlinks=False)
            yield _Entry(name, path, seen.st_size, executable=bool(seen.st_mode & stat.S_IXUSR), link=None)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as err:
        raise SpecError(
            f"workdir: the name {name!r} is not UTF-8; rename it or add it to .gitignore"
        ) from err
    if len(name) > MAX_NAME:
        raise SpecError(
            f"workdir: {name[:80]!r}... has more than {MAX_NAME} characters; add it to .gitignore"
        )


def _link_inside(name: str, path: Path) -> str:
    target = str(path.readlink())
    if not _stays_inside(name, target):
        raise SpecError(
            f"workdir: the link {name} leads to {target}, outside the folder; "
            "put the file itself there, add the link to .gitignore, or bring it as a volume"
        )
    return target


def _stays_inside(name: str, target: str) -> bool:
    if not target or target.startswith("/") or "\0" in target:
        return False
    landed = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return landed != ".." and not landed.startswith("../")


def unpack(
    archive: Path | BinaryIO,
    target: Path,
    *,
    sha256: str,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> None:
    """Unpack *archive*, a file or an open one, into the existing, empty folder *target*.

    It checks the hash of the whole stream before it writes anything. It creates links last, so that it never
    writes through one.

    Raises:
        CheckpointError: The hash is wrong, the archive is torn or larger than *max_bytes* or *max_files*, or
            an entry leads outside, is a device, or appears twice.
    """
    bound, where = 2 * max_bytes + (max_files << 11), f"workdir-{sha256}.tar.zst"
    with reading(archive) as raw, _torn(where):
        with _opened(raw, bound, where) as stream:
            found = hashlib.sha256()
            while chunk := stream.read(1 << 20):
                found.update(chunk)
        if found.hexdigest() != sha256:
            raise CheckpointError(f"{where}: sha256 of its content is {found.hexdigest()}, expected {sha256}")
        with _opened(raw, bound, where) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            _lay_out(tar, Root.of(target), max_bytes=max_bytes, max_files=max_files, where=where)


@contextmanager
def _torn(where: str) -> Iterator[None]:
    try:
        yield
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError, RecursionError) as err:
        raise CheckpointError(f"{where}: torn archive: {err}") from err


class _Bounded:
    """A decompressed stream that raises beyond a bound."""

    def __init__(self, stream: IO[bytes], bound: int, where: str) -> None:
        self.stream, self.left, self.where = stream, bound, where

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise CheckpointError(f"{self.where}: unpacks to more than is allowed")
        return data


@contextmanager
def _opened(raw: BinaryIO, bound: int, where: str) -> Iterator[IO[bytes]]:
    """The decompressed stream of *raw*, from its first byte. Hashing and unpacking use the same open file."""
    raw.seek(0)
    with zstandard.ZstdDecompressor().stream_reader(raw, closefd=False) as stream:
        yield cast("IO[bytes]", _Bounded(stream, bound, where))  # tarfile only reads


def _lay_out(tar: tarfile.TarFile, target: Root, *, max_bytes: int, max_files: int, where: str) -> None:
    links: dict[str, str] = {}
    seen: set[str] = set()
    total = 0
    for info in tar:
        total += info.size
        if len(seen) >= max_files or total > max_bytes:
            raise CheckpointError(f"{where}: more than {max_files} files or {max_bytes} bytes")
        _check_entry(info, seen, where)
        seen.add(str(PurePosixPath(info.name)))
        if info.issym():
            links[info.name] = info.linkname
        elif info.isreg():
            _write_file(tar, info, target)
    _make_links(links, target, where)


def _check_entry(info: tarfile.TarInfo, seen: set[str], where: str) -> None:
    if not _is_plain(info.name) or str(PurePosixPath(info.name)) in seen:
        raise CheckpointError(
            f"{where}: the entry {info.name!r:.200} leads outside, is too long or appears twice"
        )
    if info.size < 0 or info.issparse():
        raise CheckpointError(f"{where}: the entry {info.name!r:.200} has holes or a size below 0")
    if info.issym() and not _stays_inside(info.name, info.linkname):
        raise CheckpointError(f"{where}: the link {info.name!r:.200} leads outside")
    if not (info.issym() or info.isreg() or info.isdir()):
        raise CheckpointError(f"{where}: the entry {info.name!r:.200} is a device or another special file")


def _make_links(links: dict[str, str], target: Root, where: str) -> None:
    made: list[str] = []
    try:
        for name, link in links.items():
            target.symlink(name, link)
            made.append(name)
        for name in made:  # links can chain to lead outside although each looks harmless
            _check_inside(name, target)
    except (CheckpointError, OSError) as err:
        for name in made:
            target.remove(name)
        raise CheckpointError(f"{where}: {err}") from err


def _check_inside(name: str, target: Root) -> None:
    try:
        target.resolve(name)
    except CheckpointError as err:
        raise CheckpointError(f"the link {name!r:.200} leads outside") from err


def _is_plain(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_inside = not name.startswith("/") and ".." not in parts and "\0" not in name
    return bool(parts) and len(name) <= MAX_NAME and is_inside


def _write_file(tar: tarfile.TarFile, info: tarfile.TarInfo, target: Root) -> None:
    source = tar.extractfile(info)
    assert source is not None
    mode = 0o755 if info.mode & stat.S_IXUSR else 0o644
    try:
        with target.landing(str(PurePosixPath(info.name)), mode=mode) as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except OSError as err:
        if err.errno not in NEVER_SAVED:
            raise
        raise CheckpointError(f"{info.name!r:.200} cannot be laid out: {err.strerror}") from err
