"""The body of each event as a class: built by its writer, checked field by field when it is read.

A field that is None is not written. The order of the fields is that of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen

from envscaler_agent.messages import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.planning.record import Record

Count = Annotated[int, Ge(0), Lt(2**53)]
"""Larger whole numbers are skipped by JSON readers."""
Ordinal = Annotated[int, Ge(1), Lt(2**53)]
Whole = Annotated[int, Gt(-(2**53)), Lt(2**53)]
Amount = Annotated[float, Ge(0), Le(1e15)]
"""Seconds, bytes and USD. Chosen: no run lasts or costs so much."""
Number = Annotated[float, Ge(-1e15), Le(1e15)]
Name = Annotated[str, MinLen(1)]
Billed = tuple[Count, Amount, Amount | None]
"""Node, start and end of one billed interval."""

ChangeKind = Literal["resize", "rescale"]
"""``resize``: other CPU and memory of the same nodes. ``rescale``: another number of the same nodes."""
Alignment = Literal["now", "step", "epoch"]


@dataclass(frozen=True, slots=True)
class Handle(Record):
    """Identifies a started attempt, for any process that can reach it.

    Attributes:
        backend: ``local``, ``kubernetes``, ``vm``.
        name: Unique name with the run, generation and attempt in it.
        details: The backend's own data as JSON (host, boot id, pid, start time; uid; instance ids).
    """

    backend: str
    name: Name
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeDrain(Record):
    """A node to remove, and why it was selected."""

    node: Count
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAttempt(Record):
    """What events about one attempt have in common."""

    generation: Ordinal
    attempt: Ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun(Record):
    """What events about the end of a run have in common; an unknown generation is the current one."""

    generation: Ordinal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration(Record):
    """A fresh start of the run."""

    type: Literal["generation"] = "generation"
    generation: Ordinal
    reason: str = ""
    spec_hash: str
    spec_source: str | None = None
    strategy: str | None = None
    restore_from: str | None = None
    budget_usd: Amount | None = None
    deadline_s: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOwner(Record):
    """Another try took the run over."""

    type: Literal["owner"] = "owner"
    reason: str = ""
    spec_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptIntended(OfAttempt):
    """An attempt will be started."""

    type: Literal["attempt-intended"] = "attempt-intended"
    allocation: Allocation
    reason: str = ""
    spec_hash: str = ""
    memory_bytes: Count | None = None
    vcpus: Amount | None = None
    checkpoint_every_s: Amount | None = None
    losses_per_hour: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(OfAttempt):
    """The backend has accepted it."""

    type: Literal["attempt-started"] = "attempt-started"
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopping(OfAttempt):
    """It is asked to save and stop; *stop_reason* is a name of the table of outcomes."""

    type: Literal["attempt-stopping"] = "attempt-stopping"
    stop_reason: str = "move"
    reason: str = ""
    align: Alignment = "step"
    grace_s: Amount = 30.0
    request: Ordinal | None = None
    target: Allocation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(OfAttempt):
    """Nothing of it runs any more: how it ended, what it saved, and what it cost.

    Attributes:
        failure: Why an attempt was not started: ``capacity``, ``placement``, ``spec`` or ``backend``.
        missing_nodes: Nodes for which no machine was available; *refused* names their offers.
        claim: Of the pod of node 0 that stored the outputs.
        earlier_pods_s: Seconds of training by earlier pods of node 0.
        repeated_steps: Steps that a later pod of node 0 repeated.
        usage: None: not known; empty: never billed. *usage_at*: the provider's time of the open intervals.
        usage_is_lower_bound: The usage is only what the statuses of the nodes prove.
    """

    type: Literal["attempt-ended"] = "attempt-ended"
    outcome: Name
    failure: str | None = None
    detail: str | None = None
    exit_code: Whole | None = None
    signal: Whole | None = None
    last_lines: tuple[str, ...] | None = None
    start_step: Count | None = None
    step: Count | None = None
    checkpoint: str | None = None
    checkpoint_step: Count | None = None
    missing_nodes: tuple[Count, ...] | None = None
    outputs: Mapping[str, str] | None = None
    claim: Count | None = None
    setup_s: Amount | None = None
    restore_s: Amount | None = None
    checkpoint_s: Amount | None = None
    checkpoints: Count | None = None
    restored_from: str | None = None
    rejected: tuple[str, ...] | None = None
    cpu_seconds: Amount | None = None
    elapsed_s: Amount | None = None
    first_step_s: Amount | None = None
    save_s: Amount | None = None
    total_steps: Count | None = None
    samples: Count | None = None
    repeated_samples: Count | None = None
    epoch: Count | None = None
    earlier_pods_s: Amount | None = None
    repeated_steps: Count | None = None
    usage_is_lower_bound: bool | None = None
    refused: tuple[str, ...] | None = None
    usage: tuple[Billed, ...] | None = None
    usage_at: Amount | None = None
    usd: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFailed(OfAttempt):
    """Its machines may still run, and are billed again."""

    type: Literal["release-failed"] = "release-failed"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReleased(OfAttempt):
    """Its machines are released; the bill, if it is more complete than at the end."""

    type: Literal["attempt-released"] = "attempt-released"
    usage: tuple[Billed, ...] | None = None
    usd: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(Record):
    """A sensor or a person asks for a move; one that cannot be read has only *fault*.

    Attributes:
        from_attempt: Generation and attempt that the numbers were taken from.
        check: The decision with all its inputs.
        forced: The policy is not asked.
        fault: Why the request cannot be read; never written.
    """

    type: Literal["move-requested"] = "move-requested"
    reason: str = ""
    numbers: Mapping[str, Any] | None = None
    check: Any = None
    forced: bool | None = None
    target: Allocation | None = None
    from_attempt: tuple[int, ...] | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """A user or the trigger requests a stop; *stop_reason*: ``timeout`` if the task's time is over.

    *ti_id* is the task instance whose end requests it; None if a person does.
    """

    type: Literal["stop-requested"] = "stop-requested"
    reason: str = ""
    by: str = ""
    ti_id: str | None = None
    stop_reason: str | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAccepted(OfAttempt):
    """A move is accepted, and the attempt asked to save and stop, in one event."""

    type: Literal["move-accepted"] = "move-accepted"
    stop_reason: str = "move"
    reason: str = ""
    align: Alignment = "step"
    grace_s: Amount = 30.0
    request: Ordinal
    numbers: Mapping[str, Any] | None = None
    target: Allocation | None = None
    nodes_to_drain: tuple[NodeDrain, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRefused(Record):
    """A move is refused."""

    type: Literal["move-refused"] = "move-refused"
    request: Ordinal
    reason: str = ""
    numbers: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed(Record):
    """What accepted moves that do not stop the attempt have in common."""

    request: Ordinal
    reason: str = ""
    numbers: Mapping[str, Any] | None = None
    target: Allocation
    nodes_to_drain: tuple[NodeDrain, ...] | None = None
    generation: Ordinal
    attempt: Ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDeferred(Agreed):
    """The next attempt gets the target."""

    type: Literal["move-deferred"] = "move-deferred"
    kind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeIntended(Agreed):
    """The attempt will be changed in place."""

    type: Literal["change-intended"] = "change-intended"
    kind: ChangeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(OfAttempt):
    """It was changed in place: what is new."""

    type: Literal["changed"] = "changed"
    kind: str = ""
    reason: str = ""
    target: Allocation | None = None
    handle: Handle | None = None
    vcpus: Amount | None = None
    memory_bytes: Count | None = None
    step: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeUndone(OfAttempt):
    """The change in place failed; the attempt keeps its allocation."""

    type: Literal["change-undone"] = "change-undone"
    kind: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded(OfRun):
    """The run succeeded."""

    type: Literal["succeeded"] = "succeeded"
    outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(OfRun):
    """The run failed; *failure* is a name of the table of outcomes."""

    type: Literal["failed"] = "failed"
    reason: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(OfRun):
    """The run was stopped."""

    type: Literal["stopped"] = "stopped"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered(OfRun):
    """The actor is the recipient of the result."""

    type: Literal["delivered"] = "delivered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(OfRun):
    """Airflow took the delivery to the actor: its task is a success."""

    type: Literal["accepted"] = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneIntended(Record):
    """The run is removed from the store: no later event counts, and no owner acts."""

    type: Literal["prune-intended"] = "prune-intended"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown(Record):
    """An event of a newer version: kept, and it changes nothing but what the owner dares to do."""

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as the newer version wrote it."""
        return {"type": self.type, **self.fields}


RequestBody = MoveRequested | StopRequested
AttemptBody = (
    AttemptIntended
    | AttemptStarted
    | AttemptStopping
    | AttemptEnded
    | ReleaseFailed
    | AttemptReleased
    | MoveAccepted
    | MoveDeferred
    | ChangeIntended
    | Changed
    | ChangeUndone
)
RunBody = (
    NewGeneration
    | NewOwner
    | MoveRefused
    | Succeeded
    | Failed
    | Stopped
    | Delivered
    | Accepted
    | PruneIntended
)
KnownBody = RequestBody | AttemptBody | RunBody
EventBody = KnownBody | Unknown

BODIES: Mapping[str, type[KnownBody]] = {
    kind.__dataclass_fields__["type"].default: kind for kind in get_args(KnownBody)
}
"""Every class by the type in its JSON."""


def read_body(kind: str, fields: Mapping[str, Any]) -> EventBody:
    """Return the body of an event of type *kind*; fields that only a newer version knows are ignored.

    Anyone can write a request: one that cannot be read has its fault, for the owner to refuse it.

    Raises:
        ValueError: Names the first field that is missing, of another type or out of bounds.
    """
    known = BODIES.get(kind)
    if known is None:
        return Unknown(kind, fields)
    try:
        return known.from_dict({**fields, "type": kind})
    except ValueError as err:
        if known is MoveRequested or known is StopRequested:
            return known(fault=str(err))
        raise ValueError(f"{kind}: {err}") from err


MAX_EVENT_BYTES = 1 << 18
"""Largest event written or read, bytes. Chosen: 100 last lines of 2 KiB and a plan fit."""

MOST = 2**53
"""Numbers and times below this are believed. Source: beyond it JSON readers skip whole numbers."""


SHELL = "shell"
"""Life of every owner outside Airflow."""


@dataclass(frozen=True, slots=True)
class Actor(Record):
    """Who wrote an event: one try of the stage's task, or a shell.

    Attributes:
        ti_id: Airflow's task instance id, a UUIDv7: the greater text is the later one. A clear creates a
            new one, usually a retry too; a shell outside Airflow uses its own uuid.
        try_number: Airflow's try number, from 1. A try is ``(ti_id, try_number)``.
        max_tries: Airflow's ``max_tries``; a clear of the task sets it, a retry does not.
        life: uuid of the DAG run that the try belongs to; None if it cannot be read. A DAG run that was
            deleted and recreated under the same name has another one. :data:`SHELL` outside Airflow.
    """

    ti_id: str
    try_number: int = 1
    max_tries: int = 0
    life: str | None = None

    @property
    def is_shell(self) -> bool:
        """Return True for a shell: each start counts as a clear, except of a run that has succeeded."""
        return self.life == SHELL

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
