"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """Wall and monotonic time by hand; pass ``clock.time`` or ``clock.monotonic`` where a clock is asked."""

    def __init__(self, time: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        """Start at *time* (seconds since the epoch) and *monotonic* (seconds since anything)."""
        self._time = time
        self._monotonic = monotonic
        self.slept: list[float] = []

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._time

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass on both.

        Raises:
            ValueError: Time does not go back; see :meth:`set_wall`.
        """
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds!r}")
        self._time += seconds
        self._monotonic += seconds

    def set_wall(self, time: float) -> None:
        """Set the wall clock alone, as an administrator or NTP would."""
        self._time = time

    def sleep(self, seconds: float) -> None:
        """Stand in for ``time.sleep``: time passes at once, and is written to ``slept``."""
        self.slept.append(seconds)
        self.advance(seconds)
