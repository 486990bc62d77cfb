"""Copy volumes and inputs in before the start.

========================= ==============================================================================
source                    what lands at the mount's path
========================= ==============================================================================
output of a run (URI)     its files, each checked against the manifest
``s3://``, ``gs://``, ... all below that name, or the one object of that name
``file://``, ``/path``    a copy of the folder or file; a link inside that leads outside is refused
``hostPath:/path``        a link to the machine's own folder; nothing is copied
========================= ==============================================================================

One file lands inside the mount's path under its own name, unless the mount's path ends with the same
suffix: then it is the file itself.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

from envscaler_agent.protocol import SCHEMA, Manifest
from envscaler_airflow.errors import CheckpointError, SpecError
from envscaler_airflow.local_files import landing, write_atomic
from envscaler_airflow.sidecar.context import SidecarContext
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.store import manifests, outputs
from envscaler_airflow.store.base import Store, TellsVersions, open_store
from envscaler_airflow.store.root import COPY_BYTES, Root
from envscaler_airflow.store.transfer_progress import Moved


def fetch(
    context: SidecarContext, store: Store, sizes: Mapping[str, int], path: Path, index: Path, moved: Moved
) -> None:
    """Make *path* contain exactly the objects of *sizes*; *index* keeps their versions, *moved* counts bytes.

    Raises:
        StoreError: The store did not answer in time.
        SetupCancelledError, WorkInterruptedError: See :meth:`SidecarContext.wanted`.
    """
    known = _read(index)
    held: dict[str, str | None] = {}

    def hold(name: str) -> None:
        if name in held:  # from an earlier try
            moved.add(sizes[name])
            return
        target = path / name
        version = store.version(name) if isinstance(store, TellsVersions) else None
        if version is not None and known.get(name) == version and target.is_file():
            moved.add(sizes[name])
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with landing(target) as part, part.open("w+b") as stream, moved.arriving(stream, sizes[name]):
                store.get_file(name, stream)
        held[name] = version

    context.patiently(
        lambda: each(hold, sizes, store, moved, between=context.wanted), what=path.name, moved=moved
    )
    _remove_others(path, {path / name for name in sizes})
    _write(index, {name: version for name, version in held.items() if version is not None})


def each(
    act: Callable[[str], None],
    sizes: Mapping[str, int],
    store: Store,
    moved: Moved,
    *,
    between: Callable[[], None],
) -> None:
    """Call *act* on each name of *sizes*, small ones in parallel."""
    moved.begin(sum(sizes.values()))
    manifests.side_by_side(act, sorted(sizes), store.at_once, size=sizes.__getitem__, between=between)


def _remove_others(path: Path, kept: set[Path]) -> None:
    for item in path.rglob("*"):
        if (item.is_file() or item.is_symlink()) and item not in kept:
            item.unlink(missing_ok=True)


def _read(index: Path) -> dict[str, str]:
    try:
        body = json.loads(index.read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return body if isinstance(body, dict) else {}


def _write(index: Path, versions: dict[str, str]) -> None:
    index.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(index, json.dumps({"schema": SCHEMA, "versions": versions}).encode())


_HOST = "hostPath:"


def copy_in(context: SidecarContext, mount: Mount) -> None:
    """Copy the content of *mount* in.

    Raises:
        SpecError: The source is not available that way, or does not exist.
        CheckpointError: An output of a run is missing or torn, or has another hash.
        StoreError: The store did not answer in time.
    """
    path = Path(mount.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mount.source.startswith(_HOST):
        _link(mount, path)
    elif outputs.is_output_uri(mount.source):
        _copy_output_in(context, mount, path)
    elif mount.source.startswith(("/", "file://")):
        _copy(context, mount, path)
    else:
        _fetch_all(context, mount, path)


def _link(mount: Mount, path: Path) -> None:
    source = Path("/" + mount.source.removeprefix(_HOST).lstrip("/"))
    if not source.exists():
        raise SpecError(f"volume {mount.name}: {source} does not exist on this machine")
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        path.rmdir()
    path.symlink_to(source)


def _copy_output_in(context: SidecarContext, mount: Mount, path: Path) -> None:
    store, prefix = outputs.open_folder(mount.source, context.layout.store_options)
    manifest: Manifest = context.patiently(lambda: manifests.read_manifest(store, prefix), what=mount.name)

    def fetch(target: Path) -> None:
        with _transfer(context, mount) as moved:
            context.patiently(
                lambda: manifests.fetch(store, prefix, manifest, target, between=context.wanted, moved=moved),
                what=mount.name,
                moved=moved,
            )

    try:
        if manifest.kind != "file" or not _is_file_path(path, manifest.files[0].path):
            path.mkdir(parents=True, exist_ok=True)
            fetch(path)
            return
        only = manifest.files[0]
        fetch(path.parent)
        if path.name != only.path:
            (path.parent / only.path).replace(path)
    except CheckpointError as err:
        raise CheckpointError(f"volume {mount.name}: {err}") from err


def _transfer(context: SidecarContext, mount: Mount) -> AbstractContextManager[Moved]:
    return context.transfer("fetching", f"volume {mount.name}")


def _is_file_path(path: Path, name: str) -> bool:
    suffix = PurePosixPath(name).suffix
    return bool(suffix) and path.suffix == suffix and not path.is_dir()


def _copy(context: SidecarContext, mount: Mount, path: Path) -> None:
    """Copy a source that may be a link; its content is opened below it, so no link leads elsewhere."""
    named = Path(mount.source.removeprefix("file://"))
    source = Path(os.path.realpath(named))
    try:
        if source.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            files = [(item.path, item) for item in manifests.walk(source)]
        elif source.is_file():
            landing = _landing(path, named.name)
            path, files = landing.parent, [(landing.name, manifests.one_file(source))]
        else:
            raise SpecError(f"volume {mount.name}: {named} does not exist on this machine")
        root = Root.real(Path(os.path.realpath(path, strict=True)))
        with _transfer(context, mount) as moved:
            moved.begin(sum(item.size for _, item in files))
            for name, item in files:
                context.wanted()
                _copy_file(item, root, name, moved)
    except CheckpointError as err:
        raise SpecError(f"volume {mount.name}: {err}") from err


def _copy_file(item: manifests.TreeFile, root: Root, name: str, moved: Moved) -> None:
    """Copy the file with its mode and time, atomically."""
    with item.open(shares_names=True) as stream, root.landing(name) as new:
        with moved.sending(stream, item.size):
            shutil.copyfileobj(stream, new, COPY_BYTES)
        seen = os.fstat(stream.fileno())
        new.flush()
        os.fchmod(new.fileno(), seen.st_mode & 0o777)
        os.utime(new.fileno(), ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _landing(path: Path, name: str) -> Path:
    if _is_file_path(path, name):
        return path
    path.mkdir(parents=True, exist_ok=True)
    return path / name


def _fetch_all(context: SidecarContext, mount: Mount, path: Path) -> None:
    store = open_store(mount.source, context.layout.store_options)
    sizes = context.patiently(lambda: store.sizes(""), what=mount.name)
    if sizes:
        path.mkdir(parents=True, exist_ok=True)
        _get(context, mount, store, sizes, path)
        return
    if mount.is_written_back:
        path.mkdir(parents=True, exist_ok=True)  # the folder does not exist yet
        return
    parent, _, name = mount.source.rstrip("/").rpartition("/")
    store = open_store(parent, context.layout.store_options)
    size = context.patiently(lambda: store.size(name), what=mount.name)
    if size is None:
        raise SpecError(f"volume {mount.name}: nothing lies at {mount.source}")
    if mount.index is not None:
        _get(context, mount, store, {name: size}, path)
        return
    landing = _landing(path, name)
    _get(context, mount, store, {name: size}, landing.parent, place=landing.name)


def _get(
    context: SidecarContext,
    mount: Mount,
    store: Store,
    sizes: Mapping[str, int],
    path: Path,
    *,
    place: str | None = None,
) -> None:
    """Fetch the objects of *sizes* below *path*, small ones in parallel; *place*: the only one there."""
    with _transfer(context, mount) as moved:
        if mount.index is not None:
            fetch(context, store, sizes, path, Path(mount.index), moved)
            return
        root = Root.real(Path(os.path.realpath(path, strict=True)))

        def get(name: str) -> None:
            """Fetch one object without following a link."""
            if _size(root, place or name) == sizes[name]:
                moved.add(sizes[name])  # fetched before: a file appears only when it is complete
                return
            with root.landing(place or name) as stream, moved.arriving(stream, sizes[name]):
                store.get_file(name, stream)

        context.patiently(
            lambda: each(get, sizes, store, moved, between=context.wanted), what=mount.name, moved=moved
        )


def _size(root: Root, path: str) -> int | None:
    try:
        seen = root.stat(path)
    except OSError:
        return None
    return seen.st_size if stat.S_ISREG(seen.st_mode) else None
