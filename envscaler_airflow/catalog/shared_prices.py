"""Live prices in the run store, so that workers, triggerers and shells plan with the same ones.

``prices.v1/<cloud>.<region>/<time>.json`` is the price list of a region after one refresh. A refresh adds a
file, readers take the newest that they can read, and no process changes one. They are advice: each process
keeps a copy in its own cache, and without the store that copy stays in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow.catalog.prices import PriceCache, PriceList
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.keys import encode_part
from envscaler_airflow.store.run_store import Store

FOLDER = "prices.v1"
"""Folder in the store. No run's folder has a dot in its name."""
KEPT = 2
"""Newest price lists kept of a region. Chosen: one to fall back to, should the newest be torn."""
MAX_BYTES = 1 << 25
"""Largest price list read, bytes. Chosen: five times that of the largest region."""
AHEAD_S = 86_400.0
"""A price seen later than this from now is of a wrong clock, seconds. Chosen: a day."""


def publish(store: Store, price_list: PriceList) -> bool:
    """Add *price_list* to those in *store*; False if its region never answered, or it is there already.

    Lists of a wrong clock are deleted before any other.

    Raises:
        StoreError: The store does not answer.
    """
    if price_list.at is None:
        return False
    folder = _folder(price_list.cloud, price_list.region)
    body = {"schema": SCHEMA, **price_list.to_dict()}
    name = f"{int(price_list.at * 1000):015d}.json"
    is_new = store.create(f"{folder}/{name}", json.dumps(body, allow_nan=False).encode())
    for old in sorted(store.children(folder), key=_rank_at(store.now()))[:-KEPT]:
        store.delete(f"{folder}/{old}")
    return is_new


def pull(store: Store, cache: PriceCache, *, now: float) -> tuple[str, ...]:
    """Copy newer price lists from *store* to *cache*, recompile its catalog, and return what was ignored.

    Raises:
        StoreError: The store does not answer.
        SpecError: The cache cannot be written.
    """
    have = {_folder(cloud, region): at for (cloud, region), at in cache.ages().items()}
    newest: dict[str, list[str]] = {}
    for name in store.names(FOLDER):
        newest.setdefault(name.rpartition("/")[0], []).append(name)
    faults: list[str] = []
    is_changed = False
    for folder, names in newest.items():
        found = _newest(store, names, after=have.get(folder, -1.0), now=now, faults=faults)
        if found is not None and _folder(found.cloud, found.region) == folder:
            is_changed |= cache.keep(found)
    if is_changed:
        cache.compile()
    return tuple(faults)


def _rank_at(now: float) -> Callable[[str], tuple[bool, str]]:
    """Sort key of names, the oldest first; those of a wrong clock come first, as they count least."""
    return lambda name: (_time_of(name) <= now + AHEAD_S, name)


def _time_of(name: str) -> float:
    """Seconds since the epoch in a file's name; infinity without a time."""
    digits = name.rpartition("/")[2].removesuffix(".json")
    return float(digits) / 1000 if digits.isascii() and digits.isdigit() else math.inf


def _folder(cloud: str, region: str) -> str:
    return f"{FOLDER}/{encode_part(cloud)}.{encode_part(region or '-')}"


def _newest(
    store: Store, names: list[str], *, after: float, now: float, faults: list[str]
) -> PriceList | None:
    """The newest readable price list that is newer than *after*; adds to *faults* what cannot be read."""
    ahead = [name for name in names if _time_of(name) > now + AHEAD_S]
    faults += (
        f"{name}: seen {(_time_of(name) - now) / 3600:.0f} h from now: a wrong clock" for name in ahead
    )
    for name in sorted(set(names).difference(ahead), reverse=True)[:KEPT]:
        at = _time_of(name)
        if at <= after + 0.001:  # names count milliseconds
            return None
        try:
            text = store.read(name, max_bytes=MAX_BYTES)
            if text is None:
                continue  # deleted meanwhile
            found = PriceList.from_dict(read_object(text, where=name, max_bytes=MAX_BYTES))
            if found.at is not None and abs(found.at - at) < 0.01:
                return found
            faults.append(f"{name}: its prices are of another time, {found.at!r:.40}")
        except ProtocolError as err:
            faults.append(str(err))
        except ValueError as err:
            faults.append(f"{name}: {err}")
    return None
