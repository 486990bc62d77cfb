"""Output and metrics as closed chunks, files that never change under their final name; the status."""

from __future__ import annotations

import json
import math
import os
import re
import select
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, Optional, Set, Tuple
from urllib.parse import quote

from envscaler_agent.progress import LogPatterns
from envscaler_agent.protocol import Progress, Status
from envscaler_agent.spool import Spool, write_atomic

LOG_CHUNK_BYTES = 256 << 10
LOG_CHUNK_S = 10.0
LATE_CHUNK_S = 60.0
CHUNK_SHARE = 1 / 360
"""A chunk of output is closed after 10 s or, if that is longer, after this share of the wrapper's age, but at
most after 60 s. Chosen: 10 s in the first hour, when people watch; after six hours a minute of output may be
lost with its machine, and a week is 10,726 objects instead of 60,480."""
METRICS_CHUNK_BYTES = 1 << 20
METRICS_CHUNK_S = 300.0
MAX_WAITING = 4096
"""Closed chunks that may wait for the sidecar. Chosen: 1 GiB of output at 256 KiB; then output is dropped."""
LAST_LINES = 100
MAX_LINE_CHARS = 2000
"""Longest line kept for the last lines. Chosen: longer ones are progress bars and arrays."""
MAX_TAIL_BYTES = 256 << 10
"""Largest JSON of the last lines. Chosen: a quarter of the largest status."""

_OVERWRITES = re.compile(rb"[\r\n\x08]+")
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
"""Source: ECMA-48, control sequences: colours and cursor moves of a terminal."""
_NUMBER = re.compile(r"(\d{6,12})\.(?:open|log|jsonl)\Z")


def chunk_age_s(least_s: float, elapsed_s: float) -> float:
    """Return seconds after which a chunk is closed: at least *least_s*, its writer began *elapsed_s* ago."""
    return max(least_s, min(LATE_CHUNK_S, CHUNK_SHARE * elapsed_s))


class Chunks:
    """Numbered files in one folder: ``000007.open`` grows, ``000007.log`` is closed for good.

    The open file always exists, so that a restarted wrapper knows the used numbers although closed chunks are
    uploaded and deleted. A full disk drops output, counts it, and never stops the training.

    Attributes:
        dropped_bytes: Bytes that could not be kept.
        problem: The reason, "" without one.
    """

    def __init__(
        self, folder: Path, suffix: str, *, max_bytes: int, max_age_s: float, clock: Callable[[], float]
    ) -> None:
        """Write into *folder*; first close what an earlier wrapper left open."""
        self.dropped_bytes = 0
        self.problem = ""
        self._folder = folder
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._began = clock()
        self._file: Optional[int] = None
        self._size = 0
        self._opened_at = 0.0
        self._number = 1
        folder.mkdir(parents=True, exist_ok=True)
        self._take_over()

    def write(self, data: bytes) -> None:
        """Append *data*; a chunk that is full is closed after its last complete line."""
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
        now = self._clock()
        if self._size and now - self._opened_at >= chunk_age_s(self._max_age_s, now - self._began):
            self.close()

    def close(self) -> None:
        """Close the chunk now, if it is not empty."""
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
            raise OSError(0, f"{waiting} chunks wait for the sidecar")

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

    A progress bar is one line that never ends: a search treats its text between two carriage returns (or runs
    of backspaces) as a separate line.
    """

    def __init__(self) -> None:
        """Start empty."""
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
        """Return the unfinished line once, if nothing was added to it since the last call, or *at_end*."""
        is_due = bool(self._open) and (at_end or self._open == self._waiting) and self._open != self._given
        self._waiting = self._open
        if not is_due:
            return []
        self._given = self._open
        return [_CONTROL.sub(b"", self._open)]

    def tail(self) -> Tuple[str, ...]:
        """Return the last lines, including the unfinished one, small enough for a status."""
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


MASK = b"***"
"""Replacement for a secret; the same that Airflow writes."""
MIN_CHARS = 4
"""Shorter values are not masked. Chosen: masking ``1`` or ``yes`` destroys the log and hides nothing."""
MIN_LINE_CHARS = 8
"""Lines of a multi-line secret that are masked by themselves. Chosen: shorter ones are ``}`` and the like."""

Span = Tuple[int, int]


def secret_values(names: Iterable[str], environ: Mapping[str, str]) -> List[str]:
    """Values of the environment variables *names*, without absent ones."""
    return [environ[name] for name in names if name in environ]


class Masker:
    """Blanks secrets in a stream of bytes, even if a read or chunk border cuts a secret.

    It delays at most one byte less than the longest secret until it knows what follows. Overlapping secrets
    are blanked as one.
    """

    def __init__(self, values: Iterable[str]) -> None:
        """Blank each of *values*, its lines, and its JSON and URL encodings."""
        needles: Set[bytes] = set()
        for value in values:
            needles.update(_forms(value.strip()))
        self._needles = sorted(needles, key=len, reverse=True)
        self._held = b""
        self._covered = 0  # leading bytes of _held that belong to an already blanked secret

    def feed(self, data: bytes) -> bytes:
        """Return the output that is safe to pass on after *data*."""
        if not self._needles:
            return data
        buffer = self._held + data
        return self._emit(buffer, self._safe_until(buffer))

    def flush(self) -> bytes:
        """Return the delayed rest: nothing more will follow."""
        return self._emit(self._held, len(self._held))

    def mask(self, text: str) -> str:
        """Blank the secrets of a complete *text* that is not part of the stream."""
        data = text.encode("utf-8", "surrogateescape")
        out, _ = _blank(data, len(data), _merge(self._found(data)), opened=False)
        return out.decode("utf-8", "replace")

    def _emit(self, buffer: bytes, cut: int) -> bytes:
        spans = self._found(buffer)
        if self._covered:
            spans.append((0, self._covered))
        out, last = _blank(buffer, cut, _merge(spans), opened=self._covered > 0)
        self._held = buffer[cut:]
        self._covered = max(0, last - cut)
        return out

    def _found(self, buffer: bytes) -> List[Span]:
        spans = []
        for needle in self._needles:
            at = buffer.find(needle)
            while at >= 0:
                spans.append((at, at + len(needle)))
                at = buffer.find(needle, at + 1)
        return spans

    def _safe_until(self, buffer: bytes) -> int:
        """Return the start of the first suffix that may grow into a secret."""
        cut = len(buffer)
        for needle in self._needles:
            at = buffer.find(needle[:1], max(0, len(buffer) - len(needle) + 1), cut)
            while at >= 0:
                if needle.startswith(buffer[at:]):
                    cut = at
                    break
                at = buffer.find(needle[:1], at + 1, cut)
        return cut


def _forms(value: str) -> Iterable[bytes]:
    if len(value) < MIN_CHARS:
        return
    for form in (
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value, safe=""),
    ):
        yield form.encode("utf-8", "surrogateescape")
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) > 1:
        for line in lines:
            if len(line) >= MIN_LINE_CHARS:
                yield line.encode("utf-8", "surrogateescape")


def _merge(spans: List[Span]) -> List[Span]:
    merged: List[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _blank(buffer: bytes, cut: int, spans: List[Span], *, opened: bool) -> Tuple[bytes, int]:
    """Blank *spans* in ``buffer[:cut]``; *opened* means that the first one already has a mask.

    Returns the text and the end of the last span that begins before *cut* (0 for none).
    """
    parts = []
    at = last = 0
    for start, end in spans:
        if start >= cut:
            break
        parts.append(buffer[at:start])
        if not (opened and start == 0):
            parts.append(MASK)
        at, last = min(end, cut), end
    parts.append(buffer[at:cut])
    return b"".join(parts), last


READ_BYTES = 64 << 10
"""Most bytes read from the command in one turn. Source: capacity of a pipe, pipe(7)."""
MAX_PENDING = 256 << 10
"""Bytes that may wait for a slow reader of stdout; beyond this the command waits, as without a wrapper.
Chosen: a log chunk.
"""
WRITE_BYTES = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512
"""A pipe that polls writable accepts this much without blocking (pipe(7))."""


class OutputCopier:
    """Copies output without ever blocking the wrapper."""

    def __init__(self, masker: Masker, patterns: LogPatterns, chunks: Optional[Chunks], out: int) -> None:
        """Write to the descriptor *out*, and to *chunks* when there is a spool."""
        self._masker = masker
        self._patterns = patterns
        self._chunks = chunks
        self._out = out
        self._out_is_open = True
        self._pending = bytearray()
        self._lines = Lines()
        self._is_at_start = True

    def take(self, data: bytes) -> bool:
        """Process the command's output; True when a pattern found a value."""
        return self._pass(self._masker.feed(data))

    def say(self, text: str) -> None:
        """Add the wrapper's own text to the output, on a separate line; no pattern reads it."""
        if not text:
            return
        begin = b"" if self._is_at_start else b"\n"
        self._show(begin + b"[envscaler] " + " ".join(text.split()).encode() + b"\n")

    def finish(self) -> bool:
        """Pass on the delayed rest and close the chunk: the command has ended.

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
        """True when stdout should be written to."""
        return bool(self._pending) and self._out_is_open

    @property
    def has_room(self) -> bool:
        """True when the command should be read from."""
        return len(self._pending) < MAX_PENDING or not self._out_is_open

    def write_pending(self) -> None:
        """Write one piece to stdout, which polled writable."""
        try:
            written = os.write(self._out, self._pending[:WRITE_BYTES])
            del self._pending[:written]
        except BlockingIOError:
            return
        except OSError:
            self._out_is_open = False  # the reader has ended; the chunks continue
            self._pending.clear()

    def tail(self) -> Tuple[str, ...]:
        """Return the last lines."""
        return self._lines.tail()

    def progress(self) -> Progress:
        """Return what the patterns found."""
        return self._patterns.progress()

    def problems(self) -> List[str]:
        """Return what the user should know about logs and patterns."""
        found = list(self._patterns.problems)
        if self._chunks is not None and self._chunks.problem:
            found.append(self._chunks.problem)
        return found

    def _pass(self, data: bytes) -> bool:
        if not data:
            return False
        self._show(data)
        return self._patterns.feed(self._lines.feed(data))

    def _show(self, data: bytes) -> None:
        self._is_at_start = data.endswith(b"\n")
        if self._out_is_open:
            self._pending += data
        if self._chunks is not None:
            self._chunks.write(data)


STATUS_S = 1.0
"""Time between two statuses for the sidecar. Chosen: as often as the sampler reports."""
USAGE_S = 5.0
"""Time between two updates of the means in them. Chosen: a third of the time that they average."""
USAGE_SAMPLES = 15
"""Number of samples in the means of a status: 15 s at one per second, as often as the sidecar sends it."""
END_TRIES = 60
"""Tries, a second apart, to report the end on a full disk. Chosen: the sidecar empties logs within seconds.
"""
LOSS_S = 10.0
"""Time between two losses in the metrics. Chosen: as often as a session reads a tensor."""
_STEP_FIELDS = ("step", "epoch", "samples", "tokens", "batch", "step_time_s", "data_time_s", "sync_time_s")
_LOSS_FIELDS = ("loss", "loss_is_nan", "accuracy")
_STAMPS = ("t", "at")
_LAST = (
    *("_peak_bytes", "_limit_bytes", "_total_bytes", "_errors", "_xid", "_seconds"),
    *("_joules", "_reasons"),
)
"""Suffixes of names whose mean has no meaning: counters, all-time values, bit masks."""


class Reporter:
    """Writes the status at most once a second and only after a change."""

    def __init__(
        self, spool: Optional[Spool], *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Begin at ``t`` = 0; without a spool it writes nothing."""
        self.status = Status()
        self.origin = clock()
        self._spool = spool
        self._clock = clock
        self._wall = wall
        self._written: Optional[Status] = None
        self._written_at = self._usage_at = -math.inf
        self._loss_at = self._step_at = -math.inf
        self._step: Tuple[Any, ...] = ()
        self._samples: Deque[Mapping[str, float]] = deque(maxlen=USAGE_SAMPLES)
        self._metrics: Optional[Chunks] = None
        if spool is not None:
            self._metrics = Chunks(
                spool.metrics,
                "jsonl",
                max_bytes=METRICS_CHUNK_BYTES,
                max_age_s=METRICS_CHUNK_S,
                clock=clock,
            )

    def set(self, **changes: Any) -> None:
        """Change fields of the status; they are written with the next :meth:`tick`."""
        self.status = replace(self.status, **changes)

    def tick(self, *, at_once: bool = False) -> None:
        """Write what has changed, close old chunks."""
        now = self._clock()
        if self._metrics is not None:
            self._metrics.tick()
        if self._spool is None or not (at_once or now - self._written_at >= STATUS_S):
            return
        if self._written is not None and self.status == self._written:
            return
        self.status = replace(self.status, sequence=self.status.sequence + 1)
        try:
            write_atomic(self._spool.wrapper, self.status.to_json())
        except OSError:
            return  # a full disk: the next tick retries
        self._written, self._written_at = self.status, now

    def add_sample(self, sample: Mapping[str, Any], *, cpu_seconds: Optional[float]) -> None:
        """Process a line of the sampler."""
        numbers = {name: value for name, value in sample.items() if _is_number(value)}
        self._line(numbers)
        self._samples.append({name: value for name, value in numbers.items() if name not in _STAMPS})
        now = self._clock()
        if now - self._usage_at >= USAGE_S:
            self._usage_at = now
            self.set(usage=aggregate(self._samples), cpu_seconds=cpu_seconds)

    def add_progress(self, progress: Progress) -> None:
        """Process the training's report: a line at a new step, the loss every ten seconds."""
        self.set(progress=progress)
        now = self._clock()
        step = tuple(getattr(progress, name) for name in _STEP_FIELDS[:2])
        if step == self._step or now - self._step_at < STATUS_S or step == (None, None):
            return
        self._step, self._step_at = step, now
        names: Tuple[str, ...] = _STEP_FIELDS
        if now - self._loss_at >= LOSS_S:
            self._loss_at = now
            names += _LOSS_FIELDS
        values = {name: getattr(progress, name) for name in names}
        self._line({name: value for name, value in values.items() if value is not None})

    def close(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Close the metrics and write the last status: without it the owner never learns of the end."""
        if self._samples:
            self.set(usage=aggregate(self._samples))
        if self._metrics is not None:
            self._metrics.close()
        for _ in range(END_TRIES):
            self.tick(at_once=True)
            if self._spool is None or self._written == self.status:
                return
            sleep(1.0)

    def _line(self, values: Dict[str, Any]) -> None:
        if self._metrics is None or not values:
            return
        stamp = {"t": round(self._clock() - self.origin, 3), "at": round(self._wall(), 3)}
        self._metrics.write(json.dumps({**stamp, **values}, separators=(",", ":")).encode() + b"\n")


def aggregate(samples: "Deque[Mapping[str, float]] | list[Mapping[str, float]]") -> Dict[str, float]:
    """Return the mean of each value; for peaks, limits, totals and counts the last one."""
    values: Dict[str, float] = {}
    counts: Dict[str, int] = {}
    for sample in samples:
        for name, value in sample.items():
            if name.endswith(_LAST):
                values[name], counts[name] = value, 1
            else:
                values[name] = values.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + 1
    return {name: round(value / counts[name], 3) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
