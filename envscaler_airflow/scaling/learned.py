"""Speeds where a running stage has not been, learned from where it was."""

from __future__ import annotations

import math

from envscaler_airflow.planning import Allocation, Speed
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
