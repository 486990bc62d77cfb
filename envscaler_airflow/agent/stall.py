"""Tell a training that hangs from one that is slow. Pure: time comes as an argument."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Deque, Optional

SLOW_PHASES = ("loading", "evaluation")
SLOW_FACTOR = 6.0
"""How much longer a slow phase, or a save, may go without a step. Chosen: evaluation over a whole
validation set takes minutes where a step takes tenths of a second."""
WINDOWS = 30
"""Step times that make the usual one. Chosen: long enough that one slow window does not count."""


class StallWatch:
    """No step for *factor* times the usual, at least *min_s*: stalled. Never before the first step."""

    def __init__(self, factor: float, min_s: float) -> None:
        """Set the leash; both >= 0."""
        self._factor = factor
        self._min_s = min_s
        self._step: Optional[int] = None
        self._stepped_at: Optional[float] = None
        self._slow = False
        self._times: Deque[float] = deque(maxlen=WINDOWS)

    def observe(
        self, now: float, *, step: Optional[int], phase: Optional[str] = None, saving: bool = False
    ) -> None:
        """Take up what the training said at *now*.

        The first number seen may be one that was restored: it starts nothing.
        """
        slow = saving or phase in SLOW_PHASES
        if self._slow and not slow and self._stepped_at is not None:
            self._stepped_at = now  # back from a slow phase: the next step has its full time
        if step is not None and self._step is not None and step > self._step:
            if self._stepped_at is not None and not (slow or self._slow):
                self._times.append((now - self._stepped_at) / (step - self._step))
            self._stepped_at = now
        if step is not None:
            self._step = step
        self._slow = slow

    def allowed_s(self) -> float:
        """Seconds without a step that are still normal."""
        usual = median(self._times) if self._times else 0.0
        allowed = max(self._min_s, self._factor * usual)
        return allowed * SLOW_FACTOR if self._slow else allowed

    def silent_s(self, now: float) -> Optional[float]:
        """Seconds since the last step, None before the first."""
        return None if self._stepped_at is None else now - self._stepped_at

    def is_stalled(self, now: float) -> bool:
        """Tell whether the training hangs."""
        silent = self.silent_s(now)
        return silent is not None and silent > self.allowed_s()
