"""How an attempt, a node or a run can end: the one table that every list and the docs are made from. Pure.

A new class of failure is one row here and the place that detects it. An end follows from what the backend and
the nodes report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envscaler_agent.protocol import Ended, Status
from envscaler_airflow.planning.record import Record

Recovery = Literal[
    "none",
    "as-requested",
    "resume",
    "replace",
    "more-memory",
    "resume-if-funded",
    "fail-if-repeated",
    "next-offer",
    "fail",
    "stop",
    "wait",
]
RECOVERIES: Mapping[Recovery, str] = {
    "none": "the stage is done",
    "as-requested": "what the owner requested: a move, a stop",
    "resume": "the next attempt resumes from the last good checkpoint",
    "replace": "the owner has the node replaced or ended; if that ends the attempt, the next one resumes",
    "more-memory": "the next attempt gets `failure.oom_memory_factor` times the memory, up to "
    "`failure.oom_memory_cap`; at the cap the run fails",
    "resume-if-funded": "the run fails, with class `budget` where less than a tenth of the budget is left; "
    "where more is left, and the stage has not taken twice its deadline, the next attempt resumes",
    "fail-if-repeated": "the run fails, before the first step at once, else at the second time at one step",
    "next-offer": "the next attempt tries another offer",
    "fail": "the run fails; only a clear of the task, or a start by name in a shell, begins an attempt",
    "stop": "the run stops; only a clear of the task, or a start by name in a shell, begins an attempt",
    "wait": "the owner waits",
}
"""What the owner does, for the docs."""
KINDS = {
    "end": "How an attempt ends",
    "node": "Why a node does not run",
    "stop": "Why the owner stops an attempt or fails a run",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way to end, or not to start.

    Attributes:
        name: As it appears in events, statuses and bills.
        severity: If nodes ended differently, the highest explains the others: the cause before its effects.
            In tens, so that a row fits between two. 0 if no node reports it as its end.
        caused_by: ``user``: code, spec, data or limits of the stage. ``platform``: cloud, cluster or machine.
            ``owner``: the owner requested it, or the run had no owner.
        recovery: What the owner does, see :data:`RECOVERIES`.
        text: What happened, for users, and what they can do about it; part of a sentence.
        kind: ``end`` of an attempt. ``node``: a backend's reason for a node that does not run; the owner may
            stop the attempt for it. ``stop``: set by the owner alone.
        node_decides: True if a backend knows it only by an exit code: the node's own report takes precedence.
    """

    name: str
    severity: int
    caused_by: Literal["user", "platform", "owner", "unknown"]
    recovery: Recovery
    text: str
    kind: Literal["end", "node", "stop"] = "end"
    node_decides: bool = False

    @property
    def is_final(self) -> bool:
        """Return True if only a clear of the task starts another attempt."""
        return self.recovery in ("fail", "stop")

    @property
    def never_starts(self) -> bool:
        """Return True for the reason of a node for which waiting will not help."""
        return self.kind == "node" and self.recovery in ("fail", "next-offer")

    @property
    def is_disruption(self) -> bool:
        """Return True for a loss that the stage did not cause."""
        return self.caused_by == "platform" and self.recovery == "resume"

    @property
    def is_orderly(self) -> bool:
        """Return True for a node that finished, was stopped, or had no owner: other nodes may continue."""
        return self.caused_by == "owner" or self.recovery == "none"


_ENDS = (
    Outcome("out-of-memory", 140, "user", "more-memory", "it used more memory than its limit"),
    Outcome(
        "cuda-out-of-memory", 130, "user", "fail-if-repeated", "the GPU memory is full; reduce the batch"
    ),
    Outcome("disk-full", 120, "user", "fail-if-repeated", "the disk is full; write less or request more"),
    Outcome("not-found", 110, "user", "fail-if-repeated", "the command does not exist; check the image"),
    Outcome("setup-failed", 100, "user", "fail-if-repeated", "code, inputs or checkpoint cannot be set up"),
    Outcome("failed", 90, "user", "fail-if-repeated", "the command ended with an error", node_decides=True),
    Outcome("deadline-exceeded", 80, "user", "resume-if-funded", "the machine ran into its own deadline"),
    Outcome("not-started", 70, "platform", "next-offer", "no node of it started"),
    Outcome("lost", 60, "platform", "resume", "the machine went away without an end of its own"),
    Outcome("killed", 50, "platform", "resume", "a signal from outside ended it", node_decides=True),
    Outcome("orphaned", 40, "owner", "resume", "no owner renewed the lease, or the run store was away"),
    Outcome("peer-lost", 35, "platform", "resume", "another node went away, or did not come in time"),
    Outcome("stopped", 30, "owner", "as-requested", "it stopped as requested", node_decides=True),
    Outcome("drained", 20, "owner", "as-requested", "it saved and stopped as requested", node_decides=True),
    Outcome("succeeded", 10, "user", "none", "it ended well and its outputs are stored", node_decides=True),
    Outcome("stalled", 0, "unknown", "resume", "it made no step for many times the usual time"),
)
_NODES = (
    Outcome("scheduling", 0, "platform", "wait", "it waits for a machine", "node"),
    Outcome("gated", 0, "platform", "wait", "it waits for its scheduling gates", "node"),
    Outcome("queue", 0, "platform", "wait", "it waits for its queue to admit it", "node"),
    Outcome("quota", 0, "platform", "wait", "it waits for room in a quota", "node"),
    Outcome("pulling", 0, "platform", "wait", "its image is on its way", "node"),
    Outcome("volume", 0, "platform", "wait", "it waits for its volumes", "node"),
    Outcome("config", 0, "user", "wait", "it waits for what its configuration names", "node"),
    Outcome("starting", 0, "platform", "wait", "it is about to run", "node"),
    Outcome("capacity", 0, "platform", "next-offer", "no machine is available", "node"),
    Outcome("placement", 0, "user", "next-offer", "no machine of it reaches the volumes", "node"),
    Outcome("image", 0, "user", "fail", "its image is not available", "node"),
    Outcome("refused", 0, "user", "fail", "the cluster refuses it", "node"),
    Outcome("silent", 0, "platform", "replace", "its machine does not answer", "node"),
    Outcome("unneeded", 0, "platform", "replace", "another part of its attempt has failed", "node"),
)
_STOPS = (
    Outcome("move", 0, "owner", "resume", "it moves to another allocation", "stop"),
    Outcome("spec-changed", 0, "owner", "resume", "it goes on with a changed spec", "stop"),
    Outcome("stop", 0, "owner", "stop", "a stop was requested", "stop"),
    Outcome("timeout", 0, "user", "fail", "the time of the task is over", "stop"),
    Outcome("budget", 0, "user", "fail", "the budget is spent", "stop"),
    Outcome("spec", 0, "user", "fail", "the spec requests what the backend can never give", "stop"),
    Outcome("no-offer", 0, "user", "fail", "no offer fits the request", "stop"),
    Outcome("start", 0, "user", "fail", "the run could not begin", "stop"),
    Outcome("backend", 0, "platform", "next-offer", "the backend refused the start", "stop"),
)
OUTCOMES: Mapping[str, Outcome] = {row.name: row for row in (*_ENDS, *_NODES, *_STOPS)}
_UNKNOWN = Outcome("", 0, "unknown", "resume", "")


def outcome_of(name: str) -> Outcome:
    """Return the row *name*; for a name of a newer version or another backend, a row that decides nothing."""
    return OUTCOMES.get(name, _UNKNOWN)


def docs_tables() -> str:
    """Return the table as it appears at the end of ``docs/reference/outcomes.md``."""
    lines = []
    for kind, title in KINDS.items():
        lines += [f"## {title}\n", "| name | meaning | caused by | what happens |", "|---|---|---|---|"]
        rows = (row for row in OUTCOMES.values() if row.kind == kind)
        lines += [f"| `{r.name}` | {r.text} | {r.caused_by} | {RECOVERIES[r.recovery]} |" for r in rows]
        lines += [""]
    return "\n".join(lines)


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

    ``missing_nodes``: nodes for which no machine was available. ``failure``, for an attempt that was not
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
    missing_nodes: tuple[int, ...] | None = None
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
    if stalled and outcome in ("stopped", "drained", "killed", "peer-lost"):
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
        return ("lost", f"neither the backend nor the node reported for {silent_s:.0f} s")
    return None


def _told_end(node: NodeStatus, said: Ended | None) -> tuple[str, str]:
    """Trust the node's own report of its end, unless only the backend can know it: limits, deadlines.

    An exit code of 0 alone does not mean success: the node reports outputs that could not be stored.
    """
    row = outcome_of(node.reason)
    if _is_missing(node):
        return ("not-started", node.detail)
    if said is not None and (row.node_decides or not node.reason):
        return (said.reason, said.detail or node.detail)
    if said is None and row.recovery == "none":
        return ("lost", "the command ended well, but no process reported that its results are stored")
    return (row.name if row.severity else "failed", node.detail or (said.detail if said else ""))


def _is_missing(node: NodeStatus) -> bool:
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
        missing_nodes=tuple(one.node for one in observed.nodes if _is_missing(one)) or None,
        outputs=dict(head.outputs) if head and outcome == "succeeded" else None,
        claim=head.claim if head and outcome == "succeeded" else None,
        failure=node.reason if outcome == "not-started" else None,
    )
