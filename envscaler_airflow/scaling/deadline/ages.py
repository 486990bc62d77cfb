"""Bins of age: how long spot has been available or unavailable."""

from __future__ import annotations

from bisect import bisect_right

AGE_EDGES_H = (0.0, 1.5 / 6, 2.5 / 6, 3.5 / 6, 5.5 / 6, 8.5 / 6, 13.5 / 6, 21.5 / 6, 41.5 / 6)
"""Lower edges of the age bins, hours. Chosen: growing, since losses become rarer with age; when a zone is
first seen for a tick of ten minutes, its age is ten minutes."""
BINS = len(AGE_EDGES_H)


def age_bin(age_h: float) -> int:
    """Index of the bin of an age."""
    return bisect_right(AGE_EDGES_H, age_h) - 1
