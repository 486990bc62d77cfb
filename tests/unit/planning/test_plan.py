"""Which offer a stage starts on, and why the others are not chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.errors import NoOfferError
from envscaler_airflow.planning import (
    Goal,
    Knowledge,
    Offer,
    Overheads,
    Plan,
    Requirements,
    Speed,
    misfits,
    plan,
)

CPU = Offer("local", "", "cpu-1", "on-demand", 1, 4, usd_per_hour=1.0)
CPU2 = replace(CPU, instance_type="cpu-2", vcpus=2, memory_gib=8, usd_per_hour=1.5)
T4 = Offer("aws", "r", "t4", "on-demand", 4, 16, None, "T4", 1, 16, 0.5)
A100 = Offer("aws", "r", "a100", "on-demand", 12, 85, None, "A100-80GB", 1, 80, 4.0)
A100_SPOT = replace(A100, capacity_type="spot", usd_per_hour=1.5)
GPU = Requirements(vcpus=2, memory_gib=8, gpus=1)
HOURLY = 1 / 3600  # units a second that make a unit an hour
TEN_UNITS = Knowledge(
    units=10,
    speeds={T4.name: Speed(HOURLY, 0.0), A100.name: Speed(10 * HOURLY, 0.0)},
)


def chosen(got: Plan) -> str:
    """Name of the chosen allocation."""
    return got.pick().name


def test_ranks_by_usd_an_hour_when_no_speed_is_known():
    """The cheapest one that fits is chosen, and the plan notes that no speed is known."""
    got = plan(Requirements(), [CPU2, CPU])

    assert [item.allocation.offer for item in got.candidates] == [CPU, CPU2]
    assert got.chosen == got.candidates[0]
    assert got.chosen.estimate is None
    assert got.notes == ("no speed is known yet: ranked by USD an hour, without times",)


def test_ranks_by_cost_to_finish_when_speeds_are_known():
    """Ten hours at $0.50 against one at $4."""
    got = plan(GPU, [A100, T4], knowledge=TEN_UNITS)

    assert [item.estimate.usd for item in got.candidates] == [pytest.approx(4.0), pytest.approx(5.0)]
    assert chosen(got) == A100.name


def test_the_value_of_an_hour_turns_the_choice():
    """At 20 units/h for $16 the fast one costs $3 more, and saves nine and a half hours."""
    dear = replace(A100, usd_per_hour=16.0)
    work = replace(TEN_UNITS, speeds={**TEN_UNITS.speeds, A100.name: Speed(20 * HOURLY, 0.0)})

    assert chosen(plan(GPU, [dear, T4], knowledge=work, goal=Goal("cost"))) == T4.name
    assert chosen(plan(GPU, [dear, T4], knowledge=work, goal=Goal("balanced"))) == dear.name
    assert plan(GPU, [dear, T4], goal=Goal("performance")).value_of_hour_usd == 50.0


def test_start_up_is_billed():
    """An hour of start on $4 is $4 more."""
    work = replace(TEN_UNITS, overheads=Overheads(start_s=3600))

    assert chosen(plan(GPU, [A100, T4], knowledge=work)) == T4.name  # $8 against $5.50


def test_rejects_with_the_first_reason_and_the_nearest_miss_first():
    """A miss of one need is nearer than a miss of four."""
    got = plan(replace(GPU, gpu_memory_gb=24), [CPU, T4, A100])

    assert [(item.allocation.name, item.reason) for item in got.rejected] == [
        (T4.name, "has 16 GB of GPU memory, 24 asked"),
        (CPU.name, "has 1 vCPUs, 2 asked"),
    ]


def test_nothing_fits_names_the_nearest_miss():
    """The error names what to change."""
    got = plan(replace(GPU, gpu_memory_gb=141), [CPU, T4, A100])

    assert got.chosen is None
    with pytest.raises(
        NoOfferError, match=r"no offer fits \(3 offers looked at\); the nearest, .*a100.*: has 80"
    ):
        got.pick()


def test_no_offers_at_all_is_said():
    """An empty catalog is not the same as a stage that is too large."""
    with pytest.raises(NoOfferError, match="there is no offer at all"):
        plan(GPU, []).pick()


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"vcpus": 16}, "has 12 vCPUs, 16 asked"),
        ({"memory_gib": 128}, "has 85 GiB, 128 asked"),
        ({"gpus": 8}, "has 1 GPUs, 8 asked"),
        ({"gpu_types": ("H100", "H200")}, "has A100-80GB, H100 or H200 asked"),
        ({"capacity": "spot"}, "is on-demand, spot asked"),
    ],
)
def test_a_misfit_names_both_numbers(needs, reason):
    """The offered and the requested number."""
    assert [item.reason for item in misfits(replace(GPU, **needs), A100)] == [reason]


def test_an_unknown_gpu_memory_does_not_pass():
    """An unknown memory does not meet a need."""
    unknown = replace(A100, gpu_memory_gb=None)

    assert (
        misfits(replace(GPU, gpu_memory_gb=40), unknown)[0].reason == "its GPU memory is unknown, 40 GB asked"
    )


def test_gpu_names_are_compared_without_case():
    """a100-80gb is an A100-80GB."""
    assert misfits(replace(GPU, gpu_types=("a100-80gb",)), A100) == ()


def test_an_unknown_price_comes_last_and_is_said():
    """It does not count as free."""
    got = plan(GPU, [replace(T4, usd_per_hour=None), A100])

    assert [item.allocation.offer.instance_type for item in got.candidates] == ["a100", "t4"]
    assert "price unknown for 1 of 2 candidates; they come last" in got.notes


def test_an_unknown_price_is_refused_under_a_budget():
    """It is unknown whether it stays within the budget."""
    got = plan(GPU, [replace(T4, usd_per_hour=None)], goal=Goal(budget_usd=5))

    assert got.rejected[0].reason == "its price is unknown, and budget is 5"


def test_a_budget_and_a_price_limit_reject():
    """$5 to finish on the T4, $4 an hour on the A100."""
    got = plan(replace(GPU, max_usd_per_hour=3), [A100, T4], knowledge=TEN_UNITS, goal=Goal(budget_usd=4.5))

    assert {item.allocation.offer.instance_type: item.reason for item in got.rejected} == {
        "t4": "takes 5 USD to finish at best, budget is 4.5",
        "a100": "takes 4 USD an hour at best, max_usd_per_hour is 3",
    }


def test_a_deadline_is_a_constraint():
    """Ten hours of work, five available: the T4 is excluded even though it is cheaper."""
    cheap = replace(T4, usd_per_hour=0.1)

    got = plan(GPU, [A100, cheap], knowledge=TEN_UNITS, goal=Goal("deadline", deadline_s=5 * 3600))

    assert chosen(got) == A100.name
    assert got.rejected[0].reason == "takes 10 hours to finish at best, deadline is 5"


def test_a_sure_finish_comes_before_a_cheap_one():
    """The cheap one finishes in time on average, but not nine times of ten."""
    work = replace(TEN_UNITS, speeds={T4.name: Speed(HOURLY, 0.3 * HOURLY), A100.name: Speed(2 * HOURLY, 0)})

    got = plan(GPU, [A100, T4], knowledge=work, goal=Goal("deadline", deadline_s=11 * 3600))

    assert [item.is_safe for item in got.candidates] == [True, False]
    assert chosen(got) == A100.name
    alone = plan(GPU, [T4], knowledge=work, goal=Goal("deadline", deadline_s=11 * 3600))
    assert alone.notes == ("no candidate keeps deadline and budget for sure; the most likely one is chosen",)


def test_spot_needs_a_checkpoint_or_a_short_stage():
    """Losing ten hours is not acceptable, losing a quarter of an hour is."""
    rigid = replace(GPU, can_checkpoint=False)
    work = Knowledge(units=10, speeds={A100_SPOT.name: Speed(HOURLY, 0)})

    long = plan(rigid, [A100_SPOT], knowledge=work)
    short = plan(rigid, [A100_SPOT], knowledge=replace(work, units=0.25))

    assert long.rejected[0].misfits[0].need == "checkpoint"
    assert short.chosen is not None
    assert plan(GPU, [A100_SPOT], knowledge=work).chosen is not None


def test_interruptions_are_in_the_cost_and_unknown_ones_are_said():
    """A loss every other hour without a checkpoint costs more than it saves."""
    both = {A100.name: Speed(HOURLY, 0), A100_SPOT.name: Speed(HOURLY, 0)}
    calm = plan(GPU, [A100, A100_SPOT], knowledge=Knowledge(units=10, speeds=both))
    stormy = Knowledge(units=10, speeds=both, interruptions_per_hour={A100_SPOT.name: 0.5})

    assert chosen(calm) == A100_SPOT.name
    assert calm.notes == ("the interruption rate of some spot offers is unknown and counted as none",)
    assert chosen(plan(GPU, [A100, A100_SPOT], knowledge=stormy)) == A100.name


def test_node_counts_are_candidates():
    """Three nodes at 2.5 times the speed: faster, and more expensive."""
    work = Knowledge(units=10, speeds={T4.name: Speed(HOURLY, 0), f"3 x {T4.name}": Speed(2.5 * HOURLY, 0)})
    needs = replace(GPU, max_nodes=3)

    assert chosen(plan(needs, [T4], knowledge=work)) == T4.name
    assert chosen(plan(needs, [T4], knowledge=work, goal=Goal("performance"))) == f"3 x {T4.name}"
    assert plan(needs, [T4], knowledge=work).notes == (
        "speed known for 2 of 3 candidates; the others come after them",
    )


def test_a_plan_goes_through_json():
    """plan.json contains the plan."""
    got = plan(replace(GPU, gpu_memory_gb=24), [CPU, T4, A100], knowledge=TEN_UNITS)

    assert Plan.from_dict(json.loads(json.dumps(got.to_dict(), allow_nan=False))) == got
    nothing = plan(GPU, [CPU])
    assert Plan.from_dict(json.loads(json.dumps(nothing.to_dict()))) == nothing


offers = st.lists(st.sampled_from([CPU, CPU2, T4, A100, A100_SPOT]), max_size=5, unique=True)


@given(offers, st.randoms(use_true_random=False), st.sampled_from(["cost", "balanced", "performance"]))
def test_the_order_of_offers_does_not_matter(found, random, strategy):
    """Equal catalogs give equal plans."""
    mixed = list(found)
    random.shuffle(mixed)

    assert plan(GPU, mixed, goal=Goal(strategy), knowledge=TEN_UNITS) == plan(
        GPU, found, goal=Goal(strategy), knowledge=TEN_UNITS
    )


@given(offers, st.sampled_from(["cost", "balanced"]))
def test_the_choice_is_the_least_objective(found, strategy):
    """An exhaustive search in plain loops agrees."""
    got = plan(GPU, found, goal=Goal(strategy), knowledge=TEN_UNITS)
    fitting = [item for item in found if item.gpus and item.name in TEN_UNITS.speeds]

    if fitting:
        hours = {item.name: 10 / (TEN_UNITS.speeds[item.name].mean * 3600) for item in fitting}
        worth = got.value_of_hour_usd
        assert got.chosen.estimate.objective == pytest.approx(
            min((item.usd_per_hour + worth) * hours[item.name] for item in fitting)
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vcpus": float("nan")}, "vcpus must be finite"),
        ({"min_nodes": 3, "max_nodes": 2}, "nodes must be 1 or more, min to max, got 3..2"),
    ],
)
def test_requirements_with_nonsense_cannot_exist(fields, message):
    """The constructor rejects them."""
    with pytest.raises(ValueError, match=message):
        Requirements(**fields)


def test_a_price_comes_before_a_speed():
    """A known speed at an unknown price ranks behind a known price alone."""
    unpriced = replace(T4, usd_per_hour=None)

    got = plan(GPU, [unpriced, A100_SPOT], knowledge=TEN_UNITS)

    assert [item.allocation.offer for item in got.candidates] == [A100_SPOT, unpriced]


def test_of_those_that_may_be_late_the_fastest_is_chosen():
    """Both may miss the deadline; the more expensive one less so."""
    doubt = {T4.name: Speed(HOURLY, 0.5 * HOURLY), A100.name: Speed(1.2 * HOURLY, 0.6 * HOURLY)}

    got = plan(
        GPU, [T4, A100], knowledge=Knowledge(units=10, speeds=doubt), goal=Goal("deadline", deadline_s=36_000)
    )

    assert [item.is_safe for item in got.candidates] == [False, False]
    assert chosen(got) == A100.name


def test_the_nearest_of_several_alternatives_is_the_miss():
    """It misses one need of the first and three of the second."""
    needs = (replace(GPU, gpu_memory_gb=24), Requirements(vcpus=99, memory_gib=999, gpus=9))

    assert plan(needs, [T4]).rejected[0].reason == "has 16 GB of GPU memory, 24 asked"
