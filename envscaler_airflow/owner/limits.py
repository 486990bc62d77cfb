"""Limits of an attempt: how often it saves, how long it may drain, how long its machine may live.

Pure except for billing rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from envscaler_agent.protocol import Status
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.planning.profile import Losses
from envscaler_airflow.planning.record import check_finite
from envscaler_airflow.run import AttemptState, RunState, outcome_of
from envscaler_airflow.run.measured import save_s_of
from envscaler_airflow.scaling.deadline import Hazard
from envscaler_airflow.scaling.deadline.risk import age_bin

GRACE_S = 30.0
"""Least time from the drain request to the kill, seconds. Source: Kubernetes'
terminationGracePeriodSeconds."""
MOST_GRACE_S = 3600.0
"""Most grace, seconds. Chosen: a checkpoint of 100 GB at 60 MB/s, twice."""
GRACE_FACTOR = 2.0
"""Grace as a multiple of a checkpoint's measured seconds. Chosen: a save during log uploads takes longer."""
LEAVE_STEPS = 13.0
"""Grace as a multiple of a step's measured seconds. Source: ranks on several nodes agree at every tenth step
(``agent.session.AGREE_EVERY``), and SIGTERM comes after four fifths of it (``agent.ending.TERM_SHARE``)."""
CHECKPOINT_S = 10.0
"""Pause for a checkpoint before one was measured, seconds. Chosen: some gigabytes to a local disk."""
DRAIN_S = 30.0
"""From the last step of a drained attempt to the end of its machines, seconds. Chosen: a worker slot for the
owner, the last uploads, and Kubernetes' terminationGracePeriodSeconds for a process that hangs."""
BUDGET_EVERY_S = 30.0
"""Between two budget checks, seconds. Chosen: at $100/h the interval costs $0.83."""
MACHINE_MARGIN_S = 3600.0
"""A machine ends itself this long after twice the stage's deadline, seconds. Chosen: queueing, image pulls
and a triggerer upgrade fit, so that the owner's own stop comes first."""
MACHINE_S = 30 * 86400.0
"""Longest life of a machine without any other limit, seconds. Chosen: beyond it the user forgot it."""
PRIOR_H = 10.0
"""Weight of the fitted rate, in hours, beside the hours seen. Chosen: a day on spot outweighs it."""
PRIOR_AGE_H = 3.0
"""Age of the spot machine whose fitted rate is used at first, hours. Chosen: a usual job."""
LEAST_EVERY_S = 60.0
"""Shortest interval between checkpoints, seconds. Chosen: uploads of one end before the next begins."""


def grace_s(state: RunState, status: Status | None = None) -> float:
    """Seconds from the drain request to the kill: twice a checkpoint's time, plus the steps before it.

    Args:
        state: Fold of the run's events; the last attempt that reported a checkpoint counts.
        status: What node 0 of the live attempt last reported; None when unknown.
    """
    measured = measured_s(state, status)
    step_s = None if status is None else status.progress.step_time_s
    needed = GRACE_FACTOR * (measured or 0.0) + LEAVE_STEPS * (step_s or 0.0)
    return min(MOST_GRACE_S, max(GRACE_S, needed))


def measured_s(state: RunState, status: Status | None = None) -> float | None:
    """Seconds of the last checkpoint that an attempt of this generation reported; None if none did."""
    measured = None if status is None else status.checkpoint_s
    for attempt in reversed(state.attempts_of(state.generation)):
        if measured is None:
            measured = attempt.end.checkpoint_s
    return measured


def reserve_usd(
    allocation: Allocation, *, check_s: float, checkpoint_s: float | None, status: Status | None = None
) -> float | None:
    """What an attempt still costs once it is found to be near its budget; None when its price is unknown.

    Price x (check interval + measured checkpoint + drain + billing minimum). The drain must begin when
    the amount spent plus this reserve reaches the budget.

    Args:
        allocation: The attempt's allocation.
        check_s: Seconds between two budget checks.
        checkpoint_s: Of earlier attempts; None when none was measured.
        status: Last status of node 0, whose own checkpoint and steps count; None when unknown.
    """
    price = allocation.usd_per_hour
    if price is None:
        return None
    own = None if status is None else status.checkpoint_s
    measured = next((value for value in (own, checkpoint_s) if value is not None), CHECKPOINT_S)
    step_s = 0.0 if status is None else status.progress.step_time_s or 0.0
    billed = [tariffs().get(one.offer.cloud, UNKNOWN_TARIFF).billing for one in allocation.parts]
    least_s = max((max(one.minimum_s, one.unit_s) for one in billed if one is not None), default=0.0)
    return price * (check_s + measured + LEAVE_STEPS * step_s + DRAIN_S + least_s) / 3600.0


def machine_deadline_s(
    *,
    usd_left: float | None,
    usd_per_hour: float | None,
    deadline_left_s: float | None,
    deadline_s: float | None,
) -> float:
    """Billed seconds after which a machine ends itself, even without owner, watcher and sidecar.

    The earliest of three times counts: when the remaining money is spent, so that only the grace of the last
    save costs more; when the stage is an hour later than twice its deadline; or after 30 days. Usually the
    owner drains earlier (:func:`reserve_usd`).

    Args:
        usd_left: What the attempt may cost in total; None without a budget.
        usd_per_hour: Of all its nodes; None when unknown.
        deadline_left_s: Seconds to the stage's deadline, below 0 when it has passed; None without a deadline.
        deadline_s: The original length of the deadline. One that had already passed at the start, as in a
            backfill, limits nothing: each machine would end after an hour, regardless of its work.
    """
    limits = [MACHINE_S]
    if usd_left is not None and usd_per_hour:
        limits.append(max(0.0, usd_left) / usd_per_hour * 3600.0)
    if deadline_left_s is not None and deadline_s is not None and deadline_s > 0:
        limits.append(max(0.0, deadline_left_s + deadline_s) + MACHINE_MARGIN_S)
    return min(limits)


def losses_per_hour(state: RunState, *, now: float, earlier: Losses | None = None) -> float:
    """Losses of a spot node per hour: those of this generation, weighted with the fitted rate.

    Args:
        state: Fold of the run's events.
        now: Owner's clock, seconds since the epoch.
        earlier: Losses of earlier runs on the offer, which count too.
    """
    hours, losses = (0.0, 0.0) if earlier is None else (earlier.hours, earlier.losses)
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


def price_aware_interval_s(
    save_s: float, losses_per_hour: float, price: float | None, recent: Sequence[float]
) -> float | None:
    """The interval for the loss rate that the current price predicts: shorter while the price is high."""
    return checkpoint_interval_s(save_s, losses_per_hour * price_risk(price, recent))


def checkpoint_interval_s(save_s: float, losses_per_hour: float) -> float | None:
    """Seconds of training between two checkpoints that lose the least time; None without losses.

    ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d`` with *d* the seconds of a save and *M* those between
    losses; *M* when a save takes half of that or longer. The time of a restart does not change it
    (Daly, section 3).

    Source: J. T. Daly, FGCS 22 (2006), equation 37; J. W. Young, CACM 17 (1974), for the first term.
    """
    check_finite(save_s=save_s, losses_per_hour=losses_per_hour)
    if losses_per_hour <= 0:
        return None
    between_s = 3600 / losses_per_hour
    if save_s <= 0:
        return 0.0
    if save_s >= between_s / 2:
        return between_s
    ratio = save_s / (2 * between_s)
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


PRICE_WEIGHT = 11.0
"""How strongly a price above its own recent level raises the loss rate: ``exp(weight * rise)``, limited to
one half and four times. Fitted by ``benchmarks/policies/prices.py`` on price changes of 2023, rounded."""


def price_risk(price: float | None, recent: Sequence[float]) -> float:
    """Factor on a loss rate, from the price relative to the median of recent prices; 1 when unknown."""
    known = sorted(value for value in recent if value > 0 and math.isfinite(value))
    if not known or price is None or not price > 0 or not math.isfinite(price):
        return 1.0
    rise = math.log(price / known[len(known) // 2])
    return min(4.0, max(0.5, math.exp(PRICE_WEIGHT * rise)))
