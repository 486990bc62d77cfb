"""What no policy may do: checked in one place, around all of them."""

from __future__ import annotations

from envscaler_airflow.planning import Estimate
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.decision import Policy, Want
from envscaler_airflow.scaling.observation import Observation


def holds_all(observation: Observation, policy: Policy) -> str | None:
    """Why nothing at all may be moved now; None: it may."""
    since_s, since_epochs = observation.since_move_s, observation.since_move_epochs
    if observation.health != "ok":
        return f"the stage's health is {observation.health}"
    if observation.phase != "running":
        return f"the stage is {observation.phase}, not running"
    if observation.pending is not None:
        return f"one action at a time: {observation.pending}"
    if policy.max_moves is not None and observation.moves >= policy.max_moves:
        return f"{observation.moves} moves were made, max_moves is {policy.max_moves}"
    if since_s is not None and since_s < policy.cooldown_s:
        return f"cool-down: {since_s:.0f} s of {policy.cooldown_s:.0f} s since the last move"
    if since_epochs is not None and since_epochs < policy.min_epochs_between:
        return f"{since_epochs} epochs of {policy.min_epochs_between} since the last move"
    return None


def holds(observation: Observation, policy: Policy, want: Want) -> str | None:
    """Why this move may not be made; None: it may."""
    target, here = want.target, observation.current
    if target.name == here.name:
        return f"the stage is on {here.name} already"
    if not policy.min_nodes <= target.nodes <= policy.max_nodes:
        return f"{target.name} is outside {policy.min_nodes} to {policy.max_nodes} nodes"
    if target.nodes * max(1, target.offer.gpus) % policy.model_parallel:
        return f"{target.name} does not hold whole model-parallel groups of {policy.model_parallel}"
    held = {part.offer.name: part.nodes for part in here.parts}
    for part in target.parts:
        free, more = observation.free_nodes.get(part.offer.name), part.nodes - held.get(part.offer.name, 0)
        if free is not None and more > free:
            return f"{target.name} needs {more} more nodes, {free} are free"
    return _over_budget(observation, want) or _over_deadline(observation, want)


def _over_budget(observation: Observation, want: Want) -> str | None:
    """A move must end within the budget (90th percentile), or cost less than staying."""
    if observation.budget_usd is None:
        return None
    if observation.spent_usd is None:
        return "there is a budget, and what was spent is unknown"
    left = observation.budget_usd - observation.spent_usd
    if want.moving is None or want.moving.usd_high is None:
        return f"there is a budget, and what finishing on {want.target.name} costs is unknown"
    if want.moving.usd_high <= left or _is_cheaper(want.staying, want.moving):
        return None
    return f"{want.target.name} may take ${want.moving.usd_high:.4g} to finish, ${left:.4g} are left"


def _is_cheaper(staying: Estimate | None, moving: Estimate) -> bool:
    if staying is None or staying.usd is None or moving.usd is None:
        return False
    return moving.usd < staying.usd


def _over_deadline(observation: Observation, want: Want) -> str | None:
    """A move must finish before the deadline (90th percentile), or sooner than staying."""
    if observation.deadline_left_s is None:
        return None
    left_h = observation.deadline_left_s / SECONDS_PER_HOUR
    if want.moving is None:
        return f"there is a deadline, and how long {want.target.name} takes is unknown"
    if want.moving.hours_high <= left_h:
        return None
    if want.staying is not None and want.moving.hours < want.staying.hours:
        return None
    return f"{want.target.name} may take {want.moving.hours_high:.3g} h to finish, {left_h:.3g} h are left"
