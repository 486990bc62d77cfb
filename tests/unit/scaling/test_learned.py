"""Speeds on unused allocations are derived from the used ones, and are uncertain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation, Offer, Speed
from envscaler_airflow.scaling import Observation, Policy, decide, remember
from envscaler_airflow.scaling.decision import Check
from envscaler_airflow.scaling.explore import Learner, Measured, Shape, prior_for
from envscaler_airflow.scaling.outlook import learned, outlook

T4 = Offer("aws", "r", "g4", "on-demand", vcpus=4, memory_gib=16, gpu_name="T4", gpus=1, usd_per_hour=1.0)
A100 = replace(T4, instance_type="p4", gpu_name="A100", usd_per_hour=3.0)
ONE, TWO, FOUR, OTHER = Allocation(T4), Allocation(T4, 2), Allocation(T4, 4), Allocation(A100)
SEEN = Observation(
    current=ONE,
    candidates=(ONE, TWO, FOUR, OTHER),
    units_done=100.0,
    units_total=100_000.0,
    speeds={ONE.name: Speed(2.0, 0.02, "measured", 600.0)},
    measured={ONE.name: Measured(batch=256, step_s=0.5, sync_s=0.0)},
    gpu_speeds={"T4": 320.0, "A100": 1555.0},
)


def speeds(seen):
    """All speeds that a check knows."""
    return outlook(seen, Policy(max_nodes=4)).speeds


def test_more_nodes_are_faster_by_less_than_their_number_and_never_sure():
    """2 steps a second on one node: more on two, less than twice as many, with a wide range."""
    got = speeds(SEEN)

    assert got[TWO.name].source == "fitted"
    assert 2.0 < got[TWO.name].mean < 4.0
    assert got[TWO.name].mean < got[FOUR.name].mean < 8.0
    assert got[TWO.name].relative_stdev > 0.02


def test_nothing_learned_is_surer_than_what_was_measured():
    """A current speed that may be zero or twice as high gives no better estimate of other allocations."""
    got = speeds(replace(SEEN, speeds={ONE.name: Speed(2.0, 2.0, "measured", 600.0)}))

    assert {speed.relative_stdev for speed in got.values()} == {1.0}


def test_another_type_is_as_its_datasheet_says_and_less_sure():
    """An A100 reads its memory 4.9 times as fast."""
    got = speeds(SEEN)[OTHER.name]

    assert 4.0 < got.mean < 10.0
    assert got.relative_stdev >= 0.3


def test_nothing_is_learned_before_a_step_was_measured():
    """It needs both a step and a speed."""
    assert set(speeds(replace(SEEN, measured={}))) == {ONE.name}
    assert speeds(replace(SEEN, speeds={})) == {}


def test_what_was_measured_teaches_about_the_rest():
    """Two nodes gained little: four are expected to gain less than before, and two are as they were seen."""
    poor = Measured(batch=256, step_s=0.45, sync_s=0.2)

    got = speeds(replace(SEEN, measured={**SEEN.measured, TWO.name: poor}))

    assert got[FOUR.name].mean < speeds(SEEN)[FOUR.name].mean
    assert (got[TWO.name].source, got[TWO.name].mean) == ("measured", pytest.approx(2.0 * 0.5 / 0.45))


def test_a_measured_speed_stands_over_a_learned_one():
    """The outlook uses the measured speed."""
    speeds = {**SEEN.speeds, TWO.name: Speed(3.0, 0.03, "measured", 600.0)}

    assert outlook(replace(SEEN, speeds=speeds), Policy(max_nodes=4)).speeds[TWO.name].mean == 3.0


def test_a_stage_goes_where_it_has_not_been_when_that_pays():
    """No speed is stated: on one T4 for 14 h at $50 an hour of waiting, more of them are worth a try."""
    policy = Policy(max_nodes=4, value_of_hour=50.0)

    got = decide(SEEN, policy)

    assert got.action == "move"
    assert got.numbers["moving"][got.target.name]["speed"]["source"] == "fitted"


def test_steps_are_remembered_until_the_next_generation():
    """A restarted sensor continues to learn from the recorded checks."""
    check = Check(SEEN, Policy(), decide(SEEN, Policy()))
    back = Check.from_dict(check.to_dict())
    fresh = Check(replace(SEEN, generation=2, measured={}), Policy(), check.decision)

    assert back == check
    assert remember([back]).measured == SEEN.measured
    assert remember([back, fresh]).measured == {}


def test_steps_that_no_machine_makes_teach_nothing():
    """No report of a training ends a check: an invalid rate stays unknown."""
    told = {place.name: Measured(1, 1e-320, 0.0) for place in (ONE, TWO)}
    seen = replace(SEEN, measured=told)

    assert learned(seen, outlook(seen, Policy()).shapes) == {}
    assert decide(seen, Policy(max_nodes=4)).action == "keep"


def rates(measured, *shapes):
    """Progress per second on *shapes*, relative to the measured single T4."""
    learner = Learner(256, 256, {}, prior=prior_for(256, 256))
    learner.learn(Shape("T4", 1, 1), measured)
    one = learner.rate(Shape("T4", 1, 1), None)[0]
    return [learner.rate(shape, None)[0] / one for shape in shapes]


def test_a_gpu_that_accumulates_gains_from_more_of_them():
    """Eight passes of half a second: four GPUs make two each, and synchronize as after one pass."""
    accumulated = Measured(batch=256, step_s=4.0, sync_s=0.0, micro_batches=8)

    [four] = rates(accumulated, Shape("T4", 1, 4))

    assert 3.9 < four < 4.0


def test_a_micro_batch_costs_its_fixed_part_however_small_it_is():
    """On 16 GPUs half a micro-batch is left for each: less than half of its time is saved."""
    accumulated = Measured(batch=256, step_s=4.0, sync_s=0.0, micro_batches=8)

    eight, sixteen = rates(accumulated, Shape("T4", 1, 8), Shape("T4", 1, 16))

    assert 7.5 < eight < 8.0
    assert 11.0 < sixteen < 12.0


def test_who_keeps_the_batch_is_expected_to_synchronize_little():
    """A batch of the user's own choice keeps a GPU busy, the smallest of a range does not (B6)."""
    own, smallest = prior_for(256, 256), prior_for(32, 512)

    [two] = rates(Measured(batch=256, step_s=0.5, sync_s=0.0), Shape("T4", 1, 2))

    assert own.sync < smallest.sync
    assert own.sync_stdev > smallest.sync_stdev
    assert 1.4 < two < 1.7
