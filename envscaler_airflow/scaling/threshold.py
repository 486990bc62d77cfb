"""Threshold rules on any metric, with persistence and hysteresis."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envscaler_airflow.planning import Allocation
from envscaler_airflow.scaling.decision import Policy, Proposal, ScalingPolicy, ThresholdRule, Want
from envscaler_airflow.scaling.observation import ACROSS, CPU_UTILIZATION, Observation, mean
from envscaler_airflow.scaling.outlook import outlook

STALE_S = 120.0
"""A metric whose newest sample is older is missing. Chosen: four checks of the sensor's default interval."""

Rounds = Sequence[tuple[float, float]]
"""``(at_s, value)`` of each check, oldest first."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One rule's evaluation of its metric.

    Attributes:
        rule: Which.
        rounds: Checks that count.
        nodes: Requested number of nodes; None: no request (the metric is missing, or the bound of a rule for
            one direction is not passed).
        reason: Why; human-readable.
        is_missing: True when the metric is missing.
    """

    rule: ThresholdRule
    rounds: Rounds
    nodes: int | None
    reason: str
    is_missing: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Numbers of a decision: the rule, its last checks, and the number of nodes that it requests."""
        rounds = [[at_s, value] for at_s, value in self.rounds[-self.rule.samples :]]
        return {"rule": self.rule.to_dict(), "rounds": rounds, "nodes": self.nodes, "reason": self.reason}


def threshold(observation: Observation, policy: Policy) -> Proposal:
    """Propose the largest number of nodes that any rule requests: scale out if one does, in if all do.

    With ``match: all``, every rule that can request more (or fewer) nodes must do so, and the smallest of
    these changes is taken.

    A metric counts only in checks where every node reported it. Otherwise it is missing, and a missing metric
    never scales in. Scaling in is blocked when the same load on fewer nodes would be above the bound again
    (hysteresis). Only the number of nodes changes, not the offer.
    """
    if not policy.rules:
        return Proposal(reason="the threshold policy has no rules")
    here = observation.current
    readings = [
        _read(rule, _rounds(observation, rule), here.nodes, policy, observation.unknown)
        for rule in policy.rules
    ]
    numbers = {"metrics": [item.to_dict() for item in readings]}
    most = (_all_ask if policy.match == "all" else _any_asks)(readings, here.nodes)
    missing = next((item for item in readings if item.is_missing), None)
    if missing is not None and (most is None or most.nodes is None or most.nodes <= here.nodes):
        return Proposal(reason=missing.reason, numbers=numbers)
    if most is None or most.nodes is None or most.nodes == here.nodes:
        return Proposal(reason="; ".join(item.reason for item in readings), numbers=numbers)
    nodes = min(max(most.nodes, policy.min_nodes), policy.max_nodes)
    if nodes == here.nodes:
        return Proposal(reason=f"{most.reason}, and {nodes} nodes is the limit", numbers=numbers)
    back = next((item for item in readings if _comes_back(item, here.nodes, nodes)), None)
    if back is not None:
        reason = f"{back.rule.metric} is {back.rounds[-1][1]:.4g}, and would be above {back.rule.above:g} on "
        return Proposal(reason=f"{reason}{nodes} nodes", numbers=numbers)
    return _propose(observation, policy, _resized(here, nodes), most.reason, numbers)


def _resized(here: Allocation, nodes: int) -> Allocation:
    """*here* with this number of *nodes*; a mixed one gains spot nodes, and loses them before others."""
    if here.rest is None:
        return replace(here, nodes=nodes)
    spot = max(0, nodes - (here.nodes - here.rest_nodes))
    return replace(here, nodes=nodes, rest=here.rest if spot else None, rest_nodes=spot)


def _any_asks(readings: Sequence[Reading], _nodes: int) -> Reading | None:
    return max((item for item in readings if item.nodes), key=lambda item: item.nodes or 0, default=None)


def _all_ask(readings: Sequence[Reading], nodes: int) -> Reading | None:
    out = [item for item in readings if _can_ask(item.rule, more=True)]
    fewer = [item for item in readings if _can_ask(item.rule, more=False)]
    if out and all(item.nodes is not None and item.nodes > nodes for item in out):
        return min(out, key=lambda item: item.nodes or 0)
    if any(item.nodes is not None and item.nodes > nodes for item in readings):
        return None
    if fewer and all(item.nodes is not None and item.nodes < nodes for item in fewer):
        return max(fewer, key=lambda item: item.nodes or 0)
    return None


def _can_ask(rule: ThresholdRule, *, more: bool) -> bool:
    """True when *rule* can request more nodes, or fewer: most rules of a spec are for one direction."""
    bound = rule.above if more == (rule.step > 0) else rule.below
    return rule.target is not None or bound is not None


def _comes_back(reading: Reading, nodes: int, fewer: int) -> bool:
    """True when the same load on fewer nodes would be above the bound again."""
    above = reading.rule.above
    if fewer >= nodes or above is None or not reading.rounds:
        return False
    if reading.rule.target is not None or reading.rule.step < 0:
        return False
    return reading.rounds[-1][1] * nodes / fewer > above


def _propose(
    observation: Observation, policy: Policy, target: Allocation, reason: str, numbers: dict[str, Any]
) -> Proposal:
    view = outlook(observation, policy)
    moving = view.moving(target, speed=view.slowest(target))
    return Proposal((Want(target, reason, view.staying, moving),), numbers=numbers)


def _rounds(observation: Observation, rule: ThresholdRule) -> Rounds:
    """Consecutive checks, up to now and since the last move, in which every node reported the metric."""
    if rule.sampled_as in observation.unknown:
        return []
    metric, since_s = rule.needed, 0.0
    if observation.since_move_s is not None:
        since_s = observation.elapsed_s - observation.since_move_s
    by_check: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in observation.samples:
        if item.at_s >= since_s and metric.matches(item.metric):
            is_share = rule.metric == CPU_UTILIZATION and rule.query is None
            value = item.value / (observation.current.offer.vcpus if is_share else 1)
            by_check[item.at_s][item.node].append(value)
    across, nodes = ACROSS[rule.across], range(observation.current.nodes if rule.query is None else 1)
    rounds: list[tuple[float, float]] = []
    for at_s, by_node in sorted(by_check.items()):
        if all(node in by_node for node in nodes):
            rounds.append((at_s, across([mean(by_node[node]) for node in nodes])))
        else:
            rounds.clear()
    is_stale = bool(rounds) and observation.elapsed_s - rounds[-1][0] > STALE_S
    return [] if is_stale else rounds


def _read(
    rule: ThresholdRule, rounds: Rounds, nodes: int, policy: Policy, unknown: Mapping[str, str]
) -> Reading:
    metric = rule.metric
    if not rounds:
        by = f"all of {nodes} nodes" if rule.query is None else f"its query {rule.query!r:.200}"
        why = unknown.get(rule.sampled_as)
        reason = f"{metric} is unknown: {why}" if why else f"{metric} is missing: not given by {by}"
        return Reading(rule, rounds, None, reason, is_missing=True)
    if len(rounds) < rule.samples:
        reason = f"{metric} was seen in {len(rounds)} checks of {rule.samples}"
        return Reading(rule, rounds, None, reason, is_missing=True)
    if rule.target is not None:
        return _read_target(rule, rule.target, rounds, nodes, policy.least_saving)
    now = f"{metric} is {rounds[-1][1]:.4g}"
    if rule.above is not None and _lasts(rule, rounds, lambda value: value > (rule.above or 0.0)):
        asked = f"{now}, above {rule.above:g} for {_long(rule)}"
        return Reading(rule, rounds, max(1, nodes + rule.step), asked)
    if rule.below is not None and _lasts(rule, rounds, lambda value: value < (rule.below or 0.0)):
        fewer = max(1, nodes - rule.step)
        return Reading(rule, rounds, fewer, f"{now}, below {rule.below:g} for {_long(rule)}")
    unsure = None if rule.below is None else nodes
    return Reading(rule, rounds, unsure, f"{now}, and passes no threshold for {_long(rule)}")


def _long(rule: ThresholdRule) -> str:
    return f"{rule.samples} checks" if rule.for_s == 0 else f"{rule.for_s:g} s"


def _read_target(rule: ThresholdRule, target: float, rounds: Rounds, nodes: int, tolerance: float) -> Reading:
    """HPA: ``ceil(nodes * value / target)``; of the last checks, the result nearest to *nodes* counts."""
    now = f"{rule.metric} is {rounds[-1][1]:.4g}, the target is {target:g}"
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
    """True when the last checks agree, for the number and the duration that the rule requires."""
    agreeing = []
    for at_s, value in reversed(rounds):
        if not agrees(value):
            break
        agreeing.append(at_s)
    if len(agreeing) < rule.samples or agreeing[0] - agreeing[-1] < rule.for_s:
        return False
    return rule.ahead_s == 0 or agrees(_forecast(rounds[-max(2, len(agreeing)) :], rule.ahead_s))


def _forecast(rounds: Rounds, ahead_s: float) -> float:
    """Value *ahead_s* after the last check, on the least-squares line; the last value if there is no line."""
    mean_t = mean([at_s for at_s, _ in rounds])
    mean_y = mean([value for _, value in rounds])
    spread = math.fsum((at_s - mean_t) ** 2 for at_s, _ in rounds)
    if spread == 0:
        return rounds[-1][1]
    slope = math.fsum((at_s - mean_t) * (value - mean_y) for at_s, value in rounds) / spread
    return mean_y + slope * (rounds[-1][0] + ahead_s - mean_t)


THRESHOLD = ScalingPolicy("threshold", threshold)
