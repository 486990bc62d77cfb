"""Show what the training prints in the task's log, without repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store import Store, read_lease, renew_lease
from envscaler_airflow.store.lease import RENEW_EVERY_S
from envscaler_airflow.store.logs import read_logs

LINE_BYTES = 4096
"""Longest line shown, bytes. Chosen: Airflow's log view wraps far below."""


class Shown(NamedTuple):
    """Lines of one node, ready to be logged."""

    node: int
    lines: list[str]


class Tail:
    """Reads the training's log from where the lease says that it was shown, and renews the lease.

    The cursor is advanced in the store before the lines are handed out: a triggerer that dies in
    between loses them from the task's log (they stay in the store) and never shows them twice.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        attempt: tuple[int, int],
        nodes: int,
        holder: str,
        monotonic: Callable[[], float],
    ) -> None:
        """Follow *attempt* of the run at *prefix*; *holder* is who renews the lease."""
        self._store = store
        self._prefix = prefix
        self._attempt = attempt
        self._nodes = nodes
        self._holder = holder
        self._monotonic = monotonic
        self._renewed: float | None = None

    def read(self, *, budget: int, ages: Mapping[str, float] | None = None) -> list[Shown]:
        """Whole new lines, at most *budget* bytes over all nodes; renews the lease, with *ages*, when due.

        Raises:
            StoreError: The store cannot be read or written; nothing was shown.
        """
        cursor, found = self._cursor(), []
        after = dict(cursor)
        for node in range(self._nodes):
            start = cursor.get(str(node), [1, 0])
            data, (chunk, offset) = read_logs(
                self._store,
                self._prefix,
                attempt=self._attempt,
                node=node,
                cursor=(start[0], start[1]),
                budget=max(0, budget),
            )
            data, offset = _whole_lines(data, offset)
            if data:
                budget -= len(data)
                after[str(node)] = [chunk, offset]
                found.append(Shown(node, _lines(data)))
        if found or self._is_due():
            renew_lease(self._store, self._prefix, holder=self._holder, log_cursor=after, ages=ages)
            self._renewed = self._monotonic()
        return found

    def _cursor(self) -> dict[str, list[int]]:
        try:
            lease = read_lease(self._store, self._prefix)
        except ProtocolError:
            return {}
        return dict(lease.log_cursor) if lease else {}

    def _is_due(self) -> bool:
        return self._renewed is None or self._monotonic() - self._renewed >= RENEW_EVERY_S


def _whole_lines(data: bytes, offset: int) -> tuple[bytes, int]:
    """*data* without a last line that the budget cut, and the offset in its chunk where that begins."""
    end = data.rfind(b"\n") + 1
    cut = len(data) - end
    if offset == 0 or end == 0 or cut > offset:
        return data, offset  # the chunk's own end, or one line larger than the budget
    return data[:end], offset - cut


def _lines(data: bytes) -> list[str]:
    """Lines as a terminal would show them: of what a progress bar wrote over itself, the last."""
    rows = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [row.rstrip("\r").rpartition("\r")[2][:LINE_BYTES] for row in rows]


def labelled(shown: Shown, *, nodes: int) -> list[str]:
    """Lines as they are logged: marked with the node when there are several."""
    mark = f"[node {shown.node}] " if nodes > 1 else ""
    return [mark + line for line in shown.lines]
