"""Decisions of the engine, guards included: numbers that can be checked by head."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation, Estimate, Offer, Overheads, Speed, Speedup, matched
from envscaler_airflow.protocol import Progress
from envscaler_airflow.scaling import (
    Check,
    Decision,
    Memory,
    Observation,
    Policy,
    Proposal,
    Sample,
    Want,
    decide,
    explain,
    recent,
    remember,
    replay,
    usage_samples,
    validate,
    work_of,
)


def local(vcpus: int, usd_per_hour: float | None) -> Allocation:
    """One slice of a machine."""
    return Allocation(
        Offer(
            cloud="local",
            region="",
            instance_type=f"cpu-{vcpus}",
            capacity_type="on-demand",
            vcpus=vcpus,
            memory_gib=4,
            usd_per_hour=usd_per_hour,
        )
    )


SMALL, LARGE = local(1, 1.0), local(2, 1.5)
ONE_A_SECOND = Speed(1.0, 0.0, "measured", 60)
TWICE = Speedup(LARGE.name, SMALL.name, 2.0, 0.0)
# Ten hours left on the small one, five on the large one: $10 against $7.50.
SEEN = Observation(
    current=SMALL,
    candidates=(SMALL, LARGE),
    elapsed_s=600,
    units_done=0,
    units_total=36_000,
    speeds={SMALL.name: ONE_A_SECOND},
    speedups=(TWICE,),
)
NOW = Policy(stabilization_s=0)


def test_moves_to_what_finishes_for_less():
    """Ten hours at $1 against five at $1.50."""
    got = decide(SEEN, NOW)

    assert (got.action, got.target) == ("move", LARGE)
    assert got.reason == "local/cpu-2 saves $2.5 of $10 ($7.5 and 5 h instead of $10 and 10 h)"
    assert got.numbers["staying"]["objective"] == pytest.approx(10.0)
    assert got.numbers["moving"][LARGE.name]["objective"] == pytest.approx(7.5)


def test_bills_the_move_itself():
    """An hour and a half without training at $1.50 eats what the move would save."""
    slow = replace(SEEN, overheads=Overheads(start_s=5400))

    got = decide(slow, NOW)

    assert got == replace(
        got,
        action="keep",
        target=SMALL,
        reason="no move saves more than 10% of $10, the move's 5400 s inside",
    )
    assert got.numbers["moving"][LARGE.name]["objective"] == pytest.approx(1.5 * 6.5)


def test_keeps_when_little_work_is_left():
    """Two minutes of work do not pay for five minutes of moving, however fast the other is."""
    almost = replace(SEEN, units_done=36_000 - 120, overheads=Overheads(start_s=300))

    assert decide(almost, NOW).action == "keep"


def test_an_hour_that_is_worth_something_pays_for_speed():
    """Twice as fast at three times the price: dearer, but five hours are worth $10 each."""
    dear = local(2, 3.0)
    seen = replace(SEEN, candidates=(dear,))

    assert decide(seen, NOW).action == "keep"  # $10 against $15
    assert decide(seen, replace(NOW, value_of_hour=10)).action == "move"  # $110 against $65


def test_doubt_about_a_stated_speed_costs_expected_time():
    """At 2.0 +- 1.2 the expected time is 36 % longer: $10.20 against $10."""
    unsure = replace(SEEN, speedups=(replace(TWICE, stdev=1.2),))

    got = decide(unsure, NOW)

    assert got.action == "keep"
    assert got.numbers["moving"][LARGE.name]["usd"] == pytest.approx(7.5 * 1.36)


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
    """What was measured agrees with what was stated: the first move stands."""
    there = replace(
        SEEN, current=LARGE, speeds={SMALL.name: ONE_A_SECOND, LARGE.name: replace(ONE_A_SECOND, mean=1.9)}
    )

    assert decide(there, NOW).action == "keep"


def test_waits_until_the_speed_here_is_measured_long_enough():
    """After a move the stated speed is not taken for the measured one."""
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
        ({"candidates": (local(2, None),)}, "no move saves more than 10% of $10"),
        ({"health": "unknown"}, "the stage's health is unknown"),
        ({"health": "stalled"}, "the stage's health is stalled"),
        ({"phase": "restoring"}, "the stage is restoring, not running"),
        ({"pending": "event 7 asks for a move"}, "one action at a time: event 7 asks for a move"),
        ({"moves": 1, "since_move_s": 3599.0}, "cool-down: 3599 s of 3600 s since the last move"),
        ({"moves": 1, "since_move_s": 4e3, "since_move_epochs": 0}, "0 epochs of 1 since the last move"),
    ],
)
def test_keeps_and_says_why(facts, reason):
    """What is unknown, under way or too soon keeps the stage where it is."""
    got = decide(replace(SEEN, **facts), NOW)

    assert got.action == "keep"
    assert got.reason.startswith(reason)


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
    """The same guards stand around every policy."""
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
    assert got.reason.endswith("but local/cpu-2 may take $15 to finish, $14 are left")
    assert decide(replace(seen, spent_usd=5.0), hurried).action == "move"


def test_a_saving_move_is_made_even_when_the_budget_will_not_do():
    """Both are over the $5 that are left, and the move gets further with them."""
    seen = replace(SEEN, spent_usd=0.0, budget_usd=5.0)

    assert decide(seen, NOW).action == "move"


def test_a_deadline_that_staying_would_miss_buys_speed():
    """Ten hours here, five there at $15, seven are left: money is no reason to stay."""
    seen = replace(SEEN, candidates=(local(2, 3.0),), deadline_left_s=7 * 3600)

    got = decide(seen, NOW)

    assert got.action == "move"
    assert got.reason == "local/cpu-2 would finish in 5.00 h, staying in 10.00 h, and 7.00 h are left"


def test_a_saving_that_would_miss_the_deadline_is_not_made():
    """A tenth of the price at half the speed: cheap, and too late."""
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
    """One hour is left for five: the sooner the better."""
    seen = replace(SEEN, candidates=(local(2, 3.0),), deadline_left_s=-60.0)

    assert decide(seen, NOW).target == local(2, 3.0)


def test_a_move_must_have_been_wanted_for_the_window():
    """Wanted at 0 s and still at 60 s: only then."""
    patient = Policy(stabilization_s=60)
    first = decide(replace(SEEN, elapsed_s=0), patient)
    then = decide(replace(SEEN, elapsed_s=59, wanted=first.wanted), patient)
    last = decide(replace(SEEN, elapsed_s=60, wanted=then.wanted), patient)

    assert [first.action, then.action, last.action] == ["keep", "keep", "move"]
    assert then.reason.endswith("but it is wanted for 59 s of 60 s")


def test_a_wish_that_breaks_off_begins_anew():
    """One check that cannot see the stage resets the window."""
    patient = Policy(stabilization_s=60)
    first = decide(replace(SEEN, elapsed_s=0), patient)
    blind = decide(replace(SEEN, elapsed_s=50, health="unknown", wanted=first.wanted), patient)
    last = decide(replace(SEEN, elapsed_s=100, wanted=blind.wanted), patient)

    assert blind.wanted == {}
    assert last.action == "keep"


def test_a_wish_ripens_during_the_cooldown():
    """Wanted all through the cool-down, it is taken as soon as that is over."""
    policy = Policy(stabilization_s=60, cooldown_s=100)
    cool = decide(replace(SEEN, elapsed_s=0, moves=1, since_move_s=20), policy)
    after = decide(replace(SEEN, elapsed_s=80, moves=1, since_move_s=100, wanted=cool.wanted), policy)

    assert (cool.action, after.action) == ("keep", "move")


def test_recommends_only():
    """With recommend_only nothing ever moves, and the reason stays."""
    got = decide(SEEN, replace(NOW, recommend_only=True))

    assert (got.action, got.target) == ("recommend", LARGE)


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


def test_validation_asks_the_same_code_about_one_target():
    """The owner waits for no window, and finds the same reasons on fresh facts."""
    slow_now = replace(SEEN, overheads=Overheads(start_s=5400))

    assert validate(SEEN, Policy(), LARGE).action == "move"
    assert validate(slow_now, Policy(), LARGE).action == "keep"
    assert validate(replace(SEEN, health="unknown"), Policy(), LARGE).action == "keep"
    assert validate(SEEN, Policy(recommend_only=True), LARGE).action == "recommend"


def test_validation_looks_at_the_target_alone():
    """Something better than what was asked for does not change the answer."""
    best = local(4, 0.5)
    seen = replace(SEEN, candidates=(best,), speedups=(TWICE, Speedup(best.name, SMALL.name, 4.0, 0.0)))

    assert validate(seen, Policy(), LARGE).target == LARGE


def test_a_person_needs_no_good_reason():
    """A forced move passes the policy and the cool-down, not the limits."""
    dear = local(2, 9.0)
    seen = replace(SEEN, moves=1, since_move_s=1.0)

    assert validate(seen, Policy(), dear, is_forced=True).action == "move"
    assert validate(seen, Policy(), replace(dear, nodes=2), is_forced=True).action == "keep"
    assert validate(replace(seen, phase="setup"), Policy(), dear, is_forced=True).action == "keep"
    over = replace(seen, budget_usd=20.0, spent_usd=1.0)
    assert validate(over, Policy(), dear, is_forced=True).action == "keep"


def test_a_policy_of_ones_own_runs_behind_the_same_guards():
    """Whatever a policy from elsewhere wants, too many nodes are too many."""

    def eager(seen: Observation, policy: Policy) -> Proposal:
        return Proposal(tuple(Want(item, "more is more") for item in seen.candidates))

    seen = replace(SEEN, candidates=(replace(SMALL, nodes=9), replace(SMALL, nodes=2)))

    got = decide(seen, Policy(name="eager", max_nodes=4, stabilization_s=0), policies={"eager": eager})

    assert (got.action, got.target.nodes) == ("move", 2)


def test_an_urgent_move_takes_no_other_one_past_the_cool_down():
    """What is urgent does not fit; what would fit can wait."""
    urgent, other = Want(replace(SMALL, nodes=9), "now", is_urgent=True), Want(LARGE, "nicer")

    def hasty(seen: Observation, policy: Policy) -> Proposal:
        return Proposal((urgent, other))

    policy = Policy(name="hasty", max_nodes=4, stabilization_s=0)
    moved = replace(SEEN, moves=1, since_move_s=60.0)

    got = decide(moved, policy, policies={"hasty": hasty})

    assert got.action == "keep"
    assert decide(SEEN, policy, policies={"hasty": hasty}).target == LARGE
    assert decide(moved, replace(policy, max_nodes=9), policies={"hasty": hasty}).target == urgent.target


def test_an_unknown_policy_is_named_with_the_known_ones():
    """A typo is an error at once, not a stage that never scales."""
    with pytest.raises(
        ValueError, match=r"policy must be one of cost-to-finish, .*threshold, vertical, got 'treshold'"
    ):
        decide(SEEN, Policy(name="treshold"))


def test_a_recorded_check_decides_the_same_again():
    """Through JSON and back, the observation gives the recorded decision."""
    check = Check(SEEN, NOW, decide(SEEN, NOW))
    line = json.dumps(check.to_dict(), allow_nan=False)

    again = Check.from_dict(json.loads(line))

    assert again == check
    assert replay(again) == check.decision


def test_memory_is_a_fold_of_the_checks():
    """Wishes and speeds outlive a restart; a new generation begins with none."""
    patient = Policy(stabilization_s=60)
    one = replace(SEEN, elapsed_s=5)
    two = replace(SEEN, elapsed_s=35, current=LARGE, speeds={LARGE.name: ONE_A_SECOND})
    checks = [Check(seen, patient, decide(seen, patient)) for seen in (one, two)]

    memory = remember(checks)

    both = {SMALL.name: ONE_A_SECOND, LARGE.name: ONE_A_SECOND}
    assert memory == Memory(35, 1, checks[1].decision.wanted, both, unit="steps")
    silent = replace(two, units_done=None, unit="epochs")
    assert memory.after(Check(silent, patient, decide(silent, patient))).speeds == both
    other = replace(two, unit="epochs")
    assert memory.after(Check(other, patient, decide(other, patient))).speeds == other.speeds
    assert remember([*checks, checks[1]]) == memory
    new = replace(one, generation=2, speeds={})
    assert memory.after(Check(new, patient, decide(new, patient))).speeds == {}


def test_explains_in_words():
    """What a person reads of a check."""
    seen = replace(SEEN, spent_usd=1.0, budget_usd=50.0)

    assert explain(Check(seen, NOW, decide(seen, NOW))).splitlines() == [
        "move to local/cpu-2: local/cpu-2 saves $2.5 of $10 ($7.5 and 5 h instead of $10 and 10 h)",
        "  attempt 1 of generation 1 on local/cpu-1, policy cost-to-finish, 600 s after the first check",
        "  0 of 36000 steps done",
        "  spent $1 of $50",
        "  staying on local/cpu-1: 10 h (10 to 10), $10, objective 10, 1 +- 0 steps/s measured",
        "  moving to local/cpu-2: 5 h (5 to 5), $7.5, objective 7.5, 2 +- 0 steps/s stated",
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        {"staying": {"cheap": 1}},
        {"moving": ["here"]},
        {"moving": {"there": 3}},
        {"metrics": [{"is": 1}]},
        {"metrics": 7},
        {"slack_s": "much"},
        {"ticks_of_on_demand": 4},
        {"phase_from": "us", "lasts_s": "long"},
        {"vcpus": {"peak": "high"}},
        {"unknown_speed": 1},
    ],
    ids="-".join,
)
def test_numbers_of_another_form_are_still_explained(numbers):
    """Another package's policy, or another version, calls something else by a name of ours."""
    decided = replace(decide(SEEN, NOW), numbers={**numbers, "mine": 4.5})

    lines = explain(Check(SEEN, NOW, decided)).splitlines()

    assert lines[0].startswith("move to local/cpu-2: ")
    assert "  mine: 4.5" in lines


def test_work_is_counted_in_what_the_training_reports():
    """Steps when their total is known, else epochs, else nothing to hope for."""
    assert work_of(Progress(step=5, total_steps=9, epoch=1, epochs=2)).to_dict() == {
        "unit": "steps",
        "done": 5.0,
        "total": 9.0,
    }
    assert work_of(Progress(step=5, epoch=1, epochs=2)).unit == "epochs"
    assert work_of(Progress(step=5)).total is None
    assert work_of(Progress()).done is None


def test_metrics_that_are_no_numbers_are_missing():
    """A NaN from a broken sampler is left out, and cannot be made."""
    usage = {"cpu_percent": float("nan"), "gpu_percent": 7.0, "disk": None, "queue": 1.7e308}

    assert usage_samples(3, 0, usage) == (Sample(3, 0, "gpu_percent", 7.0),)
    beyond = {"memory_bytes": 1e99, "memory_limit_bytes": 1e-9}
    assert "memory_utilization" not in {item.metric for item in usage_samples(3, 0, beyond)}
    with pytest.raises(ValueError, match="value must be finite"):
        Sample(3, 0, "cpu_percent", float("nan"))


def test_old_samples_are_dropped():
    """An observation carries the window only."""
    old, new = Sample(0, 0, "m", 1.0), Sample(90, 0, "m", 2.0)

    assert recent([old, new], now_s=100, window_s=10) == (new,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["elapsed_s", "units_done", "units_total", "spent_usd", "since_move_s"])
def test_an_observation_with_nonsense_cannot_exist(field, bad):
    """NaN compares false with everything, so it must not reach a comparison."""
    with pytest.raises(ValueError, match=field):
        replace(SEEN, **{field: bad})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_nodes": 2}, "nodes must be 1 or more, min to max, got 2..1"),
        ({"tolerance": 1.0}, r"tolerance must be in \[0, 1\), got 1.0"),
        ({"value_of_hour": float("nan")}, "value_of_hour must be finite"),
    ],
)
def test_a_policy_with_nonsense_cannot_exist(fields, message):
    """Refused at birth, where the spec can still be named."""
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


def test_a_decision_from_text_is_checked():
    """What is read back is data: wrong types are refused by name."""
    with pytest.raises(ValueError, match=r"Decision.action: got 'dance', expected"):
        Decision.from_dict({"action": "dance", "target": SMALL.to_dict(), "reason": ""})
    with pytest.raises(ValueError, match=r"Decision: .*missing"):
        Decision.from_dict({"action": "keep"})


def test_a_doubtful_saving_is_not_risked_against_a_sure_finish():
    """Staying makes the 11 h for sure; the other takes 9.2 h in the mean, and one time in ten over 12."""
    doubtful = replace(SEEN, speedups=(Speedup(LARGE.name, SMALL.name, 1.2, 0.4),), deadline_left_s=11 * 3600)
    cheap = replace(doubtful, candidates=(local(2, 0.5),))

    assert decide(cheap, NOW).action == "keep"
    assert decide(replace(cheap, deadline_left_s=None), NOW).action == "move"


def test_of_those_too_late_the_fastest_is_taken():
    """Three hours for $30 before five for $5, when only one hour is left."""
    fast, cheap = local(4, 10.0), local(2, 1.0)
    seen = replace(
        SEEN,
        candidates=(cheap, fast),
        speedups=(TWICE, Speedup(fast.name, SMALL.name, 10 / 3, 0.0)),
        deadline_left_s=3600,
    )

    assert decide(seen, NOW).target == fast


def test_one_epoch_between_moves_is_enough():
    """At least one: the second may come."""
    assert decide(replace(SEEN, moves=1, since_move_s=4e3, since_move_epochs=1), NOW).action == "move"


def test_a_budget_counts_the_dearer_end_of_the_range():
    """$15.60 in the mean, one time in ten over $18; $17 are left and staying takes $10."""
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
    """Nine hours in the mean are within ten, and the end of the range is not."""
    estimates = decide(SEEN, NOW).numbers
    staying = Estimate.from_dict(estimates["staying"])
    moving = replace(staying, hours=9.0, hours_high=12.0)
    short = replace(staying, hours=8.0)

    def blind(seen: Observation, policy: Policy) -> Proposal:
        return Proposal((Want(LARGE, "blind", short, moving),))

    policy = replace(NOW, name="blind")
    late = decide(replace(SEEN, deadline_left_s=36_000), policy, policies={"blind": blind})
    in_time = decide(replace(SEEN, deadline_left_s=43_200), policy, policies={"blind": blind})

    assert late.reason == "blind, but local/cpu-2 may take 12 h to finish, 10 h are left"
    assert in_time.action == "move"


def test_nodes_that_are_held_count_as_free():
    """Two are held and one is free: three can be had, four not."""
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
    """The window begins when the guards let it pass."""
    got = decide(replace(SEEN, free_nodes={LARGE.offer.name: 0}), NOW)

    assert got.wanted == {}


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
    """As the name of an allocation is written (D9)."""
    found, unmatched = matched(
        [Speedup("2 x kubernetes/big", "x", 2.0, 0.0)], ["2 x kubernetes/big/spot", "x"]
    )

    assert [item.offer for item in found] == ["2 x kubernetes/big/spot"]
    assert unmatched == ()


def test_a_speedup_that_names_no_offer_is_said_in_the_reason():
    """A misspelt name is not ignored for the whole stage in silence (D9)."""
    seen = replace(SEEN, speedups=(Speedup("local/cpu2", SMALL.name, 2.0, 0.0),))

    got = decide(seen, NOW)

    assert got.action == "keep"
    assert got.reason.endswith(
        "; scaling.speedup names local/cpu2, which matches no offer: write one of local/cpu-1, local/cpu-2"
    )
