"""What finishing the work left takes, staying or moving: the numbers under every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from envscaler_airflow.planning import Allocation, Estimate, Speed, estimate, known_speeds, matched
from envscaler_airflow.planning.fleet import losses_per_hour
from envscaler_airflow.scaling.decision import Policy
from envscaler_airflow.scaling.explore import Learner, Shape
from envscaler_airflow.scaling.observation import Observation


def learned(observation: Observation) -> dict[str, Speed]:
    """Speed of each candidate that was not measured, by its name; {} before a step was measured here.

    The model of :mod:`.explore`, conditioned on every allocation that this generation was on, gives ratios
    with their uncertainty; the speed measured here gives the unit. The global batch is taken to stay.
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
        if 0 < mean < math.inf and stdev < math.inf:  # from steps that no GPU makes nothing is learned
            speeds[item.name] = Speed(mean, stdev, "fitted")
    return speeds


def shape_of(allocation: Allocation) -> Shape:
    """What its speed goes by; without GPUs its CPUs stand for them."""
    offer, nodes = allocation.offer, allocation.nodes
    if offer.gpus:
        return Shape(offer.gpu_name or "", nodes, nodes * offer.gpus)
    return Shape("CPU", nodes, max(1, round(nodes * offer.vcpus)))


@dataclass(frozen=True, slots=True)
class Outlook:
    """Known speeds and the estimate of staying; asks :meth:`moving` for the others.

    Attributes:
        observation, policy: As given.
        speeds: Measured long enough, stated relative to one that was, or learned from those.
        staying: None when it cannot be told; then *unknown* says why.
        unmatched: Names in ``scaling.speedup`` that match neither a candidate nor where the stage has been.
    """

    observation: Observation
    policy: Policy
    speeds: dict[str, Speed]
    staying: Estimate | None
    unknown: str = ""
    unmatched: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What the reason says of stated speeds that count for nothing; "" when all count."""
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
        """Known speed of *target*, or a bound on the safe side for other node counts of the same offer.

        More nodes are no slower than now, fewer lose at most their share: half the nodes, half
        the speed. None for another offer, and when the speed here is unknown.
        """
        here = self.observation.current
        known, speed = self.speeds.get(target.name), self.speeds.get(here.name)
        if known is not None or speed is None or target.offer.name != here.offer.name:
            return known
        share = min(1.0, target.nodes / here.nodes)
        return Speed(speed.mean * share, speed.stdev * share, "bound")


def outlook(observation: Observation, policy: Policy) -> Outlook:
    """What can be told of finishing, from the facts of one check."""
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
