"""What a foreground owner prints: lines on standard error, the training's output, a line of progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

FIRST_S = 5.0
PROGRESS_S = 60.0
"""Between the first two progress lines where no person looks, then twice as long each time up to the second,
seconds. Chosen: a short run shows some, a day of training 1,440."""


class Voice:
    """Speaks as long as anything listens: a terminal that is gone, or a closed pipe, ends nothing."""

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
            with suppress(OSError):
                live.stop()

    def _show(self, line: str) -> None:
        text = Text(line, no_wrap=True, overflow="ellipsis", style="dim")
        try:
            if self._live is None:
                console, both = Console(stderr=True), sys.stdout.isatty()
                self._live = Live(
                    text, console=console, auto_refresh=False, transient=True, redirect_stdout=both
                )
                self._live.start()
            self._live.update(text, refresh=True)
        except OSError:
            self._mute()

    def _write(self, text: str, *, is_error: bool) -> None:
        try:
            click.echo(text, nl=False, err=is_error)
        except OSError:
            self._mute()

    def _mute(self) -> None:
        """Nothing reads any longer: further output, also what is left in buffers, goes nowhere."""
        self._live = None
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            for stream in (sys.__stdout__, sys.__stderr__):
                with suppress(OSError, ValueError, AttributeError):
                    os.dup2(null, stream.fileno())  # type: ignore[union-attr]
        finally:
            os.close(null)
