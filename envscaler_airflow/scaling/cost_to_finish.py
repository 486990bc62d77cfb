"""Cost to finish: stay or move, by which one finishes the remaining work at the lower objective."""

from __future__ import annotations

from typing import Any

from envscaler_airflow.planning import Allocation, Estimate
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling.decision import Policy, Proposal, ScalingPolicy, Want
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import Outlook, outlook


def cost_to_finish(observation: Observation, policy: Policy) -> Proposal:
    """Propose every allocation whose objective beats staying by the tolerance, best first.

    The objective is expected cost + value_of_hour x expected time over the work left, including the move's
    overhead. An allocation that the stage has not used has its stated speed, whose uncertainty adds expected
    time. Once the stage has run there, the measured speed replaces it, so that a wrong statement is corrected
    by moving back. Ties are resolved by time, then by name.

    If staying would miss a deadline (90th percentile), allocations that meet it come first, and they need not
    reach the tolerance.
    """
    view = outlook(observation, policy)
    if view.staying is None:
        return Proposal(reason=view.unknown, numbers={"unit": observation.unit})
    estimates = {item.name: (item, view.moving(item)) for item in observation.others()}
    known = [(item, moving) for item, moving in estimates.values() if moving is not None]
    numbers = _numbers(view, estimates)
    if view.staying.objective is None:
        return Proposal(reason=f"the price of {observation.current.name} is unknown", numbers=numbers)
    if view.staying.objective == 0 and observation.units_left:
        reason = "staying costs nothing and an hour is worth nothing; set value_of_hour to have time count"
        return Proposal(reason=reason, numbers=numbers)
    wants = [want for item, moving in known if (want := _want(view, view.staying, item, moving))]
    wants.sort(key=lambda want: _rank(want, observation.deadline_left_s))
    return Proposal(tuple(wants), _why_none(view, view.staying, known), numbers)


def _want(view: Outlook, staying: Estimate, target: Allocation, moving: Estimate) -> Want | None:
    if staying.objective is None or moving.objective is None:
        return None
    left_s = view.observation.deadline_left_s
    saved = staying.objective - moving.objective
    if _is_late(staying, left_s) and (not _is_late(moving, left_s) or _is_faster(staying, moving, view)):
        reason = (
            f"{target.name} would finish in {moving.hours:.2f} h, staying in {staying.hours:.2f} h, "
            f"and {(left_s or 0) / SECONDS_PER_HOUR:.2f} h are left"
        )
        return Want(target, reason, staying, moving)
    if _is_late(moving, left_s) or not saved > view.policy.tolerance * staying.objective:
        return None
    reason = (
        f"{target.name} saves {usd_text(saved)} of {usd_text(staying.objective)} "
        f"({_usd(moving)} and {moving.hours:.3g} h instead of {_usd(staying)} and {staying.hours:.3g} h)"
    )
    return Want(target, reason, staying, moving)


def _usd(estimate: Estimate) -> str:
    return "$?" if estimate.usd is None else usd_text(estimate.usd)


def _is_late(estimate: Estimate, left_s: float | None) -> bool:
    return left_s is not None and estimate.hours_high * SECONDS_PER_HOUR > left_s


def _is_faster(staying: Estimate, moving: Estimate, view: Outlook) -> bool:
    return moving.hours < (1 - view.policy.tolerance) * staying.hours


def _rank(want: Want, left_s: float | None) -> tuple[bool, float, float, str]:
    moving = want.moving
    if moving is None or moving.objective is None:
        return (True, 0.0, 0.0, want.target.name)
    is_late = _is_late(moving, left_s)
    return (is_late, moving.hours if is_late else moving.objective, moving.hours, want.target.name)


def _why_none(view: Outlook, staying: Estimate, known: list[tuple[Allocation, Estimate]]) -> str:
    others = view.observation.others()
    if not others:
        return f"there is nothing else to move to{view.note}"
    if not known:
        names = ", ".join(item.name for item in others)
        return f"no speed is known for {names}; state a speedup in the spec or measure one{view.note}"
    return (
        f"no move saves more than {view.policy.tolerance:.0%} of {usd_text(staying.objective or 0.0)}, "
        f"the move's {view.observation.overheads.start_s:.0f} s inside{view.note}"
    )


def _numbers(view: Outlook, estimates: dict[str, tuple[Allocation, Estimate | None]]) -> dict[str, Any]:
    seen, here = view.observation, view.observation.current
    return {
        "unit": seen.unit,
        "units_left": seen.units_left,
        "value_of_hour": view.policy.value_of_hour,
        "staying": view.staying.to_dict() if view.staying else None,
        "speed": view.speeds[here.name].to_dict(),
        "moving": {
            name: {"speed": view.speeds[name].to_dict(), **moving.to_dict()}
            for name, (_, moving) in estimates.items()
            if moving is not None
        },
        "unknown_speed": [name for name, (_, moving) in estimates.items() if moving is None],
    }


COST_TO_FINISH = ScalingPolicy("cost-to-finish", cost_to_finish)
