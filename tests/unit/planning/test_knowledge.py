"""Every plan is made from one typed knowledge; what is known best counts, and nothing is invented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.errors import NoOfferError
from envscaler_airflow.planning import Allocation, Goal, Knowledge, Offer, Requirements, Speed, Speedup, plan
from envscaler_airflow.planning.knowledge import first_known, machine_name, with_ratios
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.planner import PlanInputs
from envscaler_airflow.planning.table import Row, build_table

SMALL = Offer("aws", "us-east-1", "g5.xlarge", "on-demand", 4, 16, gpu_name="A10G", gpus=1, usd_per_hour=1.0)
SPOT = replace(SMALL, capacity_type="spot", zone="us-east-1a", usd_per_hour=0.4)
LARGE = replace(SMALL, instance_type="g5.4xlarge", vcpus=16, memory_gib=64, usd_per_hour=1.5)
NEEDS = Requirements(gpus=1)
HOURLY = 1 / 3600


def learned(**speeds):
    """Ten units of work, with speeds by the last part of a machine's name, in units per hour."""
    by_machine = {
        f"aws/{name.replace('_', '.')}": Speed(mean * HOURLY, 0.0, "learned") for name, mean in speeds.items()
    }
    return Knowledge(10, "steps", by_machine, sources={"speed": "measured in 7 runs"})


def test_a_speed_of_a_machine_counts_at_every_place_and_capacity():
    """Price and risk differ between places, the speed does not."""
    known = learned(g5_xlarge=1.0)

    assert machine_name(Allocation(SPOT, 2)) == "2 x aws/g5.xlarge"
    assert (
        known.speed_of(Allocation(SPOT)) == known.speed_of(Allocation(SMALL)) == Speed(HOURLY, 0, "learned")
    )
    assert known.speed_of(Allocation(SMALL, 2)) is None
    assert known.speed_of(Allocation(LARGE)) is None


def test_a_plan_with_learned_speeds_ranks_by_cost_to_finish_and_says_so():
    """10 units: $1 x 10 h, or $1.50 x 5 h."""
    made = plan(NEEDS, [SMALL, LARGE], knowledge=learned(g5_xlarge=1.0, g5_4xlarge=2.0))

    assert made.pick() == Allocation(LARGE)
    assert made.chosen.estimate.usd == pytest.approx(7.5)
    assert "speed: measured in 7 runs" in made.notes


def test_without_the_amount_of_work_one_unit_of_it_is_priced():
    """$1.50 buys two units an hour, $1 one; an offer of unknown speed comes after both."""
    known = replace(learned(g5_xlarge=1.0, g5_4xlarge=2.0), units=None)
    other = replace(SMALL, instance_type="g4.xlarge", usd_per_hour=0.1)

    made = plan(NEEDS, [SMALL, LARGE, other], knowledge=known)

    assert [item.allocation.offer for item in made.candidates] == [LARGE, SMALL, other]
    assert made.candidates[0].usd_per_unit == pytest.approx(0.75)
    assert "no work is known yet: ranked by USD for one unit of it, without times" in made.notes


def test_the_best_source_of_each_part_counts():
    """Measured here replaces learned; learned fills in what was not measured here."""
    measured = Knowledge(4, speeds={LARGE.name: Speed(1, 0)}, sources={"speed": "here", "work": "here"})
    earlier = Knowledge(
        9, speeds={LARGE.name: Speed(2, 0), SMALL.name: Speed(3, 0)}, sources={"speed": "old"}
    )

    known = first_known((Knowledge(), measured, earlier))

    assert (known.units, known.speeds) == (4, {LARGE.name: Speed(1, 0), SMALL.name: Speed(3, 0)})
    assert known.sources == {"speed": "here, old", "work": "here"}


def test_speeds_in_another_unit_are_never_mixed():
    """Tokens per second next to steps per second would rank nonsense first."""
    steps = Knowledge(unit="steps", speeds={SMALL.name: Speed(1, 0)})
    tokens = Knowledge(1e9, "tokens", {LARGE.name: Speed(1e5, 0)})

    known = first_known((Knowledge(), steps, tokens))

    assert (known.unit, known.units, list(known.speeds)) == ("steps", None, [SMALL.name])


def test_stated_ratios_follow_from_a_known_speed_and_give_none_alone():
    """Twice the learned speed; nothing without it."""
    stated = Speedup(LARGE.name, SMALL.name, 2.0, 0.0)
    places = [Allocation(SMALL), Allocation(LARGE)]

    assert with_ratios(learned(g5_xlarge=1.0), [stated], places).speeds[LARGE.name].mean == 2 * HOURLY
    assert with_ratios(Knowledge(), [stated], places).speeds == {}


def test_spot_that_the_user_states_runs_without_a_checkpoint_with_a_warning():
    """What the user states wins over the guard; a stage that may run on both stays on demand."""
    rigid = replace(NEEDS, can_checkpoint=False)
    stated = replace(rigid, capacity="spot")

    assert plan(rigid, [SMALL, SPOT]).pick() == Allocation(SMALL)
    made = plan(stated, [SMALL, SPOT])
    assert made.pick() == Allocation(SPOT)
    assert made.notes[-1].startswith(
        "spot was requested without a checkpoint: a lost machine starts the stage"
    )


def test_a_limit_that_nothing_keeps_is_named_with_the_least_time_and_cost():
    """10 h and $10, or 5 h and $7.50, and 2 h are left."""
    known = learned(g5_xlarge=1.0, g5_4xlarge=2.0)
    unknown = replace(SMALL, instance_type="g4.xlarge", usd_per_hour=0.1)

    made = plan(NEEDS, [SMALL, LARGE, unknown], goal=Goal("deadline", deadline_s=7200), knowledge=known)

    assert made.chosen is None, "an offer of unknown speed is not chosen because the known ones are too slow"
    with pytest.raises(NoOfferError) as failed:
        made.pick()
    assert str(failed.value) == (
        "no offer keeps the deadline, although 2 allocations meet every need: the fastest and cheapest, "
        f"{LARGE.name}, takes 5 h (5 to 5) and costs $7.50 ($7.50 to $7.50); raise the deadline, or reduce "
        "the work"
    )


def test_the_search_of_the_catalog_ranks_by_the_same_knowledge():
    """The same candidates in the same order, with the same estimates, as the plan over a list."""
    rows = {SMALL.machine: [Row("us-east-1", usd=1.0)], LARGE.machine: [Row("us-east-1", usd=1.5)]}
    table = build_table(rows)
    for units in (10, None):
        known = replace(learned(g5_xlarge=1.0, g5_4xlarge=2.0), units=units)
        offers = [table.offer(kind, kind, "on-demand") for kind in range(2)]

        found = search(NEEDS, table, knowledge=known)

        assert found.candidates == plan(NEEDS, offers, knowledge=known).candidates
    late = search(NEEDS, table, knowledge=learned(g5_xlarge=1.0), goal=Goal("deadline", deadline_s=3600))
    assert late.chosen is None
    assert "no offer keeps the deadline" in _error(late)


def test_a_prior_fills_in_what_nothing_else_knows():
    """The performance model's speed of the one, the learned speed of the other."""
    rows = {SMALL.machine: [Row("us-east-1", usd=1.0)], LARGE.machine: [Row("us-east-1", usd=1.5)]}
    how = Search(speed_of=lambda _kind, _nodes: Speed(3 * HOURLY, 0, "datasheet"))

    found = search(NEEDS, build_table(rows), knowledge=learned(g5_xlarge=1.0), how=how)

    assert {item.allocation.offer.instance_type: item.speed.source for item in found.candidates} == {
        "g5.xlarge": "learned",
        "g5.4xlarge": "datasheet",
    }


def test_the_recorded_inputs_give_an_equal_plan_again():
    """Through JSON, as ``plan.json`` has them."""
    inputs = PlanInputs((NEEDS,), (SMALL, SPOT, LARGE), Goal("balanced"), learned(g5_xlarge=1.0))

    again = PlanInputs.from_dict(inputs.to_dict())

    assert again == inputs
    assert again.plan().to_dict() == inputs.plan().to_dict()


def _error(made):
    """Return why nothing can be picked."""
    with pytest.raises(NoOfferError) as failed:
        made.pick()
    return str(failed.value)
