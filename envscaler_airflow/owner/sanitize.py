"""Shorten what an event contains, so that it always fits. Pure."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from envscaler_airflow.run.event_bodies import KnownBody

TEXT_BYTES = 4096
"""Longest text kept in an event, bytes of JSON. Chosen: a detail is one line."""
ITEMS = 16
"""Most texts kept of a list in an event. Chosen: as many as there are candidates for a restore."""
LINES_BYTES = 1 << 17
"""Most last lines kept in an event, bytes of JSON. Chosen: half of the largest event."""


def shortened(body: KnownBody) -> KnownBody:
    """Return an event's *body* with texts, lists of texts and last lines cut, so that it always fits."""
    return replace(body, **{item.name: _short(item.name, getattr(body, item.name)) for item in fields(body)})


def _short(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, TEXT_BYTES)
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        return value
    if name == "last_lines":
        return _newest(value)
    return tuple(_cut(item, TEXT_BYTES // 4) for item in value[:ITEMS])


def _newest(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last of *lines* that fit; if not even one does, its beginning."""
    kept: list[str] = []
    room = LINES_BYTES
    for line in reversed(lines):
        room -= _size(line) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(kept[::-1]) if kept or not lines else (_cut(lines[-1], LINES_BYTES),)


def _cut(text: str, most: int) -> str:
    size = _size(text)
    while size > most:
        text = text[: max(1, len(text) * most // size - 1)] + "…"
        size = _size(text)
    return text


def _size(text: str) -> int:
    """Return the bytes of *text* as JSON: up to twelve for one character."""
    return len(json.dumps(text))
