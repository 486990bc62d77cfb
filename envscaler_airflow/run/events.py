"""Events: what changes a run's state, numbered, append-only."""

from __future__ import annotations

import json
from dataclasses import dataclass

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run.event_bodies import EventBody, read_body

MAX_EVENT_BYTES = 1 << 18
"""Largest event written or read, bytes. Chosen: 100 last lines of 2 KiB and a plan fit."""

MOST = 2**53
"""Numbers and times below this are believed. Source: beyond it JSON readers skip whole numbers."""


@dataclass(frozen=True, slots=True)
class Actor(Record):
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


@dataclass(frozen=True, slots=True)
class Event:
    """One numbered fact.

    Attributes:
        number: From 1, without gaps; the file's name, and the only order of events.
        body: What it says; its class is the type of the event.
        writer: uuid of the writing process, by which it recognizes its own events.
        at: When, by the store's clock, seconds since the epoch: its date as the writer knew it, and never
            later than the file's date in the store. A copied store gives its files new times. Never an order.
        actor: On whose behalf; None for requests by users and sensors.
    """

    number: int
    body: EventBody
    writer: str = ""
    at: float = 0.0
    actor: Actor | None = None

    @property
    def type(self) -> str:
        """Return the type as the JSON has it."""
        return self.body.type

    def to_json(self) -> bytes:
        """Compact UTF-8 JSON.

        Raises:
            ProtocolError: Larger than :data:`MAX_EVENT_BYTES`, not JSON, or with a field out of bounds.
        """
        fields = self.body.to_dict()
        whole = {
            "schema": SCHEMA,
            "number": self.number,
            "type": fields.pop("type"),
            "writer": self.writer,
            "at": self.at,
            "actor": self.actor.to_dict() if self.actor else None,
            "body": fields,
        }
        try:
            text = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
            read_body(self.type, fields)
        except (TypeError, ValueError) as err:
            raise ProtocolError(f"event {self.number} ({self.type}): {err}") from err
        if len(text) > MAX_EVENT_BYTES:
            raise ProtocolError(
                f"event {self.number} ({self.type}): {len(text)} bytes, at most {MAX_EVENT_BYTES} are written"
            )
        return text

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Event:
        """Read an event of this major version; unknown types are kept, unknown fields are ignored.

        Raises:
            ProtocolError: Too large, not JSON, another major version, or a field of the wrong type.
        """
        whole = read_object(text, where=where, max_bytes=MAX_EVENT_BYTES)
        body, actor, kind = whole.get("body", {}), whole.get("actor"), whole.get("type")
        if not isinstance(body, dict) or not isinstance(kind, str):
            raise ProtocolError(f"{where}: an event needs a type and an object as body")
        number, at = whole.get("number"), whole.get("at", 0.0)
        if type(number) is not int or not 0 < number < MOST:
            raise ProtocolError(f"{where}: number: got {number!r:.80}, expected a whole number from 1 on")
        if type(at) not in (int, float) or not 0 <= at < MOST:
            raise ProtocolError(f"{where}: at: got {at!r:.80}, expected seconds since the epoch")
        try:
            by = None if actor is None else Actor.from_dict(actor)
            return cls(number, read_body(kind, body), str(whole.get("writer", "")), float(at), by)
        except ValueError as err:
            raise ProtocolError(f"{where}: {err}") from err
