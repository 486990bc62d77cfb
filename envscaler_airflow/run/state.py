"""State of a run: the fold of its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.run.event_bodies import Actor, Event

AttemptPhase = Literal["intended", "started", "stopping", "ended"]
RunStatus = Literal["none", "active", "succeeded", "failed", "stopped", "pruned"]


@dataclass(frozen=True, slots=True)
class Change(Record):
    """A change in place of a running attempt, requested from the backend and not known to be done.

    Attributes:
        kind: See :data:`~envscaler_airflow.run.event_bodies.ChangeKind`.
        target: What the attempt has afterwards.
        reason: Why the change is made.
        number: Number of its event.
    """

    kind: bodies.ChangeKind
    target: Allocation
    reason: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Before(Record):
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
class AttemptState(Record):
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
        stop_reason: Why the owner stopped it, a name of the same table; ``""`` while running.
        stop_number: Number of the stopping event, which is the sequence of its control.
        stop_detail, stop_align, stop_grace_s: What the stopping event says besides.
        stop_request: Number of the request that it answers; None for none.
        target: Target of a move.
        change: The current change in place; None without one.
        earlier: What it used before each change in place, oldest first.
        next_allocation: What the next attempt must use, if a move was deferred until then.
        ended: The ``attempt-ended`` event; None before, see :attr:`end`.
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
    handle: bodies.Handle | None = None
    stop_reason: str = ""
    stop_number: int = 0
    stop_detail: str = ""
    stop_align: bodies.Alignment = "step"
    stop_grace_s: float = 30.0
    stop_request: int | None = None
    target: Allocation | None = None
    change: Change | None = None
    earlier: tuple[Before, ...] = ()
    next_allocation: Allocation | None = None
    ended: bodies.AttemptEnded | None = None
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
    def end(self) -> bodies.AttemptEnded:
        """Return the ``attempt-ended`` event; while the attempt is live, one in which nothing is known."""
        return self.ended or bodies.AttemptEnded(generation=self.generation, attempt=self.number, outcome="")

    @property
    def outcome(self) -> str:
        """Return a name of :data:`~envscaler_airflow.run.outcomes.OUTCOMES`; ``""`` before the end."""
        return self.end.outcome

    @property
    def step(self) -> int | None:
        """Return the last step at which it was seen; None when unknown."""
        return self.end.step

    @property
    def checkpoint_step(self) -> int | None:
        """Return the step of the newest checkpoint that it completed; None without one."""
        return self.end.checkpoint_step


@dataclass(frozen=True, slots=True)
class Request(Record):
    """A request to the owner that the owner has not answered yet."""

    number: int
    body: bodies.RequestBody

    @property
    def is_timeout(self) -> bool:
        """Return True for a stop that is requested because the task's time is over."""
        return isinstance(self.body, bodies.StopRequested) and self.body.stop_reason == "timeout"

    @property
    def is_of_person(self) -> bool:
        """Return True for a stop that a person requests, and not the end of a try."""
        return isinstance(self.body, bodies.StopRequested) and self.body.ti_id is None


@dataclass(frozen=True, slots=True)
class Refusal(Record):
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
class RunState(Record):
    """Everything that the events record.

    Attributes:
        number: Last event folded; the next one is ``number + 1``.
        status: ``active`` from the first generation on, until the run succeeded, failed or was stopped;
            ``pruned`` for good once its removal from the store was begun.
        generation: Current generation, from 1; 0 before the first.
        begun: Its ``generation`` event; without terms before the first.
        begun_by: Actor that began it.
        owner: Actor that may act.
        owner_number: Number of the event by which it became the owner.
        owner_at: Time of that event.
        cleared_number: Number of the event by which the task was last cleared, or the generation began.
            Failures count from there on.
        overridden_number: Stops requested up to this event are overridden by that clear.
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
    begun: bodies.NewGeneration = field(
        default_factory=lambda: bodies.NewGeneration(generation=0, spec_hash="")
    )
    begun_by: Actor | None = None
    begun_at: float | None = None
    owner: Actor | None = None
    owner_number: int = 0
    owner_at: float = 0.0
    cleared_number: int = 0
    overridden_number: int = 0
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
        after = now if now.status == "pruned" else _after(now, event)
        now = replace(after, number=event.number)
    return now


def _after(state: RunState, event: Event) -> RunState:  # noqa: C901 - one case for each event
    match event.body:
        case bodies.PruneIntended() as body:
            return replace(state, status="pruned", reason=body.reason, pending=())
        case bodies.NewGeneration() as body:
            return _new_generation(state, event, body)
        case bodies.NewOwner() as body:
            return _new_owner(state, event, body)
        case bodies.MoveRequested() | bodies.StopRequested() as body:
            return replace(state, pending=(*state.pending, Request(event.number, body)))
        case bodies.MoveRefused() as body:
            return _refused(state, event, body)
        case bodies.Succeeded() as body:
            return replace(state, status="succeeded", outputs=dict(body.outputs), pending=())
        case bodies.Failed() as body:
            return replace(state, status="failed", reason=body.reason, failure=body.failure, pending=())
        case bodies.Stopped() as body:
            return replace(state, status="stopped", reason=body.reason, pending=())
        case bodies.Delivered():
            actors = () if event.actor is None else (event.actor,)
            return replace(state, delivered=(*state.delivered, *actors))
        case bodies.Accepted() as body:
            is_current = body.generation in (None, state.generation)
            return replace(state, accepted=True) if is_current and state.delivered else state
        case bodies.Unknown():
            return replace(state, unknown=(*state.unknown, event.number))
        case body:
            return _after_attempt(state, event, body)


def _after_attempt(  # noqa: C901 - one case for each event
    state: RunState, event: Event, body: bodies.AttemptBody
) -> RunState:
    """Apply an event about one attempt; a late one about an older attempt changes nothing."""
    match body:
        case bodies.AttemptIntended():
            return _intended(state, event, body)
        case bodies.AttemptStarted():
            live = state.live
            phase: AttemptPhase = "stopping" if live is not None and live.phase == "stopping" else "started"
            return _change(state, body, phase=phase, handle=body.handle, started_at=event.at)
        case bodies.AttemptStopping() | bodies.MoveAccepted():  # an accepted move also asks it to stop
            return _stopping(state, event, body)
        case bodies.MoveDeferred():
            return _change(_answered(state, body.request), body, next_allocation=body.target)
        case bodies.ChangeIntended():
            change = Change(body.kind, body.target, body.reason, event.number)
            return _change(_answered(state, body.request), body, change=change)
        case bodies.Changed():
            return _changed(state, event, body)
        case bodies.ChangeUndone():
            return _change(state, body, change=None)
        case bodies.AttemptEnded():
            now = _change(
                state, body, phase="ended", ended=body, ended_at=event.at, ended_number=event.number
            )
            return replace(now, pending=_without_old_stops(now.pending, now.overridden_number))
        case bodies.ReleaseFailed():
            return _of_ended(state, body, unreleased=body.detail or "not released")
        case bodies.AttemptReleased():
            return _released(state, event, body)


def _new_generation(state: RunState, event: Event, body: bodies.NewGeneration) -> RunState:
    kept = _undated_stops(state, event.actor)
    return replace(
        state,
        status="active",
        generation=body.generation,
        begun=body,
        begun_by=event.actor,
        begun_at=event.at,
        owner=event.actor,
        owner_number=event.number,
        owner_at=event.at,
        cleared_number=event.number,
        overridden_number=kept[0].number - 1 if kept else event.number,
        spec_hash=body.spec_hash,
        outputs={},
        delivered=(),
        accepted=False,
        pending=kept,
        reason="",
        failure="",
        unknown=state.unknown if state.live else (),
    )


def is_cleared(state: RunState, actor: Actor | None) -> bool:
    """Return True if the task was cleared between the owner and *actor*: that changes ``max_tries``."""
    return state.owner is None or actor is None or state.owner.max_tries != actor.max_tries


def _new_owner(state: RunState, event: Event, body: bodies.NewOwner) -> RunState:
    """Make another try the owner. A clear resumes a run that had failed or was stopped; a retry does not."""
    now = replace(
        state,
        owner=event.actor,
        owner_number=event.number,
        owner_at=event.at,
        spec_hash=body.spec_hash or state.spec_hash,
    )
    if not is_cleared(state, event.actor):
        return now
    kept = _undated_stops(state, event.actor)
    overridden = kept[0].number - 1 if kept else event.number
    pending = state.pending if state.live else _without_old_stops(state.pending, overridden)
    now = replace(now, cleared_number=event.number, overridden_number=overridden, pending=pending)
    return now if state.status == "succeeded" else replace(now, status="active", reason="", failure="")


def _undated_stops(state: RunState, actor: Actor | None) -> tuple[Request, ...]:
    """Return the stops that a person may have requested after the clear by which *actor* becomes the owner.

    Airflow does not report when a task was cleared, only the events have an order. A stop that no owner has
    answered counts, which costs one more clear at most. One that a try before *actor* has read, or that the
    end of a try requested, came before the clear; a start from a shell is itself the clear.
    """
    owner = state.owner
    if state.status != "active" or owner is None or actor is None or actor.is_shell:
        return ()
    if owner.life != actor.life:  # the DAG run was deleted and recreated: it was for the earlier one
        return ()
    return tuple(one for one in state.pending if one.is_of_person and one.number > state.owner_number)


def _without_old_stops(pending: tuple[Request, ...], overridden: int) -> tuple[Request, ...]:
    """Drop stops that a clear overrides: they stop the attempt of that time, not the run."""
    return tuple(
        one for one in pending if isinstance(one.body, bodies.MoveRequested) or one.number > overridden
    )


def _intended(state: RunState, event: Event, body: bodies.AttemptIntended) -> RunState:
    attempt = AttemptState(
        generation=body.generation,
        number=body.attempt,
        allocation=body.allocation,
        reason=body.reason,
        spec_hash=body.spec_hash,
        memory_bytes=body.memory_bytes,
        vcpus=body.vcpus,
        checkpoint_every_s=body.checkpoint_every_s,
        intended_at=event.at,
    )
    return replace(state, attempts=(*state.attempts, attempt), refused=())


def _change(state: RunState, body: bodies.AttemptBody, **changes: Any) -> RunState:
    """Change the live attempt, if the event names it."""
    last = state.live
    if last is None or not _is_named(last, body):
        return state
    return replace(state, attempts=(*state.attempts[:-1], replace(last, **changes)))


def _stopping(state: RunState, event: Event, body: bodies.AttemptStopping | bodies.MoveAccepted) -> RunState:
    return _change(
        _answered(state, body.request),
        body,
        phase="stopping",
        stop_reason=body.stop_reason,
        stop_number=event.number,
        stop_detail=body.reason,
        stop_align=body.align,
        stop_grace_s=body.grace_s,
        stop_request=body.request,
        target=body.target,
        change=None,
        stopping_at=event.at,
    )


def _changed(state: RunState, event: Event, body: bodies.Changed) -> RunState:
    live = state.live
    if live is None or live.change is None:
        return state
    return _change(
        replace(state, refused=()),
        body,
        earlier=(*live.earlier, Before(live.allocation, event.at, body.step)),
        allocation=live.change.target,
        change=None,
        next_allocation=None,
        handle=body.handle or live.handle,
        memory_bytes=live.memory_bytes if body.memory_bytes is None else body.memory_bytes,
        vcpus=live.vcpus if body.vcpus is None else body.vcpus,
    )


def _of_ended(state: RunState, body: bodies.AttemptBody, **changes: Any) -> RunState:
    """Change the ended attempt that the event names."""
    changed = (
        replace(one, **changes) if _is_named(one, body) and not one.is_live else one for one in state.attempts
    )
    return replace(state, attempts=tuple(changed))


def _released(state: RunState, event: Event, body: bodies.AttemptReleased) -> RunState:
    """Use the backend's last bill if it is more complete than the one at the end."""
    end = next((one.end for one in state.attempts if _is_named(one, body)), None)
    if end is not None:
        usage = end.usage if body.usage is None else body.usage
        end = replace(end, usage=usage, usd=end.usd if body.usd is None else body.usd)
    return _of_ended(state, body, ended=end, unreleased="", released_at=event.at)


def _is_named(attempt: AttemptState, body: bodies.AttemptBody) -> bool:
    return (attempt.generation, attempt.number) == (body.generation, body.attempt)


def _answered(state: RunState, request: int | None) -> RunState:
    return replace(state, pending=tuple(item for item in state.pending if item.number != request))


def _refused(state: RunState, event: Event, body: bodies.MoveRefused) -> RunState:
    asked = next((item.body for item in state.pending if item.number == body.request), None)
    now = _answered(state, body.request)
    if not isinstance(asked, bodies.MoveRequested) or asked.forced or asked.target is None:
        return now
    name = asked.target.name
    before = next((item.times for item in state.refused if item.target == name), 0)
    others = tuple(item for item in state.refused if item.target != name)
    return replace(now, refused=(*others, Refusal(name, before + 1, event.at))[-MOST_REFUSALS:])
