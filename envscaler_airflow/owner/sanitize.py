"""Bound what the training's side reports, for the owner; values that cannot be true become unknown. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from envscaler_agent.protocol import Progress, Status, Transfer

MOST = 2**53
"""Largest count or amount believed. Source: beyond it doubles, and most JSON readers, skip whole numbers."""
TEXT_BYTES = 4096
"""Longest text kept in an event, bytes of JSON. Chosen: a detail is one line."""
ITEMS = 16
"""Most texts kept of a list in an event. Chosen: as many as there are candidates for a restore."""
LINES_BYTES = 1 << 17
"""Most last lines kept in an event, bytes of JSON. Chosen: half of the largest event."""

_SIGNED = frozenset({"loss", "accuracy"})
_Said = TypeVar("_Said", Status, Progress)


def believable(status: Status) -> Status:
    """Return *status* with impossible numbers set to unknown: negative, or beyond :data:`MOST`."""
    known = _without_nonsense(status)
    usage = {name: value for name, value in status.usage.items() if _is_sane(value)}
    transfer = status.transfer if _is_possible(status.transfer) else None
    return replace(known, progress=_without_nonsense(status.progress), usage=usage, transfer=transfer)


def _is_possible(transfer: Transfer | None) -> bool:
    return transfer is not None and 0 <= transfer.done_bytes <= transfer.total_bytes <= MOST


def _without_nonsense(said: _Said) -> _Said:
    numbers = {item.name: getattr(said, item.name) for item in fields(said) if item.default is None}
    nonsense = {
        name: None
        for name, value in numbers.items()
        if isinstance(value, int | float) and name not in _SIGNED and not _is_sane(value)
    }
    return replace(said, **nonsense) if nonsense else said  # type: ignore[arg-type]  # all of them Optional


def _is_sane(value: float) -> bool:
    return 0 <= value <= MOST


def shortened(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's *body* with texts, lists of texts and last lines cut, so that it always fits."""
    return {name: _short(name, value) for name, value in body.items()}


def _short(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, TEXT_BYTES)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return value
    if name == "last_lines":
        return _newest(value)
    return [_cut(item, TEXT_BYTES // 4) for item in value[:ITEMS]]


def _newest(lines: list[str] | tuple[str, ...]) -> list[str]:
    """Return the last of *lines* that fit; if not even one does, its beginning."""
    kept: list[str] = []
    room = LINES_BYTES
    for line in reversed(lines):
        room -= _size(line) + 1
        if room < 0:
            break
        kept.append(line)
    return kept[::-1] if kept or not lines else [_cut(lines[-1], LINES_BYTES)]


def _cut(text: str, most: int) -> str:
    size = _size(text)
    while size > most:
        text = text[: max(1, len(text) * most // size - 1)] + "…"
        size = _size(text)
    return text


def _size(text: str) -> int:
    """Return the bytes of *text* as JSON: up to twelve for one character."""
    return len(json.dumps(text))
