"""Unseen files of the same form: no job is late, and errors name what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_airflow.cli import main
from envscaler_airflow.scaling.deadline import SpotJob
from envscaler_airflow.simulate import reports
from envscaler_airflow.simulate.compared_policies import spot_optimum
from envscaler_airflow.simulate.reports import SPOT_POLICIES
from envscaler_airflow.simulate.spot import simulate_spot

ELASTIC = Path(__file__).parents[2] / "data" / "elastic"
WINDOWS = "dataset,zone,start_tick,n_ticks,gap_seconds\n"


@st.composite
def spot_cases(draw):
    """A job that is barely feasible or has time, zones that may flap, lack a probe or never be up."""
    gap_s = draw(st.sampled_from([60.0, 195.0, 600.0, 777.5, 3600.0]))
    ticks = draw(st.integers(2, 30))
    overhead_s = draw(st.floats(0, 2.5)) * gap_s
    room = ticks * gap_s - overhead_s
    if room < 1:
        overhead_s, room = 0.0, ticks * gap_s
    work_s = room * draw(st.sampled_from([1.0, 0.999, 0.8, 0.3, 0.001]))
    job = SpotJob(ticks, gap_s, work_s, overhead_s, 3.0, draw(st.sampled_from([0.0, 0.4, 1.0, 2.9, 5.0])))
    count = draw(st.integers(1, 4))
    looks = st.lists(st.sampled_from([-1, 0, 1, 1, 16]), max_size=ticks + 3)
    zones = {f"z{at}": draw(looks) for at in range(count)}
    history = {name: draw(looks) for name in zones if draw(st.booleans())}
    prices = {
        name: draw(st.lists(st.floats(0, 6), min_size=ticks, max_size=ticks))
        for name in zones
        if draw(st.booleans())
    }
    return job, zones, history, prices


@pytest.mark.parametrize("name", sorted(SPOT_POLICIES))
@settings(max_examples=25)
@given(case=spot_cases(), ask=st.none() | st.sampled_from([0.0, 0.1, 0.7, 3.0]))
@pytest.mark.timeout(60)
def test_no_policy_is_late_or_cheaper_than_the_optimum(name, case, ask):
    """One to four zones, visible or not, any tick, price and past: in time, and never below the optimum."""
    job, zones, history, prices = case
    ask_s = None if ask is None else ask * job.gap_s

    run = simulate_spot(job, zones, SPOT_POLICIES[name](), history=history, prices=prices, ask_s=ask_s)

    assert not run.is_late
    assert run.finished_h * 3600 <= job.ticks * job.gap_s + 1e-6
    whole = SpotJob(
        job.ticks, round(job.gap_s), round(job.work_s), round(job.overhead_s), job.on_demand_usd, job.spot_usd
    )
    is_whole = (job.gap_s, job.work_s, job.overhead_s) == (whole.gap_s, whole.work_s, whole.overhead_s)
    if is_whole and job.work_s > 0:
        assert run.cost_usd >= spot_optimum(job, zones, prices) - 1e-6


def simulate(*arguments):
    """One command."""
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def spot(folder, traces, windows="t,a,0,312,600\n", *more):
    """Run it on a file of traces with one start."""
    (folder / "t.csv").write_text(traces, encoding="utf-8")
    (folder / "w.csv").write_text(WINDOWS + windows, encoding="utf-8")
    paths = ["--traces", folder / "t.csv", "--windows", folder / "w.csv"]
    return simulate("spot", *paths, "--policy", "uniform-progress", "--json", *more)


UP = "tick,a\n" + "".join(f"{tick},1\n" for tick in range(400))


@pytest.mark.parametrize(
    "traces",
    [UP, "\ufeff" + UP, UP.replace("\n5,1\n", "\n5,\n"), UP.replace("\n5,1\n", "\n5,nan\n")],
    ids=["plain", "byte-order mark", "empty cell", "nan"],
)
def test_what_can_be_read_is(tmp_path, traces):
    """A missing probe means no capacity, and is not an error."""
    got = spot(tmp_path, traces)

    assert got.exit_code == 0, got.output
    assert json.loads(got.stdout)["summary"]["late"] == 0


@pytest.mark.parametrize(
    ("traces", "windows", "more", "message"),
    [
        ("", "t,a,0,312,600\n", [], "has no rows"),
        ("tick\n0\n", "t,a,0,312,600\n", [], "has no column of a zone"),
        ("tick,a\n0,1,1\n", "t,a,0,312,600\n", [], "t.csv:2: has another number of cells"),
        ("tick,a\n0,inf\n", "t,a,0,312,600\n", [], "whole number"),
        ("tick,a\n0,1\n2,1\n", "t,a,0,312,600\n", [], "ticks must rise by 1"),
        (UP, "t,a,-5,312,600\n", [], "start_tick -5 is outside"),
        (UP, "t,a,400,312,600\n", [], "start_tick 400 is outside"),
        (UP, "t,a,0,312,nan\n", [], "gap_seconds must be finite"),
        (UP, "t,a,0,312,600\n", ["--deadline-h", "40"], "the deadline must leave 48.2 h, got 40 h"),
        (UP, "t,a,0,312,600\n", ["--deadline-h", "inf"], "infinity"),
        (UP, "t,a,0,312,600\n", ["--on-demand", "0"], "on_demand_usd must be finite and > 0"),
        (UP, "t,a,0,312,600\n", ["--zones", "a,a"], "names a zone twice"),
        (UP, "t,a,0,312,600\n", ["--ask-s", "nan"], "ask_s must be finite"),
        (UP, "t,a,0,312,1e-9\n", [], "ticks of 1e-09 s are more than"),
        (UP, "t,a,0,312,600\n", ["--deadline-h", "1e12"], "ticks of 600 s are more than"),
        ("tick,a,a\n0,1,0\n", "t,a,0,312,600\n", [], "names a column twice"),
        ("tick,on-demand\n0,1\n", "t,on-demand,0,312,600\n", [], "a column is called on-demand"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(tmp_path, traces, windows, more, message):
    """Exit code 2, the place, and no traceback."""
    got = spot(tmp_path, traces, windows, *more)

    assert got.exit_code == 2
    assert message in got.output


@pytest.mark.parametrize("row", ["a,0,nan", "a,0,-1", "a,x,1", "a,0"])
def test_a_price_that_is_none_is_refused(tmp_path, row):
    """NaN never reaches a sum."""
    prices = tmp_path / "p.csv"
    prices.write_text(f"zone,tick,spot_usd_per_h\n{row}\n")

    got = spot(tmp_path, UP, "t,a,0,312,600\n", "--price-changes", prices)

    assert got.exit_code == 2
    assert "p.csv:2" in got.output


def test_no_work_has_no_ratio_to_its_optimum(tmp_path):
    """Both cost nothing: the means are reported, but not their quotient."""
    got = spot(tmp_path, UP, "t,a,0,312,600\n", "--work-h", "0", "--optimum")

    assert got.exit_code == 0, got.output
    summary = json.loads(got.stdout)["summary"]
    assert (summary["mean_cost_usd"], summary["mean_optimum_usd"]) == (0.0, 0.0)
    assert "over_optimum" not in summary


def test_what_is_drawn_is_the_job_that_is_described(tmp_path, monkeypatch):
    """With changing prices: the cost under the plot is that of the report."""
    drawn = []
    monkeypatch.setattr(reports, "_save", lambda figure, _path: drawn.append(figure.axes[-1].get_xlabel()))
    prices = tmp_path / "p.csv"
    prices.write_text("zone,tick,spot_usd_per_h\na,0,0.11\n")

    got = spot(
        tmp_path, UP, "t,a,0,312,600\n", "--price-changes", prices, "--plot", tmp_path / "job.png", "--json"
    )

    cost = json.loads(got.stdout)["jobs"][0]["cost_usd"]
    assert [words.split(";")[1].split(",")[0] for words in drawn] == [f" ${cost:.2f}"]


def elastic(folder, change, *more):
    """Run it on modified measured trainings."""
    profiles = folder / "profiles"
    shutil.copytree(ELASTIC, profiles, copy_function=shutil.copyfile)
    change(profiles)
    asked = ["--models", "cifar10", "--types", "T4", "--value-of-hour", "1", "--seeds", "1", "--json"]
    return simulate("elastic", "--profiles", profiles, *asked, *more)


def facts(**new):
    """Change the values of cifar10 in ``models.json``; None removes one."""

    def change(folder):
        known = json.loads((folder / "models.json").read_text())
        known["models"]["cifar10"].update(new)
        known["models"]["cifar10"] = {
            key: value for key, value in known["models"]["cifar10"].items() if value is not None
        }
        (folder / "models.json").write_text(json.dumps(known))

    return change


def row(file, text):
    """Add a row."""

    def change(folder):
        with next(folder.glob(file)).open("a") as out:
            out.write(text + "\n")

    return change


STEPS, NOISE = "throughput_*.csv", "stat_efficiency.csv"


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (row(STEPS, "cifar10,T4,1,1,1,130,0,0"), [], "cifar10: step_time must be > 0"),
        (row(STEPS, "cifar10,T4,1"), [], "another number of cells"),
        (row(NOISE, "cifar10,128,100,40000,40000,0.9,nan,1"), [], "grad_var / grad_sqr must be finite"),
        (row(NOISE, "cifar10,9999,0,40000,40000,0.9,0,1"), [], "grad_sqr must be > 0 in one epoch"),
        (row(NOISE, "cifar10,128,0,40000,40000,0.9,1,1"), [], "has epoch 0 twice"),
        (row(NOISE, "cifar10,128,100,1,40000,0.9,1,1"), [], "progress must not fall"),
        (facts(restart_s=-5), [], "restart_s must be finite and >= 0"),
        (facts(restart_s=None), [], "has no 'restart_s'"),
        (facts(), ["--work", "cifar10=0"], "must be finite and > 0"),
        (facts(), ["--work", "cifar10=nan"], "must be finite and > 0"),
        (facts(), ["--value-of-hour", "-1"], "--value-of-hour"),
        (lambda folder: (folder / "models.json").write_text("[]"), [], "models.json"),
    ],
)
def test_profiles_that_cannot_be_are_refused_with_a_reason(tmp_path, change, more, message):
    """Exit code 2, and what is wrong."""
    got = elastic(tmp_path, change, *more)

    assert got.exit_code == 2
    assert message in got.output


@pytest.mark.parametrize(
    "text",
    [b"P100,1,nan\n", b"P100,1,-2\n", b"P100,1,dear\n", b"P100,x,1\n", b"P100,1\n", b"\x1f\x8b\n"],
    ids=["nan", "negative", "word", "count", "short", "binary"],
)
def test_a_price_of_a_gpu_that_is_none_is_refused(tmp_path, text):
    """NaN never reaches a sum, and an error has no traceback."""
    prices = tmp_path / "p.csv"
    prices.write_bytes(b"gpu,gpus,usd_per_gpu_hour\n" + text)

    got = elastic(tmp_path, facts(), "--types", "T4,P100", "--prices", str(prices))

    assert got.exit_code == 2, got.output
    assert "p.csv" in got.output


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (row(STEPS, "cifar10,T4,1,1,1,130,,"), []),
        (row(STEPS, "cifar10,T4,1,1,1,130,nan,0"), []),
        (facts(init_batch=1024, max_batch=1024), []),
        (facts(restart_s=0), []),
        (facts(restart_s=1e6), []),
        (facts(), ["--work", "cifar10=0.0001"]),
        (facts(), ["--value-of-hour", "1e6"]),
    ],
    ids=["empty", "nan", "fixed batch", "free restart", "dear restart", "little work", "dear hour"],
)
def test_odd_trainings_are_run(tmp_path, change, more):
    """Unmeasured shapes are omitted; regret is still a number."""
    got = elastic(tmp_path, change, *more)

    assert got.exit_code == 0, got.output
    assert json.loads(got.stdout)["summary"]["worst_regret"] < 1.0
