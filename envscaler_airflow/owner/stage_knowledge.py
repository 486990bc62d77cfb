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
from envscaler_airflow.run import RunState
from envscaler_airflow.run.measured import knowledge_of as measured_of
from envscaler_airflow.run.measured import start_s
from envscaler_airflow.scaling.from_spec import speedups_of

START_S = 30.0
START_STDEV_S = 15.0
"""Start of an attempt and its standard deviation before any measurement, seconds. Chosen: two worker slots, a
process, a restore."""

MEASURED_HERE = "measured in this run"
CHOSEN = "not measured yet: a chosen default"


def knowledge_of(state: RunState, spec: EnvSpec, offers: Sequence[Offer], *, now: float) -> Knowledge:
    """What is known before the next attempt: of this generation, of the spec, and otherwise the defaults.

    Args:
        state: Fold of the run's events.
        spec: The frozen spec.
        offers: What the backend offers now.
        now: Owner's clock, seconds since the epoch.
    """
    attempts = state.attempts_of(state.generation)
    measured = measured_of(attempts)
    base = replace(
        _overheads_and_losses(state, spec, offers, now=now),
        data=data_places(spec, schemes()),
        tariffs=_tariffs_of(offers),
    )
    places = feasible(requirements_of(spec, while_running=True), offers)
    return with_ratios(first_known((base, measured)), speedups_of(spec), places)


def _tariffs_of(offers: Sequence[Offer]) -> dict[str, Tariff]:
    """The tariffs of the clouds that *offers* are of: a plan is recorded with everything that it used."""
    known = tariffs()
    return {cloud: known[cloud] for cloud in sorted({offer.cloud for offer in offers} & known.keys())}


def _overheads_and_losses(
    state: RunState, spec: EnvSpec, offers: Sequence[Offer], *, now: float
) -> Knowledge:
    attempts = state.attempts_of(state.generation)
    every = spec.checkpoint.every.seconds if spec.checkpoint else None
    start, save = start_s(attempts), limits.measured_s(state)
    sources = {
        "start": CHOSEN if start is None else MEASURED_HERE,
        "checkpoint": CHOSEN if save is None else MEASURED_HERE,
    }
    if spec.checkpoint is None:
        del sources["checkpoint"]
    per_hour = limits.losses_per_hour(state, now=now)
    losses = limits.interruptions(offers, per_hour)
    if losses:
        sources["losses"] = "fitted to public traces, corrected by this run"
    overheads = Overheads(
        start_s=START_S if start is None else start,
        start_stdev_s=START_STDEV_S if start is None else START_STDEV_S / (1 + len(attempts)),
        checkpoint_s=(limits.CHECKPOINT_S if save is None else save) if spec.checkpoint else 0.0,
        checkpoint_every_s=every,
    )
    return Knowledge(overheads=overheads, interruptions_per_hour=losses, sources=sources)
