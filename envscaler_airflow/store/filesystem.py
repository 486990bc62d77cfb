"""The run store on any other fsspec filesystem: ``gs://``, ``abfs://``, ``oss://``, ``memory://``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from envscaler_airflow.errors import EnvScalerError, SpecError, StoreError
from envscaler_airflow.local_files import landing
from envscaler_airflow.store.clock import DatedStore, written_at
from envscaler_airflow.store.keys import (
    AT_ONCE,
    MAX_BYTES,
    arriving,
    check_name,
    check_prefix,
    check_tree,
    descriptor_path,
    is_manifest,
    is_name,
    join,
)

ATOMIC_CREATE = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory"})
"""Protocols for which the service decides which ``pipe_file(mode="create")`` wins.

Source: gcsfs 2026.10 (``ifGenerationMatch=0``), adlfs 2026.8 (``overwrite=False``, which is
``If-None-Match: *``), fsspec 2026.9 (memory, one process).
:func:`~envscaler_airflow.store.run_store.check_store` detects older versions that accept the mode and ignore
it.
"""


_PAGES = frozenset({"http", "https"})
"""Schemes with which fsspec reads web pages; they are read-only."""


class FilesystemStore(DatedStore):
    """Objects below a URL that fsspec supports.

    The guarantee of ``create`` depends on the filesystem, see :attr:`create_is_atomic`:

    - ``gs://`` (gcsfs), ``abfs://``, ``az://`` (adlfs): the service lets exactly one of two creators win.
    - ``memory://``: the same, within one process; for tests.
    - all others (``oss://``, ``sftp://``, ``hdfs://``, ...): check for existence, write, read back. Two
      simultaneous creators can both believe that they won. Use such a store from one Airflow only, without a
      concurrent ``envscaler submit``.

    ``write`` and ``put_file`` are atomic if the filesystem shows only complete objects, as object stores do.
    """

    _max_age_s = 3600.0  # chosen: three requests an hour, and clocks drift by milliseconds

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Open *url* with fsspec and pass *options* to the filesystem.

        Raises:
            SpecError: fsspec does not support the protocol, or its package is missing.
            StoreError: The filesystem connects when opened, and that failed.
        """
        super().__init__()
        scheme = url.partition("://")[0]
        if scheme in _PAGES:
            raise SpecError(
                f"store {url}: nothing can be written over {scheme}; write file:///path, s3://bucket/path or "
                "gs://bucket/path (the address of an S3-compatible server is the connection's endpoint URL)"
            )
        try:
            self._fs, root = url_to_fs(url, **dict(options or {}))
        except ImportError as err:
            raise SpecError(f"store {url}: {err}; {_install(scheme)}") from err
        except ValueError as err:
            raise SpecError(
                f"store {url}: {err}: write file:///path, s3://bucket/path or gs://bucket/path"
            ) from err
        except OSError as err:
            raise StoreError(f"store {url}: {type(err).__name__}: {err}", transient=True) from err
        self._root: str = root.rstrip("/")
        self.url = url.rstrip("/") if not url.endswith("://") else url
        protocol = self._fs.protocol
        # ``async_impl`` marks clients that support concurrent calls. Of others, such as SFTP's, this is
        # unknown.
        self.at_once = AT_ONCE if getattr(self._fs, "async_impl", False) else 1
        self.create_is_atomic = bool(
            ATOMIC_CREATE & set((protocol,) if isinstance(protocol, str) else protocol)
        )

    def _ask_date(self) -> None:
        """Write and remove an object: fsspec does not expose the dates of responses."""
        name = f".date-{uuid.uuid4().hex}"
        try:
            self.write(name, b"1")
            with self._store_errors(name):
                self._dates.seen(written_at(self._info(self._path(name)) or {}))
        finally:
            self.delete(name)

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """Bytes of *name* and its write time by the filesystem; None when it is absent."""
        path = self._path(name)
        with self._store_errors(name):
            facts = self._info(path)
            if facts is None:
                return None
            size = int(facts["size"])
            try:
                data = self._fs.cat_file(path) if size <= max_bytes else b""
            except FileNotFoundError:
                return None
        size = max(size, len(data))
        self._check_size(name, size, max_bytes)
        return bytes(data), written_at(facts)

    def write(self, name: str, data: bytes) -> None:
        """Write *data* to *name*; replaces an existing object."""
        path = self._path(name)
        with self._store_errors(name):
            self._pipe(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write *data* to *name* unless it exists; return True if this call created it."""
        path = self._path(name)
        with self._store_errors(name):
            if not self.create_is_atomic:
                return self._create_weakly(path, data)
            try:
                self._pipe(path, data, mode="create")
            except FileExistsError:
                return False
        return True

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """Copy a local file to *name*."""
        path = str(source) if isinstance(source, Path) else descriptor_path(source)
        target, size = self._path(name), Path(path).stat().st_size
        with self._store_errors(name):
            self._fs.put_file(path, target)
            stored = self._size(target)
        if stored != size:
            raise StoreError(f"{self.uri(name)}: {stored} of {size} bytes arrived", transient=True)

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """Copy *name* to a local file; atomically if the target is a path."""
        if not isinstance(target, Path):
            with arriving(target) as stream:
                self._get(name, descriptor_path(stream))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with landing(target) as temporary:
            self._get(name, str(temporary))

    def _get(self, name: str, path: str) -> None:
        source = self._path(name)
        with self._store_errors(name):
            if self._size(source) is None:
                raise StoreError(f"{self.uri(name)} is absent")
            self._fs.get_file(source, path)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every name below *prefix*."""
        return {name: int(facts["size"]) for name, facts in self._found(check_prefix(prefix)).items()}

    def size(self, name: str) -> int | None:
        """Bytes of *name*; None when it is absent."""
        path = self._path(name)
        with self._store_errors(name):
            return self._size(path)

    def version(self, name: str) -> str | None:
        """What the filesystem reports for *name*, such as its ETag or times; None when it is absent."""
        path = self._path(name)
        with self._store_errors(name):
            return None if self._size(path) is None else str(self._fs.ukey(path))

    def delete(self, name: str) -> None:
        """Delete *name*; do nothing if it is absent."""
        path = self._path(name)
        with self._store_errors(name):
            if self._size(path) is None:
                return
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below *prefix*: manifests first, then the rest concurrently."""
        names = self.names(check_tree(prefix))
        for name in filter(is_manifest, names):
            self.delete(name)
        with ThreadPoolExecutor(self.at_once) as pool:
            for _ in pool.map(self.delete, (name for name in names if not is_manifest(name))):
                pass

    def _found(self, bare: str) -> dict[str, Any]:
        """What the filesystem reports for each name below *bare*."""
        with self._store_errors(bare):
            self._fs.invalidate_cache()
            try:
                paths = self._find(join(self._root, bare) or "/")
            except FileNotFoundError:
                return {}
        below, within = f"{self._root}/", f"{bare}/" if bare else ""
        ours = ((str(path), facts) for path, facts in paths.items() if str(path).startswith(below))
        named = {path[len(below) :]: facts for path, facts in ours}
        return {name: facts for name, facts in named.items() if is_name(name) and name.startswith(within)}

    def _find(self, path: str) -> dict[str, Any]:
        """What the filesystem reports for each file below *path*; raises if a folder cannot be listed.

        fsspec's own walk skips folders that it cannot list, so an unreachable host looks empty. Filesystems
        that implement their own listing raise.
        """
        fs = self._fs
        walks = [AbstractFileSystem.find]
        listing = type(fs).find
        if isinstance(fs, AsyncFileSystem):
            walks, listing = [AsyncFileSystem._find], type(fs)._find  # noqa: SLF001  (it has no public name)
        if listing not in walks:
            found: dict[str, Any] = fs.find(path, detail=True)
            return found
        return dict(self._walk(path.rstrip("/")))

    def _walk(self, path: str) -> Iterator[tuple[str, Any]]:
        try:
            entries = self._fs.ls(path or "/", detail=True)
        except FileNotFoundError:  # deleted meanwhile: empty
            return
        for entry in entries:
            name = str(entry["name"])
            if entry["type"] != "directory":
                yield name, entry
            elif name.rstrip("/") != path:
                yield from self._walk(name.rstrip("/"))

    def children(self, prefix: str) -> list[str]:
        """First parts of the names below *prefix*, sorted."""
        bare = check_prefix(prefix)
        path = join(self._root, bare) or "/"
        with self._store_errors(bare):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return sorted({name for entry in entries if (name := self._child(entry, path)) is not None})

    def _child(self, entry: Mapping[str, Any], folder: str) -> str | None:
        """Name of a folder's entry; None for the folder itself, and for what the store does not show.

        Object stores list a folder only if it contains something; others show empty ones too.
        """
        path = str(entry["name"]).rstrip("/")
        name = path.rpartition("/")[2]
        if path == folder.rstrip("/") or not is_name(name):
            return None
        is_listed = entry["type"] != "directory" or getattr(self._fs, "async_impl", False)
        return name if is_listed or next(self._walk(path), None) is not None else None

    def uri(self, name: str) -> str:
        """The URL of *name*."""
        bare = check_prefix(name)
        if not bare:
            return self.url
        return f"{self.url}{bare}" if self.url.endswith("/") else f"{self.url}/{bare}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _pipe(self, path: str, data: bytes, **mode: str) -> None:
        try:
            self._fs.pipe_file(path, data, **mode)
        except FileNotFoundError:
            # Object stores have no folders; other filesystems get them on demand.
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(path, data, **mode)

    def _size(self, path: str) -> int | None:
        facts = self._info(path)
        return None if facts is None else int(facts["size"])

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """What the filesystem reports for the file *path*; None when it is absent."""
        self._fs.invalidate_cache()
        try:
            facts: Mapping[str, Any] = self._fs.info(path)
        except FileNotFoundError:
            return None
        return facts if facts["type"] == "file" else None

    def _create_weakly(self, path: str, data: bytes) -> bool:
        if self._size(path) is not None:
            return False
        self._pipe(path, data)
        return bool(self._fs.cat_file(path) == data)

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except EnvScalerError:
            raise
        except PermissionError as err:
            raise StoreError(f"{self.uri(name)}: {err}") from err
        except Exception as err:  # each filesystem has its own error types
            raise StoreError(f"{self.uri(name)}: {type(err).__name__}: {err}", transient=True) from err


def _install(scheme: str) -> str:
    """How to install the filesystem of *scheme*, based on the class that fsspec names."""
    package = str(known_implementations.get(scheme, {}).get("class", "fsspec")).partition(".")[0]
    return "install what it names" if package == "fsspec" else f"run `pip install {package}`"
