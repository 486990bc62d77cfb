"""Replay a recorded run under another policy, with the decisions and their estimated effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from envscaler_airflow.scaling import Check, ScalingPolicy, decide


def replay_run(
    checks: Iterable[Check],
    policy_name: str | None = None,
    *,
    policies: Mapping[str, ScalingPolicy] | None = None,
) -> dict[str, Any]:
    """Repeat the decision of every recorded check, under the recorded policy or another one.

    Up to the first decision that differs, the results are facts. After it, the run would have continued
    differently: the later checks still use the recorded observations and are labelled ``counterfactual``. The
    hours and $ of a move are estimates from the policy's own numbers.

    Raises:
        ValueError: No policy of that name.
    """
    rows: list[dict[str, Any]] = []
    is_fact = True
    wanted: Mapping[str, float] = {}
    for check in checks:
        observation, policy = check.observation, check.policy
        if policy_name is not None and policy_name != policy.name:
            policy = replace(policy, name=policy_name)
            observation = replace(observation, wanted=dict(wanted))
        decision = decide(observation, policy, policies=policies)
        wanted = decision.wanted
        same = (decision.action, decision.target.name) == (check.decision.action, check.decision.target.name)
        is_fact = is_fact and same
        rows.append(
            {
                "elapsed_s": observation.elapsed_s,
                "recorded": _said(check.decision.action, check.decision.target.name),
                "replayed": _said(decision.action, decision.target.name),
                "reason": decision.reason,
                "numbers": dict(decision.numbers),
                "counterfactual": not is_fact,
            }
        )
    return {"policy": policy_name, "jobs": rows, "summary": _summary(rows)}


def _said(action: str, target: str) -> str:
    return action if action == "keep" else f"{action} {target}"


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    different = [row for row in rows if row["recorded"] != row["replayed"]]
    return {
        "checks": len(rows),
        "different": len(different),
        "counterfactual": sum(row["counterfactual"] for row in rows),
        "first_different_s": different[0]["elapsed_s"] if different else None,
    }
