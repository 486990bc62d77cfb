"""Start an attempt: record the intent, then carry it out or cancel it; an intent never stays open."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from envscaler_agent.protocol import Control, control_name, parse_checkpoint_name
from envscaler_airflow.backends.base import AttemptRequest, OffersLater, ReplacesNodes, RunsMixed
from envscaler_airflow.errors import (
    BackendError,
    BudgetError,
    CapacityError,
    EnvScalerError,
    NoOfferError,
    SpecError,
    StoreError,
)
from envscaler_airflow.owner import choose, freeze, in_place_change, limits, policies, resume
from envscaler_airflow.owner.learn import profile_for
from envscaler_airflow.owner.owned_run import OwnedRun, live_of
from envscaler_airflow.owner.stage_knowledge import START_S, knowledge_of
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.run import Action, AttemptState, Handle, RunState
from envscaler_airflow.run.event_bodies import AttemptEnded, AttemptIntended, AttemptStarted, Failed
from envscaler_airflow.scaling import StartFacts, all_policies, policy_of
from envscaler_airflow.store.availability import remember
from envscaler_airflow.store.checkpoints import complete_checkpoints, read_control
from envscaler_airflow.store.lease import creates_exclusively
from envscaler_airflow.store.run_store import Store

log = logging.getLogger(__name__)

MAX_CANDIDATES = 16
"""Checkpoints that a start may fall back to. Chosen: five times what is kept by default."""
_BEFORE_THE_START = ("hold", "run")
_UNCHOSEN: dict[type[EnvScalerError], str] = {
    SpecError: "spec",
    NoOfferError: "no-offer",
    BudgetError: "budget",
}
_NOT_STARTED: dict[type[EnvScalerError], str] = {CapacityError: "capacity", SpecError: "spec"}
"""Class of the failure; ``backend`` for all other errors, after which another offer may work."""


def intend(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Record which attempt starts next, and on what."""
    try:
        allocation = _allocation(owned, state, action)
        _check_claims(owned, allocation)
        _check_money(owned, state, allocation)
    except (SpecError, NoOfferError, BudgetError) as err:
        owned.append(state, _failed(state, err))
        raise
    spec, begun = owned.spec(state), state.attempts_of(state.generation)
    sizes = in_place_change.sizes_after(spec, begun[0].begun_on if begun else None, allocation)
    known = [one for one in (action.memory_bytes, sizes.memory_bytes) if one is not None]
    memory = max(known, default=None)  # what the last attempt needed, even beyond the spec's limit
    every_s = limits.checkpoint_every_s(spec, state, allocation, now=owned.run.now())
    intended = AttemptIntended(
        generation=state.generation,
        attempt=len(begun) + 1,
        allocation=allocation,
        reason=action.reason,
        spec_hash=state.spec_hash,
        memory_bytes=memory,
        vcpus=sizes.vcpus,
        checkpoint_every_s=every_s,
        losses_per_hour=None if every_s is None else limits.losses_per_hour(state, now=owned.run.now()),
    )
    return owned.append(state, intended)


def _check_claims(owned: OwnedRun, allocation: Allocation) -> None:
    """Refuse several or replaced nodes on a store where two pods could both get the same claim.

    Raises:
        SpecError: The store has no exclusive create.
    """
    is_replacing = isinstance(owned.backend, ReplacesNodes)
    if (allocation.nodes > 1 or is_replacing) and not creates_exclusively(owned.run.store):
        what = f"{allocation.nodes} nodes" + (f" that {owned.backend.name} replaces" if is_replacing else "")
        raise SpecError(
            f"store {owned.run.store.url}: two writers can both create one name there, so a stage on "
            f"{what} is not safe; use s3://, gs://, abfs:// or a shared folder, or one node on another "
            "backend"
        )


def _check_money(owned: OwnedRun, state: RunState, allocation: Allocation) -> None:
    """Refuse a start that the first check of the budget would end at once.

    Raises:
        BudgetError: What is left of the budget does not pay for a start, a save and an end.
    """
    budget, spent = owned.stage.budget_usd, owned.spent_usd(state)
    if budget is None or spent is None:
        return
    known = limits.measured_s(state)
    least = limits.reserve_usd(allocation, check_s=limits.BUDGET_EVERY_S, checkpoint_s=known)
    if least is not None and spent + least >= budget:
        left = usd_text(max(0.0, budget - spent))
        raise BudgetError(
            f"the budget: {left} of {usd_text(budget)} are left; on {allocation.name} starting, saving and "
            f"ending alone may cost {usd_text(least)}; write a budget of more than {usd_text(spent + least)}"
        )


def _allocation(owned: OwnedRun, state: RunState, action: Action) -> Allocation:
    """Return the target unless it has too little memory now; without a target, the planner's choice."""
    target, memory, now = action.target, action.memory_bytes, owned.run.now()
    spent = owned.spent_usd(state)
    if (fault := choose.budget_fault(owned.stage, spent)) is not None:
        raise BudgetError(fault)
    if target is not None and (memory is None or choose.least_memory_bytes(target) >= memory):
        return target
    _pull_prices(owned, now=now)
    spec, offers = owned.spec(state), owned.backend.offers()
    goal = choose.goal_of(state, owned.stage, spent_usd=spent, now=now)
    sold_out = choose.sold_out_offers(owned.run.store, offers, now=now)
    how: dict[str, Any] = {"memory_bytes": memory, "is_mixed": isinstance(owned.backend, RunsMixed)}
    profile = profile_for(owned.run, state.spec_hash)
    known = knowledge_of(state, spec, offers, profile, now=now)
    inputs, made = choose.make_plan(state, spec, offers, goal, known, sold_out=sold_out, **how)
    if made.chosen is None and isinstance(owned.backend, OffersLater):
        offers = (*offers, *owned.backend.later_offers())
        known = knowledge_of(state, spec, offers, profile, now=now)
        inputs, made = choose.make_plan(state, spec, offers, goal, known, sold_out=sold_out, **how)
    for warning in () if state.attempts else choose.warnings_of(spec, offers):
        log.warning("%s", warning)
    owned.check_still_owner(state)
    log.info("%s", choose.in_words(made))
    choose.write_plan(owned.run, state, made, inputs, spec, offers, **how)
    return made.pick()


def _pull_prices(owned: OwnedRun, *, now: float) -> None:
    """Copy newer live prices from the run store, for backends whose offers are machines of a cloud."""
    from envscaler_airflow.catalog.prices import PriceCache  # noqa: PLC0415  (only a start waits for the catalog)
    from envscaler_airflow.catalog.shared_prices import pull  # noqa: PLC0415  (as above)
    from envscaler_airflow.catalog.sources import cache_dir  # noqa: PLC0415  (as above)

    try:
        faults = pull(owned.run.store, PriceCache(cache_dir()), now=now)
    except EnvScalerError as err:
        log.warning("live prices of the run store are not used: %s", err)
        return
    for fault in faults:
        log.warning("live prices of the run store are ignored: %s", fault)


def carry_out(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """Start the intended attempt, adopt it, or record why it cannot start."""
    del action
    live = live_of(state)
    owned.check_still_owner(state)
    owned.run.lease.renew(holder=owned.actor.ti_id)
    _publish_candidates(owned, state, live)
    try:
        _prepare(owned, state, live)
        request = _request(owned, state, live)
        now = owned.check_still_owner(state)
        if now.number != state.number:
            return now  # answer new events before paying for a machine
        handle = owned.backend.submit(request)
    except (SpecError, CapacityError, NoOfferError, BackendError) as err:
        if isinstance(err, StoreError) or (isinstance(err, BackendError) and err.transient):
            raise
        found = _find(owned, live)
        if found is None:
            return _not_started(owned, state, live, err)
        handle = found
    return _started(owned, state, live, handle)


def discard(owned: OwnedRun, state: RunState, action: Action) -> RunState:
    """End an attempt that was stopped before its start; first stop anything that was started for it."""
    live = live_of(state)
    owned.check_still_owner(state)
    found = _find(owned, live)
    if found is not None:
        return _started(owned, state, live, found)
    return owned.append(state, _unbilled_end(live, "stopped", action.reason))


def _started(owned: OwnedRun, state: RunState, live: AttemptState, handle: Handle) -> RunState:
    started = AttemptStarted(generation=live.generation, attempt=live.number, handle=handle)
    return owned.append(state, started)


def _find(owned: OwnedRun, live: AttemptState) -> Handle | None:
    """Return what an earlier execution started for the attempt without recording it."""
    return owned.backend.find(freeze.named_request(owned.run, live))


def _request(owned: OwnedRun, state: RunState, live: AttemptState) -> AttemptRequest:
    spec_hash = live.spec_hash or state.spec_hash
    request = freeze.attempt_request(
        owned.run,
        owned.stage,
        owned.run.spec(spec_hash),
        live,
        spec_hash=spec_hash,
        grace_s=limits.grace_s(state),
        deadline_s=_machine_deadline_s(owned, state, live),
    )
    return replace(request, restore_from=state.begun.restore_from)


def _prepare(owned: OwnedRun, state: RunState, live: AttemptState) -> None:
    """Build the table that the sensor's policy looks up: a triggerer must not compute for long."""
    spec = owned.spec(state)
    policy = None if spec.scaling is None else all_policies().get(spec.scaling.policy)
    if policy is None:
        return
    starts = resume.starts_s(state)
    known = StartFacts(
        allocation=live.allocation,
        start_s=median(starts) if starts else START_S,
        deadline_left_s=resume.deadline_left_s(owned, state),
        offers=owned.backend.offers,
    )
    policies.prepare(owned.run, policy, policy_of(spec), known)


def _machine_deadline_s(owned: OwnedRun, state: RunState, live: AttemptState) -> float:
    return limits.machine_deadline_s(
        usd_left=owned.usd_left(state, live),
        usd_per_hour=live.allocation.usd_per_hour,
        deadline_left_s=resume.deadline_left_s(owned, state),
        deadline_s=owned.stage.deadline_s,
    )


def _publish_candidates(owned: OwnedRun, state: RunState, live: AttemptState) -> None:
    """Fence older attempts, then list what this one may resume from; a later execution lists again."""
    control = Control(
        action="run",
        restore_from=state.begun.restore_from,
        orphan_after_s=owned.spec(state).failure.orphan_after_s,
        grace_s=limits.grace_s(state),
        checkpoint_every_s=live.checkpoint_every_s,
    )
    fence_older(owned.run, control, generation=live.generation, attempt=live.number)
    found = list_candidates(owned.run, generation=live.generation, attempt=live.number)
    owned.check_still_owner(state)
    write_candidates(owned.run, control, found, generation=live.generation, attempt=live.number)


def _not_started(owned: OwnedRun, state: RunState, live: AttemptState, err: EnvScalerError) -> RunState:
    if isinstance(err, CapacityError):  # for other runs on this store; says nothing about a full machine
        remember_refused(owned, choose.refused_by(live, ()), str(err))
    failure = _NOT_STARTED.get(type(err), "backend")
    return owned.append(state, _unbilled_end(live, "not-started", str(err), failure))


def fence_older(store: Store, control: Control, *, generation: int, attempt: int) -> None:
    """Stop every older attempt from publishing or deleting anything, from its next read of the control on.

    Written only if no control exists yet: an earlier stop or list takes precedence.

    Raises:
        StoreError: The store does not answer.
    """
    held = replace(control, action="hold", candidates=None)
    store.create(control_name(generation, attempt), held.to_json())


def list_candidates(store: Store, *, generation: int, attempt: int) -> tuple[str, ...]:
    """Checkpoints that *attempt* may resume from, best first.

    These are the checkpoints of the attempt before, then those that it was itself allowed. What an older
    attempt saved after a newer one began is in neither, so it is void. An attempt without a list adds none.

    Raises:
        StoreError: The store does not answer.
    """
    complete = complete_checkpoints(store, generation)
    found: list[str] = []
    for number in range(attempt - 1, 0, -1):
        found += [name for name in complete if (key := parse_checkpoint_name(name)) and key[2] == number]
        control = read_control(store, control_name(generation, number))
        if control is not None and control.candidates is not None:
            found += control.candidates
            break
    return tuple(dict.fromkeys(found))[:MAX_CANDIDATES]


def write_candidates(
    store: Store, control: Control, candidates: tuple[str, ...], *, generation: int, attempt: int
) -> None:
    """Write *candidates* to the attempt's control; the attempt runs from now on unless it was stopped.

    Raises:
        StoreError: The store does not answer.
    """
    name = control_name(generation, attempt)
    found = read_control(store, name)
    base = control if found is None or found.action in _BEFORE_THE_START else found
    store.write(name, replace(base, candidates=candidates).to_json())


def _failed(state: RunState, err: SpecError | NoOfferError | BudgetError) -> Failed:
    """Return the event of a run for which no attempt can be chosen."""
    return Failed(generation=state.generation, reason=str(err), failure=_UNCHOSEN[type(err)])


def _unbilled_end(live: AttemptState, outcome: str, detail: str, failure: str | None = None) -> AttemptEnded:
    """Return the end of an attempt for which no machine was started."""
    return AttemptEnded(
        generation=live.generation,
        attempt=live.number,
        outcome=outcome,
        failure=failure,
        detail=detail,
        usage=(),
        usd=0.0,
    )


def remember_refused(owned: OwnedRun, offers: Iterable[Offer], answer: str) -> None:
    """Remember, for other runs on this store, that these offers were not available."""
    for offer in offers:
        remember(owned.run.store, offer, "", answer, now=owned.run.now())
