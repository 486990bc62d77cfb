"""Fit the constants of the deadline policy on public traces of 2023 and 2025, and write their two files.

    python benchmarks/policies/fit.py --data DIR

Expectation maximization of a hidden regime that multiplies the rates of loss and return by age. At a constant
rate, a new regime is drawn from a fixed distribution.

The packaged constants (``risk.py``) are fitted on both complete sets; the traces of 2022 are not read.
Figures on 2023 and 2025 themselves (``figures.py``) use ``held_out.json``, whose constants are never fitted
on the data that they are measured on. Both sets are halved by time and by zone (every other column). A
quarter uses the constants of the opposite quarter, which has other zones at another time. Several zones
together, from both kinds of columns, use the constants of the other half of the time.

``tune.py`` chooses on the first half of the odd and the second half of the even columns, with the constants
of the first half of the even ones. No choice uses the second half of the odd columns. The script prints the
likelihood of each quarter under these constants.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from envscaler_airflow.scaling.deadline import Hazard, risk
from envscaler_airflow.scaling.deadline.risk import BINS, age_bin
from envscaler_airflow.simulate.spot import read_traces

FILES = (("awsV100_2023_195s.csv", 195.0, 3), ("gcpH100_2025_600s_count16.csv", 600.0, 1))
"""File, seconds of a tick, and how many ticks are combined: both sets at about ten minutes."""
FACTORS = (0.25, 0.6, 1.4, 3.3)
"""Grid of factors of the regimes (chosen)."""
LEAST = 0.015
"""Regimes drawn more rarely are dropped (chosen: tables stay small)."""
ROUNDS = 20
Array = np.ndarray[Any, np.dtype[np.float64]]
Part = tuple[int, int]
"""Zones of even (0) or odd (1) columns, and the first (0) or second (1) half of their ticks."""
FITTED, TUNED, HELD_OUT = ((0, 0),), ((0, 1), (1, 0)), ((1, 1),)
"""Quarters used to fit for the choices, used to choose, and used for neither."""
WHOLE = (*FITTED, *TUNED, *HELD_OUT)
MEASURED_ON: dict[str, tuple[Part, ...]] = {
    "even-early": ((1, 1),),
    "even-late": ((1, 0),),
    "odd-early": ((0, 1),),
    "odd-late": FITTED,
    "early": ((0, 1), (1, 1)),
    "late": ((0, 0), (1, 0)),
}
"""What constants are measured on, and the quarters that they are fitted on instead."""
FIELDS = {
    "up": "UP_PER_HOUR",
    "down": "DOWN_PER_HOUR",
    "up_factors": "UP_FACTORS",
    "down_factors": "DOWN_FACTORS",
    "regimes": "REGIMES",
    "regime_h": "REGIME_H",
}
FITTED_FILE = Path(risk.__file__)
HELD_OUT_FILE = Path(__file__).with_name("held_out.json")


@dataclass(frozen=True, slots=True)
class Series:
    """One zone: the side (0 up, 1 down) and age bin of each tick, and whether the state ended."""

    gap_h: float
    side: Array
    age: Array
    ended: Array


def load(data: Path, parts: Sequence[Part] = WHOLE) -> list[Series]:
    """*parts* of both sets."""
    return [
        series(gap_s * every / 3600, half(row[::every], late))
        for name, gap_s, every in FILES
        for odd, late in parts
        for row in list(read_traces(data / name).zones.values())[odd::2]
    ]


def half(row: Sequence[int], late: int) -> Sequence[int]:
    """First or second half of *row*."""
    return row[len(row) // 2 :] if late else row[: len(row) // 2]


def series(gap_h: float, row: Sequence[int]) -> Series:
    """Ticks of one zone; an age that began before the first tick is at least an hour."""
    age_h, is_known = 0.0, False
    ticks = []
    for now, after in pairwise(row):
        if now < 0 or after < 0:
            age_h, is_known = 0.0, False
            continue
        age_h += gap_h
        ended = (after > 0) != (now > 0)
        ticks.append((0 if now > 0 else 1, age_bin(age_h if is_known else max(age_h, 1.0)), ended))
        if ended:
            age_h, is_known = 0.0, True
    columns = np.array(ticks).reshape(-1, 3)
    return Series(gap_h, columns[:, 0], columns[:, 1], columns[:, 2].astype(bool))


def first_rates(rows: Sequence[Series]) -> Array:
    """Ends per hour by side and bin, for one regime."""
    rates = np.zeros((2, BINS))
    for side in (0, 1):
        ends = np.zeros(BINS)
        hours = np.zeros(BINS)
        for row in rows:
            for bin_ in range(BINS):
                here = (row.side == side) & (row.age == bin_)
                ends[bin_] += row.ended[here].sum()
                hours[bin_] += here.sum() * row.gap_h
        rates[side] = (ends + ends.sum() / hours.sum()) / (hours + 1)
    return rates


@dataclass(frozen=True, slots=True)
class Posterior:
    """Posterior from the ticks of several zones; ticks after the end of a zone do not count.

    Attributes:
        belief: Probability of each regime, by zone and tick.
        draws: Expected number of draws of each regime.
        jumps: Expected number of ticks with a draw, without the first ticks.
        log_likelihood: Of all ticks.
    """

    belief: Array
    draws: Array
    jumps: float
    log_likelihood: float


def posterior(
    rows: Sequence[Series], rates: Array, factors: Array, drawn: Array, per_hour: float
) -> Posterior:
    """Forward-backward algorithm over all zones at once."""
    ticks = max(len(row.side) for row in rows)
    likely = np.ones((ticks, len(rows), len(drawn)))
    fresh = np.zeros((ticks, len(rows), 1))
    for at, row in enumerate(rows):
        expected = rates[row.side, row.age][:, None] * factors[:, row.side].T * row.gap_h
        here = slice(0, len(row.side))
        likely[here, at] = np.where(row.ended[:, None], -np.expm1(-expected), np.exp(-expected))
        fresh[here, at] = -math.expm1(-per_hour * row.gap_h)
    ahead, scale = np.empty_like(likely), np.empty((ticks, len(rows), 1))
    share = np.tile(drawn, (len(rows), 1))
    for tick, chance in enumerate(likely):
        if tick:
            share = (1 - fresh[tick]) * share + fresh[tick] * drawn
        share = share * chance
        scale[tick] = share.sum(1, keepdims=True)
        share = share / scale[tick]
        ahead[tick] = share
    behind = np.ones((len(rows), len(drawn)))
    belief, draws, jumps = np.empty_like(likely), np.zeros(len(drawn)), 0.0
    for tick in range(ticks - 1, -1, -1):
        belief[tick] = ahead[tick] * behind
        weighed = likely[tick] * behind / scale[tick]
        draw = ((fresh[tick] if tick else 1.0) * drawn * weighed).sum(0)
        draws += draw
        if tick:
            jumps += float(draw.sum())
            behind = (1 - fresh[tick]) * weighed + fresh[tick] * (weighed @ drawn)[:, None]
    return Posterior(belief.swapaxes(0, 1), draws, jumps, float(np.log(scale).sum()))


def fit(rows: Sequence[Series], rounds: int = ROUNDS) -> dict[str, Any]:
    """All constants."""
    factors = np.array(list(product(FACTORS, FACTORS)))
    drawn, rates, per_hour = np.full(len(factors), 1 / len(factors)), first_rates(rows), 1 / 24
    for _ in range(rounds):
        ends, hours = np.zeros((2, BINS)), np.zeros((2, BINS))
        found = posterior(rows, rates, factors, drawn, per_hour)
        for row, belief in zip(rows, found.belief, strict=True):
            for side, bin_ in product((0, 1), range(BINS)):
                here = np.flatnonzero((row.side == side) & (row.age == bin_))
                ends[side, bin_] += row.ended[here].sum()
                hours[side, bin_] += (belief[here] * factors[:, side]).sum() * row.gap_h
        pooled = (ends.sum(1) / hours.sum(1))[:, None]
        rates = (ends + pooled) / (hours + 1)
        drawn = (found.draws + 0.1) / (found.draws + 0.1).sum()
        per_hour = -math.log1p(-found.jumps / sum(len(row.side) - 1 for row in rows)) * 6
    kept = [at for at, share in enumerate(drawn) if share > LEAST]
    shares = drawn[kept] / drawn[kept].sum()
    return {
        "UP_PER_HOUR": tuple(round(float(rate), 4) for rate in rates[0]),
        "DOWN_PER_HOUR": tuple(round(float(rate), 4) for rate in rates[1]),
        "UP_FACTORS": tuple(float(factors[at][0]) for at in kept),
        "DOWN_FACTORS": tuple(float(factors[at][1]) for at in kept),
        "REGIMES": tuple(round(float(share), 5) for share in shares),
        "REGIME_H": round(1 / per_hour, 2),
    }


def likelihood(rows: Sequence[Series], constants: dict[str, Any]) -> float:
    """Mean log-likelihood of a tick under *constants*."""
    rates = np.array([constants["UP_PER_HOUR"], constants["DOWN_PER_HOUR"]])
    factors = np.array([constants["UP_FACTORS"], constants["DOWN_FACTORS"]]).T
    drawn, per_hour = np.array(constants["REGIMES"]), 1 / constants["REGIME_H"]
    found = posterior(rows, rates, factors, drawn, per_hour)
    return found.log_likelihood / sum(len(row.side) for row in rows)


def text(before: str, constants: dict[str, Any]) -> str:
    """The file *before*, with the line of each constant replaced."""
    for name, value in constants.items():
        before = re.sub(rf"^{name} = .*$", f"{name} = {value}", before, flags=re.MULTILINE)
    return before


def held_out(data: Path) -> dict[str, dict[str, Any]]:
    """Constants for each of :data:`MEASURED_ON`."""
    return {name: fit(load(data, parts)) for name, parts in MEASURED_ON.items()}


def unseen(name: str) -> Hazard:
    """The model that has not seen part *name* of :data:`MEASURED_ON`; the packaged one for an empty name."""
    if not name:
        return Hazard()
    found = json.loads(HELD_OUT_FILE.read_text())[name]
    return Hazard.from_dict({field: found[constant] for field, constant in FIELDS.items()})


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the spot traces")
    data: Path = parser.parse_args().data
    FITTED_FILE.write_text(text(FITTED_FILE.read_text(), fit(load(data))))
    found = held_out(data)
    HELD_OUT_FILE.write_text(json.dumps(found, indent=1) + "\n")
    for name, parts in (("fitted on", FITTED), ("chosen on", TUNED), ("held out", HELD_OUT)):
        print(f"{name}: log-likelihood a tick {likelihood(load(data, parts), found['odd-late']):.4f}")


if __name__ == "__main__":
    main()
