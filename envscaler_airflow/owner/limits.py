"""How long an attempt may take to go, and how long its machine may live. Pure but for what clouds bill."""

from __future__ import annotations

from envscaler_agent.protocol import Status
from envscaler_airflow.clouds import tariffs
from envscaler_airflow.planning.billing import UNKNOWN_TARIFF
from envscaler_airflow.planning.offers import Allocation
from envscaler_airflow.run import RunState

GRACE_S = 30.0
"""Least time from asking an attempt to go to killing it, seconds. Source: Kubernetes'
terminationGracePeriodSeconds."""
MOST_GRACE_S = 3600.0
"""Most of it, seconds. Chosen: a checkpoint of 100 GB at 60 MB/s, twice."""
GRACE_FACTOR = 2.0
"""Grace by the measured seconds of a checkpoint. Chosen: a save beside uploads of logs takes longer."""
LEAVE_STEPS = 13.0
"""Grace by the measured seconds of a step. Source: ranks on several nodes ask each other at every tenth
(``agent.session.AGREE_EVERY``), and SIGTERM comes after four fifths of it (``agent.leaving.TERM_SHARE``)."""
CHECKPOINT_S = 10.0
"""Pause for a checkpoint before one was measured, seconds. Chosen: some gigabytes to a local disk."""
DRAIN_S = 30.0
"""From the last step of a drained attempt to the end of its machines, seconds. Chosen: a worker slot for the
owner, the last uploads, and Kubernetes' terminationGracePeriodSeconds for what hangs."""
BUDGET_EVERY_S = 30.0
"""Between two looks at the money spent, seconds. Chosen: at $100/h a look costs $0.83."""
MACHINE_MARGIN_S = 3600.0
"""Later than twice the stage's deadline a machine ends by itself, seconds. Chosen: queueing, image pulls and
the upgrade of a triggerer fit, so that the owner's own stop comes first."""
MACHINE_S = 30 * 86400.0
"""Longest life of a machine that nothing else bounds, seconds. Chosen: beyond it somebody forgot it."""


def grace_s(state: RunState, said: Status | None = None) -> float:
    """Seconds from asking to killing: twice what a checkpoint took, and the steps until it can be made.

    Args:
        state: Fold of the run's events; the last attempt that told of a checkpoint counts.
        said: What node 0 of the live attempt last said; None when unknown.
    """
    measured = measured_s(state, said)
    step_s = None if said is None else said.progress.step_time_s
    needed = GRACE_FACTOR * (measured or 0.0) + LEAVE_STEPS * (step_s or 0.0)
    return min(MOST_GRACE_S, max(GRACE_S, needed))


def measured_s(state: RunState, said: Status | None = None) -> float | None:
    """Seconds of the last checkpoint that an attempt of this generation reported; None when none did."""
    measured = None if said is None else said.checkpoint_s
    for attempt in reversed(state.attempts_of(state.generation)):
        if measured is None:
            measured = checkpoint_s_of(attempt.ended.get("checkpoint_s"))
    return measured


def reserve_usd(
    allocation: Allocation, *, check_s: float, checkpoint_s: float | None, said: Status | None = None
) -> float | None:
    """What an attempt still costs once it is seen to be near its budget; None when its price is unknown.

    Price x (check interval + measured checkpoint + drain + billing minimum): the drain has to begin when
    what is spent and this reach the budget.

    Args:
        allocation: What it is on.
        check_s: Seconds between two looks at the money.
        checkpoint_s: Of earlier attempts; None when none was measured.
        said: Last status of node 0, whose own checkpoint and steps count; None when unknown.
    """
    price = allocation.usd_per_hour
    if price is None:
        return None
    own = None if said is None else said.checkpoint_s
    measured = next((value for value in (own, checkpoint_s) if value is not None), CHECKPOINT_S)
    step_s = 0.0 if said is None else said.progress.step_time_s or 0.0
    billed = [tariffs().get(one.offer.cloud, UNKNOWN_TARIFF).billing for one in allocation.parts]
    least_s = max((max(one.minimum_s, one.unit_s) for one in billed if one is not None), default=0.0)
    return price * (check_s + measured + LEAVE_STEPS * step_s + DRAIN_S + least_s) / 3600.0


def checkpoint_s_of(value: object) -> float | None:
    """Seconds as an event holds them; None when it does not."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def machine_deadline_s(
    *,
    usd_left: float | None,
    usd_per_hour: float | None,
    deadline_left_s: float | None,
    deadline_s: float | None,
) -> float:
    """After how many billed seconds a machine ends by itself, also without owner, watcher and sidecar.

    When the money left is spent, so that only the grace of the last save costs more; when the stage is later
    than its whole deadline again, and an hour; or after 30 days: what comes first. The owner drains before
    that (:func:`reserve_usd`), which is the usual end.

    Args:
        usd_left: What the attempt may cost in all; None without a budget.
        usd_per_hour: Of all its nodes; None when unknown.
        deadline_left_s: Seconds to the stage's deadline, below 0 when it has passed; None without one.
        deadline_s: How long the deadline was at first; one that was over by then, as when a day is made up
            for, bounds nothing: each machine would end after an hour, whatever it had to do.
    """
    limits = [MACHINE_S]
    if usd_left is not None and usd_per_hour:
        limits.append(max(0.0, usd_left) / usd_per_hour * 3600.0)
    if deadline_left_s is not None and deadline_s is not None and deadline_s > 0:
        limits.append(max(0.0, deadline_left_s + deadline_s) + MACHINE_MARGIN_S)
    return min(limits)
