"""Answer a requested move, after a check against current facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envscaler_airflow.backends.base import Backend, CountsFree
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import BackendError, NoOfferError
from envscaler_airflow.owner import choose, in_place_change, stop
from envscaler_airflow.owner.observe import ScalingWatcher
from envscaler_airflow.owner.owned_run import OwnedRun, live_of
from envscaler_airflow.planning import Allocation
from envscaler_airflow.run import Action, AttemptState, Request, RunState
from envscaler_airflow.run.event_bodies import (
    ChangeIntended,
    MoveAccepted,
    MoveDeferred,
    MoveRefused,
    MoveRequested,
)
from envscaler_airflow.scaling import Check, Observation, validate
from envscaler_airflow.store.run import Run


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: *target* is None for a refusal."""

    target: Allocation | None
    reason: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def answer(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Accept or refuse a requested move, after a check against current facts."""
    if action.request is None:
        raise RuntimeError("nothing to judge")
    live, spec = live_of(state), owned.spec(state)
    verdict = _judge(owned.run, state, spec, owned.backend, action.request)
    answer: dict[str, Any] = {
        "request": action.request.number,
        "reason": verdict.reason,
        "numbers": verdict.numbers,
    }
    if verdict.target is None:
        return owned.append(state, MoveRefused(**answer))
    way = in_place_change.way_of(spec, live, verdict.target, owned.backend)
    drained = in_place_change.nodes_to_drain(owned, live, verdict.target)
    is_last = in_place_change.are_last(drained, live, verdict.target)
    if way == "rescale" and (not is_last or in_place_change.has_session(owned, live)):
        way = "move"  # only the last nodes can be removed without restarting the rest
    answer |= {"generation": live.generation, "attempt": live.number}
    answer |= {"target": verdict.target, "nodes_to_drain": drained or None}
    if way == "next-start":
        return owned.append(state, MoveDeferred(**answer, kind=way))
    if way != "move":
        return owned.append(state, ChangeIntended(**answer, kind=way))
    stopping = stop.stop_event(owned, state, replace(action, stop_reason="move"), spec.checkpoint_align)
    accepted = MoveAccepted(**answer, align=stopping.align, grace_s=stopping.grace_s)
    return stop.record_stop(owned, state, accepted)


def refuse(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Refuse a request without a check."""
    if action.request is None:
        raise RuntimeError("nothing to refuse")
    return owned.append(state, MoveRefused(request=action.request.number, reason=action.reason))


def _judge(
    run: Run,
    state: RunState,
    spec: EnvSpec,
    backend: Backend,
    request: Request,
) -> Verdict:
    """Accept or refuse the move that *request* asks for.

    Read again: the attempt and its health, work done, offers and prices, money and time left.
    The speed of the current machine is the sensor's, which watched it for longer than an execution can.

    Raises:
        StoreError: The store cannot be read.
    """
    live = state.live
    if live is None:
        return Verdict(None, "no attempt is live")
    asked = request.body
    if not isinstance(asked, MoveRequested) or asked.fault is not None or asked.target is None:
        return Verdict(None, f"the request cannot be read: {asked.fault or 'it has no target'}")
    target, asked_from = asked.target, asked.from_attempt
    if asked_from and asked_from != (live.generation, live.number):
        return Verdict(None, f"the request was for attempt {asked_from[-1]}; now attempt {live.number} runs")
    try:
        offers = backend.offers()
    except (BackendError, NoOfferError) as err:
        return Verdict(None, f"the available offers are unknown now: {err}")
    refusal = choose.fits(spec, target, offers)
    if refusal is not None:
        return Verdict(None, refusal)
    fresh = {offer.name: offer for offer in offers}
    rest = None if target.rest is None else fresh[target.rest.name]
    target = replace(target, offer=fresh[target.offer.name], rest=rest)
    watcher = ScalingWatcher(run=run, backend=backend, also=target)
    return _validate(watcher, state, live, asked, target, backend)


def _free_nodes(backend: Backend, live: AttemptState, target: Allocation) -> Mapping[str, int]:
    """Nodes available besides those that the stage has; empty if the backend does not report them.

    What the stage itself uses counts as free: it stops before it starts elsewhere.
    """
    if not isinstance(backend, CountsFree):
        return {}
    try:
        free = backend.free_nodes([part.offer for part in target.parts], without=live.handle)
    except BackendError:
        return {}
    held = {part.offer.name: part.nodes for part in live.allocation.parts}
    return {name: max(0, nodes - held.get(name, 0)) for name, nodes in free.items()}


def _validate(
    watcher: ScalingWatcher,
    state: RunState,
    live: AttemptState,
    asked: MoveRequested,
    target: Allocation,
    backend: Backend,
) -> Verdict:
    now = watcher.observation(state, live)
    seen = _seen_by_requester(asked)
    free = _free_nodes(backend, live, target)
    others = tuple(item for item in state.pending if item.body is not asked)
    now = replace(
        now,
        # A single read has no age; treat a node that has reported as healthy.
        health="ok" if now.health == "unknown" and now.units_done is not None else now.health,
        speeds={**(seen.speeds if seen else {}), **now.speeds},
        measured=now.measured if seen is None else seen.measured,
        history=now.history if seen is None else seen.history,
        since_move_s=_longest(now, seen),
        pending=None if not others and live.phase != "stopping" else now.pending,
        free_nodes=free,
        refused={},  # the requester has already waited
    )
    is_forced = bool(asked.forced)
    policy, policies = watcher.policy(state), watcher.policies
    if not is_forced and policy.name not in policies:
        return Verdict(None, f"policy {policy.name!r} is not installed where the owner runs")
    decision = validate(now, policy, target, is_forced=is_forced, policies=policies)
    numbers = {**json.loads(json.dumps(dict(decision.numbers))), "units_left": now.units_left}
    if decision.action != "move":
        return Verdict(None, decision.reason, numbers)
    if decision.target.name != target.name:
        return Verdict(None, f"the policy now wants {decision.target.name}", numbers)
    return Verdict(target, decision.reason, numbers)


def _longest(now: Observation, seen: Observation | None) -> float | None:
    """Return the time since the last move, which the requester may know for longer."""
    if seen is None or seen.since_move_s is None or now.since_move_s is None or seen.moves != now.moves:
        return now.since_move_s
    return max(now.since_move_s, seen.since_move_s)


def _seen_by_requester(asked: MoveRequested) -> Observation | None:
    """Return what the sensor saw at its request; None if it is missing or from another version."""
    try:
        return Check.from_dict(asked.check).observation
    except ValueError:
        return None
