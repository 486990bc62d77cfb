"""``status``, ``logs``, ``report``: look at runs."""

from __future__ import annotations

import json
import math
import time
from itertools import groupby

import click

from envscaler_agent.protocol import Status
from envscaler_airflow.cli.common import (
    duration_option,
    echo_json,
    find_run,
    is_unread,
    output_option,
    store_option,
)
from envscaler_airflow.cli.follow import OutputReader, marked
from envscaler_airflow.cli.plan import print_plan
from envscaler_airflow.cli.shell_owner import OWNER, SILENT_S, owner_of, shown_status
from envscaler_airflow.cli.tables import RunRow, print_report, print_run, print_runs
from envscaler_airflow.errors import BackendError, ProtocolError, SpecError
from envscaler_airflow.images.locks import LOCK, container_image
from envscaler_airflow.owner.report import run_bill, run_report
from envscaler_airflow.planning.amounts import duration_text
from envscaler_airflow.planning.planner import PlanInputs
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.scaling import explain as in_words
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.run import PLAN, RUN, Run, run_prefixes
from envscaler_airflow.store.run_store import Store


@click.command()
@click.argument("run")
@click.option("--all", "is_all", is_flag=True, help="Show every check, not only changed decisions.")
@click.option(
    "--plan", "is_plan", is_flag=True, help="Show the plan of the last start, recomputed from its inputs."
)
@output_option
@store_option
def explain(run: str, *, is_all: bool, is_plan: bool, as_json: bool, store: Store) -> None:
    """Explain why the policy of RUN kept or moved it, with the numbers; or why it started where it did."""
    one, _ = followed(store, run)
    if is_plan:
        _explain_plan(one, as_json=as_json)
        return
    found = list(read_decisions(one))
    if not found:
        why = "no scaling check is recorded: the stage has no ScalingSensor, or it has not looked yet"
        click.echo(why, err=as_json)
        return
    if as_json:
        for check, times in found:
            echo_json({"times": times, **check.to_dict()})
        return
    if is_all:
        for check, times in found:
            click.echo(in_words(check) + (f"\n  seen {times} times in a row" if times > 1 else ""))
        return
    for _, group in groupby(found, key=lambda item: (item[0].decision.action, item[0].decision.target.name)):
        items = list(group)
        times = sum(count for _, count in items)
        click.echo(in_words(items[-1][0]) + (f"\n  decided {times} times in a row" if times > 1 else ""))


def _explain_plan(run: Run, *, as_json: bool) -> None:
    """Print the plan of the last start, recomputed from the recorded inputs by the planner of this version.

    Raises:
        ProtocolError: No start was planned, or another version recorded its plan without inputs.
    """
    recorded = run.plan()
    try:
        made = PlanInputs.from_dict(recorded["inputs"]).plan()
    except (KeyError, ValueError) as err:
        raise ProtocolError(f"{run.uri(PLAN)}: has no inputs that this version reads ({err})") from err
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=1))  # unrounded, as plan.json has it
        return
    notes = list(made.notes)
    if made.to_dict() != {name: recorded.get(name) for name in made.to_dict()}:
        notes.append("the recorded plan differs: another version of envscaler-airflow made it")
    print_plan(made, notes)


POLL_S = 2.0
"""How often ``logs -f`` looks, seconds. Chosen: chunks are closed every 10 s."""
STATUSES = (
    "active", "starting", "orphaned", "failed to start", "succeeded", "failed", "stopped", "pruned",
    "container", "unreadable", "none",
)  # fmt: skip
"""What the status of a run can be in a list."""


@click.command()
@click.argument("run", required=False)
@click.option(
    "--status",
    "statuses_asked",
    multiple=True,
    metavar="STATUS",
    callback=lambda _ctx, _param, given: _known_statuses(given),
    help=f"Only runs with this status; repeatable. {', '.join(STATUSES)}.",
)
@click.option("--match", help="Only runs whose name contains this text.")
@click.option(
    "--since", "since_s", callback=duration_option, metavar="AGE", help="Only runs younger than this: 7d."
)
@output_option
@store_option
def status(
    run: str | None,
    *,
    statuses_asked: tuple[str, ...],
    match: str | None,
    since_s: float | None,
    as_json: bool,
    store: Store,
) -> None:
    """Show one RUN, or list the runs of the store, newest last.

    ``orphaned``: no owner watches the run; cancel it, or start it again by its name.
    """
    if run is None:
        found = (_row(Run(store, prefix)) for prefix in run_prefixes(store) if not match or match in prefix)
        rows = [row for row in found if row is not None]
        rows = [row for row in rows if not statuses_asked or row.status in statuses_asked]
        rows = [row for row in rows if since_s is None or (row.age_s is not None and row.age_s <= since_s)]
        is_filtered = bool(statuses_asked or match or since_s is not None)
        rows.sort(key=lambda row: (-(row.age_s or math.inf), row.prefix))
        if as_json:
            echo_json([row.to_dict() for row in rows])
        elif rows:
            print_runs(rows)
        else:
            click.echo(f"no run of that kind in {store.url}" if is_filtered else f"no run in {store.url}")
        return
    one, state = followed(store, run)
    row = _described(one, state)
    said = statuses(one, state.current) if state.current else []
    waits = one.lease.known().waits if state.live is not None else ""
    parameters = one.parameters(state.spec_hash)
    if as_json:
        body = {**run_report(state, now=one.now()).to_dict(), **row.to_dict()}
        nodes = [json.loads(node.to_json()) for node in said if node is not None]
        echo_json({**body, "parameters": parameters, "nodes": nodes, "waits": waits})
    else:
        print_run(row, said, waits=waits, parameters=parameters)


def _known_statuses(given: tuple[str, ...]) -> tuple[str, ...]:
    """Statuses of ``--status``, also several with commas between them."""
    asked = tuple(word.strip() for text in given for word in text.split(","))
    for word in asked:
        if word not in STATUSES:
            raise click.BadParameter(f"{word!r} is not a status; write one of {', '.join(STATUSES)}")
    return asked


def _row(run: Run) -> RunRow | None:
    """A run in a list: ``container``, or ``unreadable`` with the reason; None for what is not of a run."""
    try:
        state = run.events.load()
        if state.status == "none" and container_image(run) is not None:
            return RunRow(run.prefix, "container")
        if state.status == "none" and all(run.size(name) is None for name in (RUN, OWNER, LOCK)):
            return None
        return _described(run, state)
    except ProtocolError as err:
        return RunRow(run.prefix, "unreadable", RunState(reason=str(err)))


def _described(run: Run, state: RunState) -> RunRow:
    now = run.now()
    owner = owner_of(run, state)
    is_over = state.status in ("succeeded", "failed", "stopped")
    began = state.begun_at
    bill = run_bill(state, now=now)
    return RunRow(
        run.prefix,
        shown_status(state, owner.presence),
        state,
        owner="-" if is_over else owner.name,
        usd=bill.usd if state.attempts_of(state.generation) else 0.0,
        known_usd=bill.known_usd,
        age_s=None if began is None else max(0.0, now - began),
    )


def followed(store: Store, name: str) -> tuple[Run, RunState]:
    """A run, and its state, that has an owner, and therefore events.

    Raises:
        SpecError: There is none of that name, or it ran in a container of this machine.
    """
    run = find_run(store, name)
    state = run.events.load()
    image = container_image(run) if state.status == "none" else None
    if image is not None:
        raise SpecError(
            f"{run.prefix} ran in a container of {image}: the shell that ran it has its output and its end, "
            "and Ctrl-C there stops it; the store keeps its lock.json alone"
        )
    return run, state


def statuses(run: Run, attempt: AttemptState) -> list[Status | None]:
    """What each node of an attempt last said."""
    return [run.status(attempt.key, node) for node in range(attempt.allocation.nodes)]


@click.command()
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run ends.")
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    help="Attempt of the current generation; the default is all.",
)
@output_option
@store_option
def logs(run: str, *, follow: bool, attempt: int | None, as_json: bool, store: Store) -> None:
    """Print the training's output of RUN; as JSON, one object per line."""
    found, state = followed(store, run)
    begun = len(state.attempts_of(state.generation))
    if attempt is not None and attempt > begun and not follow:
        raise SpecError(f"--attempt {attempt}: {found.prefix} has begun {begun} in its current generation")
    output = OutputReader(found)
    heard, seen = time.monotonic(), ""
    while True:
        is_over = state.status in ("succeeded", "failed", "stopped")
        for item in state.attempts_of(state.generation):
            if attempt is None or item.number == attempt:
                _print_logs(output, item, as_json=as_json)
        if not follow or is_over or is_unread():
            return
        if seen != (seen := f"{state.number} {output.cursors}"):
            heard = time.monotonic()
        elif time.monotonic() - heard >= SILENT_S and owner_of(found, state).presence == "gone":
            raise BackendError(
                f"{found.prefix}: no owner watches it and nothing was printed for {duration_text(SILENT_S)}; "
                "`envscaler cancel` stops it, another start by its name goes on with it"
            )
        time.sleep(POLL_S)
        state = found.events.load()


def _print_logs(output: OutputReader, attempt: AttemptState, *, as_json: bool) -> None:
    nodes = attempt.allocation.nodes
    for node in range(nodes):
        while text := output.text(attempt.key, node):
            if not as_json:
                click.echo(marked(text, node, nodes), nl=False)
                continue
            for line in text.splitlines():
                echo_json({"attempt": attempt.number, "node": node, "line": line})


@click.command()
@click.argument("run")
@output_option
@store_option
def report(run: str, *, as_json: bool, store: Store) -> None:
    """Show what RUN cost, by attempt, and where the time went."""
    _, state = followed(store, run)
    found = run_report(state, now=store.now())
    if as_json:
        echo_json(found.to_dict())
    else:
        print_report(found)
