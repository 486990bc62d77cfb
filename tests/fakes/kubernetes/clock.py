"""The cluster's time: real, faster than real, or stopped until a test advances it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable


class Timer:
    """A single future action; `cancel` prevents it."""

    __slots__ = ("act", "due")

    def __init__(self, due: float, act: Callable[[], None]) -> None:
        """Store the action and its time (epoch seconds of the cluster)."""
        self.due = due
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Prevent it; has no effect afterwards."""
        self.act = None


class Clock:
    """Cluster time. Only `now` may be called outside the cluster's own thread.

    Args:
        speed: Seconds of the cluster for each real one; 0 stands still, so that only `advance` moves it.
    """

    def __init__(self, speed: float = 1.0) -> None:
        """Start now."""
        self._speed = speed
        self._began = time.monotonic()
        self._base = time.time()
        self._queue: list[tuple[float, int, Timer]] = []
        self._ticket = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.settle: Callable[[], None] = lambda: None

    def now(self) -> float:
        """Epoch seconds of the cluster."""
        return self._base + (time.monotonic() - self._began) * self._speed

    def stand_still(self) -> None:
        """From now on only :meth:`advance` moves the time, independent of the real time that passes."""
        self._base, self._speed = self.now(), 0.0
        self._arm()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire timers from *loop* from now on."""
        self._loop = loop
        self._arm()

    def detach(self) -> None:
        """Fire no more."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._loop = None

    def after(self, seconds: float, act: Callable[[], None]) -> Timer:
        """Call *act* after *seconds* of the cluster."""
        return self.at(self.now() + seconds, act)

    def at(self, due: float, act: Callable[[], None]) -> Timer:
        """Call *act* at *due*, or at once if that time has passed."""
        timer = Timer(due, act)
        heapq.heappush(self._queue, (due, next(self._ticket), timer))
        self._arm()
        return timer

    def advance(self, seconds: float) -> None:
        """Advance by *seconds* now, and call everything due in them in order."""
        target = self.now() + seconds
        self.settle()
        while self._queue and self._queue[0][0] <= target:
            self._base += max(0.0, self._queue[0][0] - self.now())
            self._fire_due()
            self.settle()
        self._base += max(0.0, target - self.now())
        self._arm()

    def _fire_due(self) -> None:
        while self._queue and self._queue[0][0] <= self.now():
            timer = heapq.heappop(self._queue)[2]
            if timer.act is not None:
                act, timer.act = timer.act, None
                act()

    def _arm(self) -> None:
        if self._loop is None:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._queue and self._queue[0][2].act is None:
            heapq.heappop(self._queue)
        if not self._queue:
            return
        wait = self._queue[0][0] - self.now()
        if wait <= 0:
            self._alarm = self._loop.call_later(0, self._ring)
        elif self._speed > 0:
            self._alarm = self._loop.call_later(wait / self._speed, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._fire_due()
        self._arm()
