"""Progress of work that takes a while: rich's bar where a person looks, lines with a percentage elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

EVERY_S = 5.0
"""Between two lines where no person looks, seconds; what is over before prints none. Chosen."""
_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")


class Bar:
    """How far one piece of work is.

    Attributes:
        title: What is done, as shown.
        total: Of what; None while that is unknown.
        done: So far.
    """

    def __init__(
        self, title: str, total: int | None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is shown yet."""
        self.title, self.total, self.done = title, total, 0
        self._monotonic, self._said = monotonic, monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task(title, total=total)

    def advance(self, more: int = 1) -> None:
        """So many more are done."""
        self.to(self.done + more)

    def to(self, done: int, total: int | None = None, title: str | None = None) -> None:
        """So many are done; *total* and *title* replace what was known before."""
        self.done, self.total, self.title = done, total or self.total, title or self.title
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=self.total, description=self.title)
        elif self.total and self._monotonic() - self._said >= EVERY_S:
            self._said = self._monotonic()
            click.echo(f"-- {self.title}: {100 * done // self.total} %", err=True)

    def say(self, line: str) -> None:
        """A line above the bar; ``[3/12] RUN ...`` of a builder moves the bar."""
        step = _STEP.match(line)
        if step is not None:
            number, of = int(step[1]), int(step[2])
            if self._progress is not None:
                self.to(number - 1, of, step[3][:40])
            else:
                line = f"[{number}/{of}] {100 * (number - 1) // of} % {step[3]}"
        click.echo(line, err=True)

    def start(self) -> None:
        """Show the bar."""
        if self._progress is not None:
            self._progress.start()

    def stop(self) -> None:
        """Remove it."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def bar(title: str, total: int | None = None) -> Iterator[Bar]:
    """Show how far the work of the block is."""
    made = Bar(title, total)
    made.start()
    try:
        yield made
    finally:
        made.stop()
