"""Progress of code that does not import the library, from its output by ``metrics.log_patterns``."""

from __future__ import annotations

import math
import re
import signal
from collections import deque
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import (
    Any,
    Callable,
    ContextManager,
    Deque,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Pattern,
    Tuple,
)

from envscaler_agent.protocol import LOG_PATTERN_FIELDS, Progress

MAX_LINE_BYTES = 4096
"""Longest part of a line that is searched. Chosen: longer lines are arrays."""
MAX_LINES = 50
"""Newest lines of one read that are searched. Chosen: only the last value counts."""
MAX_SECONDS = 0.1
"""Longest search of a pattern through one read; a slower pattern is dropped. Chosen: 100 times the usual."""


class LogPatterns:
    """Regular expressions with one group each, searched in bounded time.

    Attributes:
        problems: One line for each dropped pattern.
    """

    def __init__(
        self, patterns: Mapping[str, str], *, limit: Optional[Callable[[float], ContextManager[None]]] = None
    ) -> None:
        """Compile *patterns*; an invalid one is named in ``problems`` and left out."""
        self.problems: List[str] = []
        self._patterns: Dict[str, Pattern[str]] = {}
        self._values: Dict[str, float] = {}
        self._nan_loss: Optional[bool] = None
        self._limit = _time_limit if limit is None else limit
        for name, pattern in patterns.items():
            self._add(name, pattern)

    def __bool__(self) -> bool:
        """Return whether there is anything to search for."""
        return bool(self._patterns)

    def feed(self, lines: List[bytes]) -> bool:
        """Search the newest of *lines*, as :class:`Lines` returns them; True when a value was found."""
        if not self._patterns or not lines:
            return False
        texts = [line[:MAX_LINE_BYTES].decode("utf-8", "replace") for line in lines[-MAX_LINES:]]
        texts.reverse()
        waiting = list(self._patterns)
        found = False
        while waiting:
            try:
                with self._limit(MAX_SECONDS):
                    while waiting:
                        found = self._first(waiting[0], texts) or found
                        waiting.pop(0)
            except TimeoutError:
                self._drop(waiting.pop(0))
        return found

    def progress(self) -> Progress:
        """Return the newest value of each field."""
        values: Dict[str, Any] = {
            name: value if name in ("loss", "accuracy") else int(value)
            for name, value in self._values.items()
        }
        return Progress(loss_is_nan=self._nan_loss, **values)

    def _add(self, name: str, pattern: str) -> None:
        if name not in LOG_PATTERN_FIELDS:
            self.problems.append(
                f"log_patterns.{name}: unknown; write one of {', '.join(LOG_PATTERN_FIELDS)}"
            )
            return
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as err:
            self.problems.append(f"log_patterns.{name}: {pattern!r:.200}: {err}")
            return
        if compiled.groups != 1:
            self.problems.append(
                f"log_patterns.{name}: {pattern!r:.200} has {compiled.groups} groups; write exactly one"
            )
            return
        self._patterns[name] = compiled

    def _drop(self, name: str) -> None:
        pattern = self._patterns.pop(name).pattern
        self.problems.append(f"log_patterns.{name}: {pattern!r:.200} took over {MAX_SECONDS} s; dropped")

    def _first(self, name: str, texts: List[str]) -> bool:
        search = self._patterns[name].search
        for text in texts:
            match = search(text)
            value = _number(match[1]) if match and match[1] else None
            if value is not None:
                self._keep(name, value)
                return True
        return False

    def _keep(self, name: str, value: float) -> None:
        if name == "loss":
            self._nan_loss = not math.isfinite(value)
        if math.isfinite(value):
            self._values[name] = value
        elif name == "loss":
            self._values.pop("loss", None)


def _number(text: str) -> Optional[float]:
    try:
        return float(text.strip().replace(",", "").replace("_", ""))
    except ValueError:
        return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside after *seconds*: ``re`` checks for signals while it searches.

    Source: sre calls PyErr_CheckSignals every 4096 steps (Modules/_sre/sre_lib.h). It works only in the main
    thread.
    """

    def _expire(_number: int, _frame: Optional[FrameType]) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, _expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


WINDOW_S = 30.0
"""Chosen: smooths saves of a few seconds, and still shows soon that a machine is slow."""


class Rate:
    """How fast a count grows."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        """Use the last *window_s* seconds."""
        self._window_s = window_s
        self._marks: Deque[Tuple[float, float]] = deque()

    def add(self, now: float, count: float) -> None:
        """Add the *count* at *now*; a count that fell restarts the window."""
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


SLOW_PHASES = ("loading", "evaluation")
SLOW_FACTOR = 6.0
"""How much longer a slow phase, or a save, may last without a step. Chosen: evaluation over a whole
validation set takes minutes where a step takes tenths of a second.
"""
WINDOWS = 30
"""Number of step times in the usual one. Chosen: long enough that one slow window does not count."""


class StallWatch:
    """No step for *factor* times the usual time, at least *min_s*: stalled. Never before the first step."""

    def __init__(self, factor: float, min_s: float) -> None:
        """Set the limits; both >= 0."""
        self._factor = factor
        self._min_s = min_s
        self._step: Optional[int] = None
        self._stepped_at: Optional[float] = None
        self._slow = False
        self._times: Deque[float] = deque(maxlen=WINDOWS)

    def observe(
        self, now: float, *, step: Optional[int], phase: Optional[str] = None, saving: bool = False
    ) -> None:
        """Record the training's report at *now*.

        The first number seen may be a restored one: it starts nothing.
        """
        slow = saving or phase in SLOW_PHASES
        if self._slow and not slow and self._stepped_at is not None:
            self._stepped_at = now  # after a slow phase, the next step has its full time
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
        """Return whether the training hangs."""
        silent = self.silent_s(now)
        return silent is not None and silent > self.allowed_s()
