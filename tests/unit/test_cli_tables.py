"""What is shown of a run, whatever its training's side wrote."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from envscaler_airflow.cli.tables import RunRow, print_report, print_run
from envscaler_airflow.cost import Held, Use, bill
from envscaler_airflow.lifecycle import Event, RunState
from envscaler_airflow.lifecycle.narration import describe
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.protocol import Status


@pytest.mark.parametrize("words", ["no such file: [/data/x]", "[bold]loud", "[link=http://x]here[/link]"])
def test_words_in_brackets_are_shown_as_they_are(capsys, words):
    """They are no markup: neither swallowed nor an error."""
    state = RunState(status="failed", reason=words)

    print_run(RunRow("d/run", "failed", state), [Status(message=words)])

    shown = "".join(capsys.readouterr().out.split())
    assert shown.count("".join(words.split())) == 2


def test_nothing_that_a_node_says_steers_the_terminal(capsys):
    """No escape sequence, no second line that looks like ours."""
    print_run(RunRow("d/run", "failed"), [Status(message="\x1b[2J\x1b]0;title\x07\nnode 1: ended, ok")])
    told = describe(Event(1, "failed", {"reason": "\x1b[2Jx\ny"}), RunState())

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert sum(line.startswith("node ") for line in shown.splitlines()) == 1
    assert told == "the stage failed:  [2Jx y"


def test_what_a_run_waits_for_is_its_last_line(capsys):
    """In the cluster's own words."""
    print_run(RunRow("d/run", "active"), [], waits="scheduling: 0/2 nodes are available")

    assert capsys.readouterr().out.splitlines()[-1] == "waits: scheduling: 0/2 nodes are available"


def test_a_bill_names_both_parts_of_a_mixed_attempt():
    """Which nodes were on which market, and what they cost an hour on the mean."""
    core = Offer(
        "aws", "us-east-1", "p3.2xlarge", "on-demand", 8, 61, gpu_name="V100", gpus=1, usd_per_hour=3.0
    )
    spot = replace(core, capacity_type="spot", usd_per_hour=1.0)
    held = (Held(0, 0.0, 3600.0), Held(1, 0.0, 3600.0))
    found = bill([Use(1, 1, Allocation(core, 2, rest=spot, rest_nodes=1), held, "succeeded")], now=0)
    console = Console(width=200, file=io.StringIO())

    print_report({"bill": found.to_dict()}, console)

    shown = " ".join(console.file.getvalue().split())
    assert (
        "g1-a1 1 x aws/us-east-1/p3.2xlarge/on-demand + 1 x aws/us-east-1/p3.2xlarge/spot "
        "3600 2.0000 4.000000"
    ) in shown


@pytest.mark.parametrize("columns", ["80", "20", "0"])
def test_no_amount_is_cut_off_by_a_long_name_or_a_narrow_terminal(columns, capsys, monkeypatch):
    """A pipe has 80 columns, and allocations of a cluster have names of nearly as many."""
    monkeypatch.setenv("COLUMNS", columns)
    core = Offer("kubernetes", "ap-northeast-1", "g5.12xlarge", "on-demand", 48, 192, "ap-northeast-1a")
    core = replace(core, usd_per_hour=3.0, price_source="cluster_prices[gpu]")
    spot = replace(core, capacity_type="spot", usd_per_hour=1.0)
    held = tuple(Held(node, 0.0, 36000.0) for node in range(4))
    use = Use(1, 1, Allocation(core, 4, rest=spot, rest_nodes=3), held, "succeeded", 100, 10, 0, 9000, 9000)

    print_report({"bill": bill([use], now=0).to_dict(), "attempts": [{"price_source": core.price_source}]})

    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "g1-a1" in line).split()
    assert [row[0], *row[-6:]] == ["g1-a1", "36000", "1.5000", "60.000000", "9000", "0", "succeeded"]
    assert "total $60.00" in shown
    assert "price: cluster_prices[gpu]" in shown
