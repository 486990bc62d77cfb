"""Names inside a store, and how a download lands on the local disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from envscaler_agent.protocol import parse_manifest_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.local_files import landing

MAX_BYTES = 1 << 24
"""Largest object that :meth:`Store.read` returns by default, bytes. Chosen: 16 manifests."""

MAX_NAME_BYTES = 1024
"""Longest name including its root, bytes. Source: Amazon S3 user guide, "Creating object key names"."""

AT_ONCE = 16
"""Small files that are transferred concurrently. Chosen: an object store answers in some 50 ms, so 300 files
a second; 16 files of 4 MiB fit into memory next to the sidecar's own use."""

MANIFEST = "manifest.json"
"""Written last and deleted first, so that a half-written or half-deleted folder never looks complete."""


def check_name(name: str) -> str:
    """Return *name* when it stays below the root: ``a/b.json``, without empty, ``.`` or ``..`` parts.

    Raises:
        ProtocolError: It is absolute, leaves the root, is too long, or contains NUL, a backslash, or
            characters that cannot be encoded as UTF-8.
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
    """Return *prefix* when the tree below it may be deleted, which excludes the whole store.

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
    """True for a manifest, without which its folder is not valid. It is deleted first."""
    last = name.rsplit("/", 1)[-1]
    return last == MANIFEST or parse_manifest_name(last) is not None


@contextmanager
def reading(source: Path | BinaryIO) -> Iterator[BinaryIO]:
    """Yield *source* from its first byte; a stream stays open even if the block closes what is yielded."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield stream
        return
    source.seek(0)
    with os.fdopen(os.dup(source.fileno()), "rb") as stream:
        yield stream


@contextmanager
def arriving(target: Path | BinaryIO) -> Iterator[BinaryIO]:
    """Yield a stream to write *target*: a path is replaced on success, a stream is truncated first."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with landing(target) as temporary, temporary.open("wb") as stream:
            yield stream
        return
    target.seek(0)
    target.truncate()
    yield target
    target.flush()


def descriptor_path(stream: BinaryIO) -> str:
    """A path that opens the same file as *stream*, for libraries that only accept paths."""
    return f"/dev/fd/{stream.fileno()}"
