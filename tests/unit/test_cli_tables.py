"""What is shown of a run, whatever its training's side wrote."""

from __future__ import annotations

import pytest

from envscaler_airflow.cli.story import describe
from envscaler_airflow.cli.tables import print_run
from envscaler_airflow.lifecycle import Event, RunState
from envscaler_airflow.protocol import Status


@pytest.mark.parametrize("words", ["no such file: [/data/x]", "[bold]loud", "[link=http://x]here[/link]"])
def test_words_in_brackets_are_shown_as_they_are(capsys, words):
    """They are no markup: neither swallowed nor an error."""
    state = RunState(status="failed", reason=words)

    print_run("d/run", state, [Status(message=words)])

    shown = "".join(capsys.readouterr().out.split())
    assert shown.count("".join(words.split())) == 2


def test_nothing_that_a_node_says_steers_the_terminal(capsys):
    """No escape sequence, no second line that looks like ours."""
    print_run(
        "d/run", RunState(status="failed"), [Status(message="\x1b[2J\x1b]0;title\x07\nnode 1: ended, ok")]
    )
    told = describe(Event(1, "failed", {"reason": "\x1b[2Jx\ny"}), RunState())

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert sum(line.startswith("node ") for line in shown.splitlines()) == 1
    assert told == "failed:  [2Jx y"


def test_what_a_run_waits_for_is_its_last_line(capsys):
    """In the cluster's own words."""
    print_run("d/run", RunState(status="active"), [], waits="scheduling: 0/2 nodes are available")

    assert capsys.readouterr().out.splitlines()[-1] == "waits: scheduling: 0/2 nodes are available"
