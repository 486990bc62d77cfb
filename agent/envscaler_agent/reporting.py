"""The wrapper's reports: ``wrapper.json`` for the owner, metric lines for the record."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import replace
from typing import Any, Callable, Deque, Dict, Mapping, Optional, Tuple

from envscaler_agent.output import METRICS_CHUNK_BYTES, METRICS_CHUNK_S, Chunks
from envscaler_agent.protocol import Progress, Status
from envscaler_agent.spool import Spool, write_atomic

STATUS_S = 1.0
"""Time between two statuses for the sidecar. Chosen: as often as the sampler reports."""
USAGE_S = 5.0
"""Time between two updates of the means in them. Chosen: a third of the time that they average."""
USAGE_SAMPLES = 15
"""Number of samples in the means of a status: 15 s at one per second, as often as the sidecar sends it."""
END_TRIES = 60
"""Tries, a second apart, to report the end on a full disk. Chosen: the sidecar empties logs within seconds.
"""
LOSS_S = 10.0
"""Time between two losses in the metrics. Chosen: as often as a session reads a tensor."""
_STEP_FIELDS = ("step", "epoch", "samples", "tokens", "batch", "step_time_s", "data_time_s", "sync_time_s")
_LOSS_FIELDS = ("loss", "loss_is_nan", "accuracy")
_STAMPS = ("t", "at")
_LAST = (
    *("_peak_bytes", "_limit_bytes", "_total_bytes", "_errors", "_xid", "_seconds"),
    *("_joules", "_reasons"),
)
"""Suffixes of names whose mean has no meaning: counters, all-time values, bit masks."""


class Reporter:
    """Writes the status at most once a second and only after a change."""

    def __init__(
        self, spool: Optional[Spool], *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Begin at ``t`` = 0; without a spool it writes nothing."""
        self.status = Status()
        self.origin = clock()
        self._spool = spool
        self._clock = clock
        self._wall = wall
        self._written: Optional[Status] = None
        self._written_at = self._usage_at = -math.inf
        self._loss_at = self._step_at = -math.inf
        self._step: Tuple[Any, ...] = ()
        self._samples: Deque[Mapping[str, float]] = deque(maxlen=USAGE_SAMPLES)
        self._metrics: Optional[Chunks] = None
        if spool is not None:
            self._metrics = Chunks(
                spool.metrics,
                "jsonl",
                max_bytes=METRICS_CHUNK_BYTES,
                max_age_s=METRICS_CHUNK_S,
                clock=clock,
            )

    def set(self, **changes: Any) -> None:
        """Change fields of the status; they are written with the next :meth:`tick`."""
        self.status = replace(self.status, **changes)

    def tick(self, *, at_once: bool = False) -> None:
        """Write what has changed, close old chunks."""
        now = self._clock()
        if self._metrics is not None:
            self._metrics.tick()
        if self._spool is None or not (at_once or now - self._written_at >= STATUS_S):
            return
        if self._written is not None and self.status == self._written:
            return
        self.status = replace(self.status, sequence=self.status.sequence + 1)
        try:
            write_atomic(self._spool.wrapper, self.status.to_json())
        except OSError:
            return  # a full disk: the next tick retries
        self._written, self._written_at = self.status, now

    def add_sample(self, sample: Mapping[str, Any], *, cpu_seconds: Optional[float]) -> None:
        """Process a line of the sampler."""
        numbers = {name: value for name, value in sample.items() if _is_number(value)}
        self._line(numbers)
        self._samples.append({name: value for name, value in numbers.items() if name not in _STAMPS})
        now = self._clock()
        if now - self._usage_at >= USAGE_S:
            self._usage_at = now
            self.set(usage=aggregate(self._samples), cpu_seconds=cpu_seconds)

    def add_progress(self, progress: Progress) -> None:
        """Process the training's report: a line at a new step, the loss every ten seconds."""
        self.set(progress=progress)
        now = self._clock()
        step = tuple(getattr(progress, name) for name in _STEP_FIELDS[:2])
        if step == self._step or now - self._step_at < STATUS_S or step == (None, None):
            return
        self._step, self._step_at = step, now
        names: Tuple[str, ...] = _STEP_FIELDS
        if now - self._loss_at >= LOSS_S:
            self._loss_at = now
            names += _LOSS_FIELDS
        values = {name: getattr(progress, name) for name in names}
        self._line({name: value for name, value in values.items() if value is not None})

    def close(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Close the metrics and write the last status: without it the owner never learns of the end."""
        if self._samples:
            self.set(usage=aggregate(self._samples))
        if self._metrics is not None:
            self._metrics.close()
        for _ in range(END_TRIES):
            self.tick(at_once=True)
            if self._spool is None or self._written == self.status:
                return
            sleep(1.0)

    def _line(self, values: Dict[str, Any]) -> None:
        if self._metrics is None or not values:
            return
        stamp = {"t": round(self._clock() - self.origin, 3), "at": round(self._wall(), 3)}
        self._metrics.write(json.dumps({**stamp, **values}, separators=(",", ":")).encode() + b"\n")


def aggregate(samples: "Deque[Mapping[str, float]] | list[Mapping[str, float]]") -> Dict[str, float]:
    """Return the mean of each value; for peaks, limits, totals and counts the last one."""
    values: Dict[str, float] = {}
    counts: Dict[str, int] = {}
    for sample in samples:
        for name, value in sample.items():
            if name.endswith(_LAST):
                values[name], counts[name] = value, 1
            else:
                values[name] = values.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + 1
    return {name: round(value / counts[name], 3) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
