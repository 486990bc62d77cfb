"""How a run continues after an attempt failed: where, when, and with how much memory. Pure."""

from __future__ import annotations

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.offers import Allocation, has_spot
from envscaler_airflow.run.actions import Action, Facts, Resume
from envscaler_airflow.run.outcomes import outcome_of
from envscaler_airflow.run.state import AttemptState, RunState

BACKOFF_FIRST_S = 10.0
BACKOFF_LAST_S = 600.0
"""First and longest wait between starts after an involuntary end, seconds. Chosen: a passing fault costs
seconds, a lasting one causes six starts an hour."""
WAIT_LEAST_S = 10.0
"""Shortest wait for the market, seconds. Chosen: as the first back-off."""
WORTH_A_START = 0.1
"""Share of a budget that must be left to start another attempt after a machine's own deadline. Chosen: with
less, a start and its last checkpoint would use most of it."""


def after_failure(state: RunState, last: AttemptState, facts: Facts) -> Action:
    """The start of the next attempt, a wait before it, or the failure of the run after *last*."""
    counted = tuple(a for a in state.attempts_of(state.generation) if a.ended_number > state.cleared_number)
    if not counted:
        return Action("start", reason=f"taken up again after: {last.outcome}", target=_next_allocation(last))
    recovery, target = outcome_of(last.outcome).recovery, _next_allocation(last)
    is_full = recovery == "more-memory"
    memory = _raised_memory(facts) if is_full else still_fits(last, target)
    if is_full and memory is None:
        return Action("fail", reason=_at_cap(facts), failure=last.outcome)
    if recovery == "resume-if-funded" and (action := _at_own_deadline(state, last, facts)) is not None:
        return action
    failure = _hopeless(counted, facts)
    if failure is not None:
        return failure
    reason = f"after: {last.outcome}" + (f" ({last.end.detail})" if last.end.detail else "")
    if facts.resume is not None and not is_full:
        return _by_market(counted, facts, facts.resume, reason)
    if not facts.backoff_is_over:
        return Action("wait", reason=f"after: {last.outcome}", backoff_s=_backoff_s(counted))
    return Action("start", reason=reason, target=target, memory_bytes=memory)


def _by_market(attempts: tuple[AttemptState, ...], facts: Facts, resume: Resume, after: str) -> Action:
    """What the market decides; only an end that is neither a loss nor a refusal is backed off first."""
    last, decision = attempts[-1], resume.decision
    is_market = outcome_of(last.outcome).is_disruption or _is_out_of_stock(last)
    if not is_market and not facts.backoff_is_over:
        return Action("wait", reason=f"after: {last.outcome}", backoff_s=_backoff_s(attempts))
    reason = f"{after}: {decision.reason}"
    if resume.target is None:
        return Action("wait", reason=reason, backoff_s=max(WAIT_LEAST_S, decision.wait_s))
    return Action("start", reason=reason, target=resume.target, memory_bytes=still_fits(last, resume.target))


def fruitless(state: RunState) -> int:
    """Return how many attempts in a row, since a clear, ended by themselves without a newer checkpoint."""
    known = state.attempts_of(state.generation)
    return _count_fruitless(tuple(one for one in known if one.ended_number > state.cleared_number))


def still_fits(last: AttemptState, target: Allocation | None) -> int | None:
    """Return the memory that the last attempt needed, if the target has it; smaller ones are deliberate."""
    memory = last.memory_bytes
    if memory is None or target is None:
        return memory
    least = min(part.offer.memory_gib for part in target.parts)
    return memory if least * 2**30 >= memory else None


def budget_words(facts: Facts) -> str:
    """Return how much of the budget is spent, and what it still has to pay."""
    words = f"{_usd(facts.spent_usd)} of the budget of {_usd(facts.budget_usd)} are spent"
    return f"{words}, saving and ending costs up to {_usd(facts.reserve_usd)}" if facts.reserve_usd else words


def _usd(amount: float | None) -> str:
    """Return ``$1.67``, ``$0.0042``; an unknown amount is shown as zero."""
    return usd_text(amount or 0.0)


def _at_own_deadline(state: RunState, last: AttemptState, facts: Facts) -> Action | None:
    """Return the failure of a run whose machine ended at its own deadline; None if an attempt may follow.

    That deadline is the earliest of three: of the money left, of twice the stage's deadline, of 30 days. One
    of the money may come too early: the attempt waited unbilled, or had fewer nodes for a while.
    """
    late = Action("fail", reason=_words(last, "at the machine's own deadline"), failure=last.outcome)
    if facts.budget_usd is None or facts.spent_usd is None:
        return late
    if facts.budget_usd - facts.spent_usd < WORTH_A_START * facts.budget_usd:
        return Action("fail", reason=f"{budget_words(facts)}: {last.outcome}", failure="budget")
    return late if _is_past_twice_its_deadline(state, last) else None


def _is_past_twice_its_deadline(state: RunState, last: AttemptState) -> bool:
    deadline_s = state.begun.deadline_s or 0.0  # one that had passed at the start limits no machine
    if deadline_s <= 0 or state.begun_at is None or last.ended_at is None:
        return False
    return last.ended_at - state.begun_at >= 2 * deadline_s


def _next_allocation(last: AttemptState) -> Allocation | None:
    """Return where the attempt after *last* runs; None if that has to be planned."""
    if outcome_of(last.outcome).recovery == "next-offer":
        return None
    return last.target or last.next_allocation or last.allocation


def _backoff_s(attempts: tuple[AttemptState, ...]) -> float:
    """Return seconds to wait before the next start; doubles with each consecutive fruitless end."""
    refused = 0
    for attempt in reversed(attempts):
        if not _is_out_of_stock(attempt):
            break
        refused += 1
    return wait_s(_count_fruitless(attempts) + refused, first_s=BACKOFF_FIRST_S, most_s=BACKOFF_LAST_S)


def _count_fruitless(attempts: tuple[AttemptState, ...], *, spares_spot: bool = False) -> int:
    """Count the last consecutive attempts that ended without a request and without a newer checkpoint.

    Ends that the owner requested count as progress. Attempts without capacity do not count; attempts that the
    backend refused for good do. *spares_spot*: losses of spot do not count either, since the market decides
    whether another try pays.
    """
    count, newest = 0, -1
    for attempt in attempts:
        is_spared = spares_spot and has_spot(attempt.allocation) and outcome_of(attempt.outcome).is_disruption
        if _is_out_of_stock(attempt) or (is_spared and attempt.checkpoint_step is None):
            continue
        step = attempt.checkpoint_step
        is_newer = step is not None and step > newest
        newest = max(newest, -1 if step is None else step)
        is_requested = outcome_of(attempt.stop_reason).caused_by == "owner"
        count = 0 if is_newer or is_requested else count + 1
    return count


def _is_out_of_stock(attempt: AttemptState) -> bool:
    return attempt.outcome == "not-started" and attempt.end.failure in (None, "capacity")


def _hopeless(attempts: tuple[AttemptState, ...], facts: Facts) -> Action | None:
    last = attempts[-1]
    recovery, failure = outcome_of(last.outcome).recovery, last.end.failure or ""
    if recovery == "next-offer" and outcome_of(failure).is_final:
        return Action("fail", reason=last.end.detail or last.outcome, failure=failure)
    if recovery == "fail-if-repeated":
        if not _is_seen_to_train(last):
            return Action("fail", reason=_words(last, "before its first step was seen"), failure=last.outcome)
        before = attempts[-2] if len(attempts) > 1 else None
        if before is not None and _is_same_error(before, last):
            when = "twice" if last.step is None else f"twice at step {last.step}"
            return Action("fail", reason=_words(last, when), failure=last.outcome)
    fruitless = _count_fruitless(attempts, spares_spot=facts.resume is not None)
    if fruitless >= facts.max_fruitless_attempts:
        reason = _words(last, f"{fruitless} attempts in a row without a newer checkpoint")
        return Action("fail", reason=reason, failure=last.outcome)
    return None


def _is_seen_to_train(attempt: AttemptState) -> bool:
    """Return True if it made a step or a checkpoint: code that reports no steps still makes checkpoints."""
    if attempt.step is None:
        return attempt.checkpoint_step is not None
    return attempt.step > (attempt.end.start_step or 0)


def _is_same_error(one: AttemptState, other: AttemptState) -> bool:
    ends = [(end.outcome, end.exit_code, end.signal, end.step) for end in (one.end, other.end)]
    return ends[0] == ends[1]


def _words(last: AttemptState, when: str) -> str:
    code = last.end.exit_code
    exits = f", exit code {code}" if code is not None else ""
    detail = last.end.detail or ""
    if detail == f"exit code {code}":
        detail = ""
    return f"{last.outcome} {when}{exits}" + (f": {detail}" if detail else "")


def _raised_memory(facts: Facts) -> int | None:
    limit, cap = facts.memory_limit_bytes, facts.memory_cap_bytes
    if limit is None or (cap is not None and limit >= cap):
        return None
    raised = int(limit * facts.oom_memory_factor)
    return raised if cap is None else min(raised, cap)


def _at_cap(facts: Facts) -> str:
    limit = facts.memory_limit_bytes
    gib = "unknown" if limit is None else f"{limit / 2**30:.2f} GiB"
    return (
        f"out of memory at its cap ({gib} per node): give resources.limits.memory or "
        f"failure.oom_memory_cap more"
    )
