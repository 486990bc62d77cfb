"""The spool between the wrapper and the sidecar, and the state that the sidecar keeps in it.

JSON files are replaced atomically, so a reader sees the old one or the new one. Files from the wrapper's side
are untrusted: their size is limited, they are checked, and links out of the folder are never followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from envscaler_agent import spool
from envscaler_agent.messages import MAX_JSON_BYTES, SCHEMA, parse_object
from envscaler_agent.protocol import Control, Resume, Status, control_name, parse_checkpoint_name
from envscaler_airflow.errors import CheckpointError, ProtocolError
from envscaler_airflow.launch import KEEP, SessionSettings
from envscaler_airflow.local_files import write_atomic
from envscaler_airflow.store.root import Root

_OPEN = re.compile(r"\d{6,12}\.open\Z")
_CHUNK = re.compile(r"(\d{6,12})\.(jsonl|log)\Z")


@dataclass(frozen=True, slots=True)
class AttemptNode:
    """Which node of which attempt this sidecar serves; *claim* is 0 before it has claimed the node."""

    generation: int
    attempt: int
    node: int
    nodes: int
    claim: int = 1

    @property
    def control_name(self) -> str:
        """Name of the owner's control of the attempt."""
        return control_name(self.generation, self.attempt)


class Mount(BaseModel):
    """A volume to copy in before the start.

    ``index``: if its path outlives the stage's node, the file that records its content.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str
    source: str
    path: str
    read_only: bool = False
    index: str | None = None

    @property
    def is_written_back(self) -> bool:
        """True for an object store's volume that the training may write."""
        return not self.read_only and "://" in self.source and not self.source.startswith("file:")


class Layout(BaseModel):
    """The paths of this node, from the backend (``layout.json``).

    ``session`` is for the wrapper, ``keep`` the number of checkpoints to keep, and ``workdir_archive`` the
    name of the code's archive in the run's folder. ``processes_per_node`` is set where nodes are added and
    removed during the attempt. ``training_paths`` maps a path here to the spec's path, under which the
    training sees the folder. ``private_folder`` is a folder that outlives the sidecar's process and that the
    training cannot write, if the backend has one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    session: SessionSettings = SessionSettings()
    keep: int = KEEP
    work: str | None = None
    workdir_archive: str | None = None
    mounts: tuple[Mount, ...] = ()
    outputs: dict[str, str] = {}
    checkpoint_path: str | None = None
    store_options: dict[str, Any] = {}
    processes_per_node: int | None = None
    training_paths: dict[str, str] = {}
    private_folder: str | None = None

    @property
    def private_path(self) -> Path | None:
        """``private_folder`` as a path."""
        return Path(self.private_folder) if self.private_folder else None

    @classmethod
    def read(cls, path: Path) -> Layout:
        """Read ``layout.json``.

        Raises:
            ProtocolError: Not JSON, or a field of the wrong type.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as err:
            raise ProtocolError(f"{path}: {err}") from err


@dataclass(frozen=True, slots=True)
class State:
    """What the sidecar must know after a kill (``sidecar.json``).

    Attributes:
        pid: Process id of the sidecar.
        uid, claim: Uid of the pod or node process, and the number of its claim to the node; 0 before it has
            one.
        phase: ``setup``, ``running``, ``draining``, ``done``.
        sequence: Number of the last status written.
        is_laid_out: True once ``start.json`` exists, with any content.
        is_restoring: True while the sidecar chooses and fetches a checkpoint.
        failed: Why the set-up or the upload of outputs failed.
        failed_as: Reason of the end when the set-up failed and the wrapper reports none.
        start_step, restored_from, restored_claim, resume, restore_s, rejected: See ``protocol.Status``.
        last_checkpoint, last_checkpoint_step, checkpoint_s, checkpoints: The same.
        name_step: Largest step in the name of a checkpoint of this attempt or of the one restored.
        snapshot: Fingerprint of the tree in the last snapshot, or of the restored one.
        snapshot_step, snapshot_epoch: Progress at the last snapshot.
        answered: Sequence of the last control that was answered with a snapshot.
        override: A control of the sidecar's own (lease expired, superseded), as JSON; it is never withdrawn.
        is_drained: True when nothing but chunks and the last status is left to upload.
        is_final_snapshot_done: True when the tree was scanned once more after the end.
        outputs: Output name to URI, once uploaded.
        places: Path that is read from the training, to the real path of its folder before the start.
    """

    pid: int = 0
    uid: str = ""
    claim: int = 0
    phase: str = "setup"
    sequence: int = 0
    is_laid_out: bool = False
    is_restoring: bool = False
    failed: str | None = None
    failed_as: str = "setup-failed"
    start_step: int | None = None
    restored_from: str | None = None
    restored_claim: int | None = None
    resume: Resume | None = None
    restore_s: float | None = None
    rejected: tuple[str, ...] = ()
    last_checkpoint: str | None = None
    last_checkpoint_step: int | None = None
    checkpoint_s: float | None = None
    checkpoints: int = 0
    name_step: int = 0
    snapshot: str | None = None
    snapshot_step: int | None = None
    snapshot_epoch: int | None = None
    answered: int = -1
    override: str | None = None
    is_drained: bool = False
    is_final_snapshot_done: bool = False
    outputs: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


_STATE = TypeAdapter(State)
_DONE = ".done"
MOST_DONE = 256
"""Marks of done checkpoints that are kept, the newest. Chosen: a training that restarts on this node begins
from a newer one. Without its mark, a repeated save costs its time and is found in the store.
"""


class Spool(spool.Spool):
    """The sidecar's side of the folder: atomic writes, and checked reads."""

    def __init__(self, root: Path) -> None:
        """Use *root*, created when absent."""
        super().__init__(root)
        self.restored = root / "restored"
        root.mkdir(parents=True, exist_ok=True)
        self._folder = Root.of(root)
        for folder in ("checkpoints", "restored", "metrics", "logs"):
            self.folder.make_folder(folder)

    @property
    def folder(self) -> Root:
        """The folder itself; all access uses its descriptor, because the training can create links here.

        Raises:
            OSError: The training replaced it by a link or a file.
        """
        held = self._folder
        try:
            is_same = self.root.stat().st_ino == held.stat("").st_ino
        except FileNotFoundError:
            is_same = False
        if not is_same:  # the training removed it
            held.path.mkdir(parents=True, exist_ok=True)
            self._folder = held = Root.real(held.path)
        return held

    def name(self, path: Path) -> str:
        """*path*, which is in the folder, as a name below :attr:`folder`."""
        return path.relative_to(self.root).as_posix()

    def _listed(self, folder: Path) -> list[tuple[Path, os.stat_result]]:
        """The content of *folder*; nothing when the training removed it or replaced it."""
        try:
            return [(folder / name, facts) for name, facts in self.folder.scan(self.name(folder))]
        except OSError as err:
            if err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return []
            raise

    def write(self, path: Path, data: bytes) -> None:
        """Replace *path* atomically.

        Raises:
            OSError: For example, the disk is full; the old file stays.
        """
        name = self.name(path)
        with self.folder.landing(name) as stream:
            stream.write(data)
            stream.flush()
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(self.folder.stat(name).st_mode):
                    self.folder.remove(name)

    def write_json(self, path: Path, body: Mapping[str, Any]) -> None:
        """Replace *path* by *body*, with ``schema``."""
        self.write(path, json.dumps({"schema": SCHEMA, **body}, separators=(",", ":")).encode())

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """Read an object; None when *path* is absent.

        Raises:
            ProtocolError: Too large, or not a JSON object.
        """
        body = self._read(path)
        return None if body is None else parse_object(body, where=path.name)

    def show_notice(self, line: str | None) -> None:
        """Ask the wrapper to add *line* to the training's log, once; None withdraws an unread line.

        The line is optional: a full disk changes nothing else.
        """
        if line is None and not self.notice.exists():
            return
        with contextlib.suppress(OSError, ProtocolError):
            if line is None:
                self.remove(self.notice)
            elif (self.read_json(self.notice) or {}).get("text") != line:
                self.write_json(self.notice, {"text": line})

    def wrapper_status(self) -> Status | None:
        """The wrapper's last status; None before its first.

        Raises:
            ProtocolError: It wrote what the protocol forbids.
        """
        body = self._read(self.wrapper)
        return None if body is None else Status.from_json(body, where="wrapper.json")

    def control_text(self) -> bytes | None:
        """The file where the wrapper looks for the control; None when that is not a readable file."""
        try:
            return self._read(self.control)
        except ProtocolError:
            return None

    def current_control(self) -> Control | None:
        """The control that was last passed to the wrapper; None before the first."""
        try:
            body = self._read(self.control)
            return None if body is None else Control.from_json(body, where="control.json")
        except ProtocolError:  # only readable ones are passed on
            return None

    def saves(self) -> bool:
        """True when the training saves through ``Session``; one that only reports is snapshotted."""
        try:
            body = self.read_json(self.progress)
        except ProtocolError:
            return False
        return bool(body and body.get("saves"))

    def chunks(self, folder: str) -> list[tuple[int, Path]]:
        """Closed chunks in ``metrics`` or ``logs``, in order."""
        found = []
        for path, facts in self._listed(self.root / folder):
            match = _CHUNK.match(path.name)
            if match and _is_own_file(facts):
                found.append((int(match[1]), path))
        return sorted(found)

    def close_chunks(self, folder: str) -> None:
        """Close the files that a killed wrapper left open. Only once it is known to have ended."""
        suffix = ".log" if folder == "logs" else ".jsonl"
        for path, facts in self._listed(self.root / folder):
            if _OPEN.match(path.name) and _is_own_file(facts) and facts.st_size:
                self.folder.rename(self.name(path), self.name(path.with_suffix(suffix)))

    @contextmanager
    def opened(self, path: Path) -> Iterator[BufferedReader]:
        """Open a file that the training's side wrote, for upload.

        Raises:
            ProtocolError: It is now a link, a hard link, a pipe or a device.
            OSError: It does not exist any more, or cannot be read.
        """
        try:
            stream = self.folder.open_file(self.name(path))
        except CheckpointError as err:
            raise ProtocolError(str(err)) from err
        except OSError as err:
            if err.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ProtocolError(f"{path.name} became a link") from err
            raise
        with stream:
            if not _is_own_file(os.fstat(stream.fileno())):
                raise ProtocolError(f"{path.name} has a second name (hard link)")
            yield stream

    def remove(self, path: Path) -> None:
        """Remove the file, folder or link *path* (not a link's target); nothing happens when it is absent."""
        self.folder.remove(self.name(path))

    def new_folder(self, path: Path) -> Root:
        """Create an empty folder at *path*, in place of anything there. Raises OSError."""
        self.remove(path)
        return self.made_folder(path)

    def made_folder(self, path: Path) -> Root:
        """Create the folder *path* if it is absent. Raises OSError."""
        self.folder.make_folder(self.name(path))
        return self.folder.enter(self.name(path))

    def saved(self, who: AttemptNode, *, with_done: bool = False) -> list[str]:
        """Complete local saves of this attempt, by step: those not done yet, or with those that were."""
        found = [path.name for path, _ in self._listed(self.checkpoints)]
        done = {name.removesuffix(_DONE) for name in found if name.endswith(_DONE)}
        names = {*found, *done} if with_done else {*found} - done
        keys = {name: key for name in names if (key := parse_checkpoint_name(name)) is not None}
        mine = [name for name, key in keys.items() if (key[0], key[2]) == (who.generation, who.attempt)]
        return sorted(mine, key=lambda name: keys[name])

    def done(self, name: str) -> Path:
        """Mark checkpoint *name* as done: in the store with its manifest, or abandoned for good."""
        return self.checkpoints / f"{name}{_DONE}"

    def forget_done(self, who: AttemptNode) -> None:
        """Remove old marks of done checkpoints of this attempt, if only the marks are left."""
        waiting = set(self.saved(who))
        done = [name for name in self.saved(who, with_done=True) if name not in waiting]
        for name in done[:-MOST_DONE]:
            if not (self.checkpoints / name).exists():
                self.remove(self.done(name))

    def _read(self, path: Path) -> bytes | None:
        try:
            stream = self.folder.open_file(self.name(path))
        except FileNotFoundError:
            return None
        except CheckpointError as err:
            raise ProtocolError(f"{path.name} is not a file") from err
        except OSError as err:
            raise ProtocolError(f"{path.name}: {err.strerror}") from err
        with stream:
            body = stream.read(MAX_JSON_BYTES + 1)
        if len(body) > MAX_JSON_BYTES:
            raise ProtocolError(f"{path.name}: more than {MAX_JSON_BYTES} bytes")
        return body


def _places(path: Path) -> Mapping[str, str]:
    """What :class:`Memory` wrote there; empty before the start."""
    try:
        found: Mapping[str, str] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found


def _is_own_file(facts: os.stat_result) -> bool:
    """True for a plain file without a second name, which is what the wrapper writes."""
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1


class Memory:
    """The sidecar's :class:`State`, kept in ``sidecar.json``; safe between its two threads."""

    def __init__(self, spool: Spool, *, own: Path | None = None) -> None:
        """Load what an earlier sidecar of this folder left.

        What the training must not change (the real paths of folders) is in the folder *own* if there is one,
        because the training can write to ``sidecar.json``.
        """
        self._spool = spool
        self._own = None if own is None else own / "places.json"
        self._start = None if own is None else own / "start.json"
        self._lock = threading.RLock()
        self._state = dataclasses.replace(self._load(), pid=os.getpid())
        if self._own is not None:
            self._state = dataclasses.replace(self._state, places=_places(self._own))

    @property
    def state(self) -> State:
        """The current state; frozen, so it can be read without a lock."""
        return self._state

    def update(self, **changes: Any) -> State:
        """Change fields; they are on disk before any reader sees them.

        Raises:
            OSError: Not written; nothing has changed.
        """
        with self._lock:
            state = dataclasses.replace(self._state, **changes)
            if self._own is not None and "places" in changes:
                self._own.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._own, json.dumps(changes["places"]).encode())
            self._spool.write_json(self._spool.sidecar, dataclasses.asdict(state))
            self._state = state
            return state

    def start(self) -> dict[str, Any] | None:
        """Return what was last written to ``start.json``, as far as the training cannot change it.

        Raises:
            OSError: It cannot be read.
        """
        try:
            body = None if self._start is None else self._start.read_bytes()
        except FileNotFoundError:
            return None
        return None if body is None else dict(json.loads(body))

    def keep_start(self, body: Mapping[str, Any]) -> None:
        """Remember *body*, before it is written to ``start.json``. Raises OSError."""
        if self._start is not None:
            self._start.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._start, json.dumps(body).encode())

    def _load(self) -> State:
        try:
            body = self._spool.read_json(self._spool.sidecar) or {}
        except ProtocolError:  # replaced atomically, so only another process can have torn it
            body = {}
        known = {item.name for item in dataclasses.fields(State)}
        kept = {key: value for key, value in body.items() if key in known}
        try:
            # Messages may contain names that are not valid UTF-8; pydantic refuses them.
            text = json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace")
            return _STATE.validate_json(text, strict=True)
        except ValidationError:
            return State()
