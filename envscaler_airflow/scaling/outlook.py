"""Time and cost to finish the remaining work, staying or moving: the numbers that every policy uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from envscaler_airflow.planning import Allocation, Estimate, Speed, estimate, known_speeds, matched
from envscaler_airflow.planning.offers import losses_per_hour
from envscaler_airflow.scaling.decision import Policy
from envscaler_airflow.scaling.explore import Learner, Shape
from envscaler_airflow.scaling.observation import Observation


def learned(observation: Observation) -> dict[str, Speed]:
    """Speed of each unmeasured candidate, by its name; {} until a step is measured on the current allocation.

    The model of :mod:`.explore`, conditioned on every allocation that this generation used, gives ratios with
    their uncertainty. The speed measured on the current allocation gives the unit. The global batch is
    assumed to stay the same.
    """
    here = observation.current
    step, speed = observation.measured.get(here.name), observation.speeds.get(here.name)
    if step is None or speed is None:
        return {}
    known = {item.name: item for item in (here, *observation.candidates)}
    learner = Learner(step.batch, step.batch, observation.gpu_speeds)
    for name, found in observation.measured.items():
        if name in known:
            learner.learn(shape_of(known[name]), found)
    base, _ = learner.rate(shape_of(here), step.noise_scale)
    speeds = {}
    for item in observation.others():
        if item.name in observation.measured:
            continue
        rate, unsure = learner.rate(shape_of(item), step.noise_scale)
        mean = speed.mean * rate / base if base > 0 else math.nan
        stdev = mean * max(unsure, speed.relative_stdev)
        if 0 < mean < math.inf and stdev < math.inf:  # implausible steps give no speed
            speeds[item.name] = Speed(mean, stdev, "fitted")
    return speeds


def shape_of(allocation: Allocation) -> Shape:
    """The properties that determine its speed; without GPUs, its CPUs take their place."""
    offer, nodes = allocation.offer, allocation.nodes
    if offer.gpus:
        return Shape(offer.gpu_name or "", nodes, nodes * offer.gpus)
    return Shape("CPU", nodes, max(1, round(nodes * offer.vcpus)))


@dataclass(frozen=True, slots=True)
class Outlook:
    """Known speeds and the estimate of staying; :meth:`moving` estimates the other candidates.

    Attributes:
        observation, policy: As given.
        speeds: Measured long enough, stated relative to a measured one, or learned from those.
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
    places = (observation.current, *observation.candidates)
    names = (*(item.name for item in places), *observation.speeds)
    stated, unmatched = matched(observation.speedups, names)
    known = known_speeds(observation.speeds, stated, trusted_after_s=policy.warmup_s)
    speeds = {**learned(observation), **known}
    here = observation.current
    if observation.units_left is None:
        return Outlook(observation, policy, speeds, None, f"work left is unknown: {_what(observation)}")
    if here.name not in speeds or speeds[here.name].source != "measured":
        measured = observation.speeds.get(here.name)
        seconds = 0.0 if measured is None else measured.seconds
        reason = f"speed on {here.name} is measured for {seconds:.0f} s of {policy.warmup_s:.0f} s"
        return Outlook(observation, policy, speeds, None, reason)
    staying = _estimate(observation, policy, here, speeds[here.name], is_start=False)
    return Outlook(observation, policy, speeds, staying, unmatched=unmatched)


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
