"""Unit tests of how ends are told apart: codes, signals and last lines in, a reason out."""

import pytest

from envscaler_airflow.agent.ending import End, tell_end
from envscaler_airflow.protocol import EXIT_LEFT, EXIT_ORPHANED, EXIT_STOPPED


def reason(end, *lines):
    """Reason and exit code of an end."""
    ended, code = tell_end(end, lines)
    return ended.reason, code


@pytest.mark.parametrize(
    ("code", "lines", "expected"),
    [
        (0, (), ("succeeded", 0)),
        (0, ("MemoryError",), ("succeeded", 0)),
        (3, ("boom",), ("failed", 3)),
        (-9, (), ("killed", 137)),
        (-15, (), ("killed", 143)),
        (137, ("Killed",), ("killed", 137)),
        (-11, (), ("failed", 139)),
        (127, ("sh: 1: nosuch: not found",), ("not-found", 127)),
        (1, ("numpy._ArrayMemoryError: Unable to allocate 8 GiB", "hint"), ("out-of-memory", 1)),
        (-6, ("terminate called after throwing an instance of 'std::bad_alloc'",), ("out-of-memory", 134)),
        (1, ("OSError: [Errno 12] Cannot allocate memory",), ("out-of-memory", 1)),
        (1, ("torch.OutOfMemoryError: CUDA out of memory. Tried to",), ("cuda-out-of-memory", 1)),
        (1, ("torch.cuda.OutOfMemoryError: x",), ("cuda-out-of-memory", 1)),
        (1, ("RuntimeError: CUDA error: out of memory",), ("cuda-out-of-memory", 1)),
        (1, ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory",), ("cuda-out-of-memory", 1)),
        (1, ("OSError: [Errno 28] No space left on device: 'x'",), ("disk-full", 1)),
        (85, (), ("failed", 85)),
    ],
)
def test_an_end_that_nobody_asked_for(code, lines, expected):
    """Exit codes and signals as shells say them, reasons by what was printed last."""
    assert reason(End(code), *lines) == expected


def test_the_last_matching_line_decides():
    """An out-of-memory that was caught and survived does not explain a full disk."""
    lines = ("CUDA out of memory, halving the batch", "OSError: No space left on device", "Traceback")

    assert reason(End(1), *lines) == ("disk-full", 1)


def test_the_kernels_count_comes_before_what_was_printed():
    """A kill for want of memory leaves no message of its own."""
    assert reason(End(-9, oom_kills=1)) == ("out-of-memory", 137)


@pytest.mark.parametrize(
    ("asked", "code"), [("left", EXIT_LEFT), ("stopped", EXIT_STOPPED), ("orphaned", EXIT_ORPHANED)]
)
def test_going_when_asked_has_its_own_codes(asked, code):
    """Whether the session left or a signal ended it."""
    assert reason(End(EXIT_LEFT, asked=asked, session_left=True)) == (asked, code)
    assert reason(End(-15, asked=asked, signalled=True)) == (asked, code)
    assert reason(End(0, asked=asked, signalled=True)) == (asked, code)


def test_a_launcher_that_turns_leaving_into_a_failure_is_seen_through():
    """Under torchrun workers exit with 85 and the command with 1; the session had said that it leaves."""
    assert reason(End(1, asked="left", session_left=True), "ChildFailedError") == ("left", EXIT_LEFT)


def test_finishing_by_itself_when_asked_to_leave_is_success():
    """The last step came before the signal."""
    assert reason(End(0, asked="left")) == ("succeeded", 0)


def test_failing_by_itself_when_asked_to_leave_is_failure():
    """The save raised: the owner must hear of it."""
    assert reason(End(1, asked="left"), "CheckpointError: disk") == ("failed", 1)


def test_a_failure_says_what_happened():
    """The detail is the line that told the reason; the last lines come along."""
    ended, _ = tell_end(End(1), ["a", "MemoryError: no", "b"])

    assert ended.detail == "MemoryError: no"
    assert ended.last_lines == ("a", "MemoryError: no", "b")
    assert (ended.exit_code, ended.signal) == (1, None)


def test_an_unknown_signal_has_a_number():
    """Real-time signals have no name."""
    ended, _ = tell_end(End(-60), [])

    assert ended.detail == "killed by signal 60"
    assert (ended.exit_code, ended.signal) == (None, 60)
