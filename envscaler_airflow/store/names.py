"""Names inside a store, and how a download lands on the local disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from envscaler_agent.protocol import parse_manifest_name
from envscaler_airflow.errors import ProtocolError

MAX_BYTES = 1 << 24
"""Largest object that :meth:`Store.read` returns unless told otherwise, bytes. Chosen: 16 manifests."""

MAX_NAME_BYTES = 1024
"""Longest name with its root, bytes. Source: Amazon S3 user guide, "Creating object key names"."""

AT_ONCE = 16
"""Small files that are moved at once. Chosen: an object store answers in some 50 ms, so 300 files a second;
16 files of 4 MiB fit beside the sidecar's own memory."""

MANIFEST = "manifest.json"
"""Written last and deleted first, so that a half-written or half-deleted folder never looks complete."""


def check_name(name: str) -> str:
    """Return *name* when it stays below the root: ``a/b.json``, without empty, ``.`` or ``..`` parts.

    Raises:
        ProtocolError: It is absolute, leaves the root, is too long or holds NUL, backslash or
            what UTF-8 cannot say.
    """
    if not is_name(name):
        raise ProtocolError(
            f"name {name!r:.200} does not stay inside the store: write it as 'folder/file.json'"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return *prefix* without its trailing slash; ``""`` is the root.

    Raises:
        ProtocolError: As :func:`check_name`.
    """
    bare = prefix[:-1] if prefix.endswith("/") and prefix != "/" else prefix
    return check_name(bare) if bare else ""


def check_tree(prefix: str) -> str:
    """Return *prefix* when a tree below it may be deleted: never the whole store.

    Raises:
        ProtocolError: As :func:`check_name`, and for ``""``.
    """
    return check_name(check_prefix(prefix))


def is_name(name: str) -> bool:
    """True when *name* stays below the root, see :func:`check_name`."""
    if not name or "\0" in name or "\\" in name:
        return False
    try:
        if len(name.encode()) > MAX_NAME_BYTES:
            return False
    except UnicodeEncodeError:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def join(prefix: str, name: str) -> str:
    """``prefix/name``; either may be ``""``."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


def is_manifest(name: str) -> bool:
    """True for the file that makes its folder count, which therefore is deleted first."""
    last = name.rsplit("/", 1)[-1]
    return last == MANIFEST or parse_manifest_name(last) is not None


@contextmanager
def landing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside *path*, which becomes *path* when nothing was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def reading(source: Path | BinaryIO) -> Iterator[BinaryIO]:
    """*source* from its first byte; a stream stays open whatever is done with what is yielded."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield stream
        return
    source.seek(0)
    with os.fdopen(os.dup(source.fileno()), "rb") as stream:
        yield stream


@contextmanager
def arriving(target: Path | BinaryIO) -> Iterator[BinaryIO]:
    """A stream to write *target* through: a path lands when nothing was raised, a stream is emptied first."""
    if isinstance(target, Path):
        with landing(target) as temporary, temporary.open("wb") as stream:
            yield stream
        return
    target.seek(0)
    target.truncate()
    yield target
    target.flush()


def descriptor_path(stream: BinaryIO) -> str:
    """A path that opens the very file of *stream*, for libraries that take nothing else."""
    return f"/dev/fd/{stream.fileno()}"
