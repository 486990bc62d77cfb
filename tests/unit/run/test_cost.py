"""Bills: two attempts, an hour each, whose numbers can be checked by head."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.planning import Allocation, Offer
from envscaler_airflow.planning.amounts import usd_text
from envscaler_airflow.run import cost
from envscaler_airflow.run.cost import Bill, Pause, Split, StaticPlan, UsageInterval, Use
from envscaler_airflow.run.narration import totals

HOUR = 3600.0
bill, spent_usd = partial(cost.bill, tariffs={}), partial(cost.spent_usd, tariffs={})
SMALL = Allocation(Offer("local", "", "cpu-1", "on-demand", 1, 4, usd_per_hour=1.0))
LARGE = Allocation(Offer("aws", "r", "c5", "spot", 2, 8, usd_per_hour=3.0), nodes=2)
# An hour on the small one: 6 minutes to start, 6 idle, 48 training 480 steps, of which 400 were kept.
FIRST = Use(
    generation=1,
    attempt=1,
    allocation=SMALL,
    usage=(UsageInterval(0, 0.0, HOUR),),
    outcome="lost",
    provisioning_s=360.0,
    idle_s=360.0,
    first_step=0,
    last_step=480,
    kept_step=400,
)
# Half an hour on two nodes of the large one: 3 minutes to start, 27 training the other 600.
SECOND = Use(
    generation=1,
    attempt=2,
    allocation=LARGE,
    usage=(UsageInterval(0, 4000.0, 4000.0 + HOUR / 2), UsageInterval(1, 4000.0, 4000.0 + HOUR / 2)),
    outcome="succeeded",
    provisioning_s=180.0,
    idle_s=0.0,
    first_step=400,
    last_step=1000,
    kept_step=1000,
)


def approx(split: Split) -> list[object]:
    """Parts of a split, to compare."""
    return [pytest.approx(item) for item in (split.compute, split.lost, split.provisioning, split.idle)]


def parts(split: Split) -> list[float | None]:
    """Parts of a split."""
    return [split.compute, split.lost, split.provisioning, split.idle]


def test_a_line_says_where_the_money_went():
    """$1: 80 % training, of which 80 of 480 steps were lost; a tenth each for start and idle."""
    line = bill([FIRST], now=0).lines[0]

    assert (line.usd, line.steps, line.lost_steps, line.wall_s) == (1.0, 480, 80, HOUR)
    assert parts(line.usd_split) == approx(Split(0.8 * 400 / 480, 0.8 * 80 / 480, 0.1, 0.1))


def test_a_bill_adds_up_its_lines():
    """$1 for the first, two nodes for half an hour at $3 for the second."""
    got = bill([SECOND, FIRST], now=0)

    assert [line.use.attempt for line in got.lines] == [1, 2]
    assert (got.usd, got.node_hours, got.steps, got.lost_steps) == (4.0, 2.0, 1080, 80)
    assert got.wall_s == 4000 + HOUR / 2
    assert parts(got.usd_split) == approx(Split(0.8 * 400 / 480 + 2.7, 0.8 * 80 / 480, 0.4, 0.1))
    assert got.notes == ()


def test_the_static_plan_is_the_first_allocation_for_the_whole_work():
    """6 minutes to start, 1000 steps at 480 in 48 minutes, and the run's 6 minutes idle: 112 at $1 (F11)."""
    got = bill([FIRST, SECOND], now=0, total_steps=1000)

    assert got.static == StaticPlan(
        SMALL,
        hours=pytest.approx(112 / 60),
        usd=pytest.approx(112 / 60),
        assumption="1000 steps at the speed that g1-a1 had, started once, idle as much",
    )
    assert got.saved_usd == pytest.approx(112 / 60 - 4.0)


def test_the_static_plan_counts_what_was_kept_when_no_total_is_known():
    """400 of the first and 600 of the second are the 1000."""
    assert bill([FIRST, SECOND], now=0).static == bill([FIRST, SECOND], now=0, total_steps=1000).static


def test_the_static_plan_is_on_demand():
    """A spot price does not replace it; the on-demand price can be given."""
    unknown = bill([SECOND], now=0)
    known = bill([SECOND], now=0, on_demand_usd_per_node_hour=9.0)

    assert (unknown.static.usd, unknown.saved_usd) == (None, None)
    assert unknown.notes == ("static plan: the on-demand price of 2 x aws/r/c5/spot is unknown",)
    assert known.static.usd == pytest.approx(0.5 * 2 * 9.0)


def test_the_static_plan_skips_an_attempt_that_did_nothing():
    """The first start failed at once; the same allocation did better later."""
    failed = Use(1, 0, SMALL, usage=(), outcome="not-started")

    got = bill([failed, FIRST, SECOND], now=0)

    assert got.static == bill([FIRST, SECOND], now=0).static
    assert got.notes == ()


def test_an_unknown_price_is_not_free():
    """The total is unknown; the known part is reported beside it."""
    unpriced = replace(SECOND, allocation=replace(LARGE, offer=replace(LARGE.offer, usd_per_hour=None)))

    got = bill([FIRST, unpriced], now=0)

    assert (got.usd, got.known_usd, got.usd_split, got.saved_usd) == (None, 1.0, Split(), None)
    assert got.notes == ("g1-a2: the price of aws/r/c5/spot is unknown",)
    assert got.hours.provisioning == pytest.approx(0.2)


def test_an_unknown_time_is_not_free():
    """The provider did not report it: neither hours nor USD are known."""
    got = bill([replace(FIRST, usage=None)], now=0)

    assert (got.usd, got.node_hours, got.wall_s) == (None, None, None)
    assert got.notes[0] == "g1-a1: the provider did not report how long it was allocated"
    assert spent_usd([replace(FIRST, usage=None)], now=0) is None


def test_a_bill_by_statuses_alone_is_the_least_that_it_was():
    """The total and the saving are unknown; the known part is marked as such (D5)."""
    got = bill([FIRST, replace(SECOND, is_lower_bound=True)], now=0)

    whole = bill([FIRST, SECOND], now=0)
    least = whole.lines[1].usd
    assert (got.usd, got.lines[1].usd, got.node_hours, got.saved_usd) == (None, None, None, None)
    assert (got.lines[1].least_usd, got.known_usd) == (least, whole.usd)
    assert got.notes[0] == (
        f"g1-a2: cost at least {usd_text(least)}, by the statuses of its nodes; "
        "the provider has no times of it any more"
    )
    assert totals(got)[0].startswith(f"total at least {usd_text(whole.usd)} in ")


def test_an_attempt_that_was_never_held_costs_nothing():
    """Without a machine there is no bill, and nothing is unknown."""
    got = bill([Use(1, 1, SMALL, usage=(), outcome="not-started")], now=0)

    assert (got.usd, got.node_hours) == (0.0, 0.0)
    assert got.hours == Split(0.0, 0.0, 0.0, 0.0)


def test_no_attempts_cost_nothing():
    """A run that has not begun."""
    assert bill([], now=5.0) == Bill(
        usd=0, node_hours=0, steps=0, lost_steps=0, hours=Split(0, 0, 0, 0), usd_split=Split(0, 0, 0, 0)
    )


def test_what_is_held_is_billed_until_now():
    """Half an hour so far; nothing lost yet."""
    running = replace(
        FIRST, usage=(UsageInterval(0, 0.0),), outcome="", kept_step=None, provisioning_s=0, idle_s=0
    )

    got = bill([running], now=HOUR / 2)

    assert (got.usd, got.lost_steps) == (0.5, 0)
    assert spent_usd([running, SECOND], now=HOUR / 2) == 3.5


@pytest.mark.parametrize(
    ("facts", "split"),
    [
        ({"provisioning_s": None}, [None, None, None, None]),
        ({"idle_s": None}, [None, None, 0.1, None]),
        ({"last_step": None}, [None, None, 0.1, 0.1]),
        ({"kept_step": None}, [None, None, 0.1, 0.1]),
    ],
)
def test_what_cannot_be_told_stays_unknown_and_is_said(facts, split):
    """An unknown part is not added to another part."""
    got = bill([replace(FIRST, **facts)], now=0)

    assert parts(got.hours) == split
    assert got.usd == 1.0
    assert any(note.startswith("g1-a1: ") for note in got.notes)


def test_an_attempt_without_a_step_was_idle():
    """It started, ran for an hour, and made no step: none of it was computing."""
    got = bill([replace(FIRST, last_step=0, kept_step=0)], now=0)

    assert parts(got.hours) == approx(Split(0.0, 0.0, 0.1, 0.9))


def test_provisioning_never_exceeds_what_is_billed():
    """Two clocks that disagree do not make a negative part."""
    got = bill([replace(FIRST, provisioning_s=2 * HOUR)], now=0)

    assert parts(got.hours) == approx(Split(0.0, 0.0, 1.0, 0.0))


def test_more_was_lost_than_done():
    """It resumed from before its own start: all of its work is lost, but not more."""
    assert bill([replace(SECOND, kept_step=100)], now=0).lost_steps == 600


def test_pauses_stand_in_the_order_of_attempts():
    """The pause before attempt 2 was given last."""
    pause = Pause(1, 2, "move", 20.0, {"checkpoint": 5.0, "start": 10.0})

    assert bill([FIRST], now=0, pauses=[replace(pause, before=2), pause]).pauses[0] == pause


def test_a_bill_goes_through_json():
    """XCom contains the bill."""
    got = bill([FIRST, SECOND], now=0, pauses=[Pause(1, 2, "lost", 400.0, {"start": 180.0})])

    assert Bill.from_dict(json.loads(json.dumps(got.to_dict(), allow_nan=False))) == got


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_a_bill_of_nonsense_cannot_exist(bad):
    """NaN would affect every sum."""
    with pytest.raises(ValueError, match="start must be finite"):
        UsageInterval(0, bad)
    with pytest.raises(ValueError, match="idle_s must be finite"):
        replace(FIRST, idle_s=bad)
    with pytest.raises(ValueError, match="stop must be finite"):
        Pause(1, 2, parts={"stop": bad})


uses = st.builds(
    Use,
    generation=st.just(1),
    attempt=st.integers(1, 9),
    allocation=st.sampled_from([SMALL, LARGE]),
    usage=st.none()
    | st.tuples(st.builds(UsageInterval, st.just(0), st.floats(0, 1e6), st.none() | st.floats(0, 1e6))),
    outcome=st.sampled_from(["", "lost"]),
    provisioning_s=st.none() | st.floats(0, 1e5),
    idle_s=st.none() | st.floats(0, 1e5),
    first_step=st.none() | st.integers(0, 100),
    last_step=st.none() | st.integers(0, 100),
    kept_step=st.none() | st.integers(0, 100),
)


@given(st.lists(uses, max_size=5))
def test_parts_add_up_to_the_whole(found):
    """For any known facts, no part is negative and the parts add up to the billed amount."""
    got = bill(found, now=1e6)

    for line in got.lines:
        known = [item for item in parts(line.hours) if item is not None]
        assert all(item >= -1e-9 for item in known)
        if len(known) == 4:
            assert sum(known) == pytest.approx(line.node_hours)
    assert got.usd == spent_usd(found, now=1e6)
    assert got.usd is None or got.usd == pytest.approx(got.known_usd)


def test_the_static_plan_does_not_borrow_another_s_speed():
    """The small one made no step, and the large one's speed does not apply to it."""
    got = bill([replace(FIRST, last_step=0, kept_step=0), SECOND], now=0)

    assert (got.static.hours, got.saved_usd) == (None, None)
    assert got.notes == ("static plan: the speed of g1-a1 on local/cpu-1 is unknown",)
