"""Facts that the owner gathers in addition to the events, and the actions that it can take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run.outcomes import End, Observed
from envscaler_airflow.run.state import Request
from envscaler_airflow.scaling.deadline.spot_market import MarketDecision

MAX_FRUITLESS_ATTEMPTS = 5
"""Consecutive attempts without a newer checkpoint after which a run fails. Chosen: with the back-off below,
a disruption of a few minutes passes."""
OOM_MEMORY_FACTOR = 1.5
"""Memory of the next attempt after an out-of-memory kill, times the last. Chosen: three rises triple it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What the market of a stage with a deadline decides after an attempt has ended.

    Attributes:
        decision: See :func:`~envscaler_airflow.scaling.deadline.decide_market`.
        target: Where to start; None to wait.
    """

    decision: MarketDecision
    target: Allocation | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the owner knows in addition to the events.

    Attributes:
        observed: The live attempt; None if none is live or nothing could be observed.
        spent_usd: Metered cost of this generation; None if a price is unknown.
        budget_usd: Maximum cost of this generation; None for no limit.
        reserve_usd: What the live attempt still costs if it is drained now, USD; 0 without one.
        backoff_is_over: True if this call comes after the wait that the last one requested.
        is_overdue: True if a draining attempt did not end within its time.
        memory_limit_bytes: Memory per node that the current attempt has; None when unlimited or unknown.
        memory_cap_bytes: Most that memory may be raised to after an out-of-memory kill; None for the offer's.
        oom_memory_factor: See :data:`OOM_MEMORY_FACTOR`.
        max_fruitless_attempts: See :data:`MAX_FRUITLESS_ATTEMPTS`.
        resume: What the market decides between two attempts; None if another policy applies.
    """

    observed: Observed | None = None
    spent_usd: float | None = None
    budget_usd: float | None = None
    reserve_usd: float = 0.0
    backoff_is_over: bool = False
    is_overdue: bool = False
    memory_limit_bytes: int | None = None
    memory_cap_bytes: int | None = None
    oom_memory_factor: float = OOM_MEMORY_FACTOR
    max_fruitless_attempts: int = MAX_FRUITLESS_ATTEMPTS
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    ``start``: intend and start the next attempt, on *target* if given. ``carry-out``: submit the
    intended one. ``discard``: end one that was stopped before its start. ``end``: record *end*.
    ``stop``: ask the live attempt to stop, for *stop_reason*. ``kill``: its time is over. ``judge``: answer a
    move request. ``refuse``: refuse it. ``change``: advance a change in place. ``wait``: nothing now.
    ``succeed``, ``fail``, ``halt``: the run is over. ``deliver``: deliver the result. ``mismatch``: this
    version must not act.
    """

    kind: Literal[
        "start",
        "carry-out",
        "discard",
        "end",
        "stop",
        "kill",
        "judge",
        "refuse",
        "change",
        "wait",
        "succeed",
        "fail",
        "halt",
        "deliver",
        "mismatch",
    ]
    reason: str = ""
    stop_reason: str = ""
    target: Allocation | None = None
    memory_bytes: int | None = None
    backoff_s: float = 0.0
    end: End | None = None
    request: Request | None = None
    failure: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
