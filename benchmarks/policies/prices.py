"""How strongly a spot price above its own recent level foretells a loss; prints the weight.

    python benchmarks/policies/prices.py --data DIR

Poisson regression of losses on ``log(price / median of the last day)`` on the price changes of 2023. The base
rate is each zone's own mean rate.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from envscaler_airflow.simulate.spot import prices_since, read_price_changes, read_traces

GAP_S = 195.0
DAY = int(86_400 / GAP_S)


def rises(data: Path) -> list[tuple[float, float, bool]]:
    """``(rise, base rate, lost)`` of every tick with spot, beginning a day after the first."""
    traces = read_traces(data / "awsV100_2023_195s.csv")
    found = []
    for zone, changes in read_price_changes(data / "awsV100_2023_spot_price_changes.csv").items():
        row = traces.zones[zone]
        prices = prices_since(changes, 0, len(row))
        ups = [at for at in range(DAY, len(row) - 1) if row[at] > 0]
        base = sum(row[at + 1] <= 0 for at in ups) / max(1, len(ups))
        for at in ups:
            recent = sorted(prices[at - DAY : at : 20])
            found.append((math.log(prices[at] / recent[len(recent) // 2]), base, row[at + 1] <= 0))
    return found


def weight(points: list[tuple[float, float, bool]]) -> float:
    """Maximum likelihood by Newton's method."""
    guess = 0.0
    for _ in range(50):
        expected = [(rise, base * math.exp(guess * rise), lost) for rise, base, lost in points]
        slope = sum(rise * (lost - mean) for rise, mean, lost in expected)
        bend = sum(rise * rise * mean for rise, mean, _ in expected)
        step = slope / bend
        guess += max(-20.0, min(20.0, step))
        if abs(step) < 1e-6:
            break
    return guess


def main() -> None:
    """Print the weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the spot traces")
    points = rises(parser.parse_args().data)
    print(f"losses {sum(lost for _, _, lost in points)}, ticks {len(points)}, weight {weight(points):.2f}")


if __name__ == "__main__":
    main()
