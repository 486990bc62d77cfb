"""A store's clock, as a process knows it: the date of its last answer, and what has passed since."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

STEP_S = 2.0
"""Largest step that a new date does not make, seconds. Chosen: HTTP dates are cut to whole seconds, and an
answer takes a while; a larger step is a clock that was set."""
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""Where filesystems report when an object was written. Source: ossfs, adlfs, gcsfs, sftp and memory."""


class StoreDates:
    """The newest date of a store's answers, advanced by the monotonic clock here. Safe in several threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet."""
        self._monotonic = monotonic
        self._ahead_s: float | None = None
        self._seen_at = 0.0

    def seen(self, date: float | None) -> None:
        """The store has just answered with *date*, seconds since the epoch; None without one."""
        if date is None:
            return
        at = self._monotonic()
        ahead_s, known = date - at, self._ahead_s
        if known is not None and abs(ahead_s - known) <= STEP_S:
            ahead_s = max(ahead_s, known)  # time does not go back for a date that was cut to a second
        self._ahead_s, self._seen_at = ahead_s, at

    def now(self, *, max_age_s: float = float("inf")) -> float | None:
        """The store's time; None where no answer of the last *max_age_s* seconds had a date."""
        at = self._monotonic()
        if self._ahead_s is None or at - self._seen_at > max_age_s:
            return None
        return at + self._ahead_s


def date_of(value: object) -> float | None:
    """Seconds since the epoch of a time as stores report it: seconds, a datetime, ISO 8601 or an HTTP date.

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
    """When an object was written, from what its filesystem reports; None when it does not report it."""
    dates = (date_of(facts.get(name)) for name in _TIMES)
    return next((date for date in dates if date is not None), None)
