"""Folders in the store that are valid only with a manifest, which is written last.

Checkpoints and outputs are such folders. A file keeps its relative path as its name in the store. A path that
would collide with our own names gets ``.file`` appended (:func:`stored_path`).

Symbolic links are followed while they stay inside the folder; the copy contains the file that they point to.
A link that leads outside is refused, because the process that reads it has other rights than the training.
Sockets, pipes and devices are skipped. Empty folders are not stored.

The training may change its folders at any moment. A file is opened once, below the folder's own descriptor
(:class:`~envscaler_airflow.store.root.Root`), and this same open file is checked, hashed and sent.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import TypeVar

from envscaler_agent.protocol import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    is_safe_relative_path,
    manifest_name,
    parse_manifest_name,
)
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.store.keys import MANIFEST, join
from envscaler_airflow.store.root import NEVER_SAVED, Place, Root
from envscaler_airflow.store.run_store import Store
from envscaler_airflow.store.transfer_progress import Moved

SMALL_BYTES = 4 << 20
"""Files up to this size are transferred concurrently, larger ones in parts. Chosen: below it, each file's
round trip takes longer than its bytes at 1 Gbit/s."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SWAPPED = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""Errors of opening with O_NOFOLLOW after a link or a file replaced a folder or file."""
_ENTRY_BYTES = len('{"path":"","size":,"sha256":"","node":0,"claim":0},') + 64
"""Smallest JSON size of a manifest's entry for a file, bytes, besides its path and size."""
MOST_ENTRIES = MAX_MANIFEST_BYTES // _ENTRY_BYTES
"""Most files and folders that are looked at below one folder: no manifest could list more."""


def _no_pause() -> None:
    """Do nothing between two files."""


class ChangedError(CheckpointError):
    """The path now names another file than a moment before."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One regular file below a folder, at one moment.

    Attributes:
        path: Relative to the folder, with ``/``.
        root: The folder.
        real: The same as *path* with every link resolved.
        size, mtime_ns, inode: As the file system reports them; any change gives another fingerprint.
        ctime_ns: When the file or its metadata last changed, by the file system's clock.
        names: Number of its names (hard links) in the folder.
    """

    path: str
    root: Root
    real: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0
    names: int = 1

    def open(self, *, shares_names: bool = False) -> BufferedReader:
        """Open for reading the same file that was listed.

        Args:
            shares_names: True if the sidecar itself made hard links to it.

        Raises:
            CheckpointError: The path names another file by now, or a hard link makes a file from outside look
                like one of the folder's own.
            OSError: The file is gone or cannot be read.
        """
        try:
            stream = self.root.open_file(self.real)
        except OSError as err:
            if err.errno in _SWAPPED:
                raise ChangedError(f"{self.path} became a link while it was read") from err
            raise
        seen = os.fstat(stream.fileno())
        if seen.st_ino != self.inode:
            stream.close()
            raise ChangedError(f"{self.path} was replaced while it was read")
        if seen.st_nlink > self.names and not shares_names:
            stream.close()
            raise CheckpointError(
                f"{self.path} has {seen.st_nlink} names (hard links), {self.names} of them in "
                f"{self.root.path}; copy the file instead"
            )
        return stream


def stored_path(path: str) -> str:
    """Name in the store of the file *path*: *path* itself, unless its first part is one of our names.

    ``manifest.json`` -> ``manifest.json.file``; ``manifest.json.file`` -> ``manifest.json.file.file``.
    """
    first, slash, rest = path.partition("/")
    return f"{first}.file{slash}{rest}" if first.startswith(MANIFEST) else path


def node_list(node: int, claim: int) -> str:
    """Name of the list of files that *node* uploaded under *claim*; node 0 merges the lists."""
    return f"node-n{node}-c{claim}.json"


def for_node(manifest: Manifest, node: int) -> Manifest:
    """*manifest* with one file per path: that of *node*, otherwise that of the first node that saved it."""
    found: dict[str, ManifestFile] = {}
    for item in sorted(manifest.files, key=lambda item: (item.node != node, item.node)):
        found.setdefault(item.path, item)
    return replace(manifest, files=tuple(item for item in manifest.files if found[item.path] is item))


def walk(folder: Path, *, parent: Place | None = None) -> tuple[TreeFile, ...]:
    """All regular files below *folder*, sorted by path. Files that vanish meanwhile are skipped.

    Args:
        folder: May itself be a link to a sibling folder.
        parent: The parent folder, if it is known from before the training ran.

    Raises:
        CheckpointError: A link leads outside, or a name cannot be stored (backslash, too long).
        FileNotFoundError: *folder* itself is absent.
    """
    return files_of(Root.of(folder, parent=parent))


def files_of(root: Root) -> tuple[TreeFile, ...]:
    """All regular files below *root*, sorted by path, see :func:`walk`."""
    found = sorted(_walk(root), key=lambda item: item.path)
    names = Counter(inode for _, inode in {(item.real, item.inode) for item in found})
    return tuple(item if (many := names[item.inode]) == 1 else replace(item, names=many) for item in found)


def one_file(path: Path, *, parent: Place | None = None) -> TreeFile:
    """The file *path*, or the file in the same folder, or below it, that the link *path* points to.

    Raises:
        CheckpointError: The link leads outside its folder, or to something other than a regular file.
        OSError: The file is gone.
    """
    root = Root.above(path, parent)
    real = root.resolve(path.name)
    if real is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    seen = root.stat(real)
    if not stat.S_ISREG(seen.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return tree_file(path.name, root, real, seen)


class Entries:
    """Lists folders below *root*, :data:`MOST_ENTRIES` entries in all."""

    def __init__(self, root: Root) -> None:
        """List nothing yet."""
        self._root, self._left = root, MOST_ENTRIES

    def of(self, here: str) -> list[tuple[str, os.stat_result]]:
        """Entries of the folder *here*: empty if it vanished meanwhile.

        Raises:
            CheckpointError: There are more than :data:`MOST_ENTRIES`.
            OSError: The folder cannot be read, or the root itself is gone.
        """
        try:
            found = self._root.scan(here, most=self._left + 1)
        except (FileNotFoundError, NotADirectoryError):
            if not here:
                raise
            return []
        self._left -= len(found)
        if self._left < 0:
            raise CheckpointError(f"{self._root.path}: more than {MOST_ENTRIES} files and folders; pack them")
        return found


def tree_file(path: str, root: Root, real: str, seen: os.stat_result) -> TreeFile:
    """The file *path*, found as *real*, with the metadata *seen*."""
    return TreeFile(path, root, real, seen.st_size, seen.st_mtime_ns, seen.st_ino, seen.st_ctime_ns)


def _walk(root: Root) -> Iterator[TreeFile]:
    """Files below *root*, without recursion: a training can put any number of folders into each other."""
    listed = Entries(root)
    open_folders = [("", "", iter(listed.of("")))]
    while open_folders:
        here, prefix, left = open_folders[-1]
        if (entry := next(left, None)) is None:
            open_folders.pop()
            continue
        name, facts = entry
        if (found := _landed(root, join(here, name), facts)) is None:
            continue
        (real, seen), path = found, prefix + name
        is_folder = stat.S_ISDIR(seen.st_mode)
        if not (is_folder or stat.S_ISREG(seen.st_mode)):
            continue
        if not is_safe_relative_path(path):
            raise CheckpointError(f"{root.path / here}: the name {path!r:.200} cannot be kept; rename it")
        if not is_folder:
            yield tree_file(path, root, real, seen)
        elif all(real != above for above, _, _ in open_folders):  # a link to a parent would loop forever
            open_folders.append((real, f"{path}/", iter(listed.of(real))))


def _landed(root: Root, path: str, facts: os.stat_result) -> tuple[str, os.stat_result] | None:
    """Name and metadata of *path*, or of its target if it is a link; None when the target is missing."""
    if not stat.S_ISLNK(facts.st_mode):
        return path, facts
    real = root.resolve(path)
    try:
        return None if real is None else (real, root.stat(real))
    except OSError:
        return None  # replaced meanwhile


def upload(
    store: Store,
    prefix: str,
    files: Sequence[TreeFile],
    *,
    node: int = 0,
    claim: int = 0,
    between: Callable[[], None] = _no_pause,
    shares_names: bool = False,
    moved: Moved | None = None,
) -> tuple[ManifestFile, ...]:
    """Put *files* below *prefix*, without a manifest; *between* is called before each file and may raise.

    With a *claim* to the *node* they go into a separate part of the folder. So two pods of one node, or two
    nodes with files of the same name, never overwrite each other's files.

    Small files are uploaded concurrently. *shares_names* means that the sidecar itself made hard links to
    them. *moved* counts the bytes.

    Raises:
        CheckpointError: A file changed while it was read.
        StoreError: The store did not accept a file; the call can be repeated.
    """
    _check_count(prefix, files)
    counted = moved or Moved()
    counted.begin(sum(item.size for item in files))

    def put(item: TreeFile) -> ManifestFile:
        try:
            return _put_one(store, prefix, item, (node, claim), counted, shares_names=shares_names)
        except ProtocolError as err:
            raise CheckpointError(f"{prefix}: {item.path}: {err}") from err

    return tuple(side_by_side(put, files, store.at_once, size=lambda item: item.size, between=between))


def _put_one(
    store: Store, prefix: str, item: TreeFile, by: tuple[int, int], moved: Moved, *, shares_names: bool
) -> ManifestFile:
    node, claim = by
    with item.open(shares_names=shares_names) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        mtime_ns = max(item.mtime_ns, 0)  # a time before 1970 counts as unknown
        found = ManifestFile(item.path, item.size, digest, node=node, claim=claim, mtime_ns=mtime_ns)
        with moved.sending(stream, item.size):
            store.put_file(_name(prefix, found), stream)
        after = os.fstat(stream.fileno())
    if (after.st_size, after.st_mtime_ns) != (item.size, item.mtime_ns):
        raise CheckpointError(f"{prefix}: {item.path} changed while it was uploaded")
    return found


def side_by_side(
    act: Callable[[_Item], _Result],
    items: Sequence[_Item],
    at_once: int,
    *,
    size: Callable[[_Item], int],
    between: Callable[[], None] = _no_pause,
) -> list[_Result]:
    """Results of *act*, in the order of *items*; small items run *at_once* at a time, large ones alone.

    *between* is called in the caller's thread before each item. After the first error no further item starts.
    """
    large = [index for index, item in enumerate(items) if at_once == 1 or size(item) > SMALL_BYTES]
    small = [index for index, item in enumerate(items) if at_once > 1 and size(item) <= SMALL_BYTES]
    results: dict[int, _Result] = {}
    waiting: deque[tuple[int, Future[_Result]]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for index in small:
                between()
                if len(waiting) >= 2 * at_once:
                    first, future = waiting.popleft()
                    results[first] = future.result()
                waiting.append((index, pool.submit(act, items[index])))
            for first, future in waiting:
                results[first] = future.result()
        finally:
            for _, future in waiting:
                future.cancel()
    for index in large:
        between()
        results[index] = act(items[index])
    return [results[index] for index in range(len(items))]


def _check_count(prefix: str, files: Sequence[TreeFile]) -> None:
    """Raise before uploading if a manifest could not list all *files*."""
    least = sum(len(item.path) + len(str(item.size)) + _ENTRY_BYTES for item in files)
    if least > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{prefix}: a manifest of {len(files)} files has {least} bytes or more, at most "
            f"{MAX_MANIFEST_BYTES} are read; keep fewer files, or pack them"
        )


def write_manifest(store: Store, prefix: str, manifest: Manifest, *, name: str = MANIFEST) -> None:
    """Write the manifest, which makes the folder valid.

    Raises:
        CheckpointError: The manifest would be larger than readers accept.
        StoreError: Not written; the call can be repeated.
    """
    body = manifest.to_json()
    if len(body) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{prefix}: a manifest of {len(manifest.files)} files has {len(body)} bytes, at most "
            f"{MAX_MANIFEST_BYTES} are read; keep fewer files"
        )
    store.write(join(prefix, name), body)


def read_manifest(store: Store, prefix: str, *, name: str = MANIFEST) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: The manifest is absent (never completed) or torn.
        StoreError: The store does not answer.
    """
    try:
        body = store.read(join(prefix, name), max_bytes=MAX_MANIFEST_BYTES)
        if body is None:
            raise CheckpointError(f"{store.uri(prefix)}: no {name}: it was never completed")
        return Manifest.from_json(body, where=f"{store.uri(prefix)}/{name}")
    except ProtocolError as err:
        raise CheckpointError(f"torn manifest: {err}") from err


def newest_manifest(store: Store, prefix: str) -> Manifest:
    """The manifest of a folder of which only the URI is known; for a checkpoint that of the highest claim.

    Raises:
        CheckpointError: The manifest is absent (never completed) or torn.
        StoreError: The store does not answer.
    """
    claims = [claim for part in store.children(prefix) if (claim := parse_manifest_name(part)) is not None]
    return read_manifest(store, prefix, name=manifest_name(max(claims)) if claims else MANIFEST)


def check_sizes(store: Store, prefix: str, manifest: Manifest) -> None:
    """Find missing and truncated files from one listing, without a request per file.

    Raises:
        CheckpointError: A file is missing or truncated; names the first one.
        StoreError: The store does not answer.
    """
    sizes = store.sizes(prefix)
    for item in manifest.files:
        size = sizes.get(_name(prefix, item))
        if size is None:
            raise CheckpointError(f"{store.uri(prefix)}: {item.path} is missing")
        if size != item.size:
            raise CheckpointError(
                f"{store.uri(prefix)}: {item.path} has {size} bytes, the manifest says {item.size}"
            )


def fetch(
    store: Store,
    prefix: str,
    manifest: Manifest,
    target: Path | Root,
    *,
    node: int = 0,
    between: Callable[[], None] = _no_pause,
    moved: Moved | None = None,
) -> None:
    """Download the files of *manifest* for *node* to *target*; check each file's size and sha256.

    Files that exist with the right hash are not fetched again, so an interrupted call can be repeated.
    Modification times keep their order. *between* is called before each file and may raise. Nothing is
    written through a link below *target*. *moved* counts the bytes.

    Raises:
        CheckpointError: A file is missing, truncated, or has another hash; discard the files that were
            written.
        StoreError: The store does not answer; the call can be repeated.
    """
    manifest = for_node(manifest, node)
    check_sizes(store, prefix, manifest)
    root = target if isinstance(target, Root) else Root.real(Path(os.path.realpath(target, strict=True)))

    counted = moved or Moved()
    counted.begin(sum(item.size for item in manifest.files))

    # If the other machine's clock is ahead, shift all times back, so that the next saved file is newer.
    newest_ns = max((item.mtime_ns for item in manifest.files), default=0)
    ahead_ns = max(0, newest_ns - time.time_ns())

    def get(item: ManifestFile) -> None:
        try:
            if _is_good(root, item):
                counted.add(item.size)
            else:
                _fetch_one(store, prefix, item, root, counted)
            if item.mtime_ns > ahead_ns:
                root.set_mtime(item.path, item.mtime_ns - ahead_ns)
        except (ProtocolError, OSError) as err:
            if isinstance(err, OSError) and err.errno not in NEVER_SAVED:
                raise
            raise CheckpointError(f"{store.uri(prefix)}: {item.path} cannot be laid out: {err}") from err

    side_by_side(get, manifest.files, store.at_once, size=lambda item: item.size, between=between)
    try:
        lay_links(manifest, root)
    except OSError as err:
        raise CheckpointError(f"{store.uri(prefix)}: a link cannot be laid out: {err}") from err


def lay_links(manifest: Manifest, root: Root) -> None:
    """Create the symbolic links of *manifest* below *root*, after its files: none is written through one.

    Raises:
        OSError: The disk does not accept a link.
    """
    for path, target in sorted(manifest.links.items()):
        with suppress(OSError):
            root.remove(path)
        root.symlink(path, target)


def _fetch_one(
    store: Store, prefix: str, item: ManifestFile, root: Root, moved: Moved, path: str | None = None
) -> None:
    name = path or item.path
    part = f".part-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with root.landing(name, temporary=part) as stream:
        with moved.arriving(stream, item.size):
            store.get_file(_name(prefix, item), stream)
        stream.seek(0, os.SEEK_END)
        if stream.tell() != item.size or _digest(stream) != item.sha256:
            raise CheckpointError(
                f"{store.uri(prefix)}: {item.path} has another sha256 than the manifest says"
            )


def verify(store: Store, prefix: str, *, manifest: Manifest | None = None) -> Manifest:
    """Check every byte of a folder against *manifest* (None: its own), one file at a time on the local disk.

    Raises:
        CheckpointError: The manifest is missing or torn, or a file is missing, truncated, or has another
            hash.
        StoreError: The store does not answer.
    """
    manifest = manifest or read_manifest(store, prefix)
    check_sizes(store, prefix, manifest)
    with tempfile.TemporaryDirectory() as folder:
        root = Root.of(Path(folder))
        for item in manifest.files:
            _fetch_one(store, prefix, item, root, Moved(), "file")
    return manifest


def _name(prefix: str, item: ManifestFile) -> str:
    """Store name of a file: in the part of its node and claim; of an output, its own path."""
    if item.claim:
        return join(prefix, f"n{item.node}-c{item.claim}/{item.path}")
    return join(prefix, stored_path(item.path))


def _is_good(root: Root, item: ManifestFile) -> bool:
    try:
        with root.open_file(item.path) as stream:
            return os.fstat(stream.fileno()).st_size == item.size and _digest(stream) == item.sha256
    except (FileNotFoundError, CheckpointError):
        return False
    except OSError as err:
        if err.errno in _SWAPPED:
            return False  # the writer replaces a link at *path*, and refuses one on the way
        raise


def _digest(stream: BufferedReader | BufferedRandom) -> str:
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()
