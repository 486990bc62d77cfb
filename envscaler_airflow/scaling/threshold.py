"""Threshold rules on any metric, with persistence and hysteresis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling.decision import Policy, Proposal, ThresholdRule, Want
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import outlook

_ACROSS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "max": max, "min": min}


def threshold(observation: Observation, policy: Policy) -> Proposal:
    """Propose more nodes when any rule has its metric above for long enough, fewer when all are below.

    A metric counts only in checks where every node gave it; otherwise it is missing, and a
    missing metric never scales in. Scaling in is held back when the same load on fewer
    nodes would be above again (hysteresis). Only the number of nodes changes, not the offer.
    """
    if not policy.rules:
        return Proposal(reason="the threshold policy has no rules")
    seen = {rule: _rounds(observation, rule) for rule in policy.rules}
    numbers = {"metrics": [_numbers(rule, rounds) for rule, rounds in seen.items()]}
    high = [rule for rule, rounds in seen.items() if _holds(rule, rounds, above=True)]
    if high:
        target = _with_nodes(observation, policy, max(rule.step for rule in high))
        return _propose(observation, policy, target, _say(high[0], seen[high[0]], above=True), numbers)
    low = [rule for rule, rounds in seen.items() if _holds(rule, rounds, above=False)]
    if len(low) < len(seen):
        return Proposal(reason=_why_none(observation, seen), numbers=numbers)
    target = _with_nodes(observation, policy, -min(rule.step for rule in low))
    back = [rule for rule in low if _comes_back(observation, target, rule, seen[rule])]
    if back:
        reason = f"{back[0].metric} would be above {back[0].above:g} again on {target.nodes} nodes"
        return Proposal(reason=reason, numbers=numbers)
    return _propose(observation, policy, target, _say(low[0], seen[low[0]], above=False), numbers)


def _propose(
    observation: Observation, policy: Policy, target: Allocation, reason: str, numbers: dict[str, Any]
) -> Proposal:
    here = observation.current
    if target.nodes == here.nodes:
        return Proposal(reason=f"{reason}, and {here.nodes} nodes is the limit", numbers=numbers)
    view = outlook(observation, policy)
    moving = view.moving(target, speed=view.slowest(target))
    return Proposal((Want(target, reason, view.staying, moving),), numbers=numbers)


def _with_nodes(observation: Observation, policy: Policy, more: int) -> Allocation:
    """So many nodes more (or fewer), within the policy's range."""
    here = observation.current
    return replace(here, nodes=min(max(here.nodes + more, policy.min_nodes), policy.max_nodes))


def _rounds(observation: Observation, rule: ThresholdRule) -> list[tuple[float, float]]:
    """``(at_s, value)`` of each check since the last move in which every node gave the metric."""
    since_s = 0.0
    if observation.since_move_s is not None:
        since_s = observation.elapsed_s - observation.since_move_s
    by_check: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in observation.samples:
        if item.at_s >= since_s and fnmatchcase(item.metric, rule.metric):
            by_check[item.at_s][item.node].append(item.value)
    across, nodes = _ACROSS[rule.across], range(observation.current.nodes)
    return [
        (at_s, across([fmean(by_node[node]) for node in nodes]))
        for at_s, by_node in sorted(by_check.items())
        if all(node in by_node for node in nodes)
    ]


def _holds(rule: ThresholdRule, rounds: Sequence[tuple[float, float]], *, above: bool) -> bool:
    """True when the last checks agree, as many and over as long as the rule asks."""
    bound = rule.above if above else rule.below
    if bound is None or len(rounds) < rule.samples:
        return False
    agreeing = []
    for at_s, value in reversed(rounds):
        if (value > bound) if above else (value < bound):
            agreeing.append(at_s)
        else:
            break
    return len(agreeing) >= rule.samples and agreeing[0] - agreeing[-1] >= rule.for_s


def _comes_back(
    observation: Observation, target: Allocation, rule: ThresholdRule, rounds: Sequence[tuple[float, float]]
) -> bool:
    if rule.above is None:
        return False
    return rounds[-1][1] * observation.current.nodes / target.nodes > rule.above


def _say(rule: ThresholdRule, rounds: Sequence[tuple[float, float]], *, above: bool) -> str:
    side, bound = ("above", rule.above) if above else ("below", rule.below)
    return f"{rule.metric} is {rounds[-1][1]:.4g}, {side} {bound:g} for {rule.samples} checks or more"


def _why_none(observation: Observation, seen: dict[ThresholdRule, list[tuple[float, float]]]) -> str:
    for rule, rounds in seen.items():
        if not rounds:
            return f"{rule.metric} is missing: not given by all of {observation.current.nodes} nodes"
        if len(rounds) < rule.samples:
            return f"{rule.metric} was seen in {len(rounds)} checks of {rule.samples}"
    words = (f"{rule.metric} is {rounds[-1][1]:.4g}" for rule, rounds in seen.items())
    return "no threshold is passed for long enough: " + ", ".join(words)


def _numbers(rule: ThresholdRule, rounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {"rule": rule.to_dict(), "rounds": [[at_s, value] for at_s, value in rounds[-rule.samples :]]}
