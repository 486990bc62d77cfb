"""A run as its owner sees it: what a try acts on, its events, and whether the try still owns the run."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace
from typing import Any

from envscaler_airflow.backends.base import Backend
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.errors import StoreError
from envscaler_airflow.owner import facts
from envscaler_airflow.owner.stage import Stage, SupersededError
from envscaler_airflow.run import Actor, AttemptState, RunState, fold
from envscaler_airflow.run.event_bodies import KnownBody
from envscaler_airflow.store.events import FOLDER as EVENTS
from envscaler_airflow.store.run import Run

log = logging.getLogger(__name__)

TEXT_BYTES = 4096
"""Longest text kept in an event, bytes of JSON. Chosen: a detail is one line."""
ITEMS = 16
"""Most texts kept of a list in an event. Chosen: as many as there are candidates for a restore."""
LINES_BYTES = 1 << 17
"""Most last lines kept in an event, bytes of JSON. Chosen: half of the largest event."""


@dataclass(slots=True)
class OwnedRun:
    """A run on which one try of its task acts, as long as no other try owns it.

    Attributes:
        run, backend: What runs, and on what.
        actor: The try.
        stage: What its task requests.
    """

    run: Run
    backend: Backend
    actor: Actor
    stage: Stage

    def spec(self, state: RunState) -> EnvSpec:
        """Return the frozen spec of the run."""
        return self.run.spec(state.spec_hash)

    def spent_usd(self, state: RunState) -> float | None:
        """Cost of the current generation so far, USD; None if a price is unknown."""
        return facts.spent_usd(state, self.backend, now=self.run.now())

    def usd_left(self, state: RunState, live: AttemptState) -> float | None:
        """Total that the live attempt may cost; None without a budget, or if a price is unknown."""
        if self.stage.budget_usd is None:
            return None
        others = replace(state, attempts=tuple(item for item in state.attempts if item is not live))
        spent = self.spent_usd(others)
        return None if spent is None else self.stage.budget_usd - spent

    def append(self, state: RunState, body: KnownBody) -> RunState:
        """Return the state after the event, or after the event that another writer put at its number."""
        event = self.run.events.append(state.number, shortened(body), actor=self.actor)
        if event is not None:
            log.debug("run=%s event=%d type=%s", self.run.prefix, event.number, body.type)
            return fold([event], state)
        return fold(self.run.events.read(after=state.number), state)

    def is_ours(self, state: RunState) -> bool:
        """Return True if the last ``owner`` event names this try."""
        return self.actor.is_try_of(state.owner)

    def check_whole(self, state: RunState) -> None:
        """Raise a transient StoreError while the run is being removed from the store."""
        is_headless = state.number == 0 and bool(self.run.children(EVENTS))  # its first events are deleted
        if state.status == "pruned" or is_headless:
            raise StoreError(
                f"run {self.run.prefix} is being removed from the store; retry, and if that does not help, "
                "finish the removal with `envscaler prune --yes`",
                transient=True,
            )

    def check_owner(self, state: RunState) -> None:
        """Raise SupersededError if another try owns the run."""
        if not self.is_ours(state):
            raise SupersededError(
                f"run {self.run.prefix} is owned by {_name(state.owner)}, not by {_name(self.actor)}"
            )

    def check_still_owner(self, state: RunState) -> RunState:
        """Return the current state before an external action: this process may have slept since *state*."""
        now = fold(self.run.events.read(after=state.number), state)
        self.check_owner(now)
        return now


def _name(actor: Actor | None) -> str:
    return "no try" if actor is None else f"{actor.ti_id} (try {actor.try_number})"


def live_of(state: RunState) -> AttemptState:
    """Return the live attempt; there must be one."""
    if state.live is None:
        raise RuntimeError(f"event {state.number}: no live attempt")
    return state.live


def shortened(body: KnownBody) -> KnownBody:
    """Return an event's *body* with texts, lists of texts and last lines cut, so that it always fits."""
    return replace(body, **{item.name: _short(item.name, getattr(body, item.name)) for item in fields(body)})


def _short(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, TEXT_BYTES)
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        return value
    if name == "last_lines":
        return _newest(value)
    return tuple(_cut(item, TEXT_BYTES // 4) for item in value[:ITEMS])


def _newest(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last of *lines* that fit; if not even one does, its beginning."""
    kept: list[str] = []
    room = LINES_BYTES
    for line in reversed(lines):
        room -= _size(line) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(kept[::-1]) if kept or not lines else (_cut(lines[-1], LINES_BYTES),)


def _cut(text: str, most: int) -> str:
    size = _size(text)
    while size > most:
        text = text[: max(1, len(text) * most // size - 1)] + "…"
        size = _size(text)
    return text


def _size(text: str) -> int:
    """Return the bytes of *text* as JSON: up to twelve for one character."""
    return len(json.dumps(text))
