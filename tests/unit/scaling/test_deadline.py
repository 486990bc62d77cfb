"""The deadline policy: its results on traces, and its speed."""

import math
import sys
from pathlib import Path

import pytest

from envscaler_airflow.scaling.deadline import (
    ON_DEMAND,
    Hazard,
    Risk,
    SpotJob,
    SpotView,
    build_table,
)
from envscaler_airflow.simulate.compared_policies import UniformProgress
from envscaler_airflow.simulate.spot import of_dataset, read_traces, read_windows, simulate_spot
from envscaler_airflow.simulate.spot_policy import DeadlinePolicy

DATA = Path(__file__).parents[2] / "data" / "spot"
JOB = SpotJob(312, 600.0, 48 * 3600.0, 720.0, 3.06, 0.9731)


@pytest.mark.timeout(30)
def test_costs_less_than_uniform_progress_where_nothing_was_fitted():
    """Every other start of 2022 at 52 h and 0.2 h: at least 3 % below, and never late."""
    traces = read_traces(DATA / "aws2022_k80v100_600s.csv")
    windows = of_dataset(read_windows(DATA / "windows.csv"), DATA / "aws2022_k80v100_600s.csv")[::2]
    policy, ours, theirs = DeadlinePolicy(), [], []

    for window in windows:
        rows = {"z": traces.since(window.start_tick, window.zone)[: JOB.ticks]}
        ours.append(
            simulate_spot(JOB, rows, policy, history={"z": traces.before(window.start_tick, window.zone)})
        )
        theirs.append(simulate_spot(JOB, rows, UniformProgress()))

    assert not any(run.is_late for run in ours)
    assert sum(run.cost_usd for run in ours) < 0.97 * sum(run.cost_usd for run in theirs)


def calls_of(function, *arguments):
    """Return the module and name of each function that *function* calls."""
    calls = []

    def note(frame, event, called):
        if event == "call":
            calls.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            calls.append(f"{called.__module__ or type(called.__self__).__module__}.{called.__name__}")

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def test_a_decision_takes_few_calls():
    """A check on a zone that is up or down reads the table without numpy, in under two hundred calls."""
    policy = DeadlinePolicy()
    policy.begin(JOB, {"z": [1, 0] * 200})
    policy.choose(SpotView(0, 312, JOB.work_s, 0.0, None, {"z": True}))
    took = []

    for tick in range(1, 200):
        view = SpotView(tick, 312 - tick, JOB.work_s - 300 * tick, 0.0, None, {"z": bool(tick % 2)})
        took.append(calls_of(policy.choose, view))

    assert max(len(calls) for calls in took) < 200
    assert [call for calls in took for call in calls if "numpy" in call] == []


def test_takes_spot_while_there_is_all_the_time():
    """There is a day of slack and spot is up."""
    job = SpotJob(432, 600.0, 48 * 3600.0, 720.0, 3.06, 0.9731)
    policy = DeadlinePolicy()
    policy.begin(job, {"z": [1] * 500})

    assert policy.choose(SpotView(0, 432, job.work_s, 0.0, None, {"z": True})) == "z"


def test_takes_on_demand_when_no_time_is_left():
    """No slack is left, and spot is down."""
    policy = DeadlinePolicy()
    policy.begin(JOB, {})

    answer = policy.choose(SpotView(24, 288, 288 * 600.0 - 1020.0, 0.0, None, {"z": False}))

    assert answer == ON_DEMAND


def test_goes_to_the_cheaper_of_two_zones_that_are_alike():
    """Prices decide when risks are equal."""
    policy = DeadlinePolicy()
    policy.begin(JOB, {"a": [1] * 100, "b": [1] * 100})

    view = SpotView(0, 312, JOB.work_s, 0.0, None, {"a": True, "b": True}, {"a": 1.2, "b": 0.9})

    assert policy.choose(view) == "b"


def test_goes_to_the_steadier_of_two_zones_at_one_price():
    """It avoids a zone that flaps all day."""
    policy = DeadlinePolicy()
    policy.begin(JOB, {"a": [1, 0] * 150 + [1], "b": [1] * 301})

    assert policy.choose(SpotView(0, 312, JOB.work_s, 0.0, None, {"a": True, "b": True})) == "b"


def test_believes_that_a_flapping_zone_flaps():
    """After a day of losses the next loss is considered likelier than after a day without."""
    restless, calm = Risk(Hazard(), 600.0), Risk(Hazard(), 600.0)
    restless.learn([1, 1, 0] * 48 + [1] * 6)
    calm.learn([1] * 144 + [0] + [1] * 6)

    assert restless.chance() > 1.3 * calm.chance()
    assert sum(restless.belief) == pytest.approx(1.0)


def test_what_was_not_probed_teaches_nothing():
    """Unknown ticks are skipped."""
    seen, gaps = Risk(Hazard(), 600.0), Risk(Hazard(), 600.0)
    seen.learn([1, 0, 1])
    gaps.learn([1, -1, 0, -1, 1])

    assert seen.belief == gaps.belief


def test_more_slack_never_costs_more():
    """Costs in the table decrease monotonically with slack."""
    table = build_table(SpotJob(60, 600.0, 6 * 3600.0, 300.0, 3.06, 0.9731))
    belief = Hazard().regimes

    costs = [table.look_up(40, 600.0 * step, 2, 2, belief)[1] for step in range(8)]

    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("overhead_s", [0.0, 180.0, 600.0, 720.0, 1440.0])
def test_a_launch_owes_its_whole_overhead_in_the_table(overhead_s):
    """Spot that is never lost: work and overhead in whole ticks at the price of spot, for any tick length."""
    job = SpotJob(60, 600.0, 40 * 600.0, overhead_s, 3.0, 1.0)
    steady = Hazard(up=(0.0,) * 9, down=(0.0,) * 9, up_factors=(1.0,), down_factors=(1.0,), regimes=(1.0,))

    spot, _, _ = build_table(job, steady, every=1).look_up(
        60, 60 * 600.0 - job.work_s - overhead_s, 8, 0, (1.0,)
    )

    assert spot == pytest.approx(math.ceil((job.work_s + overhead_s) / 600) / 3, rel=0.03)


def test_spot_is_not_launched_when_the_guard_would_end_it_at_once():
    """Ten minutes of slack, an overhead of twelve: the next tick would discard the launch."""
    policy = DeadlinePolicy()
    policy.begin(JOB, {"z": [1] * 300})

    view = SpotView(200, 112, 112 * 600.0 - 720.0 - 600.0, 0.0, ON_DEMAND, {"z": True})

    assert policy.choose(view) == ON_DEMAND
