"""Run a command inside a training container: report its progress and its end, and stop it on request.

One thread and one loop: the wrapper copies output, reaps children, and reads twice a
second the owner's request, the session's report and the machine's usage. The command
keeps running when reporting fails.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from envscaler_agent import process
from envscaler_agent import spool as ex
from envscaler_agent.ending import EXIT_CODES, EXIT_NOT_EXECUTABLE, Ask, End, Facts, due_signal, tell_end
from envscaler_agent.errors import ProtocolError
from envscaler_agent.host import oom_kills
from envscaler_agent.output import (
    LOG_CHUNK_BYTES,
    LOG_CHUNK_S,
    READ_BYTES,
    Chunks,
    Masker,
    OutputCopier,
    Reporter,
    secret_values,
)
from envscaler_agent.process import ADDRESS, expand
from envscaler_agent.progress import LogPatterns, Rate, StallWatch
from envscaler_agent.protocol import Control, Ended, Progress
from envscaler_agent.sampler import SamplerChild

TICK_S = 0.5
"""Seconds between two reads of the spool. Chosen: soon for a person, next to no CPU time."""
DRAIN_S = 2.0
"""How long output of what the command left behind is awaited. Chosen: a pipe is emptied in milliseconds."""
SIGTERM_GRACE_S = 25.0
"""Chosen: 5 s below the 30 s after which a kubelet kills."""
TOGETHER_S = 0.25
"""How long after a command's exit code 0 a signal may still arrive that was sent to it and to the wrapper at
once. Chosen: a signal to a group reaches both within milliseconds, and later on a busy machine."""
MAX_MESSAGE_CHARS = 500
"""Longest message in a status. Chosen: a line that a person reads."""
MAX_PHASE_CHARS = 100
"""Longest name of a phase. Chosen: one word or a few on a line that a person reads."""


@dataclass(frozen=True)
class Options:
    """How the wrapper runs.

    Attributes:
        wait_start_s: Longest wait for ``start.json``, None for ever; 0 goes on without one.
        grace_s: Seconds from a SIGTERM to the wrapper to the SIGKILL of the command.
        tick_s: Seconds between two reads of the spool.
        sampler: False starts no sampler.
        warning: First line of the log; empty for none.
        exits: True if this process exits with the code that is returned: a later signal does not change it.
    """

    wait_start_s: Optional[float] = None
    grace_s: float = SIGTERM_GRACE_S
    tick_s: float = TICK_S
    sampler: bool = True
    warning: str = ""
    exits: bool = False


class Wrapper:
    """One command, from its start to its end."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        spool: Optional[ex.Spool] = None,
        options: Options = Options(),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to run *argv*; nothing is started or written yet."""
        self._argv = list(argv)
        self._spool = spool
        self._options = options
        self._clock = clock
        self._start = ex.Start()
        self._reporter = Reporter(spool, clock=clock, wall=wall)
        self._masker = Masker([])
        self._report = ex.SessionReport()
        self._progress = Progress()
        self._ask: Optional[Ask] = None
        self._term_at: Optional[float] = None
        self._saving_since: Optional[float] = None
        self._signals: List[int] = []
        self._notes: List[str] = []
        self._orphans_cpu_s = 0.0
        self._code: Optional[int] = None
        self._out = sys.stdout.fileno() if sys.stdout is not None else os.open(os.devnull, os.O_WRONLY)
        self._selector = selectors.PollSelector()
        self._sampler: Optional[SamplerChild] = None
        self._watched = [ex.Watched(spool.control), ex.Watched(spool.progress)] if spool else []
        self._notice = ex.Watched(spool.notice) if spool else None

    def run(self) -> int:
        """Run the command to its end and return the exit code for the wrapper's own caller."""
        with self._signals_noted():
            try:
                return self._run()
            finally:
                self._reporter.close()

    def _run(self) -> int:
        try:
            started = self._await_start()
        except ex.SetupFailedError as err:
            return self._end_early(err.reason, str(err))
        except ProtocolError as err:
            return self._end_early("setup-failed", str(err))
        if not started:
            return self._end_early("stopped", "asked to stop before the command was started")
        environ = self._environ()
        secrets = secret_values(self._start.secret_env, environ)
        self._masker = Masker(secrets)
        cwd = self._start.cwd
        if cwd is not None and not Path(cwd).is_dir():
            return self._end_early("setup-failed", f"working directory {cwd} does not exist")
        self._forget_earlier_life()
        self._argv = expand(self._argv, environ)
        if self._start.node == 0:
            self._reporter.set(address=environ.get(ADDRESS))
        process.become_subreaper()  # before the command can leave anything behind
        reading, writing = os.pipe()
        try:
            command = process.start(self._argv, cwd=cwd, env=environ, output=writing)
        except OSError as err:
            os.close(reading)
            return self._not_started(err)
        finally:
            os.close(writing)
        return self._attend(command, reading, environ, Masker(secrets))

    # -- before the command ------------------------------------------------------------------

    def _await_start(self) -> bool:
        """Wait for ``start.json``; False when asked to stop before."""
        if self._spool is None:
            return True
        limit = self._options.wait_start_s
        deadline = None if limit is None else self._clock() + limit
        start = ex.Watched(self._spool.start)
        self._reporter.set(**_identity(os.environ))
        while True:
            data = start.changed()
            if data is not None:
                self._start = ex.parse_start(data)
                at = self._start
                self._reporter.set(generation=at.generation, attempt=at.attempt, node=at.node)
                return True
            self._look_at_control(self._clock())
            if self._signals or self._ask is not None:
                return False
            if deadline is not None and self._clock() >= deadline:
                if limit == 0:
                    return True
                raise ProtocolError(f"no start.json within {limit:g} s in {self._spool.root}")
            self._reporter.tick()
            self._wait(self._options.tick_s / 5)

    def _environ(self) -> Dict[str, str]:
        environ = dict(os.environ)
        environ.setdefault("PYTHONUNBUFFERED", "1")  # else the log lags behind by a buffer of 8 KiB
        environ.update(self._start.env)
        if self._spool is not None:
            environ[ex.ENV] = str(self._spool.root.resolve())
        if self._start.restore is not None:
            environ["ENVSCALER_RESTORE"] = self._start.restore.path
        elif "ENVSCALER_RESTORE" not in self._start.env:
            environ.pop("ENVSCALER_RESTORE", None)
        return environ

    def _forget_earlier_life(self) -> None:
        """Remove what a wrapper and a session before this one said to each other."""
        if self._spool is not None:
            for path in (self._spool.request, self._spool.progress):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _end_early(self, reason: str, detail: str, code: Optional[int] = None) -> int:
        code = EXIT_CODES[reason] if code is None else code
        detail = self._masker.mask(detail)
        ended = Ended(exit_code=code, reason=reason, detail=detail, last_lines=(detail,))
        self._reporter.set(phase="ended", ended=ended, message=detail[:MAX_MESSAGE_CHARS])
        sys.stderr.write(f"envscaler-agent: {detail}\n")
        return code

    def _not_started(self, err: OSError) -> int:
        name = self._argv[0]
        if isinstance(err, FileNotFoundError):
            return self._end_early("not-found", f"{name}: command not found")
        detail = f"{name}: cannot be started: {err.strerror}"
        return self._end_early("failed", detail, EXIT_NOT_EXECUTABLE)

    # -- while it runs -----------------------------------------------------------------------

    def _attend(
        self, command: subprocess.Popen[bytes], reading: int, environ: Dict[str, str], masker: Masker
    ) -> int:
        kills_before = oom_kills(os.getpid())
        copier = self._make_copier(masker)
        copier.say(self._options.warning)
        stall = StallWatch(self._start.stall_factor, self._start.stall_min_s)
        self._reporter.set(phase="running", setup_s=round(self._clock() - self._reporter.origin, 3))
        if self._spool is not None and self._options.sampler:
            self._sampler = SamplerChild(
                interval_s=self._start.sample_interval_s, origin=self._reporter.origin, clock=self._clock
            )
            self._sampler.watch(command.pid, environ)
        tracker = _Tracker(copier, stall, self._clock())
        self._selector.register(reading, selectors.EVENT_READ)
        next_tick = self._clock()
        while self._code is None:
            self._turn(command, reading, tracker, max(0.0, next_tick - self._clock()))
            if self._clock() >= next_tick:
                next_tick = self._clock() + self._options.tick_s
                self._tick(command, tracker)
        self._clean_up(command, reading, tracker)
        return self._finish(copier, oom_kills(os.getpid()) - kills_before)

    def _make_copier(self, masker: Masker) -> OutputCopier:
        chunks = None
        if self._spool is not None:
            chunks = Chunks(
                self._spool.logs,
                "log",
                max_bytes=LOG_CHUNK_BYTES,
                max_age_s=LOG_CHUNK_S,
                clock=self._clock,
            )
        return OutputCopier(masker, LogPatterns(self._start.log_patterns), chunks, self._out)

    def _turn(
        self, command: subprocess.Popen[bytes], reading: int, tracker: "_Tracker", wait_s: float
    ) -> None:
        """Wait until something happens, and deal with it."""
        copier = tracker.copier
        out = self._out
        self._register(out, selectors.EVENT_WRITE, wanted=copier.has_pending)
        self._register(reading, selectors.EVENT_READ, wanted=copier.has_room and not tracker.is_drained)
        sampled = self._sampler.output if self._sampler is not None else None
        if sampled is not None:
            self._register(sampled, selectors.EVENT_READ, wanted=True)
        ready = self._wait(wait_s)
        if out in ready:
            copier.write_pending()
        if reading in ready:
            self._read_output(reading, tracker)
        if sampled is not None and self._sampler is not None:
            if sampled in ready:
                self._take_samples(self._sampler)
            if self._sampler.output != sampled:
                self._register(sampled, selectors.EVENT_READ, wanted=False)
        self._reap(command)

    def _read_output(self, reading: int, tracker: "_Tracker") -> None:
        data = os.read(reading, READ_BYTES)
        if not data:
            tracker.is_drained = True
        elif tracker.copier.take(data):
            tracker.found = True

    def _take_samples(self, sampler: SamplerChild) -> None:
        for sample in sampler.read():
            seconds = sample.get("cpu_seconds")
            self._reporter.add_sample(
                sample, cpu_seconds=None if seconds is None else seconds + self._orphans_cpu_s
            )

    def _reap(self, command: subprocess.Popen[bytes]) -> None:
        for child in process.reap():
            if child.pid == command.pid:
                command.returncode = self._code = child.code
                self._orphans_cpu_s += child.cpu_s
            elif self._sampler is None or not self._sampler.reaped(child.pid, child.code):
                self._orphans_cpu_s += child.cpu_s

    def _tick(self, command: subprocess.Popen[bytes], tracker: "_Tracker") -> None:
        now = self._clock()
        self._look_at_control(now)
        self._look_at_session(now, tracker)
        self._take_signals(now, command)
        self._press(now, command)
        self._pass_notice(tracker.copier)
        tracker.found = tracker.copier.tick() or tracker.found
        if self._sampler is not None:
            self._sampler.tick(now)
        stalled = tracker.stall.is_stalled(now)
        silent = tracker.stall.silent_s(now)
        note = f"no step for {silent:.0f} s" if stalled and silent is not None else ""
        self._reporter.set(
            phase=self._phase(),
            health="stalled" if stalled else "ok",
            message=self._message(tracker.copier, note),
        )
        self._reporter.tick()

    def _look_at_control(self, now: float) -> None:
        data = self._watched[0].changed() if self._watched else None
        if data is None:
            return
        try:
            control = Control.from_json(data, where="control.json")
        except ProtocolError as err:
            self._note(str(err))  # keep running, refuse to move
            return
        self._reporter.set(control_sequence=control.sequence)
        if control.action in ("drain", "stop"):
            if self._ask is None or self._ask.action != control.action or self._ask.sequence < 0:
                self._ask = Ask(
                    control.action,
                    now,
                    _align_timeout(control),
                    control.grace_s,
                    control.reason,
                    control.sequence,
                )
                self._saving_since = None
        elif self._term_at is None and self._ask is not None and self._ask.sequence >= 0:
            self._ask = None  # taken back in time

    def _pass_notice(self, copier: OutputCopier) -> None:
        """Add the sidecar's notice to the log."""
        data = self._notice.changed() if self._notice is not None else None
        if data is not None:
            with contextlib.suppress(ProtocolError):
                copier.say(ex.parse_notice(data)[: 2 * MAX_MESSAGE_CHARS])

    def _look_at_session(self, now: float, tracker: "_Tracker") -> None:
        data = self._watched[1].changed() if self._watched else None
        if data is not None:
            try:
                self._report = ex.parse_report(data)
            except ProtocolError as err:
                self._note(str(err))
                data = None
        if data is None and not tracker.found:
            return
        tracker.found = False
        progress = tracker.merge(now, self._report)
        tracker.stall.observe(now, step=progress.step, phase=progress.phase, saving=self._report.saving)
        if progress.phase is not None:
            progress = replace(progress, phase=self._masker.mask(progress.phase)[:MAX_PHASE_CHARS])
        self._progress = progress
        self._reporter.add_progress(progress)

    def _take_signals(self, now: float, command: subprocess.Popen[bytes]) -> None:
        for number in self._signals:
            if number == signal.SIGINT and self._ask is not None and self._ask.sequence < 0:
                self._kill(command, signal.SIGKILL)  # Ctrl-C twice
            elif self._ask is None or self._ask.action != "stop":
                name = signal.Signals(number).name
                draining = self._ask is not None
                reason = self._ask.reason if self._ask is not None else f"{name} to the wrapper"
                self._ask = Ask("stop", now, 0.0, self._options.grace_s, reason, was_draining=draining)
                self._forward_stop()
        self._signals.clear()

    def _forward_stop(self) -> None:
        if self._spool is not None:
            try:
                ex.write_json(self._spool.request, {"action": "stop"})
            except OSError as err:
                self._note(f"request.json: {err.strerror}")

    def _press(self, now: float, command: subprocess.Popen[bytes]) -> None:
        if self._ask is None:
            return
        if self._report.draining and self._saving_since is None:
            self._saving_since = now
        facts = Facts(
            cooperates=self._report.cooperates,
            saving_since=self._saving_since,
            snapshot_pending=self._snapshot_pending(self._ask),
            term_at=self._term_at,
        )
        wanted = due_signal(self._ask, now, facts)
        if wanted == "term":
            self._term_at = now
            self._kill(command, signal.SIGTERM)
        elif wanted == "kill":
            self._term_at = now if self._term_at is None else self._term_at
            self._kill(command, signal.SIGKILL)

    def _snapshot_pending(self, ask: Ask) -> bool:
        if self._spool is None or not self._start.checkpoint_path or ask.sequence < 0:
            return False
        return ex.snapshot_sequence(self._spool.snapshot) < ask.sequence

    def _kill(self, command: subprocess.Popen[bytes], number: int) -> None:
        sampler = self._sampler.pid if self._sampler is not None else None
        process.send(command.pid, number, spare=() if sampler is None else (sampler,))

    def _phase(self) -> str:
        if self._ask is not None:
            return "draining"
        return "checkpointing" if self._report.saving else "running"

    # -- after it ----------------------------------------------------------------------------

    def _clean_up(self, command: subprocess.Popen[bytes], reading: int, tracker: "_Tracker") -> None:
        """Empty the pipe, then end what the command left behind."""
        if self._sampler is not None:
            if self._sampler.output is not None:
                self._register(self._sampler.output, selectors.EVENT_READ, wanted=False)
            self._sampler.stop()
        deadline = self._clock() + DRAIN_S
        killed = False
        while not tracker.is_drained and self._clock() < deadline:
            self._turn(command, reading, tracker, 0.05)
            if not killed and self._clock() >= deadline - DRAIN_S / 2:
                self._kill(command, signal.SIGKILL)
                killed = True
        self._kill(command, signal.SIGKILL)
        self._register(reading, selectors.EVENT_READ, wanted=False)
        os.close(reading)
        tracker.is_drained = True
        tracker.found = tracker.copier.finish() or tracker.found
        deadline = self._clock() + DRAIN_S
        while tracker.copier.has_pending and self._clock() < deadline:
            self._turn(command, reading, tracker, 0.05)
        deadline = self._clock() + DRAIN_S
        while process.has_children() and self._clock() < deadline:
            self._turn(command, reading, tracker, 0.02)
        self._look_at_control(self._clock())  # the session may have read the owner's request before us
        self._look_at_session(self._clock(), tracker)

    def _finish(self, copier: OutputCopier, kills: int) -> int:
        end = self._how_it_ended(max(0, kills))
        if end.code == 0 and end.is_done is not True and not self._signals:
            deadline = self._clock() + TOGETHER_S
            while not self._signals and self._clock() < deadline:
                self._wait(deadline - self._clock())
            end = self._how_it_ended(max(0, kills))
        ended, code = tell_end(end, copier.tail())
        self._reporter.set(
            phase="ended",
            ended=ended,
            health="ok",
            cpu_seconds=round(self._orphans_cpu_s, 3),
            message=self._message(copier, ended.detail),
        )
        return code

    def _how_it_ended(self, kills: int) -> End:
        assert self._code is not None
        is_signalled = bool(self._signals) or (self._ask is not None and self._ask.sequence < 0)
        asked = self._ask.outcome if self._ask is not None else "stopped" if is_signalled else None
        return End(
            code=self._code,
            asked=asked,
            signalled=self._term_at is not None,
            wrapper_signalled=is_signalled,
            session_drained=self._report.drained,
            step=self._progress.step,
            total_steps=self._progress.total_steps,
            needs_all_steps=self._start.success == "all-steps",
            oom_kills=kills,
            nodes=self._start.nodes,
        )

    # -- small things ------------------------------------------------------------------------

    def _message(self, copier: OutputCopier, note: str) -> str:
        parts = [note, self._report.warning, *self._notes, *copier.problems()]
        text = "; ".join(part for part in parts if part)
        return self._masker.mask(text)[:MAX_MESSAGE_CHARS]

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes = [*self._notes[-2:], text]

    def _wait(self, seconds: float) -> List[int]:
        ready = [key.fd for key, _ in self._selector.select(seconds)]
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        return ready

    def _register(self, file: int, event: int, *, wanted: bool) -> None:
        known = file in self._selector.get_map()
        if wanted and not known:
            self._selector.register(file, event)
        elif known and not wanted:
            self._selector.unregister(file)

    def _note_signal(self, number: int, _frame: Optional[FrameType]) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    @contextlib.contextmanager
    def _signals_noted(self) -> Any:
        """SIGTERM, SIGINT and the end of a child wake the loop; nothing else is done in a handler."""
        self._woken, waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        wakeup = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        before = {
            number: signal.signal(number, self._note_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        }
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                is_late = self._options.exits and number != signal.SIGCHLD
                signal.signal(number, signal.SIG_IGN if is_late else handler)
            self._selector.close()
            os.close(self._woken)
            os.close(waking)


class _Tracker:
    """What the loop carries from turn to turn about one command."""

    def __init__(self, copier: OutputCopier, stall: StallWatch, started_at: float) -> None:
        self.copier = copier
        self.stall = stall
        self.is_drained = False
        self.found = False
        self._started_at = started_at
        self._first_step_at: Optional[float] = None
        self._steps = Rate()

    def merge(self, now: float, report: ex.SessionReport) -> Progress:
        """Return what the session said, completed by what the patterns found and by times."""
        said, found = report.progress, self.copier.progress()
        values = {
            item.name: getattr(said if getattr(said, item.name) is not None else found, item.name)
            for item in fields(Progress)
        }
        if said.step is None and values["steps_per_s"] is None and values["step"] is not None:
            self._steps.add(now, values["step"])
            rate = self._steps.per_s()
            values["steps_per_s"] = rate
            values["step_time_s"] = 1 / rate if rate else None
        at = now if report.at is None else min(report.at, now)
        if self._first_step_at is None and values["step"] is not None:
            self._first_step_at = now if report.at is None else report.first_step_at
        values["elapsed_s"] = round(max(0.0, at - self._started_at), 3)
        if self._first_step_at is not None:
            values["first_step_s"] = round(max(0.0, self._first_step_at - self._started_at), 3)
        return Progress(**values)


def _align_timeout(control: Control) -> float:
    return 0.0 if control.align == "now" else control.align_timeout_s


def _identity(environ: Mapping[str, str]) -> Dict[str, int]:
    found = {}
    for field in ("generation", "attempt", "node"):
        text = environ.get(f"ENVSCALER_{field.upper()}", "")
        if text.isdigit():
            found[field] = int(text)
    return found
