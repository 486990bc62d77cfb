"""What the owner knows of a stage when it plans an attempt, from the best source of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from envscaler_airflow.clouds import schemes, tariffs
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner import limits
from envscaler_airflow.planning import Knowledge, Offer, Overheads, feasible, requirements_of
from envscaler_airflow.planning.billing import Tariff
from envscaler_airflow.planning.data import data_places
from envscaler_airflow.planning.knowledge import first_known, with_ratios
from envscaler_airflow.planning.profile import Figure, Losses, StageProfile, runs_text
from envscaler_airflow.run import AttemptState, RunState
from envscaler_airflow.run.measured import knowledge_of as measured_of
from envscaler_airflow.run.measured import start_s
from envscaler_airflow.scaling.from_spec import speedups_of

START_S = 30.0
START_STDEV_S = 15.0
"""Start of an attempt and its standard deviation before any measurement, seconds. Chosen: two worker slots, a
process, a restore."""

MEASURED_HERE = "measured in this run"
CHOSEN = "not measured yet: a chosen default"


def knowledge_of(
    state: RunState, spec: EnvSpec, offers: Sequence[Offer], profile: StageProfile, *, now: float
) -> Knowledge:
    """What is known before the next attempt.

    In this order: measured in this generation; learned from earlier runs; stated in the spec; the defaults.

    Args:
        state: Fold of the run's events.
        spec: The frozen spec.
        offers: What the backend offers now.
        profile: What earlier runs of the stage measured.
        now: Owner's clock, seconds since the epoch.
    """
    attempts = state.attempts_of(state.generation)
    base = replace(
        _overheads_and_losses(state, spec, offers, profile, now=now),
        data=data_places(spec, schemes()),
        tariffs=_tariffs_of(offers),
    )
    layers = (base, measured_of(attempts), _learned(profile, attempts))
    places = feasible(requirements_of(spec, while_running=True), offers)
    return with_ratios(first_known(layers), speedups_of(spec), places)


def _learned(profile: StageProfile, attempts: Sequence[AttemptState]) -> Knowledge:
    """The profile's knowledge, less the steps that this generation has saved."""
    known = profile.knowledge()
    kept = max((one.checkpoint_step or 0 for one in attempts), default=0)
    if known.units is None or known.unit != "steps":
        return known
    return replace(known, units=max(0.0, known.units - kept))


def _tariffs_of(offers: Sequence[Offer]) -> dict[str, Tariff]:
    """The tariffs of the clouds that *offers* are of: a plan is recorded with everything that it used."""
    known = tariffs()
    return {cloud: known[cloud] for cloud in sorted({offer.cloud for offer in offers} & known.keys())}


def _overheads_and_losses(
    state: RunState, spec: EnvSpec, offers: Sequence[Offer], profile: StageProfile, *, now: float
) -> Knowledge:
    attempts = state.attempts_of(state.generation)
    every = spec.checkpoint.every.seconds if spec.checkpoint else None
    here, earlier = start_s(attempts), profile.start_s.get("whole")
    save, saved = limits.measured_s(state), profile.checkpoint_s
    start, start_stdev = START_S, START_STDEV_S
    if here is not None:
        start, start_stdev = here, START_STDEV_S / (1 + len(attempts))
    elif earlier is not None:
        start, start_stdev = earlier.value, earlier.value * earlier.spread
    if save is None:
        save = limits.CHECKPOINT_S if saved is None else saved.value
    sources = {"start": _source(here, earlier)}
    if spec.checkpoint is not None:
        sources["checkpoint"] = _source(limits.measured_s(state), saved)
    losses = _losses(state, offers, profile, now=now)
    if losses:
        is_learned = any(name in profile.losses for name in losses)
        more = f" and {profile.source}" if is_learned else ""
        sources["losses"] = f"fitted to public traces, corrected by this run{more}"
    overheads = Overheads(start, start_stdev, save if spec.checkpoint else 0.0, every)
    return Knowledge(overheads=overheads, interruptions_per_hour=losses, sources=sources)


def _source(here: float | None, earlier: Figure | None) -> str:
    if here is not None:
        return MEASURED_HERE
    return CHOSEN if earlier is None else f"measured in {runs_text(earlier.runs)}"


def _losses(
    state: RunState, offers: Sequence[Offer], profile: StageProfile, *, now: float
) -> dict[str, float]:
    """Losses per hour of each spot offer: of this and earlier runs, weighted with the fitted rate."""
    found = {}
    for offer in offers:
        if offer.capacity_type == "spot":
            before = profile.losses.get(offer.name, Losses(0.0, 0.0))
            found[offer.name] = limits.losses_per_hour(state, now=now, earlier=before)
    return found
