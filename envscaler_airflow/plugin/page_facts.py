"""What the page shows of a run, read from its folder in the store: bounded, and nothing is written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from envscaler_agent.messages import MAX_JSON_BYTES, object_or_empty
from envscaler_agent.protocol import Status, claim_name
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run import event_bodies as bodies
from envscaler_airflow.scaling import Check
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.run import Run

MOST_NODES = 16
"""Nodes whose status is shown. Chosen: of the others only the number is shown."""
MOST_EVENTS = 200
"""Newest events searched for requests and answers. Chosen: a run has tens."""
MOST_DECISION_CHUNKS = 12
"""Newest chunks of decisions read. Chosen: two hours of an observer that writes every ten minutes."""
MOST_CHECKS = 40
"""Newest checks shown. Chosen: two screens."""
MOST_CHUNKS = 24
"""Chunks of metrics read, evenly over the run. Chosen: reading as many takes a second from a bucket."""
CHUNK_BYTES = 1 << 20
"""Largest chunk of metrics read, bytes. Source: the agent closes one at that size."""
MOST_PER_S = 1e15
"""Rates above it, or above 0 and below its inverse, are left out. Chosen: no training has such a speed."""
POINTS_PER_CHUNK = 8
"""Rates computed from one chunk. Chosen: 24 chunks then make a line of 200 points."""

Answer = (
    bodies.RequestBody
    | bodies.MoveAccepted
    | bodies.MoveRefused
    | bodies.MoveDeferred
    | bodies.ChangeIntended
    | bodies.ChangeUndone
)
"""Requests to a run and their answers: events by type, with the text for each."""
_CHUNK = re.compile(r"g(\d{1,9})-a(\d{1,9})-n0-c(\d{1,9})-(\d{1,12})\.jsonl\Z")


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of an attempt at one time.

    Attributes:
        attempt: Its number.
        at: Owner's clock, seconds since the epoch.
        per_s: Samples or steps a second.
    """

    attempt: int
    at: float
    per_s: float


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run, as far as the page shows it.

    Attributes:
        url: Its folder.
        state: Fold of its events.
        statuses: What the nodes of the current attempt last reported; None: nothing believable.
        answers: Requests and what the owner answered, each with its time, oldest first.
        checks: Recorded scaling checks of this generation and how often each was repeated, newest first.
        unit: What *rates* count: ``samples`` or ``steps``.
        rates: Speeds of the attempts of this generation, in order of time.
        parameters: Of the spec that it runs on, with the values that the run was made with.
    """

    url: str
    state: RunState
    statuses: tuple[Status | None, ...] = ()
    answers: tuple[tuple[float, Answer], ...] = ()
    checks: tuple[tuple[Check, int], ...] = ()
    unit: str = "steps"
    rates: tuple[Rate, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)


def read_facts(run: Run) -> RunFacts | None:
    """Return what the store has of *run*; None if it has not begun.

    Raises:
        StoreError: The store cannot be read.
        ProtocolError: Its events are not ours, or torn.
    """
    state = run.events.load()
    if state.number == 0:
        return None
    newest = run.events.read(after=max(0, state.number - MOST_EVENTS))
    unit, rates = _rates(run, state)
    return RunFacts(
        url=run.url,
        state=state,
        statuses=_statuses(run, state.current),
        answers=tuple((event.at, event.body) for event in newest if isinstance(event.body, Answer)),
        checks=_checks(run, state.generation),
        unit=unit,
        rates=rates,
        parameters=run.parameters(state.spec_hash),
    )


def _statuses(run: Run, attempt: AttemptState | None) -> tuple[Status | None, ...]:
    if attempt is None:
        return ()
    nodes = range(min(MOST_NODES, attempt.allocation.nodes))
    return tuple(run.status(attempt.key, node) for node in nodes)


def _checks(run: Run, generation: int) -> tuple[tuple[Check, int], ...]:
    try:
        found = list(read_decisions(run, newest_chunks=MOST_DECISION_CHUNKS))
    except ProtocolError:  # a chunk that is too large explains nothing
        return ()
    of_this = [item for item in found if item[0].observation.generation == generation]
    return tuple(reversed(of_this[-MOST_CHECKS:]))


def _rates(run: Run, state: RunState) -> tuple[str, tuple[Rate, ...]]:
    """Return speeds of node 0 over time, in samples if every line has them, else in steps."""
    attempts = {item.number: item for item in state.attempts_of(state.generation)}
    chunks: list[tuple[int, float, list[Line]]] = []
    began: dict[tuple[int, int], float] = {}
    for number, claim, name in _chunks(run, state.generation):
        if (attempt := attempts.get(number)) is None:
            continue
        if (number, claim) not in began:
            before = [start + lines[-1][0] for of, start, lines in chunks if of == number and lines]
            began[number, claim] = _began(run, attempt, claim, after=max(before, default=None))
        chunks.append((number, began[number, claim], _lines(run, f"metrics/{name}")))
    unit = "samples" if _all_have_samples(lines for _, _, lines in chunks) else "steps"
    place = 2 if unit == "samples" else 1
    rates = [
        Rate(attempt, start + t, per_s)
        for attempt, start, lines in chunks
        for t, per_s in speeds([(line[0], line[place]) for line in lines if line[place] is not None])
    ]
    return unit, tuple(sorted(rates, key=lambda rate: rate.at))


def _began(run: Run, attempt: AttemptState, claim: int, *, after: float | None) -> float:
    """When the pod of *claim* began on node 0, seconds since the epoch; a later pod begins at its claim.

    A copied store gives its files new times. If such a time would be after the attempt, or if the store
    reports no times, the pod began right *after* the last report of the pod before it.
    """
    first = attempt.started_at or attempt.intended_at
    if claim <= 1:
        return first
    name = claim_name(*attempt.key, 0, claim)
    try:
        found = run.read_dated(name, max_bytes=MAX_JSON_BYTES)
    except ProtocolError:
        found = None
    date = None if found is None else found[1]
    last = math.inf if attempt.ended_at is None else attempt.ended_at
    return date if date is not None and first <= date <= last else max(first, after or first)


def _chunks(run: Run, generation: int) -> list[tuple[int, int, str]]:
    """Return attempt, claim and name of the chunks to read: all if they are few, else evenly spread."""
    found = []
    for name in run.children("metrics"):
        match = _CHUNK.match(name)
        if match and int(match[1]) == generation:
            found.append((int(match[2]), int(match[3]), int(match[4]), name))
    found.sort()
    if len(found) > MOST_CHUNKS:
        step = (len(found) - 1) / (MOST_CHUNKS - 1)
        found = [found[round(place * step)] for place in range(MOST_CHUNKS)]
    return [(attempt, claim, name) for attempt, claim, _, name in found]


Line = tuple[float, float | None, float | None]
"""Seconds since the wrapper began, steps, samples."""


def _lines(run: Run, name: str) -> list[Line]:
    """Return the lines of a chunk that report a step, without torn or malformed ones."""
    try:
        text = run.read(name, max_bytes=CHUNK_BYTES) or b""
    except ProtocolError:
        return []
    found = []
    for line in text.splitlines():
        if b'"step"' not in line:
            continue
        body = object_or_empty(line)
        t, step, samples = (_number(body.get(key)) for key in ("t", "step", "samples"))
        if t is not None and step is not None:
            found.append((t, step, samples))
    return sorted(found)


def _all_have_samples(chunks: Iterable[Sequence[Line]]) -> bool:
    lines = [line for chunk in chunks for line in chunk]
    return bool(lines) and all(line[2] is not None for line in lines)


def speeds(counts: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Time and speed of at most :data:`POINTS_PER_CHUNK` parts of a chunk; a count that falls gives no speed.

    >>> speeds([(0.0, 0.0), (10.0, 50.0), (20.0, 150.0)])
    [(5.0, 5.0), (15.0, 10.0)]
    """
    last = len(counts) - 1
    parts = min(POINTS_PER_CHUNK, last)
    ends = [counts[round(part * last / parts)] for part in range(parts + 1)] if parts > 0 else []
    found = []
    for (then, before), (now, count) in pairwise(ends):
        if before is not None and count is not None and now > then and count >= before:
            per_s = (count - before) / (now - then)
            if per_s == 0 or 1 / MOST_PER_S <= per_s <= MOST_PER_S:
                found.append(((then + now) / 2, per_s))
    return found


def _number(value: object) -> float | None:
    """Return a number as a finite float >= 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
