"""The spot model against figures that were computed independently of it."""

import csv
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.errors import SpecError
from envscaler_airflow.scaling.deadline import ON_DEMAND, Others, SpotJob, build_table
from envscaler_airflow.simulate.compared_policies import (
    Greedy,
    OnDemand,
    UniformProgress,
    spot_optimum,
)
from envscaler_airflow.simulate.spot import (
    of_dataset,
    prices_since,
    read_traces,
    read_windows,
    simulate_spot,
)
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy

DATA = Path(__file__).parents[2] / "data" / "spot"
FILES = {
    "aws2022": ("aws2022_k80v100_600s.csv", 600.0),
    "awsV100_2023": ("awsV100_2023_195s.csv", 195.0),
    "gcpH100_2025": ("gcpH100_2025_600s_count16.csv", 600.0),
}
HALF_CENT = 0.006


@cache
def traces_of(dataset):
    """Traces of a data set, read once."""
    return read_traces(DATA / FILES[dataset][0])


def references():
    """Every row: job, availability from its start on, and its expected cost."""
    with (DATA / "reference_costs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            gap_s = FILES[row["dataset"]][1]
            ticks = int(float(row["deadline_h"]) * 3600 / gap_s + 1e-9)
            job = SpotJob(ticks, gap_s, 48 * 3600, float(row["overhead_h"]) * 3600, 3.06, 0.9731)
            rows = traces_of(row["dataset"]).since(int(row["start_tick"]), row["zone"])[:ticks]
            yield job, {"zone": rows}, row


@pytest.mark.parametrize(
    ("policy", "column"), [(OnDemand, "on_demand_usd"), (Greedy, "greedy_usd")], ids=["on-demand", "greedy"]
)
@pytest.mark.timeout(20)
def test_costs_of_simple_policies_are_right_to_the_cent(policy, column):
    """All 998 starts, on-demand and greedy."""
    wrong = [
        row
        for job, zones, row in references()
        if abs(simulate_spot(job, zones, policy()).cost_usd - float(row[column])) > HALF_CENT
    ]

    assert wrong == []


@pytest.mark.timeout(20)
def test_uniform_progress_is_right_to_half_a_percent_in_the_mean():
    """The last tick of the line has several interpretations; the mean is unambiguous."""
    pairs = [
        (simulate_spot(job, zones, UniformProgress()), float(row["uniform_progress_usd"]))
        for job, zones, row in references()
    ]

    assert not any(run.is_late for run, _ in pairs)
    assert sum(run.cost_usd for run, _ in pairs) == pytest.approx(sum(cost for _, cost in pairs), rel=0.005)


@pytest.mark.timeout(20)
def test_the_optimum_is_right_to_the_cent():
    """Every 16th start of the 998: exact dynamic programming on both ticks and all overheads."""
    pairs = [
        (spot_optimum(job, zones), float(row["offline_optimum_usd"]))
        for at, (job, zones, row) in enumerate(references())
        if at % 16 == 0
    ]

    assert all(abs(found - expected) <= HALF_CENT for found, expected in pairs)


class Contrary:
    """Returns the scripted answers regardless of their effect; the guard must save the job."""

    def __init__(self, answers):
        """Store the answers, in order."""
        self.answers = answers

    def begin(self, job, history):
        """Nothing to store."""

    def choose(self, view):
        """The next answer, in a cycle."""
        return self.answers[view.tick % len(self.answers)]


jobs = st.builds(
    lambda gap, work, overhead, spare: SpotJob(
        int((work + overhead + spare) / gap) + 2, gap, work, overhead, 3.0, 1.0
    ),
    gap=st.sampled_from([60.0, 195.0, 600.0]),
    work=st.floats(0, 40_000),
    overhead=st.floats(0, 3_000),
    spare=st.floats(0, 20_000),
)


@given(
    job=jobs,
    rows=st.lists(st.lists(st.integers(-1, 1), max_size=40), min_size=2, max_size=2),
    answers=st.lists(st.sampled_from(["a", "b", ON_DEMAND, None]), min_size=1, max_size=7),
)
def test_no_job_is_ever_late(job, rows, answers):
    """For any answers of a policy and any losses of spot, the guard finishes the job in time."""
    run = simulate_spot(job, {"a": rows[0], "b": rows[1]}, Contrary(answers))

    assert not run.is_late


def test_a_job_that_cannot_be_done_is_refused():
    """Ten hours of work do not fit into nine."""
    with pytest.raises(ValueError, match="the deadline must leave 10 h, got 9 h"):
        SpotJob(54, 600, 36_000, 0, 3.0, 1.0)


def test_a_loss_costs_the_overhead_again():
    """Ticks of an hour, half an hour of overhead: up, lost, up; 1 h of work takes two launches and $2."""
    job = SpotJob(10, 3600, 3600, 1800, 3.0, 1.0)

    run = simulate_spot(job, {"z": [1, 0, 1, 1]}, Contrary(["z"]))

    assert (run.cost_usd, run.launches, run.finished_h) == (2.0, 2, 3.0)


def test_a_file_of_another_form_is_told_by_name(tmp_path):
    """The message names the file and the column."""
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")

    with pytest.raises(SpecError, match=r"x\.csv: has no column tick"):
        read_traces(path)


def test_windows_are_those_of_the_file_of_traces():
    """Two data sets have a zone of the same name."""
    windows = read_windows(DATA / "windows.csv")

    found = of_dataset(windows, DATA / "aws2022_k80v100_600s.csv")

    assert len(found) == 160
    assert {item.dataset for item in found} == {"aws2022"}


def test_prices_hold_until_they_change():
    """Before the first change the first price counts."""
    assert prices_since([(2, 1.0), (4, 2.0)], 1, 5) == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_a_table_survives_the_store():
    """It round-trips through bytes, and torn bytes are an error."""
    job = SpotJob(20, 600, 6000, 300, 3.0, 1.0)
    table = build_table(job, others=Others(2, 0.5))

    assert type(table).from_bytes(table.to_bytes()) == table
    with pytest.raises(ValueError, match="cannot be read"):
        type(table).from_bytes(table.to_bytes()[:-9])


ASKED = SpotJob(30, 600.0, 10 * 600.0, 0.0, 3.0, 1.0)


class AsksAll:
    """Requests a, then b, then runs on-demand."""

    def begin(self, job, history):
        """Nothing to store."""
        self.views = []

    def choose(self, view):
        """In order."""
        self.views.append((view.tick, dict(view.up), view.asked_s))
        up = [name for name, is_up in view.up.items() if is_up]
        return up[0] if up else next(iter(view.unknown()), ON_DEMAND)


def test_a_zone_is_known_only_by_asking_and_asking_takes_time():
    """Zone a is down, b is up: 60 s each before b works; then b runs, without further requests."""
    policy = AsksAll()

    run = simulate_spot(ASKED, {"a": [0] * 30, "b": [1] * 30}, policy, ask_s=60.0)

    assert policy.views[:4] == [
        (0, {}, 0.0),
        (0, {"a": False}, 60.0),
        (0, {"a": False, "b": True}, 120.0),
        (1, {"b": True}, 0.0),
    ]
    assert run.finished_h * 3600 == pytest.approx(120 + 10 * 600)
    assert set(run.answers) == {"b"}


def test_on_demand_runs_on_while_a_zone_is_asked_for():
    """Both are down and requested in every tick, but only during the first two requests nothing runs."""
    run = simulate_spot(ASKED, {"a": [0] * 30, "b": [0] * 30}, AsksAll(), ask_s=60.0)

    assert run.finished_h * 3600 == pytest.approx(120 + 10 * 600)
    assert set(run.answers) == {ON_DEMAND}


@pytest.mark.parametrize("policy", [DeadlinePolicy, UniformProgress])
def test_what_takes_no_time_to_ask_costs_little_more_than_seeing(policy):
    """Four starts of 2025 over three zones: within a tenth of full visibility; slow requests cost more."""
    traces, job = traces_of("gcpH100_2025"), SpotJob(78, 600.0, 12 * 3600.0, 720.0, 3.06, 0.9731)
    names = ("us-central1-a", "us-central1-b", "us-east5-a")

    def cost(ask_s):
        total = 0.0
        for start in range(100, 700, 150):
            zones = {name: traces.since(start, name)[: job.ticks] for name in names}
            past = {name: traces.before(start, name) for name in names}
            total += simulate_spot(job, zones, policy(), history=past, ask_s=ask_s).cost_usd
        return total

    asked = cost(0.0)
    assert asked <= 1.1 * cost(None)
    assert asked <= cost(300.0)


def test_asking_delays_a_launch_that_takes_longer_than_a_tick():
    """60 s each for a and b, then an overhead of 720 s: the work begins after 840 s."""
    job = SpotJob(30, 600.0, 10 * 600.0, 720.0, 3.0, 1.0)

    run = simulate_spot(job, {"a": [0] * 30, "b": [1] * 30}, AsksAll(), ask_s=60.0)

    assert run.finished_h * 3600 == pytest.approx(840 + 10 * 600)


@pytest.mark.parametrize(("work_s", "is_taken"), [(331.5, True), (331.6, False)])
def test_a_job_that_just_fits_is_not_refused_for_a_rounding_error(work_s, is_taken):
    """3 ticks of 195 s have 585 s, also where the sum of work and overhead is above that by a last digit."""
    overhead_s = 585.0000000000001 - 331.5

    if is_taken:
        assert SpotJob(3, 195.0, work_s, overhead_s, 3.0, 0.0).work_s == work_s
    else:
        with pytest.raises(ValueError, match="the deadline must leave"):
            SpotJob(3, 195.0, work_s, overhead_s, 3.0, 0.0)
