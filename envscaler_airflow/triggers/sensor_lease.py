"""How a stage knows that a sensor checks it: ``lease/scaling.json``, rewritten while it does."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

from envscaler_agent.protocol import SCHEMA
from envscaler_airflow.store import Store

NAME = "lease/scaling.json"
RENEW_S = 60.0
"""Seconds between two writes. Chosen: as the owner's lease."""
PATIENCE_S = 300.0
"""A lease unchanged for this long means that no sensor runs, seconds. Chosen: a triggerer restarts sooner."""
_MAX_BYTES = 1 << 12


class SensorLease:
    """The lease of one run; the sensor's trigger renews it."""

    def __init__(self, store: Store, prefix: str, *, monotonic: Callable[[], float]) -> None:
        """Write nothing yet."""
        self._store = store
        self._name = f"{prefix}/{NAME}"
        self._monotonic = monotonic
        self._holder = str(uuid.uuid4())
        self._counter = 0
        self._renewed: float | None = None

    def renew(self) -> None:
        """Write the lease if it is due.

        Raises:
            StoreError: The store cannot be written.
        """
        now = self._monotonic()
        if self._renewed is not None and now - self._renewed < RENEW_S:
            return
        self._counter += 1
        body = {"schema": SCHEMA, "holder": self._holder, "counter": self._counter}
        self._store.write(self._name, json.dumps(body).encode())
        self._renewed = now


class SensorWatch:
    """Reports once that no sensor has checked a run for :data:`PATIENCE_S`, by the watcher's own clock."""

    def __init__(self, store: Store, prefix: str, *, monotonic: Callable[[], float]) -> None:
        """Start the wait now."""
        self._store = store
        self._name = f"{prefix}/{NAME}"
        self._monotonic = monotonic
        self._seen: bytes | None = None
        self._changed = monotonic()
        self._looked: float | None = None
        self._told = False

    def news(self) -> str | None:
        """Return a line for the stage's log, None if there is nothing new.

        Raises:
            StoreError: The store cannot be read; nothing is known.
        """
        now = self._monotonic()
        if self._looked is not None and now - self._looked < RENEW_S:
            return None
        text = self._store.read(self._name, max_bytes=_MAX_BYTES)
        self._looked = now
        if text != self._seen:
            self._seen, self._changed, self._told = text, now, False
        if self._told or now - self._changed < PATIENCE_S:
            return None
        self._told = True
        return (
            "the spec has a scaling block, but no ScalingSensor has looked at this stage for "
            f"{PATIENCE_S:.0f} s: it stays where it is"
        )
