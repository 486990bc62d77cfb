"""Choose how much faster than fitted the tables take losses and returns; prints the means of each candidate.

    python benchmarks/policies/tune.py --data DIR --faster 1.0 1.3

Twelve cells on the traces of 2023 (every third tick, as they were fitted) and of 2025. The
traces of 2022 are not read.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from envscaler_airflow.scaling.deadline import DeadlinePolicy, SpotJob, tables
from envscaler_airflow.simulate.references import UniformProgress
from envscaler_airflow.simulate.spot import simulate_spot
from envscaler_airflow.simulate.traces import of_dataset, read_traces, read_windows

CELLS = [(deadline, overhead) for deadline in (52, 70, 92) for overhead in (0.02, 0.05, 0.2, 0.4)]
SETS = (("awsV100_2023_195s.csv", 195.0, 3), ("gcpH100_2025_600s_count16.csv", 600.0, 1))


def ratio(data: Path, faster: float, name: str, gap_s: float, every: int) -> float:
    """Mean over the cells of our cost over Uniform Progress's."""
    tables.FASTER = faster
    traces = read_traces(data / name)
    windows = of_dataset(read_windows(data / "windows.csv"), data / name)
    ratios = []
    for deadline, overhead in CELLS:
        gap = gap_s * every
        job = SpotJob(int(deadline * 3600 / gap), gap, 48 * 3600.0, overhead * 3600.0, 3.06, 0.9731)
        policy, ours, theirs = DeadlinePolicy(), 0.0, 0.0
        for window in windows:
            row, at = traces.zones[window.zone][::every], (window.start_tick - traces.first) // every
            if at + job.ticks <= len(row):
                rows = {"z": row[at : at + job.ticks]}
                ours += simulate_spot(job, rows, policy, history={"z": row[:at]}).cost_usd
                theirs += simulate_spot(job, rows, UniformProgress()).cost_usd
        ratios.append(ours / theirs)
    return sum(ratios) / len(ratios)


def main() -> None:
    """Print a line for each candidate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the spot traces")
    parser.add_argument("--faster", type=float, nargs="+", default=[1.0, 1.3])
    asked = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(ratio, asked.data, faster, *one) for faster in asked.faster for one in SETS]
        for at, faster in enumerate(asked.faster):
            found = [job.result() for job in jobs[at * len(SETS) : (at + 1) * len(SETS)]]
            means = ", ".join(f"{value:.5f}" for value in found)
            print(f"{faster:.1f}: {means}, mean {sum(found) / len(found):.5f}", flush=True)


if __name__ == "__main__":
    main()
