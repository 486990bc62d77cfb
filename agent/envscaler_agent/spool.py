"""The folder through which wrapper, session and sidecar communicate, one for each node of an attempt.

======================== ===================== ================================================
name                     written by            what
======================== ===================== ================================================
``start.json``           sidecar, once         where and how to start the command
``control.json``         sidecar               the owner's Control, byte for byte
``snapshot.done``        sidecar               ``{"sequence": n}``: the snapshot requested by control n
``request.json``         wrapper               ``{"action": "stop"}``: SIGTERM or SIGINT reached the wrapper
``progress/rank-0.json`` session, local rank 0 Progress, and a :class:`SessionReport`
``wrapper.json``         wrapper               a Status with what the wrapper knows
``sidecar.json``         sidecar               its own state; ``phase: done`` once everything is uploaded
``logs/000001.log``      wrapper               closed chunks of output, secrets masked
``metrics/000001.jsonl`` wrapper               closed chunks of metrics
``checkpoints/<name>/``  session               a complete save, ``agent.json`` inside
``ranks/``               sessions of one node  how several ranks agree on a step
======================== ===================== ================================================

Names that begin with a dot or end with ``.open`` are being written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from envscaler_agent.ending import EXIT_CODES
from envscaler_agent.errors import ProtocolError
from envscaler_agent.messages import MAX_JSON_BYTES, SCHEMA, Message, read_object
from envscaler_agent.protocol import Progress

ENV = "ENVSCALER_SPOOL"
"""Environment variable that names the folder."""


class Spool:
    """Paths inside one spool folder; makes nothing by itself."""

    def __init__(self, root: Union[str, Path]) -> None:
        """Name the folder *root*, which need not exist yet."""
        self.root = Path(root)
        self.start = self.root / "start.json"
        self.control = self.root / "control.json"
        self.request = self.root / "request.json"
        self.snapshot = self.root / "snapshot.done"
        self.notice = self.root / "notice.json"
        self.wrapper = self.root / "wrapper.json"
        self.sidecar = self.root / "sidecar.json"
        self.progress = self.root / "progress" / "rank-0.json"
        self.logs = self.root / "logs"
        self.metrics = self.root / "metrics"
        self.checkpoints = self.root / "checkpoints"
        self.ranks = self.root / "ranks"

    @classmethod
    def from_env(cls, environ: Optional[Mapping[str, str]] = None) -> Optional[Spool]:
        """Return the folder that the environment names, None without one."""
        root = (os.environ if environ is None else environ).get(ENV)
        return cls(root) if root else None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace *path* in one step: a reader sees the old bytes or the new ones, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace *path* by *body* with ``schema`` first; None fields are left out."""
    known = {"schema": SCHEMA}
    known.update((key, value) for key, value in body.items() if value is not None)
    write_atomic(path, json.dumps(known, separators=(",", ":"), allow_nan=False).encode())


RACY_NS = 50_000_000
"""A file younger than this is read again: the next one may have its inode, size and time. Chosen: ten
times the tick of the kernel's coarse clock (4 ms at 250 Hz)."""


class Watched:
    """A file that is replaced atomically now and then; a check costs one ``stat``."""

    def __init__(self, path: Path) -> None:
        """Watch *path*, which need not exist."""
        self.path = path
        self._seen: Optional[Tuple[int, int, int]] = None
        self._data: Optional[bytes] = None

    def changed(self) -> Optional[bytes]:
        """Return the bytes when they differ from the last ones, None otherwise.

        A file that vanishes does not count as a change: its last content stays valid.
        """
        try:
            stat = self.path.stat()
            mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if mark == self._seen:
                return None
            with self.path.open("rb") as file:
                data = file.read(MAX_JSON_BYTES + 1)
        except OSError:
            return None
        is_young = time.time_ns() - stat.st_mtime_ns < RACY_NS
        self._seen = None if is_young else mark
        if data == self._data:
            return None
        self._data = data
        return data


@dataclass(frozen=True)
class Restore:
    """The checkpoint that this attempt starts from.

    Attributes:
        path: Folder on this machine.
        name: Its name in the store.
        step, epoch, samples: Its progress.
    """

    path: str
    name: Optional[str] = None
    step: Optional[int] = None
    epoch: Optional[int] = None
    samples: Optional[int] = None


@dataclass(frozen=True)
class Start:
    """The content of ``start.json``; every field has a default, so that a bare command runs too.

    Attributes:
        cwd: Working directory, None for the wrapper's own.
        env: Additions to the environment.
        restore: None on a fresh start.
        generation, attempt, node, nodes: Which node of which attempt this is.
        every: ``{"seconds"|"steps"|"epochs": n}`` between periodic checkpoints, None for never.
        align: Boundary of periodic checkpoints, ``step`` or ``epoch``.
        global_batch: Samples per step over all ranks, if the spec has it.
        checkpoint_path: Where code that does not import the library saves by itself.
        log_patterns: Regular expressions with one group, by field of Progress.
        stall_factor: Steps may take this many times the usual before the run counts as stalled.
        stall_min_s: At least this many seconds.
        sample_interval_s: Time between two samples of the machine.
        secret_env: Environment variables whose values never leave this package.
        success: ``exit-code``, or ``all-steps`` where exit code 0 before the last step is a failure.
    """

    cwd: Optional[str] = None
    env: Dict[str, str] = field(default_factory=dict)
    restore: Optional[Restore] = None
    generation: int = 0
    attempt: int = 0
    node: int = 0
    nodes: int = 1
    every: Optional[Dict[str, float]] = None
    align: str = "step"
    global_batch: Optional[int] = None
    checkpoint_path: Optional[str] = None
    log_patterns: Dict[str, str] = field(default_factory=dict)
    stall_factor: float = 10.0
    stall_min_s: float = 300.0
    sample_interval_s: float = 1.0
    secret_env: Tuple[str, ...] = ()
    success: str = "exit-code"


class SetupFailedError(ProtocolError):
    """The sidecar could not prepare workdir, inputs or checkpoint; the message says why.

    Attributes:
        reason: Reason of the end: ``setup-failed``, ``stopped`` or ``orphaned``.
    """

    def __init__(self, message: str, *, reason: str = "setup-failed") -> None:
        """Store the message and the reason of the end."""
        super().__init__(message)
        self.reason = reason


def parse_notice(data: bytes) -> str:
    """Read ``notice.json``: one line that the sidecar adds to the training's log.

    Raises:
        ProtocolError: It does not follow the protocol.
    """
    text = read_object(data, where="notice.json").get("text")
    return text if isinstance(text, str) else ""


def parse_start(data: bytes) -> Start:
    """Read ``start.json``; unknown fields are ignored.

    Raises:
        SetupFailedError: The sidecar reports that the setup failed.
        ProtocolError: It does not follow the protocol.
    """
    document = _StartDocument.from_json(data, where="start.json")
    if document.failed is not None:
        reason = document.reason if str(document.reason) in EXIT_CODES else "setup-failed"
        raise SetupFailedError(str(document.failed), reason=reason)
    env = {name: str(value) for name, value in document.env.items()}
    return replace(document.session, cwd=document.cwd, env=env, restore=document.restore)


@dataclass(frozen=True)
class _StartDocument(Message):
    """``start.json`` as written: ``session`` has the other fields of :class:`Start`."""

    cwd: Optional[str] = None
    env: Dict[str, Any] = field(default_factory=dict)
    restore: Optional[Restore] = None
    session: Start = field(default_factory=Start)
    failed: Any = None
    reason: Any = None


@dataclass(frozen=True)
class SessionReport(Message):
    """The content of ``progress/rank-0.json`` beside the :class:`Progress`.

    Attributes:
        progress: What the training reported.
        cooperates: True once ``Session.checkpoint`` was called: it handles a drain by itself.
        saves: True when ``Session.checkpoint`` saves periodically: the sidecar need not copy files.
        saving: True while a checkpoint is being saved.
        draining: True from the moment it saves for a drain.
        drained: True when it saved and exited, with any exit code of the launcher.
        saved_step: Step of the newest complete save of this attempt.
        last_save_s: Seconds that it took.
        at, first_step_at: When this was written and the first step was done, monotonic clock of the machine.
        warning: One human-readable line, e.g. why a save failed.
    """

    progress: Progress = field(default_factory=Progress)
    cooperates: bool = False
    saves: bool = False
    saving: bool = False
    draining: bool = False
    drained: bool = False
    saved_step: Optional[int] = None
    last_save_s: Optional[float] = None
    at: Optional[float] = None
    first_step_at: Optional[float] = None
    warning: str = ""


def parse_report(data: bytes) -> SessionReport:
    """Read the session's progress file.

    Raises:
        ProtocolError: It does not follow the protocol.
    """
    where = "progress/rank-0.json"
    return replace(SessionReport.from_json(data, where=where), progress=Progress.from_json(data, where=where))


def snapshot_sequence(path: Path) -> int:
    """Return the control sequence that the sidecar's snapshot answers, -1 without one."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return -1
    sequence = body.get("sequence") if isinstance(body, dict) else body
    return sequence if isinstance(sequence, int) else -1
