"""Explain why nothing fits: the offers that come nearest to the requirements, for each need."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from envscaler_airflow.planning.data import DataPlace
from envscaler_airflow.planning.offers import Allocation, CapacityType, InstanceType
from envscaler_airflow.planning.planner import Rejected
from envscaler_airflow.planning.requirements import (
    Misfit,
    Requirements,
    fits_node,
    fits_place,
    misfits,
    node_counts,
)
from envscaler_airflow.planning.table import CAPACITIES, UNKNOWN, OfferTable


def nearest_misses(
    needs: Sequence[Requirements],
    table: OfferTable,
    is_in: Sequence[bool],
    *,
    limit: int,
) -> list[Rejected]:
    """The kinds that miss least, one row each, nearest first, including the nearest one for each need.

    Args:
        needs: Alternatives; each kind is compared with the one that it misses least.
        table: Offers.
        is_in: Whether each place counts.
        limit: Maximum number of results.
    """
    found: list[tuple[int, float, int, str, Requirements]] = []
    has_gpus = any(kind.gpus >= 1 for kind in table.kinds)
    for need in needs:
        wanted = {name.casefold() for name in need.gpu_types}
        for number, kind in enumerate(table.kinds):
            if need.gpus and has_gpus and kind.gpus < 1:
                continue  # not a near miss if others have GPUs
            missed, lacking, first = _missed(need, kind, wanted)
            found.append((missed, lacking, number, first, need))
    found.sort(key=lambda item: item[:3])
    rejected: dict[str, Rejected] = {}
    by_need: dict[str, int] = {}
    for missed, _, number, first, need in found:
        if len(rejected) >= limit or (rejected and missed > 2):
            break
        # At most half of the results are for the same need, so that the other needs are visible too.
        if by_need.get(first, 0) >= max(1, limit // 2):
            continue
        item = _rejected(need, table, number, is_in)
        if item is not None:
            by_need[first] = by_need.get(first, 0) + 1
            rejected.setdefault(item.allocation.name, item)
    return sorted(rejected.values(), key=lambda item: item.distance)


def _missed(need: Requirements, kind: InstanceType, wanted: set[str]) -> tuple[int, float, str]:
    """Coarse filter: number of needs of one node that are missed, sum of shortfalls, and first need."""
    missed, lacking, first = 0, 0.0, ""
    if kind.vcpus < need.vcpus:
        missed, lacking, first = 1, 1 - kind.vcpus / need.vcpus, "cpu"
    if kind.memory_gib < need.memory_gib:
        missed, lacking, first = (
            missed + 1,
            lacking + 1 - kind.memory_gib / need.memory_gib,
            first or "memory",
        )
    if need.instance_type not in (None, kind.instance_type):
        missed, lacking, first = missed + 1, lacking + 1, first or "instance_type"
    if need.gpus:
        found = _missed_gpus(need, kind, wanted)
        missed, lacking, first = missed + found[0], lacking + found[1], first or found[2]
    if need.arch is not None and kind.arch not in (None, need.arch):
        missed, lacking, first = missed + 1, lacking + 1, first or "arch"
    return missed, lacking, first


def _missed_gpus(need: Requirements, kind: InstanceType, wanted: set[str]) -> tuple[int, float, str]:
    if kind.gpu_name is None or kind.gpus < 1:
        return 2, 2.0, "gpu.count"
    missed, lacking, first = 0, 0.0, ""
    if kind.gpus < need.gpus:
        missed, lacking, first = 1, 1 - kind.gpus / need.gpus, "gpu.count"
    if need.exact_gpus and int(kind.gpus) > need.gpus:
        missed, lacking, first = missed + 1, lacking + 1 - need.gpus / kind.gpus, first or "gpu.count"
    if wanted and kind.gpu_name.casefold() not in wanted:
        missed, lacking, first = missed + 1, lacking + 1, first or "gpu.type"
    if need.gpu_memory_gb is not None and (kind.gpu_memory_gb or 0.0) < need.gpu_memory_gb:
        short = 1 - (kind.gpu_memory_gb or 0.0) / need.gpu_memory_gb
        missed, lacking, first = missed + 1, lacking + short, first or "gpu.memory"
    return missed, lacking, first


def _rejected(need: Requirements, table: OfferTable, number: int, is_in: Sequence[bool]) -> Rejected | None:
    """The first offer of a kind in scope, with everything that it misses; None if it fits or is absent."""
    capacities: tuple[CapacityType, ...] = (
        ("spot", "on-demand") if need.capacity == "spot" else ("on-demand",)
    )
    best: Rejected | None = None
    for capacity in capacities:
        rows = [row for row in table.rows_of(number, capacity) if is_in[table.place[row]]]
        if not rows:
            continue
        row = next((row for row in rows if fits_place(need, *table.places[table.place[row]])), rows[0])
        offer = table.offer(number, row, capacity)
        found = misfits(need, offer)
        if not found and not node_counts(need, offer.gpus):
            text = f"no number of nodes makes up complete model-parallel groups of {need.model_parallel} GPUs"
            found = (Misfit("model_parallel", text),)
        if not found:
            return None
        item = Rejected(Allocation(offer, need.min_nodes), found)
        best = item if best is None else min(best, item, key=lambda one: one.distance)
    return best


def unknown_gpus(needs: Sequence[Requirements], table: OfferTable) -> list[str]:
    """A sentence for each requested GPU that no offer has, with the nearest names."""
    names = sorted({kind.gpu_name for kind in table.kinds if kind.gpu_name is not None and kind.gpus >= 1})
    lower = {name.casefold(): name for name in names}
    notes = []
    for wanted in dict.fromkeys(name for need in needs for name in need.gpu_types):
        if wanted.casefold() in lower:
            continue
        near = difflib.get_close_matches(wanted.casefold(), lower, n=3, cutoff=0.5)
        hint = f"there are {', '.join(names)}" if names else "none has any"
        if near:
            hint = f"did you mean {' or '.join(lower[name] for name in near)}?"
        notes.append(f"no offer has a GPU named {wanted}: {hint}")
    return notes


def unpriced_offers(
    needs: Sequence[Requirements],
    table: OfferTable,
    has_region: Callable[[str, str], bool],
    data: Sequence[DataPlace] = (),
) -> dict[tuple[str, str], list[str]]:
    """Regions, by (cloud, capacity type), with offers that fit but have an unknown price."""
    found: dict[tuple[str, str], set[str]] = {}
    for need in needs:
        capacities = [name for name in CAPACITIES if need.capacity in ("auto", name)]
        for number, kind in enumerate(table.kinds):
            if not fits_node(need, kind):
                continue
            for capacity in capacities:
                prices = table.usd if capacity == "on-demand" else table.spot_usd
                for row in reversed(table.rows_of(number, capacity)):
                    if prices[row] != UNKNOWN:
                        break  # rows are sorted by price, unknown prices last
                    cloud, region, _ = place = table.places[table.place[row]]
                    if not (has_region(cloud, region) and fits_place(need, *place)):
                        continue
                    if not data or all(item.allows(*place) for item in data):
                        found.setdefault((cloud, capacity), set()).add(region)
    return {key: sorted(regions) for key, regions in sorted(found.items())}
