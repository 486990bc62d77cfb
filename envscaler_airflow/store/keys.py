"""The key of a run, the folder that follows from it, and names inside a store."""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from envscaler_agent.protocol import parse_manifest_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.local_files import landing
from envscaler_airflow.planning.record import Record

SHELL_DAG = "shell"
"""``dag_id`` of runs that are started without Airflow. Chosen."""
MAX_PART_BYTES = 80
"""Longest part of a run's folder, bytes. Chosen: six of them and the names below fit into a path's 1024."""
_HASH_DIGITS = 10  # chosen: 40 bits, for names that already agree in 69 bytes
_PLAIN = frozenset((string.ascii_letters + string.digits + "_-").encode())
_CUT = "~"
"""Precedes the hash of a shortened part. No encoded part contains it, so none looks like a shortened one."""


def encode_part(text: str) -> str:
    """One part of a run's folder: percent-encoded outside ``[A-Za-z0-9_-]``, at most 80 bytes.

    A longer one is shortened and ends with ``~`` and 10 hex digits of the sha256 of *text*, so different
    texts give different parts. ``..`` is a legal dag_id and becomes ``%2E%2E``.

    Raises:
        ValueError: *text* is empty.
    """
    if not text:
        raise ValueError("a part of a run's key is empty")
    raw = text.encode("utf-8", "surrogatepass")
    pieces = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    whole = "".join(pieces)
    if len(whole) <= MAX_PART_BYTES:
        return whole
    room = MAX_PART_BYTES - len(_CUT) - _HASH_DIGITS
    while len(whole) > room:
        whole = whole[: -len(pieces.pop())]
    return f"{whole}{_CUT}{hashlib.sha256(raw).hexdigest()[:_HASH_DIGITS]}"


@dataclass(frozen=True, slots=True)
class RunKey(Record):
    """Identity of a run: one execution of a stage in a DAG run, over all its try numbers.

    Attributes:
        deployment: ``[envscaler] deployment``, see :func:`~envscaler_airflow.store.run_store.deployment_of`.
        dag_id, run_id, task_id: Airflow's; outside Airflow the user who submits chooses them.
        map_index: Index of a mapped task; -1 when it is not mapped, as in Airflow.
        team: Airflow's team, None if Airflow has no teams.
    """

    deployment: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    team: str | None = None

    def __post_init__(self) -> None:
        """Reject a key with an empty name."""
        for name in ("deployment", "dag_id", "run_id", "task_id"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if self.team == "":
            raise ValueError("team is empty: leave it out where Airflow has none")

    @property
    def prefix(self) -> str:
        """Folder of the run: ``deployment[.team]/dag/run/task/map``; no other part contains a dot."""
        first = encode_part(self.deployment)
        if self.team is not None:
            first = f"{first}.{encode_part(self.team)}"
        rest = (self.dag_id, self.run_id, self.task_id, str(self.map_index))
        return "/".join([first, *(encode_part(part) for part in rest)])


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
