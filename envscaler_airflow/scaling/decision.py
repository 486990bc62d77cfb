"""Rules of a stage, what a policy proposes, and what was decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from envscaler_airflow.planning import Allocation, Estimate, Speed
from envscaler_airflow.planning.record import Record, check_finite
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.observation import Observation

Action = Literal["keep", "move", "recommend"]
Across = Literal["mean", "max", "min", "p50", "p90", "p95", "p99"]


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
        name: Key of the registry: ``cost-to-finish``, ``threshold``, ...
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
