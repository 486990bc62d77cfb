"""``cancel``: ask the owner of a run to stop it, and stop what no owner watches."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import click

from envscaler_airflow.backends import create_backend
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.cli.cluster import settings_of
from envscaler_airflow.cli.common import load_state, output_option, shell_backend, store_option
from envscaler_airflow.cli.foreground import Foreground, shell_actor
from envscaler_airflow.cli.inspect import followed
from envscaler_airflow.cli.owners import SILENT_S, Ownership, address_of, owner_of, write_owner
from envscaler_airflow.cli.progress import Voice
from envscaler_airflow.errors import BackendError, ProtocolError, RunFailedError
from envscaler_airflow.owner.freeze import key_of
from envscaler_airflow.owner.request import kill_quietly, request_stop
from envscaler_airflow.owner.stage import Stage, StoppedError
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.run import Actor, RunState
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.events import EventLog
from envscaler_airflow.store.keys import SHELL_DAG
from envscaler_airflow.store.lease import read_lease

POLL_S = 2.0
"""How often a waiting ``cancel`` looks. Chosen: a person who waits notices no delay."""
REASON = "cancelled from a shell"


@click.command()
@click.argument("run")
@click.option("--wait/--no-wait", default=False, help="Wait until the run has stopped.")
@output_option
@store_option
def cancel(run: str, *, wait: bool, as_json: bool, store: Store) -> None:
    """Ask the owner of RUN to save and stop it; stop it from here if no owner watches it."""
    prefix, state = followed(store, run)
    done = "nothing to stop"
    if state.status == "active":
        done = _Cancel(store, prefix, say=lambda line: click.echo(line, err=as_json)).carry_out(
            state, wait=wait
        )
    else:
        click.echo(f"{prefix}: {state.status}, there is nothing to stop", err=as_json)
    if as_json:
        after = load_state(store, prefix)
        click.echo(json.dumps({"run": prefix, "did": done, "status": after.status, "reason": after.reason}))


@dataclass(slots=True)
class _Cancel:
    """One cancel of one active run.

    Attributes:
        store, prefix: Of the run.
        say: Prints a line.
    """

    store: Store
    prefix: str
    say: Callable[[str], None]

    def carry_out(self, state: RunState, *, wait: bool) -> str:
        """What was done, in a word: ``asked``, ``stopped``."""
        owner = owner_of(self.store, self.prefix, state)
        is_shell = self.prefix.split("/")[1] == SHELL_DAG
        is_sure = owner.presence == "gone" and not (is_shell and owner.is_by_age)
        if is_sure:
            return self._stop_orphan(state, owner)
        request_stop(self.store, self.prefix, reason=REASON, by=getpass.getuser())
        self.say(f"{self.prefix}: asked {owner.name} to save and stop")
        if not wait and owner.presence == "there":
            return "asked"
        self.say(f"waiting for a sign of it, at most {duration_text(SILENT_S)}; Ctrl-C leaves the request")
        try:
            after = await_end(self.store, self.prefix, time.sleep, is_sign_enough=not wait)
        except OwnerGoneError as err:
            return self._stop_orphan(load_state(self.store, self.prefix), replace(owner, why=str(err)))
        if after.status == "active":
            self.say("its owner has received the request")
            return "asked"
        return self._told(after)

    def _told(self, after: RunState) -> str:
        self.say(f"{self.prefix}: {after.status}" + (f": {after.reason}" if after.reason else ""))
        return after.status

    def _stop_orphan(self, state: RunState, owner: Ownership) -> str:
        self.say(f"{self.prefix}: no owner watches it: {owner.name}, {owner.why}")
        if self.prefix.split("/")[1] != SHELL_DAG:
            return self._beside_airflow(state)
        return self._told(self._as_owner(state))

    def _as_owner(self, state: RunState) -> RunState:
        """Become the owner, and stop it."""
        actor, backend = shell_actor(self.store, self.prefix), self._backend_of(state)
        write_owner(self.store, self.prefix, actor.ti_id, backend)
        _append(self.store, self.prefix, "owner", {"reason": "to stop it: no owner watches it"}, actor)
        if state.live is None:
            body = {"generation": state.generation, "reason": REASON}
            return _append(self.store, self.prefix, "stopped", body, actor)
        request_stop(self.store, self.prefix, reason=REASON, by=getpass.getuser())
        owner = Foreground(
            self.store,
            key_of(self.store, self.prefix),
            Stage(spec=None, spec_source=""),
            backend,
            Voice(to_stderr=True),
            actor,
            shows_training=False,
        )
        with suppress(StoppedError, RunFailedError):
            owner.go_on()
        return load_state(self.store, self.prefix)

    def _backend_of(self, state: RunState) -> Backend:
        """The backend of the live attempt, also of an intended one, where its last shell reached it."""
        if state.live is not None and state.live.allocation.offer.cloud == "kubernetes":
            return create_backend("kubernetes", settings_of(None, {}) | address_of(self.store, self.prefix))
        return shell_backend()

    def _beside_airflow(self, state: RunState) -> str:
        """What a kill of the task does: its next try finds the request; what still runs saves and ends."""
        owner = state.owner
        acted = False
        if owner is not None and state.live is not None:
            backend = self._backend_of(state)
            acted = kill_quietly(self.store, self.prefix, backend, ti_id=owner.ti_id, reason=REASON)
        if acted:
            self.say("asked what still runs to save and stop; the next try of its task records the end")
            return "asked"
        request_stop(self.store, self.prefix, reason=REASON, by=getpass.getuser())
        self.say("nothing of it runs; the next try of its task finds the request and stops")
        return "asked"


def _append(store: Store, prefix: str, kind: str, body: Mapping[str, Any], actor: Actor) -> RunState:
    """Append the event at the next free number, if the run is active; return the state after it."""
    log = EventLog(store, prefix)
    while (state := log.load()).status == "active":
        if log.append(state.number, kind, body, actor=actor):
            return log.load()
    return state


class OwnerGoneError(BackendError):
    """No process watches the run that is waited for."""


def await_end(
    store: Store,
    prefix: str,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float] = time.monotonic,
    *,
    is_sign_enough: bool = False,
) -> RunState:
    """State of the run once it is over, or with *is_sign_enough* once its owner has shown itself.

    Raises:
        OwnerGoneError: No process watches it: neither an event came nor was the lease renewed for so long.
    """
    heard, last = monotonic(), _signs(store, prefix)
    while True:
        state, now = load_state(store, prefix), _signs(store, prefix)
        if state.status != "active" or (is_sign_enough and now != last):
            return state
        if now != last:
            heard, last = monotonic(), now
        if monotonic() - heard >= SILENT_S:
            raise OwnerGoneError(f"its lease was not renewed for {duration_text(SILENT_S)}")
        owner = owner_of(store, prefix, state)
        if owner.presence == "gone" and not owner.is_by_age:
            raise OwnerGoneError(owner.why)
        sleep(POLL_S)


def _signs(store: Store, prefix: str) -> tuple[int, int | None]:
    """What changes when an owner does anything."""
    return load_state(store, prefix).number, _lease_counter(store, prefix)


def _lease_counter(store: Store, prefix: str) -> int | None:
    try:
        lease = read_lease(store, prefix)
    except ProtocolError:
        return None
    return None if lease is None else lease.counter
