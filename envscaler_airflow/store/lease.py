"""Who acts on a run: the owner's lease, the sensor's lease, and the claims of pods to its nodes.

A lease is a counter: if the owner's stops, the sidecar ends the attempt.

A pod claims its node before it writes anything else: ``claims/g1-a3-n0-000002.json``, create-only, with
its uid and the boot id of its machine. Numbers have no gaps. A uid claims once: a restarted sidecar finds its
own claim and keeps it. Everything that a pod with a lower claim writes is void. Its sidecar ends the training
as soon as it reads a higher claim.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from envscaler_agent.messages import SCHEMA, Message
from envscaler_agent.protocol import claim_name
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


MOST_CLAIMS = 10_000
"""Most claims to one node of an attempt; later ones are void. Chosen: a pod every five minutes for a month.
Without a bound, one sidecar could keep every reader of its claims busy.
"""


@dataclass(frozen=True)
class Claim(Message):
    """One pod's claim to a node.

    Attributes:
        uid: Unique id of the pod or node process.
        boot_id: Boot id of its machine, for display; "" when unknown.
    """

    uid: str = ""
    boot_id: str = ""


def creates_exclusively(store: Store) -> bool:
    """True if exactly one of two creators of a name wins. Without that, two pods could have one claim."""
    return bool(getattr(store, "create_is_atomic", True))


def newest_claim(store: Store, *, generation: int, attempt: int, node: int, known: int = 0) -> int:
    """Number of the valid claim, 0 before the first; reads one name more than there are claims.

    *known* is the number of a claim that is known to exist.

    Raises:
        StoreError: The store does not answer.
    """
    number = known
    while number < MOST_CLAIMS and store.size(claim_name(generation, attempt, node, number + 1)) is not None:
        number += 1
    return number


def take_claim(store: Store, claim: Claim, *, generation: int, attempt: int, node: int) -> int:
    """Take *claim* and return its number: the one that its uid already has, otherwise the next free one.

    The caller checks with :func:`newest_claim` that it is still valid.

    Raises:
        StoreError: The store does not answer, or it is unknown whether the claim exists; repeat the call.
        ProtocolError: There are :data:`MOST_CLAIMS` others.
    """
    for number in range(1, MOST_CLAIMS + 1):
        name = claim_name(generation, attempt, node, number)
        found = _uid_of(store, name)
        if found == claim.uid or (found is None and _create(store, name, claim)):
            return number
    raise ProtocolError(f"node {node} was claimed {MOST_CLAIMS} times; cancel the run")


def _create(store: Store, name: str, claim: Claim) -> bool:
    """True when *claim* is stored at *name*. Another pod may have been faster."""
    return store.create(name, claim.to_json()) or _uid_of(store, name) == claim.uid


def _uid_of(store: Store, name: str) -> str | None:
    try:
        claim = read_message(store, name, Claim)
    except ProtocolError:
        return ""  # of a later version, or torn: in either case another pod's
    return None if claim is None else claim.uid
