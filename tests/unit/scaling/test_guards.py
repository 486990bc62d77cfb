"""The guards that check every policy: windows, budgets, deadlines, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.observations import LARGE, NOW, ONE_A_SECOND, SEEN, SMALL, TWICE, local

from envscaler_airflow.planning import Estimate, Speedup
from envscaler_airflow.scaling import (
    Observation,
    Policy,
    Proposal,
    ScalingPolicy,
    Want,
    decide,
)


@pytest.mark.parametrize(
    ("facts", "policy", "reason"),
    [
        ({}, {"max_moves": 0}, "0 moves were made, max_moves is 0"),
        (
            {"free_nodes": {LARGE.offer.name: 0}},
            {},
            "local/cpu-2 needs 1 more nodes, 0 are free",
        ),
        ({"budget_usd": 9.0}, {}, "there is a budget, and what was spent is unknown"),
    ],
)
def test_guards_hold_back_what_the_policy_wants(facts, policy, reason):
    """The same guards check every policy (feature D6)."""
    got = decide(replace(SEEN, **facts), replace(NOW, **policy))

    assert got.action == "keep"
    assert got.reason.endswith(reason)


def test_never_more_nodes_than_the_maximum():
    """Two nodes are wanted, one is allowed."""
    two = replace(SMALL, nodes=2)
    seen = replace(SEEN, candidates=(two,), speedups=(Speedup(two.name, SMALL.name, 4.0, 0.0),))

    got = decide(seen, NOW)

    assert got.action == "keep"
    assert got.reason.endswith("but 2 x local/cpu-1 is outside 1 to 1 nodes")
    assert decide(seen, replace(NOW, max_nodes=2)).action == "move"


def test_a_dearer_move_stays_within_the_budget():
    """$15 on the fast one, $10 here; $14 are left."""
    seen = replace(SEEN, candidates=(local(2, 3.0),), spent_usd=6.0, budget_usd=20.0)
    hurried = replace(NOW, value_of_hour=10)

    got = decide(seen, hurried)

    assert got.action == "keep"
    assert got.reason.endswith("but local/cpu-2 may take $15.00 to finish, $14.00 are left")
    assert decide(replace(seen, spent_usd=5.0), hurried).action == "move"


def test_a_saving_move_is_made_even_when_the_budget_will_not_do():
    """Both exceed the remaining $5, and the move gets further with them."""
    seen = replace(SEEN, spent_usd=0.0, budget_usd=5.0)

    assert decide(seen, NOW).action == "move"


def test_a_deadline_that_staying_would_miss_buys_speed():
    """Ten hours here, five there at $15, seven are left: the cost is not a reason to stay."""
    seen = replace(SEEN, candidates=(local(2, 3.0),), deadline_left_s=7 * 3600)

    got = decide(seen, NOW)

    assert got.action == "move"
    assert got.reason == "local/cpu-2 would finish in 5.00 h, staying in 10.00 h, and 7.00 h are left"


def test_a_saving_that_would_miss_the_deadline_is_not_made():
    """A tenth of the price at half the speed is cheap, but too late."""
    slow = local(4, 0.1)
    seen = replace(
        SEEN,
        candidates=(slow,),
        speedups=(Speedup(slow.name, SMALL.name, 0.5, 0.0),),
        deadline_left_s=12 * 3600,
    )

    assert decide(seen, NOW).action == "keep"
    assert decide(replace(seen, deadline_left_s=None), NOW).action == "move"


def test_a_missed_deadline_still_goes_to_the_fastest():
    """One hour is left for five hours of work: earlier is better."""
    seen = replace(SEEN, candidates=(local(2, 3.0),), deadline_left_s=-60.0)

    assert decide(seen, NOW).target == local(2, 3.0)


def test_a_move_must_have_been_wanted_for_the_window():
    """The move is made only once it was wanted at 0 s and still at 60 s."""
    patient = Policy(stabilization_s=60)
    first = decide(replace(SEEN, elapsed_s=0), patient)
    then = decide(replace(SEEN, elapsed_s=59, wanted=first.wanted), patient)
    last = decide(replace(SEEN, elapsed_s=60, wanted=then.wanted), patient)

    assert [first.action, then.action, last.action] == ["keep", "keep", "move"]
    assert then.reason.endswith("but it is wanted for 59 s of 60 s")


def test_a_wish_that_breaks_off_begins_again():
    """One check without a status of the stage resets the window."""
    patient = Policy(stabilization_s=60)
    first = decide(replace(SEEN, elapsed_s=0), patient)
    blind = decide(replace(SEEN, elapsed_s=50, health="unknown", wanted=first.wanted), patient)
    last = decide(replace(SEEN, elapsed_s=100, wanted=blind.wanted), patient)

    assert blind.wanted == {}
    assert last.action == "keep"


def test_a_wish_ripens_during_the_cooldown():
    """A move wanted during the whole cooldown is made as soon as the cooldown is over."""
    policy = Policy(stabilization_s=60, cooldown_s=100)
    cool = decide(replace(SEEN, elapsed_s=0, moves=1, since_move_s=20), policy)
    after = decide(replace(SEEN, elapsed_s=80, moves=1, since_move_s=100, wanted=cool.wanted), policy)

    assert (cool.action, after.action) == ("keep", "move")


def test_takes_the_next_best_when_the_best_is_held_back():
    """The best has no free node; the second still saves."""
    best, second = local(4, 1.0), LARGE
    seen = replace(
        SEEN,
        candidates=(best, second),
        speedups=(TWICE, Speedup(best.name, SMALL.name, 4.0, 0.0)),
        free_nodes={best.offer.name: 0},
    )

    assert decide(seen, NOW).target == second


def test_a_policy_of_ones_own_runs_behind_the_same_guards():
    """The maximum number of nodes applies to a policy of another package too."""

    def eager(seen: Observation, policy: Policy) -> Proposal:
        return Proposal(tuple(Want(item, "more is more") for item in seen.candidates))

    seen = replace(SEEN, candidates=(replace(SMALL, nodes=9), replace(SMALL, nodes=2)))

    got = decide(
        seen,
        Policy(name="eager", max_nodes=4, stabilization_s=0),
        policies={"eager": ScalingPolicy("eager", eager)},
    )

    assert (got.action, got.target.nodes) == ("move", 2)


def test_an_urgent_move_takes_no_other_one_past_the_cool_down():
    """The urgent move does not fit, and the one that fits can wait."""
    urgent, other = Want(replace(SMALL, nodes=9), "now", is_urgent=True), Want(LARGE, "nicer")

    def hasty(seen: Observation, policy: Policy) -> Proposal:
        return Proposal((urgent, other))

    policy = Policy(name="hasty", max_nodes=4, stabilization_s=0)
    moved = replace(SEEN, moves=1, since_move_s=60.0)

    got = decide(moved, policy, policies={"hasty": ScalingPolicy("hasty", hasty)})

    assert got.action == "keep"
    assert decide(SEEN, policy, policies={"hasty": ScalingPolicy("hasty", hasty)}).target == LARGE
    assert (
        decide(moved, replace(policy, max_nodes=9), policies={"hasty": ScalingPolicy("hasty", hasty)}).target
        == urgent.target
    )


def test_a_doubtful_saving_is_not_risked_against_a_sure_finish():
    """Staying certainly takes 11 h; the other takes 9.2 h on average, and one time in ten over 12."""
    doubtful = replace(SEEN, speedups=(Speedup(LARGE.name, SMALL.name, 1.2, 0.4),), deadline_left_s=11 * 3600)
    cheap = replace(doubtful, candidates=(local(2, 0.5),))

    assert decide(cheap, NOW).action == "keep"
    assert decide(replace(cheap, deadline_left_s=None), NOW).action == "move"


def test_of_those_too_late_the_fastest_is_taken():
    """Three hours for $30 rank before five for $5, when only one hour is left."""
    fast, cheap = local(4, 10.0), local(2, 1.0)
    seen = replace(
        SEEN,
        candidates=(cheap, fast),
        speedups=(TWICE, Speedup(fast.name, SMALL.name, 10 / 3, 0.0)),
        deadline_left_s=3600,
    )

    assert decide(seen, NOW).target == fast


def test_one_epoch_between_moves_is_enough():
    """At least one epoch: the second move is allowed."""
    assert decide(replace(SEEN, moves=1, since_move_s=4e3, since_move_epochs=1), NOW).action == "move"


def test_a_budget_counts_the_dearer_end_of_the_range():
    """$15.60 on average, one time in ten over $18; $17 are left and staying costs $10."""
    seen = replace(
        SEEN,
        candidates=(local(2, 3.0),),
        speedups=(replace(TWICE, stdev=0.4),),
        spent_usd=0.0,
        budget_usd=17.0,
    )
    hurried = replace(NOW, value_of_hour=10)

    assert decide(seen, hurried).action == "keep"
    assert decide(replace(seen, budget_usd=20.0), hurried).action == "move"


def test_a_deadline_guards_policies_that_do_not_look_at_it():
    """Nine hours on average are within ten, but the end of the range is not."""
    estimates = decide(SEEN, NOW).numbers
    staying = Estimate.from_dict(estimates["staying"])
    moving = replace(staying, hours=9.0, hours_high=12.0)
    short = replace(staying, hours=8.0)

    def blind(seen: Observation, policy: Policy) -> Proposal:
        return Proposal((Want(LARGE, "blind", short, moving),))

    policy = replace(NOW, name="blind")
    late = decide(
        replace(SEEN, deadline_left_s=36_000), policy, policies={"blind": ScalingPolicy("blind", blind)}
    )
    in_time = decide(
        replace(SEEN, deadline_left_s=43_200), policy, policies={"blind": ScalingPolicy("blind", blind)}
    )

    assert late.reason == "blind, but local/cpu-2 may take 12 h to finish, 10 h are left"
    assert in_time.action == "move"


def test_nodes_that_are_held_count_as_free():
    """Two are allocated and one is free: three are available, four are not."""
    two, three, four = (replace(SMALL, nodes=nodes) for nodes in (2, 3, 4))
    seen = replace(
        SEEN,
        current=two,
        candidates=(three, four),
        speeds={two.name: ONE_A_SECOND},
        speedups=(Speedup(three.name, two.name, 2.0, 0.0), Speedup(four.name, two.name, 4.0, 0.0)),
        free_nodes={SMALL.offer.name: 1},
    )

    assert decide(seen, replace(NOW, max_nodes=4)).target == three


def test_what_may_not_be_had_is_not_wanted():
    """The window begins when the guards permit the move."""
    got = decide(replace(SEEN, free_nodes={LARGE.offer.name: 0}), NOW)

    assert got.wanted == {}
