"""Send a request to the owner of a run: what sensors, shells and kill paths do.

Nothing here starts or replaces an attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envscaler_agent.protocol import Control
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.errors import BackendError, ProtocolError, StoreError
from envscaler_airflow.owner import limits
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import MAX_EVENT_BYTES, Actor, AttemptState, Event, Handle, RunState
from envscaler_airflow.run.event_bodies import Accepted, MoveRequested, StopRequested
from envscaler_airflow.store.run import Run

MOST_EVENTS = 20_000
"""Most events of a run that may still be moved. Chosen: a run has tens; each reader folds all of them."""


def request_stop(run: Run, *, reason: str, by: str) -> Event:
    """Ask the owner to checkpoint and stop the run.

    Raises:
        StoreError: The store cannot be written.
    """
    return run.events.append_request(StopRequested(reason=reason, by=by), actor=None)


def request_move(
    run: Run,
    *,
    target: Allocation,
    from_attempt: tuple[int, int],
    because: Mapping[str, Any],
) -> Event:
    """Ask the owner to move the live attempt to *target*.

    Args:
        run: Whose attempt.
        target: The allocation to move to.
        from_attempt: ``(generation, attempt)`` that the numbers were taken from; the request is
            stale for any other.
        because: ``reason``, ``numbers`` and ``check`` of the decision, JSON. If they are very long, only what
            the owner needs; the rest is in ``decisions/``.

    Raises:
        StoreError: The store cannot be written.
        ProtocolError: The run has :data:`MOST_EVENTS` events; only requests to stop it are accepted.
    """
    if run.events.load().number >= MOST_EVENTS:
        raise ProtocolError(f"{run.uri('events')}: has {MOST_EVENTS} events or more, and is not moved again")
    move = MoveRequested(**_shortened(because, target), target=target, from_attempt=from_attempt)
    return run.events.append_request(move, actor=None)


def _shortened(because: Mapping[str, Any], target: Allocation) -> Mapping[str, Any]:
    """Return *because*, without the other candidates and the samples if it is too large for an event."""
    if len(json.dumps(because)) <= MAX_EVENT_BYTES // 2:
        return because
    short = dict(because)
    numbers, check = because.get("numbers"), because.get("check")
    if isinstance(numbers, Mapping):
        moving = numbers.get("moving")
        there = moving.get(target.name) if isinstance(moving, Mapping) else None
        short["numbers"] = {
            **{key: value for key, value in numbers.items() if not isinstance(value, Mapping | list)},
            **({"staying": numbers["staying"]} if "staying" in numbers else {}),
            **({} if there is None else {"moving": {target.name: there}}),
        }
    if isinstance(check, Mapping):
        seen, decision = dict(check["observation"]), dict(check["decision"])
        for name in ("candidates", "samples", "wanted"):
            seen.pop(name, None)
        short["check"] = {**check, "observation": seen, "decision": {**decision, "numbers": {}, "wanted": {}}}
    return short


def kill_quietly(
    run: Run,
    backend: Backend,
    *,
    ti_id: str,
    reason: str,
    try_number: int | None = None,
    person: str | None = None,
) -> bool:
    """Handle a user's kill of a deferred task: ask the attempt to save and stop, wait for nothing.

    Between two attempts only the request is written, and no further attempt starts.
    Acts only while the run's last owner is the try (*ti_id*, *try_number*), if the number is known: on a
    clear, the kill of the old try comes after the new one has begun. *person* is the one who cancels the
    run; None if the task itself is over. Returns whether it acted.

    Raises:
        StoreError: The store cannot be read or written; the lease ends the attempt then.
    """
    stop = StopRequested(reason=reason, by=f"ti {ti_id}", ti_id=ti_id)
    if person is not None:
        stop = StopRequested(reason=reason, by=person)
    while True:
        state = run.events.load()
        live = state.live
        if state.status != "active" or not owns(state.owner, ti_id, try_number):
            return False
        event = run.events.append(state.number, stop, actor=None)
        if event is not None:
            break  # otherwise the number was taken, perhaps by a new owner: read again
    if live is None:
        return True
    grace_s = _grace_s(run, state, live)
    control = replace(
        run.control(live.key) or Control(),
        sequence=event.number,
        action="drain",
        align="now",
        grace_s=grace_s,
        reason=reason,
    )
    run.write_control(live.key, control)
    if live.handle is not None:
        _stop_gracefully(backend, live.handle, grace_s=grace_s)
    return True


def owns(owner: Actor | None, ti_id: str, try_number: int | None) -> bool:
    """Return True if *owner* is that try; compares only the task instance if *try_number* is unknown."""
    is_try = owner is not None and try_number in (None, owner.try_number)
    return is_try and owner is not None and owner.ti_id == ti_id


def accept_delivery(run: Run, actor: Actor) -> bool:
    """Record that Airflow accepted the result delivered to *actor*; returns whether it is recorded.

    Only while the last ``owner`` event names *actor*: a newer try delivers again.

    Raises:
        StoreError: The store cannot be read or written; a clear then delivers the same result again.
        ProtocolError: An event cannot be read.
    """
    while True:
        state = run.events.load()
        if state.accepted or not actor.is_try_of(state.owner) or not state.delivered:
            return state.accepted
        run.events.append(state.number, Accepted(generation=state.generation), actor=actor)


def _grace_s(run: Run, state: RunState, live: AttemptState) -> float:
    """Twice the time of the last checkpoint; the minimum if the store does not report it."""
    try:
        status = run.status(live.key)
    except StoreError:
        status = None
    return limits.grace_s(state, status)


def _stop_gracefully(backend: Backend, handle: Handle, *, grace_s: float) -> None:
    try:
        backend.stop(handle, grace_s=grace_s)
    except BackendError as err:
        if not err.transient:
            raise
