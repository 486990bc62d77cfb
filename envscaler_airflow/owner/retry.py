"""What an execution of the owner does about a store or backend that does not answer meanwhile. Pure."""

from __future__ import annotations

from dataclasses import replace

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.errors import BackendError, EnvScalerError, StoreError
from envscaler_airflow.owner.stage import Wake, Watching
from envscaler_airflow.run import Actor, RunState

FIRST_S = 15.0
MOST_S = 600.0
"""Shortest and longest pause before the next execution, seconds. Chosen: an API server that restarts is back
in seconds; a region that is down is not asked more than six times an hour."""
PATIENCE_S = 1800.0
"""Time beyond ``orphan_after`` before Airflow's own retry takes over, seconds. By ``orphan_after`` a sidecar
without an owner has saved and ended. Chosen: the last saves of a large model fit."""


def is_passing(err: EnvScalerError) -> bool:
    """Return True for faults that may pass by themselves: no answer of the backend, or any store error.

    A store that refuses access, as with expired credentials, stops no training; each execution logs it.
    """
    return isinstance(err, StoreError) or (isinstance(err, BackendError) and err.transient)


def postponed(watching: Watching, wake: Wake, *, watched_s: float, least_s: float) -> Watching | None:
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
        handle=None if live.handle is None else live.handle.to_dict(),
        stopping=live.phase == "stopping",
        started_at=live.started_at,
    )
