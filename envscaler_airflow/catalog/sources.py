"""Where offers come from: the packaged snapshot, or tables that the user names."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path

from envscaler_airflow.catalog.csvtables import read_tables
from envscaler_airflow.catalog.packaged import MAGIC, labelled, pack, packaged, unpack
from envscaler_airflow.errors import SpecError
from envscaler_airflow.local_files import cache_folder, write_atomic
from envscaler_airflow.planning.market import Scope
from envscaler_airflow.planning.table import OfferTable


def cache_dir() -> Path:
    """``ENVSCALER_CACHE``, or ``envscaler`` in the user's cache folder."""
    own = os.environ.get("ENVSCALER_CACHE")
    return Path(own) if own else cache_folder()


def open_catalog(path: Path | None = None, *, cache: Path | None = None) -> OfferTable:
    """The packaged offers with live prices, or the unchanged offers of the tables at *path*.

    Tables are parsed once and stored in *cache* in compact form, keyed by size and modification time.

    Raises:
        SpecError: The tables cannot be read.
    """
    folder = cache or cache_dir()
    if path is None:
        return _live(folder) or packaged()
    kept = folder / f"tables-{_fingerprint(path)}.bin"
    try:
        return unpack(kept.read_bytes(), name=str(kept))
    except (OSError, SpecError):
        table = read_tables(path)
    _keep(kept, pack(table))
    return table


def _live(folder: Path) -> OfferTable | None:
    if not has_live_prices(folder):
        return None
    from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (only who refreshed prices waits for it)

    table = PriceCache(folder).load(now=time.time())
    if table is not None or not _has_price_lists(folder):
        return table
    why = (
        f"the live prices in {folder} are torn or of another version and not used: envscaler catalog refresh"
    )
    return labelled(packaged(), f"{packaged().label}; {why}")


def _has_price_lists(folder: Path) -> bool:
    try:
        return any(folder.glob("prices-*.json"))
    except OSError:
        return False


def has_live_prices(folder: Path) -> bool:
    """True when a refresh stored prices in *folder* that can be read."""
    try:
        return (folder / "catalog.json").exists()
    except OSError:
        return False


def _fingerprint(path: Path) -> str:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    seen = [MAGIC.decode(), str(path.resolve())]
    for file in files:
        try:
            stat = file.stat()
        except OSError as err:
            raise SpecError(
                f"{file}: cannot be read ({err.strerror}); write the path of a CSV table or folder"
            ) from err
        seen.append(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:20]


def _keep(path: Path, data: bytes) -> None:
    """Best effort: an unwritable cache only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError:
        return


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{value!r:.60} is no list of regions")
    return frozenset(value)


def read_scope(path: Path | None, clouds: Collection[str] | None) -> Scope:
    """Build the scope from a file ``{"aws": ["us-east-1", ...], ...}`` and from names of clouds.

    A cloud that the file does not name is out of scope.

    Raises:
        SpecError: The file does not have this form, or no cloud is left.
    """
    if path is None:
        return Scope(clouds=None if clouds is None else frozenset(clouds))
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        regions = {str(cloud): _names(names) for cloud, names in body.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as err:
        raise SpecError(f'{path}: no scope ({err}); write {{"aws": ["us-east-1"], "gcp": [...]}}') from err
    if not regions:
        raise SpecError(f'{path}: names no cloud; write {{"aws": ["us-east-1"], "gcp": [...]}}')
    within = frozenset(regions) if clouds is None else frozenset(regions) & frozenset(clouds)
    if not within:
        raise SpecError(f"{path}: names none of {', '.join(sorted(clouds or ()))}")
    return Scope(clouds=within, regions=regions)
