"""Stop a running attempt, also after a cancel: ask it to save and stop, wait, and kill it if it does not."""

from __future__ import annotations

import logging
from dataclasses import replace

from envscaler_agent.protocol import Control, Progress
from envscaler_airflow.owner import facts, limits
from envscaler_airflow.owner.owned_run import OwnedRun, live_of
from envscaler_airflow.owner.stage import Waiting, Watching
from envscaler_airflow.owner.usage import spans_of
from envscaler_airflow.planning import Allocation
from envscaler_airflow.run import Action, RunState
from envscaler_airflow.run.event_bodies import Alignment, AttemptStopping, KnownBody

log = logging.getLogger(__name__)

RELEASE_AGAIN_S = 600.0
"""Between two tries to release an ended attempt while the next one runs, seconds. Chosen: some seconds of
a worker six times an hour, for machines that may still be billed."""
OVERDUE_MARGIN_S = 60.0
"""Wait beyond alignment and grace before the kill, seconds. Chosen: the last uploads of a node."""


def stop(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Ask the live attempt to save and stop."""
    align: Alignment = "now" if action.stop_reason == "stop" else "step"
    return record_stop(owned, state, stop_event(owned, state, action, align))


def kill(owned: OwnedRun, state: RunState, action: Action) -> Waiting:
    """Stop the machines of an attempt that did not stop in time."""
    live = live_of(state)
    log.warning("attempt %d is killed: %s", live.number, action.reason)
    owned.check_still_owner(state)
    if live.handle is not None:
        owned.backend.stop(live.handle, grace_s=0)
    return waiting(owned, state, action.reason)


def wait(owned: OwnedRun, state: RunState, action: Action) -> Waiting:
    """Wait for the attempt, or for the next start."""
    if action.backoff_s:
        reason = f"{action.reason}; next start in {action.backoff_s:.0f} s"
        orphan_after_s = owned.spec(state).failure.orphan_after_s
        watching = Watching(
            state.number, state.generation, backoff_s=action.backoff_s, orphan_after_s=orphan_after_s
        )
        return Waiting(watching, reason)
    if state.live is not None and state.live.phase == "stopping":
        write_request(owned, state)
    return waiting(owned, state, action.reason)


def stop_event(
    owned: OwnedRun,
    state: RunState,
    action: Action,
    align: Alignment,
    target: Allocation | None = None,
) -> AttemptStopping:
    """Return the request to save and stop, for *action*, with the grace that its checkpoints need."""
    live = live_of(state)
    status = owned.run.status(live.key)
    if status is not None and action.stop_reason == "stalled":
        status = replace(status, progress=Progress())  # no further step is expected of it
    return AttemptStopping(
        generation=live.generation,
        attempt=live.number,
        stop_reason=action.stop_reason,
        reason=action.reason,
        align=align,
        grace_s=limits.grace_s(state, status),
        request=None if action.request is None else action.request.number,
        target=target,
    )


def record_stop(owned: OwnedRun, state: RunState, body: KnownBody) -> RunState:
    """Record *body*, by which the live attempt has to stop, then write the request to its control."""
    after = owned.append(state, body)
    return write_request(owned, after) if after.live and after.live.phase == "stopping" else after


def write_request(owned: OwnedRun, state: RunState) -> RunState:
    """Write the control of a stopping attempt; every execution repeats it until the attempt has ended."""
    live, spec = live_of(state), owned.spec(state)
    before = owned.run.control(live.key)
    control = Control(
        sequence=live.stop_number,
        action="stop" if live.stop_reason == "stalled" else "drain",
        align=live.stop_align,
        align_timeout_s=spec.checkpoint_align_timeout_s,
        grace_s=live.stop_grace_s,
        reason=live.stop_detail,
        candidates=None if before is None else before.candidates,
        restore_from=state.begun.restore_from,
        orphan_after_s=owned.spec(state).failure.orphan_after_s,
    )
    owned.check_still_owner(state)
    owned.run.write_control(live.key, control)
    return state


def waiting(owned: OwnedRun, state: RunState, reason: str) -> Waiting:
    """Return what to watch of the live attempt until its owner is needed."""
    live = live_of(state)
    stopping = live.phase == "stopping"
    overdue = None
    if stopping:
        align = owned.spec(state).checkpoint_align_timeout_s if live.stop_align == "epoch" else 0.0
        overdue = align + live.stop_grace_s + OVERDUE_MARGIN_S
    watching = Watching(
        number=state.number,
        generation=live.generation,
        attempt=live.number,
        nodes=live.allocation.nodes,
        handle=live.handle,
        stopping=stopping,
        age=f"stopping-g{live.generation}-a{live.number}" if stopping else "",
        overdue_after_s=overdue,
        usd_left=None if stopping else owned.usd_left(state, live),
        checkpoint_s=limits.measured_s(state),
        release_after_s=RELEASE_AGAIN_S if any(map(facts.is_unreleased, state.attempts)) else None,
        orphan_after_s=owned.spec(state).failure.orphan_after_s,
        spans=spans_of(live),
        started_at=live.started_at,
    )
    return Waiting(watching, reason)
