"""Choose the two constants of the deadline policy that are not fitted; prints each candidate's ratios.

    python benchmarks/policies/tune.py --data DIR --faster 1.0 1.3 --together 0.5 0.7 0.9

``FASTER``: factor on the fitted rates of losses and returns in the tables, over twelve cells. ``TOGETHER``:
how strongly the availability of zones is correlated, over three zones at 52 h and 0.2 h. Jobs start every
twelve hours in the quarters that were neither used for the fit nor held out (``fit.TUNED``), and end inside
them. The traces of 2022 are not read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from fit import FILES, TUNED, unseen

from envscaler_airflow.scaling.deadline import SpotJob, cost_table
from envscaler_airflow.simulate import spot_policy
from envscaler_airflow.simulate.compared_policies import UniformProgress
from envscaler_airflow.simulate.spot import read_traces, simulate_spot

CELLS = tuple(product((52, 70, 92), (0.02, 0.05, 0.2, 0.4)))
EVERY_H = 12
"""Hours between two starts (chosen: windows of one series overlap anyway)."""


def zones_of(data: Path, at: int, zones: int) -> list[tuple[Mapping[str, Sequence[int]], int, int]]:
    """Groups of *zones* adjacent columns of each quarter, with the first tick and the end of their jobs."""
    name, _, every = FILES[at]
    rows = list(read_traces(data / name).zones.items())
    found = []
    for odd, late in TUNED:
        columns = [(zone, row[::every]) for zone, row in rows[odd::2]]
        middle, end = len(columns[0][1]) // 2, len(columns[0][1])
        spans = [dict(columns[first : first + zones]) for first in range(len(columns) - zones + 1)]
        found += [(group, middle if late else 0, end if late else middle) for group in spans]
    return found


def ratio(data: Path, at: int, cell: tuple[float, float], zones: int) -> float | None:
    """Our cost over Uniform Progress's; None where no job fits into a quarter."""
    (deadline, overhead), (_, gap_s, every) = cell, FILES[at]
    gap = gap_s * every
    job = SpotJob(int(deadline * 3600 / gap), gap, 48 * 3600.0, overhead * 3600.0, 3.06, 0.9731)
    ours, theirs, mine = 0.0, 0.0, spot_policy.DeadlinePolicy(unseen("odd-late"))
    for group, first, end in zones_of(data, at, zones):
        for start in range(first, end - job.ticks + 1, int(EVERY_H * 3600 / gap)):
            rows = {name: row[start : start + job.ticks] for name, row in group.items()}
            past = {name: row[:start] for name, row in group.items()}
            ours += simulate_spot(job, rows, mine, history=past).cost_usd
            theirs += simulate_spot(job, rows, UniformProgress()).cost_usd
    return ours / theirs if theirs else None


def means(data: Path, faster: float, together: float) -> tuple[str, str]:
    """Mean over sets and cells, of one zone and of three."""
    cost_table.FASTER, spot_policy.TOGETHER = faster, together
    one = [ratio(data, at, cell, 1) for at in range(len(FILES)) for cell in CELLS]
    three = [ratio(data, at, (52, 0.2), 3) for at in range(len(FILES))]
    return _mean(one), _mean(three)


def _mean(ratios: Sequence[float | None]) -> str:
    known = [value for value in ratios if value is not None]
    return f"{sum(known) / len(known):.5f}"


def main() -> None:
    """Print a line for each candidate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the spot traces")
    parser.add_argument("--faster", type=float, nargs="+", default=[1.0])
    parser.add_argument("--together", type=float, nargs="+", default=[0.7])
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    candidates = list(product(asked.faster, asked.together))
    with ProcessPoolExecutor(asked.workers) as pool:
        rows = [pool.submit(means, asked.data, *candidate) for candidate in candidates]
        for (faster, together), row in zip(candidates, rows, strict=True):
            one, three = row.result()
            print(
                f"faster {faster:g}, together {together:g}: one zone {one}, three zones {three}", flush=True
            )


if __name__ == "__main__":
    main()
