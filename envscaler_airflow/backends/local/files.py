"""Files of an attempt: names, locks that die with their holder, and what its nodes printed.

``<root>/<attempt>/n<i>/`` contains one node::

    lock          locked (flock) by node main and its guard, inherited from ``submit`` without a gap
    request.json  what to start; no secret
    layout.json   for the sidecar
    node.json     written by node main before it starts anything: its identity
    stop.json     asks node main to end
    end.json      written last by node main: how the node ended
    ballast       reserves space that is freed once the training has ended, for the final reports
    output/       what the node printed, for users of this machine; the run's logs are in the store
    spool/ work/ root/

``<root>/<run>-saves/n<i>/`` has what the training saves to ``checkpoint.path``: the same path in every
attempt of a run, empty when one begins.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.errors import BackendError
from envscaler_airflow.local_files import read_bytes, write_atomic

LOCK, REQUEST, LAYOUT = "lock", "request.json", "layout.json"
NODE, STOP, END = "node.json", "stop.json", "end.json"
BALLAST, BALLAST_BYTES = "ballast", 1 << 20
"""Space that a training cannot fill. Chosen: a hundred times the size of an end's files."""
SAVES = "-saves"
"""Suffix to the name of a run, for the folder with its checkpoint folder; the same in every attempt."""
SPOOL, WORK, ROOT, OUTPUT, SIDECAR_OUTPUT = "spool", "work", "root", "output", "sidecar-output"
MOUNTS = "mounts"
"""Folder in which a command's file system view is built, see mount_main.py; empty for all others."""

_MAX_JSON_BYTES = 1 << 22

LockState = Literal["held", "free", "absent"]


def node_folder(attempt: Path, node: int) -> Path:
    """Folder of one node of an attempt."""
    return attempt / f"n{node}"


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace *path* atomically; the data is on disk before it is visible."""
    write_atomic(path, json.dumps({"schema": SCHEMA, **body}).encode())


def reserve(folder: Path) -> None:
    """Write the ballast; without effect on a disk that is already full."""
    with suppress(OSError), (folder / BALLAST).open("wb") as file:
        file.write(os.urandom(BALLAST_BYTES))  # random: a file system cannot compress it or leave it out
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any] | None:
    """What :func:`write_json` wrote; None when the file is absent.

    Raises:
        BackendError: It exists and cannot be read.
    """
    try:
        text = read_bytes(path, _MAX_JSON_BYTES)
        if text is None:
            return None
        body = json.loads(text)
    except (OSError, ValueError, RecursionError) as err:
        raise BackendError(f"{path}: {err}") from err
    if not isinstance(body, dict):
        raise BackendError(f"{path}: got {type(body).__name__}, expected an object")
    return body


def make_root(root: Path) -> None:
    """Create the folder of all attempts, for this user only.

    Raises:
        BackendError: It belongs to another user or is a link.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BackendError(f"{root}: is not a folder of user {os.getuid()}; set [envscaler] local_root")


def try_lock(path: Path) -> int | None:
    """An open descriptor with the lock on *path*; None when another process has the lock.

    The lock ends with the last process that inherited the descriptor; the file is created when absent.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_at(fd, path):
            return fd
        os.close(fd)  # removed before it was locked: no other process will find this file


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock *path* and take it. For short sections: a process that dies in one frees it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                yield
                return
        finally:
            os.close(fd)


def lock_state(path: Path) -> LockState:
    """Whether a process has the lock, without taking it.

    Raises:
        BackendError: The file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "absent"
    except OSError as err:
        raise BackendError(f"{path}: {err}") from err
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    finally:
        os.close(fd)
    return "free"


SEGMENT_BYTES = 4 << 20
KEPT_SEGMENTS = 4
"""At most 16 MiB per node stay on the machine. Chosen: the whole log is in the store."""


class OutputWriter:
    """Appends bytes; starts a new segment when one is full and removes the oldest."""

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, kept_segments: int = KEPT_SEGMENTS
    ) -> None:
        """Write into *folder*, created when absent, after the existing output."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._kept = kept_segments
        self._offset, self._used = _end(folder)
        self._file = _segment(folder, self._offset).open("ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append; on a full disk the bytes are lost and the caller continues."""
        if self._used >= self._segment_bytes:
            self._turn()
        with suppress(OSError):
            self._used += self._file.write(chunk)

    def close(self) -> None:
        """Close the segment."""
        self._file.close()

    def _turn(self) -> None:
        with suppress(OSError):
            following = _segment(self._folder, self._offset + self._used).open("ab", buffering=0)
            self._file.close()
            self._file = following
            self._offset, self._used = self._offset + self._used, 0
            for _, path in _segments(self._folder)[: -self._kept]:
                path.unlink()


def _segment(folder: Path, offset: int) -> Path:
    return folder / f"{offset:015d}.log"


def _segments(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.stem), path) for path in folder.glob("*.log") if path.stem.isdigit())


def _end(folder: Path) -> tuple[int, int]:
    segments = _segments(folder)
    if not segments:
        return 0, 0
    offset, path = segments[-1]
    return offset, path.stat().st_size
