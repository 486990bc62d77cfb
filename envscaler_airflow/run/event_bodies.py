"""The body of each owner event, typed and bounded: a field of another type never reaches the fold.

Anyone can write requests, so they are not here: the owner checks them, and refuses what it cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envscaler_airflow.errors import ProtocolError

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Larger whole numbers are skipped by JSON readers."""
Ordinal = Annotated[int, Field(ge=1, lt=2**53)]
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""Seconds, bytes and USD. Chosen: no run lasts or costs so much."""
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Name = Annotated[str, Field(min_length=1)]
Held = Annotated[tuple[Count, Amount, Amount | None], Field(strict=False)]
"""Node, start and end of one billed interval; JSON has lists."""


class Body(BaseModel):
    """An object whose known fields have their types; other fields are kept, for newer minor versions."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class _Handle(Body):
    backend: str
    name: Name
    details: dict[str, Any] = {}


class _Generation(Body):
    generation: Ordinal
    spec_hash: str
    reason: str = ""
    strategy: str | None = None
    restore_from: str | None = None
    budget_usd: Amount | None = None
    deadline_s: Number | None = None


class _Owner(Body):
    reason: str = ""
    spec_hash: str | None = None


class _Attempt(Body):
    generation: Ordinal
    attempt: Ordinal
    reason: str = ""


class _Intended(_Attempt):
    allocation: dict[str, Any]
    spec_hash: str = ""
    memory_bytes: Count | None = None
    vcpus: Amount | None = None
    checkpoint_every_s: Amount | None = None
    losses_per_hour: Amount | None = None


class _Started(_Attempt):
    handle: _Handle


class _Stopping(_Attempt):
    why: str = "move"
    grace_s: Amount = 30.0
    align: Literal["now", "step", "epoch"] = "step"
    request: Ordinal | None = None
    target: dict[str, Any] | None = None


class _Ended(_Attempt):
    outcome: Name
    detail: str | None = None
    failure: str | None = None
    exit_code: Whole | None = None
    signal: Whole | None = None
    last_lines: list[str] = []
    start_step: Count | None = None
    step: Count | None = None
    checkpoint: str | None = None
    checkpoint_step: Count | None = None
    never_came: list[Count] = []
    refused: list[str] = []
    outputs: dict[str, str] | None = None
    claim: Count | None = None
    usage: list[Held] | None = None
    usage_at: Amount | None = None
    usage_is_least: bool = False
    usd: Amount | None = None
    setup_s: Amount | None = None
    restore_s: Amount | None = None
    checkpoint_s: Amount | None = None
    checkpoints: Count | None = None
    restored_from: str | None = None
    rejected: list[str] | None = None
    cpu_seconds: Amount | None = None
    elapsed_s: Amount | None = None
    first_step_s: Amount | None = None
    save_s: Amount | None = None
    total_steps: Count | None = None
    samples: Count | None = None
    repeated_samples: Count | None = None
    epoch: Count | None = None


class _Released(_Attempt):
    usage: list[Held] | None = None
    usd: Amount | None = None
    detail: str | None = None


class _Answer(Body):
    request: Ordinal
    reason: str = ""
    numbers: dict[str, Any] | None = None


class _Accepted(_Stopping):
    request: Ordinal
    numbers: dict[str, Any] | None = None


class _Deferred(_Answer):
    generation: Ordinal
    attempt: Ordinal
    target: dict[str, Any]


class _ChangeIntended(_Deferred):
    kind: Literal["resize", "rescale"]


class _Changed(_Attempt):
    kind: str = ""
    target: dict[str, Any] | None = None
    handle: _Handle | None = None
    step: Count | None = None
    memory_bytes: Count | None = None
    vcpus: Amount | None = None


class _Over(Body):
    generation: Ordinal | None = None
    reason: str = ""
    failure: str = ""
    outputs: dict[str, str] = {}


_BODIES: Mapping[str, type[Body]] = {
    "generation": _Generation,
    "owner": _Owner,
    "attempt-intended": _Intended,
    "attempt-started": _Started,
    "attempt-stopping": _Stopping,
    "attempt-ended": _Ended,
    "release-failed": _Released,
    "attempt-released": _Released,
    "move-accepted": _Accepted,
    "move-refused": _Answer,
    "move-deferred": _Deferred,
    "change-intended": _ChangeIntended,
    "changed": _Changed,
    "change-undone": _Attempt,
    "succeeded": _Over,
    "failed": _Over,
    "stopped": _Over,
    "delivered": _Over,
    "accepted": _Over,
}


def check_body(event_type: str, body: Mapping[str, Any], *, where: str) -> None:
    """Refuse a known event whose fields are missing, of another type or out of bounds.

    Raises:
        ProtocolError: Names the first such field.
    """
    kind = _BODIES.get(event_type)
    if kind is None:
        return
    try:
        kind.model_validate(body)
    except ValidationError as err:
        fault = err.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        is_missing = fault["type"] == "missing"
        fault_text = "is missing" if is_missing else f"got {fault['input']!r:.80}, {fault['msg'].lower()}"
        raise ProtocolError(f"{where}: {event_type}: {place}: {fault_text}") from err
