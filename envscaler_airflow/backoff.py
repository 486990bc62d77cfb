"""How long to wait after failures in a row: one rule for everything that tries again."""

from __future__ import annotations

from collections.abc import Callable

_MOST_DOUBLINGS = 60  # chosen: any limit is reached by then, and no float overflows


def wait_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Seconds to wait after *failures* in a row: *first_s* after one, twice as long after each more.

    Never more than *most_s*; without a failure, as after one.
    """
    return min(most_s, first_s * 2.0 ** min(max(0, failures - 1), _MOST_DOUBLINGS))


class Backoff:
    """When to try again, for a loop that does other things meanwhile; immediately after a success.

    Attributes:
        failures: Consecutive failures.
    """

    def __init__(self, monotonic: Callable[[], float], *, first_s: float = 2.0, most_s: float = 60.0) -> None:
        """Begin ready. Chosen: a store that fails over is tried once a minute."""
        self.failures = 0
        self._monotonic = monotonic
        self._first_s, self._most_s = first_s, most_s
        self._not_before = -float("inf")

    @property
    def is_ready(self) -> bool:
        """True when the next try may start."""
        return self._monotonic() >= self._not_before

    def failed(self) -> None:
        """Wait, twice as long as before."""
        self.failures += 1
        wait = wait_s(self.failures, first_s=self._first_s, most_s=self._most_s)
        self._not_before = self._monotonic() + wait

    def worked(self) -> None:
        """Reset the wait."""
        self.failures = 0
        self._not_before = -float("inf")
