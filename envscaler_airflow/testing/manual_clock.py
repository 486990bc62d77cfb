"""A clock that moves only when a test moves it."""

from __future__ import annotations


class ManualClock:
    """Manual wall and monotonic time; pass ``clock.time`` or ``clock.monotonic`` as a clock."""

    def __init__(self, time: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        """Start at *time* (seconds since the epoch) and *monotonic* (seconds since any point)."""
        self._time = time
        self._monotonic = monotonic
        self.slept: list[float] = []

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._time

    def monotonic(self) -> float:
        """Seconds that never decrease."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Advance both times by *seconds*.

        Raises:
            ValueError: Time does not go back; see :meth:`set_wall`.
        """
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds!r}")
        self._time += seconds
        self._monotonic += seconds

    def set_wall(self, time: float) -> None:
        """Set only the wall clock, as an administrator or NTP would."""
        self._time = time

    def sleep(self, seconds: float) -> None:
        """Replacement for ``time.sleep``: time passes at once, and is recorded in ``slept``."""
        self.slept.append(seconds)
        self.advance(seconds)
