"""A human-readable text for a recorded check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.scaling.decision import Check
from envscaler_airflow.scaling.observation import Observation


def explain(check: Check) -> str:
    """The decision, the reason, and the numbers behind it, one per line; human-readable."""
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
        spent = "unknown" if seen.spent_usd is None else usd_text(seen.spent_usd)
        lines.append(f"  spent {spent} of {usd_text(seen.budget_usd)}")
    try:
        lines += _in_words(decision.numbers, seen)
    except (AttributeError, KeyError, TypeError, ValueError):  # from another package or version
        lines += [f"  {name}: {value}" for name, value in sorted(decision.numbers.items()) if _is_one(value)]
    return "\n".join(lines)


def _in_words(numbers: Mapping[str, Any], seen: Observation) -> list[str]:
    """The numbers of a built-in policy as text, and the single values of a policy of another package."""
    lines = []
    staying = numbers.get("staying")
    if isinstance(staying, Mapping):
        lines.append(_estimate(f"staying on {seen.current.name}", staying, numbers.get("speed"), seen.unit))
    for name, moving in sorted((numbers.get("moving") or {}).items()):
        lines.append(_estimate(f"moving to {name}", moving, moving.get("speed"), seen.unit))
    lines += [f"  {name}: speed unknown" for name in numbers.get("unknown_speed") or ()]
    lines += [f"  {item['reason']}" for item in numbers.get("metrics") or ()]
    lines += [f"  {words}" for words in (*_deadline(numbers), *_phase(numbers), *_vertical(numbers))]
    others = (item for item in sorted(numbers.items()) if item[0] not in _TOLD)
    return lines + [f"  {name}: {value}" for name, value in others if _is_one(value)]


_TOLD = frozenset(
    {
        *("staying", "moving", "speed", "unknown_speed", "metrics", "unit", "units_left", "value_of_hour"),
        *("slack_s", "start_s", "ticks_of_on_demand", "phase", "phase_from", "next", "lasts_s"),
        *("time_to_out_of_memory_s", "memory_gib", "vcpus", "asked_memory_gib", "asked_vcpus"),
    }
)
"""Numbers of built-in policies that the text above or the reason already contains."""


def _is_one(value: object) -> bool:
    """True for a value that fits on a line."""
    return isinstance(value, str | int | float)


def _deadline(numbers: Mapping[str, Any]) -> list[str]:
    found = []
    if (slack := numbers.get("slack_s")) is not None:
        found.append(f"{slack:.0f} s may still be lost; a start takes {numbers.get('start_s', 0):.0f} s")
    if ticks := numbers.get("ticks_of_on_demand"):
        found.append(
            f"expected cost to finish by the table: {ticks['spot']:.4g} ticks of on-demand with spot now, "
            f"{ticks['on_demand']:.4g} without"
        )
    return found


def _phase(numbers: Mapping[str, Any]) -> list[str]:
    if "phase_from" not in numbers:
        return []
    found = [f"phase {numbers.get('phase') or 'unknown'} ({numbers['phase_from']})"]
    if numbers.get("next"):
        found.append(f"next phase, by earlier runs: {numbers['next']}")
    if numbers.get("lasts_s") is not None:
        found.append(f"it lasts {numbers['lasts_s']:.0f} s, by earlier runs")
    return found


def _vertical(numbers: Mapping[str, Any]) -> list[str]:
    found = []
    for name, what in (("memory_gib", "memory"), ("vcpus", "CPU")):
        used = numbers.get(name)
        if not isinstance(used, Mapping) or used.get("peak") is None:
            continue
        text = f"{what}: peak {used['peak']:.0f} % of the machine's in the last 5 min"
        if used.get("long_peak") is not None:
            text += f", {used['long_peak']:.0f} % in 20 min"
        found.append(text)
    if (left := numbers.get("time_to_out_of_memory_s")) is not None:
        found.append(f"memory rises steadily: full in {left:.0f} s")
    return found


def _estimate(what: str, numbers: Mapping[str, Any], speed: Mapping[str, Any] | None, unit: str) -> str:
    parts = [f"{numbers['hours']:.3g} h ({numbers['hours_low']:.3g} to {numbers['hours_high']:.3g})"]
    usd, objective = numbers.get("usd"), numbers.get("objective")
    parts.append("price unknown" if usd is None else usd_text(usd))
    if objective is not None:
        parts.append(f"objective {objective:.4g}")
    if speed:
        parts.append(f"{speed['mean']:.4g} +- {speed['stdev']:.2g} {unit}/s {speed['source']}")
    return f"  {what}: " + ", ".join(parts)
