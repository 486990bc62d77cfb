"""How many bytes a transfer has moved, files under way included."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO


class Moved:
    """Bytes of one transfer; safe between the threads that move and the one that looks.

    A file under way counts by its descriptor, so no store needs to report anything: what is read goes by the
    position in it, what is written by its length. A store that opens the file anew counts it at its end.

    Attributes:
        total: Bytes in all; None before that is known.
        files: Whole files that were moved, over all tries.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.total: int | None = None
        self.files = 0
        self._lock = threading.Lock()
        self._whole = 0
        self._under_way: dict[BinaryIO, tuple[int, Callable[[int], int]]] = {}

    def begin(self, total: int) -> None:
        """*total* bytes are to be moved, none are moved yet; also when it is tried again."""
        with self._lock:
            self.total, self._whole = total, 0

    def add(self, size: int) -> None:
        """So many more bytes are moved, or need not be."""
        with self._lock:
            self._whole += size

    @contextmanager
    def sending(self, stream: BinaryIO, size: int) -> Iterator[None]:
        """Count a file of *size* that the block reads from its beginning."""
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
            with self._lock:  # before the block's owner closes it: its number may then be another file's
                del self._under_way[stream]
                if is_whole:
                    self._whole += size
                    self.files += 1


def _position(descriptor: int) -> int:
    return os.lseek(descriptor, 0, os.SEEK_CUR)


def _length(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
