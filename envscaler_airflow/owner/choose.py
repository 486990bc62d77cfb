"""Choose what the next attempt runs on, with the planner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.backends import has_image, shares_nodes
from envscaler_airflow.clouds import schemes
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.envspec.resources import GIB, default_limit_bytes
from envscaler_airflow.errors import BudgetError
from envscaler_airflow.images.cuda import software_faults
from envscaler_airflow.images.requirement_files import Requirements as Packages
from envscaler_airflow.owner.stage import Stage
from envscaler_airflow.planning import (
    Allocation,
    Goal,
    Knowledge,
    Offer,
    Plan,
    Requirements,
    Strategy,
    feasible,
    is_ordered,
    requirements_of,
)
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.data import data_places
from envscaler_airflow.planning.planner import PlanInputs, Rejected, data_misfits, risk_notes
from envscaler_airflow.planning.requirements import Misfit
from envscaler_airflow.planning.stockouts import against
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.scaling.from_spec import speedup_warning
from envscaler_airflow.store.availability import stockouts
from envscaler_airflow.store.run import PLAN, Run
from envscaler_airflow.store.run_store import Store


def warnings_of(spec: EnvSpec, offers: Sequence[Offer]) -> list[str]:
    """Return warnings: the stage can start, but its author may have intended something else."""
    speedup = speedup_warning(spec, offers)
    return [*spec.warnings, *risk_notes(requirements_of(spec)), *([] if speedup is None else [speedup])]


def make_plan(
    state: RunState,
    spec: EnvSpec,
    offers: Iterable[Offer],
    goal: Goal,
    knowledge: Knowledge,
    *,
    memory_bytes: int | None = None,
    sold_out: frozenset[str] = frozenset(),
    is_mixed: bool = False,
) -> tuple[PlanInputs, Plan]:
    """Plan where the next attempt may run, best first, with everything that is known of the stage.

    Offers that this run was just refused, and those in *sold_out* (names reported by other runs), are used
    only when nothing else fits. *is_mixed*: nodes may be of both capacity types. Offers that cannot use
    the stage's volumes are excluded. So are GPUs for which its packages have no kernels. A forecast refuses
    only the first attempt of a generation, and only one from runs of the same code.
    """
    refused = refused_offers(state) | sold_out
    usable, useless = _by_software(spec, offers)
    inputs = PlanInputs(
        needs=_with_memory(requirements_of(spec), memory_bytes),
        offers=tuple(offer for offer in usable if offer.name not in refused),
        goal=goal,
        knowledge=knowledge,
        is_ordered=is_ordered(spec),
        is_mixed=is_mixed,
        excluded=tuple(useless),
    )
    made = inputs.plan()
    if made.chosen is None and refused:
        inputs = replace(inputs, offers=tuple(usable))
        made = inputs.plan()
    over = [item for item in made.rejected if item.is_over_limit]
    if made.chosen is None and over and (state.attempts_of(state.generation) or knowledge.is_guess):
        inputs = replace(inputs, goal=_without_limits(goal), notes=(_LATE,))
        made = inputs.plan()
    return inputs, made


def in_words(made: Plan) -> str:
    """The chosen allocation with expected time and cost, their 80 % ranges, and their sources."""
    if made.chosen is None:
        return "plan: nothing fits"
    expected, text = made.chosen.estimate, f"plan: {made.chosen.allocation.name}"
    if expected is not None:
        text += f", {expected.hours:.3g} h ({expected.hours_low:.3g} to {expected.hours_high:.3g})"
        if expected.usd is not None and expected.usd_low is not None and expected.usd_high is not None:
            low, high = usd_text(expected.usd_low), usd_text(expected.usd_high)
            text += f" and {usd_text(expected.usd)} ({low} to {high}), 80 % ranges"
    return "; ".join((text, *made.notes))


_LATE = "the forecast breaks the budget or the deadline on every offer; the stage runs as well as it can"


def _without_limits(goal: Goal) -> Goal:
    """The goal of a stage that goes on although no offer keeps its limits: without time left, the fastest."""
    is_late = goal.deadline_s is not None
    strategy: Strategy = "performance" if is_late else goal.strategy
    return replace(goal, strategy=strategy, budget_usd=None, deadline_s=None)


def _by_software(spec: EnvSpec, offers: Iterable[Offer]) -> tuple[list[Offer], list[Rejected]]:
    """Split *offers* into those that the stage's packages run on, and the others with the reason."""
    fault_of, usable, useless = _software_fault(spec), [], []
    for offer in offers:
        fault = fault_of(offer)
        if fault is None:
            usable.append(offer)
        else:  # the machine itself lacks nothing
            useless.append(Rejected(Allocation(offer, spec.node_bounds.min), (Misfit("cuda", fault, 0.0),)))
    return usable, useless


def _software_fault(spec: EnvSpec) -> Callable[[Offer], str | None]:
    """Return a function that explains why the stage's packages cannot use an offer's GPUs; None if unknown.

    Uses only what is frozen: a requirements file may have changed or become unreachable since the run began.
    Stages that run in a machine's own environment are not checked: it contains other packages.
    """
    runtime = next(iter(spec.runtimes), None)
    is_known = runtime is None or runtime.requirements is None
    of_gpu = software_faults(spec, Packages(runtime)) if is_known else None

    def fault_of(offer: Offer) -> str | None:
        if of_gpu is None or offer.gpu_name is None or not has_image(offer.cloud):
            return None
        return of_gpu(offer.gpu_name)

    return fault_of


def budget_fault(stage: Stage, spent_usd: float | None) -> str | None:
    """Return why the rest of the budget is unknown; None if it is known, or there is no budget."""
    if stage.budget_usd is None or spent_usd is not None:
        return None
    return (
        f"what the stage has cost so far is unknown, since a price is: a budget of "
        f"{usd_text(stage.budget_usd)} cannot be kept; state the price, or leave the budget out"
    )


def goal_of(state: RunState, stage: Stage, *, spent_usd: float | None, now: float) -> Goal:
    """Return what the user wants from here on, less the money and time that the generation has used.

    Args:
        state: Fold of the run's events.
        stage: What was requested.
        spent_usd: By this generation so far; None when unknown.
        now: Clock of the owner's side, seconds since the epoch.

    Raises:
        BudgetError: There is a budget, and the rest of it is unknown.
    """
    fault = budget_fault(stage, spent_usd)
    if fault is not None:
        raise BudgetError(fault)
    budget, deadline = stage.budget_usd, stage.deadline_s
    begun = state.begun_at if state.attempts_of(state.generation) else None
    return Goal(
        strategy=stage.strategy,  # type: ignore[arg-type]  # checked by the operator
        value_of_hour_usd=stage.value_of_hour,
        budget_usd=None if budget is None else max(0.0, budget - (spent_usd or 0.0)),
        deadline_s=None if deadline is None else max(0.0, deadline - (now - begun if begun else 0.0)),
    )


def _with_memory(
    requirements: tuple[Requirements, ...], memory_bytes: int | None
) -> tuple[Requirements, ...]:
    least = (memory_bytes or 0) / GIB
    return tuple(replace(one, memory_gib=max(one.memory_gib, least)) for one in requirements)


def sold_out_offers(store: Store, offers: Iterable[Offer], *, now: float) -> frozenset[str]:
    """Return names of *offers* that the backend lately reported as unavailable to runs on this store.

    Raises:
        StoreError: The store cannot be read.
    """
    known = stockouts(store, now=now)
    return frozenset(offer.name for offer in offers if against(offer, known, now) is not None)


def refused_offers(state: RunState) -> frozenset[str]:
    """Return the offers found unavailable since the last attempt that ran."""
    names: list[str] = []
    for attempt in reversed(state.attempts_of(state.generation)):
        if attempt.outcome != "not-started":
            break
        if attempt.end.failure == "spec":
            continue  # no information about the offer
        names += attempt.end.refused or [part.offer.name for part in attempt.allocation.parts]
    return frozenset(names)


def write_plan(
    run: Run,
    state: RunState,
    made: Plan,
    inputs: PlanInputs,
    spec: EnvSpec,
    offers: Iterable[Offer],
    *,
    memory_bytes: int | None = None,
    is_mixed: bool = False,
) -> None:
    """Store the plan, human-readable, with its inputs, and for the sensor the targets of moves."""
    running = _with_memory(requirements_of(spec, while_running=True), memory_bytes)
    found = feasible(
        running, _by_software(spec, offers)[0], data=data_places(spec, schemes()), is_mixed=is_mixed
    )
    targets = [item.to_dict() for item in found]
    body = {"schema": SCHEMA, **made.to_dict(), "targets": targets, "inputs": inputs.to_dict()}
    body["forecast"] = _forecast(run, state, made)
    run.write(PLAN, json.dumps(body, indent=1).encode())


def _forecast(run: Run, state: RunState, made: Plan) -> dict[str, Any]:
    """What the generation's first plan expects of the whole stage: later plans keep it."""
    if state.attempts_of(state.generation):
        found = run.plan().get("forecast")
        return found if isinstance(found, dict) else {}
    expected = None if made.chosen is None else made.chosen.estimate
    return {"generation": state.generation, "estimate": None if expected is None else expected.to_dict()}


def memory_limit_bytes(spec: EnvSpec, last: AttemptState | None) -> int | None:
    """Return the memory per node that the last attempt had; None before the first."""
    if last is None:
        return None
    share_bytes, stated = least_memory_bytes(last.allocation), spec.resources.alternatives[0]
    limit = last.memory_bytes or stated.limits.memory_bytes
    if limit is not None:
        return min(limit, share_bytes)
    if not shares_nodes(last.allocation.offer.cloud):
        return share_bytes
    return default_limit_bytes(stated.requests.memory_bytes, share_bytes)


def least_memory_bytes(allocation: Allocation) -> int:
    """Return the memory of its smallest node."""
    return int(min(part.offer.memory_gib for part in allocation.parts) * GIB)


def memory_cap_bytes(spec: EnvSpec, offers: Sequence[Offer]) -> int | None:
    """Return the most that memory per node may be raised to; None without an offer to compare with."""
    largest = max((int(offer.memory_gib * GIB) for offer in offers), default=None)
    cap = spec.failure.oom_memory_cap_bytes
    if cap is None or largest is None:
        return largest if cap is None else cap
    return min(cap, largest)


def refused_by(attempt: AttemptState, missing_nodes: Iterable[int]) -> tuple[Offer, ...]:
    """Return the offers of the nodes that never started; all of the attempt's if none is named."""
    parts = attempt.allocation.parts
    nodes = set(missing_nodes)
    named = [
        part.offer for part in parts if nodes & set(range(part.first_rank, part.first_rank + part.nodes))
    ]
    return tuple(named or (part.offer for part in parts))


def fits(spec: EnvSpec, target: Allocation, offers: Iterable[Offer]) -> str | None:
    """Return why *target* is not available now, None if it is."""
    known = {offer.name for offer in offers}
    gone = [part.offer.name for part in target.parts if part.offer.name not in known]
    if gone:
        return f"{' and '.join(gone)} is no longer offered"
    fault_of = _software_fault(spec)
    for part in target.parts:
        for found in data_misfits(data_places(spec, schemes()), part.offer):
            return found.reason
        if (fault := fault_of(part.offer)) is not None:
            return fault
    bounds = spec.node_bounds
    if not bounds.min <= target.nodes <= bounds.max:
        return f"{target.nodes} nodes are outside {bounds.min}..{bounds.max}"
    return None
