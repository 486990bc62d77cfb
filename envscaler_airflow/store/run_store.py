"""The run store's interface, and how to open and check a store.

The interface is synchronous: code in an event loop calls it in threads. There are three implementations with
one contract (``tests/contract/test_store_contract.py``): a folder, an S3 bucket, and any fsspec filesystem.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

from envscaler_agent.messages import SCHEMA, Message, read_object
from envscaler_airflow.errors import ProtocolError, SpecError, StoreError
from envscaler_airflow.store.file import FileStore
from envscaler_airflow.store.keys import MAX_BYTES, check_name, check_prefix, check_tree, join

DEPLOYMENT = "deployment.json"
"""File with the deployment's uuid, for a store in a folder. No run's folder has a dot in its name."""

_Message = TypeVar("_Message", bound=Message)
_FILE = "file://"
_USERINFO = re.compile(r"[^/@]*:[^/@]*@")
_SAME_STORE = (
    "operator, triggerer, API server and sidecar must all see the same store: set [envscaler] store_url "
    "to a folder that they share (file:///...) or to an object store (s3://..., gs://...)"
)


class Store(Protocol):
    """Named objects below one root.

    Names are relative (``events/000001.json``); a name that is absolute or has a ``..`` part is a
    :class:`ProtocolError`, and so is a symbolic link on the way. If the store cannot answer, for any reason,
    the call raises :class:`StoreError`; it never returns "absent". Thread-safe.
    """

    @property
    def url(self) -> str:
        """URL of the root. :func:`open_store` with the same options opens it again."""

    @property
    def at_once(self) -> int:
        """Number of calls that the store answers faster concurrently than one after another."""

    def read(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Bytes of *name*; None when it is absent.

        Raises:
            StoreError: The store does not answer.
            ProtocolError: The object is larger than *max_bytes*.
        """

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """Bytes of *name* and its write time by the store's clock, seconds since the epoch.

        None when it is absent; only the date is None if the store does not report it. Raises as :meth:`read`.
        """

    def now(self) -> float:
        """The store's time, seconds since the epoch: the date of its last response plus the time since then.

        Sends a request if no response had a date yet. If no response has one, returns this machine's time.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write *data* to *name*, atomically; replaces an existing object."""

    def create(self, name: str, data: bytes) -> bool:
        """Write *data* to *name* unless it exists; return True if this call created it.

        Raises:
            StoreError: It is unknown whether this call created it; the caller reads it back.
        """

    def delete(self, name: str) -> None:
        """Delete *name*; do nothing if it is absent."""

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below *prefix*, manifests first; never the whole store."""

    def names(self, prefix: str) -> list[str]:
        """Every name below the folder *prefix* (``""`` for all), relative to the root, sorted."""

    def children(self, prefix: str) -> list[str]:
        """First parts of the names below *prefix*: its files and folders, sorted."""

    def size(self, name: str) -> int | None:
        """Bytes of *name*; None when it is absent."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Sizes in bytes of every name below the folder *prefix*, in few requests even for many names."""

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """Copy a local file to *name* as a stream; the object becomes visible when it is complete.

        An open file is read from its first byte and stays open. It is not reopened by path, because another
        process may change what the path names.
        """

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """Copy *name* to a local file as a stream: atomically to a path, or into an open file.

        Raises:
            StoreError: *name* is absent or cannot be read.
        """

    def uri(self, name: str) -> str:
        """URL of *name*, or of the folder *name*."""


@runtime_checkable
class TellsVersions(Protocol):
    """A store that can detect a changed object without reading it."""

    def version(self, name: str) -> str | None:
        """A value that changes when *name* is written again; None when it is absent. Raises StoreError."""


class StoreView:
    """One folder of a store, used as a store: names are relative to it and cannot leave it.

    Attributes:
        store: The whole store.
        prefix: The folder in it.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        """See *store* from *prefix*."""
        self.store = store
        self.prefix = check_prefix(prefix)

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self.store.uri(self.prefix)

    @property
    def at_once(self) -> int:
        """See :attr:`Store.at_once`."""
        return self.store.at_once

    def read(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """See :meth:`Store.read`."""
        return self.store.read(self._name(name), max_bytes=max_bytes)

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """See :meth:`Store.read_dated`."""
        return self.store.read_dated(self._name(name), max_bytes=max_bytes)

    def now(self) -> float:
        """See :meth:`Store.now`."""
        return self.store.now()

    def write(self, name: str, data: bytes) -> None:
        """See :meth:`Store.write`."""
        self.store.write(self._name(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Store.create`."""
        return self.store.create(self._name(name), data)

    def delete(self, name: str) -> None:
        """See :meth:`Store.delete`."""
        self.store.delete(self._name(name))

    def delete_tree(self, prefix: str) -> None:
        """See :meth:`Store.delete_tree`."""
        self.store.delete_tree(join(self.prefix, check_tree(prefix)))

    def names(self, prefix: str) -> list[str]:
        """See :meth:`Store.names`."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        return [name[skip:] for name in self.store.names(join(self.prefix, check_prefix(prefix)))]

    def children(self, prefix: str) -> list[str]:
        """See :meth:`Store.children`."""
        return self.store.children(join(self.prefix, check_prefix(prefix)))

    def size(self, name: str) -> int | None:
        """See :meth:`Store.size`."""
        return self.store.size(self._name(name))

    def sizes(self, prefix: str) -> dict[str, int]:
        """See :meth:`Store.sizes`."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        found = self.store.sizes(join(self.prefix, check_prefix(prefix)))
        return {name[skip:]: size for name, size in found.items()}

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """See :meth:`Store.put_file`."""
        self.store.put_file(self._name(name), source)

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """See :meth:`Store.get_file`."""
        self.store.get_file(self._name(name), target)

    def uri(self, name: str) -> str:
        """See :meth:`Store.uri`."""
        return self.store.uri(join(self.prefix, check_prefix(name)))

    def _name(self, name: str) -> str:
        # Check here too: joined to the folder, an empty name would be the folder itself.
        return join(self.prefix, check_name(name))


def open_store(url: str, options: Mapping[str, Any] | None = None, *, must_exist: bool = False) -> Store:
    """Open ``file:///path``, ``/path``, ``s3://bucket/path`` or any URL that fsspec supports.

    Opening neither reads nor writes; see :func:`check_store`. Paths are not percent-decoded.

    Args:
        url: URL of the store.
        options: Options of the store: see :class:`~envscaler_airflow.store.s3.S3Store` for ``s3://``; the
            filesystem's own options for fsspec; a folder has none.
        must_exist: If the folder is missing, writes fail too; without this a write creates it.

    Raises:
        SpecError: The URL or an option is invalid, or a package is missing.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if _USERINFO.match(rest):
        raise SpecError(f"store {scheme}://...: credentials in a URL end up in logs; use a connection")
    if scheme == "file":
        return FileStore(_folder(url, rest), must_exist=must_exist)
    return _open_s3(rest, options) if scheme == "s3" else _open_filesystem(url, options)


def _folder(url: str, rest: str) -> Path:
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise SpecError(
            f"store {url!r} is not an absolute path: write file:///srv/envscaler or s3://bucket/path"
        )
    return Path(path)


def _open_s3(rest: str, options: Mapping[str, Any] | None) -> Store:
    try:
        from envscaler_airflow.store.s3 import S3Store  # noqa: PLC0415 - boto3 is an extra
    except ImportError as err:
        raise SpecError(
            f"store s3://{rest}: {err}: install the [amazon] extra: pip install 'envscaler-airflow[amazon]'"
        ) from err
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise SpecError(f"store s3://{rest} names no bucket: write s3://bucket/path")
    return S3Store(bucket, prefix, options)


def _open_filesystem(url: str, options: Mapping[str, Any] | None) -> Store:
    from envscaler_airflow.store.filesystem import FilesystemStore  # noqa: PLC0415 - fsspec is slow to import

    return FilesystemStore(url, options)


def read_message(store: Store, name: str, kind: type[_Message]) -> _Message | None:
    """Read the message *name*; None when it is absent.

    Raises:
        StoreError: The store does not answer.
        ProtocolError: It does not follow the protocol.
    """
    body = store.read(name, max_bytes=kind.MAX_BYTES)
    return None if body is None else kind.from_json(body, where=name)


def check_store(store: Store, prefix: str = "") -> None:
    """Create one small file below *prefix*, try to create it again, then overwrite, read and delete it.

    Raises:
        StoreError: One of these steps failed; the message names the processes that need access to this store.
    """
    name = join(check_prefix(prefix), f".check-{uuid.uuid4().hex}")
    try:
        fault = _probe(store, name)
    except StoreError as err:
        message = f"store {store.url} cannot be used: {err}; {_SAME_STORE}"
        raise StoreError(message, status=err.status, transient=err.transient) from err
    if fault is not None:
        raise StoreError(f"store {store.url} cannot be used: {fault}; {_SAME_STORE}")


def _probe(store: Store, name: str) -> str | None:
    if not store.create(name, b"1"):
        return "the store reported that a new name exists"
    try:
        if store.create(name, b"2"):
            return "one name was created twice (If-None-Match ignored?), so two owners could both win"
        store.write(name, b"3")
        if store.read(name) != b"3":
            return "what was written was not read back"
    finally:
        store.delete(name)
    return None if store.read(name) is None else "what was deleted is still there"


def deployment_of(store: Store, configured: str | None) -> str:
    """Name of this Airflow deployment: *configured*, or a uuid stored in the folder.

    Raises:
        SpecError: No name is configured and the store is not a folder. Two deployments that share a bucket
            would mistake each other's runs for their own.
        StoreError: The folder cannot be read or written.
        ProtocolError: Its ``deployment.json`` is not one of ours.
    """
    if configured and configured.strip():
        return configured.strip()
    if not store.url.startswith(_FILE):
        raise SpecError(
            f"[envscaler] deployment is not set, and other deployments may share the store {store.url}: "
            "set it to a name of this Airflow's own (AIRFLOW__ENVSCALER__DEPLOYMENT=team-prod)"
        )
    text = _kept_deployment(store)
    try:
        return str(uuid.UUID(read_object(text, where=store.uri(DEPLOYMENT))["deployment"]))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ProtocolError(
            f"{store.uri(DEPLOYMENT)} does not contain the uuid of a deployment: {err!r}"
        ) from err


def folder_of(store: Store) -> Path | None:
    """The folder on this machine that contains *store*; None for any other store."""
    return Path(store.url.removeprefix(_FILE)) if store.url.startswith(_FILE) else None


def _kept_deployment(store: Store) -> bytes:
    if (folder := folder_of(store)) is not None and folder.exists():
        text = store.read(DEPLOYMENT)
        if text is not None:
            return text
    body = {"schema": SCHEMA, "deployment": str(uuid.uuid4())}
    store.create(DEPLOYMENT, json.dumps(body).encode())
    text = store.read(DEPLOYMENT)
    if text is None:
        raise StoreError(f"{store.uri(DEPLOYMENT)} was deleted while it was made", transient=True)
    return text
