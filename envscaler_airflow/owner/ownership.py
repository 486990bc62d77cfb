"""The owner of a run: what it acts on, its events, and whether it still is the owner."""

from __future__ import annotations

import logging
from dataclasses import replace

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.sanitize import shortened
from envscaler_airflow.owner.stage import Stage, SupersededError
from envscaler_airflow.run import Actor, AttemptState, RunState, fold
from envscaler_airflow.run.event_bodies import KnownBody
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)


class Owner:
    """One try of a stage's task: what it owns, and how it records what it does."""

    def __init__(
        self,
        *,
        run: Run,
        backend: Backend,
        actor: Actor,
        stage: Stage,
    ) -> None:
        """Act on *run*, through *backend*, as *actor*, for what *stage* requests."""
        self._stage = stage
        self._run = run
        self._backend = backend
        self._actor = actor
        self._tried: set[tuple[int, int]] = set()
        """Ended attempts that this execution tried to release."""
        self._holding: dict[tuple[int, int], str] = {}
        """Those of them that will soon be released, each with what it waits for."""

    def _spec(self, state: RunState) -> EnvSpec:
        """Return the frozen spec of the run."""
        return self._run.spec(state.spec_hash)

    def _usd_left(self, state: RunState, live: AttemptState) -> float | None:
        """Total that the live attempt may cost; None without a budget, or if a price is unknown."""
        if self._stage.budget_usd is None:
            return None
        others = replace(state, attempts=tuple(item for item in state.attempts if item is not live))
        spent = facts.spent_usd(others, self._backend, now=self._run.now())
        return None if spent is None else self._stage.budget_usd - spent

    # -- events

    def _append(self, state: RunState, body: KnownBody) -> RunState:
        """Return the state after the event, or after the event that another writer put at its number."""
        event = self._run.events.append(state.number, shortened(body), actor=self._actor)
        if event is not None:
            log.debug("run=%s event=%d type=%s", self._run.prefix, event.number, body.type)
            return fold([event], state)
        return fold(self._run.events.read(after=state.number), state)

    def _is_ours(self, state: RunState) -> bool:
        """Return True if the last ``owner`` event names this try."""
        return self._actor.is_try_of(state.owner)

    def _check_owner(self, state: RunState) -> None:
        if not self._is_ours(state):
            raise SupersededError(
                f"run {self._run.prefix} is owned by {_name(state.owner)}, not by {_name(self._actor)}"
            )

    def _check_still_owner(self, state: RunState) -> RunState:
        """Return the current state before an external action: this process may have slept since *state*."""
        now = fold(self._run.events.read(after=state.number), state)
        self._check_owner(now)
        return now


def _name(actor: Actor | None) -> str:
    return "no try" if actor is None else f"{actor.ti_id} (try {actor.try_number})"


def live_of(state: RunState) -> AttemptState:
    """Return the live attempt; there must be one."""
    if state.live is None:
        raise RuntimeError(f"event {state.number}: no live attempt")
    return state.live
