"""The planner's answers worked out again in plain loops over rows, for tests and benchmarks.

Shares nothing with the planner but the rows that it is given: no index, no order, no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]


def fits(row: Facts, want: Facts) -> bool:
    """One node of *row* meets *want*; both are plain dicts."""
    for need in ("cloud", "region", "instance_type"):
        if want.get(need) and row[need] != want[need]:
            return False
    if want.get("zone") and row["zone"] and row["zone"] != want["zone"]:
        return False
    if row["vcpus"] < want.get("vcpus", 0) or row["memory_gib"] < want.get("memory_gib", 0):
        return False
    if want.get("arch") and row["arch"] and row["arch"] != want["arch"]:
        return False
    if want.get("capacity", "auto") not in ("auto", row["capacity"]):
        return False
    return want.get("gpus", 0) == 0 or (row["gpus"] >= max(1, want["gpus"]) and fits_gpu(row, want))


def fits_gpu(row: Facts, want: Facts) -> bool:
    """Its GPU is of a requested type, maker and size."""
    if want.get("exact_gpus") and row["gpus"] != want["gpus"]:
        return False
    types = [name.lower() for name in want.get("gpu_types", [])]
    if types and row["gpu_name"].lower() not in types:
        return False
    if not types and row["gpu_name"].split()[0] in ("Inferentia", "Inferentia2", "Trainium", "Gaudi"):
        return False
    if not types and want.get("gpu_vendor"):
        is_amd = row["gpu_name"].startswith(("MI", "Radeon"))
        if is_amd != (want["gpu_vendor"] == "amd"):
            return False
    least, most = want.get("gpu_memory_gb"), want.get("gpu_memory_max_gb")
    if least is not None and (row["gpu_memory_gb"] is None or row["gpu_memory_gb"] < least):
        return False
    return most is None or (row["gpu_memory_gb"] is not None and row["gpu_memory_gb"] <= most)


def cheapest(rows: list[Facts], want: Facts) -> tuple[float, str] | None:
    """Least price of all nodes and the name of the first offer that has it; None when nothing fits.

    Among offers without a price the first by name, at infinity.
    """
    best = None
    for nodes in range(want.get("min_nodes", 1), want.get("max_nodes", want.get("min_nodes", 1)) + 1):
        for row in rows:
            if not fits(row, want):
                continue
            price = math.inf if row["usd"] is None else row["usd"] * nodes
            name = row["name"] if nodes == 1 else f"{nodes} x {row['name']}"
            if best is None or (price, name) < best:
                best = (price, name)
    return best


def least_objective(
    rows: list[Facts], want: Facts, *, hours_of: Callable[[Facts, int], float], hour_usd: float
) -> tuple[float, str] | None:
    """Least of price x hours + *hour_usd* x hours, with hours by ``hours_of(row, nodes)``; on demand only."""
    best = None
    for nodes in range(want.get("min_nodes", 1), want.get("max_nodes", want.get("min_nodes", 1)) + 1):
        for row in rows:
            if row["usd"] is None or not fits(row, want):
                continue
            hours = hours_of(row, nodes)
            worth = hours * row["usd"] * nodes + hour_usd * hours
            name = row["name"] if nodes == 1 else f"{nodes} x {row['name']}"
            if best is None or worth < best[0] - 1e-9 * best[0]:
                best = (worth, name)
    return best
