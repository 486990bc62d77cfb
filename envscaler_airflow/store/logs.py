"""Read the output of an attempt's nodes from closed chunks in the store, and follow it without repeats."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from envscaler_agent import protocol
from envscaler_agent.messages import Message
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.store.lease import RENEW_EVERY_S, newest_claim
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store, read_message

MAX_CHUNK_BYTES = 1 << 20
"""Largest chunk read, bytes. Chosen: four times the largest that is written."""
CLAIM_CHUNKS = 10**9
"""Positions that a cursor reserves for the chunks of one claim. Chosen: one each 10 s for 300 years."""
LINE_BYTES = 4096
"""Longest line shown, bytes. Chosen: Airflow's log view wraps far below."""


TASK_LOG = "lease/log.json"
Cursor = tuple[int, int]
"""``(chunk, byte offset in it)`` of the next byte to show; chunks count from 1."""
BEGIN: Cursor = (1, 0)


@dataclass(frozen=True)
class TaskLog(Message):
    """What the task's log already shows. Cursors for 10,000 nodes fit into the largest message that is read.

    Attributes:
        shown: Position up to which the newest trigger, or an execution after it, showed the output of each
            node; keys are those of :func:`log_key`.
        kept: Position up to which an execution logged it.
        host: Machine of the trigger that wrote last; "" before the first write.
        event: Number of the newest event that an execution logged; 0 before the first.
    """

    shown: dict[str, Cursor] = field(default_factory=dict)
    kept: dict[str, Cursor] = field(default_factory=dict)
    host: str = ""
    event: int = 0

    def __post_init__(self) -> None:
        """Refuse a position that no chunk has."""
        for at in (*self.shown.values(), *self.kept.values()):
            if len(at) != 2 or at[0] < 1 or at[1] < 0:
                raise ValueError(f"got position {at}, expected a chunk from 1 on and an offset")


def log_key(attempt: tuple[int, int], node: int) -> str:
    """Name of one node of an attempt ``(generation, number)`` in :class:`TaskLog`."""
    return f"g{attempt[0]}-a{attempt[1]}-n{node}"


def read_task_log(run: Store) -> TaskLog:
    """Read the log positions of *run*; empty if absent or not parseable.

    A lost position only makes lines appear twice; the stage does not fail.

    Raises:
        StoreError: The store cannot be read.
    """
    try:
        return read_message(run, TASK_LOG, TaskLog) or TaskLog()
    except ProtocolError:
        return TaskLog()


def read_logs(
    run: Store,
    *,
    attempt: tuple[int, int],
    node: int,
    cursor: tuple[int, int] = (1, 0),
    budget: int = 1 << 18,
) -> tuple[bytes, tuple[int, int]]:
    """Return the output of *node* from *cursor* on, at most *budget* bytes, and the cursor after it.

    Reading stops at the first absent chunk: chunks are numbered without gaps from 1. If another pod has
    claimed the node since, its chunks follow.

    Args:
        run: The run's folder.
        attempt: ``(generation, attempt)``.
        node: Index of the node.
        cursor: ``(position, byte offset in it)`` of the first byte to return. Positions are the chunks of the
            first claim, from 1; those of claim 2 begin at :data:`CLAIM_CHUNKS` + 1.
        budget: Largest number of bytes to return, > 0.
    """
    position, offset = cursor
    parts: list[bytes] = []
    while budget > 0:
        before, chunk = divmod(position, CLAIM_CHUNKS)
        name = protocol.log_name(*attempt, node, chunk, before + 1)
        try:
            data = run.read(name, max_bytes=MAX_CHUNK_BYTES)
        except ProtocolError as err:  # the training side wrote it: skip what cannot be read and show the rest
            data = f"[chunk {chunk} of the log is left out: {err}]\n".encode()
        if data is None:
            if not _is_replaced(run, attempt, node, before + 1):
                break
            position, offset = (before + 1) * CLAIM_CHUNKS + 1, 0
            continue
        part = data[offset : offset + budget]
        parts.append(part)
        budget -= len(part)
        offset += len(part)
        if offset < len(data):
            break
        position, offset = position + 1, 0
    return b"".join(parts), (position, offset)


def _is_replaced(run: Store, attempt: tuple[int, int], node: int, claim: int) -> bool:
    """True when another pod has claimed the node since."""
    generation, number = attempt
    return newest_claim(run, generation=generation, attempt=number, node=node, known=claim) > claim


class Shown(NamedTuple):
    """Lines of one node, ready to be logged."""

    node: int
    lines: list[str]


class Tail:
    """Shows the training's output in the trigger's own log, and renews the lease.

    It begins where the execution before it ended, and continues over a restart of the triggerer. It
    advances the position in the store before it returns the lines. A triggerer that dies in between
    therefore shows no line twice, and the next execution writes all of them.
    """

    def __init__(
        self,
        run: Run,
        *,
        attempt: tuple[int, int],
        nodes: int,
        holder: str,
        monotonic: Callable[[], float],
    ) -> None:
        """Follow *attempt* of *run*; *holder* renews the lease."""
        self._run = run
        self._attempt = attempt
        self._nodes = nodes
        self._holder = holder
        self._monotonic = monotonic
        self._renewed: float | None = None

    def read(self, *, budget: int, ages: Mapping[str, float] | None = None) -> list[Shown]:
        """Return complete new lines, at most *budget* bytes over all nodes; renew the lease if it is due.

        Raises:
            StoreError: The store cannot be read or written; nothing was shown.
        """
        log, found = read_task_log(self._run), []
        shown = dict(log.shown)
        for node in range(self._nodes):
            key = log_key(self._attempt, node)
            shown_node, shown[key], used = read_lines(
                self._run,
                attempt=self._attempt,
                node=node,
                cursor=shown.get(key, BEGIN),
                budget=max(0, budget),
            )
            budget -= used
            found += [shown_node] if used else []
        if found:
            self._run.write(TASK_LOG, replace(log, shown=shown, host=platform.node()).to_json())
        if self._is_due():
            self._run.lease.renew(holder=self._holder, ages=ages)
            self._renewed = self._monotonic()
        return found

    def _is_due(self) -> bool:
        return self._renewed is None or self._monotonic() - self._renewed >= RENEW_EVERY_S


def read_lines(
    run: Run, *, attempt: tuple[int, int], node: int, cursor: Cursor, budget: int
) -> tuple[Shown, Cursor, int]:
    """Return complete lines of *node* from *cursor* on, the cursor after them, and their bytes.

    Raises:
        StoreError: The store cannot be read.
    """
    data, (chunk, offset) = read_logs(run, attempt=attempt, node=node, cursor=cursor, budget=budget)
    data, offset = _whole_lines(data, offset)
    if not data:
        return Shown(node, []), cursor, 0
    return Shown(node, _lines(data)), (chunk, offset), len(data)


def _whole_lines(data: bytes, offset: int) -> tuple[bytes, int]:
    """Return *data* without a last line that the budget cut, and that line's offset in its chunk."""
    end = data.rfind(b"\n") + 1
    cut = len(data) - end
    if offset == 0 or end == 0 or cut > offset:
        return data, offset  # the chunk's own end, or one line larger than the budget
    return data[:end], offset - cut


def _lines(data: bytes) -> list[str]:
    """Return lines as a terminal would show them: of a progress bar's overwrites, only the last."""
    rows = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [row.rstrip("\r").rpartition("\r")[2][:LINE_BYTES] for row in rows]


def labelled(shown: Shown, *, nodes: int) -> list[str]:
    """Return lines as they are logged: marked with the node if there are several."""
    mark = f"[node {shown.node}] " if nodes > 1 else ""
    return [mark + line for line in shown.lines]
