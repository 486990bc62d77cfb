"""Stock-outs that runs encountered, shared by all runs on a store: ``stockouts.v1/<offer>.json``.

They are advice, not state: two writers may overwrite each other, and an unreadable record counts as absent.
Ages use the clocks of the writers and readers. A wrong clock costs at most the duration of a stock-out.
"""

from __future__ import annotations

import hashlib
import json

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow.clouds import refusals
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.planning.stockouts import StockOut, met
from envscaler_airflow.store.run_store import Store

FOLDER = "stockouts.v1"
"""Folder in the store. No run's folder has a dot in its name."""
MAX_BYTES = 1 << 14
"""Largest record read, bytes. Chosen: ten times the size of one."""


def remember(store: Store, offer: Offer, code: str, message: str = "", *, now: float) -> StockOut | None:
    """Record that *offer* was refused; None when the refusal is not about capacity or quota.

    Raises:
        StoreError: The record cannot be read or written.
    """
    name = _name(offer)
    found = met(offer, code, message, refusals=refusals(), now=now, before=_read(store, name))
    if found is not None:
        body = {"schema": SCHEMA, **found.to_dict()}
        store.write(name, json.dumps(body).encode())
    return found


def forget(store: Store, offer: Offer) -> None:
    """Delete the stock-out of *offer*, because it was allocated.

    Raises:
        StoreError: The record cannot be written.
    """
    store.delete(_name(offer))


def stockouts(store: Store, *, now: float) -> list[StockOut]:
    """Return the stock-outs that still apply; skip unreadable records and delete expired ones.

    Raises:
        StoreError: The store cannot be read.
    """
    found = []
    for name in (f"{FOLDER}/{child}" for child in store.children(FOLDER)):
        item = _read(store, name)
        if item is None:
            continue
        if item.left_s(now) > 0:
            found.append(item)
        elif item.left_s(now) < -item.lasts_s:  # kept twice as long, to count repeated ones
            store.delete(name)
    return found


def _name(offer: Offer) -> str:
    return f"{FOLDER}/{hashlib.sha256(offer.name.encode()).hexdigest()[:24]}.json"


def _read(store: Store, name: str) -> StockOut | None:
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        return None if text is None else StockOut.from_dict(read_object(text, where=name))
    except (ValueError, ProtocolError):
        return None
