"""What a stage's task requests, and what the owner answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, Self

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.backoff import wait_s
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import BackendError, EnvScalerError, ProtocolError, SpecError, StoreError
from envscaler_airflow.owner.report import Report
from envscaler_airflow.owner.usage import Span
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import Actor, Handle, RunState

WakeKind = Literal["entry", "status", "request", "backoff", "overdue", "silent", "superseded", "timeout"]


class SupersededError(EnvScalerError):
    """Another try owns the run now; this try stops acting and changes nothing."""


class StoppedError(EnvScalerError):
    """The run was stopped on request. Never retried; a clear resumes it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What the task requests now. Takes effect at the start of a generation and at a clear.

    Attributes:
        spec: Resolved spec; None in a resumed execution, which uses the frozen spec.
        spec_source: Path as the user wrote it.
        parameters, inputs: As rendered by Airflow or given on the command line.
        strategy: ``cost``, ``balanced``, ``performance`` or ``deadline``.
        value_of_hour: USD; None uses the strategy's value.
        deadline_s: Seconds from the first start of the generation; None for no deadline.
        deadline_at: Alternative to *deadline_s*: a point in time, seconds since the epoch; see :meth:`since`.
        budget_usd: Maximum cost of a generation; None for no limit.
        restart: ``fresh`` begins a generation once per clear.
        restore_from: URI of another run's checkpoint from which a fresh generation begins.
        resolve_secret: Turns a reference (``secret:NAME/key``) into its value; called only at a start.
        store_options: Connection options that the sidecar needs to open the store; no secrets.
        store_login: How the sidecar opens the store on a machine without its own identity.
        python: Interpreter of the stage's own environment on this machine; None for that of this process.
    """

    spec: EnvSpec | None
    spec_source: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "balanced"
    value_of_hour: float | None = None
    deadline_s: float | None = None
    deadline_at: float | None = None
    budget_usd: float | None = None
    restart: Literal["resume", "fresh"] = "resume"
    restore_from: str | None = None
    resolve_secret: Callable[[str], str] | None = None
    store_options: Mapping[str, Any] = field(default_factory=dict)
    store_login: StoreLogin = field(default_factory=StoreLogin)
    python: str | None = None

    def check_deadline(self, now: float) -> None:
        """Refuse to begin a generation at *now* that would already be late.

        Raises:
            SpecError: The deadline is a point in time that has passed.
        """
        if self.deadline_at is not None and self.deadline_at <= now:
            at, today = (datetime.fromtimestamp(seconds, UTC) for seconds in (self.deadline_at, now))
            raise SpecError(
                f"deadline: {at.isoformat(timespec='seconds')} is over (it is "
                f"{today.isoformat(timespec='seconds')}); write a later one, or a duration such as '4h'"
            )

    def since(self, begun_at: float) -> Stage:
        """Return the same stage with its deadline counted from *begun_at*, the start of the generation."""
        return self if self.deadline_at is None else replace(self, deadline_s=self.deadline_at - begun_at)


class Argument(Record):
    """What a trigger receives or reports, as JSON: another version may have written it."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read what this or an older version wrote; unknown fields are ignored.

        Raises:
            ProtocolError: A field is missing, or this version does not know its value.
        """
        try:
            return super().from_dict(body)
        except ValueError as err:
            raise ProtocolError(f"{cls.__name__}: {err}") from err


@dataclass(frozen=True, slots=True)
class Wake(Argument):
    """Why an execution of the owner runs: what a watcher saw. A hint only; the execution checks for itself.

    Attributes:
        kind: ``entry`` for ``execute`` itself.
        silent_s: Seconds without a sign of the attempt, by the watcher's own clock.
        detail: For the log.
        seen: Every reason present at this wake-up. If the owner takes no action, the next watcher does not
            immediately wake it for the same reasons.
        check_s: Seconds between two of the watcher's budget checks; 0 if it made none.
        quiet_s: Seconds for which the status of each node has not changed, by the watchers' own clocks; nodes
            that reported lately are left out.
    """

    kind: WakeKind = "entry"
    silent_s: float = 0.0
    detail: str = ""
    seen: tuple[str, ...] = ()
    check_s: float = 0.0
    quiet_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Watching(Argument):
    """What to watch until the owner must act. JSON: it is a trigger's argument.

    Attributes:
        number: Last event that the owner folded.
        generation, attempt: The live attempt; attempt 0 for a plain wait.
        nodes: Of the attempt.
        handle: The backend's; None for a plain wait.
        backoff_s: Seconds to wait from now; None for no wait.
        stopping: True while the attempt is draining.
        age: Name in the lease under which watchers count how long a drain or a change in place has lasted.
        overdue_after_s: The drain or change is overdue after this many seconds; None without one.
        usd_left: Total that the attempt may cost before the budget is spent; None: nothing to watch.
        checkpoint_s: Seconds of a checkpoint, as earlier attempts measured it; None if none did.
        changing: ``resize`` or ``rescale`` during a change in place; *handle* and *nodes* then describe the
            attempt after the change.
        spans: Its allocations, since when, and their prices; empty for a plain wait.
        started_at: When the attempt was started, by the run's clock; None if unknown.
        answered: Reasons for which the owner was just woken and took no action: see :class:`Wake`.
        release_after_s: Seconds from now until the owner is woken to release an earlier attempt; None: never.
        orphan_after_s: Seconds without an owner after which the sidecar saves and ends the attempt.
        faults: Consecutive executions without an answer from the store or the backend.
        faulty_s: Total duration of these faults, seconds, as counted by successive watchers.
        pause_s: Seconds from now before the owner is woken for anything but a newer owner.
        try_number: Of the owner, as a task instance id can repeat over a retry; None in older triggers.
    """

    number: int
    generation: int
    attempt: int = 0
    nodes: int = 1
    handle: Handle | None = None
    backoff_s: float | None = None
    stopping: bool = False
    age: str = ""
    overdue_after_s: float | None = None
    usd_left: float | None = None
    checkpoint_s: float | None = None
    changing: str = ""
    spans: tuple[Span, ...] = ()
    started_at: float | None = None
    answered: tuple[str, ...] = ()
    release_after_s: float | None = None
    orphan_after_s: float = 1800.0
    faults: int = 0
    faulty_s: float = 0.0
    pause_s: float = 0.0
    try_number: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing to do now: watch, then return with what the watcher saw."""

    watching: Watching
    reason: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """The stage succeeded.

    Attributes:
        outputs: Output name to its URI.
        report: What it cost.
    """

    outputs: dict[str, str]
    report: Report


FIRST_S = 15.0
MOST_S = 600.0
"""Shortest and longest pause before the next execution, seconds. Chosen: an API server that restarts is back
in seconds; a region that is down is not asked more than six times an hour."""
PATIENCE_S = 1800.0
"""Time beyond ``orphan_after`` before Airflow's own retry takes over, seconds. By ``orphan_after`` a sidecar
without an owner has saved and ended. Chosen: the last saves of a large model fit."""


def is_transient(err: EnvScalerError) -> bool:
    """Return True for faults that may pass by themselves: no answer of the backend, or any store error.

    A store that refuses access, as with expired credentials, stops no training; each execution logs it.
    """
    return isinstance(err, StoreError) or (isinstance(err, BackendError) and err.transient)


def watching_until_retry(
    watching: Watching, wake: Wake, *, watched_s: float, least_s: float
) -> Watching | None:
    """Return what to watch until the next execution; None to leave the retry to Airflow.

    Args:
        watching: What was watched when *wake* came.
        wake: Why the execution without an answer ran.
        watched_s: How long the watcher watched, seconds of its own clock.
        least_s: Shortest pause between two executions that Airflow tolerates, seconds.
    """
    faulty_s = watching.faulty_s + watched_s if watching.faults else 0.0
    if faulty_s >= watching.orphan_after_s + PATIENCE_S:
        return None
    pause_s = max(least_s, wait_s(watching.faults + 1, first_s=FIRST_S, most_s=MOST_S))
    is_over = watching.backoff_s is not None and wake.kind == "backoff"
    return replace(
        watching,
        faults=watching.faults + 1,
        faulty_s=faulty_s,
        pause_s=pause_s,
        backoff_s=0.0 if is_over else watching.backoff_s,
        answered=(),
    )


def watched_now(state: RunState, actor: Actor) -> Watching | None:
    """Return what a try that began an attempt must watch; None if it owns nothing that may run."""
    live = state.live
    if live is None or not actor.is_try_of(state.owner):
        return None
    return Watching(
        number=state.number,
        generation=live.generation,
        attempt=live.number,
        nodes=live.allocation.nodes,
        handle=live.handle,
        stopping=live.phase == "stopping",
        started_at=live.started_at,
    )
