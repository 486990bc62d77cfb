"""Speed over the last half minute, from counts and times. Pure."""

from __future__ import annotations

from collections import deque
from typing import Deque, Optional, Tuple

WINDOW_S = 30.0
"""Chosen: evens out saves of a few seconds, and still shows soon that a machine is slow."""


class Rate:
    """How fast a count grows."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        """Look back *window_s* seconds."""
        self._window_s = window_s
        self._marks: Deque[Tuple[float, float]] = deque()

    def add(self, now: float, count: float) -> None:
        """Take up that the count stands at *count*; one that fell begins anew."""
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now, count))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self._window_s:
            self._marks.popleft()

    def per_s(self) -> Optional[float]:
        """Return counts per second, None until two moments are known."""
        if len(self._marks) < 2:
            return None
        (then, before), (now, count) = self._marks[0], self._marks[-1]
        return (count - before) / (now - then) if now > then else None
