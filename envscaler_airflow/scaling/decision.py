"""Rules of a stage, what a policy proposes, and what was decided."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from envscaler_agent.protocol import SCHEMA
from envscaler_airflow.planning import Allocation, Estimate, Offer, Speed
from envscaler_airflow.planning.record import Record, check_finite
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.queries import Across, Metric

Action = Literal["keep", "move", "recommend"]


@dataclass(frozen=True, slots=True)
class ThresholdRule(Record):
    """Scale out above and in below a metric, or hold it near a target.

    Attributes:
        metric: ``gpu_utilization``, ``cpu_utilization``, ``memory_utilization`` (percent), or a name
            or shell pattern of what nodes report; all that match on a node are averaged.
        above: Scale out above this; None: never out.
        below: Scale in below this; None: never in.
        target: Hold the metric here instead, with ``nodes * value / target`` nodes (HPA's rule);
            within the policy's tolerance of it nothing is done. *above*, *below* and *step* are
            not looked at.
        samples: Checks in a row that must agree.
        for_s: Seconds that they must span besides; 0: the count alone.
        step: Nodes added above and removed below; negative for a metric that falls with the load.
        across: How nodes are put together; ``p90`` is the 90th percentile of the nodes.
        ahead_s: The metric must also be past the bound so many seconds from now, by a straight line
            through the checks that agree; 0: only now.
        query: Asked of Prometheus for the metric; None: nodes report it themselves.

    Source:
        Defaults 80, 40 and 3 are chosen: a busy GPU stays above 80 %, and two nodes at 40 % fit into one
        with room to spare. The dead band between them is hysteresis.
        HPA's rule: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale.
    """

    metric: str
    above: float | None = 80.0
    below: float | None = 40.0
    target: float | None = None
    samples: int = 3
    for_s: float = 0.0
    step: int = 1
    across: Across = "mean"
    ahead_s: float = 0.0
    query: str | None = None

    @property
    def sampled_as(self) -> str:
        """Name of its samples: a query's is none that a node could report."""
        return self.metric if self.query is None else f"{self.across} of {self.query}"

    @property
    def needed(self) -> Metric:
        """The metric of its samples."""
        return Metric(self.sampled_as, self.query, self.across)

    def __post_init__(self) -> None:
        """Refuse a rule that would scale in and out at the same value."""
        check_finite(above=self.above, below=self.below, for_s=self.for_s, ahead_s=self.ahead_s)
        if self.target is not None and not 0 < self.target < math.inf:
            raise ValueError(f"target must be finite and > 0, got {self.target!r}")
        if self.above is not None and self.below is not None and self.below >= self.above:
            raise ValueError(f"below must be less than above, got {self.below!r} and {self.above!r}")
        if self.samples < 1 or self.step == 0:
            raise ValueError(f"samples must be >= 1 and step not 0, got {self.samples!r} and {self.step!r}")


@dataclass(frozen=True, slots=True)
class PhaseNeed(Record):
    """What one phase of a training needs.

    Attributes:
        phase: Its name.
        nodes: Exactly so many; None: any.
        gpu_memory_gb: Least nominal memory of one GPU; None: any.
    """

    phase: str
    nodes: int | None = None
    gpu_memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Refuse a phase that needs nothing, or less than a node."""
        check_finite(gpu_memory_gb=self.gpu_memory_gb)
        if self.nodes is None and self.gpu_memory_gb is None:
            raise ValueError(f"phase {self.phase!r} needs nodes or gpu_memory_gb")
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes of phase {self.phase!r} must be >= 1, got {self.nodes!r}")


@dataclass(frozen=True, slots=True)
class Policy(Record):
    """How a stage may be scaled: the spec's ``scaling`` block with numbers for words.

    Attributes:
        name: Of the :class:`ScalingPolicy` that proposes: ``cost-to-finish``, ``threshold``, ...
        min_nodes, max_nodes: Never fewer, never more.
        value_of_hour: USD that an hour of waiting is worth.
        tolerance: Part of the cost of staying that a move must save. HPA's tolerance, 0.1 by
            default: KEP-4951, kubernetes/enhancements.
        stabilization_s: Seconds that a move must have been wanted without a break. Chosen: four
            checks of the sensor's default interval.
        cooldown_s: Seconds between moves. Chosen: an hour, many times what a move takes.
        min_epochs_between: Epochs between moves. Chosen: one, so that a move is judged on
            a whole epoch.
        warmup_s: Seconds that a speed must have been measured before it counts. Chosen: longer
            than the slow first steps of most trainings.
        min_speed: Part of the speed of the fastest place known that every move must keep; 0: any.
        max_moves: Moves in a generation; None: no limit.
        model_parallel: GPUs (without any: nodes) that hold one copy of the model; only whole groups
            are added or removed.
        recommend_only: Say what would be done, and do not do it.
        rules: Of the threshold policy.
        match: ``any``: one rule is enough to scale out, as HPA has it; ``all``: every rule for that
            direction must ask for it.
        phases: Of the phase policy.
        memory_cap_gib: Most memory that a node may have (``resources.limits.memory``); None: no limit.
    """

    name: str = "cost-to-finish"
    min_nodes: int = 1
    max_nodes: int = 1
    value_of_hour: float = 0.0
    tolerance: float = 0.1
    stabilization_s: float = 120.0
    cooldown_s: float = 3600.0
    min_epochs_between: int = 1
    warmup_s: float = 30.0
    min_speed: float = 0.0
    max_moves: int | None = None
    model_parallel: int = 1
    recommend_only: bool = False
    rules: tuple[ThresholdRule, ...] = ()
    match: Literal["any", "all"] = "any"
    phases: tuple[PhaseNeed, ...] = ()
    memory_cap_gib: float | None = None

    def __post_init__(self) -> None:
        """Refuse NaN, an empty range of nodes and a tolerance that nothing can meet."""
        check_finite(
            value_of_hour=self.value_of_hour,
            stabilization_s=self.stabilization_s,
            cooldown_s=self.cooldown_s,
            min_epochs_between=self.min_epochs_between,
            warmup_s=self.warmup_s,
            max_moves=self.max_moves,
            memory_cap_gib=self.memory_cap_gib,
        )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 or more, min to max, got {self.min_nodes}..{self.max_nodes}")
        if self.model_parallel < 1:
            raise ValueError(f"model_parallel must be >= 1, got {self.model_parallel!r}")
        if not 0 <= self.min_speed <= 1:
            raise ValueError(f"min_speed must be in [0, 1], got {self.min_speed!r}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {self.tolerance!r}")


@dataclass(frozen=True, slots=True)
class Want(Record):
    """A move that a policy wants.

    Attributes:
        target: Where to.
        reason: Why, for people.
        staying, moving: What finishing takes in both cases; None when it cannot be told.
        is_urgent: Later would be too late: cool-down, epochs between moves, their number and the
            stabilization window do not hold it back. Every other guard does.
    """

    target: Allocation
    reason: str
    staying: Estimate | None = None
    moving: Estimate | None = None
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a policy says, before the guards: moves it wants, best first, or why none.

    Attributes:
        wants: Best first; empty: keep.
        reason: Why none is wanted.
        numbers: Everything it looked at, JSON.
    """

    wants: tuple[Want, ...] = ()
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What is known at the start of an attempt, for what a policy prepares.

    Attributes:
        allocation: What the attempt starts on.
        start_s: Seconds that a start takes.
        deadline_left_s: Seconds to the deadline, below 0 when it has passed; None: there is none.
        offers: Asks the backend for its offers; raises a BackendError.
        present: Reads what the present table was built for; None: there is no table.
        earlier: Reads the checks of earlier runs of the stage, each with its run's name, newest run first.
    """

    allocation: Allocation
    start_s: float
    deadline_left_s: float | None = None
    offers: Callable[[], Sequence[Offer]] = tuple
    present: Callable[[], Mapping[str, Any] | None] = lambda: None
    earlier: Callable[[], Iterable[tuple[str, Iterable[Check]]]] = tuple


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a policy prepares at the start of an attempt.

    Attributes:
        files: Bytes by file name; the owner writes them, in this order, to the run's folder ``tables/``.
        reason: Why something that the policy could use is missing; the owner logs it. "" when nothing is.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    reason: str = ""


def table_files(policy: str, data: bytes, built_for: Mapping[str, Any]) -> Prepared:
    """A table, and the file that names it as the present one of *policy*.

    A check records the name, which holds the hash of *data*, so that it can be decided again by that table.

    Args:
        policy: Name of the policy.
        data: Of the table.
        built_for: JSON, for ``StartFacts.present`` of later starts.
    """
    name = table_name(policy, data)
    pointer = {"schema": SCHEMA, "table": f"tables/{name}", "job": dict(built_for)}
    return Prepared({name: data, f"{policy}.json": json.dumps(pointer).encode()})


def table_name(policy: str, data: bytes) -> str:
    """File name of a table of *policy*, by its content."""
    return f"{policy}-{hashlib.sha256(data).hexdigest()[:16]}.bin"


Propose = Callable[[Observation, Policy], Proposal]
"""Pure: the same facts and settings give the same proposal."""
Prepare = Callable[[Policy, StartFacts], Prepared]
"""Reads facts and builds bytes; the owner stores them."""


def _nothing(_settings: Policy, _facts: StartFacts) -> Prepared:
    return Prepared()


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """A policy: what it needs of each check, what it prepares, and what it proposes.

    An entry point of the group ``envscaler_airflow.policies`` brings it, ours and those of other packages
    alike; ``scaling.policy`` names it. :class:`Policy` has the stage's settings for it.

    Attributes:
        name: As the entry point.
        propose: Moves that it wants, best first, or why none. The guards stand around it.
        metrics: Metrics of its own that each check carries, besides those of the spec's rules.
        window_s, window_checks: How far back it looks at them, the longer of both. Two checks by default
            (chosen), so that a late sample does not empty the window.
        prepare: Builds, once at each start of an attempt, what it looks up later; by default nothing.
        with_table: From the bytes of a table that :func:`table_files` named, what proposes in place of
            *propose* once the table is there; raises ValueError or ProtocolError for bytes that are no table.
        changes_in_place: True when the running attempt gets more CPU and memory of the same nodes, where the
            backend can; else a move is a next attempt.
        simulated: What stands for it in ``envscaler simulate spot`` or ``elastic``: a class with ``begin``
            and ``choose``; None: it cannot be simulated there.
        origin: Set by the registry: ``module:object`` of another package, whose code is guarded; "" for ours.
    """

    name: str
    propose: Propose
    metrics: tuple[Metric, ...] = ()
    window_s: float = 0.0
    window_checks: int = 2
    prepare: Prepare = _nothing
    with_table: Callable[[bytes], Propose] | None = None
    changes_in_place: bool = False
    simulated: Callable[[], Any] | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Refuse NaN, and metrics of another type."""
        check_finite(window_s=self.window_s, window_checks=self.window_checks)
        if not all(isinstance(metric, Metric) for metric in self.metrics):
            raise ValueError(
                f"metrics of policy {self.name!r} must be Metric objects, got {self.metrics!r:.80}"
            )

    def needs(self, settings: Policy) -> tuple[Metric, ...]:
        """Metrics that a check carries: its own, and those of the rules of *settings*."""
        return (*self.metrics, *(rule.needed for rule in settings.rules))

    def looks_back_s(self, settings: Policy, *, interval_s: float) -> float:
        """Seconds of samples that a check carries when they come every *interval_s* seconds.

        Twice what the rules of *settings* need, so that a late sample does not empty the window.
        """
        rules = [2 * max(rule.for_s, rule.samples * interval_s) for rule in settings.rules]
        return max(self.window_s, self.window_checks * interval_s, *rules)


@dataclass(frozen=True, slots=True)
class Decision(Record):
    """What to do, and why.

    Attributes:
        action: ``keep``, ``move``, or ``recommend`` for a move in recommend-only mode.
        target: Where to; the current allocation for ``keep``.
        reason: Shown to the user as it is.
        policy: Name of the policy.
        numbers: What the policy computed, JSON.
        wanted: Since when each wanted allocation has been wanted; goes into the next observation.
    """

    action: Action
    target: Allocation
    reason: str
    policy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check(Record):
    """One recorded check: what was seen, under which policy, and what was decided.

    It is a line of ``decisions/``, and enough to decide again.
    """

    observation: Observation
    policy: Policy
    decision: Decision


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """What an observer carries from check to check: a fold of the recorded checks.

    Attributes:
        elapsed_s: Of the last check; a restarted observer goes on from here.
        generation: Of the last check.
        wanted: As the last decision left it.
        speeds: Last measured speed of each allocation in this generation.
        unit: What work was counted in when it was last told; speeds in another one are forgotten.
    """

    elapsed_s: float = 0.0
    generation: int = 0
    wanted: Mapping[str, float] = field(default_factory=dict)
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    measured: Mapping[str, Measured] = field(default_factory=dict)
    unit: str = ""

    def after(self, check: Check) -> Memory:
        """Memory once *check* is recorded; a new generation begins with none of the old."""
        seen = check.observation
        unit = self.unit if seen.units_done is None else seen.unit
        is_same = seen.generation == self.generation and self.unit in ("", unit)
        speeds = dict(self.speeds) if is_same else {}
        speeds.update(seen.speeds)
        steps = dict(self.measured) if seen.generation == self.generation else {}
        steps.update(seen.measured)
        return Memory(seen.elapsed_s, seen.generation, dict(check.decision.wanted), speeds, steps, unit)


def remember(checks: Iterable[Check]) -> Memory:
    """Rebuild the memory from recorded checks, oldest first; recording one twice changes nothing."""
    memory = Memory()
    for check in checks:
        memory = memory.after(check)
    return memory
