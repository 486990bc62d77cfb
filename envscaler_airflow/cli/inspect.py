"""``status``, ``logs``, ``report``, ``cancel``: look at runs, and ask their owners to stop."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable

import click

from envscaler_airflow.build.locks import container_image
from envscaler_airflow.cli.common import find_run, load_state, run_prefixes, store_option
from envscaler_airflow.cli.tables import print_report, print_run, print_runs
from envscaler_airflow.controller.report import run_report
from envscaler_airflow.controller.request import request_stop
from envscaler_airflow.controller.watch import read_status
from envscaler_airflow.errors import BackendError, ProtocolError, SpecError
from envscaler_airflow.lifecycle import AttemptState, RunState
from envscaler_airflow.protocol import Status
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.lease import read_lease, waits_of
from envscaler_airflow.store.logs import read_logs

POLL_S = 2.0
"""How often ``logs -f`` looks, seconds. Chosen: chunks are closed every 10 s."""
SILENT_S = 600.0
"""Longest wait for a run that nobody tends, seconds. Chosen: ten renewals of the lease that did not come."""


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="For tools.")
@store_option
def status(run: str | None, *, as_json: bool, store: Store) -> None:
    """Show one RUN, or list all of the store."""
    if run is None:
        rows = [_row(store, prefix) for prefix in run_prefixes(store)]
        if as_json:
            click.echo(json.dumps([{"run": prefix, "status": status} for prefix, status, _ in rows]))
        else:
            print_runs(rows)
        return
    prefix, state = _followed(store, run)
    said = statuses(store, prefix, state.current) if state.current else []
    waits = waits_of(store, prefix) if state.live is not None else ""
    if as_json:
        body = run_report(state, now=time.time())
        nodes = [json.loads(node.to_json()) for node in said if node is not None]
        click.echo(json.dumps({"run": prefix, **body, "nodes": nodes, "waits": waits}))
    else:
        print_run(prefix, state, said, waits=waits)


def _row(store: Store, prefix: str) -> tuple[str, str, RunState]:
    """A run with its status in a list: ``container``, or ``unreadable``, where nothing more is known."""
    try:
        state = load_state(store, prefix)
        is_container = state.status == "none" and container_image(store, prefix) is not None
    except ProtocolError:
        return prefix, "unreadable", RunState()
    return prefix, "container" if is_container else state.status, state


def _followed(store: Store, run: str) -> tuple[str, RunState]:
    """Folder and state of a run that has an owner, and so a story.

    Raises:
        SpecError: There is none of that name, or it ran in a container of this machine.
    """
    prefix = find_run(store, run)
    state = load_state(store, prefix)
    image = container_image(store, prefix) if state.status == "none" else None
    if image is not None:
        raise SpecError(
            f"{prefix} ran in a container of {image}: the shell that ran it has its output and its end, and "
            "Ctrl-C there stops it; the store keeps its lock.json alone"
        )
    return prefix, state


def statuses(store: Store, prefix: str, attempt: AttemptState) -> list[Status | None]:
    """What each node of an attempt last said."""
    key = (attempt.generation, attempt.number)
    return [read_status(store, prefix, attempt=key, node=node) for node in range(attempt.allocation.nodes)]


@click.command()
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    help="Attempt of the current generation; the default is all of them.",
)
@store_option
def logs(run: str, *, follow: bool, attempt: int | None, store: Store) -> None:
    """Print what the training of RUN printed."""
    prefix, state = _followed(store, run)
    begun = len(state.attempts_of(state.generation))
    if attempt is not None and attempt > begun and not follow:
        raise SpecError(f"--attempt {attempt}: {prefix} has begun {begun} in its current generation")
    printed: dict[tuple[int, int, int], tuple[int, int]] = {}
    while True:
        is_over = state.status in ("succeeded", "failed", "stopped")
        for item in state.attempts_of(state.generation):
            if attempt is None or item.number == attempt:
                _print_logs(store, prefix, item, printed)
        if not follow or is_over:
            return
        time.sleep(POLL_S)
        state = load_state(store, prefix)


def _print_logs(
    store: Store, prefix: str, attempt: AttemptState, printed: dict[tuple[int, int, int], tuple[int, int]]
) -> None:
    for node in range(attempt.allocation.nodes):
        key = (attempt.generation, attempt.number, node)
        cursor = printed.get(key, (1, 0))
        while True:
            data, after = read_logs(store, prefix, attempt=key[:2], node=node, cursor=cursor)
            if not data:
                break
            text = data.decode("utf-8", errors="replace")
            mark = f"[{node}] " if attempt.allocation.nodes > 1 else ""
            click.echo("".join(mark + line for line in text.splitlines(keepends=True)), nl=False)
            cursor = after
        printed[key] = cursor


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="For tools.")
@store_option
def report(run: str, *, as_json: bool, store: Store) -> None:
    """Show what RUN cost, by attempt, and where the time went."""
    _, state = _followed(store, run)
    body = run_report(state, now=time.time())
    if as_json:
        click.echo(json.dumps(body))
    else:
        print_report(body)


@click.command()
@click.argument("run")
@click.option("--wait/--no-wait", default=False, help="Wait until the run has stopped, or nobody tends it.")
@store_option
def cancel(run: str, *, wait: bool, store: Store) -> None:
    """Ask the owner of RUN to checkpoint and stop it."""
    prefix, state = _followed(store, run)
    if state.status != "active":
        click.echo(f"{prefix}: {state.status}, there is nothing to stop")
        return
    request_stop(store, prefix, reason="cancelled from a shell", by=getpass.getuser())
    click.echo(f"{prefix}: asked to checkpoint and stop")
    if wait:
        await_end(store, prefix, time.sleep)


def await_end(
    store: Store,
    prefix: str,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float] = time.monotonic,
) -> RunState:
    """State of the run once it is over.

    Raises:
        BackendError: Nobody tends it, and so nobody would ever stop it.
    """
    heard, last = monotonic(), None
    while True:
        state = load_state(store, prefix)
        if state.status != "active":
            return state
        said = (state.number, _lease_counter(store, prefix))
        if said != last:
            heard, last = monotonic(), said
        if monotonic() - heard >= SILENT_S:
            raise BackendError(
                f"{prefix}: nobody has renewed its lease for {SILENT_S / 60:.0f} minutes: its owner is "
                "gone, or waits for a slot. The request stays in the store for the next owner; what still "
                "runs saves and ends by itself once that lasted failure.orphan_after"
            )
        sleep(POLL_S)


def _lease_counter(store: Store, prefix: str) -> int | None:
    try:
        lease = read_lease(store, prefix)
    except ProtocolError:
        return None
    return None if lease is None else lease.counter
