"""Threshold rules on any metric, with persistence and hysteresis."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling.decision import Policy, Proposal, ThresholdRule, Want
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import outlook

_ACROSS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "max": max, "min": min}

STALE_S = 120.0
"""Metrics whose newest is older are missing. Chosen: four checks of the sensor's default interval."""

Rounds = Sequence[tuple[float, float]]
"""``(at_s, value)`` of each check, oldest first."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one rule makes of its metric.

    Attributes:
        rule: Which.
        rounds: Checks that count.
        nodes: Nodes that it asks for; None: the metric is missing.
        reason: Why, for people.
    """

    rule: ThresholdRule
    rounds: Rounds
    nodes: int | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Numbers of a decision: the rule, its last checks, and what it asks for."""
        rounds = [[at_s, value] for at_s, value in self.rounds[-self.rule.samples :]]
        return {"rule": self.rule.to_dict(), "rounds": rounds, "nodes": self.nodes, "reason": self.reason}


def threshold(observation: Observation, policy: Policy) -> Proposal:
    """Propose the most nodes that any rule asks for: out when one does, in when all do.

    A metric counts only in checks where every node gave it; otherwise it is missing, and a
    missing metric never scales in. Scaling in is held back when the same load on fewer
    nodes would be above again (hysteresis). Only the number of nodes changes, not the offer.
    """
    if not policy.rules:
        return Proposal(reason="the threshold policy has no rules")
    here = observation.current
    readings = [_read(rule, _rounds(observation, rule), here.nodes, policy) for rule in policy.rules]
    numbers = {"metrics": [item.to_dict() for item in readings]}
    known = [item for item in readings if item.nodes is not None]
    missing = [item for item in readings if item.nodes is None]
    most = max(known, key=lambda item: item.nodes or 0, default=None)
    if most is None or most.nodes is None or (missing and most.nodes <= here.nodes):
        return Proposal(reason=missing[0].reason, numbers=numbers)
    if most.nodes == here.nodes:
        return Proposal(reason=most.reason, numbers=numbers)
    nodes = min(max(most.nodes, policy.min_nodes), policy.max_nodes)
    if nodes == here.nodes:
        return Proposal(reason=f"{most.reason}, and {nodes} nodes is the limit", numbers=numbers)
    return _propose(observation, policy, replace(here, nodes=nodes), most.reason, numbers)


def _propose(
    observation: Observation, policy: Policy, target: Allocation, reason: str, numbers: dict[str, Any]
) -> Proposal:
    view = outlook(observation, policy)
    moving = view.moving(target, speed=view.slowest(target))
    return Proposal((Want(target, reason, view.staying, moving),), numbers=numbers)


def _rounds(observation: Observation, rule: ThresholdRule) -> Rounds:
    """Checks in a row, up to now and since the last move, in which every node gave the metric."""
    since_s = 0.0
    if observation.since_move_s is not None:
        since_s = observation.elapsed_s - observation.since_move_s
    by_check: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in observation.samples:
        if item.at_s >= since_s and fnmatchcase(item.metric, rule.metric):
            by_check[item.at_s][item.node].append(item.value)
    across, nodes = _ACROSS[rule.across], range(observation.current.nodes)
    rounds: list[tuple[float, float]] = []
    for at_s, by_node in sorted(by_check.items()):
        if all(node in by_node for node in nodes):
            rounds.append((at_s, across([fmean(by_node[node]) for node in nodes])))
        else:
            rounds.clear()
    is_stale = bool(rounds) and observation.elapsed_s - rounds[-1][0] > STALE_S
    return [] if is_stale else rounds


def _read(rule: ThresholdRule, rounds: Rounds, nodes: int, policy: Policy) -> Reading:
    metric = rule.metric
    if not rounds:
        return Reading(rule, rounds, None, f"{metric} is missing: not given by all of {nodes} nodes")
    if len(rounds) < rule.samples:
        return Reading(rule, rounds, None, f"{metric} was seen in {len(rounds)} checks of {rule.samples}")
    if rule.target is not None:
        return _read_target(rule, rule.target, rounds, nodes, policy.tolerance)
    now = f"{metric} is {rounds[-1][1]:.4g}"
    if rule.above is not None and _lasts(rule, rounds, lambda value: value > (rule.above or 0.0)):
        asked = f"{now}, above {rule.above:g} for {rule.samples} checks or more"
        return Reading(rule, rounds, nodes + rule.step, asked)
    if rule.below is None or not _lasts(rule, rounds, lambda value: value < (rule.below or 0.0)):
        return Reading(rule, rounds, nodes, f"{now}, and passes no threshold for long enough")
    fewer = max(1, nodes - rule.step)
    if rule.above is not None and rounds[-1][1] * nodes / fewer > rule.above:
        return Reading(rule, rounds, nodes, f"{now}, and would be above {rule.above:g} on {fewer} nodes")
    return Reading(rule, rounds, fewer, f"{now}, below {rule.below:g} for {rule.samples} checks or more")


def _read_target(rule: ThresholdRule, target: float, rounds: Rounds, nodes: int, tolerance: float) -> Reading:
    """HPA: ``ceil(nodes * value / target)``; over the last checks the one nearest to now counts."""
    now = f"{rule.metric} is {rounds[-1][1]:.4g}, {target:g} is asked for"
    asked = [
        nodes if abs(value / target - 1) <= tolerance else max(1, math.ceil(nodes * value / target))
        for _, value in rounds[-rule.samples :]
    ]
    if not _lasts(rule, rounds, lambda _value: True):
        return Reading(rule, rounds, nodes, f"{now}, and that for less than {rule.for_s:g} s")
    if min(asked) > nodes:
        return Reading(rule, rounds, min(asked), now)
    return Reading(rule, rounds, min(nodes, max(asked)), now)


def _lasts(rule: ThresholdRule, rounds: Rounds, agrees: Callable[[float], bool]) -> bool:
    """True when the last checks agree, as many and over as long as the rule asks."""
    agreeing = []
    for at_s, value in reversed(rounds):
        if not agrees(value):
            break
        agreeing.append(at_s)
    return len(agreeing) >= rule.samples and agreeing[0] - agreeing[-1] >= rule.for_s
