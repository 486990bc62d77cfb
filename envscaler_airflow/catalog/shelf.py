"""Books of live prices in a folder, and the catalog that is made of them."""

from __future__ import annotations

import errno
import fcntl
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from envscaler_airflow.catalog.columns import SNAPSHOT, pack, packaged, unpack
from envscaler_airflow.catalog.live import (
    Book,
    committed_usd,
    known_prices,
    refreshed,
    unanswered,
    with_books,
)
from envscaler_airflow.clouds.base import PriceFeed
from envscaler_airflow.errors import BackendError, SpecError
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.planning.table import OfferTable

COMPILED = "catalog.bin"
INDEX = "catalog.json"
LOCK = "catalog.lock"
_BOOK = re.compile(r"prices-.*\.json\Z")


class Shelf:
    """Books of live prices in *folder*; each file is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet."""
        self.folder = folder

    def _path(self, cloud: str, region: str) -> Path:
        return self.folder / f"prices-{quote(cloud, safe='')}-{quote(region, safe='')}.json"

    def book(self, cloud: str, region: str) -> Book | None:
        """The book of a region; None when there is none, or it is torn."""
        return _read_book(self._path(cloud, region))

    def books(self) -> list[Book]:
        """All of them."""
        try:
            files = sorted(self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as err:
            raise SpecError(f"{self.folder}: cannot be read: {err}; set ENVSCALER_CACHE") from err
        found = [_read_book(file) for file in files if _BOOK.match(file.name)]
        return [book for book in found if book is not None]

    def commitments(self, offers: Iterable[Offer]) -> dict[str, dict[str, float]]:
        """USD an hour under a commitment, by offer name, of on-demand offers whose region was refreshed."""
        found: dict[str, dict[str, float]] = {}
        kept: dict[Path, Mapping[str, Any]] = {}
        for offer in offers:
            path = self._path(offer.cloud, offer.region)
            if path not in kept:
                kept[path] = _read_prices(path)
            known = committed_usd(kept[path], offer) if offer.capacity_type == "on-demand" else {}
            if known:
                found[offer.name] = known
        return found

    def refresh(
        self, feed: PriceFeed, region: str, *, clock: Callable[[], float], trust_leaps: bool = False
    ) -> Book:
        """Ask *feed* for a region and keep what it says; when it fails, keep what was, and that it failed."""
        failure = ""
        try:
            fetched = feed.fetch(region)
        except BackendError as err:
            fetched, failure = None, str(err)
        with self._alone():
            last = self.book(feed.cloud, region)
            if fetched is None:
                book = unanswered(last, feed.cloud, region, failure, now=clock())
            else:
                known = known_prices(packaged(), feed.cloud, region)
                book = refreshed(last, fetched, now=clock(), known=known, trust_leaps=trust_leaps)
            text = json.dumps(book.to_dict(), allow_nan=False)
            self._write(self._path(feed.cloud, region), text.encode())
        return book

    def compile(self) -> OfferTable:
        """Make the catalog of the snapshot and all books anew; it is what the next look-up loads."""
        with self._alone():
            books = self.books()
            table = with_books(packaged(), books)
            self._write(self.folder / COMPILED, pack(table))
            lines = [
                replace(book, prices={}, kinds=(), zones={}, risks={}, machines={}).to_dict()
                for book in books
            ]
            index = {"snapshot": _snapshot_sum(), "books": lines}
            self._write(self.folder / INDEX, json.dumps(index).encode())
        return table

    def load(self, *, now: float) -> OfferTable | None:
        """The compiled catalog, labelled with the age of each book; None: there is none of this version."""
        try:
            index = json.loads((self.folder / INDEX).read_bytes())
            if index["snapshot"] != _snapshot_sum():
                return None
            books = [Book.from_dict(line) for line in index["books"]]
            table = unpack((self.folder / COMPILED).read_bytes(), name=COMPILED)
        except (OSError, ValueError, KeyError, TypeError, SpecError):
            return None
        if not books:
            return None
        return replace(table, label="; ".join([table.label, *(book.words(now) for book in books)]))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes books or catalog meanwhile, so none is made of what the other replaces."""
        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as err:
            raise _not_kept(path, err) from err
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as err:
                # A network share without locks: each file is still replaced as a whole.
                if err.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise _not_kept(path, err) from err
            yield

    def _write(self, path: Path, data: bytes) -> None:
        new = self.folder / f"{path.name}.new"  # what a killed process left of it is written over
        try:
            new.write_bytes(data)
            new.replace(path)
        except OSError as err:
            new.unlink(missing_ok=True)
            raise _not_kept(path, err) from err


def _not_kept(path: Path, err: OSError) -> SpecError:
    return SpecError(f"{path}: prices cannot be kept: {err}; set ENVSCALER_CACHE")


def _read_book(path: Path) -> Book | None:
    try:
        return Book.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _read_prices(path: Path) -> Mapping[str, Any]:
    """The prices of a book without the rest of it, which a plan has no time for."""
    try:
        prices = json.loads(path.read_bytes()).get("prices")
    except (OSError, ValueError, AttributeError):
        return {}
    return prices if isinstance(prices, Mapping) else {}


def _snapshot_sum() -> int:
    return zlib.crc32(Path(__file__).with_name(SNAPSHOT).read_bytes())
