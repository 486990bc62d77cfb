"""Runs of a stage teach the next one: medians, wider after a change, and no run alone moves much."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.planning import Speed
from envscaler_airflow.planning.knowledge import StepTime
from envscaler_airflow.planning.profile import (
    CHANGED_STDEV,
    MOST_RUNS,
    Forecast,
    Losses,
    RunProfile,
    StageProfile,
    Usage,
    merge,
)

MACHINE = "aws/g5.xlarge"


def run(number, speed=2.0, *, units=100.0, **fields):
    """The profile of one run of a hundred steps."""
    speeds = {MACHINE: Speed(speed, 0.1, "measured", 60.0)}
    known = {"code": "a", "speeds": speeds, "units": units, **fields}
    return RunProfile(f"d/dag/run-{number}/train/-1", 1, float(number), "succeeded", **known)


def test_the_next_plan_knows_the_median_speed_and_work_of_all_runs():
    """Of 1, 2 and 3 steps a second: 2, measured in 3 runs."""
    known = merge([run(1, 1.0), run(2, 2.0), run(3, 3.0)], code="a").knowledge()

    assert (known.units, known.unit, known.speeds[MACHINE].mean) == (100.0, "steps", 2.0)
    assert known.speeds[MACHINE].source == "learned"
    assert known.sources == {"work": "measured in 3 runs", "speed": "measured in 3 runs"}


def test_runs_that_agree_make_the_next_one_more_certain():
    """14 % after one run, under 4 % after ten alike."""
    once, often = merge([run(1)], code="a"), merge([run(n) for n in range(10)], code="a")

    assert once.speeds[MACHINE].spread == pytest.approx(0.1414, abs=1e-4)
    assert often.speeds[MACHINE].spread < 0.04


@pytest.mark.parametrize("differ_by", [0.1, 0.15])
@pytest.mark.parametrize("count", [2, 5, 10])
def test_four_fifths_of_the_next_runs_are_within_the_forecast(differ_by, count):
    """Runs that differ by 10 and 15 %: 70 to 90 % of 400 next ones are within the 80 % range (feature B5)."""
    rng = random.Random(f"{differ_by} {count}")
    inside = 0
    for _ in range(400):
        speeds = [math.exp(rng.gauss(0.0, differ_by)) for _ in range(count + 1)]
        known = merge([run(n, speed) for n, speed in enumerate(speeds[1:])], code="a").knowledge()
        low_s, high_s = known.speeds[MACHINE].seconds_range(known.units)
        inside += low_s <= known.units / speeds[0] <= high_s

    assert 0.7 <= inside / 400 <= 0.9


@given(
    honest=st.lists(st.floats(1.0, 2.0), min_size=2, max_size=12),
    absurd=st.one_of(st.floats(1e-9, 1e-3), st.floats(1e3, 1e12)),
)
def test_one_absurd_run_moves_nothing_beyond_the_others(honest, absurd):
    """Speed, work and start stay between the smallest and the largest of the others."""
    runs = [run(n, value, units=value, start_s={"first_step": value}) for n, value in enumerate(honest)]
    bad = run(99, absurd, units=absurd, start_s={"first_step": absurd})

    found = merge([*runs, bad], code="a")

    for figure in (found.speeds[MACHINE], found.units, found.start_s["whole"]):
        assert min(honest) <= figure.value <= max(honest)
        assert figure.spread <= 1.0


def test_a_change_of_code_keeps_what_was_learned_with_wider_noise():
    """The new code's first plan uses the old speeds; from then on only its own count."""
    old = [run(n) for n in range(5)]

    before = merge(old, code="b")
    after = merge([*old, run(9, 6.0, code="b")], code="b")

    assert before.speeds[MACHINE].value == 2.0
    assert before.speeds[MACHINE].spread > CHANGED_STDEV
    assert before.knowledge().sources["speed"] == "measured in 5 runs of other code"
    assert (before.knowledge().is_guess, after.knowledge().is_guess) == (True, False)
    assert (after.speeds[MACHINE].value, after.source) == (6.0, "measured in 1 run")


def test_only_the_newest_runs_count():
    """Twenty: an older one is forgotten."""
    found = merge([run(n, 1.0 if n < 10 else 3.0) for n in range(MOST_RUNS + 10)], code="a")

    assert (found.runs, found.speeds[MACHINE].value, found.first_at) == (MOST_RUNS, 3.0, 10.0)


def test_the_order_of_the_runs_does_not_matter():
    """Readers of one store agree."""
    runs = [run(n, 1.0 + n) for n in range(5)]

    assert merge(runs, code="a") == merge(runs[::-1], code="a")


def test_work_in_another_unit_is_never_mixed_in():
    """Once it counted epochs; the steps of the other runs count."""
    found = merge([run(1), run(2), run(3, 1e-3, units=4.0, unit="epochs")], code="a")

    assert (found.unit, found.units.value, found.units.runs) == ("steps", 100.0, 2)


def test_losses_add_up_and_one_stormy_run_counts_for_three():
    """3 x 10 h with a loss each, and one of 1000 losses in an hour."""
    calm = [run(n, losses={"spot": Losses(10.0, 1.0)}) for n in range(3)]

    found = merge([*calm, run(9, losses={"spot": Losses(1.0, 1000.0)})], code="a").losses["spot"]

    assert (found.hours, found.losses) == (31.0, 9.0)


def test_peaks_are_the_largest_of_a_believable_run():
    """8, 9 and 10 GB; 900 GB in one is an error of measurement."""
    used = [run(n, usage={"memory_bytes": Usage(5.0, 7.0, peak)}) for n, peak in enumerate((8, 9, 10, 900))]

    assert merge(used, code="a").usage["memory_bytes"] == Usage(5.0, 7.0, 10)


def test_noise_is_kept_by_tenth_of_the_work():
    """Medians of what grows over a training."""
    found = merge([run(n, noise=((0.0, 1.0 + n), (0.95, 10.0 + n))) for n in range(3)], code="a")

    assert found.noise == ((0.0, 2.0), (0.9, 11.0))


def test_the_newest_step_of_each_machine_is_kept():
    """A later run on the same machine replaces it."""
    first, later = StepTime(32, 0.5, 0.1), StepTime(32, 0.4, 0.1, 7.0)

    found = merge([run(2, steps={MACHINE: later}), run(1, steps={MACHINE: first, "other": first})], code="a")

    assert found.steps == {MACHINE: later, "other": first}


def test_the_error_of_forecasts_is_known():
    """1 h expected (0.9 to 1.1): it took 1.05 h once and 2 h once."""
    within = Forecast(0.9, 1.0, 1.1, 1.05)

    found = merge([run(1, forecast=within), run(2, forecast=replace(within, actual_hours=2.0))], code="a")

    assert (found.inside, found.forecast_error.value) == (0.5, 1.525)


def test_nothing_is_known_without_runs():
    """An empty profile gives empty knowledge."""
    assert merge([]) == StageProfile()
    assert StageProfile().knowledge().sources == {}


@pytest.mark.parametrize(
    "broken",
    [{"units": float("nan")}, {"noise": ((2.0, 1.0),)}, {"noise": ((0.5, float("inf")),)}, {"at": -1.0}],
)
def test_numbers_that_no_run_measures_are_refused(broken):
    """They never reach a median."""
    fields = {"run": "r", "generation": 1, "at": 1.0, "status": "failed", **broken}

    with pytest.raises(ValueError, match=r"must be|units|at"):
        RunProfile(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"units": 1.7e308},
        {"speeds": {MACHINE: Speed(1.7e308, 0.0)}},
        {"speeds": {MACHINE: Speed(5e-324, 0.0)}},
        {"usage": {"memory_bytes": Usage(1.7e308, 1.7e308, 1.7e308)}},
        {"start_s": {"first_step": 1.7e308}},
        {"losses": {"spot": Losses(1.7e308, 1.0)}},
        {"forecast": Forecast(1e-308, 1e-308, 1.0, 1e308)},
        {"out_of_memory_bytes": 10**400},
        {"noise": ((0.5, 1.7e308),)},
    ],
)
def test_numbers_whose_merge_would_overflow_are_refused(fields):
    """Two such runs have an infinite median, which must not fail the next start."""
    with pytest.raises(ValueError, match="expected 0 or 1e-100 to 1e\\+100"):
        run(1, **fields)
