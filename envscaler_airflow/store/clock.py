"""A store's clock, as seen by a process: the date of the last response plus the time since then."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime

from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.store.keys import MAX_BYTES

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


class DatedStore:
    """What every store has in common: its time, and reads without the date or with a limit.

    A subclass has ``read_dated``, ``sizes`` and ``uri`` of :class:`~envscaler_airflow.store.run_store.Store`.
    """

    _max_age_s = float("inf")
    """Largest age of the last date, seconds."""

    def __init__(self) -> None:
        """Start without a date."""
        self._dates = StoreDates()

    def read(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Bytes of *name*; None when it is absent."""
        found = self.read_dated(name, max_bytes=max_bytes)
        return None if found is None else found[0]

    def names(self, prefix: str) -> list[str]:
        """Every name below *prefix*, sorted."""
        return sorted(self.sizes(prefix))

    def now(self) -> float:
        """The store's time, from the date of its last response; this machine's if it reports none.

        Before the first response, and when the last is too old, this sends a request.
        """
        known = self._dates.now(max_age_s=self._max_age_s)
        if known is None:
            with suppress(StoreError, OSError):
                self._ask_date()
            known = self._dates.now()
        return time.time() if known is None else known

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """Bytes of *name* and its write time by the store's clock."""
        raise NotImplementedError

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every name below *prefix*."""
        raise NotImplementedError

    def uri(self, name: str) -> str:
        """URL of *name*."""
        raise NotImplementedError

    def _ask_date(self) -> None:
        """Send the cheapest request whose response has a date."""
        raise NotImplementedError

    def _check_size(self, name: str, size: int, max_bytes: int) -> None:
        """Refuse what is larger than the caller reads.

        Raises:
            ProtocolError: It is.
        """
        if size > max_bytes:
            raise ProtocolError(f"{self.uri(name)}: {size} bytes, at most {max_bytes} are read")


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
