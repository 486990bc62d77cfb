"""What every part of the sidecar needs: its paths, the node that it serves, and how to wait."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from envscaler_agent.protocol import Ended, Transfer
from envscaler_airflow.errors import CheckpointError, EnvScalerError, ProtocolError, StoreError
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory, Spool
from envscaler_airflow.store.lease import newest_claim
from envscaler_airflow.store.root import Place
from envscaler_airflow.store.run_store import Store
from envscaler_airflow.store.transfer_progress import Moved

_T = TypeVar("_T")


class WorkInterruptedError(EnvScalerError):
    """The sidecar was stopped (SIGTERM); the next one continues here."""


class UnheededError(EnvScalerError):
    """The attempt is orphaned and the wrapper ignored the request to stop it within the grace period."""


class SetupCancelledError(EnvScalerError):
    """The owner stopped the attempt before it began."""


class Messages:
    """One human-readable line from each part; the newest is shown first."""

    def __init__(self) -> None:
        """Begin without messages."""
        self._lock = threading.Lock()
        self._lines: dict[str, str] = {}

    def say(self, part: str, line: str | None) -> None:
        """Set the line of *part*; None removes it."""
        with self._lock:
            self._lines.pop(part, None)
            if line is not None:
                self._lines[part] = line[:1000]

    def text(self) -> str:
        """All lines, newest first."""
        with self._lock:
            return "; ".join(reversed(self._lines.values()))


@dataclass(slots=True)
class SidecarContext:
    """The surroundings of one sidecar.

    Attributes:
        spool: Folder shared with the wrapper.
        run: The run's folder (:class:`~envscaler_airflow.store.run.Run`).
        who: Node, attempt, generation.
        layout: The paths of this node.
        memory: State that survives a kill of the sidecar.
        monotonic: Clock for ages; never the wall clock.
        ending: Set when the sidecar must end.
        messages: Human-readable lines for the status.
        uid: Uid of the pod or node process; "" where the backend gives none; then the sidecar creates one for
            the folder.
        address: ``host:port`` at which the other nodes reach this one; None where they do not use it.
        rendezvous: Rendezvous address of node 0, from the status in which it named its checkpoint.
        patience_s: Longest time that the set-up waits for a store that does not answer; for a transfer, the
            time since its last complete file. Chosen: a failover of a region's object store takes minutes; a
            longer wait costs more than a restart.
    """

    spool: Spool
    run: Store
    who: AttemptNode
    layout: Layout
    memory: Memory
    monotonic: Callable[[], float] = time.monotonic
    ending: threading.Event = field(default_factory=threading.Event)
    messages: Messages = field(default_factory=Messages)
    uid: str = ""
    address: str | None = None
    rendezvous: str | None = None
    patience_s: float = 900.0
    _transfer: tuple[str, str, Moved] | None = None

    @contextmanager
    def transfer(self, activity: str, name: str) -> Iterator[Moved]:
        """Show in the status how many bytes the block has moved; *activity* is the verb for *name*.

        A node has one transfer at a time.
        """
        self._transfer = (activity, name, moved := Moved())
        try:
            yield moved
        finally:
            self._transfer = None

    def transferring(self) -> Transfer | None:
        """The current transfer; None without one, or while its size is unknown."""
        current = self._transfer  # read once: another thread ends the transfer
        if current is None:
            return None
        activity, name, moved = current
        return None if not moved.total else Transfer(activity, name, moved.done, moved.total)

    def ended(self) -> Ended | None:
        """How the command ended, as the wrapper reports; None while it runs or when that cannot be read."""
        try:
            status = self.spool.wrapper_status()
        except ProtocolError:
            return None  # the main loop reports it
        return status.ended if status else None

    def has_ended(self) -> bool:
        """True when the wrapper has reported that the command ended."""
        return self.ended() is not None

    def newest_claim(self, node: int, *, known: int = 1) -> int:
        """Number of the valid claim to a node of the attempt; see :func:`~.claims.newest_claim`."""
        who = self.who
        return newest_claim(self.run, generation=who.generation, attempt=who.attempt, node=node, known=known)

    def between(self) -> None:
        """Check, between two files of a transfer, whether to continue.

        Raises:
            WorkInterruptedError: The sidecar must end.
        """
        if self.ending.is_set():
            raise WorkInterruptedError("the sidecar was asked to stop")

    def wanted(self) -> None:
        """Check, between two files of the set-up, whether to continue.

        Raises:
            WorkInterruptedError: The sidecar must end.
            SetupCancelledError: The owner stopped the attempt before it began.
        """
        self.between()
        control = self.spool.current_control()
        if control is not None and control.action in ("drain", "stop"):
            raise SetupCancelledError(f"asked to {control.action} before the start: {control.reason}")

    def remember_places(self) -> None:
        """Record the real folders of outputs and checkpoints; before the start, no one can add a link."""
        paths = [*self.layout.outputs.values(), self.layout.checkpoint_path]
        paths += [mount.path for mount in self.layout.mounts if mount.is_written_back]
        places = {path: str(Path(path).parent.resolve()) for path in paths if path is not None}
        self.memory.update(places=places)

    def place(self, path: Path) -> Place | None:
        """The folder that contained *path* before the start; None if not recorded."""
        was = self.memory.state.places.get(str(path))
        seen_as = self.layout.training_paths.get(str(path))
        return None if was is None else Place(Path(was), None if seen_as is None else Path(seen_as).parent)

    def check_place(self, path: Path) -> None:
        """Refuse a path whose folder has changed since the start.

        Raises:
            CheckpointError: The training put a link into the path; its target does not belong to the
                training.
        """
        was, now = self.memory.state.places.get(str(path)), str(path.parent.resolve())
        if was not in (None, now):
            raise CheckpointError(f"{path}: {path.parent} leads to {now}, and was {was} before the start")

    def patiently(self, call: Callable[[], _T], *, what: str, moved: Moved | None = None) -> _T:
        """Call until the store answers, with back-off, for at most ``patience_s``.

        Where *moved* counts what the calls transfer, each complete file restarts the wait: a long transfer
        survives an error and continues where it was.

        Raises:
            StoreError: It did not answer in time.
            WorkInterruptedError: The sidecar must end.
        """
        patience = _Patience(self, moved)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreError),
            wait=tenacity.wait_exponential_jitter(initial=1, max=30),
            stop=lambda _state: patience.is_over() or self.ending.is_set(),
            sleep=tenacity.sleep_using_event(self.ending),
            before_sleep=lambda state: self.messages.say(
                "store", f"{what}: {state.outcome and state.outcome.exception()}; retrying"
            ),
            reraise=True,
        )
        try:
            result = retrying(call)
        finally:
            self.between()
        self.messages.say("store", None)
        return result


class _Patience:
    """Is over ``patience_s`` after the last complete file was moved, by the sidecar's own clock."""

    def __init__(self, context: SidecarContext, moved: Moved | None) -> None:
        self._context, self._moved = context, moved
        self._since, self._files = context.monotonic(), 0 if moved is None else moved.files

    def is_over(self) -> bool:
        """True when no further try should follow; called after each failed one."""
        now = self._context.monotonic()
        if self._moved is not None and self._moved.files > self._files:
            self._since, self._files = now, self._moved.files
        return now - self._since >= self._context.patience_s


AWAY_S = 60.0
"""How long a drill keeps the store from the sidecar, seconds. Chosen: it misses four statuses and four
readings of the lease, and no owner replaces an attempt for that."""


class InterruptibleStore:
    """A store in which :meth:`go_away` makes every call fail for :data:`AWAY_S`, as without an answer.

    For `envscaler drill --faults store-away`, which sends the sidecar SIGUSR1. It ends by itself.
    """

    def __init__(self, store: Store, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Pass every call to *store*."""
        self._store, self._monotonic = store, monotonic
        self._back_at = -float("inf")

    def go_away(self) -> None:
        """Refuse calls from now on; safe in a signal handler."""
        self._back_at = self._monotonic() + AWAY_S

    def __getattr__(self, name: str) -> Any:
        """The store's own attribute *name*.

        Raises:
            StoreError: The store is away.
        """
        if name not in ("url", "uri", "at_once") and self._monotonic() < self._back_at:
            raise StoreError(f"{self._store.url}: away, for a drill", transient=True)
        return getattr(self._store, name)


VARIABLE = "ENVSCALER_STORE_KEYS"
"""Names the folder with one file per variable that the store's client reads, like a mounted Secret."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def load_store_keys() -> None:
    """Set the files of that folder as variables of this process only, if a folder is named.

    A process started later inherits them only if it is given ``os.environ``.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    for path in Path(folder).iterdir():
        if _NAME.match(path.name) and path.is_file():
            os.environ[path.name] = path.read_text(encoding="utf-8")
