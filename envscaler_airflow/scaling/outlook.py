"""Time and cost to finish the remaining work, staying or moving: the numbers that every policy uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envscaler_airflow.planning import Allocation, Estimate, Speed, estimate, known_speeds, matched
from envscaler_airflow.planning.offers import losses_per_hour
from envscaler_airflow.scaling.decision import Policy
from envscaler_airflow.scaling.explore import Learner, Measured, Shape, foreseen, prior_for
from envscaler_airflow.scaling.observation import Observation


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of the speed of one allocation, over the work left.

    Attributes:
        median: Units per second.
        stdev: Standard deviation of its logarithm.
        is_known: It was measured, in this run or an earlier one.
        is_stated: The author states it, relative to a measured one.
    """

    median: float
    stdev: float
    is_known: bool
    is_stated: bool = False


def learned(observation: Observation, shapes: Mapping[str, Shape]) -> dict[str, Belief]:
    """Beliefs about every place, by its name; {} until a step is measured on the current allocation.

    The model of :mod:`.explore`, conditioned on every allocation that this generation used, gives ratios with
    their uncertainty. The speed measured on the current allocation gives the unit. Unless the training
    chooses its batch (``Observation.batches``), the global batch is assumed to stay the same; otherwise the
    gradient noise is assumed to grow over the work left.
    """
    here = observation.current
    step, speed = observation.measured.get(here.name), observation.speeds.get(here.name)
    if step is None or speed is None:
        return {}
    places = (*observation.elsewhere, *observation.candidates, here)
    memory = {
        item.offer.gpu_name: item.offer.gpu_memory_gb
        for item in places
        if item.offer.gpu_name is not None and item.offer.gpu_memory_gb
    }
    least, most = observation.batches or (step.batch, step.batch)
    learner = Learner(least, most, observation.gpu_speeds, memory, prior_for(least, most))
    learner.learn_all(
        {
            shapes[name]: one
            for name, one in observation.measured.items()
            if name in shapes and _is_possible(one)
        }
    )
    if shapes[here.name] not in learner.seen:
        return {}
    base, _ = learner.rate(shapes[here.name], step.noise_scale)
    if not 0 < base < math.inf:
        return {}
    noise = foreseen(step.noise_scale)
    beliefs = {}
    for name, shape in shapes.items():
        rate, stdev = learner.rate(shape, noise)
        median = speed.mean * rate / base
        if 0 < median < math.inf and stdev < math.inf:  # implausible steps give no speed
            beliefs[name] = Belief(median, stdev, shape in learner.seen)
    return beliefs


FASTEST_S, SLOWEST_S = 1e-9, 1e9
"""Steps outside of these seconds are not measurements. Chosen."""


def _is_possible(found: Measured) -> bool:
    """False for a report that no machine makes; it teaches nothing."""
    return found.batch > 0 and FASTEST_S < found.step_s < SLOWEST_S and 0 <= found.sync_s <= found.step_s


def shapes_of(observation: Observation, places: Mapping[str, Allocation]) -> dict[str, Shape]:
    """What determines the speed of each of *places*; without GPUs, CPUs take their place."""
    found = {}
    for name, item in places.items():
        offer, nodes = item.offer, item.nodes
        if offer.gpus:
            gpus = observation.uneven.get(name, nodes * offer.gpus)
            found[name] = Shape(offer.gpu_name or "", nodes, gpus)
        else:
            found[name] = Shape("CPU", nodes, max(1, round(nodes * offer.vcpus)))
    return found


@dataclass(frozen=True, slots=True)
class Outlook:
    """Known speeds and the estimate of staying; :meth:`moving` estimates the other candidates.

    Attributes:
        observation, policy: As given.
        speeds: Measured long enough, stated relative to a measured one, or learned from those.
        beliefs: The same, as :class:`Belief`.
        places, shapes: Every place that the check knows, by its name.
        staying: None when unknown; *unknown* then names the reason.
        unmatched: Names in ``scaling.speedup`` that match neither a candidate nor an allocation that the
            stage has used.
    """

    observation: Observation
    policy: Policy
    speeds: dict[str, Speed]
    staying: Estimate | None
    unknown: str = ""
    unmatched: tuple[str, ...] = ()
    beliefs: Mapping[str, Belief] = field(default_factory=dict)
    places: Mapping[str, Allocation] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """Text for the reason about stated speeds that are not used; "" when all are."""
        if not self.unmatched:
            return ""
        places = ", ".join(item.name for item in (self.observation.current, *self.observation.others()))
        names = ", ".join(self.unmatched)
        return f"; scaling.speedup names {names}, which matches no offer: write one of {places}"

    def moving(self, target: Allocation, *, speed: Speed | None = None) -> Estimate | None:
        """Estimate of moving to *target* at its known *speed*; None when speed or work is unknown."""
        speed = speed or self.speeds.get(target.name)
        return _estimate(self.observation, self.policy, target, speed, is_start=True)

    def finishing(self, name: str) -> Estimate | None:
        """Estimate of finishing at the median speed of a place, as if the stage were there."""
        belief = self.beliefs.get(name)
        speed = None if belief is None else Speed(belief.median, 0.0)
        return _estimate(self.observation, self.policy, self.places[name], speed, is_start=False)

    def slowest(self, target: Allocation) -> Speed | None:
        """Known speed of *target*, or a lower bound for other node counts of the same offer.

        More nodes are at least as fast as now. Fewer nodes lose at most their share: half the nodes, half the
        speed. None for another offer, and when the current speed is unknown.
        """
        here = self.observation.current
        known, speed = self.speeds.get(target.name), self.speeds.get(here.name)
        if known is not None or speed is None or target.offer.name != here.offer.name:
            return known
        share = min(1.0, target.nodes / here.nodes)
        return Speed(speed.mean * share, speed.stdev * share, "bound")


def outlook(observation: Observation, policy: Policy) -> Outlook:
    """The outlook from the facts of one check."""
    places = observation.places()
    shapes = shapes_of(observation, places)
    stated, unmatched = matched(observation.speedups, (*places, *observation.speeds))
    known = known_speeds(observation.speeds, stated, trusted_after_s=policy.warmup_s)
    here = observation.current
    beliefs = learned(observation, shapes) if here.name in known else {}
    speeds = {name: _as_speed(belief, known[here.name]) for name, belief in beliefs.items()}
    for name, speed in known.items():
        if name not in beliefs or name not in observation.measured:
            beliefs[name], speeds[name] = _as_belief(speed), speed
    if observation.units_left is None:
        return Outlook(observation, policy, speeds, None, f"work left is unknown: {_what(observation)}")
    if here.name not in speeds or speeds[here.name].source != "measured":
        measured = observation.speeds.get(here.name)
        seconds = 0.0 if measured is None else measured.seconds
        reason = f"speed on {here.name} is measured for {seconds:.0f} s of {policy.warmup_s:.0f} s"
        return Outlook(observation, policy, speeds, None, reason)
    staying = _estimate(observation, policy, here, speeds[here.name], is_start=False)
    return Outlook(observation, policy, speeds, staying, "", unmatched, beliefs, places, shapes)


def _as_speed(belief: Belief, base: Speed) -> Speed:
    """Speed of a learned belief; nothing is more certain than the measured speed that gives its unit."""
    stdev = belief.median * max(0.0 if belief.is_known else belief.stdev, base.relative_stdev)
    seconds = base.seconds if belief.is_known else 0.0
    return Speed(belief.median, stdev, "measured" if belief.is_known else "fitted", seconds)


def _as_belief(speed: Speed) -> Belief:
    """Belief of a log-normal speed."""
    square = 1 + speed.relative_stdev**2
    is_known = speed.source in ("measured", "learned")
    return Belief(speed.mean / math.sqrt(square), math.sqrt(math.log(square)), is_known, not is_known)


def _what(observation: Observation) -> str:
    missing = "how many are done" if observation.units_done is None else "how many there are in all"
    return f"the training does not report its {observation.unit}, {missing}"


def _estimate(
    observation: Observation,
    policy: Policy,
    allocation: Allocation,
    speed: Speed | None,
    *,
    is_start: bool,
) -> Estimate | None:
    if speed is None or observation.units_left is None:
        return None
    return estimate(
        observation.units_left,
        speed,
        usd_per_hour=allocation.usd_per_hour,
        value_of_hour=policy.value_of_hour,
        overheads=observation.overheads,
        interruptions_per_hour=losses_per_hour(allocation, observation.interruptions_per_hour),
        is_start=is_start,
    )
