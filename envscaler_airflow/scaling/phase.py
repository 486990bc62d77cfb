"""Phases: meet the needs of each phase of a training in time, and skip phases where a move does not pay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.record import NotNegative, Record
from envscaler_airflow.scaling.decision import (
    Check,
    PhaseNeed,
    Policy,
    Prepared,
    Proposal,
    ScalingPolicy,
    StartFacts,
    Want,
)
from envscaler_airflow.scaling.observation import Metric, Observation
from envscaler_airflow.scaling.outlook import Outlook, outlook

SIGNALS = (("loading", 20.0, 40.0), ("evaluation", 50.0, 70.0), ("training", 70.0, 95.0))
"""GPU utilization in percent that identifies a phase. Chosen: loading waits for its input, evaluation has no
backward pass, and training is limited by its GPU. Values between the ranges identify none."""
LOOKS = 4
"""Consecutive samples that must agree on a phase that was not announced. Chosen."""
LEAD = 1.5
"""A bigger need is met this many times the length of a move before its phase begins. Chosen."""
FILE = "phases.json"
"""Name among the run's tables of the phases of an earlier run, with that run's name."""


@dataclass(frozen=True, slots=True)
class _Now:
    name: str | None
    source: str


def phase(observation: Observation, policy: Policy) -> Proposal:
    """Propose the cheapest allocation that the phase needs, and meet a bigger need of the next phase in time.

    The training announces a phase; otherwise GPU utilization identifies it. Earlier runs show how long it
    lasts and what comes next. A phase that ends before a move there and back has paid for itself is skipped,
    and the reason names it.
    """
    needs = {need.phase: need for need in policy.phases}
    if not needs:
        return Proposal(reason="the phase policy has no phases")
    now, view = _phase_now(observation), outlook(observation, policy)
    numbers: dict[str, Any] = {"phase": now.name, "phase_from": now.source, "next": observation.next_phase}
    coming = needs.get(observation.next_phase or "")
    if coming is not None and _is_due(observation) and _is_bigger(coming, observation.current):
        return _propose(
            view, coming, f"{coming.phase} begins in {observation.next_phase_in_s:.0f} s", numbers
        )
    need = needs.get(now.name or "")
    if need is None:
        known = ", ".join(sorted(needs))
        return Proposal(
            reason=f"phase {now.name or 'unknown'} ({now.source}) is not one of {known}", numbers=numbers
        )
    if _meets(need, observation.current):
        return Proposal(reason=f"{observation.current.name} is what {need.phase} needs", numbers=numbers)
    if coming is not None and _is_ready(coming, need, observation):
        why = f"{observation.current.name} is what {coming.phase} needs, which is about to begin"
        return Proposal(reason=why, numbers=numbers)
    return _propose(view, need, f"{need.phase} ({now.source})", numbers)


def _phase_now(observation: Observation) -> _Now:
    if observation.training_phase is not None:
        return _Now(observation.training_phase, "announced")
    by_look: dict[float, list[float]] = {}
    for item in observation.samples:
        if item.metric.startswith("gpu") and item.metric.endswith("utilization_percent"):
            by_look.setdefault(item.at_s, []).append(item.value)
    looks = [math.fsum(values) / len(values) for _, values in sorted(by_look.items())][-LOOKS:]
    if len(looks) < LOOKS:
        return _Now(None, "not announced, and GPU utilisation is missing")
    for name, low, high in SIGNALS:
        if all(low <= value <= high for value in looks):
            return _Now(name, f"GPU at {looks[-1]:.0f} %")
    return _Now(None, f"not announced, and GPU at {looks[-1]:.0f} % tells nothing")


def _is_due(observation: Observation) -> bool:
    left_s = observation.next_phase_in_s
    return left_s is not None and left_s <= LEAD * observation.overheads.start_s


def _is_ready(coming: PhaseNeed, need: PhaseNeed, observation: Observation) -> bool:
    """True when the needs of the next phase are already met, and this phase needs no more."""
    here = observation.current
    return _is_due(observation) and _meets(coming, here) and not _is_bigger(need, here)


def _is_bigger(need: PhaseNeed, here: Allocation) -> bool:
    return (need.nodes or 0) > here.nodes or (need.gpu_memory_gb or 0) > (here.offer.gpu_memory_gb or 0)


def _meets(need: PhaseNeed, item: Allocation) -> bool:
    has_nodes = need.nodes is None or item.nodes == need.nodes
    return has_nodes and (need.gpu_memory_gb or 0) <= (item.offer.gpu_memory_gb or 0)


def _propose(view: Outlook, need: PhaseNeed, why: str, numbers: dict[str, Any]) -> Proposal:
    seen = view.observation
    fitting = [item for item in seen.others() if _meets(need, item)]
    if not fitting:
        wanted = f"{need.nodes or 'any number of'} nodes"
        if need.gpu_memory_gb:
            wanted += f" with GPUs of {need.gpu_memory_gb:g} GB"
        return Proposal(reason=f"{why} needs {wanted}, and no candidate has that", numbers=numbers)
    target = min(fitting, key=lambda item: (item.usd_per_hour is None, item.usd_per_hour or 0.0, item.name))
    lasts_s = seen.phase_lasts_s.get(need.phase)
    passed = None if lasts_s is None else _too_short(view, target, need, lasts_s)
    if passed is not None:
        return Proposal(reason=f"{why} is skipped: {passed}", numbers={**numbers, "lasts_s": lasts_s})
    moving = view.moving(target, speed=view.slowest(target))
    want = Want(target, f"{why} needs {target.nodes} nodes of {target.offer.name}", view.staying, moving)
    return Proposal((want,), numbers={**numbers, "lasts_s": lasts_s})


def _left_s(need: PhaseNeed, lasts_s: float, seen: Observation) -> float:
    """Remaining seconds of the phase; all of them if it has not begun or is longer than before."""
    left_s = seen.next_phase_in_s
    return min(left_s, lasts_s) if need.phase == seen.training_phase and left_s else lasts_s


def _too_short(view: Outlook, target: Allocation, need: PhaseNeed, whole_s: float) -> str | None:
    """Why a phase of this length does not pay for moving there and back; None: it does."""
    seen = view.observation
    lasts_s = _left_s(need, whole_s, seen)
    moves_s = 2 * seen.overheads.start_s
    if lasts_s <= moves_s:
        more = " more" if lasts_s < whole_s else ""
        return f"it lasts {lasts_s:.0f} s{more}, and moving there and back takes {moves_s:.0f} s"
    here, there = seen.current.usd_per_hour, target.usd_per_hour
    if here is None or there is None or there >= here:
        return None
    value = view.policy.value_of_hour
    saved = (here - there) * (lasts_s - moves_s) / SECONDS_PER_HOUR
    costs = (here + there + 2 * value) * seen.overheads.start_s / SECONDS_PER_HOUR
    if saved > costs:
        return None
    return f"in {lasts_s:.0f} s it saves {usd_text(saved)}, and moving there and back costs {usd_text(costs)}"


@dataclass(frozen=True, slots=True)
class Span(Record):
    """One phase of an earlier run."""

    phase: str
    lasts_s: NotNegative[float]


@dataclass(frozen=True, slots=True)
class Forecast(Record):
    """Phases in the order of the last run that had any."""

    spans: tuple[Span, ...] = ()

    def lasts_s(self) -> dict[str, float]:
        """Mean seconds of each phase."""
        found: dict[str, list[float]] = {}
        for span in self.spans:
            found.setdefault(span.phase, []).append(span.lasts_s)
        return {phase: sum(values) / len(values) for phase, values in found.items()}

    def after(self, phases: tuple[str, ...], in_phase_s: float) -> tuple[str | None, float | None]:
        """Next phase and seconds until it, after *phases* so far, the last of them for *in_phase_s*.

        ``(None, None)`` when the earlier run had another order, or this is its last phase.
        """
        done = tuple(span.phase for span in self.spans[: len(phases)])
        if not phases or done != phases or len(phases) >= len(self.spans):
            return None, None
        return self.spans[len(phases)].phase, max(0.0, self.spans[len(phases) - 1].lasts_s - in_phase_s)


def spans_of(checks: Iterable[Check]) -> tuple[Span, ...]:
    """Announced phases in the order of the checks, with the observed duration of each."""
    found: list[tuple[str, float, float]] = []
    for check in checks:
        seen = check.observation
        if seen.training_phase is None:
            continue
        if found and found[-1][0] == seen.training_phase:
            found[-1] = (seen.training_phase, found[-1][1], seen.elapsed_s)
        else:
            began = found[-1][2] if found else 0.0
            found.append((seen.training_phase, began, seen.elapsed_s))
    return tuple(Span(phase, max(0.0, end - began)) for phase, began, end in found)


def forecast(_policy: Policy, facts: StartFacts) -> Prepared:
    """The phases of the last earlier run that had any, for the observations of this run."""
    for run, checks in facts.earlier():
        if spans := spans_of(checks):
            body = {"schema": SCHEMA, "run": run, **Forecast(spans).to_dict()}
            return Prepared({FILE: json.dumps(body).encode()})
    return Prepared()


PHASE = ScalingPolicy(
    "phase", phase, metrics=(Metric("gpu_utilization"),), window_checks=2 * LOOKS, prepare=forecast
)
