"""Policies by name: ours, and those that other packages bring."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import check_finite
from envscaler_airflow.scaling import POLICIES, Propose
from envscaler_airflow.scaling.decision import Policy, Proposal, Want
from envscaler_airflow.scaling.observation import Observation

GROUP = "envscaler_airflow.policies"
"""Entry points of functions ``(observation, policy) -> Proposal``; they run behind our guards."""
MAX_WANTS = 1000
"""Most moves looked at of one proposal. Chosen: ten times the offers of a large plan."""
MAX_NUMBERS = 1 << 16
"""Most bytes of numbers, as JSON. Chosen: they stand twice in a request, with all that was seen."""


@cache
def all_policies() -> Mapping[str, Propose]:
    """Every policy that is installed when first asked; ours win over others of the same name.

    One that cannot be loaded, fails, or answers with what is no proposal moves nothing, and says why.
    """
    return {**{point.name: _brought(point) for point in entry_points(group=GROUP)}, **POLICIES}


def check_policy(spec: EnvSpec) -> None:
    """Refuse a scaling policy that neither we nor an installed package has; nothing is loaded for that.

    Raises:
        SpecError: No such policy is installed here.
    """
    if spec.scaling is None:
        return
    name = spec.scaling.policy
    known = sorted({*POLICIES, *(point.name for point in entry_points(group=GROUP))})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"write {near[0]}" if near else f"write one of {', '.join(known)}"
        raise SpecError(
            f"scaling.policy: {name!r:.60} is not installed here; {fix}, or install the package that has it"
        )


def _brought(point: EntryPoint) -> Propose:
    """The policy of another package, so that nothing it does ends a check or its owner's slice."""
    told = f"policy {point.name!r} ({point.value})"
    try:
        propose: Propose | None = point.load()
        fault = f"{told} cannot be called" if not callable(propose) else ""
    except (Exception, SystemExit) as err:  # noqa: BLE001  (an edge: code of others)
        propose, fault = None, f"{told} cannot be loaded: {err!r}"

    def guarded(observation: Observation, policy: Policy) -> Proposal:
        if propose is None or fault:
            return Proposal(reason=fault)
        try:
            return _checked(propose(observation, policy), told, observation)
        except (Exception, SystemExit) as err:  # noqa: BLE001  (same)
            return Proposal(reason=f"{told} failed: {err!r:.500}")

    return guarded


def _checked(said: object, told: str, observation: Observation) -> Proposal:
    """*said*, as far as it is a proposal that can be recorded, of places that the stage may run on."""
    if not isinstance(said, Proposal):
        return Proposal(reason=f"{told} answered with {type(said).__name__}, not with a Proposal")
    wants = tuple(said.wants)[:MAX_WANTS]
    if not all(isinstance(want, Want) for want in wants):
        return Proposal(reason=f"{told} wants what is no Want")
    try:
        wants = tuple(_told_again(want) for want in wants)
    except (AttributeError, TypeError, ValueError) as err:
        return Proposal(reason=f"{told} wants what cannot be recorded: {err!s:.200}")
    known = {offer for place in (observation.current, *observation.candidates) for offer in _offers(place)}
    mine = tuple(want for want in wants if known.issuperset(_offers(want.target)))
    if wants and not mine:
        return Proposal(reason=f"{told} wants {wants[0].target.name}, which is no candidate of this stage")
    try:
        numbers = json.loads(json.dumps(dict(said.numbers), allow_nan=False))
        size = len(json.dumps(numbers))
    except (TypeError, ValueError) as err:
        return Proposal(reason=f"{told} has numbers that cannot be recorded: {err}")
    if size > MAX_NUMBERS:
        return Proposal(reason=f"{told} has {size} bytes of numbers, {MAX_NUMBERS} can be recorded")
    return Proposal(mine, str(said.reason), numbers)


def _offers(place: Allocation) -> set[str]:
    return {part.offer.name for part in place.parts}


def _told_again(want: Want) -> Want:
    """*want* as its record reads: every field of its type, no NaN, nothing that costs less than nothing."""
    again = Want.from_dict(json.loads(json.dumps(want.to_dict(), allow_nan=False)))
    for estimate in (again.staying, again.moving):
        if estimate is not None:
            check_finite(**estimate.to_dict())
    return again
