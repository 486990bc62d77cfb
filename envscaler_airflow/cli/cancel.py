"""``cancel``: ask the owner of a run to stop it, stop what no owner watches. ``prune``: remove old runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from envscaler_airflow.backends import backend_names
from envscaler_airflow.backends.base import Backend
from envscaler_airflow.cli.backends import shell_backend
from envscaler_airflow.cli.common import duration_option, echo_json, echo_result, output_option, store_option
from envscaler_airflow.cli.follow import Voice
from envscaler_airflow.cli.inspect import followed
from envscaler_airflow.cli.shell_owner import (
    SILENT_S,
    Foreground,
    Ownership,
    address_of,
    is_of_shell,
    owner_of,
    shell_actor,
    write_owner,
)
from envscaler_airflow.clouds import all_clouds
from envscaler_airflow.errors import BackendError, RunFailedError, SpecError
from envscaler_airflow.local_files import user_name
from envscaler_airflow.owner.prune import OldRun
from envscaler_airflow.owner.prune import prune as prune_runs
from envscaler_airflow.owner.request import kill_quietly, request_stop
from envscaler_airflow.owner.stage import Stage, StoppedError
from envscaler_airflow.planning.amounts import bytes_text, duration_text
from envscaler_airflow.run import Actor, RunState
from envscaler_airflow.run.event_bodies import NewOwner, Stopped
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import Store

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
    found, state = followed(store, run)
    done = "nothing to stop"
    if state.status == "active":
        done = _Cancel(found, say=lambda line: click.echo(line, err=as_json)).carry_out(state, wait=wait)
    else:
        click.echo(f"{found.prefix}: {state.status}, there is nothing to stop", err=as_json)
    if as_json:
        after = found.events.load()
        echo_json({"run": found.prefix, "did": done, "status": after.status, "reason": after.reason})


@dataclass(slots=True)
class _Cancel:
    """One cancel of one active run.

    Attributes:
        run: Which run.
        say: Prints a line.
    """

    run: Run
    say: Callable[[str], None]

    def carry_out(self, state: RunState, *, wait: bool) -> str:
        """What was done, in a word: ``asked``, ``stopped``."""
        owner = owner_of(self.run, state)
        is_sure = owner.presence == "gone" and not (is_of_shell(self.run) and owner.is_by_age)
        if is_sure:
            return self._stop_orphan(state, owner)
        request_stop(self.run, reason=REASON, by=user_name())
        self.say(f"{self.run.prefix}: asked {owner.name} to save and stop")
        if not wait and owner.presence == "there":
            return "asked"
        self.say(f"waiting for a sign of it, at most {duration_text(SILENT_S)}; Ctrl-C leaves the request")
        try:
            after = await_end(self.run, time.sleep, is_sign_enough=not wait)
        except OwnerGoneError as err:
            return self._stop_orphan(self.run.events.load(), replace(owner, why=str(err)))
        if after.status == "active":
            self.say("its owner has received the request")
            return "asked"
        return self._told(after)

    def _told(self, after: RunState) -> str:
        self.say(f"{self.run.prefix}: {after.status}" + (f": {after.reason}" if after.reason else ""))
        return after.status

    def _stop_orphan(self, state: RunState, owner: Ownership) -> str:
        self.say(f"{self.run.prefix}: no owner watches it: {owner.name}, {owner.why}")
        if not is_of_shell(self.run):
            return self._beside_airflow(state)
        return self._told(self._as_owner(state))

    def _as_owner(self, state: RunState) -> RunState:
        """Become the owner, and stop it."""
        actor, backend = shell_actor(self.run), backend_of(self.run, state)
        write_owner(self.run, actor.ti_id, backend)
        _append(self.run, NewOwner(reason="to stop it: no owner watches it"), actor)
        if state.live is None:
            stopped = Stopped(generation=state.generation, reason=REASON)
            return _append(self.run, stopped, actor)
        request_stop(self.run, reason=REASON, by=user_name())
        owner = Foreground(
            self.run,
            Stage(spec=None, spec_source=""),
            backend,
            Voice(to_stderr=True),
            actor,
            shows_training=False,
        )
        with suppress(StoppedError, RunFailedError):
            owner.go_on()
        return self.run.events.load()

    def _beside_airflow(self, state: RunState) -> str:
        """What a kill of the task does: its next try finds the request; what still runs saves and ends."""
        owner = state.owner
        acted = False
        if owner is not None and state.live is not None:
            backend = backend_of(self.run, state)
            acted = kill_quietly(self.run, backend, ti_id=owner.ti_id, reason=REASON, person=user_name())
        if acted:
            self.say("asked what still runs to save and stop; the next try of its task records the end")
            return "asked"
        request_stop(self.run, reason=REASON, by=user_name())
        self.say("nothing of it runs; the next try of its task finds the request and stops")
        return "asked"


def backend_of(run: Run, state: RunState) -> Backend:
    """The backend of the live attempt, also of an intended one, where its last shell reached it."""
    name = "" if state.live is None else state.live.allocation.offer.cloud
    if name not in backend_names():
        name = "local"
    return shell_backend(name, given=address_of(run, name))


def _append(run: Run, body: NewOwner | Stopped, actor: Actor) -> RunState:
    """Append the event at the next free number, if the run is active; return the state after it."""
    while (state := run.events.load()).status == "active":
        if run.events.append(state.number, body, actor=actor):
            return run.events.load()
    return state


class OwnerGoneError(BackendError):
    """No process watches the run that is waited for."""


def await_end(
    run: Run,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float] = time.monotonic,
    *,
    is_sign_enough: bool = False,
) -> RunState:
    """State of the run once it is over, or with *is_sign_enough* once its owner has shown itself.

    Raises:
        OwnerGoneError: No process watches it: neither an event came nor was the lease renewed for so long.
    """
    heard, last = monotonic(), _signs(run)
    while True:
        state, now = run.events.load(), _signs(run)
        if state.status != "active" or (is_sign_enough and now != last):
            return state
        if now != last:
            heard, last = monotonic(), now
        if monotonic() - heard >= SILENT_S:
            raise OwnerGoneError(f"its lease was not renewed for {duration_text(SILENT_S)}")
        owner = owner_of(run, state)
        if owner.presence == "gone" and not owner.is_by_age:
            raise OwnerGoneError(owner.why)
        sleep(POLL_S)


def _signs(run: Run) -> tuple[int, int]:
    """What changes when an owner does anything."""
    return run.events.load().number, run.lease.known().counter


LONGEST_DAYS = 30
"""Days that a bucket's rule waits beyond ``--older-than``. Source: the longest deadline of a machine; a
bucket deletes each object by its own age, and the first ones of a run that still trains may be that old."""


@click.command()
@click.option(
    "--older-than",
    "older_than_s",
    callback=duration_option,
    default="30d",
    show_default=True,
    metavar="AGE",
    help="Only runs without any sign of an owner for so long.",
)
@click.option("--match", default="", help="Only runs whose name contains this text.")
@click.option("--yes", is_flag=True, help="Remove them; without it they are only listed.")
@click.option(
    "--lifecycle",
    is_flag=True,
    help="Instead, print rules with which the bucket itself deletes old objects, 30 days later than this.",
)
@output_option
@store_option
def prune(
    *, older_than_s: float, match: str, yes: bool, lifecycle: bool, as_json: bool, store: Store
) -> None:
    """List the runs of the store that ended long ago; with --yes, remove them.

    A run stays if it may still train, or if a newer run names its outputs or checkpoints. A removal that was
    interrupted is finished by the next call.
    """
    if lifecycle:
        echo_json(_lifecycle(store.url, older_than_s), indent=2)
        return
    found = []
    for old in prune_runs(
        store, older_than_s=older_than_s, applies_to=lambda prefix: match in prefix, dry_run=not yes
    ):
        found.append(old)
        if not as_json:
            click.echo(_line(old))
    gone = [old for old in found if not old.kept]
    total = f"{sum(old.objects for old in gone)} objects, {bytes_text(sum(old.size_bytes for old in gone))}"
    text = f"{len(gone)} runs, {total}: {'removed' if yes else 'removed by --yes'}"
    echo_result({"dry_run": not yes, "runs": [asdict(old) for old in found]}, text, as_json=as_json)


def _line(old: OldRun) -> str:
    if old.kept:
        return f"{old.prefix}: {old.reason}; kept: {old.kept}"
    outputs = f"; outputs: {', '.join(old.outputs)}" if old.outputs else ""
    return f"{old.prefix}: {old.reason}; {old.objects} objects, {bytes_text(old.size_bytes)}{outputs}"


def _lifecycle(url: str, older_than_s: float) -> Mapping[str, Any]:
    """Rules for the bucket of the store at *url*.

    Raises:
        SpecError: The store is not in a bucket of a cloud whose rules are known.
    """
    scheme, _, place = url.partition("://")
    rules = {name: cloud.lifecycle for cloud in all_clouds().values() for name in cloud.schemes}
    if (render := rules.get(scheme)) is None:
        known = ", ".join(f"{name}://" for name, one in rules.items() if one is not None)
        raise SpecError(f"--lifecycle: {url} is in no bucket whose rules are known; they are for {known}")
    prefix = place.partition("/")[2].rstrip("/")
    return render(f"{prefix}/" if prefix else "", math.ceil(older_than_s / 86_400) + LONGEST_DAYS)
