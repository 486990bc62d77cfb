"""Unit tests of the output copier and of the sampler's supervisor: pipes instead of processes."""

import os

import pytest

from envscaler_agent.output import MAX_PENDING, WRITE_BYTES, Chunks, Masker, OutputCopier
from envscaler_agent.progress import LogPatterns
from envscaler_agent.sampler import BACKOFF_S, GOOD_S, HANG_S, SamplerChild


@pytest.fixture
def pipe():
    """A pipe; the fixture closes both ends afterwards."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def make(out, *, chunks=None, secrets=(), patterns=None):
    """Return a copier to *out*."""
    return OutputCopier(Masker(secrets), LogPatterns(patterns or {}), chunks, out)


def test_output_goes_to_stdout_and_to_chunks_masked(pipe, tmp_path):
    """Both get the same text."""
    chunks = Chunks(tmp_path, "log", max_bytes=1000, max_age_s=10, clock=lambda: 0)
    copier = make(pipe[1], chunks=chunks, secrets=["hunter22"])

    copier.take(b"key hunt")
    copier.take(b"er22\n")
    copier.finish()
    copier.write_pending()

    assert os.read(pipe[0], 100) == b"key ***\n"
    assert (tmp_path / "000001.log").read_bytes() == b"key ***\n"
    assert copier.tail() == ("key ***",)


def test_a_slow_reader_holds_the_command_and_not_the_wrapper(pipe):
    """256 KiB wait; then the command blocks, as it would without a wrapper."""
    copier = make(pipe[1])
    assert copier.has_room

    copier.take(b"x" * MAX_PENDING)

    assert not copier.has_room
    assert copier.has_pending
    copier.write_pending()
    assert len(os.read(pipe[0], MAX_PENDING)) == WRITE_BYTES


def test_a_reader_that_is_gone_stops_nothing(pipe, tmp_path):
    """The chunks continue."""
    chunks = Chunks(tmp_path, "log", max_bytes=1000, max_age_s=10, clock=lambda: 0)
    copier = make(pipe[1], chunks=chunks)
    os.close(pipe[0])
    pipe[0] = None

    copier.take(b"one\n")
    copier.write_pending()
    copier.take(b"two\n")
    copier.finish()

    assert not copier.has_pending
    assert (tmp_path / "000001.log").read_bytes() == b"one\ntwo\n"


def test_patterns_search_what_was_masked(pipe):
    """A secret number is not parsed as a step."""
    copier = make(pipe[1], secrets=["12345"], patterns={"step": r"step (\S+)"})

    assert not copier.take(b"step 12345\n")
    assert copier.take(b"step 7\n")
    assert copier.progress().step == 7


class Process:
    """A child process that prints what the test writes."""

    def __init__(self, reading):
        """Connect it by a pipe."""
        self.pid = 4242
        self.returncode = None
        self.stdout = os.fdopen(reading, "rb")


@pytest.fixture
def keeper(monkeypatch):
    """A sampler's supervisor, with its clock, its children and the processes that it killed."""
    state = {"now": 0.0, "killed": [], "started": [], "ends": []}

    def start(argv, **_):
        reading, writing = os.pipe()
        state["ends"].append(writing)
        state["started"].append(argv[-1])
        return Process(reading)

    monkeypatch.setattr("envscaler_agent.sampler.subprocess.Popen", start)
    monkeypatch.setattr(
        "envscaler_agent.sampler.os.kill", lambda pid, number: state["killed"].append((pid, number))
    )
    sampler = SamplerChild(interval_s=1, origin=0, clock=lambda: state["now"])
    sampler.watch(77, {"CUDA_VISIBLE_DEVICES": "1"})
    yield sampler, state
    sampler.stop()
    for end in state["ends"]:
        os.close(end)


def test_samples_are_read_line_by_line(keeper):
    """Half a line waits for its other half; invalid lines are skipped."""
    sampler, state = keeper
    sampler.tick(0)

    os.write(state["ends"][0], b'{"a": 1}\nnonsense\n{"a"')
    assert sampler.read() == [{"a": 1}]
    os.write(state["ends"][0], b": 2}\n")
    assert sampler.read() == [{"a": 2}]


def test_a_sampler_that_died_is_started_again_later_and_later(keeper):
    """After 1, 2, 4 ... 60 s."""
    sampler, state = keeper
    waits = []
    for _ in range(len(BACKOFF_S) + 1):
        sampler.tick(state["now"])
        assert sampler.reaped(4242, 1)
        died = state["now"]
        while sampler.pid is None:
            state["now"] += 0.5
            sampler.tick(state["now"])
        waits.append(state["now"] - died)

    assert waits == [*BACKOFF_S, BACKOFF_S[-1]]


def test_a_sampler_that_lived_long_is_started_again_at_once(keeper):
    """The back-off restarts at its minimum."""
    sampler, state = keeper
    sampler.tick(0)
    sampler.reaped(4242, 1)
    state["now"] = 10
    sampler.tick(10)
    state["now"] = 10 + GOOD_S + 1
    sampler.reaped(4242, 1)

    sampler.tick(state["now"] + BACKOFF_S[0])

    assert sampler.starts == 3


def test_a_silent_sampler_is_killed_and_replaced(keeper):
    """20 s without a line; its late end does not count as an orphan of the command."""
    sampler, state = keeper
    sampler.tick(0)

    sampler.tick(HANG_S)
    assert state["killed"] == []
    sampler.tick(HANG_S + 0.1)

    assert state["killed"] == [(4242, 9)]
    assert sampler.pid is None
    assert sampler.reaped(4242, -9)
    assert not sampler.reaped(4243, 0)


def test_the_call_that_hung_is_left_out_by_the_next(keeper):
    """The child names the call before it ends."""
    sampler, state = keeper
    sampler.tick(0)

    os.write(state["ends"][0], b'{"hung": "gpu0:power"}\n')
    assert sampler.read() == []
    sampler.reaped(4242, 3)
    state["now"] = 5
    sampler.tick(5)

    assert "gpu0:power" not in state["started"][0]
    assert '"skip": ["gpu0:power"]' in state["started"][1]


def test_a_stopped_sampler_stays_stopped(keeper):
    """The command has ended."""
    sampler, state = keeper
    sampler.tick(0)

    sampler.stop()
    state["now"] = 1000
    sampler.tick(1000)

    assert sampler.starts == 1
    assert state["killed"] == [(4242, 9)]


def test_the_sampler_sees_the_gpus_of_the_command(keeper):
    """The GPUs that CUDA shows to the command, by its environment."""
    sampler, state = keeper
    sampler.tick(0)

    assert '"visible": "1"' in state["started"][0]
    assert '"root": 77' in state["started"][0]
