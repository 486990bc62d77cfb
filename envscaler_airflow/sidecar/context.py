"""What every part of the sidecar is given: where it is, whom it serves, and how to wait."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tenacity

from envscaler_agent.protocol import Ended, Transfer
from envscaler_airflow.errors import CheckpointError, EnvScalerError, ProtocolError, StoreError
from envscaler_airflow.sidecar.spool_state import Layout, Memory, Spool, Who
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.root import Place
from envscaler_airflow.store.transfer_progress import Moved

_T = TypeVar("_T")


class WorkInterruptedError(EnvScalerError):
    """The sidecar was told to end (SIGTERM): the next one goes on here."""


class UnheededError(EnvScalerError):
    """Nobody owns the attempt, and the wrapper did not end it though it was told to, and given time."""


class SetupCancelledError(EnvScalerError):
    """The attempt was asked to go before it began."""


class Messages:
    """One line for people from each part; the newest is shown first."""

    def __init__(self) -> None:
        """Begin with nothing to say."""
        self._lock = threading.Lock()
        self._lines: dict[str, str] = {}

    def say(self, part: str, line: str | None) -> None:
        """Set, or with None take back, what *part* has to say."""
        with self._lock:
            self._lines.pop(part, None)
            if line is not None:
                self._lines[part] = line[:1000]

    def text(self) -> str:
        """All lines, newest first."""
        with self._lock:
            return "; ".join(reversed(self._lines.values()))


@dataclass(slots=True)
class Site:
    """The surroundings of one sidecar.

    Attributes:
        spool: Folder shared with the wrapper.
        store: Store of the run (``for_run``).
        who: Node, attempt, generation.
        layout: Where things lie on this node.
        memory: What survives a kill of the sidecar.
        monotonic: Clock for ages; never the wall clock.
        ending: Set when the sidecar must end.
        messages: What people are told in the status.
        uid: Of the pod or node process; "" where the backend gives none, then one is made for the folder.
        address: ``host:port`` at which the other nodes reach this one; None where they do not ask it.
        rendezvous: Node 0's, as its status gave it together with its choice of the checkpoint.
        patience_s: Longest time that the set-up waits for a store that does not answer, of a transfer since
            its last whole file. Chosen: a failover of a region's object store takes minutes; a longer one
            costs more than a restart.
    """

    spool: Spool
    store: Store
    who: Who
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
    def transfer(self, doing: str, name: str) -> Iterator[Moved]:
        """Show in the status how far the block is with *doing* something to *name*, by the bytes it counts.

        One at a time: all transfers of a node follow each other.
        """
        self._transfer = (doing, name, moved := Moved())
        try:
            yield moved
        finally:
            self._transfer = None

    def transferring(self) -> Transfer | None:
        """What is moved now; None for nothing, or while it is not known how much it is."""
        current = self._transfer  # read once: another thread ends the transfer
        if current is None:
            return None
        doing, name, moved = current
        return None if not moved.total else Transfer(doing, name, moved.done, moved.total)

    def ended(self) -> Ended | None:
        """How the command ended, as the wrapper says; None while it runs or when that cannot be read."""
        try:
            status = self.spool.wrapper_status()
        except ProtocolError:
            return None  # the main loop says so
        return status.ended if status else None

    def has_ended(self) -> bool:
        """True when the wrapper said that the command has ended."""
        return self.ended() is not None

    def between(self) -> None:
        """Run between two files of a transfer.

        Raises:
            WorkInterruptedError: The sidecar must end.
        """
        if self.ending.is_set():
            raise WorkInterruptedError("the sidecar was asked to end")

    def wanted(self) -> None:
        """Run between two files of the set-up.

        Raises:
            WorkInterruptedError: The sidecar must end.
            SetupCancelledError: The attempt was asked to go before it began.
        """
        self.between()
        control = self.spool.current_control()
        if control is not None and control.action in ("leave", "stop"):
            raise SetupCancelledError(f"asked to {control.action} before the start: {control.reason}")

    def remember_places(self) -> None:
        """Note where outputs and checkpoints really are; before the start nobody could lay a link."""
        paths = [*self.layout.outputs.values(), self.layout.checkpoint_path]
        paths += [mount.path for mount in self.layout.mounts if mount.is_written_back]
        places = {path: str(Path(path).parent.resolve()) for path in paths if path is not None}
        self.memory.update(places=places)

    def place(self, path: Path) -> Place | None:
        """The folder that held *path* before the start; None before that."""
        was = self.memory.state.places.get(str(path))
        seen_as = self.layout.seen_as.get(str(path))
        return None if was is None else Place(Path(was), None if seen_as is None else Path(seen_as).parent)

    def check_place(self, path: Path) -> None:
        """Refuse a path whose folder is another one than before the start.

        Raises:
            CheckpointError: The training laid a link on the way: what it leads to is not the training's.
        """
        was, now = self.memory.state.places.get(str(path)), str(path.parent.resolve())
        if was not in (None, now):
            raise CheckpointError(f"{path}: {path.parent} leads to {now}, and was {was} before the start")

    def patiently(self, call: Callable[[], _T], *, what: str, moved: Moved | None = None) -> _T:
        """Call until the store answers, with back-off, for at most ``patience_s``.

        Where *moved* counts what the calls transfer, each whole file begins the wait anew: a long transfer
        outlives one error, and goes on where it was.

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
    """Over once ``patience_s`` have passed, by the site's clock, since a whole file was moved."""

    def __init__(self, site: Site, moved: Moved | None) -> None:
        self._site, self._moved = site, moved
        self._since, self._files = site.monotonic(), 0 if moved is None else moved.files

    def is_over(self) -> bool:
        """Asked after each failed try."""
        now = self._site.monotonic()
        if self._moved is not None and self._moved.files > self._files:
            self._since, self._files = now, self._moved.files
        return now - self._since >= self._site.patience_s


class Backoff:
    """When to try again something that failed: 2 s, doubled up to 60 s (chosen); at once when it worked."""

    def __init__(self, monotonic: Callable[[], float], *, first_s: float = 2.0, most_s: float = 60.0) -> None:
        """Be ready at once."""
        self._monotonic = monotonic
        self._first_s, self._most_s = first_s, most_s
        self._wait_s = first_s
        self._not_before = -float("inf")

    @property
    def is_ready(self) -> bool:
        """True when it may be tried."""
        return self._monotonic() >= self._not_before

    def failed(self) -> None:
        """Wait longer than the last time."""
        self._not_before = self._monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._most_s)

    def worked(self) -> None:
        """Forget earlier failures."""
        self._wait_s = self._first_s
        self._not_before = -float("inf")


VARIABLE = "ENVSCALER_STORE_KEYS"
"""Names the folder: a file for each variable that the store's client reads, as a mounted Secret has them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def load_store_keys() -> None:
    """Set what lies in the folder as variables of this process alone, if one is named.

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
