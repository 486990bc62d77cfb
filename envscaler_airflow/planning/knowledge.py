"""What is known of a stage before a plan: its work, speeds, losses and overheads, each with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from envscaler_airflow.planning.billing import Tariffs
from envscaler_airflow.planning.data import DataPlace
from envscaler_airflow.planning.objective import Overheads
from envscaler_airflow.planning.offers import Allocation, InstanceType
from envscaler_airflow.planning.performance import Speed, Speedup, known_speeds, matched
from envscaler_airflow.planning.record import NotNegative, Positive, Record


@dataclass(frozen=True, slots=True)
class StepTime(Record):
    """A step as a training reported it.

    Attributes:
        batch: Global batch.
        step_s: Mean seconds of a step.
        sync_s: The part of it that is synchronization.
        noise_scale: Gradient noise scale at that time; None: not reported.
        micro_batches: Number that each GPU accumulates in the step.
    """

    batch: int
    step_s: Positive[float]
    sync_s: NotNegative[float] = 0.0
    noise_scale: NotNegative[float] | None = None
    micro_batches: Positive[int] = 1


@dataclass(frozen=True, slots=True)
class Knowledge(Record):
    """The work to do, and everything else that an estimate needs.

    For each part the first of these sources counts: measured in this run; learned from earlier runs of the
    stage; stated in the spec; the performance model's prior; nothing. A plan without speeds ranks by $/h.

    Attributes:
        units: Units of the work left; None when unknown.
        unit: ``steps``, ``samples``, ``tokens``; speeds have the same one.
        speeds: Units per second, by allocation name, or by :func:`machine_name` for any place and capacity.
        overheads: Start-up and checkpoint seconds.
        interruptions_per_hour: Losses of one node per hour, by offer name; a missing one is unknown.
        data: Where the stage's data are.
        tariffs: What clouds charge besides the prices of offers.
        sources: Where each part is from, human-readable, by ``work``, ``speed``, ``start``, ``checkpoint``
            and ``losses``: ``measured in 7 runs``.
        steps: Steps of earlier runs, by :func:`machine_name`.
        is_guess: Work and speeds are those of other code: a forecast from them ranks, and refuses nothing.
    """

    units: NotNegative[float] | None = None
    unit: str = "steps"
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    overheads: Overheads = field(default_factory=Overheads)
    interruptions_per_hour: Mapping[str, NotNegative[float]] = field(default_factory=dict)
    data: tuple[DataPlace, ...] = ()
    tariffs: Tariffs = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    is_guess: bool = False

    def speed_of(self, allocation: Allocation) -> Speed | None:
        """Speed of *allocation*; a mixed one is as fast as its first offer, as its types are the same."""
        if not self.speeds:
            return None
        found = self.speeds.get(allocation.name)
        if found is None and allocation.is_mixed:
            found = self.speeds.get(Allocation(allocation.offer, allocation.nodes).name)
        return self.speed_on(allocation.offer.machine, allocation.nodes) if found is None else found

    def speed_on(self, machine: InstanceType, nodes: int) -> Speed | None:
        """Speed on *nodes* of *machine* at any place and capacity; None is unknown."""
        return self.speeds.get(_machine_name(machine, nodes)) if self.speeds else None


def machine_name(allocation: Allocation) -> str:
    """Name of what determines the speed: ``2 x aws/g5.xlarge``, without place and capacity type.

    All nodes of a mixed allocation are of the same type.
    """
    return _machine_name(allocation.offer.machine, allocation.nodes)


def _machine_name(machine: InstanceType, nodes: int) -> str:
    attached = f"+{machine.gpu_name}:{int(machine.gpus)}" if machine.is_attached else ""
    name = f"{machine.cloud}/{machine.instance_type}{attached}"
    return name if nodes == 1 else f"{nodes} x {name}"


def first_known(layers: Sequence[Knowledge]) -> Knowledge:
    """Work and speeds of *layers*, the best source first; the other parts are of the first layer.

    Units of work cannot be mixed: those of the first layer that knows work or a speed count, and layers in
    another unit add nothing.
    """
    known = [layer for layer in layers if layer.speeds or layer.units is not None]
    if not known:
        return layers[0]
    alike = [layer for layer in known if layer.unit == known[0].unit]
    speeds: dict[str, Speed] = {}
    for layer in alike:
        speeds |= {name: speed for name, speed in layer.speeds.items() if name not in speeds}
    sources = dict(layers[0].sources)
    for part, has in (("work", _has_work), ("speed", _has_speed)):
        told = dict.fromkeys(layer.sources[part] for layer in alike if has(layer) and part in layer.sources)
        if told:
            sources[part] = next(iter(told)) if part == "work" else ", ".join(told)
    steps = {name: step for layer in reversed(alike) for name, step in layer.steps.items()}
    units = next((layer.units for layer in alike if layer.units is not None), None)
    return replace(
        layers[0],
        units=units,
        unit=known[0].unit,
        speeds=speeds,
        sources=sources,
        steps=steps,
        is_guess=any(layer.is_guess for layer in alike),
    )


def _has_work(layer: Knowledge) -> bool:
    return layer.units is not None


def _has_speed(layer: Knowledge) -> bool:
    return bool(layer.speeds)


def with_ratios(known: Knowledge, stated: Iterable[Speedup], places: Iterable[Allocation]) -> Knowledge:
    """*known* with the speeds of *places* that follow from stated ratios and a known speed.

    Ratios alone give no speed: they say nothing about offers that they do not name, nor about start-up.
    """
    places, stated = tuple(places), tuple(stated)
    if not stated or not known.speeds:
        return known
    ratios, _ = matched(stated, (place.name for place in places))
    speeds = {place.name: found for place in places if (found := known.speed_of(place)) is not None}
    derived = known_speeds(speeds, ratios)
    if derived.keys() <= speeds.keys():
        return known
    sources = dict(known.sources)
    sources["speed"] = ", ".join(part for part in (sources.get("speed"), "stated in scaling.speedup") if part)
    return replace(known, speeds={**known.speeds, **derived}, sources=sources)
