"""What a stage's task asks for, and what the controller answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from envscaler_airflow.backends.base import StoreLogin
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import EnvScalerError, ProtocolError, SpecError

WakeKind = Literal["entry", "status", "request", "backoff", "overdue", "silent", "superseded", "timeout"]


class SupersededError(EnvScalerError):
    """Another try owns the run now: this one stops acting and touches nothing."""


class StoppedError(EnvScalerError):
    """The run was stopped on somebody's request. Never retried; a clear takes it up again."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What the task asks for now. Counts at the start of a generation and at a clear.

    Attributes:
        spec: Resolved spec; None in a resumed slice, which goes by the frozen one.
        spec_source: Path as the user wrote it.
        parameters, inputs: As rendered by Airflow or given on the command line.
        strategy: ``cost``, ``balanced``, ``performance`` or ``deadline``.
        value_of_hour: USD; None to take the strategy's.
        deadline_s: Seconds from the first start of the generation; None for none.
        deadline_at: The same as a point in time, seconds since the epoch, in its place; see :meth:`since`.
        budget_usd: Most that a generation may cost; None for no bound.
        restart: ``fresh`` begins a generation once per clear.
        restore_from: URI of another run's checkpoint that a fresh generation begins from.
        resolve_secret: Turns a reference (``secret:NAME/key``) into its value; called at a start only.
        store_options: Connection options of the store that the sidecar needs; no secrets.
        store_login: How it opens the store on a machine without an identity of its own.
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
        """Refuse to begin a generation, at *now*, that could only be late.

        Raises:
            SpecError: The deadline is a point in time that is over.
        """
        if self.deadline_at is not None and self.deadline_at <= now:
            at, today = (datetime.fromtimestamp(seconds, UTC) for seconds in (self.deadline_at, now))
            raise SpecError(
                f"deadline: {at.isoformat(timespec='seconds')} is over (it is "
                f"{today.isoformat(timespec='seconds')}); write a later one, or a duration such as '4h'"
            )

    def since(self, begun_at: float) -> Stage:
        """The same, its deadline counted from *begun_at*, the start of the generation."""
        return self if self.deadline_at is None else replace(self, deadline_s=self.deadline_at - begun_at)


@dataclass(frozen=True, slots=True)
class Wake:
    """Why a slice of the owner runs: what a watcher saw. A hint; the slice looks for itself.

    Attributes:
        kind: ``entry`` for ``execute`` itself.
        silent_s: Seconds without a sign of the attempt, by the watcher's own clock.
        detail: For the log.
        seen: Details of all that the owner might be needed for then; where it does nothing about them, the
            next watcher does not wake it for the same at once.
        check_s: Seconds between two of the watcher's looks at the money; 0 when it did not look.
        quiet_s: Seconds for which the status of each node has not changed, by the watchers' own clocks; nodes
            that reported lately are left out.
    """

    kind: WakeKind = "entry"
    silent_s: float = 0.0
    detail: str = ""
    seen: Sequence[str] = ()
    check_s: float = 0.0
    quiet_s: Mapping[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the payload of a trigger's event."""
        quiet = {str(node): seconds for node, seconds in self.quiet_s.items()}
        return {**asdict(self), "seen": list(self.seen), "quiet_s": quiet}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Wake:
        """Read what :meth:`to_dict` wrote; unknown fields are ignored.

        Raises:
            ProtocolError: A kind that this version does not know.
        """
        kind = body.get("kind", "entry")
        if kind not in get_args(WakeKind):
            raise ProtocolError(f"wake: kind {kind!r} is not known to this version")
        seen = tuple(str(item) for item in body.get("seen", ()))
        silent_s, check_s = (float(body.get(name, 0.0)) for name in ("silent_s", "check_s"))
        quiet = {int(node): float(seconds) for node, seconds in (body.get("quiet_s") or {}).items()}
        return cls(kind, silent_s, str(body.get("detail", "")), seen, check_s, quiet)


@dataclass(frozen=True, slots=True)
class Watching:
    """What to watch until something is to be done. JSON: it is a trigger's argument.

    Attributes:
        number: Last event that the owner folded.
        generation, attempt: The live attempt; attempt 0 when only a wait is to be sat out.
        nodes: Of the attempt.
        handle: The backend's; None when only a wait is to be sat out.
        backoff_s: Seconds to wait from now; None for no wait.
        stopping: True when the attempt was asked to go.
        age: Name in the lease under which watchers count how long it was asked to go, or is being changed.
        overdue_after_s: So many of these seconds, and it is overdue; None when it was not asked.
        usd_left: What the attempt may cost in all before the budget is spent; None: nothing to watch.
        checkpoint_s: Seconds of a checkpoint, as earlier attempts measured it; None when none did.
        changing: ``resize`` or ``rescale`` while it is changed in place; then *handle* and *nodes* are those
            that it will have.
        spans: What it is on since when, with the prices; empty when only a wait is to be sat out.
        started_at: When the attempt was started, by the run's clock; None when unknown.
        answered: What the owner was just woken for and could do nothing about: see :class:`Wake`.
        release_after_s: Seconds from now until the owner is woken to release an earlier attempt; None: none.
        orphan_after_s: Seconds without an owner after which the sidecar saves and ends the attempt.
        faults: Executions in a row that had no answer of the store or the backend.
        faulty_s: Seconds that they have lasted, as the watchers between them counted.
        pause_s: Seconds from now before the owner is woken for anything but a newer owner.
        try_number: Of the owner, as a task instance id can repeat over a retry; None in older triggers.
    """

    number: int
    generation: int
    attempt: int = 0
    nodes: int = 1
    handle: Mapping[str, Any] | None = None
    backoff_s: float | None = None
    stopping: bool = False
    age: str = ""
    overdue_after_s: float | None = None
    usd_left: float | None = None
    checkpoint_s: float | None = None
    changing: str = ""
    spans: Sequence[Mapping[str, Any]] = ()
    started_at: float | None = None
    answered: Sequence[str] = ()
    release_after_s: float | None = None
    orphan_after_s: float = 1800.0
    faults: int = 0
    faulty_s: float = 0.0
    pause_s: float = 0.0
    try_number: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        handle = dict(self.handle) if self.handle is not None else None
        spans, answered = [dict(item) for item in self.spans], list(self.answered)
        return {**asdict(self), "handle": handle, "spans": spans, "answered": answered}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Watching:
        """Read what this or an older version wrote; unknown fields are ignored.

        Raises:
            ProtocolError: A field is missing.
        """
        try:
            return cls(**{name: body[name] for name in cls.__slots__ if name in body})
        except TypeError as err:
            raise ProtocolError(f"watching: {err}") from err


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing to do now: watch, and come back with what was seen."""

    watching: Watching
    reason: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """The stage succeeded.

    Attributes:
        outputs: Output name to its URI.
        report: Cost report, JSON.
    """

    outputs: dict[str, str]
    report: dict[str, Any]
