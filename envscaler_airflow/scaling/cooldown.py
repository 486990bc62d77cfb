"""The cool-down and the other limits on moves, which hold for every policy."""

from __future__ import annotations

from collections.abc import Sequence

from envscaler_airflow.backoff import wait_s
from envscaler_airflow.planning import Estimate
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.planning.offers import has_spot
from envscaler_airflow.scaling.decision import Policy, Want
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import outlook

REFUSED_FIRST_S = 60.0
REFUSED_MOST_S = 3600.0
"""Shortest and longest wait in seconds before a move that the owner refused is requested again. Chosen: a
full cluster costs one request an hour, and a temporary reason delays a move by a minute."""


def holds_all(observation: Observation, policy: Policy, wants: Sequence[Want]) -> str | None:
    """Why none of *wants* is allowed now; None: some may be."""
    since_s, since_epochs = observation.since_move_s, observation.since_move_epochs
    cooldown_s = min((want.cooldown(policy) for want in wants), default=policy.cooldown_s or 0.0)
    epochs = min((want.epochs_between(policy) for want in wants), default=policy.min_epochs_between or 0)
    if observation.health != "ok":
        return f"the stage's health is {observation.health}"
    if observation.phase != "running":
        return f"the stage is {observation.phase}, not running"
    if observation.pending is not None:
        return f"one action at a time: {observation.pending}"
    if policy.max_moves is not None and observation.moves >= policy.max_moves:
        return f"{observation.moves} moves were made, max_moves is {policy.max_moves}"
    if since_s is not None and since_s < cooldown_s:
        return f"cool-down: {since_s:.0f} s of {cooldown_s:.0f} s since the last move"
    if since_epochs is not None and since_epochs < epochs:
        return f"{since_epochs} epochs of {epochs} since the last move"
    return None


def holds(observation: Observation, policy: Policy, want: Want) -> str | None:
    """Why this move is not allowed; None: it is."""
    target, here = want.target, observation.current
    if target.name == here.name:
        return f"the stage is on {here.name} already"
    refused = _was_refused(observation, want)
    if refused is not None:
        return refused
    if not policy.min_nodes <= target.nodes <= policy.max_nodes:
        return f"{target.name} is outside {policy.min_nodes} to {policy.max_nodes} nodes"
    if target.nodes * max(1, target.offer.gpus) % policy.model_parallel:
        return f"{target.name} does not hold whole model-parallel groups of {policy.model_parallel}"
    held = {part.offer.name: part.nodes for part in here.parts}
    for part in target.parts:
        free, more = observation.free_nodes.get(part.offer.name), part.nodes - held.get(part.offer.name, 0)
        if free is not None and more > free:
            return f"{target.name} needs {more} more nodes, {free} are free"
    return (
        _too_slow(observation, policy, want)
        or _over_budget(observation, want)
        or _over_deadline(observation, want)
    )


def _was_refused(observation: Observation, want: Want) -> str | None:
    """Retry after a minute, then twice as long each time; retry an urgent move every minute."""
    found = observation.refused.get(want.target.name)
    if found is None:
        return None
    times = 1 if want.is_urgent else found.times
    pause_s = wait_s(times, first_s=REFUSED_FIRST_S, most_s=REFUSED_MOST_S)
    if found.ago_s >= pause_s:
        return None
    often = "once" if found.times == 1 else f"{found.times} times in a row"
    return f"the owner refused that {often}, {found.ago_s:.0f} s of {pause_s:.0f} s ago"


def _too_slow(observation: Observation, policy: Policy, want: Want) -> str | None:
    """A move must keep *min_speed* of the fastest known speed, or the current speed; urgent ones need not."""
    if policy.min_speed == 0 or want.is_urgent:
        return None
    view = outlook(observation, policy)
    there, here = view.slowest(want.target), view.speeds.get(observation.current.name)
    if there is None:
        return f"min_speed is {policy.min_speed:g}, and how fast {want.target.name} is is unknown"
    allowed = [
        item.name
        for item in (observation.current, *observation.candidates)
        if policy.min_nodes <= item.nodes <= policy.max_nodes
    ]
    fastest = max((view.speeds[name].mean for name in allowed if name in view.speeds), default=there.mean)
    if there.mean >= policy.min_speed * fastest or (here is not None and there.mean >= here.mean):
        return None
    share = f"{there.mean / fastest:.0%} as fast as the fastest known"
    return f"{want.target.name} would be {share}, min_speed is {policy.min_speed:.0%}"


def _over_budget(observation: Observation, want: Want) -> str | None:
    """A move must finish within the budget (90th percentile), or cost less than staying."""
    if observation.budget_usd is None:
        return None
    if observation.spent_usd is None:
        return "there is a budget, and what was spent is unknown"
    left = observation.budget_usd - observation.spent_usd
    if want.moving is None or want.moving.usd_high is None:
        return f"there is a budget, and what finishing on {want.target.name} costs is unknown"
    if want.moving.usd_high <= left or _is_cheaper(want.staying, want.moving):
        return None
    return (
        f"{want.target.name} may take {usd_text(want.moving.usd_high)} to finish, {usd_text(left)} are left"
    )


def _is_cheaper(staying: Estimate | None, moving: Estimate) -> bool:
    if staying is None or staying.usd is None or moving.usd is None:
        return False
    return moving.usd < staying.usd


def _over_deadline(observation: Observation, want: Want) -> str | None:
    """A move must finish before the deadline (90th percentile), or sooner than staying.

    One whose policy weighs moves has passed that policy's own guard, in which losses do not count: counting
    them would keep a stage off spot. To on-demand it must only be expected to finish in time.
    """
    if observation.deadline_left_s is None:
        return None
    left_h = observation.deadline_left_s / SECONDS_PER_HOUR
    is_guarded = want.weighs_moves and want.moving is not None
    if is_guarded and (has_spot(want.target) or (want.moving and want.moving.hours <= left_h)):
        return None
    if want.moving is None:
        return f"there is a deadline, and how long {want.target.name} takes is unknown"
    if want.moving.hours_high <= left_h:
        return None
    if want.staying is not None and want.moving.hours < want.staying.hours:
        return None
    return f"{want.target.name} may take {want.moving.hours_high:.3g} h to finish, {left_h:.3g} h are left"
