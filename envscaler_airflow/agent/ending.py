"""How a command ended, told apart from its exit code, its last lines and what was asked. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from envscaler_airflow.protocol import EXIT_LEFT, EXIT_NOT_FOUND, EXIT_ORPHANED, EXIT_STOPPED, Ended

EXIT_NOT_EXECUTABLE = 126
"""The command exists and cannot be run, as shells say it."""
ASKED_EXITS = {"left": EXIT_LEFT, "stopped": EXIT_STOPPED, "orphaned": EXIT_ORPHANED}

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


@dataclass(frozen=True)
class End:
    """What is known when a command has ended.

    Attributes:
        code: As ``subprocess`` says it: the exit code, or minus the signal.
        asked: ``left``, ``stopped`` or ``orphaned`` when it was asked to go, else None.
        signalled: True when the wrapper had sent SIGTERM or SIGKILL by then.
        session_left: True when a Session saved and said that it leaves.
        oom_kills: Kills by the out-of-memory killer in its cgroup while it ran.
    """

    code: int
    asked: Optional[str] = None
    signalled: bool = False
    session_left: bool = False
    oom_kills: int = 0


def tell_end(end: End, last_lines: Sequence[str]) -> Tuple[Ended, int]:
    """Return the end for the owner and the wrapper's exit code for whoever started it.

    A command that was asked to go and finishes by itself before a signal has succeeded, unless a Session
    of it said that it leaves: a pipeline ends with the code of its last command.
    One that fails by itself before a signal has failed, asked or not.
    """
    code = end.code if end.code >= 0 else None
    number = -end.code if end.code < 0 else None
    reason, detail = _reason(end, last_lines)
    ended = Ended(exit_code=code, signal=number, reason=reason, detail=detail, last_lines=tuple(last_lines))
    return ended, _exit_code(end, reason)


def _reason(end: End, last_lines: Sequence[str]) -> Tuple[str, str]:
    if end.code == 0 and not (end.signalled or end.session_left):
        return "succeeded", ""
    if end.session_left or (end.asked and (end.signalled or end.code in (EXIT_LEFT, EXIT_STOPPED))):
        return end.asked or "left", "saved and left" if end.session_left else "ended when asked"
    if end.oom_kills:
        return "out-of-memory", "the out-of-memory killer ended it: more memory was used than its limit"
    by_line = _from_lines(last_lines)
    if by_line:
        return by_line
    if end.code == EXIT_NOT_FOUND:
        return "not-found", last_lines[-1] if last_lines else "a command was not found"
    number = -end.code if end.code < 0 else end.code - 128
    if number in (signal.SIGKILL, signal.SIGTERM):
        return "killed", f"killed by {_signal_name(number)} from outside"
    if end.code < 0:
        return "failed", f"killed by {_signal_name(number)}"
    return "failed", f"exit code {end.code}"


def _from_lines(last_lines: Sequence[str]) -> Optional[Tuple[str, str]]:
    for line in reversed(last_lines):
        for pattern, reason in _REASONS:
            if pattern.search(line):
                return reason, line.strip()[:500]
    return None


def _exit_code(end: End, reason: str) -> int:
    if reason in ASKED_EXITS:
        return ASKED_EXITS[reason]
    return end.code if end.code >= 0 else 128 - end.code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
