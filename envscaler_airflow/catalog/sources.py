"""Where offers come from: the packaged snapshot, or CSV tables that the user names."""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from envscaler_airflow.catalog.packaged import MAGIC, labelled, pack, packaged, unpack
from envscaler_airflow.clouds import all_clouds
from envscaler_airflow.envspec.gpus import MEMORY_GB
from envscaler_airflow.errors import SpecError
from envscaler_airflow.local_files import cache_folder, write_atomic
from envscaler_airflow.planning.market import Scope
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import RISKS, OfferTable, Row, build_table

EXERCISE = "exercise, not prices"
"""Label of a table that is used unchanged."""

COLUMNS = (
    "cloud", "region", "zone", "instance_type", "vcpus", "memory_gib", "accelerator_name",
    "accelerator_count", "accelerator_memory_gib", "price_usd_per_hour", "spot_price_usd_per_hour", "arch",
    "interruption_range", "price_kind", "spot_price_kind",
)  # fmt: skip
_NEEDED = COLUMNS[:12]
_MAX_FAULTS = 20
_MOST = 1e12
"""Upper limit for a machine's numbers. Chosen: products of such numbers with nodes and hours stay finite."""


class Published(NamedTuple):
    """Which kinds of price are published, and the source to show for each.

    Attributes:
        sources: Source text by cloud and ``price_kind`` or ``spot_price_kind``; other kinds are not prices.
    """

    sources: Mapping[tuple[str, str], str]


def read_tables(path: Path, *, published: Published | None = None, label: str = EXERCISE) -> OfferTable:
    """Read every ``*.csv`` and ``*.csv.gz`` of a folder, or one such file.

    Args:
        path: File or folder.
        published: Accept only prices of these kinds; None accepts every number.
        label: Label shown with each plan that uses the table.

    Raises:
        SpecError: A table is missing or cannot be read; names the column or line.
    """
    reader = _Reader(published)
    for file in _files(path):
        reader.read(file)
    return reader.table(label)


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    found = sorted([*path.glob("offers*.csv"), *path.glob("offers*.csv.gz")]) if path.is_dir() else []
    if not found:
        raise SpecError(
            f"{path}: no table of offers; write a .csv or .csv.gz file, or a folder of offers*.csv(.gz)"
        )
    return found


class _Reader:
    """Collects rows of several tables and the rejected values in them."""

    def __init__(self, published: Published | None) -> None:
        self.published = published
        self.rows: dict[InstanceType, list[Row]] = {}
        self.gpus: dict[InstanceType, list[Row]] = {}
        self.faults: list[str] = []
        self.refused = 0
        self.kinds: dict[tuple[str, ...], InstanceType | None] = {}
        self.seen: set[tuple[InstanceType, str, str]] = set()

    def read(self, file: Path) -> None:
        try:
            data = file.read_bytes()
            text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8-sig")
            self._read(file.name, csv.reader(io.StringIO(text, newline="")))
        except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as err:
            raise SpecError(f"{file}: the table cannot be read: {err}") from err

    def _read(self, name: str, lines: Iterator[list[str]]) -> None:
        head = next(lines, [])
        missing = [column for column in _NEEDED if column not in head]
        if missing:
            raise SpecError(
                f"{name}: no column {', '.join(missing)}; the first line names {', '.join(COLUMNS)}"
            )
        at = [head.index(column) if column in head else -1 for column in COLUMNS]
        currency = head.index("currency") if "currency" in head else None
        for number, line in enumerate(lines, start=2):
            if len(line) != len(head):
                self.refuse(name, number, f"{len(line)} cells where the first line has {len(head)}")
                continue
            cells = [line[index] if index >= 0 else "" for index in at]
            if currency is not None and line[currency] not in ("", "USD"):
                self.refuse(name, number, f"currency {line[currency]!r:.20} is not USD: no price taken")
                cells[9] = cells[10] = ""
            self._take(name, number, cells)

    def _take(self, name: str, number: int, cells: list[str]) -> None:
        key = (cells[0], *cells[3:9], cells[11])
        if key not in self.kinds:
            self.kinds[key] = self._kind(name, number, cells)
        kind = self.kinds[key]
        if kind is None:
            return
        if (kind, cells[1], cells[2]) in self.seen:
            self.refuse(name, number, f"{cells[3] or cells[6]!r:.40} there is listed twice; the first counts")
            return
        self.seen.add((kind, cells[1], cells[2]))
        cloud, price_kind, spot_kind = cells[0], cells[13], cells[14]
        source, spot_source = self._source(cloud, price_kind), self._source(cloud, spot_kind)
        spot_usd = self._price(name, number, cells[10])
        row = Row(
            cells[1],
            cells[2],
            usd=None if source is None else self._price(name, number, cells[9]),
            spot_usd=None if spot_source is None else spot_usd,
            has_spot=spot_usd is not None,
            risk=RISKS.index(cells[12]) if cells[12] in RISKS else 0,
            source=source or "no published price",
            spot_source=spot_source or "no published price",
        )
        if cells[3]:
            self.rows.setdefault(kind, []).append(row)
        elif kind.gpu_name is not None:
            self.gpus.setdefault(kind._replace(gpus=float(int(kind.gpus))), []).append(row)

    def _source(self, cloud: str, kind: str) -> str | None:
        """Source to show for a price of this kind; None if the kind is not a price."""
        if self.published is None:
            return f"{EXERCISE} ({kind})" if kind else EXERCISE
        return self.published.sources.get((cloud, kind))

    def _price(self, name: str, number: int, text: str) -> float | None:
        """USD; None if empty or rejected. A cloud's price must be a finite number above 0."""
        if not text:
            return None
        value = _number(text)
        if value is None or value <= 0:
            self.refuse(name, number, f"{text!r:.20} is not a price; it counts as unknown")
            return None
        return value

    def _kind(self, name: str, number: int, cells: list[str]) -> InstanceType | None:
        is_host = bool(cells[3])
        vcpus, memory = (_number(cells[4]), _number(cells[5])) if is_host else (1.0, 1.0)
        gpus = _number(cells[7]) if cells[7] else 0.0
        if not vcpus or not memory or gpus is None or bool(cells[6]) != (gpus > 0):
            text = f"{cells[3]!r:.40}: vcpus {cells[4]!r:.10}, memory {cells[5]!r:.10}, GPUs {cells[7]!r:.10}"
            self.refuse(name, number, f"no machine: {text}")
            return None
        memory_gb = _number(cells[8]) if cells[8] else None
        if gpus >= 1:
            memory_gb = MEMORY_GB.get(cells[6], memory_gb or None)  # some tables give usable memory
        return InstanceType(
            cells[0], cells[3], vcpus, memory, cells[6] or None, gpus, memory_gb, cells[11] or None
        )

    def refuse(self, name: str, number: int, text: str) -> None:
        self.refused += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(f"{name}:{number}: {text}")

    def table(self, label: str) -> OfferTable:
        rows: dict[InstanceType, Iterable[Row]] = {**self.rows}
        for name, cloud in all_clouds().items() if self.gpus else ():
            if cloud.attached is not None:
                hosts, gpus = (
                    {kind: found for kind, found in types.items() if kind.cloud == name}
                    for types in (self.rows, self.gpus)
                )
                rows |= cloud.attached(hosts, gpus)
        faults = list(self.faults)
        if self.refused > len(faults):
            faults.append(f"and {self.refused - len(faults)} more values refused")
        return build_table(rows, label=label, faults=faults)


def _number(text: str) -> float | None:
    """A number of a machine, >= 0; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


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
    cached = folder / f"tables-{_fingerprint(path)}.bin"
    try:
        return unpack(cached.read_bytes(), name=str(cached))
    except (OSError, SpecError):
        table = read_tables(path)
    _cache(cached, pack(table))
    return table


def live_catalog() -> OfferTable:
    """The packaged offers with the live prices of this machine's cache; read again after each refresh."""
    folder = cache_dir()
    try:
        changed = (folder / "catalog.json").stat().st_mtime_ns
    except OSError:
        return packaged()
    return _live_at(folder, changed)


@functools.lru_cache(maxsize=1)
def _live_at(folder: Path, _changed: int) -> OfferTable:
    return open_catalog(cache=folder)


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


def _cache(path: Path, data: bytes) -> None:
    """Best effort: an unwritable cache only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError:
        return


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{value!r:.60} is not a list of regions")
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
