"""Policies by name, from entry points: built-in policies and those of other packages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NoReturn, cast

from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Allocation
from envscaler_airflow.planning.record import check_finite
from envscaler_airflow.scaling.decision import Proposal, ScalingPolicy, Want
from envscaler_airflow.scaling.observation import Observation

if TYPE_CHECKING:
    from envscaler_airflow.envspec.models import EnvSpec

GROUP = "envscaler_airflow.policies"
"""Entry points of :class:`ScalingPolicy` objects; all run behind the same guards."""
MAX_WANTS = 1000
"""Maximum number of moves that are read from one proposal. Chosen: ten times the offers of a large plan."""
MAX_NUMBERS = 1 << 16
"""Maximum bytes of numbers, as JSON. Chosen: a request contains them twice, together with the observation."""


@cache
def all_policies() -> Mapping[str, ScalingPolicy]:
    """Every installed policy, loaded once; a built-in one replaces others of the same name.

    If a policy of another package cannot be loaded, it proposes no moves and its proposal names the reason.
    """
    points = sorted(entry_points(group=GROUP), key=_is_ours)
    return {point.name: _loaded(point) for point in points}


def check_policy(spec: EnvSpec) -> None:
    """Reject a scaling policy that is not installed, without loading it.

    Raises:
        SpecError: No such policy is installed here.
    """
    if spec.scaling is None:
        return
    name = spec.scaling.policy
    known = sorted({point.name for point in entry_points(group=GROUP)})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"write {near[0]}" if near else f"write one of {', '.join(known)}"
        raise SpecError(
            f"scaling.policy: {name!r:.60} is not installed here; {fix}, or install the package that has it"
        )


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("envscaler_airflow.")


def _loaded(point: EntryPoint) -> ScalingPolicy:
    if _is_ours(point):
        return cast("ScalingPolicy", point.load())
    label = f"policy {point.name!r} ({point.value})"
    try:
        policy = point.load()
        fault = f"{label} is {policy!r:.80}; write ScalingPolicy({point.name!r}, propose)"
    except (Exception, SystemExit) as err:  # noqa: BLE001  (an edge: code of others)
        policy, fault = None, f"{label} cannot be loaded: {err!r:.500}"
    if not isinstance(policy, ScalingPolicy) or policy.name != point.name:
        policy = ScalingPolicy(
            point.name, lambda _seen, _policy: Proposal(reason=fault), simulated=partial(_refuse, fault)
        )
    return replace(policy, origin=point.value)


def _refuse(fault: str) -> NoReturn:
    raise SpecError(fault)


def checked(said: object, told: str, observation: Observation) -> Proposal:
    """The valid parts of the proposal *said*: they can be recorded, and the stage may run on the targets."""
    if not isinstance(said, Proposal):
        return Proposal(reason=f"{told} answered with {type(said).__name__}, not with a Proposal")
    wants = tuple(said.wants)[:MAX_WANTS]
    if not all(isinstance(want, Want) for want in wants):
        return Proposal(reason=f"{told} proposed something that is not a Want")
    try:
        wants = tuple(_told_again(want) for want in wants)
    except (AttributeError, TypeError, ValueError) as err:
        return Proposal(reason=f"{told} wants what cannot be recorded: {err!s:.200}")
    known = {offer for place in (observation.current, *observation.candidates) for offer in _offers(place)}
    mine = tuple(want for want in wants if known.issuperset(_offers(want.target)))
    if wants and not mine:
        return Proposal(reason=f"{told} wants {wants[0].target.name}, which is not a candidate of this stage")
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
    """*want* after a JSON round trip: every field has its type, no NaN, no negative cost."""
    again = Want.from_dict(json.loads(json.dumps(want.to_dict(), allow_nan=False)))
    for estimate in (again.staying, again.moving):
        if estimate is not None:
            check_finite(**estimate.to_dict())
    return again
