"""How a run is shown, for any text that its training wrote."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from envscaler_agent.protocol import Ended, Progress, Status, Transfer
from envscaler_airflow.cli.tables import RunRow, print_report, print_run, print_runs, print_table
from envscaler_airflow.owner.report import AttemptReport, Report
from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.run import Event, RunState
from envscaler_airflow.run.cost import UsageInterval, Use, bill
from envscaler_airflow.run.event_bodies import Failed
from envscaler_airflow.run.narration import describe


@pytest.mark.parametrize("words", ["no such file: [/data/x]", "[bold]loud", "[link=http://x]here[/link]"])
def test_words_in_brackets_are_shown_as_they_are(capsys, words):
    """They are not markup: neither swallowed nor an error."""
    state = RunState(status="failed", reason=words)

    print_run(RunRow("d/run", "failed", state), [Status(message=words)])

    shown = "".join(capsys.readouterr().out.split())
    assert shown.count("".join(words.split())) == 2


def test_nothing_that_a_node_says_steers_the_terminal(capsys):
    """No escape sequence, no second line that looks like ours."""
    print_run(RunRow("d/run", "failed"), [Status(message="\x1b[2J\x1b]0;title\x07\nnode 1: ended, ok")])
    told = describe(Event(1, Failed(reason="\x1b[2Jx\ny")), RunState())

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert sum(line.startswith("node ") for line in shown.splitlines()) == 1
    assert told == "the stage failed:  [2Jx y"


def test_a_node_says_how_far_a_transfer_is(capsys):
    """In ``envscaler status`` (F6)."""
    moving = Transfer("uploading", "checkpoint 440", 37, 100)

    over = Status(node=1, phase="ended", progress=Progress(step=7), ended=Ended(reason="killed", signal=9))
    print_run(RunRow("d/run", "active"), [Status(phase="running", transfer=moving), over])

    said = " ".join(capsys.readouterr().out.split())
    assert "node 1: ended, killed, step 7" in said
    assert "node 0: running, uploading checkpoint 440: 37 % of 100 bytes, ok, step -" in said


def test_what_a_run_waits_for_is_its_last_line(capsys):
    """In the cluster's own words."""
    print_run(RunRow("d/run", "active"), [], waits="scheduling: 0/2 nodes are available")

    assert capsys.readouterr().out.splitlines()[-1] == "waits: scheduling: 0/2 nodes are available"


def test_a_bill_names_both_parts_of_a_mixed_attempt():
    """Which nodes were on which market, and their average cost an hour."""
    core = Offer(
        "aws", "us-east-1", "p3.2xlarge", "on-demand", 8, 61, gpu_name="V100", gpus=1, usd_per_hour=3.0
    )
    spot = replace(core, capacity_type="spot", usd_per_hour=1.0)
    held = (UsageInterval(0, 0.0, 3600.0), UsageInterval(1, 0.0, 3600.0))
    found = bill(
        [Use(1, 1, Allocation(core, 2, rest=spot, rest_nodes=1), held, "succeeded")], now=0, tariffs={}
    )
    console = Console(width=200, file=io.StringIO())

    print_report(Report("succeeded", 1, "", found), console)

    shown = " ".join(console.file.getvalue().split())
    assert (
        "g1-a1 1 x aws/us-east-1/p3.2xlarge/on-demand + 1 x aws/us-east-1/p3.2xlarge/spot 3600 2.0000 4.00"
    ) in shown


@pytest.mark.parametrize("columns", ["80", "20", "0"])
def test_no_amount_is_cut_off_by_a_long_name_or_a_narrow_terminal(columns, capsys, monkeypatch):
    """A pipe has 80 columns, and allocations of a cluster have names of nearly as many."""
    monkeypatch.setenv("COLUMNS", columns)
    core = Offer("kubernetes", "ap-northeast-1", "g5.12xlarge", "on-demand", 48, 192, "ap-northeast-1a")
    core = replace(core, usd_per_hour=3.0, price_source="cluster_prices[gpu]")
    spot = replace(core, capacity_type="spot", usd_per_hour=1.0)
    held = tuple(UsageInterval(node, 0.0, 36000.0) for node in range(4))
    use = Use(1, 1, Allocation(core, 4, rest=spot, rest_nodes=3), held, "succeeded", 100, 10, 0, 9000, 9000)

    attempt = AttemptReport(attempt=1, allocation="", price_source=core.price_source, reason="")
    print_report(Report("succeeded", 1, "", bill([use], now=0, tariffs={}), (attempt,)))

    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "g1-a1" in line).split()
    assert [row[0], *row[-6:]] == ["g1-a1", "36000", "1.5000", "60.00", "9000", "0", "succeeded"]
    assert "total $60.00" in shown
    assert "price: cluster_prices[gpu]" in shown


def test_rows_are_whole_where_the_output_is_piped(capsys, monkeypatch):
    """A row is one line for names of any length, so that grep finds it (F14)."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "d/retrain_text_classifier/" + "scheduled__2026-07-20T00:00:00+00:00" * 4 + "/train/-1"

    print_runs([RunRow(name, "active", usd=0.00012, age_s=200.0, owner="ana@build-3:4711")])

    (row,) = [line for line in capsys.readouterr().out.splitlines() if "active" in line]
    cells = ["3 min 20 s", "$0.00012", "ana@build-3:4711"]
    assert name.removeprefix("d/").removesuffix("/-1") in row
    assert all(cell in row for cell in cells)


def test_a_list_fits_eighty_columns():
    """On a terminal of that width names continue below (F14)."""
    console = Console(width=80, file=io.StringIO())
    names = ["a" * 60, "b" * 20]

    print_runs([RunRow(f"d/{name}/r/t/-1", "failed to start", owner="ana@h:1") for name in names], console)

    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_of_offers_is_folded_on_a_narrow_terminal(capsys, monkeypatch, columns):
    """Two lines for each row, every figure with its name; nothing beyond eighty columns (F14)."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    row = ("aws/us-east-1 (+16)", "p5.48xlarge", "192", "2048", "H100:8", "-", "98.3200", "x" * 40)

    print_table(("INFRA", "INSTANCE", "vCPUs", "MEM", "GPUs", "SPOT", "$/h", "WHY NOT"), [row])

    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "aws/us-east-1 (+16)  p5.48xlarge"
    assert " ".join("".join(shown[1:]).split()) == (
        f"vCPUs 192, MEM 2048, GPUs H100:8, $/h 98.3200, WHY NOT {'x' * 40}"
    )
    assert max(map(len, shown)) <= 80


def test_a_run_is_shown_with_its_parameters(capsys):
    """Beside age, cost and owner (F14)."""
    print_run(RunRow("d/run", "active", usd=0.02, age_s=60.0), [], parameters={"rate": 0.5, "note": "a\nb"})

    shown = capsys.readouterr().out.splitlines()
    assert shown[1:3] == ["began 1 min ago, cost $0.02, owner -", "parameters: note=a b, rate=0.5"]
