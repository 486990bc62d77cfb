"""How much more could be had: what the deadline policy would reach if it knew what cannot be seen.

    python benchmarks/policies/bounds.py --data DIR [--jobs 200]

1. On availability drawn from the fitted model itself, the table is exact: a policy that knows the regime of
   each tick is the best one without knowledge of the future. No policy can recover the difference between its
   cost and the optimum, which knows the future. The difference between our policy and this one is the cost of
   having only a belief about the regime.
2. On the zones of 2023 and 2025, a policy that knows how long each zone will stay up chooses the best zone.
   The remaining distance to the optimum comes from the choice of when to wait and when to buy.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from figures import GROUPS

from envscaler_airflow.scaling.deadline import Hazard, SpotJob, SpotView, Zone
from envscaler_airflow.scaling.deadline.risk import age_bin
from envscaler_airflow.simulate.compared_policies import UniformProgress, spot_optimum
from envscaler_airflow.simulate.reports import SpotCell
from envscaler_airflow.simulate.spot import of_dataset, read_traces, read_windows, simulate_spot
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy

CELL = SpotCell(48.0, 52.0, 0.2, 3.06, 0.9731)
PAST = 1000
"""Past ticks that policies see (chosen: a week)."""


def draw(hazard: Hazard, ticks: int, random: Random) -> tuple[list[int], list[int]]:
    """Availability and regime of a number of ticks of ten minutes."""
    regime, is_up, age_h = random.choices(range(len(hazard.regimes)), hazard.regimes)[0], True, 1 / 6
    row, regimes = [], []
    for _ in range(ticks):
        row.append(int(is_up))
        regimes.append(regime)
        if random.random() < hazard.chances(is_up=is_up, bin_=age_bin(age_h), gap_s=600.0)[regime]:
            is_up, age_h = not is_up, 0.0
        age_h += 1 / 6
        if random.random() < hazard.redrawn(600.0):
            regime = random.choices(range(len(hazard.regimes)), hazard.regimes)[0]
    return row, regimes


class Told(DeadlinePolicy):
    """Knows the regime of every tick."""

    regimes: Sequence[int] = ()

    def zones(self, view: SpotView) -> tuple[Zone, ...]:
        """Believe in the true regime."""
        known = tuple(float(at == self.regimes[view.tick]) for at in range(len(self._hazard.regimes)))
        return tuple(replace(zone, belief=known) for zone in super().zones(view))


class Foreseeing(DeadlinePolicy):
    """Knows how long each zone will stay up, and uses only that to choose the zone."""

    truth: Mapping[str, Sequence[int]] = {}

    def zones(self, view: SpotView) -> tuple[Zone, ...]:
        """Show only the zone that stays up longest, where one is up."""

        def lasts(zone: Zone) -> int:
            row, ticks = self.truth[zone.name][view.tick :], 0
            while ticks < len(row) and row[ticks] > 0:
                ticks += 1
            return ticks

        known = super().zones(view)
        best = max(known, key=lasts)
        return (best,) if lasts(best) else known


def print_drawn(jobs: int) -> None:
    """Print the means on drawn availability."""
    random, job, hazard = Random(1), CELL.job(600.0), Hazard()
    ours, told, sums = DeadlinePolicy(hazard), Told(hazard), [0.0] * 4
    for _ in range(jobs):
        row, regimes = draw(hazard, PAST + job.ticks, random)
        zones, past = {"z": row[PAST:]}, {"z": row[:PAST]}
        told.regimes = regimes[PAST:]
        runs = [simulate_spot(job, zones, policy, history=past) for policy in (UniformProgress(), ours, told)]
        for at, cost in enumerate([*(run.cost_usd for run in runs), spot_optimum(job, zones)]):
            sums[at] += cost
    up, mine, known, optimum = sums
    print(f"drawn from the model, {jobs} jobs, to Uniform Progress: ours {mine / up:.4f},")
    print(
        f"  told the regime {known / up:.4f}, optimum {optimum / up:.4f}, told over it {known / optimum:.4f}"
    )


def print_zones(data: Path) -> None:
    """Print the ratios with the zone chosen by foresight."""
    for name, groups in GROUPS.items():
        traces = read_traces(data / name)
        windows = of_dataset(read_windows(data / "windows.csv"), data / name)
        starts = sorted({window.start_tick for window in windows})
        job, sums = CELL.job(windows[0].gap_s), [0.0] * 3
        policies: tuple[UniformProgress, DeadlinePolicy, Foreseeing] = (
            UniformProgress(),
            DeadlinePolicy(),
            Foreseeing(),
        )
        for group in groups:
            for start in starts:
                zones, past = _split(traces.zones, group, start - traces.first, job)
                policies[2].truth = zones
                for at, policy in enumerate(policies):
                    sums[at] += simulate_spot(job, zones, policy, history=past).cost_usd
        head = f"{name.split('_')[0]}, several zones, to Uniform Progress with failover"
        print(f"{head}: ours {sums[1] / sums[0]:.4f}, zone chosen by foresight {sums[2] / sums[0]:.4f}")


def _split(
    rows: Mapping[str, Sequence[int]], group: str, start: int, job: SpotJob
) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
    names = group.split(",")
    zones = {name: rows[name][start : start + job.ticks] for name in names}
    return zones, {name: rows[name][:start] for name in names}


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the spot traces")
    parser.add_argument("--jobs", type=int, default=200)
    asked = parser.parse_args()
    print_drawn(asked.jobs)
    print_zones(asked.data)


if __name__ == "__main__":
    main()
