"""What the command prints: to the wrapper's own stdout, to chunks, to the last lines, secrets masked."""

from __future__ import annotations

import os
import select
from typing import List, Optional, Tuple

from envscaler_airflow.agent.logs import Chunks, Lines
from envscaler_airflow.agent.masking import Masker
from envscaler_airflow.agent.patterns import LogPatterns
from envscaler_airflow.protocol import Progress

READ_BYTES = 64 << 10
"""Most taken from the command in one turn. Source: capacity of a pipe, pipe(7)."""
MAX_PENDING = 256 << 10
"""Bytes that may wait for a slow reader of our stdout; beyond, the command waits, as without a
wrapper. Chosen: a log chunk."""
WRITE_BYTES = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512
"""A pipe that polls writable takes this much without blocking (pipe(7))."""


class Pump:
    """Moves output on without ever blocking the wrapper."""

    def __init__(self, masker: Masker, patterns: LogPatterns, chunks: Optional[Chunks], out: int) -> None:
        """Write to the descriptor *out*, and to *chunks* when there is an exchange."""
        self._masker = masker
        self._patterns = patterns
        self._chunks = chunks
        self._out = out
        self._out_is_open = True
        self._pending = bytearray()
        self._lines = Lines()
        self._is_at_start = True

    def take(self, data: bytes) -> bool:
        """Take up what the command printed; True when a pattern found a value."""
        return self._pass(self._masker.feed(data))

    def say(self, text: str) -> None:
        """Add a line of our own to the output, on a line of its own; no pattern reads it."""
        if not text:
            return
        begin = b"" if self._is_at_start else b"\n"
        data = begin + b"[envscaler] " + " ".join(text.split()).encode() + b"\n"
        if self._out_is_open:
            self._pending += data
        if self._chunks is not None:
            self._chunks.write(data)
        self._is_at_start = True

    def finish(self) -> bool:
        """Pass on what was kept back and close the chunk: the command has ended.

        True when a pattern found a value in it.
        """
        found = self._pass(self._masker.flush())
        found = self._patterns.feed(self._lines.settled(at_end=True)) or found
        if self._chunks is not None:
            self._chunks.close()
        return found

    def tick(self) -> bool:
        """Close a chunk that is old enough; True when a pattern found a value in an unfinished line."""
        if self._chunks is not None:
            self._chunks.tick()
        return self._patterns.feed(self._lines.settled())

    @property
    def has_pending(self) -> bool:
        """True when our stdout should be written to."""
        return bool(self._pending) and self._out_is_open

    @property
    def has_room(self) -> bool:
        """True when the command should be read from."""
        return len(self._pending) < MAX_PENDING or not self._out_is_open

    def write_pending(self) -> None:
        """Write one piece to our stdout, which polled writable."""
        try:
            written = os.write(self._out, self._pending[:WRITE_BYTES])
            del self._pending[:written]
        except BlockingIOError:
            return
        except OSError:
            self._out_is_open = False  # nobody reads; the chunks go on
            self._pending.clear()

    def tail(self) -> Tuple[str, ...]:
        """Return the last lines."""
        return self._lines.tail()

    def progress(self) -> Progress:
        """Return what the patterns found."""
        return self._patterns.progress()

    def problems(self) -> List[str]:
        """Return what people should know about logs and patterns."""
        found = list(self._patterns.problems)
        if self._chunks is not None and self._chunks.problem:
            found.append(self._chunks.problem)
        return found

    def _pass(self, data: bytes) -> bool:
        if not data:
            return False
        self._is_at_start = data.endswith(b"\n")
        if self._out_is_open:
            self._pending += data
        if self._chunks is not None:
            self._chunks.write(data)
        return self._patterns.feed(self._lines.feed(data))
