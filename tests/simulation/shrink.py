"""Makes a failing seed short: the fewest faults with which the same invariant still breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fewest(struck: Sequence[str], fails: Callable[[frozenset[str]], Sequence[str] | None]) -> frozenset[str]:
    """Return which faults of *struck* to mute, by delta debugging (Zeller and Hildebrandt 2002).

    Args:
        struck: Faults of the failing run, in order.
        fails: Runs the seed with these faults muted; returns the faults that struck then if the same
            invariant breaks, else None.
    """
    kept, muted = list(struck), frozenset[str]()
    size = len(kept)
    while size:
        for start in range(0, len(kept), size):
            trial = muted | frozenset(kept[start : start + size])
            now = fails(trial)
            if now is not None:
                muted, kept = trial, list(now)
                size = min(size, len(kept)) or 0
                break
        else:
            size //= 2
    return muted
