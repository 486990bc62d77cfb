"""The owner's lease: a counter that somebody must keep raising, or the sidecar ends the attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.names import join

LEASE = "lease/run.json"
RENEW_EVERY_S = 60.0
"""Seconds between renewals. Chosen: a thirtieth of the default ``orphan_after``."""
MAX_AGE_S = 30 * 86400.0
"""Longest age believed, seconds. Chosen: no machine of ours lives longer."""
MOST_RENEWALS = 2**53
"""Counters below are believed. Source: beyond it JSON readers skip whole numbers."""
MOST_TEXT = 4096
"""Longest text read, characters. Chosen: what a pod waits for is one line."""
MAX_LEASE_BYTES = 1 << 20
"""Largest lease read, bytes. Chosen: the longest reason for a wait fits many times."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the owner's side last wrote.

    Attributes:
        counter: Grows with every renewal; the only thing that ages are told by.
        holder: Who renewed it: a trigger or a slice. For people.
        waits: What nodes of the live attempt were last seen to wait for; "" for nothing. For people.
        ages: Seconds that watchers saw something last, each by its own clock, so that the next one goes on:
            ``stopping-g1-a3`` since an attempt was asked to go, ``silent-g1-a3`` since it was heard.
    """

    counter: int
    holder: str = ""
    waits: str = ""
    ages: Mapping[str, float] = field(default_factory=dict)


def read_lease(store: Store, prefix: str = "") -> Lease | None:
    """The lease of the run at *prefix*; None when none was ever written.

    Raises:
        StoreError: It cannot be told.
        ProtocolError: It is not a lease of this major version.
    """
    name = join(prefix, LEASE)
    text = store.read(name, max_bytes=MAX_LEASE_BYTES)
    if text is None:
        return None
    where = store.uri(name)
    body = read_object(text, where=where, max_bytes=MAX_LEASE_BYTES)
    counter, said = body.get("counter"), body.get("ages", {})
    if type(counter) is not int or not 0 <= counter < MOST_RENEWALS:
        raise ProtocolError(f"{where}: counter: got {counter!r:.80}, expected a whole number from 0 on")
    if not isinstance(said, dict):
        raise ProtocolError(f"{where}: ages: got {said!r:.80}, expected seconds by name")
    ages = {
        name: float(age) for name, age in said.items() if type(age) in (int, float) and 0 <= age <= MAX_AGE_S
    }
    return Lease(counter, _text(body.get("holder")), _text(body.get("waits")), ages)


def _text(value: object) -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else ""


def waits_of(store: Store, prefix: str = "") -> str:
    """What nodes of the live attempt were last seen to wait for; "" when nothing is known.

    Raises:
        StoreError: It cannot be told.
    """
    try:
        lease = read_lease(store, prefix)
    except ProtocolError:
        return ""
    return lease.waits if lease else ""


def ages_of(store: Store, prefix: str = "") -> Mapping[str, float]:
    """How long what is watched had lasted when the lease was last renewed; {} when nothing is known.

    Raises:
        StoreError: It cannot be told.
    """
    try:
        lease = read_lease(store, prefix)
    except ProtocolError:
        return {}
    return lease.ages if lease else {}


def renew_lease(
    store: Store,
    prefix: str = "",
    *,
    holder: str,
    waits: str | None = None,
    ages: Mapping[str, float] | None = None,
) -> Lease:
    """Raise the counter by one, and write what else is given; None keeps the value before.

    A lease that cannot be understood is begun anew: to renew it is this side's job alone.

    Raises:
        StoreError: It cannot be read or written.
    """
    try:
        last = read_lease(store, prefix)
    except ProtocolError:
        last = None
    counter = last.counter + 1 if last else 1
    if waits is None:
        waits = last.waits if last else ""
    if ages is None:
        ages = last.ages if last else {}
    body = {
        "schema": SCHEMA,
        "counter": counter,
        "holder": holder,
        "waits": waits,
        "ages": {name: round(seconds, 1) for name, seconds in ages.items()},
    }
    store.write(join(prefix, LEASE), json.dumps(body, separators=(",", ":")).encode())
    return Lease(counter, holder, waits, dict(ages))


class LeaseWatch:
    """How long the lease has stood still, by the watcher's own monotonic clock.

    Only time between two readings that showed the same lease counts, and of a longer gap only
    *max_gap_s*: neither an unreadable store nor a suspended machine is an expiry, since the owner
    may have been as cut off as the watcher.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, *, max_gap_s: float = 2 * RENEW_EVERY_S
    ) -> None:
        """Watch with the clock *monotonic*; look at least every *max_gap_s* seconds."""
        self._monotonic = monotonic
        self._max_gap_s = max_gap_s
        self._last: tuple[int, str] | None = None
        self._seen_at: float | None = None
        self._unchanged_s = 0.0

    def seen(self, lease: Lease | None) -> None:
        """The store was read and showed *lease* (None: proven absent). Call nothing when it was not."""
        now = self._monotonic()
        shown = (lease.counter, lease.holder) if lease else None
        if self._seen_at is None or shown != self._last:
            self._unchanged_s = 0.0
        else:
            self._unchanged_s += min(now - self._seen_at, self._max_gap_s)
        self._last, self._seen_at = shown, now

    @property
    def unchanged_s(self) -> float:
        """Seconds for which the lease was seen to stand still, up to the last reading; 0 before the first."""
        return self._unchanged_s


NAME = "lease/log.json"
MAX_BYTES = 1 << 20
"""Largest file read, bytes. Chosen: cursors for 10,000 nodes fit."""

Cursor = tuple[int, int]
"""``(chunk, byte offset in it)`` of the next byte to show; chunks count from 1."""
BEGIN: Cursor = (1, 0)


@dataclass(frozen=True, slots=True)
class TaskLog:
    """What the task's log shows already.

    Attributes:
        shown: How far the newest trigger, or an execution after it, shows what each node printed; keys are
            those of :func:`log_key`.
        kept: How far an execution's log has it.
        host: Machine of the trigger that wrote last; "" before one did.
        event: Number of the newest event that an execution described; 0 before.
    """

    shown: Mapping[str, Cursor] = field(default_factory=dict)
    kept: Mapping[str, Cursor] = field(default_factory=dict)
    host: str = ""
    event: int = 0


def log_key(attempt: tuple[int, int], node: int) -> str:
    """Name of one node of an attempt ``(generation, number)`` in :class:`TaskLog`."""
    return f"g{attempt[0]}-a{attempt[1]}-n{node}"


def read_task_log(store: Store, prefix: str) -> TaskLog:
    """What the run at *prefix* has; an empty one where none was written or what is there is not readable.

    A position that is lost costs lines that appear twice, never a stage.

    Raises:
        StoreError: The store cannot be read.
    """
    name = join(prefix, NAME)
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        if text is None:
            return TaskLog()
        body = read_object(text, where=store.uri(name), max_bytes=MAX_BYTES)
        return TaskLog(
            _cursors(body.get("shown")),
            _cursors(body.get("kept")),
            str(body.get("host", "")),
            int(body.get("event", 0)),
        )
    except (ProtocolError, ValueError, TypeError, OverflowError, IndexError, AttributeError):
        return TaskLog()


def write_task_log(store: Store, prefix: str, log: TaskLog) -> None:
    """Replace what was there. Raises StoreError."""
    body = {
        "schema": SCHEMA,
        "shown": dict(log.shown),
        "kept": dict(log.kept),
        "host": log.host,
        "event": log.event,
    }
    store.write(join(prefix, NAME), json.dumps(body, separators=(",", ":")).encode())


def _cursors(body: Mapping[str, list[int]] | None) -> dict[str, Cursor]:
    found = {str(key): (int(at[0]), int(at[1])) for key, at in (body or {}).items()}
    return {key: at for key, at in found.items() if at[0] >= 1 and at[1] >= 0}
