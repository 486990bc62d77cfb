"""What a run does, as it happens: its events as lines, its progress and that of builds on one line."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from envscaler_agent.messages import object_or_empty
from envscaler_agent.protocol import Status
from envscaler_airflow.errors import ProtocolError, StoreError
from envscaler_airflow.owner.report import outcome_text, run_bill
from envscaler_airflow.planning.amounts import duration_text, usd_text
from envscaler_airflow.run import AttemptState, RunState, fold
from envscaler_airflow.run.narration import describe, resumed, transfer_text
from envscaler_airflow.store.logs import read_logs
from envscaler_airflow.store.run import Run

_MAX_OUTPUT_BYTES = 1 << 20
"""Largest JSON file of an output that is read. Chosen: summaries are a few kilobytes."""


class OutputReader:
    """Reads what the nodes of a run print, each part once.

    Attributes:
        cursors: How far each node of each attempt was read.
    """

    def __init__(self, run: Run) -> None:
        """Begin with the first line of every attempt of *run*."""
        self._run = run
        self.cursors: dict[tuple[int, int, int], tuple[int, int]] = {}

    def text(self, attempt: tuple[int, int], node: int = 0) -> str:
        """What the node printed since the previous call, or a part of it; "" if nothing.

        Raises:
            StoreError: The store cannot be read.
        """
        key = (*attempt, node)
        data, self.cursors[key] = read_logs(
            self._run, attempt=attempt, node=node, cursor=self.cursors.get(key, (1, 0))
        )
        return data.decode("utf-8", errors="replace")


def marked(text: str, node: int, nodes: int) -> str:
    """*text* with its node before each line, if there are several."""
    return text if nodes == 1 else "".join(f"[{node}] {line}" for line in text.splitlines(keepends=True))


class StageFollower:
    """Follows one run; tells each fact once.

    Attributes:
        name: The stage's human-readable name.
        state: Fold of the events reported so far.
        status: The last status of node 0 of the current attempt; None before the first.
    """

    def __init__(self, run: Run, name: str) -> None:
        """Begin before the first event of *run*; *name* is its stage's."""
        self.name, self._run = name, run
        self.state = RunState()
        self.status: Status | None = None
        self._resumed: dict[tuple[int, int], int] = {}
        self._printed = OutputReader(run)

    def now(self) -> float:
        """The run's time, which is its store's."""
        return self._run.now()

    def lines(self) -> list[str]:
        """Lines about what is new since the previous call; none if the store cannot be read now."""
        lines = self.news()
        try:
            return lines + list(self._output())
        except StoreError:
            return lines

    def skip(self) -> None:
        """Leave out what has happened so far.

        Raises:
            StoreError: The store cannot be read.
        """
        self.state = fold(self._run.events.read(after=self.state.number), self.state)

    def news(self) -> list[str]:
        """The same without what the training printed."""
        lines: list[str] = []
        try:
            lines += self._events()
            self.status = self._current_status()
            lines += self._resume()
        except StoreError:
            pass
        return lines

    def marks(self) -> tuple[object, ...]:
        """What changes whenever the run goes on: events, phase, step, checkpoint, bytes moved, and output."""
        status = self.status
        said = () if status is None else (status.phase, status.progress.step, status.last_checkpoint_step)
        moved = () if status is None or status.transfer is None else (status.transfer.done_bytes,)
        return (self.state.number, *said, *moved, *sorted(self._printed.cursors.items()))

    def attempt(self) -> AttemptState | None:
        """The current attempt, while it runs and was not asked to stop."""
        live = self.state.live
        return live if live is not None and live.phase == "started" else None

    def value_of_hour(self) -> float | None:
        """USD that an hour was worth in the plan; None when it is not known."""
        value = self._json("plan.json").get("value_of_hour_usd")
        return float(value) if isinstance(value, int | float) else None

    def output_json(self, output: str, file: str) -> dict[str, Any]:
        """A JSON file of one of the outputs; {} when it is not there."""
        last = self.state.current
        uri = (last.end.outputs or {}).get(output, "") if last is not None else ""
        folder = uri.removeprefix(f"{self._run.url}/")
        return self._json(f"{folder}/{file}") if folder else {}

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return object_or_empty(self._run.read(name, max_bytes=_MAX_OUTPUT_BYTES) or b"")
        except (StoreError, ProtocolError):
            return {}

    def _events(self) -> Iterator[str]:
        for event in self._run.events.read(after=self.state.number):
            words = describe(event, self.state)
            self.state = fold([event], self.state)
            if words:
                yield words

    def _current_status(self) -> Status | None:
        current = self.state.current
        if current is None:
            return None
        return self._run.status(current.key)

    def _resume(self) -> Iterator[str]:
        current, status = self.state.current, self.status
        if current is None or status is None or status.resumed_at is None:
            return
        before = self._resumed.get(current.key)
        if before == status.resumed_at:
            return
        self._resumed[current.key] = status.resumed_at
        words = resumed(self.state, status.resumed_at, earlier=before)
        if words:
            yield words

    def _output(self) -> Iterator[str]:
        for attempt in self.state.attempts_of(self.state.generation):
            yield from (f"| {line}" for line in self._printed.text(attempt.key).splitlines())


def moves(state: RunState) -> list[tuple[AttemptState, AttemptState]]:
    """Each move that was carried out: the attempt that left and the one that took over."""
    pairs = itertools.pairwise(state.attempts_of(state.generation))
    return [(left, came) for left, came in pairs if outcome_text(left) == "moved"]


EVERY_S = 5.0
"""Between two lines where no person looks, seconds; what is over before prints none. Chosen."""
_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")


class Bar:
    """How far one piece of work is.

    Attributes:
        title: What is done, as shown.
        total: Of what; None while that is unknown.
        done: So far.
        on_terminal: The bar itself; None where lines are printed instead.
    """

    def __init__(
        self, title: str, total: int | None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is shown yet."""
        self.title, self.total, self.done = title, total, 0
        self._monotonic, self._said = monotonic, monotonic()
        self.on_terminal: Progress | None = None
        if sys.stderr.isatty():
            self.on_terminal = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self.on_terminal.add_task(title, total=total)

    def advance(self, more: int = 1) -> None:
        """So many more are done."""
        self.to(self.done + more)

    def to(self, done: int, total: int | None = None, title: str | None = None) -> None:
        """So many are done; *total* and *title* replace what was known before."""
        self.done, self.total, self.title = done, total or self.total, title or self.title
        if self.on_terminal is not None:
            self.on_terminal.update(self._task, completed=done, total=self.total, description=self.title)
        elif self.total and self._monotonic() - self._said >= EVERY_S:
            self._said = self._monotonic()
            click.echo(f"-- {self.title}: {100 * done // self.total} %", err=True)

    def say(self, line: str) -> None:
        """A line above the bar; ``[3/12] RUN ...`` of a builder moves the bar."""
        step = _STEP.match(line)
        if step is not None:
            number, of = int(step[1]), int(step[2])
            if self.on_terminal is not None:
                self.to(number - 1, of, step[3][:40])
            else:
                line = f"[{number}/{of}] {100 * (number - 1) // of} % {step[3]}"
        click.echo(line, err=True)


@contextmanager
def bar(title: str) -> Iterator[Bar]:
    """Show how far the work of the block is."""
    made = Bar(title, None)
    with made.on_terminal or nullcontext():
        yield made


_PHASES = {
    "setup": "preparing: code and inputs come",
    "restoring": "restoring a checkpoint",
    "running": "runs, no step so far",
    "checkpointing": "saving",
    "draining": "saving, then stopping",
    "uploading": "storing outputs",
    "ended": "ended",
}
"""What a node does, as shown."""
_SLOW = ("checkpointing", "draining", "uploading")
"""Phases that are shown beside the step."""


def progress_line(status: Status | None, state: RunState, *, now: float) -> str:
    """How far the live attempt is, and what the run has cost, as far as it is known.

    ``step 120 of 1,584 (8 %), 18.3 steps/s, 1 min 20 s left, loss 0.7123, $0.0031``; empty before the
    training has said anything.
    """
    live = state.live
    if status is None or live is None or status.attempt != live.number:
        return ""
    cost = run_bill(state, now=now).usd
    parts = progress_parts(status)
    moving = transfer_text(status)
    if not _says_phase(status, moving) and (not parts or status.phase in _SLOW):
        parts.append(_PHASES.get(status.phase, status.phase))
    if moving:
        parts.append(moving)
    if cost is not None:
        parts.append(usd_text(cost))
    return ", ".join(parts)


def _says_phase(status: Status, moving: str) -> bool:
    """True where *moving* describes what the phase does, so that one of them is enough."""
    return bool(moving) and status.phase in ("setup", "restoring", "uploading")


def progress_parts(status: Status) -> list[str]:
    """Step, share, speed, time to the end and loss; none before the first step."""
    progress = status.progress
    step, total, speed = progress.step, progress.total_steps, progress.steps_per_s
    if not step:
        return []
    parts = [f"step {step:,}"]
    if total:
        parts = [f"step {step:,} of {total:,} ({100 * step // total} %)"]
    if speed:
        parts.append(f"{speed:,.3g} steps/s" if speed < 1000 else f"{speed:,.0f} steps/s")
        if total and total > step:
            parts.append(f"{duration_text((total - step) / speed)} left")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    return parts


FIRST_S = 5.0
PROGRESS_S = 60.0
"""Between the first two progress lines where no person looks, then twice as long each time up to the second,
seconds. Chosen: a short run shows some, a day of training 1,440."""


class Voice:
    """Prints what happens; see :class:`~envscaler_airflow.cli.common.Output` for readers that go away."""

    def __init__(self, *, to_stderr: bool = False, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Print the training's output on standard output, with *to_stderr* beside the lines."""
        self._to_stderr, self._monotonic = to_stderr, monotonic
        self._live: Live | None = None
        self._next, self._every = 0.0, FIRST_S
        self._said = ""

    def say(self, line: str) -> None:
        """Print one line, unless it is the same as the last."""
        if line != self._said:
            self._said = line
            self._write(f"-- {line}\n", is_error=True)

    def training(self, text: str) -> None:
        """What the training printed, as it stands."""
        self._write(text, is_error=self._to_stderr)

    def progress(self, line: str) -> None:
        """How far it is: in place on a terminal, elsewhere a line now and then."""
        if sys.stderr.isatty():
            self._show(line)
            return
        now = self._monotonic()
        if now >= self._next:
            self._next, self._every = now + self._every, min(2 * self._every, PROGRESS_S)
            self._write(f"-- {line}\n", is_error=True)

    def close(self) -> None:
        """Remove the line in place."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show(self, line: str) -> None:
        text = Text(line, no_wrap=True, overflow="ellipsis", style="dim")
        if self._live is None:
            console, both = Console(stderr=True), sys.stdout.isatty()
            self._live = Live(text, console=console, auto_refresh=False, transient=True, redirect_stdout=both)
            self._live.start()
        self._live.update(text, refresh=True)

    def _write(self, text: str, *, is_error: bool) -> None:
        click.echo(text, nl=False, err=is_error)
