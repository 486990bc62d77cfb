"""Recorded scaling checks, in closed chunks: ``decisions/<writer>-000003.jsonl``.

A chunk is closed after 10 minutes or 256 KiB. A decision to move closes it at once, so that every request
comes with its reasons. A "keep" with the same phase and the same reason (ignoring numbers) as the line before
only increments a counter on that line. The line contains the first and the last of them in full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envscaler_agent.messages import SCHEMA, check_schema
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.scaling import Check
from envscaler_airflow.store.run_store import Store

FOLDER = "decisions"
CHUNK_S = 600.0
CHUNK_BYTES = 1 << 18
"""A chunk is closed after so many seconds or bytes. Chosen: a few objects an hour, each small to read."""
MAX_CHUNK_BYTES = 1 << 22
"""Largest chunk read, bytes. Chosen: sixteen times the largest that is written."""
READERS = 8
"""Chunks read at a time. Chosen: below the ten connections that botocore keeps. A training of three weeks has
3,000 chunks: two minutes if read one after another at 40 ms each."""

_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(slots=True)
class _Line:
    """A line of the open chunk, with its checks as text.

    As objects, those of a thousand sensors would be most of what a triggerer's garbage collector visits.
    """

    first: str
    kind: tuple[object, ...] | None
    times: int = 1
    last: str = ""

    def to_json(self) -> str:
        last = f',"last":{self.last}' if self.last else ""
        return f'{{"schema":"{SCHEMA}","times":{self.times},"check":{self.first}{last}}}\n'


class DecisionLog:
    """Writes the checks of one observer. Several observers may write concurrently."""

    def __init__(self, run: Store, *, writer: str, monotonic: Callable[[], float]) -> None:
        """Continue after the last chunk that *writer* left in the folder of *run*."""
        self._run = run
        self._writer = writer
        self._monotonic = monotonic
        mine = [name for name in run.children(FOLDER) if name.startswith(f"{writer}-")]
        self._chunk = max((_number(name) for name in mine), default=0) + 1
        self._lines: list[_Line] = []
        self._bytes = 0
        self._opened = monotonic()

    def add(self, check: Check) -> None:
        """Record *check*; it is written when its chunk is closed.

        Raises:
            StoreError: The chunk could not be written; the next check retries it.
        """
        decision, last = check.decision, self._lines[-1] if self._lines else None
        text, kind = json.dumps(check.to_dict(), separators=(",", ":"), allow_nan=False), _kind_of(check)
        if last is not None and kind is not None and last.kind == kind:
            last.times, last.last = last.times + 1, text
        else:
            self._lines.append(_Line(text, kind))
            self._bytes += 2 * len(text)  # the last repetition needs space too
        age = self._monotonic() - self._opened
        if decision.action != "keep" or age >= CHUNK_S or self._bytes >= CHUNK_BYTES:
            self.close()

    def close(self) -> None:
        """Write the open chunk, unless it is empty."""
        if not self._lines:
            return
        text = "".join(line.to_json() for line in self._lines)
        while not self._run.create(f"{FOLDER}/{self._writer}-{self._chunk:06d}.jsonl", text.encode()):
            self._chunk += 1
        self._chunk += 1
        self._lines, self._bytes, self._opened = [], 0, self._monotonic()


def read_decisions(run: Store, *, newest_chunks: int | None = None) -> Iterator[tuple[Check, int]]:
    """Yield recorded checks, oldest first, each with its number of repetitions.

    Chunks of other major versions, oversized chunks and torn lines are skipped: checks only explain
    decisions.

    Args:
        run: The run's folder.
        newest_chunks: Largest number of chunks to read; all if not given.
    """
    checks: list[tuple[tuple[int, float], Check, int]] = []
    names = sorted(run.children(FOLDER), key=_number)
    names = names if newest_chunks is None else names[-newest_chunks:]
    with ThreadPoolExecutor(max(1, min(READERS, len(names)))) as readers:
        texts = readers.map(lambda name: _read_chunk(run, f"{FOLDER}/{name}"), names)
        for text in texts:
            for line in text.splitlines():
                found = _read(line)
                if found is not None:
                    seen = found[0].observation
                    checks.append(((seen.generation, seen.elapsed_s), *found))
    for _, check, times in sorted(checks, key=lambda item: item[0]):
        yield check, times


def _read_chunk(run: Store, name: str) -> bytes:
    try:
        return run.read(name, max_bytes=MAX_CHUNK_BYTES) or b""
    except ProtocolError:
        return b""


def _read(line: bytes) -> tuple[Check, int] | None:
    try:
        body = json.loads(line)
        check_schema(body["schema"], where="decisions")
        return Check.from_dict(body.get("last") or body["check"]), int(body["times"])
    except (ProtocolError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _kind_of(check: Check) -> tuple[object, ...] | None:
    """What repeated checks have in common; None for a check that is never counted with others."""
    if check.decision.action != "keep":
        return None
    seen = check.observation
    return _kind(check.decision.reason), seen.generation, seen.attempt, seen.training_phase


def _kind(reason: str) -> str:
    """*reason* without its numbers, which is equal for repeated checks."""
    return _NUMBERS.sub("#", reason)


def _number(name: str) -> int:
    digits = name.rsplit("-", 1)[-1].removesuffix(".jsonl")
    return int(digits) if digits.isdigit() else 0
