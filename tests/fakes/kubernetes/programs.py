"""Scripts in place of containers: how long one runs, what it prints, how it ends."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from fakes.kubernetes.clock import Clock, Timer

SIGTERM_CODE = 143
SIGKILL_CODE = 137


class Execution(Protocol):
    """A running container."""

    def start(self, ended: Callable[[int, bool], None], printed: Callable[[str, bytes], None]) -> None:
        """Start; *ended* gets the exit code and whether memory ran out, *printed* the stream and the text."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL."""


@dataclass(frozen=True, slots=True)
class Program:
    """The script of a container.

    Attributes:
        seconds: How long it runs; None until SIGTERM or SIGKILL.
        exit_code: Its exit code without a signal.
        term: ``exit``: ends with `term_code` on SIGTERM after `term_s`; ``ignore``: only SIGKILL ends it.
        prints: Lines with the second at which each is printed.
        oom: The kernel ends it, for memory.
    """

    seconds: float | None = None
    exit_code: int = 0
    term: str = "exit"
    term_code: int = SIGTERM_CODE
    term_s: float = 0.0
    prints: tuple[tuple[float, str], ...] = ()
    oom: bool = False
    start_error: str = ""


FOREVER = Program()
START_ERROR = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc "
    "create failed: "
    'unable to start container process: exec: "{0}": stat {0}: no such file or directory: unknown'
)
"""Wording of containerd 1.6."""


@dataclass(slots=True)
class Scripted:
    """A Program, run by the cluster's clock."""

    program: Program
    clock: Clock
    timers: list[Timer] = field(default_factory=list)
    _ended: Callable[[int, bool], None] | None = None

    def start(self, ended: Callable[[int, bool], None], printed: Callable[[str, bytes], None]) -> None:
        """Schedule every event."""
        self._ended = ended
        for at_s, line in self.program.prints:
            if at_s <= 0:
                printed("stdout", line.encode())
            else:
                self.timers.append(self.clock.after(at_s, lambda line=line: printed("stdout", line.encode())))
        if self.program.seconds is not None:
            code, oom = (SIGKILL_CODE, True) if self.program.oom else (self.program.exit_code, False)
            self.timers.append(self.clock.after(self.program.seconds, lambda: self.end(code, oom=oom)))

    def end(self, code: int, *, oom: bool = False) -> None:
        """End now; once."""
        ended, self._ended = self._ended, None
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        if ended is not None:
            ended(code, oom)

    def terminate(self) -> None:
        """SIGTERM: ends with `term_code`, at once or after `term_s`, or not at all."""
        if self.program.term == "ignore" or self._ended is None:
            return
        if self.program.term_s:
            self.timers.append(
                self.clock.after(self.program.term_s, lambda: self.end(self.program.term_code))
            )
        else:
            self.end(self.program.term_code)

    def kill(self) -> None:
        """SIGKILL."""
        self.end(SIGKILL_CODE)


def infer(argv: list[str], env: dict[str, str]) -> Program:
    """Guess the effect of a small shell command: echo, sleep, exit, true, false, trap ... TERM, test && exit.

    Anything else runs until a signal ends it. PID 1 without a handler ignores SIGTERM, as in a real
    container.
    """
    if not argv:
        return FOREVER
    if argv[0].rpartition("/")[2] in {"sh", "bash"} and len(argv) >= 3 and "c" in argv[1]:
        return _infer_script(argv[2], env)
    if argv[0].startswith("/no/"):
        return Program(seconds=0, exit_code=128, start_error=START_ERROR.format(argv[0]))
    return _infer_script(shlex.join(argv), env)


def _infer_script(script: str, env: dict[str, str]) -> Program:
    program = Program(seconds=0, term="ignore")
    trap = re.match(r"\s*trap '([^']*)' TERM;?", script)
    if trap:
        inner = _infer_script(trap.group(1), env)
        program = replace(program, term="exit", term_code=inner.exit_code, term_s=inner.seconds or 0.0)
        script = script[trap.end() :]
    script = re.sub(r"&&", "\0", re.sub(r"\s*>&2", "", script))
    for statement in re.split(r"[;&]+|\n", script):
        program, is_done = _run(program, statement.replace("\0", "&&").strip(), env)
        if is_done:
            break
    return program


def _run(program: Program, statement: str, env: dict[str, str]) -> tuple[Program, bool]:
    """Interpret one statement; True if the script ends there."""
    text = re.sub(r"\$\{?(\w+)\}?", lambda found: env.get(found.group(1), ""), statement)
    if found := re.fullmatch(r"test (\S+) = (\S+) && exit (\d+)", text):
        if found.group(1) == found.group(2):
            return replace(program, exit_code=int(found.group(3))), True
        return program, False
    now = program.seconds or 0.0
    if found := re.fullmatch(r"(?:exec )?sleep ([\d.]+)", text):
        return replace(program, seconds=now + float(found.group(1))), False
    if found := re.fullmatch(r"exit (\d+)", text):
        return replace(program, exit_code=int(found.group(1))), True
    if found := re.fullmatch(r"(echo|printf) (.*)", text):
        line = found.group(2).strip("'\"") + ("\n" if found.group(1) == "echo" else "")
        return replace(program, prints=(*program.prints, (now, line))), False
    if text in {"", "true", "wait"}:
        return program, False
    if text == "false":
        return replace(program, exit_code=1), False
    return replace(program, seconds=None), True
