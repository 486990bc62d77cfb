"""A store with scripted failures: it refuses, loses the answer, or is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeVar

from envscaler_airflow.errors import StoreError
from envscaler_airflow.store.keys import MAX_BYTES
from envscaler_airflow.store.run_store import Store, StoreView

FaultKind = Literal["refuse", "lose-answer", "delay"]
"""``refuse``: raises without effect. ``lose-answer``: acts, then raises. ``delay``: waits, then acts."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Fault:
    """One scripted fault.

    Attributes:
        kind: See :data:`FaultKind`.
        method: Name of the store's method; ``*`` for all.
        name: Glob of the names that it applies to.
        times: Number of calls that it affects; None: no limit.
        delay_s: Seconds, for ``delay``.
        error: The exception, for the other kinds.
        struck: Number of calls affected so far.
    """

    kind: FaultKind
    method: str
    name: str
    times: int | None
    delay_s: float
    error: Exception
    struck: int = field(default=0, init=False)

    def strikes(self, method: str, name: str) -> bool:
        """Count the call and return True if it matches and the fault is not used up."""
        is_left = self.times is None or self.struck < self.times
        if not (is_left and self.method in ("*", method) and fnmatchcase(name, self.name)):
            return False
        self.struck += 1
        return True


class FaultyStore(StoreView):
    """Wraps a store; every call passes through the faults in the order in which they were added.

    ``now`` and ``uri`` never fail.
    """

    def __init__(self, store: Store, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Pass every call to *store*; delays go to *sleep*."""
        super().__init__(store, "")
        self._sleep = sleep
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, str]] = []

    def add(
        self,
        kind: FaultKind,
        method: str,
        name: str = "*",
        *,
        times: int | None = 1,
        delay_s: float = 0.0,
        error: Exception | None = None,
    ) -> Fault:
        """Script a fault of *method* on names that match the glob *name*, for the next *times* calls."""
        raised = error or StoreError(f"{method} {name}: scripted fault", transient=True)
        fault = Fault(kind, method, name, times, delay_s, raised)
        self.faults.append(fault)
        return fault

    def read(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
        """See :meth:`Store.read`."""
        return self._pass("read", name, lambda: self.store.read(name, max_bytes=max_bytes))

    def read_dated(self, name: str, *, max_bytes: int = MAX_BYTES) -> tuple[bytes, float | None] | None:
        """See :meth:`Store.read_dated`; for faults it counts as a ``read``."""
        return self._pass("read", name, lambda: self.store.read_dated(name, max_bytes=max_bytes))

    def write(self, name: str, data: bytes) -> None:
        """See :meth:`Store.write`."""
        self._pass("write", name, lambda: self.store.write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Store.create`."""
        return self._pass("create", name, lambda: self.store.create(name, data))

    def delete(self, name: str) -> None:
        """See :meth:`Store.delete`."""
        self._pass("delete", name, lambda: self.store.delete(name))

    def delete_tree(self, prefix: str) -> None:
        """See :meth:`Store.delete_tree`."""
        self._pass("delete_tree", prefix, lambda: self.store.delete_tree(prefix))

    def names(self, prefix: str) -> list[str]:
        """See :meth:`Store.names`."""
        return self._pass("names", prefix, lambda: self.store.names(prefix))

    def children(self, prefix: str) -> list[str]:
        """See :meth:`Store.children`."""
        return self._pass("children", prefix, lambda: self.store.children(prefix))

    def size(self, name: str) -> int | None:
        """See :meth:`Store.size`."""
        return self._pass("size", name, lambda: self.store.size(name))

    def sizes(self, prefix: str) -> dict[str, int]:
        """See :meth:`Store.sizes`."""
        return self._pass("sizes", prefix, lambda: self.store.sizes(prefix))

    def put_file(self, name: str, source: Path | BinaryIO) -> None:
        """See :meth:`Store.put_file`."""
        self._pass("put_file", name, lambda: self.store.put_file(name, source))

    def get_file(self, name: str, target: Path | BinaryIO) -> None:
        """See :meth:`Store.get_file`."""
        self._pass("get_file", name, lambda: self.store.get_file(name, target))

    def _pass(self, method: str, name: str, act: Callable[[], _T]) -> _T:
        self.calls.append((method, name))
        struck = [fault for fault in self.faults if fault.strikes(method, name)]
        for fault in struck:
            if fault.kind == "delay":
                self._sleep(fault.delay_s)
            elif fault.kind == "refuse":
                raise fault.error
        answer = act()
        for fault in struck:
            if fault.kind == "lose-answer":
                raise fault.error
        return answer


if TYPE_CHECKING:
    _conforms: Callable[[Store], Store] = FaultyStore
