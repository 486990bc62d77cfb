"""Output and metrics leave in closed chunks: files that never change once they have their name."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from pathlib import Path
from typing import Callable, Deque, List, Optional, Tuple

LOG_CHUNK_BYTES = 256 << 10
LOG_CHUNK_S = 10.0
METRICS_CHUNK_BYTES = 1 << 20
METRICS_CHUNK_S = 300.0
MAX_WAITING = 4096
"""Closed chunks that may wait for the courier. Chosen: 1 GiB of output at 256 KiB; then output is dropped."""
LAST_LINES = 100
MAX_LINE_CHARS = 2000
"""Longest line kept for the last lines. Chosen: longer ones are progress bars and arrays."""
MAX_TAIL_BYTES = 256 << 10
"""Largest JSON of the last lines. Chosen: a quarter of what a status may have."""

_OVERWRITES = re.compile(rb"[\r\n\x08]+")
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
"""Source: ECMA-48, control sequences: colours and cursor moves of a terminal."""
_NUMBER = re.compile(r"(\d{6,12})\.(?:open|log|jsonl)\Z")


class Chunks:
    """Numbered files in one folder: ``000007.open`` grows, ``000007.log`` is closed for good.

    The open file always exists, so that a restarted wrapper knows which numbers were
    used although closed chunks are uploaded and deleted. A full disk drops output,
    counts it, and never stops the training.

    Attributes:
        dropped_bytes: Bytes that could not be kept.
        problem: Why, "" when all is well.
    """

    def __init__(
        self, folder: Path, suffix: str, *, max_bytes: int, max_age_s: float, clock: Callable[[], float]
    ) -> None:
        """Write into *folder*; what an earlier life left open is closed first."""
        self.dropped_bytes = 0
        self.problem = ""
        self._folder = folder
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._file: Optional[int] = None
        self._size = 0
        self._opened_at = 0.0
        self._number = 1
        folder.mkdir(parents=True, exist_ok=True)
        self._take_over()

    def write(self, data: bytes) -> None:
        """Append *data*; a chunk that is full is closed after its last whole line."""
        if not data:
            return
        if self._size + len(data) < self._max_bytes:
            self._append(data)
            return
        head = data.rfind(b"\n") + 1 or len(data)
        self._append(data[:head])
        self.close()
        if data[head:]:
            self._append(data[head:])

    def tick(self) -> None:
        """Close a chunk that is old enough."""
        if self._size and self._clock() - self._opened_at >= self._max_age_s:
            self.close()

    def close(self) -> None:
        """Close the chunk now, if it holds anything."""
        if self._file is None or not self._size:
            return
        os.close(self._file)
        self._file = None
        self._size = 0
        try:
            self._path("open").replace(self._path(self._suffix))
            self._number += 1
            self._open()
        except OSError as err:
            self.problem = f"{self._folder.name}: {err.strerror}"

    def _append(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._open()
            if not self._size:
                self._check_room()
                self._opened_at = self._clock()
            written = os.write(self._file, data) if self._file is not None else 0
            self._size += written
            if written < len(data):
                self._drop(len(data) - written, "disk full")
        except OSError as err:
            self._drop(len(data), err.strerror or str(err))

    def _drop(self, size: int, why: str) -> None:
        self.dropped_bytes += size
        self.problem = f"{self.dropped_bytes} bytes of {self._folder.name} dropped: {why}"

    def _check_room(self) -> None:
        waiting = sum(1 for entry in os.scandir(self._folder) if entry.name.endswith(self._suffix))
        if waiting >= MAX_WAITING:
            raise OSError(0, f"{waiting} chunks wait for the courier")

    def _open(self) -> None:
        self._file = os.open(self._path("open"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._number:06d}.{suffix}"

    def _take_over(self) -> None:
        for name in sorted(entry.name for entry in os.scandir(self._folder)):
            match = _NUMBER.match(name)
            if match is None:
                continue
            self._number = int(match[1])
            left_open = self._path("open")
            if left_open.exists() and not left_open.stat().st_size:
                continue
            if left_open.exists():
                left_open.replace(self._path(self._suffix))
            self._number += 1


class Lines:
    """Splits a stream into lines, and keeps the last hundred as a terminal would show them.

    A progress bar is one line that never ends: a search takes what it writes between two carriage returns (or
    runs of backspaces) as a line of its own.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._last: Deque[str] = deque(maxlen=LAST_LINES)
        self._rest = b""
        self._open = b""
        self._waiting = b""
        self._given = b""

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that *data* completed, without their ends and without terminal control codes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-16 * MAX_LINE_CHARS :]
        self._last.extend(_shown(line) for line in lines[-LAST_LINES:])
        parts = _OVERWRITES.split(self._open + data)
        self._open = parts.pop()[-16 * MAX_LINE_CHARS :]
        return [_CONTROL.sub(b"", part) for part in parts if part]

    def settled(self, *, at_end: bool = False) -> List[bytes]:
        """Return the unfinished line once, when nothing was added to it since the last call, or *at_end*."""
        is_due = bool(self._open) and (at_end or self._open == self._waiting) and self._open != self._given
        self._waiting = self._open
        if not is_due:
            return []
        self._given = self._open
        return [_CONTROL.sub(b"", self._open)]

    def tail(self) -> Tuple[str, ...]:
        """Return the last lines, the unfinished one included, small enough for a status."""
        lines = list(self._last)
        if self._rest:
            lines = [*lines, _shown(self._rest)][-LAST_LINES:]
        sizes = [len(json.dumps(line)) + 1 for line in lines]
        excess = sum(sizes) - MAX_TAIL_BYTES
        first = 0
        while excess > 0:
            excess -= sizes[first]
            first += 1
        return tuple(lines[first:])


def _shown(line: bytes) -> str:
    """Return what a terminal would show of *line*: progress bars overwrite themselves."""
    text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return text[: 4 * MAX_LINE_CHARS].decode("utf-8", "replace")[:MAX_LINE_CHARS]
