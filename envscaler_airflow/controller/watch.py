"""Observe a run and say when its owner is needed. Reads only; never decides, never acts."""

from __future__ import annotations

import time
from collections.abc import Callable

from envscaler_airflow import protocol
from envscaler_airflow.backends.base import Backend, Handle
from envscaler_airflow.controller.stage import Wake, Watching
from envscaler_airflow.errors import BackendError, ProtocolError
from envscaler_airflow.lifecycle import Event
from envscaler_airflow.lifecycle.ends import LOST_AFTER_S
from envscaler_airflow.protocol import Status
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.events import EventLog

REQUESTS = frozenset({"move-requested", "stop-requested"})


def read_status(store: Store, prefix: str, *, attempt: tuple[int, int], node: int) -> Status | None:
    """What a node last said; None when it has not spoken, or wrote what the protocol forbids.

    Raises:
        StoreError: The store cannot be read.
    """
    name = f"{prefix}/{protocol.status_name(*attempt, node)}"
    try:
        text = store.read(name, max_bytes=protocol.MAX_JSON_BYTES)
        return Status.from_json(text, where=name) if text is not None else None
    except ProtocolError:
        return None


class Watch:
    """Watches one attempt, or sits out a wait, for StageTrigger and for a shell that waits."""

    def __init__(
        self,
        *,
        store: Store,
        prefix: str,
        backend: Backend,
        watching: Watching,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin at *watching*; ages count from now, by *monotonic*."""
        self._store = store
        self._prefix = prefix
        self._backend = backend
        self._watching = watching
        self._monotonic = monotonic
        self._log = EventLog(store, prefix, snapshots=False)  # who only looks writes nothing
        self._began = monotonic()
        self._number = watching.number
        self._sequences: dict[int, int] = {}
        self._heard = self._began
        self.statuses: dict[int, Status] = {}
        """What each node last said, for whoever shows it."""

    def poll(self) -> Wake | None:
        """What the owner is needed for, None when for nothing. Blocks on I/O: call it in a thread.

        Raises:
            StoreError: The store cannot be read; nothing is known, try again.
        """
        wake = self._new_events()
        if wake is not None:
            return wake
        elapsed = self._monotonic() - self._began
        if self._watching.backoff_s is not None:
            return Wake("backoff") if elapsed >= self._watching.backoff_s else None
        if self._watching.handle is None:
            return Wake("status", detail="nothing to watch")
        return self._attempt(Handle.from_dict(self._watching.handle), elapsed)

    def _new_events(self) -> Wake | None:
        for event in self._log.read(after=self._number):
            self._number = event.number
            if event.type in REQUESTS:
                return Wake("request", detail=event.type)
            if self._is_newer(event):
                return Wake("superseded", detail=f"event {event.number}: {event.type}")
        return None

    def _is_newer(self, event: Event) -> bool:
        if event.type in ("generation", "succeeded", "failed", "stopped", "owner"):
            return True
        if event.type != "attempt-intended":
            return False
        key = (event.body.get("generation"), event.body.get("attempt"))
        return key != (self._watching.generation, self._watching.attempt)

    def _attempt(self, handle: Handle, elapsed: float) -> Wake | None:
        self._read_statuses()
        try:
            observed = self._backend.observe(handle)
            is_known = all(node.state != "unknown" for node in observed.nodes)
            if observed.is_over:
                return Wake("status", detail="the attempt ended")
        except BackendError:
            is_known = False
        if is_known:
            self._heard = self._monotonic()
        return self._from_statuses(is_known=is_known) or self._overdue(elapsed)

    def _read_statuses(self) -> None:
        attempt = (self._watching.generation, self._watching.attempt)
        for node in range(self._watching.nodes):
            status = read_status(self._store, self._prefix, attempt=attempt, node=node)
            if status is None:
                continue
            if self._sequences.get(node) != status.sequence:
                self._sequences[node] = status.sequence
                self._heard = self._monotonic()
            self.statuses[node] = status

    def _from_statuses(self, *, is_known: bool) -> Wake | None:
        said = self.statuses.values()
        if not is_known and len(said) == self._watching.nodes and all(s.phase == "ended" for s in said):
            return Wake("status", detail="every node said that it ended")
        if not self._watching.stopping and any(status.health == "stalled" for status in said):
            return Wake("status", detail="stalled")
        silent = self._monotonic() - self._heard
        if silent >= LOST_AFTER_S:
            return Wake("silent", silent_s=silent, detail="neither backend nor nodes were heard")
        return None

    def _overdue(self, elapsed: float) -> Wake | None:
        after = self._watching.overdue_after_s
        return Wake("overdue") if after is not None and elapsed >= after else None
