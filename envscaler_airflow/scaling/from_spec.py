"""Convert the spec's ``scaling`` section to a policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envscaler_airflow.planning import Offer, Speedup, matched
from envscaler_airflow.scaling.decision import PhaseNeed, Policy, ThresholdRule

if TYPE_CHECKING:
    from envscaler_airflow.envspec import EnvSpec
    from envscaler_airflow.envspec.running import MetricRule

_COUNT = re.compile(r"\d+ x ")
"""Prefix of the name of an allocation of several nodes."""


def policy_of(spec: EnvSpec, *, value_of_hour: float = 0.0) -> Policy:
    """The policy of *spec*; without a ``scaling`` section, its number of nodes and the defaults.

    Args:
        spec: Resolved.
        value_of_hour: USD that an hour is worth, from the strategy; see ``planning.value_of_hour``.
    """
    bounds, block = spec.node_bounds, spec.scaling
    cap = spec.resources.alternatives[0].limits.memory_bytes
    group = 1 if spec.distributed is None else spec.distributed.model_parallel
    if block is None:
        return Policy(
            min_nodes=bounds.min, max_nodes=bounds.max, value_of_hour=value_of_hour, model_parallel=group
        )
    return Policy(
        name=block.policy,
        min_nodes=bounds.min,
        max_nodes=bounds.max,
        value_of_hour=value_of_hour,
        tolerance=block.tolerance,
        stabilization_s=block.stabilization_s,
        cooldown_s=block.cooldown_s,
        warmup_s=block.warmup_s,
        min_speed=block.min_speed,
        min_epochs_between=block.min_epochs_between,
        max_moves=block.max_moves,
        model_parallel=group,
        recommend_only=block.recommend_only,
        rules=tuple(_rule(rule) for rule in block.all_rules),
        match=block.match,
        phases=tuple(
            PhaseNeed(name, need.nodes, None if need.gpu is None else need.gpu.memory_gb)
            for name, need in sorted(block.phases.items())
        ),
        memory_cap_gib=None if cap is None else cap / (1 << 30),
    )


def speedups_of(spec: EnvSpec) -> tuple[Speedup, ...]:
    """Speed ratios that *spec* states."""
    if spec.scaling is None:
        return ()
    return tuple(
        Speedup(item.offer, item.relative_to, item.mean, item.stdev, item.source)
        for item in spec.scaling.speedup
    )


def speedup_warning(spec: EnvSpec, offers: Sequence[Offer]) -> str | None:
    """Warning about names in the speed ratios of *spec* that match no offer of a backend; None: all match.

    Args:
        spec: Resolved.
        offers: All offers of one backend. Names of other backends are skipped.
    """
    ratios = speedups_of(spec)
    stated = {name for item in ratios for name in (item.offer, item.relative_to)}
    counts = {"", *(found.group() for name in stated if (found := _COUNT.match(name)))}
    clouds = {offer.cloud for offer in offers}
    _, unmatched = matched(ratios, (f"{count}{offer.name}" for offer in offers for count in counts))
    wrong = [name for name in unmatched if " + " not in name and _cloud(name) in clouds]
    if not wrong:
        return None
    places = ", ".join(sorted(offer.name for offer in offers))
    return f"scaling.speedup names {', '.join(wrong)}, which matches no offer: write one of {places}"


def _cloud(name: str) -> str:
    return _COUNT.sub("", name).partition("/")[0]


def _rule(rule: MetricRule) -> ThresholdRule:
    return ThresholdRule(
        rule.metric,
        above=rule.above,
        below=rule.below,
        samples=rule.hold.samples or 1,
        for_s=rule.hold.seconds or 0.0,
        step=rule.change if rule.below is None else -rule.change,
        across=rule.across,
        ahead_s=rule.ahead_s,
        query=rule.prometheus,
    )
