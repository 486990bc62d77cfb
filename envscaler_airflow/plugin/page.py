"""A run as one HTML page: no script, no external resources, everything from the run escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from envscaler_agent.protocol import Status
from envscaler_airflow.owner.report import outcome_text, run_bill
from envscaler_airflow.planning.amounts import duration_text, usd_less, usd_text
from envscaler_airflow.plugin import charts
from envscaler_airflow.plugin.page_facts import MOST_NODES, Answer, RunFacts
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.run.cost import Bill, Split
from envscaler_airflow.run.narration import how_of, transfer_text
from envscaler_airflow.scaling import Check

MOST_ATTEMPTS = 100
"""Newest attempts in the table. Chosen: if a run had more, only their number is shown."""
MOST_TEXT = 600
"""Longest text shown, letters. Chosen: a few lines."""
REFRESH_S = 15
"""How often the page of a live run reloads. Source: as often as a node's status is written."""


def _resource(name: str) -> str:
    return resources.files("envscaler_airflow.plugin").joinpath(name).read_text(encoding="utf-8")


_STYLE = _resource("page.css").strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy of the page: if text of a run gets past the escaping, it still cannot act."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt in the table; texts as they are shown."""

    number: int
    allocation: str
    price: str
    begun: str
    lasted: str
    steps: str
    usd: str
    ended: str
    kind: str
    reason: str
    detail: str


def message_page(title: str, text: str, *, again: bool = False) -> str:
    """Return a page with one message; *again*: it reloads after a while."""
    return _template("message.html.j2").render(
        style=_STYLE, title=title, text=text, refresh_s=REFRESH_S if again else None
    )


def run_page(facts: RunFacts, *, now: float) -> str:
    """Return the page of a run at *now*, owner's clock."""
    state = facts.state
    attempts = state.attempts_of(state.generation)
    bill = run_bill(state, now=now)
    axis = charts.time_axis(attempts, now=now)
    return _template("run.html.j2").render(
        style=_STYLE,
        refresh_s=REFRESH_S if state.status == "active" else None,
        url=facts.url,
        state=state,
        reason=state.reason,
        parameters=sorted((name, str(value)) for name, value in facts.parameters.items()),
        summary=_summary(state, facts.statuses, bill, now=now),
        rows=[_row(item, bill, now=now) for item in attempts[-MOST_ATTEMPTS:]],
        hidden_attempts=max(0, len(attempts) - MOST_ATTEMPTS),
        axis=axis,
        lanes=charts.lanes(attempts, axis, now=now) if axis else None,
        curve=charts.curve(facts.rates, axis) if axis else None,
        unit=facts.unit,
        nodes=[_node(item) for item in facts.statuses if item is not None],
        hidden_nodes=max(0, state.current.allocation.nodes - MOST_NODES) if state.current else 0,
        answers=[_answer(*item) for item in facts.answers],
        checks=[_check(*item) for item in facts.checks],
        cost=_cost(bill),
        chart=charts,
    )


def _summary(
    state: RunState, statuses: tuple[Status | None, ...], bill: Bill, *, now: float
) -> list[tuple[str, str]]:
    attempts = state.attempts_of(state.generation)
    first = statuses[0] if statuses else None
    progress = first.progress if first else None
    step = state.current.step if state.current and state.current.step is not None else None
    if progress is not None and progress.step is not None:
        step = max(step or 0, progress.step)
    total = f" of {progress.total_steps}" if progress and progress.total_steps is not None else ""
    found = [
        ("attempts", str(len(attempts))),
        ("generation", str(state.generation)),
        ("step", "unknown" if step is None else f"{step}{total}"),
        ("cost", money(bill.usd) if bill.usd is not None else f"at least {money(bill.known_usd)}"),
    ]
    speed = progress.samples_per_s if progress else None
    if speed is not None and state.live is not None:
        found.append(("now", f"{speed:.4g} samples/s"))
    if progress is not None and progress.loss is not None:
        found.append(("loss", f"{progress.loss:.4g}"))
    if attempts:
        last = attempts[-1].ended_at
        end = now if state.live is not None or last is None else last
        found.append(("time", duration_text(end - attempts[0].intended_at)))
    return found


def _row(attempt: AttemptState, bill: Bill, *, now: float) -> Row:
    usd = [line.usd for line in bill.lines if line.use.attempt == attempt.number]
    known = [value for value in usd if value is not None]
    held = charts.held_by(attempt)
    start = attempt.started_at if attempt.started_at is not None else attempt.intended_at
    end = now if attempt.ended_at is None else attempt.ended_at
    prices = ["unknown" if one.usd_per_hour is None else f"${one.usd_per_hour:.4f}" for one in held]
    ended = outcome_text(attempt)
    first, last = attempt.end.start_step, attempt.step
    steps = f"{first} to {last}" if first is not None and last is not None else "unknown"
    return Row(
        number=attempt.number,
        allocation=_in_turn(one.name for one in held),
        price=_in_turn(prices),
        begun=moment(attempt.intended_at),
        lasted=duration_text(end - start),
        steps="" if attempt.is_live else steps,
        usd=money(sum(known) if known and len(known) == len(usd) else None),
        ended=ended or attempt.phase,
        kind=charts.kind_of(ended),
        reason=attempt.reason,
        detail=attempt.end.detail or "",
    )


def _in_turn(texts: Iterable[str]) -> str:
    return " then ".join(text for text, _ in groupby(texts))


def _node(status: Status) -> tuple[str, str]:
    progress = status.progress
    parts = [part for part in (status.phase, transfer_text(status), how_of(status)) if part]
    if progress.step is not None:
        parts.append(f"step {progress.step}")
    parts += [
        f"{name.removesuffix('_percent').removesuffix('_utilization')} {value:.0f} %"
        for name, value in sorted(status.usage.items())
        if name == "cpu_percent" or name.endswith("_utilization_percent")
    ][:9]
    if status.message:
        parts.append(status.message)
    return str(status.node), ", ".join(parts)


_ANSWERS: Mapping[type[Answer], str] = {
    bodies.MoveRequested: "move requested",
    bodies.MoveAccepted: "move accepted",
    bodies.MoveRefused: "move refused",
    bodies.MoveDeferred: "move put off to the next start",
    bodies.ChangeIntended: "change in place",
    bodies.ChangeUndone: "change in place undone",
    bodies.StopRequested: "asked to stop",
}


def _answer(at: float, body: Answer) -> tuple[str, str, str]:
    words = _ANSWERS[type(body)]
    if not isinstance(body, bodies.MoveRefused | bodies.ChangeUndone | bodies.StopRequested):
        words += f" to {body.target.name}" if body.target is not None else ""
    return moment(at), words, body.reason


def _check(check: Check, times: int) -> tuple[str, str, str, str, str]:
    verb = {"keep": "keep", "move": "move to", "recommend": "would move to"}[check.decision.action]
    return (
        f"{check.observation.attempt}",
        duration_text(check.observation.elapsed_s),
        f"{verb} {check.decision.target.name}",
        check.decision.reason,
        "once" if times == 1 else f"{times} times",
    )


def _cost(bill: Bill) -> dict[str, Any]:
    """Return what the money was spent on: parts that are known, each with its share of their sum."""
    saved = bill.saved_usd
    names = [item.name for item in fields(Split)]
    known = [(name, value) for name in names if (value := getattr(bill.usd_split, name)) is not None]
    whole = sum(value for _, value in known)
    x, parts = 0.0, []
    for name, value in known:
        width = value / whole * charts.WIDTH if whole > 0 else 0.0
        parts.append({"name": name, "usd": money(value), "x": round(x, 1), "width": round(width, 1)})
        x += width
    static = bill.static
    sources = {part.offer.price_source for line in bill.lines for part in line.use.allocation.parts}
    return {
        "parts": parts,
        "unknown": [name for name in names if getattr(bill.usd_split, name) is None],
        "static": money(static.usd) if static else None,
        "static_name": static.allocation.name if static else "",
        "saved": ""
        if saved is None or static is None or static.usd is None
        else usd_less(saved, of=static.usd),
        "notes": bill.notes[:20],
        "sources": sorted(source for source in sources if source),
    }


def shown(value: object) -> object:
    """Return *value* as it may be shown: bounded, no invisible characters. The page shows nothing else."""
    if isinstance(value, Markup | int | float):
        return value
    text = str(value)
    plain = "".join(letter if letter.isprintable() else " " for letter in text[: MOST_TEXT + 1])
    return plain if len(plain) <= MOST_TEXT else f"{plain[:MOST_TEXT]}..."


def money(usd: float | None) -> str:
    """Format USD with as many digits as a small amount needs.

    >>> money(12.5), money(0.00123), money(0.0), money(None)
    ('$12.50', '$0.00123', '$0.00', 'unknown')
    """
    return "unknown" if usd is None else usd_text(usd)


def moment(at: float) -> str:
    """Format a time for display, UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


@cache
def _template(name: str) -> Template:
    plain = Environment(
        autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return plain.from_string(_resource(name))
