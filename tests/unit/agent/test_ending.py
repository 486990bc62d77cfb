"""Unit tests of how outcomes are distinguished: codes, signals and last lines in, a reason out."""

from __future__ import annotations

import pytest

from envscaler_agent.ending import (
    EXIT_DRAINED,
    EXIT_ORPHANED,
    EXIT_STOPPED,
    Ask,
    End,
    Facts,
    due_signal,
    tell_end,
)


def reason(end, *lines):
    """Return the reason and exit code of an end."""
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
    """Exit codes and signals as in shells, reasons by the last printed lines."""
    assert reason(End(code), *lines) == expected


ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
    "1.23 GiB is free. Process 4242 has 77.86 GiB memory in use. Of the allocated memory 76.00 GiB is "
    "allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""As libc10_cuda.so of torch 2.14.1 composes it."""
REJECTED = (
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: 20.00 GiB"
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
"""What torch 2.13.0 raises for ``torch.empty(10**15)``."""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((f"torch.OutOfMemoryError: {ALLOCATOR}",), "cuda-out-of-memory"),
        ((f"torch.cuda.OutOfMemoryError: {ALLOCATOR}",), "cuda-out-of-memory"),
        ((f"[rank1]: torch.OutOfMemoryError: {ALLOCATOR}", "E ChildFailedError:"), "cuda-out-of-memory"),
        ((f"  what():  {ALLOCATOR}", "Aborted (core dumped)"), "cuda-out-of-memory"),
        (
            (f"torch.OutOfMemoryError: {REJECTED}",),
            "cuda-out-of-memory",
        ),
        (
            ("  what():  Allocation on device 0 would exceed allowed memory. (out of memory)",),
            "cuda-out-of-memory",
        ),
        (("torch.AcceleratorError: CUDA error: out of memory",), "cuda-out-of-memory"),
        (("RuntimeError: CUDA driver error: out of memory",), "cuda-out-of-memory"),
        (("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",), "cuda-out-of-memory"),
        (
            ("torch.distributed.DistBackendError: NCCL error", "Cuda failure 2 'out of memory'"),
            "cuda-out-of-memory",
        ),
        ((f"RuntimeError: {HOST}",), "out-of-memory"),
        ((f"[rank0]: RuntimeError: {HOST}", "E ChildFailedError:"), "out-of-memory"),
        (
            ("RuntimeError: unable to mmap 1024 bytes from file </torch_1_2>: Cannot allocate memory (12)",),
            "out-of-memory",
        ),
        (
            ("OOM when allocating tensor with shape[9] on /device:GPU:0 by allocator GPU_0_bfc",),
            "cuda-out-of-memory",
        ),
        (
            ("OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator cpu",),
            "out-of-memory",
        ),
        (("RuntimeError: CUDA error: device-side assert triggered",), "failed"),
        (("RuntimeError: CUDA error: an illegal memory access was encountered",), "failed"),
    ],
)
def test_memory_of_the_gpu_is_told_from_that_of_the_machine(lines, expected):
    """More machine memory helps only one of them; the texts are torch's own."""
    assert reason(End(1), *lines) == (expected, 1)


def test_the_last_matching_line_decides():
    """An out-of-memory error that the code caught and survived does not explain a full disk."""
    lines = ("CUDA out of memory, halving the batch", "OSError: No space left on device", "Traceback")

    assert reason(End(1), *lines) == ("disk-full", 1)


def test_the_kernels_count_comes_before_what_was_printed():
    """An out-of-memory kill leaves no message of its own."""
    assert reason(End(-9, oom_kills=1)) == ("out-of-memory", 137)


@pytest.mark.parametrize(
    ("asked", "code"), [("drained", EXIT_DRAINED), ("stopped", EXIT_STOPPED), ("orphaned", EXIT_ORPHANED)]
)
def test_going_when_asked_has_its_own_codes(asked, code):
    """Whether the session drained or a signal ended it."""
    assert reason(End(EXIT_DRAINED, asked=asked, session_drained=True)) == (asked, code)
    assert reason(End(-15, asked=asked, signalled=True)) == (asked, code)
    assert reason(End(0, asked=asked, signalled=True)) == (asked, code)


def test_a_launcher_that_turns_leaving_into_a_failure_is_seen_through():
    """Under torchrun workers exit with 85 and the command with 1; the session had reported the drain."""
    assert reason(End(1, asked="drained", session_drained=True), "ChildFailedError") == (
        "drained",
        EXIT_DRAINED,
    )


def test_a_pipeline_that_turns_leaving_into_success_is_seen_through():
    """``python train.py | tee log`` ends with the exit code of ``tee``: the training still drained."""
    assert reason(End(0, asked="drained", session_drained=True)) == ("drained", EXIT_DRAINED)
    assert reason(End(0, asked="stopped", session_drained=True)) == ("stopped", EXIT_STOPPED)
    assert reason(End(0, asked="orphaned", session_drained=True)) == ("orphaned", EXIT_ORPHANED)


def test_finishing_by_itself_when_asked_to_leave_is_success():
    """The training made its last step before the signal."""
    assert reason(End(0, asked="drained")) == ("succeeded", 0)


def test_failing_by_itself_when_asked_to_leave_is_failure():
    """The save raised: the owner must know."""
    assert reason(End(1, asked="drained"), "CheckpointError: disk") == ("failed", 1)


def test_a_failure_says_what_happened():
    """The detail is the line that determined the reason; the last lines are included."""
    ended, _ = tell_end(End(1), ["a", "MemoryError: no", "b"])

    assert ended.detail == "MemoryError: no"
    assert ended.last_lines == ("a", "MemoryError: no", "b")
    assert (ended.exit_code, ended.signal) == (1, None)


def test_an_unknown_signal_has_a_number():
    """Real-time signals have no name."""
    ended, _ = tell_end(End(-60), [])

    assert ended.detail == "killed by signal 60"
    assert (ended.exit_code, ended.signal) == (None, 60)


TRACEBACK = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 9, in <module>'


@pytest.mark.parametrize(
    ("lines", "expected", "detail"),
    [
        (
            (
                "Allocator ran out of memory trying to allocate 2.00GiB. CUDA out of memory: not a failure",
                TRACEBACK,
                FRAME,
                "ValueError: bad label",
            ),
            "failed",
            "ValueError: bad label",
        ),
        (
            (
                TRACEBACK,
                FRAME,
                "torch.OutOfMemoryError: CUDA out of memory",
                *(f"step {number}" for number in range(2, 20)),
            ),
            "failed",
            "exit code 1",
        ),
        (
            (
                TRACEBACK,
                FRAME,
                "torch.OutOfMemoryError: CUDA out of memory",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                TRACEBACK,
                FRAME,
                "KeyError: 'labels'",
            ),
            "failed",
            "KeyError: 'labels'",
        ),
        (
            (
                TRACEBACK,
                FRAME,
                "OSError: [Errno 28] No space left on device: 'x'",
                "",
                "The above exception was the direct cause of the following exception:",
                "",
                TRACEBACK,
                FRAME,
                "RuntimeError: cannot save",
            ),
            "disk-full",
            "OSError: [Errno 28] No space left on device: 'x'",
        ),
        (
            (
                f"[rank1]: {TRACEBACK}",
                f"[rank1]: {FRAME}",
                "[rank1]: torch.OutOfMemoryError: CUDA out of memory",
                f"[rank0]: {TRACEBACK}",
                f"[rank0]: {FRAME}",
                "[rank0]: torch.distributed.DistBackendError: Connection closed by peer",
                TRACEBACK,
                FRAME,
                "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
                "train.py FAILED",
            ),
            "cuda-out-of-memory",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            (
                TRACEBACK,
                FRAME,
                "MemoryError",
                "Exception ignored in: <function Loader.__del__>",
                TRACEBACK,
                FRAME,
                "AssertionError: can only test a child process",
            ),
            "out-of-memory",
            "MemoryError",
        ),
        (("MemoryError was caught", *["step"] * 20, "boom"), "failed", "exit code 1"),
        (("ValueError: bad label", "UserWarning: CUDA out of memory"), "failed", "ValueError: bad label"),
    ],
)
def test_a_class_needs_the_error_that_ended_the_process(lines, expected, detail):
    """A word in the log is not enough: neither a survived error nor a library's warning (C)."""
    ended, _ = tell_end(End(1), lines)

    assert (ended.reason, ended.detail) == (expected, detail)


def test_a_kill_from_outside_is_no_error_of_the_code():
    """Output before SIGKILL did not end the process (C)."""
    assert reason(End(-9), "torch.OutOfMemoryError: CUDA out of memory") == ("killed", 137)


def test_a_worker_killed_for_memory_and_survived_does_not_explain_a_key_error():
    """The kernel counts a kill that the training survived (C)."""
    assert reason(End(1, oom_kills=1), TRACEBACK, FRAME, "KeyError: 'x'") == ("failed", 1)
    assert reason(End(1, oom_kills=1), TRACEBACK, FRAME, "RuntimeError: worker is killed by signal") == (
        "out-of-memory",
        1,
    )


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (End(0, wrapper_signalled=True, asked="stopped", step=23, total_steps=60), ("stopped", EXIT_STOPPED)),
        (End(0, wrapper_signalled=True, asked="stopped"), ("stopped", EXIT_STOPPED)),
        (End(0, wrapper_signalled=True, asked="stopped", step=60, total_steps=60), ("succeeded", 0)),
        (End(0, signalled=True, asked="drained", step=60, total_steps=60), ("succeeded", 0)),
        (End(0, asked="drained", step=23, total_steps=60), ("drained", EXIT_DRAINED)),
        (End(-15, wrapper_signalled=True, asked="stopped"), ("stopped", EXIT_STOPPED)),
        (End(1, wrapper_signalled=True, asked="stopped"), ("stopped", EXIT_STOPPED)),
    ],
)
def test_an_end_after_a_signal_is_success_only_if_the_work_was_done(end, expected):
    """The command and the wrapper got SIGTERM together, and the command exits with 0 (C)."""
    assert reason(end) == expected


def test_an_early_exit_0_is_a_success_that_says_so():
    """Step 5 of 1,000: early stopping or a bug, and only the spec can define it as a failure (C)."""
    ended, code = tell_end(End(0, step=5, total_steps=1000), [])
    assert (ended.reason, ended.detail, code) == (
        "succeeded",
        "exit code 0 at step 5 of 1,000: the training ended before its last step",
        0,
    )

    ended, code = tell_end(End(0, step=5, total_steps=1000, needs_all_steps=True), [])
    assert (ended.reason, ended.detail, code) == (
        "failed",
        "exit code 0 at step 5 of 1,000; the spec says success: all-steps",
        1,
    )


DRAIN = Ask("drain", at=0, align_timeout_s=100, grace_s=10, sequence=3)
STOP = Ask("stop", at=0, grace_s=10, sequence=3)
COOPERATES = Facts(cooperates=True)


@pytest.mark.parametrize(
    ("ask", "facts", "term", "kill"),
    [
        (DRAIN, COOPERATES, 108, 110),
        (DRAIN, Facts(cooperates=True, saving_since=20), 28, 30),
        (DRAIN, Facts(), 0, 10),
        (DRAIN, Facts(snapshot_pending=True), 100, 110),
        (STOP, COOPERATES, 8, 10),
        (STOP, Facts(), 0, 10),
    ],
)
def test_when_signals_are_sent(ask, facts, term, kill):
    """Code that stops by itself gets no signal until four fifths of its grace are over."""
    before = term - 0.1
    assert due_signal(ask, before, facts) is None
    assert due_signal(ask, term, facts) == "term"
    told = Facts(facts.cooperates, facts.saving_since, facts.snapshot_pending, term_at=term)
    assert due_signal(ask, kill - 0.1, told) is None
    assert due_signal(ask, kill, told) == "kill"


def test_a_snapshot_that_comes_ends_the_wait():
    """The sidecar copied at 40: SIGTERM at once, SIGKILL one grace later."""
    assert due_signal(DRAIN, 40, Facts(snapshot_pending=True)) is None
    assert due_signal(DRAIN, 40, Facts()) == "term"
    assert due_signal(DRAIN, 49, Facts(term_at=40)) is None
    assert due_signal(DRAIN, 50, Facts(term_at=40)) == "kill"


def test_a_leave_now_waits_a_grace_for_the_snapshot():
    """The request has no alignment, but a copy takes time."""
    now = Ask("drain", at=0, align_timeout_s=0, grace_s=10, sequence=3)

    assert due_signal(now, 9, Facts(snapshot_pending=True)) is None
    assert due_signal(now, 10, Facts(snapshot_pending=True)) == "term"


@pytest.mark.parametrize(
    ("ask", "outcome"),
    [
        (DRAIN, "drained"),
        (STOP, "stopped"),
        (Ask("drain", at=0, reason="orphaned: no process owns it"), "orphaned"),
        (Ask("stop", at=0, reason="orphaned: no process owns it"), "orphaned"),
        (Ask("stop", at=0, reason="SIGTERM", was_draining=True), "drained"),
    ],
)
def test_what_the_end_will_be_called(ask, outcome):
    """A signal after a drain request, as in a graceful delete, leaves the outcome a drain."""
    assert ask.outcome == outcome


@pytest.mark.parametrize(
    "lines",
    [
        (
            f"[rank0]: {TRACEBACK}",
            f"[rank0]: {FRAME}",
            "[rank0]: torch.distributed.DistBackendError: NCCL error",
        ),
        (TRACEBACK, FRAME, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        (
            TRACEBACK,
            FRAME,
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection failed",
        ),
    ],
)
def test_a_node_whose_peer_is_gone_has_not_failed_by_itself(lines):
    """The loss of another node is not an error of the code; on one node there is no other node to lose."""
    assert reason(End(1, nodes=2), *lines) == ("peer-lost", 1)
    assert reason(End(1, nodes=1), *lines) == ("failed", 1)


def test_an_error_of_its_own_explains_the_end_before_that_of_a_peer():
    """An echo after the code's own error changes nothing."""
    own = (f"[rank1]: {TRACEBACK}", f"[rank1]: {FRAME}", "[rank1]: ValueError: labels out of range")
    echo = (f"[rank0]: {TRACEBACK}", f"[rank0]: {FRAME}", "[rank0]: torch.distributed.DistBackendError: x")

    server = (TRACEBACK, FRAME, "ConnectionResetError: [Errno 104] Connection reset by peer")

    assert reason(End(1, nodes=2), *own, *echo) == ("failed", 1)
    assert reason(End(1, nodes=2), *server) == ("failed", 1)
