"""Release the machines of ended attempts, retrying until it succeeds; bill what keeps running."""

from __future__ import annotations

import logging
from dataclasses import replace

from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.control import Asking
from envscaler_airflow.owner.stage import Waiting, Watching
from envscaler_airflow.run import AttemptState, Handle, RunState
from envscaler_airflow.run.event_bodies import AttemptReleased, ReleaseFailed

log = logging.getLogger(__name__)

HOLD_S = 600.0
"""How long a finished run waits for its machines to be released, seconds. Chosen: longer than an API
server takes to restart; the next stage need not wait longer for what `envscaler reap` can remove."""
HOLD_EVERY_S = 30.0
"""Interval between two tries to release, seconds. Chosen: two statuses of a node."""


class Releasing(Asking):
    """An owner that releases ended attempts, each once per execution."""

    def _released(self, state: RunState) -> RunState:
        """Return the state after trying to release every ended attempt that may still use machines."""
        if state.unknown:
            return state
        for attempt in state.attempts:
            key = (attempt.generation, attempt.number)
            is_last = attempt is state.attempts[-1]
            if attempt.is_live or attempt.handle is None or attempt.released_at is not None:
                continue
            if key not in self._tried and (attempt.unreleased or is_last):
                self._tried.add(key)
                return self._released(self._release(state, attempt, attempt.handle))
        return state

    def _release(self, state: RunState, attempt: AttemptState, handle: Handle) -> RunState:
        try:
            why = self._why_held(attempt, handle)
            if not why:
                self._backend.release(handle)
        except BackendError as err:
            why = str(err)
            if err.transient:
                self._holding[attempt.generation, attempt.number] = why
        if not why:
            return self._append(state, self._bill(attempt)) if attempt.unreleased else state
        log.warning("attempt %d is not released, and is tried again: %s", attempt.number, why)
        if attempt.unreleased:
            return state
        failed = ReleaseFailed(generation=attempt.generation, attempt=attempt.number, detail=why)
        return self._append(state, failed)

    def _why_held(self, attempt: AttemptState, handle: Handle) -> str:
        """Return why the machines of an ended attempt are not released yet; "" if nothing of it runs.

        An attempt recorded as lost that still runs is ended now: everything that it writes is void.
        """
        nodes = self._backend.observe(handle).nodes
        lives = [str(one.node) for one in nodes if one.state in ("pending", "starting", "running")]
        if lives:
            self._backend.stop(handle, grace_s=0)
            why = f"node {', '.join(lives)} still runs, and is stopped"
            self._holding[attempt.generation, attempt.number] = why
            return why
        is_unseen = attempt.outcome == "lost" and any(one.state == "unknown" for one in nodes)
        return "whether it still runs is unknown" if is_unseen else ""

    def _bill(self, attempt: AttemptState) -> AttemptReleased:
        """Return the event with the backend's last bill, if the bill at the attempt's end was incomplete."""
        released = AttemptReleased(generation=attempt.generation, attempt=attempt.number)
        if not facts.may_be_held(attempt):
            return released
        usage, now = facts.usage_of(self._backend, attempt), self._run.now()
        usd = facts.usd_of(attempt, usage, now=now)
        return replace(released, usage=facts.billed(usage), usd=usd)

    def _until_released(self, state: RunState) -> Waiting | None:
        """Return a short wait while machines of an ended run must still be released; None otherwise."""
        now = self._run.now()
        for attempt in state.attempts:
            why = self._holding.get((attempt.generation, attempt.number))
            if why is not None and attempt.ended_at is not None and now - attempt.ended_at < HOLD_S:
                watching = Watching(state.number, state.generation, backoff_s=HOLD_EVERY_S)
                return Waiting(watching, f"attempt {attempt.number} has ended and is not released: {why}")
        return None
