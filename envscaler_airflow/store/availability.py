"""What runs have seen of each offer, shared by all runs on a store: its stock-outs, and when spot was there.

One record for each offer, in ``stockouts.v1/<offer>.json`` and ``availability.v1/<offer>.json``. Records are
advice, not state: two writers may overwrite each other, and an unreadable record counts as absent. Ages use
the clocks of the writers and readers. A wrong clock costs at most the duration of a stock-out.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow.clouds import refusals
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.planning.record import NotNegative, Record
from envscaler_airflow.planning.stockouts import StockOut, met
from envscaler_airflow.scaling.deadline.risk import Hazard, Risk, Zone
from envscaler_airflow.store.run_store import Store

SEEN, STOCKOUTS = "availability.v1", "stockouts.v1"
"""Folders in the store. No run's folder has a dot in its name."""
MAX_BYTES = 1 << 14
"""Largest record read, bytes. Chosen: ten times the size of one."""
AHEAD_S = 600.0
"""A record from further in the future was written by a wrong clock, seconds. Chosen: a tick of the model."""


@dataclass(frozen=True, slots=True)
class Seen(Record):
    """What is known of one offer.

    Attributes:
        zone: The fold of its samples up to *at*.
        at: Time of the last sample, seconds since the epoch, on the clock of the process that wrote it.
    """

    zone: Zone
    at: NotNegative[float]

    def since(self, now: float) -> float | None:
        """Seconds since the last sample; None for a record from the future, which counts for nothing."""
        return None if self.at > now + AHEAD_S else max(0.0, now - self.at)

    def risk(self, gap_s: float) -> Risk:
        """The fold, to be continued."""
        return Risk.of(self.zone, Hazard(), gap_s)


def read_seen(store: Store, offer: str) -> Seen | None:
    """Return what is known of *offer*; None if nothing is.

    Raises:
        StoreError: The record cannot be read.
    """
    name = _name(SEEN, offer)
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        found = None if text is None else Seen.from_dict(read_object(text, where=name))
    except (ValueError, ProtocolError):
        return None
    return found if found is not None and _is_whole(found.zone) else None


def write_seen(store: Store, offer: str, seen: Seen) -> None:
    """Record what is known of *offer*.

    Raises:
        StoreError: The record cannot be written.
    """
    store.write(_name(SEEN, offer), json.dumps({"schema": SCHEMA, **seen.to_dict()}).encode())


def _is_whole(zone: Zone) -> bool:
    """True for a belief of this version: a share of each regime."""
    shares = zone.belief
    is_share = all(0 <= share <= 1 for share in shares)
    return len(shares) == len(Hazard().regimes) and is_share and math.isclose(sum(shares), 1.0, rel_tol=1e-3)


def remember(store: Store, offer: Offer, code: str, message: str = "", *, now: float) -> StockOut | None:
    """Record that *offer* was refused; None when the refusal is not about capacity or quota.

    Raises:
        StoreError: The record cannot be read or written.
    """
    name = _name(STOCKOUTS, offer.name)
    found = met(offer, code, message, refusals=refusals(), now=now, before=_read_stockout(store, name))
    if found is not None:
        body = {"schema": SCHEMA, **found.to_dict()}
        store.write(name, json.dumps(body).encode())
    return found


def forget(store: Store, offer: Offer) -> None:
    """Delete the stock-out of *offer*, because it was allocated.

    Raises:
        StoreError: The record cannot be written.
    """
    store.delete(_name(STOCKOUTS, offer.name))


def stockouts(store: Store, *, now: float) -> list[StockOut]:
    """Return the stock-outs that still apply; skip unreadable records and delete expired ones.

    Raises:
        StoreError: The store cannot be read.
    """
    found = []
    for name in (f"{STOCKOUTS}/{child}" for child in store.children(STOCKOUTS)):
        item = _read_stockout(store, name)
        if item is None:
            continue
        if item.left_s(now) > 0:
            found.append(item)
        elif item.left_s(now) < -item.lasts_s:  # kept twice as long, to count repeated ones
            store.delete(name)
    return found


def _read_stockout(store: Store, name: str) -> StockOut | None:
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        return None if text is None else StockOut.from_dict(read_object(text, where=name))
    except (ValueError, ProtocolError):
        return None


def _name(folder: str, offer: str) -> str:
    return f"{folder}/{hashlib.sha256(offer.encode()).hexdigest()[:24]}.json"
