"""State of a run: the fold of its events. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run.events import Actor, Event

AttemptPhase = Literal["intended", "started", "stopping", "ended"]
RunStatus = Literal["none", "active", "succeeded", "failed", "stopped"]

ChangeKind = Literal["resize", "rescale"]
"""``resize``: other CPU and memory of the same nodes. ``rescale``: another number of the same nodes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change in place of a running attempt, requested from the backend and not known to be done.

    Attributes:
        kind: See :data:`ChangeKind`.
        target: What the attempt has afterwards.
        reason: Why the change is made.
        number: Number of its event.
    """

    kind: ChangeKind
    target: Allocation
    reason: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Before:
    """What an attempt was on before it was changed in place.

    Attributes:
        allocation: The allocation at that time.
        until: Owner's clock when the change was known to be done, seconds since the epoch.
        step: Last step seen by then; None when unknown.
    """

    allocation: Allocation
    until: float
    step: int | None = None


@dataclass(frozen=True, slots=True)
class AttemptState:
    """One life of the training on one allocation, which may be changed in place.

    Attributes:
        generation, number: Which attempt.
        allocation: What it uses now.
        reason: Why it was begun.
        phase: ``stopping`` once the owner asked it to stop.
        spec_hash: Of the spec that it runs.
        memory_bytes: Memory per node if it differs from the spec: raised after an out-of-memory kill, or
            changed in place; None for the spec's.
        vcpus: CPUs per node if they were changed in place; None for the spec's.
        checkpoint_every_s: Seconds between its checkpoints, if that differs from the spec.
        handle: The backend's, once started.
        stop_why: Why the owner stopped it, a name of the same table; ``""`` while running.
        stop_number: Number of the stopping event, which is the sequence of its control.
        stop: Body of the stopping event; empty before.
        target: Target of a move.
        change: The current change in place; None without one.
        earlier: What it used before each change in place, oldest first.
        next_allocation: What the next attempt must use, if a move was deferred until then.
        ended: Body of the ``attempt-ended`` event; empty before.
        unreleased: Why its machines are not known to be released; "" if they are, or before the first try.
        released_at: When a later try released them; None if that took no second try.
        ended_number: Number of its ``attempt-ended`` event; 0 before.
        intended_at, started_at, stopping_at, ended_at: Owner's clock, for display and reports.
    """

    generation: int
    number: int
    allocation: Allocation
    reason: str = ""
    phase: AttemptPhase = "intended"
    spec_hash: str = ""
    memory_bytes: int | None = None
    vcpus: float | None = None
    checkpoint_every_s: float | None = None
    handle: Mapping[str, Any] | None = None
    stop_why: str = ""
    stop_number: int = 0
    stop: Mapping[str, Any] = field(default_factory=dict)
    target: Allocation | None = None
    change: Change | None = None
    earlier: tuple[Before, ...] = ()
    next_allocation: Allocation | None = None
    ended: Mapping[str, Any] = field(default_factory=dict)
    unreleased: str = ""
    released_at: float | None = None
    ended_number: int = 0
    intended_at: float = 0.0
    started_at: float | None = None
    stopping_at: float | None = None
    ended_at: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Return ``(generation, number)``."""
        return self.generation, self.number

    @property
    def begun_on(self) -> Allocation:
        """Return what it used before any change in place."""
        return self.earlier[0].allocation if self.earlier else self.allocation

    @property
    def is_live(self) -> bool:
        """Return True from the intent to the end: part of it may be running."""
        return self.phase != "ended"

    @property
    def outcome(self) -> str:
        """Return a name of :data:`~envscaler_airflow.run.outcomes.OUTCOMES`; ``""`` before the end."""
        return str(self.ended.get("outcome", ""))

    @property
    def step(self) -> int | None:
        """Return the last step at which it was seen; None when unknown."""
        step = self.ended.get("step")
        return step if isinstance(step, int) else None

    @property
    def checkpoint_step(self) -> int | None:
        """Return the step of the newest checkpoint that it completed; None without one."""
        step = self.ended.get("checkpoint_step")
        return step if isinstance(step, int) else None


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the owner that the owner has not answered yet."""

    number: int
    type: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Consecutive refusals of one target for the running attempt; moves that users requested are not counted.

    Attributes:
        target: Name of the allocation.
        times: Number of refusals.
        at: Owner's clock at the last one, seconds since the epoch.
    """

    target: str
    times: int
    at: float


MOST_REFUSALS = 200
"""Most targets whose refusals are kept, newest first. Chosen: more than a plan has."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that the events record.

    Attributes:
        number: Last event folded; the next one is ``number + 1``.
        status: ``active`` from the first generation on, until the run succeeded, failed or was stopped.
        generation: Current generation, from 1; 0 before the first.
        begun: Body of its ``generation`` event.
        begun_by: Actor that began it.
        owner: Actor that may act.
        cleared_number: Number of the event by which the task was last cleared, or the generation began.
            Failures count from there on, and an earlier stop is overridden.
        spec_hash: Of the current spec.
        attempts: All attempts of all generations, in order.
        pending: Requests without an answer, in order.
        refused: Moves refused to the live attempt since it began, or was changed in place.
        outputs: Of the current generation, once it succeeded.
        delivered: Actors to which the result of the current generation was delivered.
        accepted: True once Airflow accepted a delivery of the current generation.
        reason: Why the run failed or was stopped.
        failure: Class of the failure.
        unknown: Numbers of events whose type this version does not know, since the generation began or
            while an attempt of an earlier one lives.
    """

    number: int = 0
    status: RunStatus = "none"
    generation: int = 0
    begun: Mapping[str, Any] = field(default_factory=dict)
    begun_by: Actor | None = None
    begun_at: float | None = None
    owner: Actor | None = None
    cleared_number: int = 0
    spec_hash: str = ""
    attempts: tuple[AttemptState, ...] = ()
    pending: tuple[Request, ...] = ()
    refused: tuple[Refusal, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    delivered: tuple[Actor, ...] = ()
    accepted: bool = False
    reason: str = ""
    failure: str = ""
    unknown: tuple[int, ...] = ()

    @property
    def current(self) -> AttemptState | None:
        """Return the newest attempt of the current generation, None before the first."""
        if self.attempts and self.attempts[-1].generation == self.generation:
            return self.attempts[-1]
        return None

    @property
    def live(self) -> AttemptState | None:
        """Return the attempt of any generation that may still run, None if there is none."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].is_live else None

    def attempts_of(self, generation: int) -> tuple[AttemptState, ...]:
        """Return the attempts of one generation, in order."""
        return tuple(item for item in self.attempts if item.generation == generation)


def fold(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """Return the state after applying *events* to *state*. Linear in the number of events.

    Raises:
        ProtocolError: A number is missing or repeated, or a known event lacks a field.
    """
    now = state or RunState()
    for event in events:
        if event.number != now.number + 1:
            raise ProtocolError(f"event {event.number} follows {now.number}: one is missing or repeated")
        apply = _APPLY.get(event.type)
        try:
            now = apply(now, event) if apply else replace(now, unknown=(*now.unknown, event.number))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as err:
            fault = f"{err} is missing" if isinstance(err, KeyError) else str(err)
            raise ProtocolError(f"event {event.number} ({event.type}): {fault}") from err
        now = replace(now, number=event.number)
    return now


def _generation(state: RunState, event: Event) -> RunState:
    return replace(
        state,
        status="active",
        generation=int(event.body["generation"]),
        begun=event.body,
        begun_by=event.actor,
        begun_at=event.at,
        owner=event.actor,
        cleared_number=event.number,
        spec_hash=str(event.body["spec_hash"]),
        outputs={},
        delivered=(),
        accepted=False,
        pending=(),
        reason="",
        failure="",
        unknown=state.unknown if state.live else (),
    )


def is_cleared(state: RunState, actor: Actor | None) -> bool:
    """Return True if the task was cleared between the owner and *actor*: that changes ``max_tries``."""
    return state.owner is None or actor is None or state.owner.max_tries != actor.max_tries


def _owner(state: RunState, event: Event) -> RunState:
    """Make another try the owner. A clear resumes a run that had failed or was stopped; a retry does not."""
    now = replace(state, owner=event.actor, spec_hash=str(event.body.get("spec_hash") or state.spec_hash))
    if not is_cleared(state, event.actor):
        return now
    pending = state.pending if state.live else _without_old_stops(state.pending, event.number)
    now = replace(now, cleared_number=event.number, pending=pending)
    return now if state.status == "succeeded" else replace(now, status="active", reason="", failure="")


def _without_old_stops(pending: tuple[Request, ...], cleared_number: int) -> tuple[Request, ...]:
    """Drop stops requested before a clear: they stop the attempt of that time, not the run."""
    return tuple(r for r in pending if r.type != "stop-requested" or r.number > cleared_number)


def _intended(state: RunState, event: Event) -> RunState:
    body = event.body
    memory, vcpus, every_s = body.get("memory_bytes"), body.get("vcpus"), body.get("checkpoint_every_s")
    attempt = AttemptState(
        generation=int(body["generation"]),
        number=int(body["attempt"]),
        allocation=Allocation.from_dict(body["allocation"]),
        reason=str(body.get("reason", "")),
        spec_hash=str(body.get("spec_hash", "")),
        memory_bytes=int(memory) if memory is not None else None,
        vcpus=float(vcpus) if vcpus is not None else None,
        checkpoint_every_s=float(every_s) if every_s is not None else None,
        intended_at=event.at,
    )
    return replace(state, attempts=(*state.attempts, attempt), refused=())


def _change(state: RunState, event: Event, **changes: Any) -> RunState:
    """Change the attempt that the event names; a late event about an older one changes nothing."""
    last = state.attempts[-1] if state.attempts else None
    key = (int(event.body["generation"]), int(event.body["attempt"]))
    if last is None or (last.generation, last.number) != key or not last.is_live:
        return state
    return replace(state, attempts=(*state.attempts[:-1], replace(last, **changes)))


def _started(state: RunState, event: Event) -> RunState:
    handle = event.body["handle"]
    live = state.live
    phase: AttemptPhase = "stopping" if live is not None and live.phase == "stopping" else "started"
    return _change(state, event, phase=phase, handle=handle, started_at=event.at)


def _stopping(state: RunState, event: Event) -> RunState:
    body, target, request = event.body, event.body.get("target"), event.body.get("request")
    return _change(
        replace(state, pending=tuple(item for item in state.pending if item.number != request)),
        event,
        phase="stopping",
        stop_why=str(body.get("why", "move")),
        stop_number=event.number,
        stop=body,
        target=Allocation.from_dict(target) if target else None,
        change=None,
        stopping_at=event.at,
    )


def _accepted(state: RunState, event: Event) -> RunState:
    """Apply an accepted move, which also asks the attempt to stop, in one event."""
    return _answered(_stopping(state, event), event)


def _deferred(state: RunState, event: Event) -> RunState:
    return _change(_answered(state, event), event, next_allocation=Allocation.from_dict(event.body["target"]))


def _change_intended(state: RunState, event: Event) -> RunState:
    body = event.body
    kind: ChangeKind = "rescale" if body["kind"] == "rescale" else "resize"
    change = Change(kind, Allocation.from_dict(body["target"]), str(body.get("reason", "")), event.number)
    return _change(_answered(state, event), event, change=change)


def _changed(state: RunState, event: Event) -> RunState:
    body, live = event.body, state.live
    if live is None or live.change is None:
        return state
    step = body.get("step")
    before = Before(live.allocation, event.at, step if isinstance(step, int) else None)
    found: dict[str, Any] = {"allocation": live.change.target, "change": None, "next_allocation": None}
    for name in ("handle", "memory_bytes", "vcpus"):
        if body.get(name) is not None:
            found[name] = body[name]
    return _change(replace(state, refused=()), event, earlier=(*live.earlier, before), **found)


def _undone(state: RunState, event: Event) -> RunState:
    return _change(state, event, change=None)


def _ended(state: RunState, event: Event) -> RunState:
    now = _change(state, event, phase="ended", ended=event.body, ended_at=event.at, ended_number=event.number)
    return replace(now, pending=_without_old_stops(now.pending, now.cleared_number))


def _of_ended(state: RunState, event: Event, **changes: Any) -> RunState:
    """Change the ended attempt that the event names."""
    changed = (
        replace(one, **changes) if _is_named(one, event.body) and not one.is_live else one
        for one in state.attempts
    )
    return replace(state, attempts=tuple(changed))


def _unreleased(state: RunState, event: Event) -> RunState:
    return _of_ended(state, event, unreleased=str(event.body.get("detail") or "not released"))


def _released(state: RunState, event: Event) -> RunState:
    """Use the backend's last bill if it is more complete than the one at the end."""
    body = event.body
    ended = next((one.ended for one in state.attempts if _is_named(one, body)), {})
    reported = {name: body[name] for name in ("usage", "usd") if body.get(name) is not None}
    return _of_ended(state, event, ended={**ended, **reported}, unreleased="", released_at=event.at)


def _is_named(attempt: AttemptState, body: Mapping[str, Any]) -> bool:
    return (attempt.generation, attempt.number) == (body["generation"], body["attempt"])


def _requested(state: RunState, event: Event) -> RunState:
    return replace(state, pending=(*state.pending, Request(event.number, event.type, event.body)))


def _answered(state: RunState, event: Event) -> RunState:
    number = int(event.body["request"])
    return replace(state, pending=tuple(item for item in state.pending if item.number != number))


def _refused(state: RunState, event: Event) -> RunState:
    asked = next((item for item in state.pending if item.number == int(event.body["request"])), None)
    now = _answered(state, event)
    name = None if asked is None or asked.body.get("forced") else _target_name(asked)
    if name is None:
        return now
    before = next((item.times for item in state.refused if item.target == name), 0)
    others = tuple(item for item in state.refused if item.target != name)
    return replace(now, refused=(*others, Refusal(name, before + 1, event.at))[-MOST_REFUSALS:])


def _target_name(asked: Request) -> str | None:
    """Return the target of a requested move; None if it is unreadable, which does not invalidate the log."""
    try:
        return Allocation.from_dict(asked.body["target"]).name
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return None


def _succeeded(state: RunState, event: Event) -> RunState:
    return replace(state, status="succeeded", outputs=dict(event.body.get("outputs", {})), pending=())


def _failed(state: RunState, event: Event) -> RunState:
    reason, failure = str(event.body.get("reason", "")), str(event.body.get("failure", ""))
    return replace(state, status="failed", reason=reason, failure=failure, pending=())


def _stopped(state: RunState, event: Event) -> RunState:
    return replace(state, status="stopped", reason=str(event.body.get("reason", "")), pending=())


def _delivered(state: RunState, event: Event) -> RunState:
    return replace(state, delivered=(*state.delivered, event.actor) if event.actor else state.delivered)


def _accepted_by_airflow(state: RunState, event: Event) -> RunState:
    is_current = int(event.body.get("generation", state.generation)) == state.generation
    return replace(state, accepted=True) if is_current and state.delivered else state


_APPLY: dict[str, Callable[[RunState, Event], RunState]] = {
    "generation": _generation,
    "owner": _owner,
    "attempt-intended": _intended,
    "attempt-started": _started,
    "attempt-stopping": _stopping,
    "attempt-ended": _ended,
    "release-failed": _unreleased,
    "attempt-released": _released,
    "move-requested": _requested,
    "move-accepted": _accepted,
    "move-refused": _refused,
    "move-deferred": _deferred,
    "change-intended": _change_intended,
    "changed": _changed,
    "change-undone": _undone,
    "stop-requested": _requested,
    "succeeded": _succeeded,
    "failed": _failed,
    "stopped": _stopped,
    "delivered": _delivered,
    "accepted": _accepted_by_airflow,
}
