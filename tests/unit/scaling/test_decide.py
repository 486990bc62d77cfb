"""Decisions of the engine: numbers that can be checked by head."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.observations import LARGE, NOW, ONE_A_SECOND, SEEN, SMALL, TWICE, local

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed, Speedup, matched
from envscaler_airflow.scaling import (
    Policy,
    decide,
    validate,
)


def test_moves_to_what_finishes_for_less():
    """Ten hours at $1 against five at $1.50."""
    got = decide(SEEN, NOW)

    assert (got.action, got.target) == ("move", LARGE)
    assert got.reason == "local/cpu-2 saves $2.50 of $10.00 ($7.50 and 5 h instead of $10.00 and 10 h)"
    assert got.numbers["staying"]["objective"] == pytest.approx(10.0)
    assert got.numbers["moving"][LARGE.name]["objective"] == pytest.approx(7.5)


def test_bills_the_move_itself():
    """An hour and a half without training at $1.50 offsets the saving of the move (feature D2)."""
    slow = replace(SEEN, overheads=Overheads(start_s=5400))

    got = decide(slow, NOW)

    assert got == replace(
        got,
        action="keep",
        target=SMALL,
        reason="no move saves more than 3% (a known place) or 7% (a new one) of $10.00, "
        "the move's 5400 s inside",
    )
    assert got.numbers["moving"][LARGE.name]["objective"] == pytest.approx(1.5 * 6.5)


def test_keeps_when_little_work_is_left():
    """Two minutes of work do not pay for a move of five minutes, however fast the other machine is."""
    almost = replace(SEEN, units_done=36_000 - 120, overheads=Overheads(start_s=300))

    assert decide(almost, NOW).action == "keep"


def test_an_hour_that_is_worth_something_pays_for_speed():
    """Twice as fast at three times the price: more expensive, but five hours are worth $10 each."""
    dear = local(2, 3.0)
    seen = replace(SEEN, candidates=(dear,))

    assert decide(seen, NOW).action == "keep"  # $10 against $15
    assert decide(seen, replace(NOW, value_of_hour=10)).action == "move"  # $110 against $65


def test_doubt_about_a_stated_speed_costs_expected_time_but_a_try_can_be_undone():
    """At 2.0 +- 1.2 the expected time is 36 % longer: $10.20 against $10, less with the way back.

    An hour and a half for each way leaves nothing of that.
    """
    unsure = replace(SEEN, speedups=(replace(TWICE, stdev=1.2),))

    got = decide(unsure, NOW)
    far = decide(replace(unsure, overheads=Overheads(start_s=5400)), NOW)

    assert got.numbers["moving"][LARGE.name]["usd"] == pytest.approx(7.5 * 1.36)
    assert (got.action, round(got.numbers["moving"][LARGE.name]["expected"], 2)) == ("move", 7.91)
    assert far.action == "keep"


def test_goes_back_when_the_statement_was_wrong():
    """Stated twice as fast, measured no faster: $1.50 an hour for nothing."""
    there = replace(
        SEEN,
        current=LARGE,
        attempt=2,
        moves=1,
        speeds={SMALL.name: ONE_A_SECOND, LARGE.name: replace(ONE_A_SECOND, mean=1.05)},
        overheads=Overheads(start_s=60),
    )

    got = decide(there, NOW)

    assert (got.action, got.target) == ("move", SMALL)


def test_stays_when_the_statement_was_right():
    """The measured speed agrees with the stated one: the stage does not move back."""
    there = replace(
        SEEN, current=LARGE, speeds={SMALL.name: ONE_A_SECOND, LARGE.name: replace(ONE_A_SECOND, mean=1.9)}
    )

    assert decide(there, NOW).action == "keep"


def test_waits_until_the_speed_here_is_measured_long_enough():
    """After a move the stated speed does not count as measured."""
    fresh = replace(
        SEEN, current=LARGE, speeds={SMALL.name: ONE_A_SECOND, LARGE.name: Speed(9.0, 0, "measured", 4)}
    )

    got = decide(fresh, NOW)

    assert (got.action, got.reason) == ("keep", "speed on local/cpu-2 is measured for 4 s of 30 s")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"units_total": None}, "work left is unknown: the training does not report its steps, how many"),
        ({"units_done": None}, "work left is unknown: the training does not report its steps, how many"),
        ({"speeds": {}}, "speed on local/cpu-1 is measured for 0 s of 30 s"),
        ({"speedups": ()}, "no speed is known for local/cpu-2; state a speedup"),
        ({"candidates": ()}, "there is nothing else to move to"),
        ({"current": local(1, None)}, "the price of local/cpu-1 is unknown"),
        ({"current": local(1, 0.0)}, "staying costs nothing and an hour is worth nothing"),
        ({"candidates": (local(2, None),)}, "no move saves more than 3% (a known place) or 7% (a new one)"),
        ({"health": "unknown"}, "the stage's health is unknown"),
        ({"health": "stalled"}, "the stage's health is stalled"),
        ({"phase": "restoring"}, "the stage is restoring, not running"),
        ({"pending": "event 7 asks for a move"}, "one action at a time: event 7 asks for a move"),
        ({"moves": 1, "since_move_s": 3599.0}, "cool-down: 3599 s of 3600 s since the last move"),
        ({"moves": 1, "since_move_s": 4e3, "since_move_epochs": 0}, "0 epochs of 1 since the last move"),
    ],
)
def test_keeps_and_says_why(facts, reason):
    """If a fact is unknown, a change is in progress or it is too soon, the stage stays."""
    got = decide(replace(SEEN, **facts), replace(NOW, cooldown_s=3600.0, min_epochs_between=1))

    assert got.action == "keep"
    assert got.reason.startswith(reason)


def test_recommends_only():
    """With recommend_only nothing moves, and the reason is the same."""
    got = decide(SEEN, replace(NOW, recommend_only=True))

    assert (got.action, got.target) == ("recommend", LARGE)


def test_validation_asks_the_same_code_about_one_target():
    """The owner skips the window, and finds the same reasons on fresh facts."""
    slow_now = replace(SEEN, overheads=Overheads(start_s=5400))

    assert validate(SEEN, Policy(), LARGE).action == "move"
    assert validate(slow_now, Policy(), LARGE).action == "keep"
    assert validate(replace(SEEN, health="unknown"), Policy(), LARGE).action == "keep"
    assert validate(SEEN, Policy(recommend_only=True), LARGE).action == "recommend"


def test_validation_looks_at_the_target_alone():
    """A better alternative to the requested target does not change the answer."""
    best = local(4, 0.5)
    seen = replace(SEEN, candidates=(best,), speedups=(TWICE, Speedup(best.name, SMALL.name, 4.0, 0.0)))

    assert validate(seen, Policy(), LARGE).target == LARGE


def test_a_person_needs_no_good_reason():
    """A forced move skips the policy and the cooldown, but not the limits."""
    dear = local(2, 9.0)
    seen = replace(SEEN, moves=1, since_move_s=1.0)

    assert validate(seen, Policy(), dear, is_forced=True).action == "move"
    assert validate(seen, Policy(), replace(dear, nodes=2), is_forced=True).action == "keep"
    assert validate(replace(seen, phase="setup"), Policy(), dear, is_forced=True).action == "keep"
    over = replace(seen, budget_usd=20.0, spent_usd=1.0)
    assert validate(over, Policy(), dear, is_forced=True).action == "keep"


def test_an_unknown_policy_is_named_with_the_known_ones():
    """A typo is an immediate error, instead of a stage that never scales."""
    with pytest.raises(
        ValueError, match=r"policy must be one of cost-to-finish, .*threshold, vertical, got 'treshold'"
    ):
        decide(SEEN, Policy(name="treshold"))


def node(kind: str, capacity: str, usd: float) -> Allocation:
    """A node of a cluster, as spot or on demand."""
    return Allocation(Offer("kubernetes", "", kind, capacity, 4, 16, usd_per_hour=usd))


def test_a_speedup_without_capacity_type_is_of_both():
    """``kubernetes/big`` is the spot node and the one on demand (D9)."""
    here, spot, steady = (
        node("small", "on-demand", 1.0),
        node("big", "spot", 1.2),
        node("big", "on-demand", 3),
    )
    stated = Speedup("kubernetes/big", "kubernetes/small", 2.0, 0.0)
    seen = replace(
        SEEN,
        current=here,
        candidates=(here, spot, steady),
        speeds={here.name: ONE_A_SECOND},
        speedups=(stated,),
    )

    got = decide(seen, NOW)

    assert (got.action, got.target) == ("move", spot)
    assert set(got.numbers["moving"]) == {spot.name, steady.name}


def test_a_speedup_of_several_nodes_needs_no_capacity_type_either():
    """Its name has the form of the allocation's name (D9)."""
    found, unmatched = matched(
        [Speedup("2 x kubernetes/big", "x", 2.0, 0.0)], ["2 x kubernetes/big/spot", "x"]
    )

    assert [item.offer for item in found] == ["2 x kubernetes/big/spot"]
    assert unmatched == ()


def test_a_speedup_that_names_no_offer_is_said_in_the_reason():
    """The reason names a misspelt name, instead of ignoring it silently for the whole stage (D9)."""
    seen = replace(SEEN, speedups=(Speedup("local/cpu2", SMALL.name, 2.0, 0.0),))

    got = decide(seen, NOW)

    assert got.action == "keep"
    assert got.reason.endswith(
        "; scaling.speedup names local/cpu2, which matches no offer: write one of local/cpu-1, local/cpu-2"
    )
