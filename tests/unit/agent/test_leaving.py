"""Unit tests of the schedule of signals: a request, a time and facts in, a signal out."""

import pytest

from envscaler_agent.drain import Ask, Facts, due_signal

LEAVE = Ask("leave", at=0, align_timeout_s=100, grace_s=10, sequence=3)
STOP = Ask("stop", at=0, grace_s=10, sequence=3)
COOPERATES = Facts(cooperates=True)


@pytest.mark.parametrize(
    ("ask", "facts", "term", "kill"),
    [
        (LEAVE, COOPERATES, 108, 110),
        (LEAVE, Facts(cooperates=True, saving_since=20), 28, 30),
        (LEAVE, Facts(), 0, 10),
        (LEAVE, Facts(snapshot_pending=True), 100, 110),
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
    assert due_signal(LEAVE, 40, Facts(snapshot_pending=True)) is None
    assert due_signal(LEAVE, 40, Facts()) == "term"
    assert due_signal(LEAVE, 49, Facts(term_at=40)) is None
    assert due_signal(LEAVE, 50, Facts(term_at=40)) == "kill"


def test_a_leave_now_waits_a_grace_for_the_snapshot():
    """The request has no alignment, but a copy takes time."""
    now = Ask("leave", at=0, align_timeout_s=0, grace_s=10, sequence=3)

    assert due_signal(now, 9, Facts(snapshot_pending=True)) is None
    assert due_signal(now, 10, Facts(snapshot_pending=True)) == "term"


@pytest.mark.parametrize(
    ("ask", "outcome"),
    [
        (LEAVE, "left"),
        (STOP, "stopped"),
        (Ask("leave", at=0, reason="orphaned: nobody owns it"), "orphaned"),
        (Ask("stop", at=0, reason="orphaned: nobody owns it"), "orphaned"),
        (Ask("stop", at=0, reason="SIGTERM", was_leaving=True), "left"),
    ],
)
def test_what_the_end_will_be_called(ask, outcome):
    """A signal after a drain request, as in a graceful delete, leaves the outcome a drain."""
    assert ask.outcome == outcome
