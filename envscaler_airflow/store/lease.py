"""The owner's lease, a counter: if it stops, the sidecar ends the attempt. The sensor has a lease too."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from envscaler_agent.messages import SCHEMA, Message
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.run_store import Store, read_message

LEASE = "lease/run.json"
RENEW_EVERY_S = 60.0
"""Seconds between renewals of either lease. Chosen: a thirtieth of the default ``orphan_after``."""
MAX_AGE_S = 30 * 86400.0
"""Longest age accepted, seconds. Chosen: no machine of ours runs longer."""
MOST_RENEWALS = 2**53
"""Only counters below it are accepted. Source: above it JSON readers do not represent every integer."""
MOST_TEXT = 4096
"""Longest text read, characters. Chosen: the reason why a pod waits is one line."""


@dataclass(frozen=True)
class Lease(Message):
    """What the owner (a trigger or an execution) last wrote.

    Attributes:
        counter: Grows with every renewal; the lease's age is measured only by its changes.
        holder: The trigger or execution that renewed it. For display.
        waits: What nodes of the running attempt last waited for; "" for nothing. For display.
        ages: Durations in seconds that watchers measured, each by its own clock, so that the next watcher
            continues them: ``stopping-g1-a3`` since an attempt was asked to stop, ``silent-g1-a3`` since it
            last reported.
    """

    counter: int
    holder: str = ""
    waits: str = ""
    ages: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a counter that no owner writes."""
        if not 0 <= self.counter < MOST_RENEWALS:
            raise ValueError(f"counter: got {self.counter}, expected a whole number from 0 on")


class LeaseFile:
    """The lease in a run's folder. Every method raises StoreError if the store does not answer."""

    def __init__(self, run: Store) -> None:
        """Read and write the lease of *run*, the folder of a run."""
        self._run = run

    def read(self) -> Lease | None:
        """Return the lease; None if it was never written.

        Raises:
            ProtocolError: The lease is not of this major version.
        """
        lease = read_message(self._run, LEASE, Lease)
        if lease is None:
            return None
        ages = {name: age for name, age in lease.ages.items() if 0 <= age <= MAX_AGE_S}
        return replace(lease, holder=lease.holder[:MOST_TEXT], waits=lease.waits[:MOST_TEXT], ages=ages)

    def known(self) -> Lease:
        """Return the lease; one with counter 0 if it was never written or cannot be parsed."""
        try:
            return self.read() or Lease(0)
        except ProtocolError:
            return Lease(0)

    def renew(
        self, *, holder: str, waits: str | None = None, ages: Mapping[str, float] | None = None
    ) -> Lease:
        """Raise the counter by one and write the other given values; None keeps the previous value.

        A lease that cannot be parsed is replaced, because only the owner writes it.
        """
        last = self.known()
        lease = Lease(
            last.counter + 1,
            holder,
            last.waits if waits is None else waits,
            {name: round(age, 1) for name, age in (last.ages if ages is None else ages).items()},
        )
        self._run.write(LEASE, lease.to_json())
        return lease


class LeaseWatch:
    """How long the lease has not changed, by the watcher's own monotonic clock.

    Only time between two reads of the same lease counts, and at most *max_gap_s* of each gap. So an
    unreadable store or a suspended machine does not expire the lease: the owner may have been cut off too.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, *, max_gap_s: float = 2 * RENEW_EVERY_S
    ) -> None:
        """Watch with the clock *monotonic*; read at least every *max_gap_s* seconds."""
        self._monotonic = monotonic
        self._max_gap_s = max_gap_s
        self._last: tuple[int, str] | None = None
        self._seen_at: float | None = None
        self._unchanged_s = 0.0

    def seen(self, lease: Lease | None) -> None:
        """Record a read of *lease* (None: proven absent). Do not call it if the read failed."""
        now = self._monotonic()
        shown = (lease.counter, lease.holder) if lease else None
        if self._seen_at is None or shown != self._last:
            self._unchanged_s = 0.0
        else:
            self._unchanged_s += min(now - self._seen_at, self._max_gap_s)
        self._last, self._seen_at = shown, now

    @property
    def unchanged_s(self) -> float:
        """Seconds for which the lease did not change, up to the last read; 0 before the first."""
        return self._unchanged_s


SENSOR_LEASE = "lease/scaling.json"
PATIENCE_S = 300.0
"""A lease unchanged for this long means that no sensor runs, seconds. Chosen: a triggerer restarts sooner."""
_MAX_BYTES = 1 << 12


class SensorLease:
    """The lease of one run; the sensor's trigger renews it."""

    def __init__(self, run: Store, *, monotonic: Callable[[], float]) -> None:
        """Write nothing yet."""
        self._run = run
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
        if self._renewed is not None and now - self._renewed < RENEW_EVERY_S:
            return
        self._counter += 1
        body = {"schema": SCHEMA, "holder": self._holder, "counter": self._counter}
        self._run.write(SENSOR_LEASE, json.dumps(body).encode())
        self._renewed = now


class SensorWatch:
    """Reports once that no sensor has checked a run for :data:`PATIENCE_S`, by the watcher's own clock."""

    def __init__(self, run: Store, *, monotonic: Callable[[], float]) -> None:
        """Start the wait now."""
        self._run = run
        self._monotonic = monotonic
        self._seen: bytes | None = None
        self._changed = monotonic()
        self._looked: float | None = None
        self._has_warned = False

    def news(self) -> str | None:
        """Return a line for the stage's log, None if there is nothing new.

        Raises:
            StoreError: The store cannot be read; nothing is known.
        """
        now = self._monotonic()
        if self._looked is not None and now - self._looked < RENEW_EVERY_S:
            return None
        text = self._run.read(SENSOR_LEASE, max_bytes=_MAX_BYTES)
        self._looked = now
        if text != self._seen:
            self._seen, self._changed, self._has_warned = text, now, False
        if self._has_warned or now - self._changed < PATIENCE_S:
            return None
        self._has_warned = True
        return (
            "the spec has a scaling block, but no ScalingSensor has looked at this stage for "
            f"{PATIENCE_S:.0f} s: it stays where it is"
        )
