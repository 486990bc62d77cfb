"""Events: what changes a run's state, numbered, append-only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError

MAX_EVENT_BYTES = 1 << 18
"""Largest event written or read, bytes. Chosen: 100 last lines of 2 KiB and a plan fit."""

MOST = 2**53
"""Numbers and times below this are believed. Source: beyond it JSON readers skip whole numbers."""

EVENT_TYPES = frozenset(
    {
        "generation",  # a fresh start of the run: generation, reason, spec_hash, restore_from, budget_usd
        "owner",  # another try took the run over: reason, spec_hash
        "attempt-intended",  # generation, attempt, allocation, reason, spec_hash, memory_bytes,
        # vcpus, checkpoint_every_s, losses_per_hour
        "attempt-started",  # generation, attempt, handle
        "attempt-stopping",  # generation, attempt, why, grace_s, align, request, target
        "attempt-ended",  # generation, attempt, outcome, failure, detail, step, checkpoint, usage, usd, ...
        "release-failed",  # generation, attempt, detail: its machines may still run, and are billed again
        "attempt-released",  # generation, attempt, usage, usd: from then on its machines are released
        "move-requested",  # target, reason, numbers, from_attempt
        "move-accepted",  # request, reason, numbers, leaving, and all of attempt-stopping (why is "move")
        "move-refused",  # request, reason
        "move-deferred",  # request, reason, numbers, generation, attempt, target: for the next start
        "change-intended",  # request, reason, numbers, generation, attempt, kind, target, leaving
        "changed",  # generation, attempt, kind, target, handle, step
        "change-undone",  # generation, attempt, kind, reason
        "stop-requested",  # reason, by, why: "stop" or "timeout"
        "succeeded",  # generation, outputs
        "failed",  # generation, reason, failure
        "stopped",  # generation, reason
        "delivered",  # generation; the actor is the recipient
        "accepted",  # generation; Airflow took the delivery to the actor: its task is a success
    }
)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who wrote an event: one try of the stage's task, or a shell.

    Attributes:
        ti_id: Airflow's task instance id, a UUIDv7: the greater text is the later one. A clear creates a
            new one, usually a retry too; a shell outside Airflow uses its own uuid.
        try_number: Airflow's try number, from 1. A try is ``(ti_id, try_number)``.
        max_tries: Airflow's ``max_tries``; a clear of the task sets it, a retry does not.
        life: uuid of the DAG run that the try belongs to; None if it cannot be read. A DAG run that was
            deleted and recreated under the same name has another one.
    """

    ti_id: str
    try_number: int = 1
    max_tries: int = 0
    life: str | None = None

    def is_try_of(self, other: Actor | None) -> bool:
        """Return True if both are the same try."""
        mine = (self.ti_id, self.try_number)
        return other is not None and mine == (other.ti_id, other.try_number)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without unknown fields."""
        body = {"ti_id": self.ti_id, "try_number": self.try_number, "max_tries": self.max_tries}
        return body if self.life is None else {**body, "life": self.life}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any], *, where: str = "actor") -> Actor:
        """Read what :meth:`to_dict` wrote; *where* prefixes the error message.

        Raises:
            ProtocolError: A field is missing or of the wrong type.
        """
        try:
            life = body.get("life")
            return cls(
                str(body["ti_id"]),
                int(body["try_number"]),
                int(body["max_tries"]),
                None if life is None else str(life),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as err:
            raise ProtocolError(
                f"{where}: got {body!r:.80}, expected ti_id, try_number, max_tries and, if known, life"
            ) from err


@dataclass(frozen=True, slots=True)
class Event:
    """One numbered fact.

    Attributes:
        number: From 1, without gaps; the file's name, and the only order of events.
        type: One of :data:`EVENT_TYPES`; others are kept and change nothing.
        body: JSON.
        writer: uuid of the writing process, by which it recognizes its own events.
        at: When, by the store's clock, seconds since the epoch: its date as the writer knew it, and never
            later than the file's date in the store. A copied store gives its files new times. Never an order.
        actor: On whose behalf; None for requests by users and sensors.
    """

    number: int
    type: str
    body: Mapping[str, Any] = field(default_factory=dict)
    writer: str = ""
    at: float = 0.0
    actor: Actor | None = None

    def to_json(self) -> bytes:
        """Compact UTF-8 JSON.

        Raises:
            ProtocolError: Larger than :data:`MAX_EVENT_BYTES`, or not JSON.
        """
        _check_body(self.type, self.body, where=f"event {self.number}")
        actor = self.actor.to_dict() if self.actor else None
        whole = {
            "schema": SCHEMA,
            "number": self.number,
            "type": self.type,
            "writer": self.writer,
            "at": self.at,
            "actor": actor,
            "body": dict(self.body),
        }
        try:
            text = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as err:
            raise ProtocolError(f"event {self.number} ({self.type}): {err}") from err
        if len(text) > MAX_EVENT_BYTES:
            raise ProtocolError(
                f"event {self.number} ({self.type}): {len(text)} bytes, at most {MAX_EVENT_BYTES} are written"
            )
        return text

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Event:
        """Read an event of this major version; unknown fields and types are kept and change nothing.

        Raises:
            ProtocolError: Too large, not JSON, another major version, or a field of the wrong type.
        """
        return cls._from_whole(read_object(text, where=where, max_bytes=MAX_EVENT_BYTES), where)

    @classmethod
    def _from_whole(cls, whole: Mapping[str, Any], where: str) -> Event:
        body, actor = whole.get("body", {}), whole.get("actor")
        if not isinstance(body, dict) or not isinstance(whole.get("type"), str):
            raise ProtocolError(f"{where}: an event needs a type and an object as body")
        number, at = whole.get("number"), whole.get("at", 0.0)
        if type(number) is not int or not 0 < number < MOST:
            raise ProtocolError(f"{where}: number: got {number!r:.80}, expected a whole number from 1 on")
        if type(at) not in (int, float) or not 0 <= at < MOST:
            raise ProtocolError(f"{where}: at: got {at!r:.80}, expected seconds since the epoch")
        _check_body(whole["type"], body, where=where)
        writer = str(whole.get("writer", ""))
        by = Actor.from_dict(actor, where=f"{where}: actor") if actor is not None else None
        return cls(number, whole["type"], body, writer, float(at), by)


def _check_body(event_type: str, body: Mapping[str, Any], *, where: str) -> None:
    """Raise ProtocolError if a field of *body* has another type; pydantic loads with the first event."""
    from envscaler_airflow.run.event_bodies import check_body  # noqa: PLC0415  (see above)

    check_body(event_type, body, where=where)
