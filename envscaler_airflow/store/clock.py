"""A store's clock, as seen by a process: the date of the last response plus the time since then."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

STEP_S = 2.0
"""Largest difference that is not a clock step, seconds. Chosen: HTTP dates are cut to whole seconds, and a
response takes a while; a larger difference means that someone set the clock.
"""
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""Keys under which filesystems report a write time. Source: ossfs, adlfs, gcsfs, sftp and memory."""


class StoreDates:
    """The newest date of a store's responses, advanced by the local monotonic clock. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Start without a date."""
        self._monotonic = monotonic
        self._ahead_s: float | None = None
        self._seen_at = 0.0

    def seen(self, date: float | None) -> None:
        """Record a response that just came with *date*, seconds since the epoch; None without a date."""
        if date is None:
            return
        at = self._monotonic()
        ahead_s, known = date - at, self._ahead_s
        if known is not None and abs(ahead_s - known) <= STEP_S:
            ahead_s = max(ahead_s, known)  # a date cut to a second must not move the time back
        self._ahead_s, self._seen_at = ahead_s, at

    def now(self, *, max_age_s: float = float("inf")) -> float | None:
        """The store's time; None if no response in the last *max_age_s* seconds had a date."""
        at = self._monotonic()
        if self._ahead_s is None or at - self._seen_at > max_age_s:
            return None
        return at + self._ahead_s


def date_of(value: object) -> float | None:
    """Convert a time as stores report it (seconds, a datetime, ISO 8601, an HTTP date) to epoch seconds.

    A time without a zone is UTC. None for anything else.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    found = _parsed(value) if isinstance(value, str) else value
    if not isinstance(found, dt.datetime):
        return None
    return (found if found.tzinfo else found.replace(tzinfo=dt.UTC)).timestamp()


def _parsed(text: str) -> dt.datetime | None:
    for parse in (dt.datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(text)
        except (ValueError, TypeError):
            continue
    return None


def written_at(facts: Mapping[str, object]) -> float | None:
    """Write time of an object from what its filesystem reports; None if it does not report one."""
    dates = (date_of(facts.get(name)) for name in _TIMES)
    return next((date for date in dates if date is not None), None)
