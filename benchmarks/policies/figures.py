"""Every figure of the policies against its baselines and the optimum; under ten minutes on two cores.

    python benchmarks/policies/figures.py --spot DIR --elastic DIR [--seeds 5] [--only spot,elastic]

Folders are those of the public traces and measured trainings; see docs/reference/policies.md.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from fit import FILES, unseen

from envscaler_airflow.scaling.deadline import SpotView
from envscaler_airflow.simulate.compared_policies import UniformProgress
from envscaler_airflow.simulate.elastic import best_fixed, elastic_optimum, gpu_prices, load_models
from envscaler_airflow.simulate.reports import (
    ELASTIC_POLICIES,
    LONG,
    TYPES,
    VALUES,
    SpotCell,
    Track,
    elastic_jobs,
    elastic_summary,
    spot_jobs,
)
from envscaler_airflow.simulate.spot import (
    Traces,
    Window,
    of_dataset,
    read_price_changes,
    read_traces,
    read_windows,
)
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy

PriceChanges = Mapping[str, Sequence[tuple[int, float]]]

CELLS = [(deadline, overhead) for deadline in (52.0, 70.0, 92.0) for overhead in (0.02, 0.05, 0.2, 0.4)]
SETS = ("aws2022_k80v100_600s.csv", "awsV100_2023_195s.csv", "gcpH100_2025_600s_count16.csv")
FITTED_ON = tuple(name for name, _, _ in FILES)
GROUPS = {
    SETS[1]: (
        "us-east-1a_v100_1,us-east-1c_v100_1,us-east-1d_v100_1",
        "us-east-2a_v100_1,us-east-2b_v100_1,us-west-2a_v100_1",
        "us-east-2b_v100_1,us-west-2a_v100_1,us-west-2c_v100_1",
        "us-east-1a_v100_1,us-east-2a_v100_1,us-west-2a_v100_1",
        "us-east-1a_v100_1,us-east-1c_v100_1,us-east-1d_v100_1,us-east-2a_v100_1",
        "us-east-2a_v100_1,us-east-2b_v100_1,us-west-2a_v100_1,us-west-2c_v100_1",
    ),
    SETS[2]: (
        "asia-south2-b,asia-southeast1-b,europe-west1-c",
        "europe-west3-c,us-central1-a,us-central1-b",
        "us-east4-a,us-east5-a,us-west1-a",
        "asia-southeast1-b,europe-west3-c,us-west1-a",
        "asia-south2-b,asia-southeast1-b,europe-west1-c,europe-west3-c",
        "us-central1-b,us-east4-a,us-east5-a,us-west1-a",
    ),
}
"""Zones by column, three or four at a time. Chosen before any was run."""
GROUPS_UNSEEN = {
    SETS[1]: ("us-east-1c_v100_1,us-east-2a_v100_1,us-west-2a_v100_1",),
    SETS[2]: (
        "asia-southeast1-b,europe-west3-c,us-central1-b",
        "europe-west3-c,us-central1-b,us-east5-a",
        "asia-southeast1-b,europe-west3-c,us-central1-b,us-east5-a",
    ),
}
"""Zones of odd columns; no choice and none of these constants used the second half of their time."""


def cell(
    data: Path,
    name: str,
    at: tuple[float, float],
    zones: str = "",
    *,
    is_held_out: bool = False,
    is_priced: bool = False,
) -> dict[str, float]:
    """Means of one file at one deadline and overhead: ours, Uniform Progress and the optimum.

    Ours is shown with constants that have not seen the jobs (``ours``) and with the packaged ones
    (``shipped``), which are the same for the traces of 2022. *is_priced*: each zone at its own spot price.
    """
    traces = read_traces(data / name)
    windows = of_dataset(read_windows(data / "windows.csv"), data / name)
    if is_held_out:
        windows = held_out(traces, windows)
    case, changes = SpotCell(48.0, *at, 3.06, 0.9731), None
    split = zones.split(",") if zones else []
    if is_priced:
        case, changes = priced(data, name, case, split)
    parts: dict[str, list[Window]] = {}
    for window in windows:
        if window.zone in (split or traces.zones):
            is_one = not split or is_held_out
            part = part_of(traces, window, case, is_one=is_one) if name in FITTED_ON else ""
            parts.setdefault(part, []).append(window)
    ours, shipped = [], []
    for part, some in parts.items():
        fair = DeadlinePolicy(unseen(part))
        ours += spot_jobs(traces, some, case, fair, zones=split, price_changes=changes, with_optimum=True)
        if part:
            shipped += spot_jobs(traces, some, case, DeadlinePolicy(), zones=split, price_changes=changes)
    theirs = spot_jobs(traces, windows, case, UniformProgress(), zones=split, price_changes=changes)
    return {
        "jobs": len(ours),
        "ours": sum(job["cost_usd"] for job in ours) / len(ours),
        "shipped": sum(job["cost_usd"] for job in shipped or ours) / len(ours),
        "up": sum(job["cost_usd"] for job in theirs) / len(theirs),
        "optimum": sum(job["optimum_usd"] for job in ours) / len(ours),
        "late": sum(job["late"] for job in (*ours, *shipped, *theirs)),
    }


PRICES = {SETS[1]: "awsV100_2023_spot_price_changes.csv", SETS[2]: "gcpH100_2025_prices.csv"}
"""Files of real prices. Those of 2025 are constant, and of machines with 8 GPUs."""


def priced(data: Path, name: str, case: SpotCell, zones: Sequence[str]) -> tuple[SpotCell, PriceChanges]:
    """*case* at the lowest on-demand price of *zones*, and the spot price of each zone, for one GPU."""
    if name == SETS[1]:
        changes: PriceChanges = read_price_changes(data / PRICES[name])
        on_demand = case.on_demand_usd
    else:
        with (data / PRICES[name]).open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["zone"] in zones]
        changes = {row["zone"]: [(0, float(row["spot_usd_per_h"]) / 8)] for row in rows}
        on_demand = min(float(row["on_demand_usd_per_h"]) for row in rows) / 8
    spot = min(changes[zone][0][1] for zone in zones)
    return replace(case, on_demand_usd=on_demand, spot_usd=spot), changes


def print_priced(data: Path, pool: ProcessPoolExecutor) -> None:
    """Print groups of zones at their own prices."""
    print("\nspot, each zone at its own price, 52 h and 0.2 h: ratios to Uniform Progress with failover")
    asked = [(name, zones, False) for name, groups in GROUPS.items() for zones in groups]
    asked += [(name, zones, True) for name, groups in GROUPS_UNSEEN.items() for zones in groups]
    jobs = [
        pool.submit(cell, data, name, (52.0, 0.2), zones, is_held_out=is_out, is_priced=True)
        for name, zones, is_out in asked
    ]
    for (name, zones, is_out), job in zip(asked, jobs, strict=True):
        row = job.result()
        ours, optimum = row["ours"] / row["up"], row["optimum"] / row["up"]
        head = f"{name.split('_')[0]} {'held out' if is_out else '':8} {zones.replace('_v100_1', '')}"
        told = f"UP ${row['up']:.2f}  ours {ours:.4f}  optimum {optimum:.4f}"
        print(f"{head}\n    {told}  ours over it {ours / optimum:.4f}  late {row['late']:.0f}")


def part_of(traces: Traces, window: Window, case: SpotCell, *, is_one: bool) -> str:
    """The half of the time that contains the middle of the job, and the kind of column, of one zone."""
    ticks = len(traces.zones[window.zone])
    middle = window.start_tick - traces.first + case.deadline_h * 1800 / window.gap_s
    half = "late" if middle >= ticks / 2 else "early"
    column = list(traces.zones).index(window.zone)
    return f"{'odd' if column % 2 else 'even'}-{half}" if is_one else half


def held_out(traces: Traces, windows: Sequence[Window]) -> list[Window]:
    """A start every six hours in the second half of odd columns, instead of the starts in the file."""
    odd = list(traces.zones)[1::2]
    ticks = len(traces.zones[odd[0]])
    first = windows[0]
    spread = int(6 * 3600 / first.gap_s)
    last = ticks - int(52 * 3600 / first.gap_s)
    starts = range(traces.first + ticks // 2, traces.first + last + 1, spread)
    return [replace(first, zone=zone, start_tick=start) for zone in odd for start in starts]


def print_held_out(data: Path, pool: ProcessPoolExecutor) -> None:
    """Print the results on unseen parts of 2023 and 2025: a later time, and other zones."""
    print("\nspot, held out by time and by zone, 52 h and 0.2 h: ratios to Uniform Progress (with failover)")
    asked = [(name, zones) for name, groups in GROUPS_UNSEEN.items() for zones in ("", *groups)]
    jobs = [pool.submit(cell, data, name, (52.0, 0.2), zones, is_held_out=True) for name, zones in asked]
    for (name, zones), job in zip(asked, jobs, strict=True):
        row = job.result()
        what = f"{zones.count(',') + 1} zones" if zones else "one zone"
        ours, optimum = row["ours"] / row["up"], row["optimum"] / row["up"]
        head = (
            f"{name.split('_')[0]:14} {what:9} {row['jobs']:4.0f} jobs  UP ${row['up']:6.2f}  ours {ours:.4f}"
        )
        print(f"{head}  optimum {optimum:.4f}  ours over it {ours / optimum:.4f}  late {row['late']:.0f}")


def print_spot(data: Path, pool: ProcessPoolExecutor) -> None:
    """Print twelve cells of 2022, and the cell of 52 h and 0.2 h of the other sets."""
    print("\nspot, one zone: mean $ of all starts; ratios to Uniform Progress of the same run")
    print("(shipped: by the constants that are shipped, which have seen the traces of 2023 and 2025)")
    columns = ("set", "deadline", "overhead", "jobs", "UP $", "ours", "shipped", "optimum", "late")
    print("{:14} {:>8} {:>8} {:>5} {:>8} {:>7} {:>8} {:>8} {:>5}".format(*columns))
    asked = [(SETS[0], at) for at in CELLS] + [(name, (52.0, 0.2)) for name in SETS[1:]]
    found = list(pool.map(cell, [data] * len(asked), *zip(*asked, strict=True)))
    for (name, at), row in zip(asked, found, strict=True):
        print_cell(name.split("_")[0], at, row)
    twelve = found[: len(CELLS)]
    means = {key: sum(row[key] for row in twelve) / len(twelve) for key in ("ours", "up", "optimum")}
    ratio = sum(row["ours"] / row["up"] for row in twelve) / len(twelve)
    print(f"mean of the 12 cells of aws2022: UP ${means['up']:.2f}, ours {means['ours'] / means['up']:.4f},")
    print(f"  optimum {means['optimum'] / means['up']:.4f}; as a mean of ratios ours is {ratio:.4f}")


def print_cell(name: str, at: tuple[float, float], row: Mapping[str, float]) -> None:
    """One line."""
    ours, shipped, optimum = (row[key] / row["up"] for key in ("ours", "shipped", "optimum"))
    head = f"{name:14} {at[0]:8g} {at[1]:8g} {row['jobs']:5.0f} {row['up']:8.2f}"
    print(f"{head} {ours:7.4f} {shipped:8.4f} {optimum:8.4f} {row['late']:5.0f}")


def print_zones(data: Path, pool: ProcessPoolExecutor) -> None:
    """Print three and four zones at 52 h and 0.2 h."""
    print("\nspot, three or four zones, 52 h and 0.2 h: ratios to Uniform Progress with failover")
    asked = [(name, (52.0, 0.2), zones) for name, groups in GROUPS.items() for zones in groups]
    found = list(pool.map(cell, [data] * len(asked), *zip(*asked, strict=True)))
    for name in GROUPS:
        rows = [row for (other, _, _), row in zip(asked, found, strict=True) if other == name]
        sums = {key: sum(row[key] for row in rows) for key in ("ours", "shipped", "up", "optimum", "late")}
        ours, shipped, optimum = (sums[key] / sums["up"] for key in ("ours", "shipped", "optimum"))
        head = (
            f"{name.split('_')[0]:14} UP ${sums['up'] / len(rows):.2f}  ours {ours:.4f} shipped {shipped:.4f}"
        )
        print(f"{head}  optimum {optimum:.4f}  ours over it {ours / optimum:.4f}  late {sums['late']:.0f}")


def elastic_row(
    folder: Path,
    track: tuple[bool, bool],
    name: str,
    seeds: int,
    is_kept: bool,  # noqa: FBT001  # the pool passes it
) -> tuple[Any, ...]:
    """One policy on one track."""
    is_type, is_long = track
    models = load_models(folder, TYPES)
    chosen = [models[model] for model in LONG if model in models]
    asked = Track(is_type, is_long, {})
    policy = ELASTIC_POLICIES[name]()
    jobs = elastic_jobs(chosen, gpu_prices(None, TYPES), asked, policy, seeds=seeds, is_kept=is_kept)
    return track, name, is_kept, elastic_summary(jobs)


def print_elastic(folder: Path, seeds: int, pool: ProcessPoolExecutor) -> None:
    """Print every policy on every track, with the best fixed choice in hindsight."""
    print("\nelastic: regret over the exact optimum, with a tuned and with a kept global batch")
    tracks = [(is_type, is_long) for is_long in (True, False) for is_type in (False, True)]
    names = ["cost-to-finish", "pollux", "hpa", "or-et-al"]
    asked = [(track, name, seeds, False) for track in tracks for name in names]
    asked += [(track, names[0], seeds, True) for track in tracks]
    rows = pool.map(elastic_row, [folder] * len(asked), *zip(*asked, strict=True))
    for track, name, is_kept, summary in rows:
        batch = "kept" if is_kept else "tuned"
        head = f"{Track(*track, {}).name:12} {batch:6} {name:15} mean {summary['mean_regret']:6.1%}"
        print(f"{head} worst {summary['worst_regret']:6.1%} restarts {summary['mean_restarts']:5.1f}")
    models = load_models(folder, TYPES)
    for is_type, is_long in tracks:
        regrets = []
        for model in LONG:
            for at in VALUES:
                job = Track(is_type, is_long, {}).job(models[model], gpu_prices(None, TYPES), None, at)
                regrets.append(best_fixed(job) / elastic_optimum(job) - 1)
        name = Track(is_type, is_long, {}).name
        print(
            f"{name:12} {'best fixed':15} mean {sum(regrets) / len(regrets):6.1%} worst {max(regrets):6.1%}"
        )


def print_decision() -> None:
    """Print how long one decision takes that reads the table."""
    job = SpotCell(48.0, 52.0, 0.2, 3.06, 0.9731).job(600.0)
    policy = DeadlinePolicy()
    policy.begin(job, {"z": [1, 0, 0] * 300})
    policy.choose(SpotView(0, job.ticks, job.work_s, 0.0, None, {"z": True}))

    def look(tick: int) -> object:
        left = job.work_s - 590.0 * tick
        return policy.choose(SpotView(tick, job.ticks - tick, left, 0.0, None, {"z": tick % 3 == 0}))

    took = percentile(look)
    print(f"\none decision of the deadline policy: p50 {took[0]:.3f} ms, p99 {took[1]:.3f} ms")


def percentile(act: Callable[[int], object], times: int = 280) -> tuple[float, float]:
    """Milliseconds, 50th and 99th percentile."""
    spent: list[float] = []
    for tick in range(1, times):
        begun = time.perf_counter()
        act(tick)
        spent.append(1000 * (time.perf_counter() - begun))
    spent.sort()
    return spent[len(spent) // 2], spent[int(0.99 * len(spent))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print everything that was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spot", type=Path, help="folder with the spot traces")
    parser.add_argument("--elastic", type=Path, help="folder with the measured trainings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="spot,zones,priced,held-out,elastic,decision")
    asked = parser.parse_args(arguments)
    only, begun = asked.only.split(","), time.monotonic()
    with ProcessPoolExecutor(asked.workers) as pool:
        if asked.spot and "spot" in only:
            print_spot(asked.spot, pool)
        if asked.spot and "zones" in only:
            print_zones(asked.spot, pool)
        if asked.spot and "priced" in only:
            print_priced(asked.spot, pool)
        if asked.spot and "held-out" in only:
            print_held_out(asked.spot, pool)
        if asked.elastic and "elastic" in only:
            print_elastic(asked.elastic, asked.seeds, pool)
    if "decision" in only:
        print_decision()
    print(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
