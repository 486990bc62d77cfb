"""Tables for a terminal: runs, bills, and rows of any kind."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envscaler_agent.protocol import Status
from envscaler_airflow.owner.report import Report, outcome_text
from envscaler_airflow.planning.amounts import duration_text, usd_text
from envscaler_airflow.run import RunState
from envscaler_airflow.run.cost import Bill
from envscaler_airflow.run.narration import allocation_name, how_of, printable, totals, transfer_text
from envscaler_airflow.run.rehearsal import Rehearsal

LEAST_COLUMNS = 80
"""What a narrower terminal is taken for: it wraps lines, a table would cut amounts. Chosen: the usual."""
_RUN_COLUMNS = 22
"""Least width of a run's name in a list. Chosen: six columns fit a terminal of 80."""
PIPED_COLUMNS = 1000
"""Width where the output is piped: a row stays on its line, and nothing is cut. Chosen: no row is as long."""
_HEAD = 2
"""Columns that name a row: where, and what."""


def _own_console() -> Console:
    """Text as it stands, on standard output."""
    console = Console(markup=False)
    piped = not console.is_terminal and not os.environ.get("COLUMNS")
    console.width = PIPED_COLUMNS if piped else max(console.width, LEAST_COLUMNS)
    return console


def _table(*columns: str, title: str | None = None) -> Table:
    return Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in a list.

    Attributes:
        prefix: Its folder.
        status: As shown, such as ``orphaned``.
        state: Fold of its events.
        owner: As shown.
        usd: What the current generation has cost; None when that is unknown.
        known_usd: What it has cost at least.
        age_s: Seconds since it began; None when it has not.
    """

    prefix: str
    status: str
    state: RunState = field(default_factory=RunState)
    owner: str = "-"
    usd: float | None = None
    known_usd: float = 0.0
    age_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        current = self.state.current
        return {
            "run": self.prefix,
            "status": self.status,
            "reason": self.state.reason,
            "age_s": self.age_s,
            "usd": self.usd,
            "known_usd": self.known_usd,
            "owner": None if self.owner == "-" else self.owner,
            "generation": self.state.generation,
            "attempts": len(self.state.attempts_of(self.state.generation)),
            "allocation": current.allocation.name if current else None,
        }


def print_runs(rows: Sequence[RunRow], console: Console | None = None) -> None:
    """Each run of the store with its status, below the deployment that it belongs to; names are never cut."""
    console = console or _own_console()
    table = _table()
    table.add_column("RUN", overflow="fold", min_width=_RUN_COLUMNS)
    for column in ("STATUS", "AGE", "COST"):
        table.add_column(column, no_wrap=True)
    table.add_column("OWNER", overflow="fold")
    table.add_column("ALLOCATION", overflow="fold")
    deployments = {row.prefix.partition("/")[0] for row in rows}
    for row in rows:
        current = row.state.current
        shown = row.prefix.partition("/")[2] if len(deployments) == 1 else row.prefix
        shown = shown.removesuffix("/-1")  # of a task that is not mapped
        table.add_row(
            printable(shown),
            row.status,
            "-" if row.age_s is None else duration_text(row.age_s),
            _cost(row.usd, row.known_usd),
            printable(row.owner),
            current.allocation.name if current else "-",
        )
    console.print(table)
    for row in rows:
        if row.status == "unreadable":
            console.print(f"{row.prefix}: {printable(row.state.reason)}", soft_wrap=True)


def print_run(
    row: RunRow,
    said: Sequence[Status | None],
    *,
    waits: str = "",
    parameters: Mapping[str, object] | None = None,
) -> None:
    """One run: its attempts, what the nodes of the current one last said, and what they wait for."""
    console, state = _own_console(), row.state
    reason = f": {printable(state.reason)}" if state.reason else ""
    console.print(Text.assemble(f"{row.prefix}: ", (row.status, "bold"), reason))
    age = "not begun" if row.age_s is None else f"began {duration_text(row.age_s)} ago"
    cost = f"cost {_cost(row.usd, row.known_usd)}".replace("?", "unknown").replace(">", "at least ")
    console.print(f"{age}, {cost}, owner {printable(row.owner)}")
    if parameters:
        shown = ", ".join(f"{name}={value}" for name, value in sorted(parameters.items()))
        console.print(f"parameters: {printable(shown)}")
    table = _table()
    for column in ("ATTEMPT", "ALLOCATION", "$/h", "STATE", "STEP"):
        _add_column(table, column)
    table.add_column("BEGUN BECAUSE")
    for attempt in state.attempts_of(state.generation):
        table.add_row(
            str(attempt.number),
            attempt.allocation.name,
            number(attempt.allocation.usd_per_hour, ".4f"),
            outcome_text(attempt) or attempt.phase,
            _shown(attempt.step),
            printable(attempt.reason),
        )
    console.print(table)
    for node in said:
        if node is not None:
            console.print(_node_line(node))
    if waits:
        console.print(f"waits: {printable(waits)}")


def _add_column(table: Table, name: str) -> None:
    """A long allocation goes on below, so that there is room for what it costs."""
    table.add_column(name, no_wrap=name != "ALLOCATION", overflow="fold")


def _node_line(node: Status) -> str:
    progress = node.progress
    step = _shown(progress.step) + (f"/{progress.total_steps}" if progress.total_steps else "")
    speed = f", {progress.steps_per_s:.2f} steps/s" if progress.steps_per_s else ""
    loss = f", loss {progress.loss:.4g}" if progress.loss is not None else ""
    message = f": {printable(node.message)}" if node.message else ""
    moving = f", {words}" if (words := transfer_text(node)) else ""
    return f"node {node.node}: {node.phase}{moving}, {how_of(node)}, step {step}{speed}{loss}{message}"


def print_report(report: Report, console: Console | None = None) -> None:
    """The cost report: a line for each attempt, the pauses, and the totals against a static plan."""
    console = console or _own_console()
    bill = report.bill
    table = _table(title="Attempts")
    for column in ("ATTEMPT", "ALLOCATION", "SECONDS", "$/h", "USD", "STEPS", "LOST", "ENDED"):
        _add_column(table, column)
    for line in bill.lines:
        table.add_row(
            line.use.name,
            allocation_name(line.use.allocation),
            number(line.wall_s, ".0f"),
            number(line.usd_per_node_hour, ".4f"),
            _cost(line.usd, line.least_usd).replace("$", ""),
            _shown(line.steps),
            _shown(line.lost_steps),
            line.use.outcome or "runs",
        )
    console.print(table)
    _print_pauses(console, bill)
    for text in totals(bill):
        console.print(text)
    for attempt in report.attempts:
        if attempt.outcome == "succeeded" and attempt.detail:
            console.print(f"warning: attempt {attempt.attempt}: {printable(attempt.detail)}")
    for source in sorted({attempt.price_source for attempt in report.attempts if attempt.price_source}):
        console.print(f"price: {source}")
    for note in bill.notes:
        console.print(f"note: {note}")


def print_rehearsals(found: Sequence[Rehearsal]) -> None:
    """What each fault of a drill took and cost, and below it which bounds were missed."""
    console = _own_console()
    table = _table(title="Drill")
    for column in ("FAULT", "DETECTED", "RESUMED", "PAUSE", "LOST", "USD", "BEFORE", "AFTER", "VERDICT"):
        _add_column(table, column)
    for one in found:
        seconds = (one.detect_s, one.resume_s, one.pause_s)
        table.add_row(
            one.fault,
            *("-" if value is None else f"{value:.1f} s" for value in seconds),
            "-" if one.steps_lost is None else f"{one.steps_lost} steps",
            _cost(one.usd_lost, None),
            one.before or "-",
            one.after or "-",
            "passed" if one.is_passed else "missed",
        )
    console.print(table)
    for one in found:
        for reason in one.missed:
            console.print(f"{one.fault}: {printable(reason)}", soft_wrap=True)


def _print_pauses(console: Console, bill: Bill) -> None:
    if not bill.pauses:
        return
    table = _table("BETWEEN", "WHY", "SECONDS", "PARTS", title="Pauses")
    for pause in bill.pauses:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in pause.parts.items())
        table.add_row(f"a{pause.before} and a{pause.after}", pause.cause, number(pause.total_s, ".1f"), parts)
    console.print(table)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _cost(usd: float | None, least_usd: float | None) -> str:
    """``$0.48``; ``>$0.48`` where that is the least it was; ``?``."""
    if usd is not None:
        return usd_text(usd)
    return f">{usd_text(least_usd)}" if least_usd else "?"


def number(value: float | None, form: str) -> str:
    """``?`` for what is unknown."""
    return "?" if value is None else format(value, form)


def _print_folded(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Two lines for each row: what it is, then the rest by name, without what is empty."""
    for line in lines:
        head = "  ".join(cell for cell in line[:_HEAD] if cell)
        rest = [
            f"{name} {cell}".strip()
            for name, cell in zip(columns[_HEAD:], line[_HEAD:], strict=True)
            if cell not in ("", "-")
        ]
        click.echo(textwrap.fill(head, LEAST_COLUMNS, subsequent_indent="  ", break_long_words=False))
        for text in textwrap.wrap(", ".join(rest), LEAST_COLUMNS - 4):
            click.echo(f"    {text}")


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """As wide as its contents, so that nothing is cut when it is piped; on a narrower terminal folded."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    columns_here = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) > max(columns_here, LEAST_COLUMNS):
        _print_folded(columns, lines)
        return
    for line in itertools.chain([columns], lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo(text.rstrip())
