"""Secret values never leave the training container: they are blanked in the stream of output."""

from __future__ import annotations

import json
from typing import Iterable, List, Mapping, Set, Tuple
from urllib.parse import quote

MASK = b"***"
"""What stands for a secret; the same that Airflow writes."""
MIN_CHARS = 4
"""Shorter values are left alone. Chosen: masking ``1`` or ``yes`` destroys the log and hides nothing."""
MIN_LINE_CHARS = 8
"""Lines of a multi-line secret that are masked on their own. Chosen: shorter ones are ``}`` and the like."""

Span = Tuple[int, int]


def secret_values(names: Iterable[str], environ: Mapping[str, str]) -> List[str]:
    """Values of the environment variables *names*, absent ones left out."""
    return [environ[name] for name in names if name in environ]


class Masker:
    """Blanks secrets in a stream of bytes, also where a secret is cut by a read or chunk border.

    At most one byte less than the longest secret is held back until it is known what
    follows. Overlapping secrets are blanked as one.
    """

    def __init__(self, values: Iterable[str]) -> None:
        """Blank each of *values*, its lines, and its JSON and URL encodings."""
        needles: Set[bytes] = set()
        for value in values:
            needles.update(_forms(value.strip()))
        self._needles = sorted(needles, key=len, reverse=True)
        self._held = b""
        self._covered = 0  # leading bytes of _held that belong to a secret already blanked

    def feed(self, data: bytes) -> bytes:
        """Return what can be said safely after *data*."""
        if not self._needles:
            return data
        buffer = self._held + data
        return self._emit(buffer, self._safe_until(buffer))

    def flush(self) -> bytes:
        """Return what was held back: nothing more will follow."""
        return self._emit(self._held, len(self._held))

    def mask(self, text: str) -> str:
        """Blank the secrets of a whole *text* that is not part of the stream."""
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
        """Return where the first suffix begins that may grow into a secret."""
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
    """Blank *spans* in ``buffer[:cut]``; *opened* means that a mask stands for the first one already.

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
