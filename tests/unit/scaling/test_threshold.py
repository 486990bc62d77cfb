"""Threshold rules: by default, out above 80 for three checks, in below 40."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation, Offer, Speed
from envscaler_airflow.scaling import Decision, Observation, Policy, Sample, ThresholdRule, decide
from envscaler_airflow.scaling.threshold import threshold

NODE = Offer(
    cloud="aws",
    region="us-east-1",
    instance_type="g5.xlarge",
    capacity_type="on-demand",
    vcpus=4,
    memory_gib=16,
    usd_per_hour=1.0,
)
GPU = ThresholdRule("gpu*_percent")
POLICY = Policy(name="threshold", min_nodes=1, max_nodes=4, stabilization_s=0, rules=(GPU,))


def seen(values: list[float], *, nodes: int = 2, metric: str = "gpu0_percent", **facts) -> Observation:
    """Checks 30 s apart, the last one now, the same *value* on every node."""
    samples = tuple(
        Sample(30.0 * check, node, metric, value)
        for check, value in enumerate(values)
        for node in range(nodes)
    )
    now_s = 30.0 * (len(values) - 1)
    return Observation(current=Allocation(NODE, nodes), elapsed_s=max(0.0, now_s), samples=samples, **facts)


def nodes_after(observation: Observation, policy: Policy = POLICY) -> int:
    """Nodes of the decision."""
    return decide(observation, policy).target.nodes


@pytest.mark.parametrize(
    ("values", "nodes"),
    [
        ([81, 81, 81], 3),
        ([10, 81, 81, 81], 3),
        ([81, 81], 2),
        ([81, 80, 81], 2),
        ([81, 81, 81, 79], 2),
        ([39, 39, 39], 1),
        ([39, 40, 39], 2),
        ([60, 60, 60], 2),
    ],
)
def test_scales_on_three_checks_in_a_row(values, nodes):
    """Above 80 three times: one node more; below 40 three times: one node fewer (feature D1)."""
    assert nodes_after(seen(values)) == nodes


def test_says_what_was_seen():
    """The reason contains the value and the bound."""
    got = decide(seen([10, 85, 85.5, 90]), POLICY)

    assert got == Decision(
        action="move",
        target=Allocation(NODE, 3),
        reason="gpu*_percent is 90, above 80 for 3 checks",
        policy="threshold",
        numbers=got.numbers,
        wanted={"3 x aws/us-east-1/g5.xlarge/on-demand": 90.0},
    )
    assert got.numbers["metrics"][0]["rounds"] == [[30.0, 85], [60.0, 85.5], [90.0, 90]]


def test_does_not_scale_in_where_it_would_come_back():
    """45 on two nodes would be 90 on one: hysteresis that the bounds alone do not give."""
    narrow = ThresholdRule("gpu0_percent", above=80, below=50)

    assert nodes_after(seen([45, 45, 45]), replace(POLICY, rules=(narrow,))) == 2
    assert nodes_after(seen([39, 39, 39]), replace(POLICY, rules=(narrow,))) == 1


def test_stays_within_the_limits():
    """Four nodes are the maximum and one is the minimum."""
    assert nodes_after(seen([99] * 3, nodes=4)) == 4
    assert nodes_after(seen([1] * 3, nodes=1)) == 1
    assert decide(seen([99] * 3, nodes=4), POLICY).reason.endswith("and 4 nodes is the limit")


def test_a_step_of_two_is_cut_at_the_maximum():
    """Three and two make five, but the maximum is four."""
    assert nodes_after(seen([99] * 3, nodes=3), replace(POLICY, rules=(replace(GPU, step=2),))) == 4


def test_a_duration_must_be_spanned():
    """Three checks in 60 s are not two minutes."""
    rule = replace(GPU, for_s=120)

    assert nodes_after(seen([81] * 3), replace(POLICY, rules=(rule,))) == 2
    assert nodes_after(seen([81] * 5), replace(POLICY, rules=(rule,))) == 3


@pytest.mark.parametrize(("across", "nodes"), [("mean", 2), ("max", 3), ("min", 2)])
def test_nodes_are_put_together_as_asked(across, nodes):
    """One node at 100, one at 50: the mean is 75."""
    samples = tuple(
        Sample(30.0 * check, node, "gpu0_percent", (100.0, 50.0)[node])
        for check in range(3)
        for node in range(2)
    )
    observation = replace(seen([]), elapsed_s=60, samples=samples)

    assert nodes_after(observation, replace(POLICY, rules=(replace(GPU, across=across),))) == nodes


def test_gpus_of_a_node_are_averaged():
    """100 and 70 on the GPUs of each node: 85."""
    both = seen([100.0] * 3).samples + seen([70.0] * 3, metric="gpu1_percent").samples

    assert nodes_after(replace(seen([100.0] * 3), samples=both)) == 3


def test_a_node_that_says_nothing_breaks_the_row():
    """The middle check lacks node 1, so there are not three in a row."""
    full = seen([99.0] * 3)
    holed = replace(full, samples=tuple(item for item in full.samples if (item.at_s, item.node) != (30.0, 1)))

    got = decide(holed, POLICY)

    assert (got.action, got.reason) == ("keep", "gpu*_percent was seen in 1 checks of 3")


def test_a_missing_metric_keeps():
    """Without data the stage stays."""
    got = decide(seen([]), POLICY)

    assert (got.action, got.reason) == ("keep", "gpu*_percent is missing: not given by all of 2 nodes")


def test_old_metrics_are_missing():
    """After two minutes without a new value the metric is missing."""
    assert decide(replace(seen([99] * 3), elapsed_s=181.0), POLICY).action == "keep"
    assert decide(replace(seen([99] * 3), elapsed_s=180.0), POLICY).action == "move"


def test_metrics_from_before_the_move_do_not_count():
    """Metrics of three nodes do not apply to two."""
    moved = seen([99] * 3, moves=1, since_move_s=20.0)

    assert decide(moved, replace(POLICY, cooldown_s=0)).reason == "gpu*_percent was seen in 1 checks of 3"


def test_one_rule_scales_out_all_must_agree_to_scale_in():
    """The larger number of nodes wins; a missing metric never scales in."""
    cpu = ThresholdRule("cpu_percent")
    both = replace(POLICY, rules=(GPU, cpu))
    idle = seen([1] * 3)
    cpu_busy = replace(idle, samples=idle.samples + seen([99] * 3, metric="cpu_percent").samples)
    cpu_idle = replace(idle, samples=idle.samples + seen([1] * 3, metric="cpu_percent").samples)

    assert nodes_after(cpu_busy, both) == 3
    assert nodes_after(cpu_idle, both) == 1
    assert decide(idle, both).reason == "cpu_percent is missing: not given by all of 2 nodes"
    assert nodes_after(seen([99] * 3), both) == 3


OUT, IN = ThresholdRule("gpu_utilization", below=None), ThresholdRule("gpu_utilization", above=None)


@pytest.mark.parametrize(("value", "nodes"), [(81, 3), (60, 2), (39, 1)])
def test_rules_for_one_direction_leave_the_other_alone(value, nodes):
    """One rule for out and one for in are equivalent to one rule for both."""
    observation = seen([value] * 3, metric="gpu0_utilization_percent")

    assert nodes_after(observation, replace(POLICY, rules=(OUT, IN))) == nodes


def test_the_other_direction_s_bound_is_looked_at():
    """Below 50 requests in, but 45 on two would be 90 on one, where the other rule requests out."""
    observation = seen([45] * 3, metric="gpu0_utilization_percent")

    got = decide(observation, replace(POLICY, rules=(OUT, replace(IN, below=50))))

    assert got.reason == "gpu_utilization is 45, and would be above 80 on 1 nodes"


def test_a_metric_that_falls_with_the_load():
    """Free memory below 10 adds a node."""
    rule = ThresholdRule("free", above=None, below=10, step=-1)

    assert nodes_after(seen([5] * 3, metric="free"), replace(POLICY, rules=(rule,))) == 3


def test_cpu_utilization_is_of_the_node():
    """360 of 400 on four cores are 90."""
    observation = seen([360] * 3, metric="cpu_percent")

    assert nodes_after(observation, replace(POLICY, rules=(ThresholdRule("cpu_utilization"),))) == 3


def test_only_whole_model_parallel_groups():
    """Each copy of the model uses two nodes: three nodes fit one and a half."""
    grouped = replace(POLICY, model_parallel=2)

    assert nodes_after(seen([99] * 3), grouped) == 2
    assert nodes_after(seen([99] * 3), replace(grouped, rules=(replace(GPU, step=2),))) == 4


@pytest.mark.parametrize(
    ("values", "nodes"),
    [
        ([75, 75, 75], 3),
        ([100, 75, 60], 3),
        ([100, 20, 20], 2),
        ([54, 54, 54], 2),
        ([47, 100, 100], 2),
        ([20, 24, 10], 1),
    ],
)
def test_holds_a_metric_at_a_target(values, nodes):
    """HPA: nodes * value / 50, rounded up; within a tenth of 50 nothing changes."""
    rule = ThresholdRule("gpu0_percent", target=50)

    assert nodes_after(seen(values), replace(POLICY, rules=(rule,))) == nodes


def test_a_budget_counts_more_nodes_as_no_faster():
    """Ten hours left on two nodes; three may take as long: $30 of the $25 that are left."""
    facts = {"units_done": 0, "units_total": 36_000, "spent_usd": 0.0, "budget_usd": 25.0}
    two = Allocation(NODE, 2)
    busy = seen([99] * 3, speeds={two.name: Speed(1.0, 0.0, "measured", 60)}, **facts)

    got = decide(busy, POLICY)

    assert got.action == "keep"
    assert got.reason.endswith(
        "but 3 x aws/us-east-1/g5.xlarge/on-demand may take $30.00 to finish, $25.00 are left"
    )
    assert decide(replace(busy, budget_usd=30.0), POLICY).action == "move"


def test_a_deadline_counts_fewer_nodes_as_slower():
    """Half the nodes may take twice as long: 20 h of 15."""
    two = Allocation(NODE, 2)
    idle = seen(
        [1] * 3,
        units_done=0,
        units_total=36_000,
        speeds={two.name: Speed(1.0, 0.0, "measured", 60)},
        deadline_left_s=15 * 3600.0,
    )

    assert decide(idle, POLICY).action == "keep"
    assert decide(replace(idle, deadline_left_s=20 * 3600.0), POLICY).action == "move"


def test_a_policy_without_rules_keeps():
    """Without a rule there is no move, and the reason names it."""
    assert threshold(seen([99] * 3), replace(POLICY, rules=())).reason == "the threshold policy has no rules"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"above": 40, "below": 40}, "below must be less than above"),
        ({"samples": 0}, "samples must be >= 1 and step not 0"),
        ({"target": 0.0}, "target must be finite and > 0"),
        ({"above": float("nan")}, "above must be finite"),
    ],
)
def test_a_rule_with_nonsense_cannot_exist(fields, message):
    """A rule that would flap on its own is rejected."""
    with pytest.raises(ValueError, match=message):
        ThresholdRule("m", **fields)
