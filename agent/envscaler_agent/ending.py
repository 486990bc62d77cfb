"""How a command ends: the signals of a drain and their times, the reason of an end, the exit codes. Pure.

Time comes as an argument. The end follows from the exit code, the last lines and the requests.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from envscaler_agent.protocol import Ended

EXIT_DRAINED = 85
"""Wrapper: drained: checkpointed and exited. Chosen outside sysexits (64-78) and shells (126-165)."""
EXIT_ORPHANED = 86
"""Wrapper: the owner's lease did not change for ``orphan_after``; checkpointed and exited. Chosen the same
way.
"""
EXIT_STOPPED = 87
"""Wrapper: stopped within its grace on request, with or without a checkpoint. Chosen the same way."""
EXIT_SETUP_FAILED = 88
"""Sidecar or wrapper: workdir, inputs or checkpoint could not be prepared. Chosen the same way."""
EXIT_NOT_FOUND = 127
"""The command does not exist; the exit code that shells use."""
EXIT_CODES = {
    "drained": EXIT_DRAINED,
    "orphaned": EXIT_ORPHANED,
    "stopped": EXIT_STOPPED,
    "setup-failed": EXIT_SETUP_FAILED,
    "not-found": EXIT_NOT_FOUND,
}
"""Reasons with their own exit code; for any other the wrapper exits with the command's."""


def reason_of(exit_code: int) -> str:
    """The reason of a wrapper's exit code: ``succeeded``, a reason of EXIT_CODES, or ``failed``."""
    named = (reason for reason, code in EXIT_CODES.items() if code == exit_code)
    return "succeeded" if exit_code == 0 else next(named, "failed")


TERM_SHARE = 0.8
"""Part of the grace after which SIGTERM is sent to code that should stop by itself. Chosen: the rest is for
its clean-up.
"""
ORPHANED = "orphaned"
"""Prefix of a reason in a control that the sidecar wrote because the run is orphaned."""


@dataclass(frozen=True)
class Ask:
    """The request of the owner, or of a signal to the wrapper.

    Attributes:
        action: ``drain`` or ``stop``.
        at: When it was seen, seconds of the wrapper's clock.
        align_timeout_s, grace_s, reason, sequence: As in Control; sequence is -1 for a signal.
        was_draining: True for a signal that came after the owner's request to drain.
    """

    action: str
    at: float
    align_timeout_s: float = 0.0
    grace_s: float = 30.0
    reason: str = ""
    sequence: int = -1
    was_draining: bool = False

    @property
    def outcome(self) -> str:
        """``drained``, ``stopped`` or ``orphaned``: the reason that the end will have."""
        if self.reason.startswith(ORPHANED):
            return "orphaned"
        return "drained" if self.action == "drain" or self.was_draining else "stopped"


@dataclass(frozen=True)
class Facts:
    """What the wrapper knows about the command at one moment.

    Attributes:
        cooperates: True when it has a Session that calls ``checkpoint``: it stops by itself.
        saving_since: When the save after this request began, None before.
        snapshot_pending: True while the sidecar still has to copy ``checkpoint.path``.
        term_at: When SIGTERM was sent, None before.
    """

    cooperates: bool = False
    saving_since: Optional[float] = None
    snapshot_pending: bool = False
    term_at: Optional[float] = None


def due_signal(ask: Ask, now: float, facts: Facts) -> Optional[str]:
    """Return ``term`` or ``kill`` when it is time for it, else None."""
    term_at, kill_at = _schedule(ask, facts)
    if now >= kill_at:
        return "kill"
    return "term" if facts.term_at is None and now >= term_at else None


def _schedule(ask: Ask, facts: Facts) -> Tuple[float, float]:
    if facts.cooperates:
        began = ask.at
        if ask.action == "drain":
            began += ask.align_timeout_s
            if facts.saving_since is not None:
                began = min(began, facts.saving_since)
        return began + TERM_SHARE * ask.grace_s, began + ask.grace_s
    if ask.action == "stop":
        return ask.at, ask.at + ask.grace_s
    if facts.term_at is not None:
        return facts.term_at, facts.term_at + ask.grace_s
    waits_s = max(ask.align_timeout_s, ask.grace_s) if facts.snapshot_pending else 0.0
    return ask.at + waits_s, math.inf


_Line = Tuple[str, str]

EXIT_NOT_EXECUTABLE = 126
"""The command exists and cannot be run; the exit code that shells use."""

_CUDA_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA (?:driver )?error: out of memory"
    r"|would exceed allowed memory\. \(out of memory\)|Cuda failure (?:\d+ )?'out of memory'"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|HIP out of memory|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor(?!.* allocator cpu)"
)
"""Source: torch c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp, NCCL's checks.h, jaxlib,
TensorFlow's ResourceExhaustedError."""
_HOST_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|Cannot allocate memory|can't allocate memory"
    r"|DefaultCPUAllocator: not enough memory|java\.lang\.OutOfMemoryError|oom-kill"
    r"|OOM when allocating tensor.* allocator cpu"
)
"""Source: CPython, libstdc++, errno 12 of glibc, torch c10/core/impl/alloc_cpu.cpp, HotSpot, kernel log."""
_DISK = re.compile(r"No space left on device|Disk quota exceeded")
"""Source: errno 28 and 122 of glibc."""
_REASONS = ((_CUDA_MEMORY, "cuda-out-of-memory"), (_DISK, "disk-full"), (_HOST_MEMORY, "out-of-memory"))
_HARMLESS = re.compile(
    r"not a failure|warn|^[DIW]\d{4} |^\S+ \S+ [DIW] |\b(?:retrying|halving|reducing)\b", re.IGNORECASE
)
"""Lines that state that the process continued. Source: TensorFlow's bfc_allocator.cc ("the caller indicates
that this is not a failure"), glog's and absl's levels, Python's ``warnings``.
"""
_RANK = re.compile(r"^(?:\[(?:rank|default)?\d+\]:?\s?|E\s(?:\d\S*\s)*)+")
"""Source: torchrun's and torch's prefixes: ``[rank1]: ``, ``[default0]:``, ``E ...``."""
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*_*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Abort)\b")
_LAUNCHER = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:ChildFailedError|CalledProcessError|ProcessExitedException)\b"
)
"""Errors with which a launcher repeats its worker's: torchrun, accelerate, torch.multiprocessing."""
_ECHO = re.compile(
    r"Dist(?:Backend|Network|Store)Error|Connection (?:closed|reset) by|[Rr]emote process exited|Broken pipe"
    r"|Rendezvous(?:Closed|Connection|Timeout)Error"
)
"""Errors of a rank whose peer has ended or did not come: the cause is there. Source: torch.distributed, its
elastic.rendezvous.api, gloo, NCCL.
"""
_PEER = re.compile(
    r"Dist(?:Backend|Network|Store)Error|Rendezvous(?:Closed|Connection|Timeout)Error|gloo/transport"
)
"""Those of them that only communication between ranks causes; a data server closes connections, too."""
_ASIDE = re.compile(r"Exception ignored in|Exception in thread")
"""Line before the traceback of an error that ends no process. Source: CPython."""
_FINAL_LINES = 12
"""Number of last lines that are searched for an error without a traceback. Chosen: what interpreters,
launchers and trackers say after an error.
"""
_MESSAGE_LINES = 4
"""Lines of an error's message that are searched. Chosen: NCCL's and C++ errors have two or three."""
_OF_THE_CODE = re.compile(
    r"^(?:ValueError|KeyError|TypeError|IndexError|AttributeError|NameError|AssertionError|ImportError"
    r"|ModuleNotFoundError|FileNotFoundError|ZeroDivisionError|SyntaxError|NotImplementedError)\b"
)
"""Errors that a process killed for its memory never causes in another one."""


@dataclass(frozen=True)
class End:
    """What is known when a command has ended.

    Attributes:
        code: As in ``subprocess``: the exit code, or minus the signal.
        asked: ``drained``, ``stopped`` or ``orphaned`` when it was asked to stop, else None.
        signalled: True when the wrapper had sent SIGTERM or SIGKILL before.
        wrapper_signalled: True when a signal came to the wrapper itself, and so perhaps the command too.
        session_drained: True when a Session saved and reported that it stops.
        step, total_steps: Last step that it reported, and the number of all its steps; None when unknown.
        needs_all_steps: True when the spec says ``success: all-steps``.
        oom_kills: Kills by the out-of-memory killer in its cgroup while it ran.
        nodes: How many nodes run the command together.
    """

    code: int
    asked: Optional[str] = None
    signalled: bool = False
    wrapper_signalled: bool = False
    session_drained: bool = False
    step: Optional[int] = None
    total_steps: Optional[int] = None
    needs_all_steps: bool = False
    oom_kills: int = 0
    nodes: int = 1

    @property
    def is_done(self) -> Optional[bool]:
        """True when every step was done; None when that is unknown."""
        if self.step is None or not self.total_steps:
            return None
        return self.step >= self.total_steps

    @property
    def is_cut_short(self) -> bool:
        """True when a signal or a request may have ended the command: exit code 0 is then not a success."""
        if self.is_done:
            return False
        if self.signalled or self.wrapper_signalled:
            return True
        return self.asked is not None and self.is_done is False


def tell_end(end: End, last_lines: Sequence[str]) -> Tuple[Ended, int]:
    """Return the end for the owner and the wrapper's exit code for its own caller.

    Exit code 0 is success, except after a signal or a request to drain: then only if every step was done. A
    command that drains and exits by itself with 0 before any signal has succeeded, unless its step count or
    its Session shows otherwise: a pipeline ends with the code of its last command. One that fails by itself
    before a signal has failed, with or without a request.
    """
    code = end.code if end.code >= 0 else None
    number = -end.code if end.code < 0 else None
    reason, detail = _reason(end, last_lines)
    ended = Ended(exit_code=code, signal=number, reason=reason, detail=detail, last_lines=tuple(last_lines))
    return ended, _exit_code(end, reason)


def _reason(end: End, last_lines: Sequence[str]) -> Tuple[str, str]:
    if end.code == 0 and not (end.is_cut_short or end.session_drained):
        return _success(end)
    if end.session_drained or _went(end):
        return end.asked or "drained", _how_it_went(end)
    error = final_error(last_lines)
    if end.oom_kills and not (error and _OF_THE_CODE.match(error[0])):
        return "out-of-memory", "the out-of-memory killer ended it: more memory was used than its limit"
    number = -end.code if end.code < 0 else end.code - 128
    if number in (signal.SIGKILL, signal.SIGTERM):
        return "killed", f"killed by {_signal_name(number)} from outside"
    by_error = _class_of(error)
    if by_error:
        return by_error
    if end.nodes > 1 and error and _PEER.search(error[0]):
        return "peer-lost", error[0][:500]
    if end.code == EXIT_NOT_FOUND:
        return "not-found", last_lines[-1] if last_lines else "a command was not found"
    if end.code < 0:
        return "failed", f"killed by {_signal_name(number)}"
    return "failed", error[0][:500] if error else f"exit code {end.code}"


def _success(end: End) -> Tuple[str, str]:
    if end.is_done is not False:
        return "succeeded", ""
    words = f"exit code 0 at step {end.step:,} of {end.total_steps:,}"
    if end.needs_all_steps:
        return "failed", f"{words}; the spec says success: all-steps"
    return "succeeded", f"{words}: the training ended before its last step"


def _went(end: End) -> bool:
    is_signalled = end.signalled or end.wrapper_signalled
    return end.asked is not None and (is_signalled or end.code in (0, EXIT_DRAINED, EXIT_STOPPED))


def _how_it_went(end: End) -> str:
    if end.session_drained:
        return "saved and stopped"
    if end.code == 0 and end.is_done is False:
        return f"ended when asked, at step {end.step:,} of {end.total_steps:,}"
    return "ended when asked"


def final_error(last_lines: Sequence[str]) -> List[str]:
    """Return the lines of the error that ended the process, its first one first; empty when none is found.

    That is the exception of the last traceback, with its direct cause. Errors of a launcher that repeat a
    worker's are skipped, and errors of a rank whose peer has ended. Without a traceback it is the last line,
    among the last few, that names an error.
    """
    lines = [_split(line) for line in last_lines]
    found = _last_traceback(lines)
    return found if found is not None else _last_error_line([text for _, text in lines])


def _split(line: str) -> _Line:
    """The writer of a line (the prefix of a rank), and its text."""
    match = _RANK.match(line)
    prefix = match[0] if match else ""
    return prefix, line[len(prefix) :].rstrip()


def _last_traceback(lines: Sequence[_Line]) -> Optional[List[str]]:
    heads = [index for index, (_, text) in enumerate(lines) if text.strip() == _TRACEBACK]
    end, echo = len(lines), None
    for head in reversed(heads):
        error = _error_after(lines, head, end)
        if error is None or (head and _ASIDE.match(lines[head - 1][1])):
            end = head
            continue
        message = _message(lines, error, end)
        follows = [text for _, text in lines[error + len(message) : end] if text.strip()]
        if len(follows) > _FINAL_LINES:
            return echo  # the process continued after it
        if _class_of(message) is None and (_LAUNCHER.match(message[0]) or _ECHO.search(message[0])):
            end, echo = head, echo or message
            continue
        return message + _causes(lines, head)
    return echo


def _error_after(lines: Sequence[_Line], head: int, end: int) -> Optional[int]:
    """Index of the exception of the traceback at *head*: its writer's next line without indent."""
    writer = lines[head][0]
    for index in range(head + 1, end):
        prefix, text = lines[index]
        if prefix == writer and text and not text[0].isspace():
            return index
    return None


def _message(lines: Sequence[_Line], first: int, end: int) -> List[str]:
    found = [lines[first][1]]
    for prefix, text in lines[first + 1 : min(end, first + _MESSAGE_LINES)]:
        is_over = not text.strip() or text.strip() == _TRACEBACK or _ERROR.match(text)
        if is_over or prefix != lines[first][0]:
            break
        found.append(text)
    return found


def _causes(lines: Sequence[_Line], head: int) -> List[str]:
    """The exceptions that caused the one whose traceback begins at *head*."""
    before = [index for index in range(head) if lines[index][1].strip()]
    if not before or lines[before[-1]][1].strip() != _CAUSE:
        return []
    return _last_traceback(lines[: before[-1]]) or []


def _last_error_line(lines: Sequence[str]) -> List[str]:
    for line in reversed([line for line in lines if line.strip()][-_FINAL_LINES:]):
        text = line.strip(" \t|+-")
        if _HARMLESS.search(text) or _LAUNCHER.match(text):
            continue
        if _ERROR.match(text) or _class_of([text]) is not None:
            return [text]
    return []


def _class_of(error: Sequence[str]) -> Optional[Tuple[str, str]]:
    for line in error:
        for pattern, reason in _REASONS:
            if pattern.search(line):
                return reason, line.strip()[:500]
    return None


def _exit_code(end: End, reason: str) -> int:
    if reason in EXIT_CODES:
        return EXIT_CODES[reason]
    if end.code == 0 and reason != "succeeded":
        return 1  # the backend must also see a failure
    return end.code if end.code >= 0 else 128 - end.code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
