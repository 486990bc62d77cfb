"""A recorded check in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envscaler_airflow.scaling.decision import Check


def explain(check: Check) -> str:
    """What was decided, why, and the numbers behind it, a line each; for people."""
    seen, decision = check.observation, check.decision
    verb = {"keep": "keep", "move": "move to", "recommend": "would move to"}[decision.action]
    lines = [f"{verb} {decision.target.name}: {decision.reason}"]
    lines.append(
        f"  attempt {seen.attempt} of generation {seen.generation} on {seen.current.name}, "
        f"policy {decision.policy or check.policy.name}, {seen.elapsed_s:.0f} s after the first check"
    )
    if seen.units_done is not None:
        whole = "unknown" if seen.units_total is None else f"{seen.units_total:g}"
        lines.append(f"  {seen.units_done:g} of {whole} {seen.unit} done")
    if seen.budget_usd is not None:
        spent = "unknown" if seen.spent_usd is None else f"${seen.spent_usd:.4g}"
        lines.append(f"  spent {spent} of ${seen.budget_usd:.4g}")
    numbers = decision.numbers
    staying = numbers.get("staying")
    if isinstance(staying, Mapping):
        lines.append(_estimate(f"staying on {seen.current.name}", staying, numbers.get("speed"), seen.unit))
    for name, moving in sorted((numbers.get("moving") or {}).items()):
        lines.append(_estimate(f"moving to {name}", moving, moving.get("speed"), seen.unit))
    lines += [f"  {name}: speed unknown" for name in numbers.get("unknown_speed") or ()]
    lines += [f"  {item['reason']}" for item in numbers.get("metrics") or ()]
    return "\n".join(lines)


def _estimate(what: str, numbers: Mapping[str, Any], speed: Mapping[str, Any] | None, unit: str) -> str:
    parts = [f"{numbers['hours']:.3g} h ({numbers['hours_low']:.3g} to {numbers['hours_high']:.3g})"]
    usd, objective = numbers.get("usd"), numbers.get("objective")
    parts.append("price unknown" if usd is None else f"${usd:.4g}")
    if objective is not None:
        parts.append(f"objective {objective:.4g}")
    if speed:
        parts.append(f"{speed['mean']:.4g} +- {speed['stdev']:.2g} {unit}/s {speed['source']}")
    return f"  {what}: " + ", ".join(parts)
