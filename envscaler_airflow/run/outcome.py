"""Tell how an attempt ended, from what the backend and the nodes say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envscaler_agent.protocol import Ended, Status

NodeState = Literal["pending", "starting", "running", "ended", "lost", "unknown"]

LOST_AFTER_S = 600.0
"""A node that neither the backend nor its status shows for so long is declared lost, seconds.

Chosen: longer than any restart of a control plane; a false alarm costs one restart. Measured by the
observer's own monotonic clock, never as a difference of two machines' clocks.
"""

SEVERITY = (
    "out-of-memory",
    "cuda-out-of-memory",
    "disk-full",
    "not-found",
    "setup-failed",
    "failed",
    "deadline-exceeded",
    "not-started",
    "lost",
    "killed",
    "orphaned",
    "stopped",
    "left",
    "succeeded",
)
"""When nodes ended differently, the first of these explains the others: the cause before its echoes."""

USER_ERRORS = frozenset({"failed", "cuda-out-of-memory", "disk-full", "not-found", "setup-failed"})
"""Outcomes that the same code on the same data would repeat."""


PENDING: Mapping[str, Literal["wait", "next-offer", "fail"]] = {
    "": "wait",
    "config": "wait",
    "gated": "wait",
    "pulling": "wait",
    "queue": "wait",
    "quota": "wait",
    "scheduling": "wait",
    "starting": "wait",
    "volume": "wait",
    "capacity": "next-offer",
    "placement": "next-offer",
    "image": "fail",
    "refused": "fail",
}
"""What the owner does about a node that does not run yet, by the backend's reason; waits for any other.

``capacity``: no machine came within its time. ``placement``: none of the offer reaches the stage's volumes.
``image``: the image does not exist, or did not come within its time. ``refused``: the provider takes no such
machine, or something that it needs is missing; only a person changes that.
"""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as the backend sees it and as it last said itself.

    Attributes:
        state: The backend's word; ``unknown`` is never dead.
        reason: The backend's reason; ``""`` when it knows none.
        status: What the node last said; None when nothing was read.
    """

    node: int
    state: NodeState
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    detail: str = ""
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """All nodes of the live attempt.

    Attributes:
        nodes: In order.
        silent_s: Seconds for which the observer saw no change of any status while the backend could
            not be asked; 0 when something is known.
    """

    nodes: tuple[NodeFacts, ...]
    silent_s: float = 0.0

    @property
    def head(self) -> Status | None:
        """Status of node 0, which speaks for the training."""
        return self.nodes[0].status if self.nodes else None


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended: what the ``attempt-ended`` event carries.

    ``never_came``: nodes that no machine was available for. ``failure``: of an attempt that was not started,
    ``capacity``, or ``placement`` when machines were available and reached no volume of the stage.
    ``claim``: of the pod of node 0 that stored the outputs.
    """

    outcome: str
    detail: str
    exit_code: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()
    start_step: int | None = None
    step: int | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    never_came: tuple[int, ...] = ()
    outputs: Mapping[str, str] | None = None
    claim: int | None = None
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form; unknown fields are left out."""
        pairs = ((name, getattr(self, name)) for name in self.__slots__)
        body = {name: value for name, value in pairs if value is not None and value != ()}
        return body | {name: list(body[name]) for name in ("last_lines", "never_came") if name in body}


def end_of(observed: Observed, *, stalled: bool = False) -> End | None:
    """How the attempt ended; None while anything of it may still run.

    A node counts as over when the backend saw it end or go, or when it said itself that it ended
    and the backend cannot be asked, or when neither has been heard for :data:`LOST_AFTER_S`.

    Args:
        observed: The nodes.
        stalled: True when the owner stopped it because it made no steps.
    """
    reasons = [_node_end(node, observed.silent_s) for node in observed.nodes]
    if not reasons or any(reason is None for reason in reasons):
        return None
    known = [reason for reason in reasons if reason is not None]
    worst = min(range(len(known)), key=lambda i: SEVERITY.index(known[i][0]))
    outcome, detail = known[worst]
    if stalled and outcome in ("stopped", "left", "killed"):
        outcome = "stalled"
    return _describe(observed, observed.nodes[worst], outcome, detail)


def _node_end(node: NodeFacts, silent_s: float) -> tuple[str, str] | None:
    said = node.status.ended if node.status else None
    if node.state == "lost":
        return ("lost", node.detail or "the machine went away without an end of its own")
    if node.state == "ended":
        return _told_end(node, said)
    if node.state == "unknown" and said is not None and node.status and node.status.phase == "ended":
        return (said.reason, said.detail)
    if node.state == "unknown" and silent_s >= LOST_AFTER_S:
        return ("lost", f"neither the backend nor the node was heard for {silent_s:.0f} s")
    return None


def _told_end(node: NodeFacts, said: Ended | None) -> tuple[str, str]:
    """What the node said of its end stands, unless only the backend can know: limits, deadlines.

    An exit code of 0 alone is no success: outputs that could not be stored are told by the node.
    """
    reason = node.reason or "failed"
    if PENDING.get(reason) == "next-offer":
        return ("not-started", node.detail)
    if said is not None and reason in _NODE_KNOWS_BETTER:
        return (said.reason, said.detail or node.detail)
    if said is None and reason == "succeeded":
        return ("lost", "the command ended well, but nobody said that its results are stored")
    return (reason if reason in SEVERITY else "failed", node.detail or (said.detail if said else ""))


def _never_came(node: NodeFacts) -> bool:
    return node.state == "ended" and PENDING.get(node.reason) == "next-offer"


_NODE_KNOWS_BETTER = frozenset({"succeeded", "failed", "killed", "left", "stopped"})


def _describe(observed: Observed, node: NodeFacts, outcome: str, detail: str) -> End:
    head = observed.head
    said = node.status.ended if node.status else None
    return End(
        outcome=outcome,
        detail=detail,
        exit_code=said.exit_code if said else node.exit_code,
        signal=said.signal if said else node.signal,
        last_lines=said.last_lines if said else (),
        start_step=head.start_step if head else None,
        step=head.progress.step if head else None,
        checkpoint=head.last_checkpoint if head else None,
        checkpoint_step=head.last_checkpoint_step if head else None,
        never_came=tuple(one.node for one in observed.nodes if _never_came(one)),
        outputs=dict(head.outputs) if head and outcome == "succeeded" else None,
        claim=head.claim if head and outcome == "succeeded" else None,
        failure=node.reason if outcome == "not-started" else None,
    )
