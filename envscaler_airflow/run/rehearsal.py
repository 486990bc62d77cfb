"""What a drill shows: how long a running stage took over a fault, and what it lost. Pure.

Samples of the run before and after the fault in, a :class:`Rehearsal` out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.record import Record
from envscaler_airflow.run.state import RunStatus

Course = Literal["replaced", "moved", "undisturbed"]
"""What the stage must do: train in other processes, move to a requested allocation, or simply go on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault or request.

    Attributes:
        name: As ``--faults`` has it.
        course: What the stage must do.
        text: What happens to it, for users.
    """

    name: str
    course: Course
    text: str


FAULTS: Mapping[str, Fault] = {
    row.name: row
    for row in (
        Fault("lose-node", "replaced", "one node is killed without notice, as its machine would be lost"),
        Fault("kill-sidecar", "undisturbed", "the sidecar of one node is killed; the training is not"),
        Fault("oom", "replaced", "the memory of one node is filled, until the kernel kills the training"),
        Fault("stall", "replaced", "the training of one node is suspended, and makes no step"),
        Fault("store-away", "undisturbed", "the sidecar of one node gets no answer from the run store"),
        Fault("triggerer", "undisturbed", "the process that watches the run is killed; the training is not"),
        Fault("grow", "moved", "a move to one node more is requested"),
        Fault("shrink", "moved", "a move to one node less is requested"),
        Fault("change-type", "moved", "a move to another offer is requested, the cheapest other one"),
    )
}
"""Every fault, in the order in which the docs list them."""


@dataclass(frozen=True, slots=True)
class Bounds(Record):
    """What a stage must keep to, besides that no step of a valid checkpoint is trained again.

    Attributes:
        replace_s: Longest time from a fault to the first new step, seconds.
        pause_s: Longest time without a step during a move, seconds.
    """

    replace_s: float = 600.0
    pause_s: float = 300.0


@dataclass(frozen=True, slots=True)
class NodeSample:
    """What one node last reported; see :class:`~envscaler_agent.protocol.Status`."""

    claim: int
    sequence: int
    phase: str
    step: int | None = None
    start_step: int | None = None
    saved_step: int | None = None
    step_s: float | None = None
    first_step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A run at one moment.

    Attributes:
        at_s: Seconds since the fault, or since its end if it lasted, by the observer's clock; below 0 before.
        status, reason: Of the run.
        attempt: The live attempt, ``(generation, number)``; None without one.
        is_started: True while the attempt runs and was not asked to stop.
        allocation: Name of what it runs on.
        usd_per_hour: Price of that; None: unknown.
        nodes: What each of its nodes last reported; None before the first report.
        lease: The counter of the lease.
        usd: Cost so far by attempt, ``(generation, number)``; None: unknown.
    """

    at_s: float
    status: RunStatus = "active"
    reason: str = ""
    attempt: tuple[int, int] | None = None
    is_started: bool = False
    allocation: str = ""
    usd_per_hour: float | None = None
    nodes: tuple[NodeSample | None, ...] = ()
    lease: int = 0
    usd: Mapping[tuple[int, int], float | None] = field(default_factory=dict)

    @property
    def head(self) -> NodeSample | None:
        """The report of node 0."""
        return self.nodes[0] if self.nodes else None

    @property
    def step(self) -> int | None:
        """The last step that node 0 reported."""
        return None if self.head is None else self.head.step

    @property
    def saved_step(self) -> int | None:
        """The step that a loss now must not go behind: of the newest checkpoint, else where it began."""
        head = self.head
        known = () if head is None else (head.saved_step, head.start_step)
        return max((step for step in known if step is not None), default=None)

    def claims(self) -> tuple[int, ...]:
        """The claim under which each node reports; 0 before its first report."""
        return tuple(0 if node is None else node.claim for node in self.nodes)

    def is_same_life(self, other: Sample) -> bool:
        """Return True if the same processes of the same attempt train."""
        return self.attempt == other.attempt and self.claims() == other.claims()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal(Record):
    """What one fault showed.

    Attributes:
        fault: Its name.
        did: What was done, on one line; "" if nothing was.
        missed: Each bound that was not kept, or why nothing was done, in words; () if all is well.
        detect_s: Seconds until the run's records show a reaction; None if none is expected, or none came.
        resume_s: Seconds until the first new step; None if there was none.
        pause_s: Seconds without training.
        steps_lost: Steps that are trained again, as far as they were reported.
        committed_steps_lost: Steps of these that a valid checkpoint contained.
        usd_lost: Cost of the pause and of the repeated steps; None: unknown.
        before, after: Attempt and allocation, as ``g1-a1 on local/cpu-1``.
    """

    fault: str
    did: str = ""
    missed: tuple[str, ...] = ()
    detect_s: float | None = None
    resume_s: float | None = None
    pause_s: float | None = None
    steps_lost: int | None = None
    committed_steps_lost: int | None = None
    usd_lost: float | None = None
    before: str = ""
    after: str = ""

    @property
    def is_passed(self) -> bool:
        """Return True if every bound was kept."""
        return not self.missed


def is_steady(sample: Sample, *, needs_checkpoint: bool) -> bool:
    """Return True if the stage trains: each node reports, and the next fault would be measured from a step.

    *needs_checkpoint*: a checkpoint of this attempt too, so that repeated losses do not end the run.
    """
    head = sample.head
    if sample.status != "active" or not sample.is_started or head is None:
        return False
    trains = all(node is not None and node.phase == "running" for node in sample.nodes)
    has_stepped = head.step is not None and head.step > (head.start_step or 0)
    has_saved = head.saved_step is not None and head.saved_step > (head.start_step or 0)
    return trains and has_stepped and (has_saved or not needs_checkpoint)


def is_detected(course: Course, before: Sample, sample: Sample) -> bool:
    """Return True if the records show that the loss was noticed, by the owner or by a new claim."""
    return course == "replaced" and not (sample.is_started and sample.is_same_life(before))


def has_resumed(fault: Fault, before: Sample, seen: Sequence[Sample], *, target: str = "") -> bool:
    """Return True if the last of the samples *seen* shows a new step after the fault, in its course."""
    last = seen[-1]
    if last.at_s < 0 or last.status != "active" or not last.is_started or last.step is None:
        return False
    if fault.course == "undisturbed" and last.is_same_life(before):
        has_watcher = fault.name != "triggerer" or last.lease > before.lease
        return has_watcher and _have_reported(before, last) and last.step > (before.step or 0)
    if fault.course == "moved" and last.allocation != target:
        return False
    if fault.course == "replaced" and last.is_same_life(before):
        return False
    if any(node is None or node.phase != "running" for node in last.nodes):
        return False
    return last.step > (_begun_again(before, seen) or 0)


def _have_reported(before: Sample, last: Sample) -> bool:
    pairs = zip(before.nodes, last.nodes, strict=True)
    return all(one is None or (two is not None and two.sequence > one.sequence) for one, two in pairs)


def _is_same_head(before: Sample, last: Sample) -> bool:
    """Return True if the process of node 0 stayed, also if other nodes came or went."""
    one, two = before.head, last.head
    is_known = one is not None and two is not None
    return is_known and (before.attempt, one and one.claim) == (last.attempt, two and two.claim)


def _fall(before: Sample, seen: Sequence[Sample]) -> tuple[int, int | None]:
    """How many steps the process of node 0 fell back at most, if it stayed, and to which step."""
    mine = [one.step for one in (before, *seen) if one.attempt == before.attempt]
    steps = [step for step in mine if step is not None]
    falls = [(max(steps[:index]) - step, step) for index, step in enumerate(steps) if index]
    most = max(falls, default=(0, 0))
    return most if most[0] > 0 else (0, before.step)


def _begun_again(before: Sample, seen: Sequence[Sample]) -> int | None:
    """Step from which node 0 trains on: where its new process began, or what its old one fell back to."""
    if _is_same_head(before, seen[-1]):
        return _fall(before, seen)[1]
    return None if seen[-1].head is None else seen[-1].head.start_step


def judge(
    fault: Fault,
    before: Sample,
    seen: Sequence[Sample],
    *,
    bounds: Bounds,
    target: str = "",
    node: int = 0,
    last_step: int | None = None,
    detect_s: float | None = None,
) -> Rehearsal:
    """Compare what was seen after a fault with the bounds.

    Args:
        fault: What was injected.
        before: The run at the time of the fault.
        seen: Later samples in order, up to the first that shows a new step, if any does; at least one.
        bounds: What the stage must keep to.
        target: Name of the requested allocation, for a move.
        node: The node that was broken.
        last_step: The last step that the attempt *before* reported, as its end has it; None: unknown.
        detect_s: When a requested move was accepted; otherwise taken from the samples.
    """
    is_back = has_resumed(fault, before, seen, target=target)
    found = _measured(fault, before, seen, is_back=is_back, last_step=last_step)
    if detect_s is None:
        detect_s = next((one.at_s for one in seen if is_detected(fault.course, before, one)), None)
    missed = _missed(found, fault, seen[-1], bounds)
    if fault.course == "undisturbed" and not seen[-1].is_same_life(before):
        missed.append("the training was restarted, and should have gone on")
    if any(_reports_while_away(before, one, node) for one in seen):
        missed.append(f"node {node} reported to the store all the time: the fault had no effect")
    return replace(found, detect_s=detect_s, missed=tuple(missed))


def _measured(
    fault: Fault, before: Sample, seen: Sequence[Sample], *, is_back: bool, last_step: int | None
) -> Rehearsal:
    """What was measured; nothing but the names if it did not come back."""
    last = seen[-1]
    found = Rehearsal(fault=fault.name, before=_named(before), after=_named(last))
    if not is_back:
        return found
    is_same, resume_s = last.is_same_life(before), _resume_s(before, seen)
    lost, committed = (0, 0) if is_same else _lost(before, seen, last_step)
    trained = _last_trained(before, seen) if fault.course == "moved" else before
    pause_s = 0.0 if is_same else max(0.0, resume_s - max(0.0, trained.at_s))
    return replace(
        found,
        resume_s=resume_s,
        pause_s=pause_s,
        steps_lost=lost,
        committed_steps_lost=committed,
        usd_lost=_usd_lost(trained, last, lost, trains_s=last.at_s - resume_s) if pause_s else 0.0,
    )


def _lost(before: Sample, seen: Sequence[Sample], last_step: int | None) -> tuple[int | None, int | None]:
    """Steps that are trained again, and how many of them a valid checkpoint contained."""
    saved = before.saved_step or 0
    if _is_same_head(before, seen[-1]):
        fall, again = _fall(before, seen)
        return fall, max(0, saved - (again or 0)) if fall else 0
    again = _begun_again(before, seen)
    mine = [one.step for one in (before, *seen) if _is_same_head(before, one)]
    made = max((step for step in (*mine, last_step) if step is not None), default=None)
    if again is None or made is None:
        return None, None
    return max(0, made - again), max(0, saved - again)


def _resume_s(before: Sample, seen: Sequence[Sample]) -> float:
    """When the first new step was made: as a new process reports it, else when it was seen.

    A status without other news comes every 15 s, but at once when the process begins to run.
    """
    last, head = seen[-1], seen[-1].head
    if _is_same_head(before, last) or head is None or head.first_step_s is None:
        return last.at_s
    began = next(
        one.at_s
        for one in seen
        if _is_same_head(last, one) and one.head is not None and one.head.phase == "running"
    )
    return min(last.at_s, max(0.0, began) + head.first_step_s)


def _last_trained(before: Sample, seen: Sequence[Sample]) -> Sample:
    """The sample that first showed the last step of the attempt *before*."""
    found = before
    for one in seen:
        if one.is_same_life(before) and (one.step or 0) > (found.step or 0):
            found = one
    return found


def _usd_lost(trained: Sample, last: Sample, steps_lost: int | None, *, trains_s: float) -> float | None:
    """Cost from the last step before the pause to the first one after it, and that of the repeated steps.

    *trains_s*: for how long it has trained again at the *last* sample. The bill of a lost machine
    ends when it was last seen alive, which may be before the fault.
    """
    spent = [_more(trained.usd.get(attempt, 0.0), usd) for attempt, usd in last.usd.items()]
    known = [usd for usd in spent if usd is not None]
    step_s = None if trained.head is None else trained.head.step_s
    if not spent or len(known) < len(spent) or last.usd_per_hour is None or steps_lost is None:
        return None
    again = 0.0
    if steps_lost:
        if step_s is None or trained.usd_per_hour is None:
            return None
        again = steps_lost * step_s * trained.usd_per_hour / SECONDS_PER_HOUR
    return max(0.0, math.fsum(known) - trains_s * last.usd_per_hour / SECONDS_PER_HOUR) + again


def _more(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _named(sample: Sample) -> str:
    if sample.attempt is None:
        return sample.status
    generation, number = sample.attempt
    return f"g{generation}-a{number} on {sample.allocation}"


def _missed(found: Rehearsal, fault: Fault, last: Sample, bounds: Bounds) -> list[str]:
    missed = []
    if found.resume_s is None and last.status != "active":
        why = f": {last.reason}" if last.reason else ""
        missed.append(f"the run ended before a new step was seen: {last.status}{why}")
    elif found.resume_s is None:
        missed.append(f"no new step within {last.at_s:.0f} s")
    elif found.resume_s > bounds.replace_s:
        missed.append(f"the first new step took {found.resume_s:.0f} s of {bounds.replace_s:.0f} s")
    if fault.course == "moved" and (found.pause_s or 0.0) > bounds.pause_s:
        missed.append(f"the pause took {found.pause_s:.0f} s of {bounds.pause_s:.0f} s")
    if found.committed_steps_lost:
        missed.append(f"{found.committed_steps_lost} steps of a valid checkpoint were lost")
    return missed


SETTLED_S = 3.0
"""A status that comes later than this after the store went away had the store. Chosen: one write."""


def _reports_while_away(before: Sample, sample: Sample, node: int) -> bool:
    """Return True for a report of *node* while a fault that lasts should have kept the store from it."""
    if not before.at_s + SETTLED_S < sample.at_s < 0:
        return False
    reports = [one.nodes[node] if node < len(one.nodes) else None for one in (before, sample)]
    return reports[1] is not None and (reports[0] is None or reports[1].sequence > reports[0].sequence)
