"""Unit tests of a node's outcome: exit code, the wrapper's report, the kernel's count."""

import pytest

from envscaler_agent.protocol import Ended
from envscaler_airflow.backends.base import NodeEnd
from envscaler_airflow.backends.local.node_main import ended_of, tell_end

OOM = "the kernel killed 1 process(es) at the memory limit"


@pytest.mark.parametrize(
    ("returncode", "end"),
    [
        (0, NodeEnd(0, None, "succeeded")),
        (1, NodeEnd(1, None, "failed")),
        (85, NodeEnd(85, None, "drained")),
        (86, NodeEnd(86, None, "orphaned")),
        (87, NodeEnd(87, None, "stopped")),
        (88, NodeEnd(88, None, "setup-failed")),
        (127, NodeEnd(127, None, "not-found")),
        (-9, NodeEnd(None, 9, "killed")),
        (None, NodeEnd(None, 9, "killed")),
    ],
)
def test_without_a_word_the_exit_code_tells(returncode, end):
    """The protocol's codes have names; a signal is a kill."""
    assert tell_end(returncode) == end


def test_the_wrapper_s_word_goes_before_its_exit_code():
    """A command's own exit code 85 is a failure when the wrapper reports one."""
    said = Ended(exit_code=85, reason="failed", detail="exit code 85")

    assert tell_end(85, said=said) == NodeEnd(85, None, "failed", "exit code 85")


def test_a_signal_of_the_command_is_told_as_one():
    """The wrapper exits with 128 + 11 as shells do; the outcome is signal 11."""
    said = Ended(signal=11, reason="killed", detail="SIGSEGV")

    assert tell_end(139, said=said) == NodeEnd(None, 11, "killed", "SIGSEGV")


def test_an_orphan_that_had_to_be_killed_is_told_as_one():
    """Node main killed it after the sidecar had declared it orphaned."""
    ended_by = ("orphaned", "nobody owned it")

    assert tell_end(-9, ended_by=ended_by) == NodeEnd(None, 9, "orphaned", "nobody owned it")
    assert tell_end(0, ended_by=ended_by) == NodeEnd(0, None, "succeeded")


@pytest.mark.parametrize("returncode", [1, -9, None])
def test_a_count_of_the_kernel_makes_a_failure_out_of_memory(returncode):
    """The command failed because of the kill, no matter which process was killed."""
    end = tell_end(returncode, oom_kills=1)

    assert (end.reason, end.detail) == ("out-of-memory", OOM)


@pytest.mark.parametrize("returncode", [0, 85, 86, 87, 88, 127])
def test_what_ended_well_or_before_the_start_is_not_out_of_memory(returncode):
    """A killed helper does not matter to a command that survived it."""
    assert tell_end(returncode, oom_kills=3) == tell_end(returncode)


@pytest.mark.parametrize("count", [0, None])
def test_no_count_is_no_verdict(count):
    """None means unknown, 0 means no kill."""
    assert tell_end(-9, oom_kills=count).reason == "killed"


def test_a_deadline_is_told_unless_the_command_made_it():
    """Drained or killed at the deadline, the reason is the deadline; a success stays one."""
    deadline = ("deadline-exceeded", "ran into its deadline of 60 s")

    assert tell_end(85, ended_by=deadline) == NodeEnd(85, None, *deadline)
    assert tell_end(None, ended_by=deadline) == NodeEnd(None, 9, *deadline)
    assert tell_end(0, ended_by=deadline) == NodeEnd(0, None, "succeeded")


def test_a_stop_is_told_by_how_it_went():
    """Ended at SIGTERM: stopped. Ended with a code: the code's meaning.

    Not ended: killed, with the reason.
    """
    stop = ("killed", "stopped; what was left after 5 s was killed")

    assert tell_end(-15, ended_by=stop).reason == "stopped"
    assert tell_end(87, ended_by=stop).reason == "stopped"
    assert tell_end(None, ended_by=stop) == NodeEnd(None, 9, *stop)


@pytest.mark.parametrize("reason", ["killed", "deadline-exceeded"])
def test_a_reason_that_no_wrapper_reports_is_a_kill(reason):
    """Node main's own reasons are not of the protocol."""
    assert ended_of(NodeEnd(None, 9, reason, "d")) == Ended(signal=9, reason="killed", detail="d")


def test_a_command_that_outlived_its_grace_was_killed_though_its_wrapper_spoke_first():
    """The wrapper sees the command die by SIGKILL and reports "stopped" before it is killed itself."""
    said = Ended(exit_code=None, signal=9, reason="stopped")

    end = tell_end(87, said=said, ended_by=("killed", "stopped; what was left after 0.5 s was killed"))

    assert (end.signal, end.reason) == (9, "killed")
