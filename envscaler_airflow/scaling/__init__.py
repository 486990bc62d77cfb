"""Decide from recorded facts whether a running stage should move.

``decide(observation, policy)`` serves the live sensor, the owner's validation, ``explain`` and the simulator.
It uses no clock, network, log or random numbers: the same observation under the same policy gives the same
decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling.cooldown import holds, holds_all
from envscaler_airflow.scaling.decision import (
    Check,
    Decision,
    Memory,
    PhaseNeed,
    Policy,
    Prepared,
    Proposal,
    Propose,
    ScalingPolicy,
    StartFacts,
    ThresholdRule,
    Want,
    explain,
    remember,
)
from envscaler_airflow.scaling.from_spec import policy_of
from envscaler_airflow.scaling.observation import (
    Ask,
    Metric,
    Observation,
    Sample,
    ask_metrics,
    recent,
    usage_samples,
    work_of,
)
from envscaler_airflow.scaling.outlook import outlook
from envscaler_airflow.scaling.registry import all_policies


def decide(
    observation: Observation, policy: Policy, *, policies: Mapping[str, ScalingPolicy] | None = None
) -> Decision:
    """Keep, move, or recommend a move.

    The policy proposes moves, and the guards may block them. A move must have been wanted without a break for
    the stabilization window. The first proposal that passes every check is taken. Urgent moves skip the
    window, the cooldown and the epochs between moves; moves whose policy weighs their costs do too, and only
    the maximum number of moves binds them.

    Args:
        observation: What the check saw.
        policy: The stage's settings.
        policies: By name; None: all installed policies, without the tables of a run.

    Raises:
        ValueError: No policy of that name.
    """
    proposal = _proposal(observation, policy, policies)
    least = _bound(policy, proposal.wants)
    since = observation.elapsed_s
    wanted = {
        want.target.name: min(observation.wanted.get(want.target.name, since), since)
        for want in proposal.wants
        if holds(observation, policy, want) is None
    }
    reason = holds_all(observation, least, proposal.wants)
    if reason is not None:
        is_blind = observation.health != "ok" or observation.phase != "running"
        return _keep(observation, policy, proposal, reason, {} if is_blind else wanted)
    reasons = []
    for want in proposal.wants:
        bound = _bound(policy, (want,))
        reason = (
            holds(observation, bound, want)
            or holds_all(observation, bound, (want,))
            or _unsettled(since, wanted, want, bound)
        )
        if reason is None:
            return _move(want, policy, proposal, wanted)
        reasons.append(f"{want.reason}, but {reason}")
    return _keep(observation, policy, proposal, reasons[0] if reasons else proposal.reason, wanted)


def validate(
    observation: Observation,
    policy: Policy,
    target: Allocation,
    *,
    is_forced: bool = False,
    policies: Mapping[str, ScalingPolicy] | None = None,
) -> Decision:
    """Check a requested move to *target* against fresh facts, before the owner accepts it.

    This is the same code as :func:`decide` with *target* as the only candidate; the others remain places to
    return to. The stabilization window passed before the request, so it is not checked again; ``pending``
    must not name the request under validation.

    Args:
        observation: Fresh facts.
        policy: The stage's policy; with ``recommend_only`` the answer is never ``move``.
        target: Requested allocation.
        is_forced: A person requested the move: the policy is not consulted and the guards apply, except for
            cooldown, epochs between moves and the maximum number of moves.
        policies: As for :func:`decide`.
    """
    others = {item.name: item for item in (*observation.elsewhere, *observation.candidates)}
    others.pop(target.name, None)
    fresh = replace(
        observation,
        candidates=(target,),
        elsewhere=tuple(others.values()),
        wanted={**observation.wanted, target.name: observation.elapsed_s},
    )
    settled = replace(policy, stabilization_s=0.0)
    if not is_forced:
        return decide(fresh, settled, policies=policies)
    view = outlook(fresh, settled)
    moving = view.moving(target, speed=view.slowest(target))
    want = Want(target, "requested by a person", view.staying, moving)
    asked = ScalingPolicy(policy.name, lambda _seen, _policy: Proposal((want,)))
    return decide(fresh, unbound(settled), policies={policy.name: asked})


def unbound(policy: Policy) -> Policy:
    """*policy* without limits on timing: no cooldown, epochs between moves, maximum or stabilization."""
    return replace(policy, cooldown_s=0.0, min_epochs_between=0, max_moves=None, stabilization_s=0.0)


def _bound(policy: Policy, wants: Iterable[Want]) -> Policy:
    """The limits on timing that the least limited of *wants* has."""
    found = tuple(wants)
    if any(want.is_urgent for want in found):
        return unbound(policy)
    if any(want.weighs_moves for want in found):
        return replace(unbound(policy), max_moves=policy.max_moves)
    return policy


def replay(check: Check, *, policies: Mapping[str, ScalingPolicy] | None = None) -> Decision:
    """Repeat the decision of a recorded check; equal to ``check.decision`` under the same version."""
    return decide(check.observation, check.policy, policies=policies)


def _proposal(
    observation: Observation, policy: Policy, policies: Mapping[str, ScalingPolicy] | None
) -> Proposal:
    known = all_policies() if policies is None else policies
    if policy.name not in known:
        raise ValueError(f"policy must be one of {', '.join(sorted(known))}, got {policy.name!r}")
    return known[policy.name].propose(observation, policy)


def _unsettled(now_s: float, wanted: Mapping[str, float], want: Want, policy: Policy) -> str | None:
    held_s = now_s - wanted.get(want.target.name, now_s)
    window_s = want.stabilization(policy)
    return None if held_s >= window_s else f"it is wanted for {held_s:.0f} s of {window_s:.0f} s"


def _move(want: Want, policy: Policy, proposal: Proposal, wanted: Mapping[str, float]) -> Decision:
    return Decision(
        action="recommend" if policy.recommend_only else "move",
        target=want.target,
        reason=want.reason,
        policy=policy.name,
        numbers=dict(proposal.numbers),
        wanted=wanted,
    )


def _keep(
    observation: Observation, policy: Policy, proposal: Proposal, reason: str, wanted: Mapping[str, float]
) -> Decision:
    numbers = dict(proposal.numbers)
    return Decision("keep", observation.current, reason, policy.name, numbers, wanted)


__all__ = [
    "Ask",
    "Check",
    "Decision",
    "Memory",
    "Metric",
    "Observation",
    "PhaseNeed",
    "Policy",
    "Prepared",
    "Proposal",
    "Propose",
    "Sample",
    "ScalingPolicy",
    "StartFacts",
    "ThresholdRule",
    "Want",
    "all_policies",
    "ask_metrics",
    "decide",
    "explain",
    "policy_of",
    "recent",
    "remember",
    "replay",
    "usage_samples",
    "validate",
    "work_of",
]
