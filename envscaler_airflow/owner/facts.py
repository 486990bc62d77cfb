"""Gather what the owner knows in addition to the events. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from envscaler_agent.messages import MAX_JSON_BYTES
from envscaler_agent.protocol import claim_name, status_name
from envscaler_airflow.backends.base import AttemptStatus, Backend
from envscaler_airflow.errors import BackendError
from envscaler_airflow.owner.run_watch import unless_reporting
from envscaler_airflow.owner.usage import billed_usd, cost_usd, spans_of, with_removed
from envscaler_airflow.run import AttemptState, NodeStatus, Observed, RunState
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.run.event_bodies import Billed
from envscaler_airflow.store.run import Run

SOON_S = 60.0
"""A shorter attempt may be billed zero seconds, since billed times are in full seconds. Chosen."""
AT_ONCE_S = 2.0
"""Longest time from a node's claim to its reported end that may be billed zero seconds. Chosen: less than one
second, by a store whose dates are in full seconds."""


def observe(
    run: Run,
    backend: Backend,
    attempt: AttemptState,
    *,
    silent_s: float,
    quiet_s: Mapping[int, float],
) -> Observed | None:
    """Return the nodes of a started attempt, as backend and store know them; None without a handle.

    A node that only the backend misses is not lost while its status changes: see :func:`unless_reporting`.
    """
    if attempt.handle is None:
        return None
    try:
        seen: AttemptStatus | None = unless_reporting(backend.observe(attempt.handle), quiet_s)
    except BackendError:
        seen = None
    known = {node.node: node for node in seen.nodes} if seen else {}
    nodes = []
    # If a drain cancelled a change in place, the nodes of that change must end too.
    more = [] if attempt.change is not None else [one for one in known if one >= attempt.allocation.nodes]
    for index in (*range(attempt.allocation.nodes), *sorted(more)):
        node = known.get(index) or NodeStatus(index, "unknown")
        nodes.append(replace(node, status=run.status(attempt.key, index)))
    return Observed(tuple(nodes), silent_s=silent_s)


def usage_of(backend: Backend, attempt: AttemptState) -> tuple[UsageInterval, ...] | None:
    """Return billed intervals; None if the backend cannot report them now."""
    try:
        return final_usage(backend, attempt)
    except BackendError:
        return None


def final_usage(backend: Backend, attempt: AttemptState) -> tuple[UsageInterval, ...] | None:
    """Return billed intervals; None if the backend will never report them.

    Raises:
        BackendError: The backend does not answer now.
    """
    if attempt.handle is None:
        return ()
    try:
        return with_removed(backend.usage(attempt.handle), attempt)
    except BackendError as err:
        if err.transient:
            raise
        return None


def may_be_held(attempt: AttemptState) -> bool:
    """Return True for an ended attempt whose machines may still run, so that its bill may still be open.

    An open interval means that too: the owner may have died before it recorded that the release failed.
    """
    if attempt.is_live or attempt.released_at is not None:
        return False
    rows = attempt.end.usage
    return bool(attempt.unreleased) if rows is None else any(end is None for _, _, end in rows)


def is_unreleased(attempt: AttemptState) -> bool:
    """Return True for an ended attempt whose machines may still run, or whose bill is unknown.

    The owner may have died before it released them, while the backend did not answer.
    """
    if attempt.is_live or attempt.released_at is not None:
        return False
    has_no_bill = attempt.handle is not None and attempt.end.usage is None
    return bool(attempt.unreleased) or has_no_bill or may_be_held(attempt)


def billed(usage: Iterable[UsageInterval] | None) -> tuple[Billed, ...] | None:
    """Return *usage* as events have it."""
    return None if usage is None else tuple((item.node, item.start, item.end) for item in usage)


def is_missing(
    usage: tuple[UsageInterval, ...] | None, run: Run, attempt: AttemptState, *, now: float
) -> bool:
    """Return True if the times of an ended attempt that ran were deleted with its machines.

    The backend then knows only when they were created. No billed time at all, for an attempt that the owner
    saw start long ago, means unknown, not free; unless each node reported its end as it began.

    Raises:
        StoreError: The store cannot be read.
    """
    is_none = bool(usage) and all(item.end is not None and item.end <= item.start for item in usage or ())
    is_old = attempt.started_at is not None and now - attempt.started_at > SOON_S
    return is_none and is_old and not _ended_at_once(run, attempt)


def _ended_at_once(run: Run, attempt: AttemptState) -> bool:
    """Return True if the one pod of each node reported its end within moments, by the store's dates."""
    seen = {node: (claim, end - start) for node, claim, start, end in _reported(run, attempt)}
    if seen.keys() != set(range(attempt.allocation.nodes)):
        return False
    statuses = {node: run.status_of_claim(attempt.key, 1, node) for node in seen}
    have_ended = all(one is not None and one.ended is not None for one in statuses.values())
    return have_ended and all(claim == 1 and lasted <= AT_ONCE_S for claim, lasted in seen.values())


def least_usage(run: Run, attempt: AttemptState) -> tuple[UsageInterval, ...] | None:
    """Least time that each pod ran: from its claim to its last status, by the store's dates; None for none.

    Raises:
        StoreError: The store cannot be read.
    """
    return tuple(UsageInterval(node, start, end) for node, _, start, end in _reported(run, attempt)) or None


def _reported(run: Run, attempt: AttemptState) -> Iterator[tuple[int, int, float, float]]:
    """Yield node, number and time of each claim, and the time of its last status."""
    for node in range(max(attempt.allocation.nodes, *(one.allocation.nodes for one in attempt.earlier), 0)):
        claim = 1
        while claimed := run.read_dated(claim_name(*attempt.key, node, claim), max_bytes=MAX_JSON_BYTES):
            reported = run.read_dated(status_name(*attempt.key, node, claim), max_bytes=MAX_JSON_BYTES)
            if claimed[1] is not None and reported is not None and reported[1] is not None:
                yield node, claim, claimed[1], max(claimed[1], reported[1])
            claim += 1


def usd_of(attempt: AttemptState, intervals: Iterable[UsageInterval] | None, *, now: float) -> float | None:
    """Cost of *intervals*, each node at its own price; None if a price or the time is unknown.

    Args:
        attempt: Whose allocation sets the prices.
        intervals: One or more for each node.
        now: The run's clock, seconds since the epoch.
    """
    if intervals is None:
        return None
    started = attempt.started_at
    return billed_usd(spans_of(attempt), intervals, started_at=started, handle=attempt.handle, now=now)


def spent_usd(state: RunState, backend: Backend, *, now: float) -> float | None:
    """Cost of the current generation so far, for its budget; None if a price is unknown.

    Metered. If the backend did not report usage, the upper limit from the owner's own times counts, so that
    an unreadable bill never looks free.
    """
    total = 0.0
    for attempt in state.attempts_of(state.generation):
        part = None if attempt.end.usage_is_lower_bound else attempt.end.usd
        if attempt.is_live or may_be_held(attempt):
            part = usd_of(attempt, usage_of(backend, attempt), now=now)
        if part is None:
            part = _most_usd(attempt, now=now)
        if part is None:
            return None
        total += part
    return total


def _most_usd(attempt: AttemptState, *, now: float) -> float | None:
    """Upper limit of the attempt's cost, from the intent to the end; None if its price is unknown."""
    end = now if attempt.ended_at is None or may_be_held(attempt) else attempt.ended_at
    most = max([attempt.allocation.nodes, *(before.allocation.nodes for before in attempt.earlier)])
    held = [UsageInterval(node, attempt.intended_at, max(end, attempt.intended_at)) for node in range(most)]
    return cost_usd(spans_of(attempt), held)


def move_pauses_s(state: RunState) -> list[float]:
    """Pauses of this generation's moves, request to first step, as far as the events show, seconds."""
    pauses = []
    for before, after in pairwise(state.attempts_of(state.generation)):
        if before.stop_reason != "move" or before.stopping_at is None or after.started_at is None:
            continue
        known = (after.end.setup_s or 0.0) + (after.end.first_step_s or 0.0)
        pauses.append(max(0.0, after.started_at - before.stopping_at) + known)
    return pauses


def start_s(state: RunState) -> float | None:
    """Mean pause of this generation's moves, seconds; None before the first."""
    pauses = move_pauses_s(state)
    return sum(pauses) / len(pauses) if pauses else None
