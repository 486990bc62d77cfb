"""Speeds, stated ratios and the one formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.planning import (
    Allocation,
    Offer,
    Overheads,
    Speed,
    Speedup,
    estimate,
    known_speeds,
    measure,
    merged,
    value_of_hour,
)

BASE = Speed(10.0, 1.0, "measured", 60)


def test_a_stated_ratio_carries_its_doubt():
    """Relative errors of 10 % and 20 % combine to 22.4 %."""
    known = known_speeds({"a": BASE}, [Speedup("b", "a", 2.0, 0.4)])

    assert known["a"] == BASE
    assert (known["b"].mean, known["b"].source) == (20.0, "stated")
    assert known["b"].relative_stdev == pytest.approx(math.hypot(0.1, 0.2))


def test_a_ratio_works_both_ways():
    """A measurement of the large machine gives the speed of the small one."""
    known = known_speeds({"b": BASE}, [Speedup("b", "a", 2.0, 0.0)])

    assert known["a"] == Speed(5.0, 0.5, "stated")


def test_ratios_chain_and_the_surest_way_wins():
    """C derived over b is more certain than c derived from a directly."""
    ratios = [
        Speedup("b", "a", 2.0, 0.0),
        Speedup("c", "b", 2.0, 0.0),
        Speedup("c", "a", 9.0, 9.0),
    ]

    assert known_speeds({"a": BASE}, ratios)["c"].mean == 40.0


def test_a_measurement_replaces_a_statement():
    """Stated 20, measured 12: 12."""
    measured = {"a": BASE, "b": Speed(12.0, 0.1, "measured", 60)}

    assert known_speeds(measured, [Speedup("b", "a", 2.0, 0.0)])["b"].mean == 12.0


def test_a_measurement_of_a_moment_does_not():
    """Four seconds are less than the required thirty."""
    measured = {"a": BASE, "b": Speed(12.0, 0.1, "measured", 4)}

    assert known_speeds(measured, [Speedup("b", "a", 2.0, 0.0)], trusted_after_s=30)["b"].mean == 20.0


def test_ratios_alone_give_no_speed():
    """Twice an unknown speed is unknown."""
    assert known_speeds({}, [Speedup("b", "a", 2.0, 0.0)]) == {}


def test_measures_steps_over_seconds():
    """100 steps in 10 s, in even windows."""
    got = measure([(0, 0), (5, 50), (10, 100)])

    assert got == Speed(10.0, 0.1, "measured", 10)


def test_uneven_windows_are_in_doubt():
    """Rates of 8 and 12 around 10: standard error 2."""
    got = measure([(0, 0), (5, 40), (10, 100)])

    assert got == Speed(10.0, 2.0, "measured", 10)


def test_one_window_is_in_doubt_by_a_tenth():
    """A single window has no spread of its own."""
    assert measure([(0, 0), (5, 50)]) == Speed(10.0, 1.0, "measured", 5)


@pytest.mark.parametrize("points", [[], [(0, 0)], [(0, 5), (9, 5)], [(3, 0), (3, 9)], [(5, 9), (4, 20)]])
def test_nothing_seen_is_nothing_measured(points):
    """No progress, no time, or a clock that went back: unknown."""
    assert measure(points) is None


def test_a_resume_is_left_out_of_the_rate():
    """The step count that falls back belongs to no window."""
    assert measure([(0, 0), (5, 50), (6, 20), (11, 70)]).mean == 10.0


def test_two_visits_are_weighted_by_their_seconds():
    """30 s at 10 and 90 s at 12: 11.5."""
    got = merged(Speed(10, 0.4, "measured", 30), Speed(12, 0.4, "measured", 90))

    assert (got.mean, got.seconds) == (11.5, 120)
    assert got.stdev == pytest.approx(math.hypot(0.1, 0.3))
    assert merged(None, BASE) == BASE
    assert merged(BASE, None) == BASE
    assert merged(None, None) is None
    assert merged(Speed(99, 0, "stated"), BASE) == BASE


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_with_nonsense_cannot_exist(bad):
    """Speed 0 would never finish, and every comparison with NaN is false."""
    with pytest.raises(ValueError, match="mean must be finite and > 0"):
        Speed(bad, 0.0)
    with pytest.raises(ValueError, match="mean must be finite and > 0"):
        Speedup("a", "b", bad, 0.0)


def test_a_speed_range_holds_the_expected_time():
    """At 10 % the 80 % range is about 13 % to each side."""
    low, high = BASE.seconds_range(1000)

    assert BASE.seconds_for(1000) == pytest.approx(101.0)
    assert (low, high) == (pytest.approx(88.4, abs=0.1), pytest.approx(114.2, abs=0.1))


def test_the_formula_by_head():
    """An hour of start and nine of work at $2, an hour worth $3: $20 + $30."""
    got = estimate(
        9.0,
        Speed(1 / 3600, 0.0),
        usd_per_hour=2.0,
        value_of_hour=3.0,
        overheads=Overheads(start_s=3600),
    )

    assert (got.hours, got.usd, got.objective) == (
        pytest.approx(10),
        pytest.approx(20),
        pytest.approx(50),
    )


def test_checkpoints_take_their_time():
    """One minute every ten adds a tenth."""
    extra = Overheads(checkpoint_s=60, checkpoint_every_s=600)

    assert estimate(3600, Speed(1, 0), usd_per_hour=None, overheads=extra).checkpoint_s == 360


def test_rare_interruptions_cost_the_restart_and_half_an_interval():
    """First order: one loss in 1000 h, 100 h of work, 60 s + 300 s each: 36 s."""
    extra = Overheads(start_s=60, checkpoint_every_s=600)

    got = estimate(
        100 * 3600, Speed(1, 0), usd_per_hour=1, overheads=extra, interruptions_per_hour=1e-3, is_start=False
    )

    assert got.interruption_s == pytest.approx(0.1 * 360, rel=0.01)


def test_without_checkpoints_losses_grow_without_bound():
    """Ten hours between losses and ten of work: e - 1 times the time; a hundred: never."""
    ten = estimate(36_000, Speed(1, 0), usd_per_hour=1, interruptions_per_hour=0.1)
    never = estimate(3_600_000, Speed(1, 0), usd_per_hour=1, interruptions_per_hour=0.1)

    assert ten.hours == pytest.approx(10 * (math.e - 1))
    assert never.hours > 1e20


def test_an_unknown_price_is_not_free():
    """The time is known, the money is not."""
    got = estimate(3600, Speed(1, 0), usd_per_hour=None)

    assert (got.hours, got.usd, got.usd_high, got.objective) == (1.0, None, None, None)


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100), st.floats(0, 10))
def test_the_objective_grows_with_the_price(units, price, more, value):
    """Never cheaper at a higher price."""
    low, high = (
        estimate(units, BASE, usd_per_hour=usd, value_of_hour=value) for usd in (price, price + more)
    )

    assert low.objective <= high.objective


def allocation(usd: float | None, capacity: str = "on-demand", nodes: int = 1) -> Allocation:
    """One with a price."""
    return Allocation(Offer("aws", "r", "t", capacity, 4, 16, usd_per_hour=usd), nodes)


@pytest.mark.parametrize(
    ("strategy", "worth"), [("cost", 0), ("deadline", 0), ("balanced", 2), ("performance", 200)]
)
def test_what_an_hour_is_worth(strategy, worth):
    """The cheapest on-demand one decides; spot and unknown prices do not count."""
    offers = [allocation(1.0, nodes=2), allocation(5.0), allocation(0.1, "spot"), allocation(None)]

    assert value_of_hour(strategy, offers) == worth
    assert value_of_hour(strategy, offers, stated_usd=7) == 7


def test_an_hour_without_a_known_price_is_unknown():
    """Not 0: the caller reports it."""
    assert value_of_hour("balanced", [allocation(None), allocation(1.0, "spot")]) is None
    assert value_of_hour("cost") == 0
    with pytest.raises(ValueError, match="strategy must be one of cost, balanced, performance, deadline"):
        value_of_hour("cheap")


def test_how_long_a_start_takes_is_as_unsure_as_it_was_seen_to_be():
    """An hour of work after half an hour of start +- 10 minutes: 80 % within 1.28 times that."""
    speed = Speed(1 / 3600, 0.0, "user")
    starts = Overheads(start_s=1800.0, start_stdev_s=600.0)

    begun = estimate(1.0, speed, usd_per_hour=2.0, overheads=starts)
    going_on = estimate(1.0, speed, usd_per_hour=2.0, overheads=starts, is_start=False)

    assert begun.hours == pytest.approx(1.5)
    assert (begun.hours_low, begun.hours_high) == (
        pytest.approx(1.5 - 1.2816 / 6),
        pytest.approx(1.5 + 1.2816 / 6),
    )
    assert (begun.usd_low, begun.usd_high) == (
        pytest.approx(2 * begun.hours_low),
        pytest.approx(2 * begun.hours_high),
    )
    assert (going_on.hours_low, going_on.hours, going_on.hours_high) == (1.0, 1.0, 1.0)
