"""The events of a run in the store: numbered files, created exclusively, folded into the run's state.

Snapshots, the fold of the first events in one file, only save time: the events decide.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow import __version__
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.run import MAX_EVENT_BYTES, Actor, Event, RunState, fold
from envscaler_airflow.run.event_bodies import EventBody
from envscaler_airflow.store.clock import STEP_S
from envscaler_airflow.store.run_store import Store, folder_of

FOLDER = "events"
"""Folder of the events, below the run's."""
SNAPSHOT_EVERY = 500
"""Events between two snapshots. Chosen: a run has tens of events, and 500 fold in milliseconds."""
MAX_SNAPSHOT_BYTES = 1 << 26
"""Largest snapshot written or read, bytes. Chosen: 8,000 events of 8 KiB; above it the events are read."""
_REQUEST_TRIES = 100
"""Races that a request may lose before its writer raises. Chosen: an owner appends one event a second."""


def event_name(number: int) -> str:
    """Store name of event *number*, relative to the run's folder."""
    return f"{FOLDER}/{number:06d}.json"


def snapshot_name(number: int) -> str:
    """Store name of the fold of events 1 to *number*."""
    return f"{FOLDER}/snapshot-{number:06d}.json"


class EventLog:
    """The events of one run, as one writer sees them.

    Two writers never share a number, because each event is created exclusively. If the store's response is
    lost or reports "exists", the writer reads the number back. If it finds its own event there, it won.
    """

    def __init__(
        self,
        run: Store,
        *,
        writer: str | None = None,
        snapshots: bool = True,
    ) -> None:
        """Open the events of *run* without reading.

        Args:
            run: The run's folder, whose time events get.
            writer: uuid of this writer; a new one when None. Never share one between writers.
            snapshots: False for a reader that must not write.
        """
        self._run = run
        self._snapshots = snapshots
        self._state = RunState()
        self._known = 0
        self.writer = writer or str(uuid.uuid4())

    def read(self, after: int = 0) -> list[Event]:
        """Events from *after* + 1 on, up to the first number that is absent.

        Raises:
            StoreError: An event cannot be read, which differs from absent.
            ProtocolError: An event is not of this major version, or not an event.
        """
        return [event for event, _ in self._following(after)]

    def load(self) -> RunState:
        """Return the state after all events. Reads only the events since the last call or snapshot.

        Raises:
            StoreError: An event cannot be read.
            ProtocolError: An event is not of this major version, or does not follow the one before.
        """
        if self._state.number == 0:
            self._state = self._newest_snapshot() or self._state
        state, waiting = self._state, list[Event]()
        for event, text in self._following(state.number):
            waiting.append(event)
            if event.number % SNAPSHOT_EVERY == 0:
                state, waiting = fold(waiting, state), []
                self._keep(state, text)
        self._state = fold(waiting, state)
        return self._state

    def append(self, after: int, body: EventBody, /, *, actor: Actor | None = None) -> Event | None:
        """Try to append this event as number *after* + 1; None when another event has that number.

        After None the caller folds the new events and decides again.

        Raises:
            StoreError: It is unknown whether the event was stored.
            ProtocolError: Event *after* does not exist, or this one is too large.
        """
        if after > self._known and self._text(after) is None:
            raise ProtocolError(f"{self._where(after)} is absent: an event cannot follow it")
        event = Event(after + 1, body, self.writer, self._run.now(), actor)
        won = self._settle(event_name(event.number), event.to_json())
        self._known = max(self._known, event.number)
        return event if won else None

    def append_request(self, body: EventBody, /, *, actor: Actor | None = None) -> Event:
        """Append an event that needs no decision, at the next free number.

        Raises:
            StoreError: It is unknown whether the event was stored, or other writers won every race.
            ProtocolError: The run is of another major version.
        """
        if self._known == 0 and (first := self._text(1)) is not None:
            read_object(first, where=self._where(1), max_bytes=MAX_EVENT_BYTES)
        for _ in range(_REQUEST_TRIES):
            event = self.append(self._last(), body, actor=actor)
            if event is not None:
                return event
        raise StoreError(
            f"{self._where(self._known)}: other writers came first {_REQUEST_TRIES} times", transient=True
        )

    def _following(self, after: int) -> Iterator[tuple[Event, bytes]]:
        number = after + 1
        for found in self._texts(number):
            (text, date), where = found, self._where(number)
            event = Event.from_json(text, where=where)
            if date is not None and date + STEP_S < event.at:  # no event is later than the store's clock
                event = replace(event, at=date)
            if event.number != number:
                raise ProtocolError(f"{where}: says that it is event {event.number}")
            self._known = max(self._known, number)
            yield event, text
            number += 1

    def _texts(self, number: int) -> Iterator[tuple[bytes, float | None]]:
        """Events from *number* on, up to the first that is absent, with their dates.

        From a distant store 1, then 2, 4 and so on are read side by side: a poll costs one read, and the
        first read of a long run takes a few round trips instead of one for each event.
        """
        most = 1 if folder_of(self._run) is not None else self._run.at_once
        ahead = 1
        while True:
            numbers = range(number, number + ahead)
            if ahead == 1:
                batch: Iterable[tuple[bytes, float | None] | None] = map(self._dated, numbers)
            else:
                with ThreadPoolExecutor(ahead) as readers:
                    batch = readers.map(self._dated, numbers)
            for found in batch:
                if found is None:
                    return
                yield found
            number, ahead = number + ahead, min(2 * ahead, most)

    def _dated(self, number: int) -> tuple[bytes, float | None] | None:
        return self._run.read_dated(event_name(number), max_bytes=MAX_EVENT_BYTES)

    def _text(self, number: int) -> bytes | None:
        found = self._dated(number)
        return None if found is None else found[0]

    def _last(self) -> int:
        """Highest number that exists; needs few reads because numbers have no gaps."""
        low, step = self._known, 1
        while self._exists(event_name(low + step)):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._exists(event_name(middle)) else (low, middle)
        self._known = low
        return low

    def _settle(self, name: str, text: bytes) -> bool:
        """True when *name* contains *text*, regardless of the store's response."""
        for _ in range(2):
            failure: StoreError | None = None
            try:
                if self._run.create(name, text):
                    return True
            except StoreError as err:
                failure = err
            stored = self._read_back(name, failure)
            if stored is not None:
                return stored == text
            if failure is not None:
                raise failure
        raise StoreError(f"{self._run.uri(name)} was reported to exist and is absent", transient=True)

    def _read_back(self, name: str, failure: StoreError | None) -> bytes | None:
        try:
            return self._run.read(name, max_bytes=MAX_EVENT_BYTES)
        except ProtocolError:
            return b""  # too large to be ours
        except StoreError as err:
            raise failure or err from err

    def _newest_snapshot(self) -> RunState | None:
        """State of the newest valid snapshot; None when there is none."""
        try:
            count = self._count_snapshots()
            for index in range(count, max(0, count - 3), -1):
                state = self._snapshot(index * SNAPSHOT_EVERY)
                if state is not None:
                    return state
        except StoreError:
            return None  # reading the events shows whether the store is readable
        return None

    def _count_snapshots(self) -> int:
        low, high = 0, 1
        while self._exists(snapshot_name(high * SNAPSHOT_EVERY)):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            exists = self._exists(snapshot_name(middle * SNAPSHOT_EVERY))
            low, high = (middle, high) if exists else (low, middle)
        return low

    def _snapshot(self, number: int) -> RunState | None:
        try:
            text = self._run.read(snapshot_name(number), max_bytes=MAX_SNAPSHOT_BYTES)
            event = self._text(number)
            if text is None or event is None:
                return None
            return unpack_snapshot(text, number=number, event=event)
        except ProtocolError:
            return None

    def _keep(self, state: RunState, event: bytes) -> None:
        """Write a snapshot of *state*, whose last event is *event*; replaces an invalid one."""
        if not self._snapshots:
            return
        name, text = snapshot_name(state.number), pack_snapshot(state, event=event)
        if len(text) > MAX_SNAPSHOT_BYTES:
            return
        try:
            if not self._run.create(name, text) and self._snapshot(state.number) is None:
                self._run.write(name, text)
        except StoreError:
            return  # a snapshot only saves time

    def _exists(self, name: str) -> bool:
        return self._run.size(name) is not None

    def _where(self, number: int) -> str:
        return self._run.uri(event_name(number))


def pack_snapshot(state: RunState, *, event: bytes) -> bytes:
    """Serialize *state*, whose last event is stored as *event*."""
    body = {
        "schema": SCHEMA,
        "fold": __version__,
        "number": state.number,
        "event_sha256": hashlib.sha256(event).hexdigest(),
        "state": state.to_dict(),
    }
    return json.dumps({**body, "sha256": digest(body)}, separators=(",", ":")).encode()


def unpack_snapshot(text: bytes, *, number: int, event: bytes) -> RunState:
    """Read what :func:`pack_snapshot` of this same version wrote for this run.

    Raises:
        ProtocolError: The snapshot is torn, changed, or of another number, run or version. Fold the events
            instead.
    """
    try:
        body = json.loads(text)
        stated = body.pop("sha256")
        ours = {"schema": SCHEMA, "fold": __version__, "number": number}
        ours["event_sha256"] = hashlib.sha256(event).hexdigest()
        if stated != digest(body) or any(body.get(name) != value for name, value in ours.items()):
            raise ProtocolError(f"snapshot {number}: not of this run, version and number, or changed")
        state = RunState.from_dict(body["state"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ProtocolError(f"snapshot {number}: {err!r}") from err
    if state.number != number:
        raise ProtocolError(f"snapshot {number}: contains the state after event {state.number}")
    return state


def digest(body: Mapping[str, Any]) -> str:
    """Return the sha256 of a snapshot's *body*."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
