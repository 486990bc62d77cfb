"""What an execution of the owner does about a store or backend that does not answer meanwhile. Pure."""

from __future__ import annotations

from dataclasses import replace

from envscaler_airflow.errors import BackendError, EnvScalerError, StoreError
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.run import Actor, RunState

FIRST_S = 15.0
MOST_S = 600.0
"""Shortest and longest pause before the next execution, seconds. Chosen: an API server that restarts is back
in seconds; a region that is down is not asked more than six times an hour."""
PATIENCE_S = 1800.0
"""Beyond ``orphan_after``, by when a sidecar without an owner has saved and ended, before Airflow's own retry
takes over, seconds. Chosen: the last saves of a large model fit."""


def is_passing(err: EnvScalerError) -> bool:
    """True for what may pass by itself: no answer of the backend, or whatever the store says.

    A store that refuses, as with expired credentials, stops no training; the log of each execution says so.
    """
    return isinstance(err, StoreError) or (isinstance(err, BackendError) and err.transient)


def postponed(watching: Watching, wake: Wake, *, watched_s: float, least_s: float) -> Watching | None:
    """What to watch until the next execution; None when Airflow's retry is to take over.

    Args:
        watching: What was watched when *wake* came.
        wake: What the execution without an answer was for.
        watched_s: How long the watcher watched, seconds of its own clock.
        least_s: Shortest pause that Airflow stands between two executions, seconds.
    """
    faulty_s = watching.faulty_s + watched_s if watching.faults else 0.0
    if faulty_s >= watching.orphan_after_s + PATIENCE_S:
        return None
    pause_s = max(least_s, min(MOST_S, FIRST_S * 2.0 ** min(watching.faults, 16)))
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
    """What a try that began an attempt has to watch; None when it owns nothing that may run."""
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
