"""Cost to finish: stay, or move where finishing the work left is expected to cost the least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.planning import Allocation, Estimate
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.planning.objective import SECONDS_PER_HOUR
from envscaler_airflow.scaling import probes
from envscaler_airflow.scaling.decision import COOLDOWN_S, Policy, Proposal, ScalingPolicy, Want
from envscaler_airflow.scaling.history import MOST_LOOKS
from envscaler_airflow.scaling.observation import Observation
from envscaler_airflow.scaling.outlook import Outlook, outlook

PATIENCE = 3.0
"""The cool-down is this many restarts, times the cost of a restart over what the move saves. Chosen: a move
that saves ten restarts waits for a third of one; one that saves a tenth of a restart waits for thirty."""


SHOWN = 10
"""Options whose numbers a check records, besides those that it wants. Chosen: the best ones explain it."""


def cost_to_finish(observation: Observation, policy: Policy) -> Proposal:
    """Propose every allocation that is expected to save enough over staying, best first.

    The objective is expected cost + value_of_hour x expected time over the work left. A place whose speed was
    measured must save less than a new one, since nothing is left to find out. A new place, whose speed is
    stated or learned from the places tried, counts with the way back to the best known place, in case it is
    slower than believed. Every place that disappointed raises the bar for new ones, and for itself.

    If staying would miss a deadline (90th percentile), allocations that meet it come first, and they need not
    save anything.
    """
    view = outlook(observation, policy)
    staying = view.staying
    if staying is None:
        return Proposal(reason=view.unknown, numbers={"unit": observation.unit})
    ago = _judged_ago(view, staying)
    if ago is None:
        return Proposal(reason=_too_few(view), numbers=_numbers(view, (), ()))
    if ago:
        return Proposal(reason=_none_saves(view, staying, ago), numbers=_numbers(view, (), ()))
    options = _options(view)
    wants = _wants(view, staying, options)
    return Proposal(tuple(wants), _why_none(view, staying, options), _numbers(view, options, wants))


@dataclass(frozen=True, slots=True)
class _Option:
    """A possible move.

    Attributes:
        target: Where to.
        expected: Objective, with the way back if its speed is not known; None when the price is unknown.
        must_save: Fraction of the objective of staying.
        restart: Objective of the restart alone.
    """

    target: Allocation
    expected: float | None
    must_save: float
    restart: float


def _options(view: Outlook) -> list[_Option]:
    """Candidates whose speed is known, stated or learned, the lowest expected objective first."""
    seen, restart_s = view.observation, view.observation.overheads.start_s
    places = {name: place for name in view.beliefs if name in view.places and (place := _place(view, name))}
    expected: Mapping[str, float] = {}
    if (here := places.get(seen.current.name)) is not None:
        expected = probes.expected_objectives(list(places.values()), here, restart_s=restart_s)
    tolerances, later, found = _tolerances(view.policy), _later(view), []
    for item in seen.others():
        name = item.name
        if name not in view.speeds or name in later:
            continue
        place = places.get(name)
        saves = 0.0 if place is None else probes.must_save(place, seen.history.disappointed, tolerances)
        restart = 0.0 if place is None else place.per_s * restart_s
        found.append(_Option(item, expected.get(name), saves, restart))
    return sorted(found, key=lambda item: (item.expected is None, item.expected or 0.0))


def _place(view: Outlook, name: str) -> probes.Place | None:
    finishing, price = view.finishing(name), view.places[name].usd_per_hour
    if finishing is None or finishing.objective is None or price is None:
        return None
    belief = view.beliefs[name]
    per_s = (price + view.policy.value_of_hour) / SECONDS_PER_HOUR
    return probes.Place(name, finishing.objective, belief.stdev, per_s, belief.is_known)


def _later(view: Outlook) -> set[str]:
    """Places of a new type at another count whose type can be tried first: one property at a time."""
    if _is_short(view):
        return set()
    shapes = view.shapes
    tried = {shapes[name].gpu for name in view.observation.measured if name in shapes}
    first = (1, shapes[view.observation.current.name].gpus)
    can_be_first = {shape.gpu for shape in shapes.values() if shape.gpus in first} - tried
    return {
        name
        for name, belief in view.beliefs.items()
        if not belief.is_known
        and not belief.is_stated
        and shapes[name].gpu in can_be_first
        and shapes[name].gpus not in first
    }


def _is_short(view: Outlook) -> bool:
    left_s = 0.0 if view.staying is None else view.staying.train_s
    return left_s < probes.SHORT_RESTARTS * view.observation.overheads.start_s


def _is_measured(view: Outlook) -> bool:
    """True when the training reports its steps, so that the present place is known by looks."""
    return view.observation.current.name in view.observation.measured


def _looks_needed(view: Outlook) -> int:
    return 1 if _is_short(view) else probes.SETTLE


def _too_few(view: Outlook) -> str:
    seen = view.observation
    return f"{seen.current.name} is measured by {seen.history.looks} of {_looks_needed(view)} checks"


def _judged_ago(view: Outlook, staying: Estimate) -> int | None:
    """Looks since the moves were last judged; 0: they are judged now; None: there were too few looks.

    A place is judged once it has the looks that a move needs, and again when as many looks have passed as its
    measurement is the mean of. A move that is wanted, or a deadline that would be missed, is judged at once.
    """
    seen = view.observation
    if not _is_measured(view) or not seen.history.here:
        return 0  # no steps are reported, or the check is of a version that did not count looks
    over = seen.history.looks - _looks_needed(view)
    if over < 0:
        return None
    is_urgent = bool(seen.wanted) or _is_late(staying, seen.deadline_left_s)
    return 0 if is_urgent else over % MOST_LOOKS


def _tolerances(policy: Policy) -> tuple[float, float]:
    told = policy.tolerance
    return (probes.KNOWN, probes.NEW) if told is None else (told, told)


def _wants(view: Outlook, staying: Estimate, options: Sequence[_Option]) -> list[Want]:
    if not staying.objective:
        return []
    left_s, found = view.observation.deadline_left_s, []
    for option in options:
        if left_s is None and not _saves(staying, option):
            continue
        moving = view.moving(option.target)
        if moving is not None and (want := _want(view, staying, option, moving)) is not None:
            rank = moving.hours if _is_late(moving, left_s) else option.expected
            found.append(((_is_late(moving, left_s), rank, moving.hours, option.target.name), want))
    return [want for _, want in sorted(found, key=lambda pair: pair[0])]


def _saves(staying: Estimate, option: _Option) -> bool:
    if staying.objective is None or option.expected is None:
        return False
    return staying.objective - option.expected > option.must_save * staying.objective


def _want(view: Outlook, staying: Estimate, option: _Option, moving: Estimate) -> Want | None:
    target, left_s = option.target, view.observation.deadline_left_s
    if staying.objective is None or option.expected is None:
        return None
    if _is_late(staying, left_s) and (not _is_late(moving, left_s) or _is_faster(staying, moving, view)):
        reason = (
            f"{target.name} would finish in {moving.hours:.2f} h, staying in {staying.hours:.2f} h, "
            f"and {(left_s or 0) / SECONDS_PER_HOUR:.2f} h are left"
        )
        return Want(target, reason, staying, moving)
    if _is_late(moving, left_s) or not _saves(staying, option):
        return None
    saved = staying.objective - option.expected
    reason = (
        f"{target.name} saves {usd_text(saved)} of {usd_text(staying.objective)} "
        f"({_usd(moving)} and {moving.hours:.3g} h instead of {_usd(staying)} and {staying.hours:.3g} h)"
    )
    cooldown_s = min(COOLDOWN_S, PATIENCE * view.observation.overheads.start_s * option.restart / saved)
    return Want(
        target,
        reason,
        staying,
        moving,
        cooldown_s=cooldown_s,
        stabilization_s=0.0 if view.observation.current.name in view.observation.measured else None,
    )


def _usd(estimate: Estimate) -> str:
    return "$?" if estimate.usd is None else usd_text(estimate.usd)


def _is_late(estimate: Estimate, left_s: float | None) -> bool:
    return left_s is not None and estimate.hours_high * SECONDS_PER_HOUR > left_s


def _is_faster(staying: Estimate, moving: Estimate, view: Outlook) -> bool:
    return moving.hours < (1 - view.policy.least_saving) * staying.hours


def _why_none(view: Outlook, staying: Estimate, options: Sequence[_Option]) -> str:
    seen, others = view.observation, view.observation.others()
    if staying.objective is None:
        return f"the price of {seen.current.name} is unknown"
    if staying.objective == 0 and seen.units_left:
        return "staying costs nothing and an hour is worth nothing; set value_of_hour to have time count"
    if not others:
        return f"there is nothing else to move to{view.note}"
    if not options:
        names = ", ".join(item.name for item in others)
        return f"no speed is known for {names}; state a speedup in the spec or measure one{view.note}"
    return _none_saves(view, staying, 0)


def _none_saves(view: Outlook, staying: Estimate, ago: int) -> str:
    """The reason for staying; with the same words at every check, so that they are recorded as one."""
    known, new = _tolerances(view.policy)
    bars = f"{known:.0%}" if known == new else f"{known:.0%} (a known place) or {new:.0%} (a new one)"
    judged = f"; judged {ago} checks ago" if _is_measured(view) else ""
    restart_s = view.observation.overheads.start_s
    return (
        f"no move saves more than {bars} of {usd_text(staying.objective or 0.0)}, "
        f"the move's {restart_s:.0f} s inside{judged}{view.note}"
    )


def _numbers(view: Outlook, options: Sequence[_Option], wants: Sequence[Want]) -> dict[str, Any]:
    """Inputs and results, with the options that are wanted and the :data:`SHOWN` next best ones."""
    seen, wanted = view.observation, {want.target.name for want in wants}
    shown = [option for at, option in enumerate(options) if at < SHOWN or option.target.name in wanted]
    return {
        "unit": seen.unit,
        "units_left": seen.units_left,
        "value_of_hour": view.policy.value_of_hour,
        "staying": view.staying.to_dict() if view.staying else None,
        "speed": view.speeds[seen.current.name].to_dict(),
        "moving": {
            option.target.name: {
                "speed": view.speeds[option.target.name].to_dict(),
                "must_save": option.must_save,
                **({} if option.expected is None else {"expected": option.expected}),
                **moving.to_dict(),
            }
            for option in shown
            if (moving := view.moving(option.target)) is not None
        },
        "unknown_speed": [item.name for item in seen.others() if item.name not in view.speeds],
    }


COST_TO_FINISH = ScalingPolicy("cost-to-finish", cost_to_finish)
"""How ``scaling.policy: cost-to-finish``, the default, decides."""
