"""How often spot nodes are lost here, and how often to save checkpoints against that. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.run import AttemptState, RunState, outcome_of
from envscaler_airflow.run.event_bodies import AttemptEnded
from envscaler_airflow.scaling.deadline import Hazard
from envscaler_airflow.scaling.deadline.risk import age_bin
from envscaler_airflow.scaling.interval import price_aware_interval_s

PRIOR_H = 10.0
"""Weight of the fitted rate, in hours, beside the hours seen. Chosen: a day on spot outweighs it."""
PRIOR_AGE_H = 3.0
"""Age of the spot machine whose fitted rate is used at first, hours. Chosen: a usual job."""
LEAST_EVERY_S = 60.0
"""Shortest interval between checkpoints, seconds. Chosen: uploads of one end before the next begins."""


def losses_per_hour(state: RunState, *, now: float) -> float:
    """Losses of a spot node per hour: those of this generation, weighted with the fitted rate.

    Args:
        state: Fold of the run's events.
        now: Owner's clock, seconds since the epoch.
    """
    hours, losses = 0.0, 0
    for attempt in state.attempts_of(state.generation):
        nodes = sum(part.nodes for part in attempt.allocation.parts if part.offer.capacity_type == "spot")
        if not nodes or attempt.started_at is None:
            continue
        until = now if attempt.ended_at is None else attempt.ended_at
        hours += nodes * max(0.0, until - attempt.started_at) / 3600.0
        losses += outcome_of(attempt.outcome).is_disruption
    prior = Hazard().up[age_bin(PRIOR_AGE_H)]
    return (losses + prior * PRIOR_H) / (hours + PRIOR_H)


def interruptions(offers: Iterable[Offer], per_hour: float) -> dict[str, float]:
    """Losses per hour by name of each spot offer; on-demand machines are not known to be interrupted."""
    return {offer.name: per_hour for offer in offers if offer.capacity_type == "spot"}


def save_s_of(end: AttemptEnded) -> float | None:
    """Seconds of training lost to one checkpoint, as an ended attempt reported; None if it did not.

    If only the time of the last checkpoint is known, that time, including its upload.
    """
    return end.save_s / end.checkpoints if end.save_s is not None and end.checkpoints else end.checkpoint_s


def checkpoint_every_s(spec: EnvSpec, state: RunState, allocation: Allocation, *, now: float) -> float | None:
    """Seconds between the checkpoints of the next attempt; None leaves it to the spec.

    Daly's interval for the measured cost of a checkpoint and the rate of losses. A price above what this
    offer cost before raises that rate. Only on spot, only if the spec counts seconds, and never longer than
    the spec's interval: that is how much work the user is ready to lose.
    """
    every = spec.checkpoint.every.seconds if spec.checkpoint is not None else None
    spot = [part for part in allocation.parts if part.offer.capacity_type == "spot"]
    earlier = state.attempts_of(state.generation)
    costs = [cost for attempt in reversed(earlier) if (cost := save_s_of(attempt.end)) is not None]
    if every is None or not spot or not costs:
        return None
    price = spot[0].offer.usd_per_hour
    per_hour = losses_per_hour(state, now=now) * sum(part.nodes for part in spot)
    best = price_aware_interval_s(costs[0], per_hour, price, _prices(earlier, spot[0].offer))
    return None if best is None else min(every, max(LEAST_EVERY_S, best))


def _prices(attempts: Iterable[AttemptState], offer: Offer) -> list[float]:
    """Prices of the same offer when earlier attempts began on it."""
    offers = (part.offer for attempt in attempts for part in attempt.begun_on.parts)
    return [one.usd_per_hour for one in offers if one.name == offer.name and one.usd_per_hour is not None]
