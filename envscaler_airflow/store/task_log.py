"""How far the task's log in Airflow shows a run: ``lease/log.json``, written by trigger and execution.

Airflow truncates a trigger's log at each deferral; it appends to the log of an
execution. So an execution that defers again first writes what the trigger before it showed, and the next
trigger begins where the execution ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.protocol import SCHEMA, read_object
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.names import join

NAME = "lease/log.json"
MAX_BYTES = 1 << 20
"""Largest file read, bytes. Chosen: cursors for 10,000 nodes fit."""

Cursor = tuple[int, int]
"""``(chunk, byte offset in it)`` of the next byte to show; chunks count from 1."""
BEGIN: Cursor = (1, 0)


@dataclass(frozen=True, slots=True)
class TaskLog:
    """What the task's log shows already.

    Attributes:
        shown: How far the newest trigger, or an execution after it, shows what each node printed; keys are
            those of :func:`log_key`.
        kept: How far an execution's log has it.
        host: Machine of the trigger that wrote last; "" before one did.
        event: Number of the newest event that an execution described; 0 before.
    """

    shown: Mapping[str, Cursor] = field(default_factory=dict)
    kept: Mapping[str, Cursor] = field(default_factory=dict)
    host: str = ""
    event: int = 0


def log_key(attempt: tuple[int, int], node: int) -> str:
    """Name of one node of an attempt ``(generation, number)`` in :class:`TaskLog`."""
    return f"g{attempt[0]}-a{attempt[1]}-n{node}"


def read_task_log(store: Store, prefix: str) -> TaskLog:
    """What the run at *prefix* has; an empty one where none was written or what is there is not readable.

    A position that is lost costs lines that appear twice, never a stage.

    Raises:
        StoreError: The store cannot be read.
    """
    name = join(prefix, NAME)
    try:
        text = store.read(name, max_bytes=MAX_BYTES)
        if text is None:
            return TaskLog()
        body = read_object(text, where=store.uri(name), max_bytes=MAX_BYTES)
        return TaskLog(
            _cursors(body.get("shown")),
            _cursors(body.get("kept")),
            str(body.get("host", "")),
            int(body.get("event", 0)),
        )
    except (ProtocolError, ValueError, TypeError, OverflowError, IndexError, AttributeError):
        return TaskLog()


def write_task_log(store: Store, prefix: str, log: TaskLog) -> None:
    """Replace what was there. Raises StoreError."""
    body = {
        "schema": SCHEMA,
        "shown": dict(log.shown),
        "kept": dict(log.kept),
        "host": log.host,
        "event": log.event,
    }
    store.write(join(prefix, NAME), json.dumps(body, separators=(",", ":")).encode())


def _cursors(body: Mapping[str, list[int]] | None) -> dict[str, Cursor]:
    found = {str(key): (int(at[0]), int(at[1])) for key, at in (body or {}).items()}
    return {key: at for key, at in found.items() if at[0] >= 1 and at[1] >= 0}
