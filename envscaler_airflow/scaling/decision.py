"""A stage's scaling settings, a policy's proposals, and the decisions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from envscaler_agent.messages import SCHEMA
from envscaler_airflow.planning import Allocation, Estimate, Offer, Speed
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.record import NotNegative, Positive, Record, check_finite
from envscaler_airflow.scaling.explore import Measured
from envscaler_airflow.scaling.history import History
from envscaler_airflow.scaling.observation import Across, Metric, Observation

Action = Literal["keep", "move", "recommend"]

TOLERANCE = 0.1
"""Source: HPA's tolerance, KEP-4951, kubernetes/enhancements."""
STABILIZATION_S = 120.0
"""Chosen: four checks of the sensor's default interval."""
COOLDOWN_S = 3600.0
"""Chosen: an hour, many times the duration of a move."""
MIN_EPOCHS_BETWEEN = 1
"""Chosen: one, so that a move is judged on a whole epoch."""


@dataclass(frozen=True, slots=True)
class ThresholdRule(Record):
    """Scale out above and in below a metric, or keep it near a target.

    Attributes:
        metric: ``gpu_utilization``, ``cpu_utilization``, ``memory_utilization`` (percent), or a name or shell
            pattern of metrics that nodes report; all matches on a node are averaged.
        above: Scale out above this; None: never out.
        below: Scale in below this; None: never in.
        target: Keep the metric here instead, with ``nodes * value / target`` nodes (HPA's rule). Nothing
            changes within the policy's tolerance. *above*, *below* and *step* are ignored.
        samples: Consecutive checks that must agree.
        for_s: Minimum seconds that these checks must span; 0: only the count matters.
        step: Nodes added above and removed below; negative for a metric that falls with the load.
        across: How nodes are aggregated; ``p90`` is the 90th percentile of the nodes.
        ahead_s: The metric must also be past the bound this many seconds from now, extrapolated linearly
            through the checks that agree; 0: only now.
        query: Prometheus query for the metric; None: nodes report it.

    Source:
        Defaults 80, 40 and 3 are chosen: a busy GPU stays above 80 %, and the load of two nodes at 40 % fits
        on one with a margin. The dead band between them is hysteresis.
        HPA's rule: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale.
    """

    metric: str
    above: NotNegative[float] | None = 80.0
    below: NotNegative[float] | None = 40.0
    target: Positive[float] | None = None
    samples: int = 3
    for_s: NotNegative[float] = 0.0
    step: int = 1
    across: Across = "mean"
    ahead_s: NotNegative[float] = 0.0
    query: str | None = None

    @property
    def sampled_as(self) -> str:
        """Name of its samples; for a query, a name that no node can report."""
        return self.metric if self.query is None else f"{self.across} of {self.query}"

    @property
    def needed(self) -> Metric:
        """The metric of its samples."""
        return Metric(self.sampled_as, self.query, self.across)

    def __post_init__(self) -> None:
        """Reject a rule that would scale in and out at the same value."""
        Record.__post_init__(self)
        if self.above is not None and self.below is not None and self.below >= self.above:
            raise ValueError(f"below must be less than above, got {self.below!r} and {self.above!r}")
        if self.samples < 1 or self.step == 0:
            raise ValueError(f"samples must be >= 1 and step not 0, got {self.samples!r} and {self.step!r}")


@dataclass(frozen=True, slots=True)
class PhaseNeed(Record):
    """The needs of one phase of a training.

    Attributes:
        phase: Its name.
        nodes: Exact number of nodes; None: any.
        gpu_memory_gb: Minimum nominal memory of one GPU; None: any.
    """

    phase: str
    nodes: int | None = None
    gpu_memory_gb: NotNegative[float] | None = None

    def __post_init__(self) -> None:
        """Reject a phase without needs, or with less than one node."""
        Record.__post_init__(self)
        if self.nodes is None and self.gpu_memory_gb is None:
            raise ValueError(f"phase {self.phase!r} needs nodes or gpu_memory_gb")
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes of phase {self.phase!r} must be >= 1, got {self.nodes!r}")


@dataclass(frozen=True, slots=True)
class Policy(Record):
    """How a stage may be scaled: the spec's ``scaling`` section with durations and defaults as numbers.

    Attributes:
        name: Name of the :class:`ScalingPolicy` that proposes: ``cost-to-finish``, ``threshold``, ...
        min_nodes, max_nodes: Limits of the number of nodes.
        value_of_hour: USD that an hour of waiting is worth.
        tolerance: Fraction of the cost of staying that a move must save; None: what the policy needs, and
            :data:`TOLERANCE` if it does not say.
        stabilization_s: Seconds that a move must have been wanted without a break; None: what the move
            states, otherwise :data:`STABILIZATION_S`.
        cooldown_s: Seconds between moves; None: by the stakes of the move, if its policy states them,
            otherwise :data:`COOLDOWN_S`.
        min_epochs_between: Epochs between moves; None: none for a move whose policy states its cool-down,
            otherwise :data:`MIN_EPOCHS_BETWEEN`.
        warmup_s: Seconds that a speed must have been measured before it counts. Chosen: longer than the slow
            first steps of most trainings.
        min_speed: Fraction of the speed of the fastest known allocation that every move must keep; 0: any.
        max_moves: Moves in a generation; None: no limit.
        model_parallel: GPUs (or nodes, without GPUs) per copy of the model; only complete groups are added or
            removed.
        recommend_only: Report moves without making them.
        rules: Rules of the threshold policy.
        match: ``any``: one rule is enough to scale out, as in HPA; ``all``: every rule for that direction
            must agree.
        phases: Needs for the phase policy.
        memory_cap_gib: Maximum memory of a node (``resources.limits.memory``); None: no limit.
    """

    name: str = "cost-to-finish"
    min_nodes: int = 1
    max_nodes: int = 1
    value_of_hour: NotNegative[float] = 0.0
    tolerance: float | None = None
    stabilization_s: NotNegative[float] | None = None
    cooldown_s: NotNegative[float] | None = None
    min_epochs_between: NotNegative[int] | None = None
    warmup_s: NotNegative[float] = 30.0
    min_speed: float = 0.0
    max_moves: NotNegative[int] | None = None
    model_parallel: int = 1
    recommend_only: bool = False
    rules: tuple[ThresholdRule, ...] = ()
    match: Literal["any", "all"] = "any"
    phases: tuple[PhaseNeed, ...] = ()
    memory_cap_gib: NotNegative[float] | None = None

    def __post_init__(self) -> None:
        """Reject NaN, an empty range of nodes and a tolerance that nothing can meet."""
        Record.__post_init__(self)
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 or more, min to max, got {self.min_nodes}..{self.max_nodes}")
        if self.model_parallel < 1:
            raise ValueError(f"model_parallel must be >= 1, got {self.model_parallel!r}")
        if not 0 <= self.min_speed <= 1:
            raise ValueError(f"min_speed must be in [0, 1], got {self.min_speed!r}")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {self.tolerance!r}")

    @property
    def least_saving(self) -> float:
        """The stated tolerance, otherwise :data:`TOLERANCE`."""
        return TOLERANCE if self.tolerance is None else self.tolerance


@dataclass(frozen=True, slots=True)
class Want(Record):
    """A move that a policy wants.

    Attributes:
        target: Where to.
        reason: Why; human-readable.
        staying, moving: Time and cost to finish in both cases; None when unknown.
        is_urgent: Waiting would be too late: cooldown, epochs between moves, maximum number of moves and
            stabilization window do not apply. Every other guard does.
        weighs_moves: The policy has the costs of moves, and of moving back, in what it proposes: cooldown,
            epochs between moves and stabilization window do not delay it.
        cooldown_s: Seconds since the last move that the stakes of this one call for; None: they are unknown.
        stabilization_s: Seconds for which it must have been wanted, if the author does not state them; None:
            the default.
    """

    target: Allocation
    reason: str
    staying: Estimate | None = None
    moving: Estimate | None = None
    is_urgent: bool = False
    weighs_moves: bool = False
    cooldown_s: NotNegative[float] | None = None
    stabilization_s: NotNegative[float] | None = None

    def cooldown(self, policy: Policy) -> float:
        """Seconds since the last move that must have passed."""
        return _first(policy.cooldown_s, self.cooldown_s, COOLDOWN_S)

    def epochs_between(self, policy: Policy) -> float:
        """Epochs since the last move that must have passed."""
        own = None if self.cooldown_s is None else 0
        return _first(policy.min_epochs_between, own, MIN_EPOCHS_BETWEEN)

    def stabilization(self, policy: Policy) -> float:
        """Seconds for which it must have been wanted without a break."""
        return _first(policy.stabilization_s, self.stabilization_s, STABILIZATION_S)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A policy's answer before the guards: the moves that it wants, best first, or why it wants none.

    Attributes:
        wants: Best first; empty: keep.
        reason: Why none is wanted.
        numbers: All of the policy's inputs and results, JSON.
    """

    wants: tuple[Want, ...] = ()
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Facts at the start of an attempt, from which a policy prepares its files.

    Attributes:
        allocation: What the attempt starts on.
        start_s: Duration of a start in seconds.
        deadline_left_s: Seconds to the deadline, below 0 when it has passed; None: there is none.
        offers: Requests the backend's offers; raises a BackendError.
        present: Reads what the present table was built for; None: no table exists.
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
        reason: Why an optional input of the policy is missing; the owner logs it. "" when nothing is missing.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    reason: str = ""


def table_files(policy: str, data: bytes, built_for: Mapping[str, Any]) -> Prepared:
    """A table, and the file that names it as the present one of *policy*.

    A check records the table's name, which contains the hash of *data*, so that the decision can be repeated
    with the same table.

    Args:
        policy: Name of the policy.
        data: Content of the table.
        built_for: JSON, for ``StartFacts.present`` of later starts.
    """
    name = table_name(policy, data)
    pointer = {"schema": SCHEMA, "table": f"tables/{name}", "job": dict(built_for)}
    return Prepared({name: data, f"{policy}.json": json.dumps(pointer).encode()})


def table_name(policy: str, data: bytes) -> str:
    """File name of a table of *policy*, derived from its content."""
    return f"{policy}-{hashlib.sha256(data).hexdigest()[:16]}.bin"


Propose = Callable[[Observation, Policy], Proposal]
"""A pure function: the same facts and settings give the same proposal."""
Prepare = Callable[[Policy, StartFacts], Prepared]
"""Reads facts and builds bytes; the owner stores them."""


def _nothing(_settings: Policy, _facts: StartFacts) -> Prepared:
    return Prepared()


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """A policy: which metrics it needs at each check, what it prepares, and what it proposes.

    Each policy is an entry point of the group ``envscaler_airflow.policies``, whether it is built in or from
    another package; ``scaling.policy`` names it. :class:`Policy` contains the stage's settings for it.

    Attributes:
        name: Name of the entry point.
        propose: Returns the moves that it wants, best first, or why it wants none. The guards check them.
        metrics: Additional metrics of each check, besides those of the spec's rules.
        window_s, window_checks: How far back the policy reads them, the longer of both. Two checks by default
            (chosen), so that a late sample does not empty the window.
        prepare: Builds lookup data once at each start of an attempt; by default nothing.
        with_table: Takes the bytes of a table that :func:`table_files` named and returns the function that
            replaces *propose* once the table is there; raises ValueError or ProtocolError for invalid bytes.
        needs_market: True when its checks contain the market of spot: see :class:`.deadline.Market`.
        changes_in_place: True when the running attempt gets more CPU and memory on the same nodes, if the
            backend can do that; otherwise a move starts the next attempt.
        simulated: Represents the policy in ``envscaler simulate spot`` or ``elastic``: a class with ``begin``
            and ``choose``; None: it cannot be simulated there.
        origin: Set by the registry: ``module:object`` of another package, whose code is guarded; "" for
            built-in policies.
    """

    name: str
    propose: Propose
    metrics: tuple[Metric, ...] = ()
    window_s: float = 0.0
    window_checks: int = 2
    prepare: Prepare = _nothing
    with_table: Callable[[bytes], Propose] | None = None
    needs_market: bool = False
    changes_in_place: bool = False
    simulated: Callable[[], Any] | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Reject NaN, and metrics of another type."""
        check_finite(window_s=self.window_s, window_checks=self.window_checks)
        if not all(isinstance(metric, Metric) for metric in self.metrics):
            raise ValueError(
                f"metrics of policy {self.name!r} must be Metric objects, got {self.metrics!r:.80}"
            )

    def needs(self, settings: Policy) -> tuple[Metric, ...]:
        """Metrics that a check contains: the policy's own, and those of the rules of *settings*."""
        return (*self.metrics, *(rule.needed for rule in settings.rules))

    def looks_back_s(self, settings: Policy, *, interval_s: float) -> float:
        """Seconds of samples that a check contains when samples arrive every *interval_s* seconds.

        This is twice what the rules of *settings* need, so that a late sample does not empty the window.
        """
        rules = [2 * max(rule.for_s, rule.samples * interval_s) for rule in settings.rules]
        return max(self.window_s, self.window_checks * interval_s, *rules)


@dataclass(frozen=True, slots=True)
class Decision(Record):
    """What to do, and why.

    Attributes:
        action: ``keep``, ``move``, or ``recommend`` for a move in recommend-only mode.
        target: Where to; the current allocation for ``keep``.
        reason: Shown to the user unchanged.
        policy: Name of the policy.
        numbers: What the policy computed, JSON.
        wanted: Since when each wanted allocation has been wanted; input of the next observation.
    """

    action: Action
    target: Allocation
    reason: str
    policy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check(Record):
    """One recorded check: the observation, the policy, and the decision.

    It is a line of ``decisions/``, and enough to repeat the decision.
    """

    observation: Observation
    policy: Policy
    decision: Decision


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """State that an observer keeps between checks: a fold of the recorded checks.

    Attributes:
        elapsed_s: Of the last check; a restarted observer continues from here.
        generation: Of the last check.
        wanted: From the last decision.
        speeds: Last measured speed of each allocation in this generation.
        measured: Steps of each allocation in this generation.
        history: What the stage has tried in this generation.
        unit: Last known unit of work; speeds in another unit are dropped.
    """

    elapsed_s: float = 0.0
    generation: int = 0
    wanted: Mapping[str, float] = field(default_factory=dict)
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    measured: Mapping[str, Measured] = field(default_factory=dict)
    unit: str = ""
    history: History = field(default_factory=History)

    def after(self, check: Check) -> Memory:
        """The memory after *check* is recorded; a new generation starts with an empty one."""
        seen = check.observation
        unit = self.unit if seen.units_done is None else seen.unit
        is_same = seen.generation == self.generation and self.unit in ("", unit)
        speeds = dict(self.speeds) if is_same else {}
        speeds.update(seen.speeds)
        steps = dict(self.measured) if seen.generation == self.generation else {}
        steps.update(seen.measured)
        return Memory(
            seen.elapsed_s, seen.generation, dict(check.decision.wanted), speeds, steps, unit, seen.history
        )


def remember(checks: Iterable[Check]) -> Memory:
    """Rebuild the memory from recorded checks, oldest first; recording one twice changes nothing."""
    memory = Memory()
    for check in checks:
        memory = memory.after(check)
    return memory


def explain(check: Check) -> str:
    """The decision, its reason and its numbers, one per line; human-readable."""
    seen, decision = check.observation, check.decision
    verb = {"keep": "keep", "move": "move to", "recommend": "would move to"}[decision.action]
    lines = [f"{verb} {decision.target.name}: {decision.reason}"]
    lines.append(
        f"  attempt {seen.attempt} of generation {seen.generation} on {seen.current.name}, "
        f"policy {decision.policy or check.policy.name}, {seen.elapsed_s:.0f} s after the first check"
    )
    if seen.units_done is not None:
        whole = "unknown" if seen.units_total is None else f"{seen.units_total:g}"
        lines.append(f"  {seen.units_done:g} of {whole} {seen.unit} done")
    if seen.budget_usd is not None:
        spent = "unknown" if seen.spent_usd is None else usd_text(seen.spent_usd)
        lines.append(f"  spent {spent} of {usd_text(seen.budget_usd)}")
    try:
        lines += _in_words(decision.numbers, seen)
    except (AttributeError, KeyError, TypeError, ValueError):  # from another package or version
        lines += [f"  {name}: {value}" for name, value in sorted(decision.numbers.items()) if _is_one(value)]
    return "\n".join(lines)


def _in_words(numbers: Mapping[str, Any], seen: Observation) -> list[str]:
    """The numbers of a built-in policy as text, and the single values of a policy of another package."""
    lines = []
    staying = numbers.get("staying")
    if isinstance(staying, Mapping):
        lines.append(_estimate(f"staying on {seen.current.name}", staying, numbers.get("speed"), seen.unit))
    for name, moving in sorted((numbers.get("moving") or {}).items()):
        lines.append(_estimate(f"moving to {name}", moving, moving.get("speed"), seen.unit))
    lines += [f"  {name}: speed unknown" for name in numbers.get("unknown_speed") or ()]
    lines += [f"  {item['reason']}" for item in numbers.get("metrics") or ()]
    lines += [f"  {words}" for words in (*_deadline(numbers), *_phase(numbers), *_vertical(numbers))]
    others = (item for item in sorted(numbers.items()) if item[0] not in _TOLD)
    return lines + [f"  {name}: {value}" for name, value in others if _is_one(value)]


_TOLD = frozenset(
    {
        *("staying", "moving", "speed", "unknown_speed", "metrics", "unit", "units_left", "value_of_hour"),
        *("slack_s", "start_s", "ticks_of_on_demand", "phase", "phase_from", "next", "lasts_s"),
        *("time_to_out_of_memory_s", "memory_gib", "vcpus", "asked_memory_gib", "asked_vcpus"),
    }
)
"""Numbers of built-in policies that the text above or the reason already contains."""


def _is_one(value: object) -> bool:
    """True for a value that fits on a line."""
    return isinstance(value, str | int | float)


def _deadline(numbers: Mapping[str, Any]) -> list[str]:
    found = []
    if (slack := numbers.get("slack_s")) is not None:
        found.append(f"{slack:.0f} s may still be lost; a start takes {numbers.get('start_s', 0):.0f} s")
    if ticks := numbers.get("ticks_of_on_demand"):
        found.append(
            f"expected cost to finish by the table: {ticks['spot']:.4g} ticks of on-demand with spot now, "
            f"{ticks['on_demand']:.4g} without"
        )
    return found


def _phase(numbers: Mapping[str, Any]) -> list[str]:
    if "phase_from" not in numbers:
        return []
    found = [f"phase {numbers.get('phase') or 'unknown'} ({numbers['phase_from']})"]
    if numbers.get("next"):
        found.append(f"next phase, by earlier runs: {numbers['next']}")
    if numbers.get("lasts_s") is not None:
        found.append(f"it lasts {numbers['lasts_s']:.0f} s, by earlier runs")
    return found


def _vertical(numbers: Mapping[str, Any]) -> list[str]:
    found = []
    for name, what in (("memory_gib", "memory"), ("vcpus", "CPU")):
        used = numbers.get(name)
        if not isinstance(used, Mapping) or used.get("peak") is None:
            continue
        text = f"{what}: peak {used['peak']:.0f} % of the machine's in the last 5 min"
        if used.get("long_peak") is not None:
            text += f", {used['long_peak']:.0f} % in 20 min"
        found.append(text)
    if (left := numbers.get("time_to_out_of_memory_s")) is not None:
        found.append(f"memory rises steadily: full in {left:.0f} s")
    return found


def _estimate(what: str, numbers: Mapping[str, Any], speed: Mapping[str, Any] | None, unit: str) -> str:
    parts = [f"{numbers['hours']:.3g} h ({numbers['hours_low']:.3g} to {numbers['hours_high']:.3g})"]
    usd, objective = numbers.get("usd"), numbers.get("objective")
    parts.append("price unknown" if usd is None else usd_text(usd))
    if objective is not None:
        parts.append(f"objective {objective:.4g}")
    if speed:
        parts.append(f"{speed['mean']:.4g} +- {speed['stdev']:.2g} {unit}/s {speed['source']}")
    return f"  {what}: " + ", ".join(parts)
