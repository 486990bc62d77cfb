"""How many bytes a transfer has moved, including files in progress."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO


class Moved:
    """Bytes of one transfer; the transferring threads and a reader may use it concurrently.

    A file in progress is counted through its descriptor, so no store has to report progress: by the position
    in a file that is read, by the length of a file that is written. If a store reopens the file, it counts
    when it is complete.

    Attributes:
        total: Total bytes; None before that is known.
        files: Number of complete files moved, over all tries.
    """

    def __init__(self) -> None:
        """Start without a total."""
        self.total: int | None = None
        self.files = 0
        self._lock = threading.Lock()
        self._whole = 0
        self._under_way: dict[BinaryIO, tuple[int, Callable[[int], int]]] = {}

    def begin(self, total: int) -> None:
        """Start a transfer of *total* bytes with none moved; also for a retry."""
        with self._lock:
            self.total, self._whole = total, 0

    def add(self, size: int) -> None:
        """Count *size* bytes as moved, including those that need no transfer."""
        with self._lock:
            self._whole += size

    @contextmanager
    def sending(self, stream: BinaryIO, size: int) -> Iterator[None]:
        """Count a file of *size* that the block reads from its start."""
        stream.seek(0)
        with self._following(stream, size, _position):
            yield

    @contextmanager
    def arriving(self, stream: BinaryIO, size: int) -> Iterator[None]:
        """Count a file that the block fills up to *size*."""
        with self._following(stream, size, _length):
            yield

    @property
    def done(self) -> int:
        """Bytes moved so far."""
        with self._lock:
            parts = (min(size, of(one.fileno())) for one, (size, of) in self._under_way.items())
            return self._whole + sum(parts)

    @contextmanager
    def _following(self, stream: BinaryIO, size: int, of: Callable[[int], int]) -> Iterator[None]:
        with self._lock:
            self._under_way[stream] = (size, of)
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            with self._lock:  # before the caller closes it, after which its number may be another file's
                del self._under_way[stream]
                if is_whole:
                    self._whole += size
                    self.files += 1


def _position(descriptor: int) -> int:
    return os.lseek(descriptor, 0, os.SEEK_CUR)


def _length(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
