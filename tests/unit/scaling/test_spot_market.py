"""The one decision of a stage with a deadline: a pure function of the market."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.scaling.deadline import ON_DEMAND, Hazard, MarketView, Risk, SpotJob, Zone, build_table
from envscaler_airflow.scaling.deadline.spot_market import decide_market

UP = Zone("a", 1.0, is_up=True, age_h=3.0)
DOWN = Zone("a", 1.0, is_up=False, age_h=0.2)
UNKNOWN = Zone("a", 1.0)
VIEW = MarketView(
    zones=(UP,), on_demand_usd=3.0, left_s=12 * 3600.0, work_s=8 * 3600.0, start_s=600.0, look_s=60.0
)


@pytest.fixture(scope="module")
def table():
    """Of a day with starts of ten minutes."""
    return build_table(SpotJob(144, 600.0, 12 * 3600.0, 600.0, 3.0, 1.0))


@pytest.mark.parametrize("running", [None, ON_DEMAND, "a"])
def test_spot_that_is_up_runs_while_there_is_time(table, running):
    """Four hours of slack: launched, returned to, or kept."""
    found = decide_market(replace(VIEW, running=running), table)

    assert (found.action, found.zone, found.is_request) == ("launch", "a", False)


@pytest.mark.parametrize(("slack_s", "action"), [(61.0, "launch"), (59.0, "on-demand")])
@pytest.mark.parametrize("with_table", [True, False])
def test_spot_is_left_when_the_slack_ends_before_the_next_check(table, slack_s, action, with_table):
    """The guard stands outside of the costs."""
    view = replace(VIEW, running="a", left_s=8 * 3600.0 + 600.0 + slack_s)

    assert decide_market(view, table if with_table else None).action == action


def test_the_guard_knows_the_longest_wait_for_a_machine_and_unsaved_work():
    """Both are lost besides the time until the next check."""
    view = replace(VIEW, running="a", left_s=8 * 3600.0 + 600.0 + 200.0)

    assert decide_market(view).action == "launch"
    assert decide_market(replace(view, wait_s=150.0)).action == "on-demand"
    assert decide_market(replace(view, unsaved_s=150.0)).action == "on-demand"


def test_nothing_runs_while_spot_is_away_and_time_remains(table):
    """It has just been lost, with days of slack; what is awaited is the next check."""
    found = decide_market(replace(VIEW, zones=(DOWN,), left_s=20 * 3600.0), table)

    assert (found.action, found.wait_s) == ("wait", 60.0)


def test_on_demand_that_runs_is_never_left_to_wait(table):
    """Spot is away."""
    view = replace(VIEW, zones=(DOWN,), running=ON_DEMAND, left_s=20 * 3600.0)

    assert decide_market(view, table).action == "on-demand"


def test_a_zone_that_was_never_sampled_is_requested(table):
    """Only a launch will show whether it has a machine."""
    found = decide_market(replace(VIEW, zones=(UNKNOWN,), left_s=20 * 3600.0, ask_s=60.0), table)

    assert (found.action, found.zone, found.is_request) == ("launch", "a", True)


def test_a_refusal_counts_until_it_is_old(table):
    """Ten minutes later the zone may be requested again."""
    view = replace(VIEW, zones=(DOWN,), left_s=20 * 3600.0, ask_s=60.0)

    assert decide_market(view, table).action == "wait"
    assert decide_market(replace(view, zones=(replace(DOWN, unseen_s=700.0),)), table).is_request


def test_work_that_is_not_measured_runs_on_demand_unless_spot_is_up():
    """What may be lost is unknown, so nothing waits."""
    view = replace(VIEW, work_s=None)

    assert decide_market(view).zone == "a"
    assert decide_market(replace(view, zones=(DOWN,))).action == "on-demand"
    assert decide_market(replace(view, zones=(UNKNOWN,))).action == "on-demand"
    assert decide_market(replace(view, running=ON_DEMAND)).action == "on-demand"


def test_spot_that_costs_as_much_as_on_demand_is_none(table):
    """A price spike."""
    assert decide_market(replace(VIEW, zones=(replace(UP, usd=3.0),)), table).action == "on-demand"


@given(
    st.floats(-1e5, 1e6), st.floats(0, 1e6), st.sampled_from([UP, DOWN, UNKNOWN]),
    st.sampled_from([None, ON_DEMAND, "a"]),
)  # fmt: skip
def test_the_guard_binds_every_answer(left_s, work_s, zone, running):
    """What is not on-demand leaves time for the work left and a start, for any market."""
    view = replace(VIEW, zones=(zone,), left_s=left_s, work_s=work_s, running=running)

    found = decide_market(view)

    assert found.action == "on-demand" or view.slack_s >= view.look_s - 1e-6 or work_s == 0


def test_samples_in_equal_steps_are_ticks():
    """The fold over times gives the numbers of the fold over ticks."""
    ticks, times = Risk(Hazard(), 600.0), Risk(Hazard(), 600.0)
    row = [1, 1, 0, 0, 0, 1, 0, 1, 1, 1] * 5
    ticks.learn(row)
    for is_up in row:
        times.observe(is_up=bool(is_up), after_s=600.0)

    assert (times.belief, times.age_h, times.chance()) == (ticks.belief, ticks.age_h, ticks.chance())


def test_a_state_that_lasts_is_the_same_in_short_and_long_steps():
    """Twenty samples in half a minute's steps and one after ten minutes, within one bin of ages."""
    often, once = Risk(Hazard(), 600.0), Risk(Hazard(), 600.0)
    for risk in (often, once):
        risk.learn([1] * 20)
    for _ in range(20):
        often.observe(is_up=True, after_s=30.0)
    once.observe(is_up=True)

    assert often.belief == pytest.approx(once.belief, rel=1e-4)
    assert often.age_h == pytest.approx(once.age_h)


def test_a_long_gap_forgets_the_state_and_keeps_what_is_believed():
    """After a week without a sample, being up or not tells as little as before the first."""
    risk = Risk(Hazard(), 600.0)
    risk.learn([1] * 300)
    before = list(risk.belief)
    risk.skip(7 * 86400.0)
    zone = risk.zone("a", 1.0)

    assert zone.up_chance(Hazard()) == pytest.approx(replace(zone, is_up=None).up_chance(Hazard()), abs=0.05)
    risk.observe(is_up=True, after_s=7 * 86400.0)
    assert sum(risk.belief) == pytest.approx(1.0, abs=1e-4)
    assert risk.belief != before


NEAR = replace(UP, usd=1.0)
CHEAPER = Zone("b", 0.5, is_up=True, age_h=3.0)
ON_NEAR = replace(VIEW, zones=(NEAR, CHEAPER), running="a")


def test_a_zone_that_is_up_is_left_for_one_that_costs_half(table):
    """Eight hours of work and a launch of ten minutes: some $3 are saved and some $0.5 are paid."""
    for known in (table, None):
        found = decide_market(ON_NEAR, known)

        assert (found.action, found.zone, found.is_request) == ("launch", "b", False)
        assert found.reason.startswith("b costs 0.5 $/h instead of 1 $/h: $")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(CHEAPER, usd=1.0), id="equal prices"),
        pytest.param(replace(CHEAPER, usd=1.2), id="dearer"),
        pytest.param(replace(CHEAPER, usd=0.97), id="less saved than a launch costs"),
        pytest.param(replace(CHEAPER, is_up=False), id="not up"),
        pytest.param(replace(CHEAPER, is_up=None, age_h=0.0), id="never sampled"),
        pytest.param(replace(CHEAPER, unseen_s=700.0), id="sampled too long ago"),
    ],
)
def test_a_zone_that_is_up_is_kept_if_leaving_does_not_pay(other):
    """Nor is a zone requested while another one runs."""
    assert decide_market(replace(ON_NEAR, zones=(NEAR, other))).zone == "a"


def test_a_zone_is_kept_if_a_price_is_unknown():
    """It runs and is not among the zones of the market; or on-demand, the worth of a launch, has no price."""
    assert decide_market(replace(ON_NEAR, zones=(CHEAPER,))).zone == "a"
    assert decide_market(replace(ON_NEAR, on_demand_usd=0.0)).zone == "a"


def test_a_zone_is_kept_if_the_work_left_or_the_stay_is_short():
    """Half an hour of work saves $0.25; so does a zone that is always lost within minutes."""
    losing = Hazard(up=(6.0,) * 9, up_factors=(1.0,) * 9)

    assert decide_market(replace(ON_NEAR, work_s=1800.0)).zone == "a"
    assert decide_market(ON_NEAR, hazard=losing).zone == "a"


@pytest.mark.parametrize(("slack_s", "zone"), [(1799.0, "a"), (1801.0, "b")])
def test_a_zone_is_left_only_with_slack_for_two_launches(slack_s, zone):
    """Two starts of 600 s, and 600 s in which the new zone cannot be left again."""
    view = replace(ON_NEAR, left_s=8 * 3600.0 + 600.0 + slack_s, blind_s=600.0)

    assert decide_market(view).zone == zone


def test_a_stay_is_expected_by_the_rates_of_each_age():
    """Half a loss an hour at any age: two hours; never lost: a week, the longest that is expected."""
    steady, never = (Hazard(up=(rate,) * 9, up_factors=(1.0,) * 9) for rate in (0.5, 0.0))

    assert UP.stays_s(steady) == pytest.approx(2 * 3600.0, rel=1e-4)
    assert UP.stays_s(never) == pytest.approx(168 * 3600.0, rel=1e-4)
    assert UP.stays_s(Hazard()) > replace(UP, age_h=0.2).stays_s(Hazard())


@given(st.lists(st.tuples(st.floats(0.98, 1.02), st.floats(0.98, 1.02)), min_size=2, max_size=30))
def test_noisy_prices_do_not_move_a_stage_to_and_fro(noises):
    """Prices around $1 that change by 2 % at each check save less than a launch in eight hours."""
    view = ON_NEAR
    for here, there in noises:
        view = replace(view, zones=(replace(NEAR, usd=here), replace(CHEAPER, usd=there)))

        assert decide_market(view).zone == "a"


@given(st.floats(0.01, 2.9), st.floats(0.01, 2.9), st.floats(0.1, 48.0), st.floats(0.1, 48.0))
def test_no_pair_of_zones_is_worth_leaving_in_both_directions(here, there, here_h, there_h):
    """At the same prices, what is saved one way is lost the other way, and both cost a launch."""
    zones = (replace(NEAR, usd=here, age_h=here_h), replace(CHEAPER, usd=there, age_h=there_h))
    view = replace(ON_NEAR, zones=zones)

    found = {name: decide_market(replace(view, running=name)).zone for name in ("a", "b")}

    assert found != {"a": "b", "b": "a"}
