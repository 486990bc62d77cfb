"""What a start needs: workdir, inputs, the checkpoint to resume from; then ``start.json``.

Until ``start.json`` exists the training waits, so every step may be repeated; once it exists nothing is
prepared again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from envscaler_agent.messages import SCHEMA
from envscaler_agent.process import ADDRESS
from envscaler_agent.protocol import Control, Manifest
from envscaler_airflow.errors import CheckpointError, ProtocolError, SpecError, StoreError
from envscaler_airflow.launch import SessionSettings
from envscaler_airflow.local_files import write_atomic
from envscaler_airflow.sidecar import owner_watch, saver_layouts
from envscaler_airflow.sidecar.context import SetupCancelledError, SidecarContext
from envscaler_airflow.sidecar.replaced import restore_with_others
from envscaler_airflow.sidecar.restore import empty
from envscaler_airflow.sidecar.spool_state import Mount
from envscaler_airflow.sidecar.uploads import WriteBack
from envscaler_airflow.store import archive, manifests, outputs
from envscaler_airflow.store.root import COPY_BYTES, Root
from envscaler_airflow.store.run_store import Store, TellsVersions, open_store, read_message
from envscaler_airflow.store.transfer_progress import Moved


def fetch(
    context: SidecarContext, store: Store, sizes: Mapping[str, int], root: Root, index: Path, moved: Moved
) -> None:
    """Make *root* contain exactly the objects of *sizes*; *index* keeps their versions, *moved* counts bytes.

    Raises:
        StoreError: The store did not answer in time.
        OSError: A folder on the way is a link or a file.
        SetupCancelledError, WorkInterruptedError: See :meth:`SidecarContext.wanted`.
    """
    known = _read(index)
    held: dict[str, str | None] = {}

    def hold(name: str) -> None:
        if name in held:  # from an earlier try
            moved.add(sizes[name])
            return
        version = store.version(name) if isinstance(store, TellsVersions) else None
        if version is not None and known.get(name) == version and _size(root, name) is not None:
            moved.add(sizes[name])
        else:
            with root.landing(name) as stream, moved.arriving(stream, sizes[name]):
                store.get_file(name, stream)
        held[name] = version

    context.patiently(
        lambda: each(hold, sizes, store, moved, between=context.wanted), what=root.path.name, moved=moved
    )
    _remove_others(root, sizes)
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


def _remove_others(root: Root, kept: Collection[str]) -> None:
    for path in [path for path, _ in saver_layouts.below(root) if path not in kept]:
        root.remove(path)


def _read(index: Path) -> dict[str, str]:
    try:
        body = json.loads(index.read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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

    def fetch(target: Path | Root) -> None:
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
        root = Root.real(Path(os.path.realpath(path.parent, strict=True)))
        fetch(root)
        if path.name != only.path:
            root.rename(only.path, path.name)
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
        raise SpecError(f"volume {mount.name}: nothing exists at {mount.source}")
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
        root = Root.real(Path(os.path.realpath(path, strict=True)))
        if mount.index is not None:
            fetch(context, store, sizes, root, Path(mount.index), moved)
            return

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


HOLD_POLL_S = 1.0
"""Time between two readings of a control with ``hold``. Chosen: an owner lists checkpoints in seconds."""
_ARCHIVE = re.compile(r"workdir-([0-9a-f]{64})\.tar\.zst\Z")


def lay_out(context: SidecarContext) -> None:
    """Prepare everything and write ``start.json``; after a failure, with the reason in it.

    Raises:
        WorkInterruptedError: The sidecar must end; the next one continues.
    """
    if context.spool.start.exists():
        context.memory.update(is_laid_out=True)
        return
    written = context.memory.start()
    if written is not None:  # the training removed start.json, and may have put links anywhere by now
        _let_begin(context, written)
        return
    control: Control | None = None
    try:
        context.patiently(lambda: owner_watch.claim_node(context), what="claim")
        control = first_control(context)
        _check_counts(context)
        body = _lay_out(context, control)
        _check_counts(context)
    except (SpecError, CheckpointError, ProtocolError, StoreError, SetupCancelledError, OSError) as err:
        is_known = control is not None or (context.who.generation, context.who.attempt) != (1, 1)
        reason = _reason(context, err, is_known=is_known)
        body = {"failed": str(err), "reason": reason}
        context.memory.update(failed=f"set-up failed: {err}", failed_as=reason)
    else:
        context.memory.update(failed=None)  # from a try whose end could not be recorded
    context.memory.keep_start(body)
    _let_begin(context, body)


def _check_counts(context: SidecarContext) -> None:
    """Let an attempt that was submitted late, by an owner that slept, not begin beside a later one.

    Raises:
        SetupCancelledError: A later attempt has begun, or another pod has this node.
        StoreError: The store did not answer in time.
    """
    standing = context.patiently(lambda: owner_watch.standing_of(context), what="later attempts")
    if standing in ("over", "replaced"):
        raise SetupCancelledError(f"orphaned: {owner_watch.WHY[standing]}")


def _let_begin(context: SidecarContext, body: Mapping[str, Any]) -> None:
    context.spool.write_json(context.spool.start, body)
    context.memory.update(is_laid_out=True)


def _reason(context: SidecarContext, err: Exception, *, is_known: bool) -> str:
    """The reason of the end: neither a requested stop nor an unreachable store is a fault of the stage.

    *is_known*: the store has answered this node or, as far as one can tell, an earlier attempt; otherwise its
    URL or its credentials may be wrong.
    """
    if isinstance(err, SetupCancelledError):
        return "stopped"
    is_away = isinstance(err, StoreError) and is_known and _is_away(context)
    return "orphaned" if is_away else "setup-failed"


def _is_away(context: SidecarContext) -> bool:
    """True if the run's store still answers nothing: it is away, or the credentials have expired."""
    try:
        context.run.size(context.who.control_name)
    except StoreError:
        return True
    return False


def _lay_out(context: SidecarContext, control: Control) -> dict[str, Any]:
    cwd = _workdir(context)
    for mount in context.layout.mounts:
        context.wanted()
        copy_in(context, mount)
    for path in context.layout.outputs.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if context.layout.checkpoint_path is not None:
        Path(context.layout.checkpoint_path).mkdir(parents=True, exist_ok=True)
    WriteBack(context).mark()
    context.remember_places()
    context.wanted()
    restored = restore_with_others(context, control)
    context.wanted()
    address = context.address if context.who.node == 0 else context.rendezvous
    env = {} if address is None else {ADDRESS: address}
    return {
        "cwd": cwd,
        "env": env | ({"ENVSCALER_RESTORE": str(restored.path)} if restored else {}),
        "restore": restored.to_start() if restored else None,
        "session": _session(context, control),
    }


def first_control(context: SidecarContext) -> Control:
    """The owner's control, once it has listed the checkpoints that this attempt may resume from.

    Raises:
        ProtocolError: It is absent or cannot be read.
        StoreError: The store did not answer in time.
    """
    name = context.who.control_name
    while True:
        control = context.patiently(lambda: read_message(context.run, name, Control), what=name)
        if control is None:
            raise ProtocolError(
                f"{context.run.uri(name)} is absent: sidecar and owner must see the same store"
            )
        if control.action != "hold":
            context.messages.say("hold", None)
            return control
        context.messages.say("hold", "waits until the owner has listed the checkpoints to resume from")
        context.ending.wait(HOLD_POLL_S)
        context.wanted()


def _workdir(context: SidecarContext) -> str | None:
    if context.layout.work is None:
        return None
    work = Path(context.layout.work)
    work.mkdir(parents=True, exist_ok=True)
    name = context.layout.workdir_archive
    if name is None:
        return str(work)
    match = _ARCHIVE.match(name)
    if match is None:
        raise ProtocolError(f"workdir archive {name!r:.200}: expected workdir-<sha256>.tar.zst")
    if context.patiently(lambda: context.run.size(name), what=name) is None:
        raise CheckpointError(f"{context.run.uri(name)} is absent")
    with context.spool.folder.scratch() as part:
        context.patiently(lambda: context.run.get_file(name, part), what=name)
        empty(work)
        archive.unpack(part, work, sha256=match[1])
    return str(work)


def session_of(context: SidecarContext, control: Control) -> SessionSettings:
    """The launch's settings, with the interval between checkpoints that the owner requests."""
    return context.layout.session.with_interval(control.checkpoint_every_s)


def _session(context: SidecarContext, control: Control) -> dict[str, Any]:
    who, path = context.who, context.layout.checkpoint_path
    return {
        "generation": who.generation,
        "attempt": who.attempt,
        "node": who.node,
        "nodes": who.nodes,
        **({"checkpoint_path": path} if path is not None else {}),
        **session_of(context, control).to_dict(),
    }
