"""Faults of a spec: collected, then shown together, each with file, line, path and what to write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from envscaler_airflow.envspec.secret_forms import mask
from envscaler_airflow.errors import refuse

MAX_FAULTS = 100
"""Largest number of faults kept per load; the others are only counted. Chosen: no one reads a hundred."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing to change.

    Attributes:
        file: File name as the user gave it; ``spec`` if the text did not come from a file.
        line: From 1; 0 when there is none.
        path: ``resources.requests.memory``; ``""`` for the document itself.
        text: The problem and what to write.
    """

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        """``envs/train.yaml:14: resources.requests.memory: '4096' has no unit; write 4096Mi or 4Gi``."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (where, self.path, self.text) if part)


@dataclass(slots=True)
class Faults:
    """Collects faults of one load."""

    found: dict[Fault, None] = field(default_factory=dict)
    left_out: int = 0

    def add(self, file: str, line: int, path: str, text: str) -> None:
        """Record a fault with secrets masked; the same fault is recorded once."""
        fault = Fault(file, line, mask(path), mask(text))
        if fault in self.found:
            return
        if len(self.found) >= MAX_FAULTS:
            self.left_out += 1
            return
        self.found[fault] = None

    def extend(self, others: Iterable[Fault]) -> None:
        """Add the faults of another collector."""
        for fault in others:
            self.add(fault.file, fault.line, fault.path, fault.text)

    def raise_if_any(self) -> None:
        """Raise all faults, in the order of files and lines.

        Raises:
            SpecError: At least one fault was recorded.
        """
        lines = [str(fault) for fault in sorted(self.found)]
        if self.left_out:
            lines.append(f"and {self.left_out} more faults")
        refuse(lines)
