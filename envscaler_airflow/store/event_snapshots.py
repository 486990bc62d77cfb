"""Snapshots: the fold of a run's first events in one file. They only save time; the events decide."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from envscaler_agent.protocol import SCHEMA
from envscaler_airflow import __version__
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run import RunState


def pack(state: RunState, *, event: bytes) -> bytes:
    """Serialize *state*, whose last event is stored as *event*."""
    body = {
        "schema": SCHEMA,
        "fold": __version__,
        "number": state.number,
        "event_sha256": hashlib.sha256(event).hexdigest(),
        "state": state.to_dict(),
    }
    return json.dumps({**body, "sha256": _digest(body)}, separators=(",", ":")).encode()


def unpack(text: bytes, *, number: int, event: bytes) -> RunState:
    """Read what :meth:`pack` of this same version wrote for this run.

    Raises:
        ProtocolError: The snapshot is torn, changed, or of another number, run or version. Fold the events
            instead.
    """
    try:
        body = json.loads(text)
        said = body.pop("sha256")
        ours = {"schema": SCHEMA, "fold": __version__, "number": number}
        ours["event_sha256"] = hashlib.sha256(event).hexdigest()
        if said != _digest(body) or any(body.get(name) != value for name, value in ours.items()):
            raise ProtocolError(f"snapshot {number}: not of this run, version and number, or changed")
        state = RunState.from_dict(body["state"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ProtocolError(f"snapshot {number}: {err!r}") from err
    if state.number != number:
        raise ProtocolError(f"snapshot {number}: holds the state after event {state.number}")
    return state


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
