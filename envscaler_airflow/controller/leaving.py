"""Which nodes go when an attempt is to have fewer. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import Record


@dataclass(frozen=True, slots=True)
class Leaving(Record):
    """A node that goes, and why it and no other."""

    node: int
    reason: str


def who_leaves(
    allocation: Allocation,
    count: int,
    *,
    removable: Collection[int] = (),
    step_s: Mapping[int, float] | None = None,
) -> tuple[Leaving, ...]:
    """The *count* nodes that go, first to go first; never node 0, which speaks for the training.

    One that is marked removable; else spot before on-demand; else the slowest; else the last.

    Args:
        allocation: What the attempt has.
        count: How many go; fewer than there are.
        removable: Nodes that somebody marked.
        step_s: Seconds of a step by node, as far as they are known.
    """
    if not 0 <= count < allocation.nodes:
        raise ValueError(f"count must be >= 0 and < {allocation.nodes}, got {count!r}")
    speeds = step_s or {}
    slowest = max(speeds.values(), default=0.0)

    def rank(node: int) -> tuple[bool, bool, float, int]:
        is_spot = allocation.offer_of(node).capacity_type == "spot"
        return (node not in removable, not is_spot, -speeds.get(node, 0.0), -node)

    chosen = sorted(range(1, allocation.nodes), key=rank)[:count]
    return tuple(Leaving(node, _why(allocation, node, removable, speeds, slowest)) for node in chosen)


def _why(
    allocation: Allocation,
    node: int,
    removable: Collection[int],
    speeds: Mapping[int, float],
    slowest: float,
) -> str:
    if node in removable:
        return "it is marked removable"
    if allocation.is_mixed and allocation.offer_of(node).capacity_type == "spot":
        return "it is spot, and others are on demand"
    if node in speeds and speeds[node] == slowest and len(set(speeds.values())) > 1:
        return f"it is the slowest: {speeds[node]:.3g} s a step"
    if node in speeds and len(set(speeds.values())) > 1:
        return f"it is among the slowest: {speeds[node]:.3g} s a step"
    return "it is the last, and nothing else tells them apart"
