"""Determine how an attempt ended, from what the backend and the nodes report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envscaler_agent.protocol import Ended, Status
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run.outcomes import OUTCOMES, outcome_of

NodeState = Literal["pending", "starting", "running", "ended", "lost", "unknown"]
"""``lost``: known to be gone without an end of its own. ``unknown``: cannot be observed; never dead."""

LOST_AFTER_S = 600.0
"""A node that neither the backend nor its status shows for this long is declared lost, seconds.

Chosen: longer than any restart of a control plane; a false alarm costs one restart. Measured by the
observer's own monotonic clock, never as a difference of two machines' clocks.
"""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node, as its backend sees it and as it last reported itself.

    Attributes:
        node: Index, 0 to nodes - 1.
        state: See :data:`NodeState`.
        exit_code, signal: How it ended, if it did and the backend saw it.
        reason: How an ended node ended; for others, why it does not run: a name of
            :data:`~envscaler_airflow.run.outcomes.OUTCOMES`; ``""`` for none.
        detail: One human-readable line.
        status: What the node last reported; the owner reads it from the store, a backend leaves it None.
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
        silent_s: Seconds for which the observer saw no status change while the backend did not answer; 0
            if something is known.
    """

    nodes: tuple[NodeStatus, ...]
    silent_s: float = 0.0

    @property
    def head(self) -> Status | None:
        """Return the status of node 0, which reports for the training."""
        return self.nodes[0].status if self.nodes else None


@dataclass(frozen=True, slots=True)
class End(Record):
    """How an attempt ended: the content of the ``attempt-ended`` event.

    ``never_came``: nodes for which no machine was available. ``failure``, for an attempt that was not
    started: ``capacity``, or ``placement`` if machines were available but reached no volume of the stage.
    ``claim``: of the pod of node 0 that stored the outputs.
    """

    outcome: str
    detail: str
    exit_code: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] | None = None
    start_step: int | None = None
    step: int | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    never_came: tuple[int, ...] | None = None
    outputs: Mapping[str, str] | None = None
    claim: int | None = None
    failure: str | None = None


def end_of(observed: Observed, *, stalled: bool = False) -> End | None:
    """Return how the attempt ended; None while any part of it may still run.

    A node counts as over in three cases: the backend saw it end or disappear; it reported its own end
    and the backend cannot be asked; or neither has reported for :data:`LOST_AFTER_S`.

    Args:
        observed: The nodes.
        stalled: True if the owner stopped it because it made no steps.
    """
    reasons = [_node_end(node, observed.silent_s) for node in observed.nodes]
    if not reasons or any(reason is None for reason in reasons):
        return None
    known = [reason for reason in reasons if reason is not None]
    worst = max(range(len(known)), key=lambda i: OUTCOMES[known[i][0]].severity)
    outcome, detail = known[worst]
    if stalled and outcome in ("stopped", "left", "killed"):
        outcome = "stalled"
    return _describe(observed, observed.nodes[worst], outcome, detail)


def _node_end(node: NodeStatus, silent_s: float) -> tuple[str, str] | None:
    said = node.status.ended if node.status else None
    if node.state == "lost":
        return ("lost", node.detail or OUTCOMES["lost"].text)
    if node.state == "ended":
        return _told_end(node, said)
    if node.state == "unknown" and said is not None and node.status and node.status.phase == "ended":
        return (said.reason, said.detail)
    if node.state == "unknown" and silent_s >= LOST_AFTER_S:
        return ("lost", f"neither the backend nor the node was heard for {silent_s:.0f} s")
    return None


def _told_end(node: NodeStatus, said: Ended | None) -> tuple[str, str]:
    """Trust the node's own report of its end, unless only the backend can know it: limits, deadlines.

    An exit code of 0 alone does not mean success: the node reports outputs that could not be stored.
    """
    row = outcome_of(node.reason)
    if _never_came(node):
        return ("not-started", node.detail)
    if said is not None and (row.node_decides or not node.reason):
        return (said.reason, said.detail or node.detail)
    if said is None and row.recovery == "none":
        return ("lost", "the command ended well, but nobody said that its results are stored")
    return (row.name if row.severity else "failed", node.detail or (said.detail if said else ""))


def _never_came(node: NodeStatus) -> bool:
    row = outcome_of(node.reason)
    return node.state == "ended" and row.kind == "node" and row.recovery == "next-offer"


def _describe(observed: Observed, node: NodeStatus, outcome: str, detail: str) -> End:
    head = observed.head
    said = node.status.ended if node.status else None
    return End(
        outcome=outcome,
        detail=detail,
        exit_code=said.exit_code if said else node.exit_code,
        signal=said.signal if said else node.signal,
        last_lines=(said.last_lines or None) if said else None,
        start_step=head.start_step if head else None,
        step=head.progress.step if head else None,
        checkpoint=head.last_checkpoint if head else None,
        checkpoint_step=head.last_checkpoint_step if head else None,
        never_came=tuple(one.node for one in observed.nodes if _never_came(one)) or None,
        outputs=dict(head.outputs) if head and outcome == "succeeded" else None,
        claim=head.claim if head and outcome == "succeeded" else None,
        failure=node.reason if outcome == "not-started" else None,
    )
