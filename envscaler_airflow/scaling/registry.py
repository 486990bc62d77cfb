"""Policies by name: ours, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from envscaler_airflow.scaling import POLICIES, Propose

GROUP = "envscaler_airflow.policies"
"""Entry points of functions ``(observation, policy) -> Proposal``; they run behind our guards."""


@cache
def all_policies() -> Mapping[str, Propose]:
    """Every policy that is installed when first asked; ours win over others of the same name."""
    brought: dict[str, Propose] = {point.name: point.load() for point in entry_points(group=GROUP)}
    return {**brought, **POLICIES}
