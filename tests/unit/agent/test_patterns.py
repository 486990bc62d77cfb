"""Unit tests of log patterns: lines in, progress out."""

import contextlib

import pytest

from envscaler_agent import progress
from envscaler_agent.output import Lines
from envscaler_agent.progress import LogPatterns
from envscaler_agent.protocol import Progress


def test_reads_the_newest_value_of_each_field():
    """Two steps in one read: the last counts; thousands may be grouped."""
    found = LogPatterns({"step": r"step (\S+)", "loss": r"loss=(\S+)", "epoch": r"epoch: ([\d.]+)"})

    assert found.feed([b"step 1,000 loss=0.5", b"epoch: 1.75", b"step 1,001 loss=0.4", b"saved"])

    assert found.progress() == Progress(step=1001, loss=0.4, epoch=1, loss_is_nan=False)


def test_a_nan_loss_is_said_as_such():
    """No number is invented for it, and the previous one is not kept."""
    found = LogPatterns({"loss": r"loss=(\S+)"})
    found.feed([b"loss=0.5"])

    found.feed([b"loss=nan"])

    assert found.progress() == Progress(loss_is_nan=True)


def test_what_is_no_number_is_no_value():
    """The pattern matches, but the match is not a number."""
    found = LogPatterns({"step": r"step (\w+)"})

    assert not found.feed([b"step one"])
    assert found.progress() == Progress()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"step": "step ("}, "log_patterns.step: 'step (': missing ), unterminated subpattern"),
        ({"step": r"step \d+"}, r"log_patterns.step: 'step \\d+' has 0 groups; write exactly one"),
        ({"speed": r"(\d+)"}, "log_patterns.speed: unknown; write one of step"),
    ],
)
def test_a_bad_pattern_is_named_once_and_left_out(given, problem):
    """The other patterns continue."""
    found = LogPatterns({**given, "loss": r"loss=(\S+)"})

    found.feed([b"step 5 loss=1"])
    found.feed([b"step 6 loss=2"])

    assert len(found.problems) == 1
    assert problem in found.problems[0]
    assert found.progress().loss == 2


def test_long_lines_are_searched_at_their_beginning_only():
    """A line of a megabyte costs no more than one of 4 KiB."""
    found = LogPatterns({"step": r"step (\d+)"})

    assert not found.feed([b"x" * 4096 + b"step 5"])
    assert found.feed([b"step 6" + b"x" * 1_000_000])


def test_only_the_newest_lines_of_a_flood_are_searched():
    """Values that are overwritten within one read do not matter."""
    found = LogPatterns({"step": r"step (\d+)"})

    assert not found.feed([b"step 1", *[b"noise"] * progress.MAX_LINES])


def test_a_pattern_that_explodes_is_dropped(monkeypatch):
    """A timer interrupts a search that takes exponential time; the other pattern continues."""
    monkeypatch.setattr(progress, "MAX_SECONDS", 0.02)
    found = LogPatterns({"step": "((?:a+)+)$", "loss": r"loss=(\S+)"})

    assert found.feed([b"a" * 60 + b"!", b"loss=0.5"])

    assert found.progress().loss == 0.5
    assert len(found.problems) == 1
    assert "took over 0.02 s; dropped" in found.problems[0]


def test_nothing_to_search_costs_nothing():
    """Without patterns no timer is set."""

    def no_limit(_seconds):
        raise AssertionError

    found = LogPatterns({}, limit=no_limit)

    assert not found
    assert not found.feed([b"step 5"])


def test_one_timer_serves_all_patterns_of_a_read():
    """Setting a timer costs system calls: one for each read is enough."""
    set_to = []

    @contextlib.contextmanager
    def limit(seconds):
        set_to.append(seconds)
        yield

    found = LogPatterns({"step": r"step (\d+)", "loss": r"loss (\d+)"}, limit=limit)
    found.feed([b"step 5 loss 1"])

    assert set_to == [progress.MAX_SECONDS]


def test_a_progress_bar_gives_its_newest_step_while_it_runs():
    """A bar of 60 steps on one line that never ends: the last update counts, in any colour (C14)."""
    lines, found = Lines(), LogPatterns({"step": r"(\d+)/60 \[", "loss": r"loss=([0-9.]+)"})
    bar = "\r{p:3d}%|\x1b[32m##\x1b[0m| {n}/60 [00:01<00:59, loss={loss:.4f}]"

    for n in (1, 2, 3):
        found.feed(lines.feed(bar.format(p=n, n=n, loss=1 / n).encode()))

    assert (found.progress().step, found.progress().loss) == (2, 0.5)
    assert lines.settled() == []
    found.feed(lines.settled())
    assert (found.progress().step, found.progress().loss) == (3, 0.3333)
    assert lines.settled() == []


def test_a_bar_that_goes_back_by_backspaces_gives_its_steps():
    """Older Keras draws its bar that way (C14)."""
    lines, found = Lines(), LogPatterns({"step": r"(\d+)/60 \["})

    found.feed(lines.feed(b" 1/60 [....]" + b"\x08" * 12 + b" 2/60 [=...]" + b"\x08" * 12))

    assert found.progress().step == 2


def test_a_line_in_two_parts_is_searched_as_a_whole():
    """``print(..., end=" ")``, a pause, and the rest of the line (C14)."""
    lines, found = Lines(), LogPatterns({"loss": r"step \d+ loss (\S+)"})

    found.feed(lines.feed(b"step 5 "))
    found.feed(lines.settled())
    found.feed(lines.settled())
    found.feed(lines.feed(b"loss 0.25\n"))

    assert found.progress().loss == 0.25
