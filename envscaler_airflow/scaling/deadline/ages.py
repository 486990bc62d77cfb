"""Bins of age: how long spot has been up, or away."""

from __future__ import annotations

from bisect import bisect_right

AGE_EDGES_H = (0.0, 1.5 / 6, 2.5 / 6, 3.5 / 6, 5.5 / 6, 8.5 / 6, 13.5 / 6, 21.5 / 6, 41.5 / 6)
"""Lower edges of the bins of age, hours. Chosen: growing, since losses get rarer with age; a tick of ten
minutes seen for the first time has an age of ten minutes."""
BINS = len(AGE_EDGES_H)


def age_bin(age_h: float) -> int:
    """Bin of an age."""
    return bisect_right(AGE_EDGES_H, age_h) - 1
