"""Folders in the store that count only with their manifest, which is written last.

Checkpoints and outputs are such folders. A file keeps its relative path as its name in the
store, save that what would meet our own names gets ``.file`` appended (:func:`stored_path`).

Symbolic links are followed while they stay inside the folder (the copy holds what they point
to); one that leads outside is refused, since the reader of the link is not the training.
Sockets, pipes and devices are left out. Empty folders are not kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.protocol import MAX_MANIFEST_BYTES, Manifest, ManifestFile, is_safe_relative_path
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.names import MANIFEST, join

_NEVER_SAVED = frozenset({errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG})
"""What a manifest that names a file and a folder alike, or what no disk holds, meets."""


_ENTRY_BYTES = len('{"path":"","size":0,"sha256":"","node":0},') + 64
"""Bytes of JSON for each file in a manifest beside its path, at least."""


def _no_pause() -> None:
    """Between two files: nothing to wait for."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One regular file below a folder, as seen at one moment.

    Attributes:
        path: Relative to the folder, with ``/``.
        source: Where to read it.
        size, mtime_ns, inode: What the file system says; any change makes another fingerprint.
    """

    path: str
    source: Path
    size: int
    mtime_ns: int
    inode: int


def stored_path(path: str) -> str:
    """Name in the store of the file *path*: itself, unless its first part is one of ours.

    ``manifest.json`` -> ``manifest.json.file``; ``manifest.json.file`` -> ``manifest.json.file.file``.
    """
    first, slash, rest = path.partition("/")
    return f"{first}.file{slash}{rest}" if first.startswith(MANIFEST) else path


def node_list(node: int) -> str:
    """Name of the list of what *node* uploaded, from which node 0 makes the manifest."""
    return f"{MANIFEST}.node-{node}"


def walk(folder: Path) -> tuple[TreeFile, ...]:
    """All regular files below *folder*, by path. What vanishes meanwhile is left out.

    Raises:
        CheckpointError: A link leads outside, or a name cannot be kept (backslash, too long). *folder*
            itself may be a link to its neighbour.
        FileNotFoundError: *folder* itself is not there.
    """
    try:
        root = folder.resolve(strict=True)
    except RuntimeError as err:  # Python 3.11 of a circle; later an OSError
        raise CheckpointError(f"{folder}: the link leads in a circle") from err
    if folder.is_symlink() and not root.is_relative_to(folder.parent.resolve()):
        raise CheckpointError(f"{folder}: the link leads to {root}, outside {folder.parent}")
    return tuple(sorted(_walk(root, "", root, (root,)), key=lambda item: item.path))


def one_file(path: Path) -> TreeFile:
    """The file *path*, or the one beside or below it in its folder that it is a link to.

    Raises:
        CheckpointError: The link leads outside its folder.
        OSError: It is not there any more.
    """
    source = path.resolve(strict=True)
    if path.is_symlink() and not source.is_relative_to(path.parent.resolve()):
        raise CheckpointError(f"{path}: the link leads to {source}, outside {path.parent}")
    seen = source.stat()
    return TreeFile(path.name, source, seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _walk(here: Path, prefix: str, root: Path, above: tuple[Path, ...]) -> Iterator[TreeFile]:
    try:
        entries = list(os.scandir(here))
    except (FileNotFoundError, NotADirectoryError):
        if here == root:
            raise
        return
    for entry in entries:
        path = prefix + entry.name
        source = _inside(Path(entry.path), root) if entry.is_symlink() else Path(entry.path)
        try:
            seen = source.stat(follow_symlinks=False) if source else None
        except FileNotFoundError:
            continue
        if source is None or seen is None:
            continue
        if stat.S_ISDIR(seen.st_mode):
            if source not in above:  # a link to a folder above would never end
                yield from _walk(source, path + "/", root, (*above, source))
        elif stat.S_ISREG(seen.st_mode):
            if not is_safe_relative_path(path):
                raise CheckpointError(f"{here}: the name {path!r:.200} cannot be kept; rename it")
            yield TreeFile(path, source, seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _inside(link: Path, root: Path) -> Path | None:
    """Where *link* leads, None when nowhere.

    Raises:
        CheckpointError: It leads outside *root*.
    """
    try:
        target = link.resolve(strict=True)
    except (FileNotFoundError, RuntimeError, OSError):
        return None
    if not target.is_relative_to(root):
        raise CheckpointError(f"{link}: the link leads to {target}, outside {root}; put the file itself here")
    return target


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read as a stream."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def upload(
    store: Store,
    prefix: str,
    files: Sequence[TreeFile],
    *,
    node: int = 0,
    between: Callable[[], None] = _no_pause,
) -> tuple[ManifestFile, ...]:
    """Put *files* below *prefix*, without a manifest; *between* runs before each file and may raise.

    Raises:
        CheckpointError: A file changed while it was read.
        StoreError: The store did not take one; the call can be repeated.
    """
    _check_count(prefix, files)
    done = []
    for item in files:
        between()
        digest = sha256_of(item.source)
        try:
            store.put_file(join(prefix, stored_path(item.path)), item.source)
        except ProtocolError as err:
            raise CheckpointError(f"{prefix}: {item.path}: {err}") from err
        after = item.source.stat()
        if (after.st_size, after.st_mtime_ns) != (item.size, item.mtime_ns):
            raise CheckpointError(f"{prefix}: {item.path} changed while it was uploaded")
        done.append(ManifestFile(path=item.path, size=item.size, sha256=digest, node=node))
    return tuple(done)


def _check_count(prefix: str, files: Sequence[TreeFile]) -> None:
    """Refuse before the first byte goes up what no manifest could name."""
    least = sum(len(item.path) + _ENTRY_BYTES for item in files)
    if least > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{prefix}: a manifest of {len(files)} files has {least} bytes or more, at most "
            f"{MAX_MANIFEST_BYTES} are read; keep fewer files, or pack them"
        )


def write_manifest(store: Store, prefix: str, manifest: Manifest, *, name: str = MANIFEST) -> None:
    """Make the folder count.

    Raises:
        CheckpointError: It would be larger than readers take.
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
        CheckpointError: Absent (never completed) or torn.
        StoreError: Cannot be told.
    """
    try:
        body = store.read(join(prefix, name), max_bytes=MAX_MANIFEST_BYTES)
        if body is None:
            raise CheckpointError(f"{store.uri(prefix)}: no {name}: it was never completed")
        return Manifest.from_json(body, where=f"{store.uri(prefix)}/{name}")
    except ProtocolError as err:
        raise CheckpointError(f"torn manifest: {err}") from err


def check_sizes(store: Store, prefix: str, manifest: Manifest) -> None:
    """Find missing and truncated files without reading any.

    Raises:
        CheckpointError: Names the first one.
        StoreError: Cannot be told.
    """
    for item in manifest.files:
        try:
            size = store.size(_name(prefix, item))
        except ProtocolError as err:
            raise CheckpointError(f"{store.uri(prefix)}: {item.path}: {err}") from err
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
    target: Path,
    *,
    between: Callable[[], None] = _no_pause,
) -> None:
    """Lay the files of *manifest* out below *target*, each checked by size and sha256.

    Files that lie there already with the right hash are not fetched again, so a call that was cut
    short can be repeated. *between* runs before each file and may raise.

    Raises:
        CheckpointError: Missing, truncated, or of another hash; what was laid out is of no use.
        StoreError: Cannot be told; the call can be repeated.
    """
    check_sizes(store, prefix, manifest)
    for item in manifest.files:
        between()
        path = target / item.path
        try:
            if not _is_good(path, item):
                path.parent.mkdir(parents=True, exist_ok=True)
                _fetch_one(store, prefix, item, path)
        except (ProtocolError, OSError) as err:
            if isinstance(err, OSError) and err.errno not in _NEVER_SAVED:
                raise
            raise CheckpointError(f"{store.uri(prefix)}: {item.path} cannot be laid out: {err}") from err


def _fetch_one(store: Store, prefix: str, item: ManifestFile, path: Path) -> None:
    part = path.with_name(f".part-{hashlib.sha256(path.name.encode()).hexdigest()[:16]}")
    try:
        store.get_file(_name(prefix, item), part)
        if not _is_good(part, item):
            raise CheckpointError(
                f"{store.uri(prefix)}: {item.path} has another sha256 than the manifest says"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def verify(store: Store, prefix: str, *, scratch: Path | None = None) -> Manifest:
    """Read every byte of a folder against its manifest, one file at a time on the local disk.

    Raises:
        CheckpointError: Missing, torn, truncated, or of another hash.
        StoreError: Cannot be told.
    """
    manifest = read_manifest(store, prefix)
    check_sizes(store, prefix, manifest)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "file"
        for item in manifest.files:
            _fetch_one(store, prefix, item, path)
    return manifest


def _name(prefix: str, item: ManifestFile) -> str:
    return join(prefix, stored_path(item.path))


def _is_good(path: Path, item: ManifestFile) -> bool:
    try:
        return path.stat(follow_symlinks=False).st_size == item.size and sha256_of(path) == item.sha256
    except FileNotFoundError:
        return False
