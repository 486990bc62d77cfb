"""Phases of earlier runs of a stage: what comes next, when, and how long it lasts.

``tables/phases.json``, written by the owner at each start from the checks that sensors recorded, read by
the next sensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from envscaler_agent.protocol import SCHEMA, read_object
from envscaler_airflow.errors import ProtocolError
from envscaler_airflow.planning.record import Record, check_finite
from envscaler_airflow.scaling import Check
from envscaler_airflow.store.base import Store
from envscaler_airflow.store.decisions import read_decisions
from envscaler_airflow.store.keys import RunKey

NAME = "tables/phases.json"
MAX_BYTES = 1 << 20
"""Largest file read, bytes. Chosen: a thousand phases take a tenth."""
MAX_RUNS = 20
"""Earlier runs that are looked at, by name from the last. Chosen: a month of workdays."""


@dataclass(frozen=True, slots=True)
class Span(Record):
    """One phase of an earlier run."""

    phase: str
    lasts_s: float

    def __post_init__(self) -> None:
        """Refuse NaN."""
        check_finite(lasts_s=self.lasts_s)


@dataclass(frozen=True, slots=True)
class Forecast(Record):
    """Phases in the order in which the last run that had any went through them."""

    spans: tuple[Span, ...] = ()

    def lasts_s(self) -> dict[str, float]:
        """Mean seconds of each phase."""
        found: dict[str, list[float]] = {}
        for span in self.spans:
            found.setdefault(span.phase, []).append(span.lasts_s)
        return {phase: sum(values) / len(values) for phase, values in found.items()}

    def after(self, phases: tuple[str, ...], in_phase_s: float) -> tuple[str | None, float | None]:
        """What follows and in how many seconds, after *phases* so far, the last for *in_phase_s* seconds.

        ``(None, None)`` when the earlier run went another way, or this is its last phase.
        """
        done = tuple(span.phase for span in self.spans[: len(phases)])
        if not phases or done != phases or len(phases) >= len(self.spans):
            return None, None
        return self.spans[len(phases)].phase, max(0.0, self.spans[len(phases) - 1].lasts_s - in_phase_s)


def spans_of(checks: Iterable[Check]) -> tuple[Span, ...]:
    """Announced phases in the order of the checks; how long each was seen."""
    found: list[tuple[str, float, float]] = []
    for check in checks:
        seen = check.observation
        if seen.training_phase is None:
            continue
        if found and found[-1][0] == seen.training_phase:
            found[-1] = (seen.training_phase, found[-1][1], seen.elapsed_s)
        else:
            began = found[-1][2] if found else 0.0
            found.append((seen.training_phase, began, seen.elapsed_s))
    return tuple(Span(phase, max(0.0, end - began)) for phase, began, end in found)


def publish(store: Store, key: RunKey) -> bool:
    """Write down the phases of the last earlier run that had any; False when none had. For the owner alone.

    Raises:
        StoreError: The store cannot be read or written.
    """
    deployment, dag, mine, *rest = key.prefix.split("/")
    others = [name for name in store.children(f"{deployment}/{dag}") if name != mine]
    for name in sorted(others, reverse=True)[:MAX_RUNS]:
        prefix = "/".join([deployment, dag, name, *rest])
        spans = spans_of(check for check, _ in read_decisions(store, prefix))
        if spans:
            body = {"schema": SCHEMA, "run": name, **Forecast(spans).to_dict()}
            store.write(f"{key.prefix}/{NAME}", json.dumps(body).encode())
            return True
    return False


def read(store: Store, prefix: str) -> Forecast:
    """What :func:`publish` wrote; nothing when it is absent or cannot be understood.

    Raises:
        StoreError: The store cannot be read.
    """
    try:
        text = store.read(f"{prefix}/{NAME}", max_bytes=MAX_BYTES)
        return Forecast() if text is None else Forecast.from_dict(read_object(text, where=f"{prefix}/{NAME}"))
    except (ProtocolError, ValueError, KeyError, TypeError, OverflowError):
        return Forecast()
