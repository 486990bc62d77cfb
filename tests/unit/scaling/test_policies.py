"""Deadline, phase and vertical on a running stage, behind the same guards as every policy."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envscaler_airflow.envspec import EnvSpec
from envscaler_airflow.owner.limits import (
    checkpoint_interval_s,
    price_aware_interval_s,
    price_risk,
)
from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed
from envscaler_airflow.scaling import (
    Check,
    Observation,
    PhaseNeed,
    Policy,
    Sample,
    ThresholdRule,
    decide,
    explain,
    policy_of,
    replay,
)
from envscaler_airflow.scaling.deadline import Market, SpotJob, Zone, build_table
from envscaler_airflow.scaling.deadline.policy import meet_deadline
from envscaler_airflow.scaling.vertical import time_to_limit

GIB = float(1 << 30)


def on(
    capacity="on-demand", *, zone="a", usd=3.0, nodes=1, gpu_gb=16.0, cpus=8.0, memory=32.0, kind="p3.2xlarge"
):
    """One allocation."""
    offer = Offer(
        "aws", "us-east-1", kind, capacity, cpus, memory, zone=zone, gpu_name="V100", gpus=1,
        gpu_memory_gb=gpu_gb, usd_per_hour=usd,
    )  # fmt: skip
    return Allocation(offer, nodes)


OD, SPOT = on(), on("spot", usd=1.0)
START = Overheads(start_s=600.0)


def seen(current, *others, left_h=10.0, work_h=8.0, **more):
    """Work of *work_h* hours at one unit a second, *left_h* hours to the deadline."""
    speeds = {current.name: Speed(1.0, 0.0, "measured", 3600.0)}
    facts = {
        "units_done": 0.0, "units_total": work_h * 3600, "speeds": speeds, "overheads": START,
        "deadline_left_s": left_h * 3600, "elapsed_s": 10_000.0, "candidates": (current, *others),
    }  # fmt: skip
    return Observation(current, **{**facts, **more})


DEADLINE = Policy("deadline", stabilization_s=0.0)


def test_stays_on_spot_while_that_is_safe():
    """Two hours may be lost (feature D3)."""
    got = decide(seen(SPOT, OD), DEADLINE)

    assert got.action == "keep"
    assert "may still be lost" in got.reason


def test_leaves_spot_before_it_would_be_too_late_whatever_the_cool_down_says():
    """The slack ends before the next check: cooldown, epochs and maximum of moves do not apply."""
    late = seen(SPOT, OD, left_h=8.175, since_move_s=10.0, since_move_epochs=0, moves=9)

    got = decide(late, replace(DEADLINE, max_moves=1, stabilization_s=300.0))

    assert (got.action, got.target) == ("move", OD)


def test_an_urgent_move_does_not_pass_the_other_guards():
    """One action at a time and dry-run apply to all."""
    late = seen(SPOT, OD, left_h=8.175)

    assert decide(replace(late, pending="a move"), DEADLINE).action == "keep"
    assert decide(late, replace(DEADLINE, recommend_only=True)).action == "recommend"


def test_the_spot_nodes_of_a_mixed_allocation_are_left_in_time_too():
    """One node on demand and three on spot; four on demand are safe, another mixed allocation is not."""
    mixed, safe = Allocation(OD.offer, 4, rest=SPOT.offer, rest_nodes=3), on(nodes=4)
    other = Allocation(OD.offer, 4, rest=SPOT.offer, rest_nodes=2)
    policy, free = replace(DEADLINE, max_nodes=4, cooldown_s=3600.0), {OD.offer.name: 3}

    got = decide(
        seen(mixed, other, safe, left_h=8.175, work_h=8.0, since_move_s=60.0, free_nodes=free), policy
    )
    before = decide(seen(mixed, safe, left_h=10.0, work_h=8.0), policy)
    nowhere = decide(seen(mixed, other, left_h=8.175, work_h=8.0), policy)

    assert (got.action, got.target) == ("move", safe)
    assert (before.action, nowhere.action) == ("keep", "keep")
    assert nowhere.reason == "no on-demand candidate is left to be safe on"


def test_goes_back_to_spot_when_two_starts_fit():
    """On-demand to spot while running: of one hour of slack, two starts and a check use half (feature D8)."""
    got = decide(seen(OD, SPOT, left_h=9.5), DEADLINE)

    assert (got.action, got.target) == ("move", SPOT)


def test_stays_on_demand_when_spot_could_not_be_left_again():
    """Twenty minutes are not enough for two starts and a check."""
    assert decide(seen(OD, SPOT, left_h=8.5), DEADLINE).action == "keep"


def test_takes_no_spot_that_is_not_to_be_had():
    """A zone without free capacity does not count."""
    got = decide(seen(OD, SPOT, left_h=10, free_nodes={SPOT.offer.name: 0}), DEADLINE)

    assert got.action == "keep"


@pytest.mark.parametrize(("usd", "action"), [(0.5, "move"), (1.0, "keep")])
def test_a_running_stage_leaves_spot_for_a_cheaper_zone(usd, action):
    """The sensor sees the zone that runs at its own price, next to the one at half of it."""
    other = on("spot", zone="b", usd=usd)
    market = Market(tuple(Zone(item.name, item.usd_per_hour, True, 3.0) for item in (SPOT, other)))

    got = decide(seen(SPOT, OD, other, left_h=12, market=market), DEADLINE)

    assert (got.action, got.target) == (action, other if action == "move" else SPOT)


def test_a_table_says_whether_spot_pays():
    """With a table, the decision has the numbers of both answers."""
    table = build_table(SpotJob(72, 600.0, 8 * 3600.0, 600.0, 3.0, 1.0))

    proposal = meet_deadline(seen(OD, SPOT, left_h=12), DEADLINE, table=table)

    costs = proposal.numbers["ticks_of_on_demand"]
    assert [want.target for want in proposal.wants] == ([SPOT] if costs["spot"] < costs["on_demand"] else [])


def test_without_a_deadline_there_is_nothing_to_meet():
    """The reason names it."""
    got = decide(replace(seen(SPOT, OD), deadline_left_s=None), DEADLINE)

    assert got.reason == "the deadline policy needs a deadline"


@given(left_h=st.floats(-5, 40), work_h=st.floats(0.01, 30))
def test_spot_is_never_kept_when_the_time_to_the_next_look_could_not_be_lost(left_h, work_h):
    """The guard as an invariant; once no move can meet the deadline, the policy makes none for it."""
    slack = left_h * 3600 - work_h * 3600 - 600
    assume(abs(slack) > 1 and abs(slack - 60) > 1)

    got = decide(seen(SPOT, OD, left_h=left_h, work_h=work_h), DEADLINE)

    assert got.action == ("move" if 0 < slack < 60 else "keep")


PHASES = Policy(
    "phase", max_nodes=8, stabilization_s=0.0, cooldown_s=0.0, min_epochs_between=0,
    phases=(PhaseNeed("loading", 4), PhaseNeed("training", 8), PhaseNeed("evaluation", 2)),
)  # fmt: skip
FOUR, EIGHT, TWO = on(nodes=4), on(nodes=8), on(nodes=2)


def in_phase(current, name, **more):
    """A stage on *current*, in *name*, no deadline."""
    return seen(current, FOUR, EIGHT, TWO, training_phase=name, **{"deadline_left_s": None, **more})


@pytest.mark.parametrize(
    ("name", "current", "target"), [("training", FOUR, EIGHT), ("evaluation", EIGHT, TWO)]
)
def test_four_eight_two(name, current, target):
    """Loading on 4 nodes, training on 8, evaluation on 2: one move each (feature D4)."""
    got = decide(in_phase(current, name), PHASES)

    assert (got.action, got.target) == ("move", target)
    assert decide(in_phase(target, name), PHASES).action == "keep"


def test_a_bigger_need_is_met_before_its_phase_begins():
    """Training begins in ten minutes, a move takes ten: now."""
    got = decide(in_phase(FOUR, "loading", next_phase="training", next_phase_in_s=600.0), PHASES)

    assert (got.action, got.target) == ("move", EIGHT)


def test_a_smaller_need_waits_for_its_phase():
    """Evaluation begins soon and needs less: training keeps its nodes until then."""
    got = decide(in_phase(EIGHT, "training", next_phase="evaluation", next_phase_in_s=60.0), PHASES)

    assert got.action == "keep"


def test_a_phase_shorter_than_its_moves_is_passed_over_with_the_reason():
    """Evaluation takes five minutes, moves take ten."""
    got = decide(in_phase(EIGHT, "evaluation", phase_lasts_s={"evaluation": 300.0}), PHASES)

    assert got.action == "keep"
    assert "skipped: it lasts 300 s, and moving there and back takes 1200 s" in got.reason


def test_a_phase_that_saves_less_than_its_moves_is_passed_over():
    """25 minutes of evaluation on 2 of 8 nodes save $1.5, and the moves cost $5."""
    got = decide(in_phase(EIGHT, "evaluation", phase_lasts_s={"evaluation": 1500.0}), PHASES)

    assert "it saves $1.50, and moving there and back costs $5.00" in got.reason


def test_the_end_of_a_long_phase_is_passed_over():
    """One minute of a ten-hour evaluation is left."""
    got = decide(
        in_phase(
            EIGHT, "evaluation", next_phase="training", next_phase_in_s=60.0,
            phase_lasts_s={"evaluation": 36_000.0},
        ),
        replace(PHASES, phases=(*PHASES.phases[1:], PhaseNeed("training", 4))),
    )  # fmt: skip

    assert got.action == "keep"
    assert "skipped: it lasts 60 s more, and moving there and back takes 1200 s" in got.reason


@pytest.mark.parametrize("left_s", [900.0, 300.0, 0.0])
def test_what_was_met_in_time_is_kept_until_its_phase_begins(left_s):
    """Eight nodes are allocated for training while loading, which needs four, takes longer than last time."""
    facts = {"next_phase": "training", "next_phase_in_s": left_s, "phase_lasts_s": {"loading": 36_000.0}}

    got = decide(in_phase(EIGHT, "loading", **facts), PHASES)

    assert got.action == "keep"


def test_a_phase_that_goes_on_for_longer_than_last_time_still_gets_what_it_needs():
    """Training is on two nodes; evaluation, which needs only those, should have begun."""
    facts = {"next_phase": "evaluation", "next_phase_in_s": 0.0, "phase_lasts_s": {"training": 36_000.0}}

    assert decide(in_phase(TWO, "training", **facts), PHASES).target == EIGHT


def test_a_phase_is_told_from_the_gpus_when_nobody_announces_it():
    """Four samples at 85 % mean training."""
    samples = tuple(Sample(9_900.0 + 10 * at, 0, "gpu0_utilization_percent", 85.0) for at in range(4))

    got = decide(in_phase(FOUR, None, samples=samples), PHASES)

    assert got.target == EIGHT
    assert "GPU at 85 %" in got.reason


def test_a_phase_that_needs_larger_gpus_gets_them():
    """Full fine-tuning requires 80 GB (feature D7)."""
    policy = replace(PHASES, phases=(PhaseNeed("full-finetune", None, 80.0),))
    large = on(gpu_gb=80.0, usd=6.0, kind="p4de")

    got = decide(seen(OD, large, training_phase="full-finetune", deadline_left_s=None), policy)

    assert got.target == large


def test_a_phase_that_needs_nothing_is_refused():
    """The constructor rejects it."""
    with pytest.raises(ValueError, match="needs nodes or gpu_memory_gb"):
        PhaseNeed("training")


VERTICAL = Policy("vertical", stabilization_s=0.0, cooldown_s=3600.0)
BIG, SMALL = on(memory=64.0, usd=4.0, kind="big"), on(memory=16.0, usd=2.0, kind="small")


def using(memory_gib, current=OD, **more):
    """A stage whose memory is *memory_gib(i)* at sample i, every 30 s up to now."""
    looks = range(41)
    samples = tuple(Sample(8_800.0 + 30 * at, 0, "memory_bytes", memory_gib(at) * GIB) for at in looks)
    return seen(current, BIG, SMALL, samples=samples, **{"deadline_left_s": None, **more})


def test_memory_that_stays_high_is_raised():
    """30 of 32 GiB for five minutes, with dips to 29: the peak decides."""
    got = decide(using(lambda at: 30.0 - at % 2), VERTICAL)

    assert (got.action, got.target) == ("move", BIG)


def test_memory_that_stays_low_is_lowered_after_longer():
    """10 of 32 GiB for twenty minutes: 16 are enough."""
    got = decide(using(lambda _at: 10.0), VERTICAL)

    assert (got.action, got.target) == ("move", SMALL)


@pytest.mark.parametrize(
    "other", [BIG, on(memory=16.0, cpus=32.0, usd=5.0, kind="many-cores")], ids=["larger", "dearer"]
)
def test_too_much_memory_never_leads_to_a_larger_or_dearer_machine(other):
    """10 of 32 GiB for twenty minutes, and no smaller machine is offered."""
    got = decide(replace(using(lambda _at: 10.0), candidates=(OD, other)), VERTICAL)

    assert (got.action, got.target) == ("keep", OD)
    assert "nothing nearer is offered" in got.reason


def test_of_machines_alike_one_of_unknown_price_comes_last():
    """An unknown price does not count as free; names do not matter."""
    unknown = on(memory=64.0, usd=None, kind="a-big")

    got = decide(replace(using(lambda _at: 30.0), candidates=(unknown, OD, BIG)), VERTICAL)

    assert (got.action, got.target) == ("move", BIG)


def test_a_peak_in_the_long_window_keeps_the_memory():
    """Ten GiB now, and 20 a quarter of an hour ago."""
    assert decide(using(lambda at: 20.0 if at == 12 else 10.0), VERTICAL).action == "keep"


def test_a_steady_rise_is_met_before_out_of_memory_whatever_the_cool_down_says():
    """0.25 GiB every 30 s, 26 of 32 used: full in twelve minutes, and a move takes ten."""
    got = decide(using(lambda at: 16.0 + 0.25 * at, since_move_s=1300.0), VERTICAL)

    assert (got.action, got.target) == ("move", BIG)
    assert "memory will be full in 720 s" in got.reason


def rising(looks, *, limit_gib, current, per_look=0.18, first=0.02, **more):
    """Memory that grows by *per_look* GiB every 30 s, under a node's own limit."""
    samples = [
        sample
        for at in range(looks)
        for sample in (
            Sample(30.0 * at, 0, "memory_bytes", (first + per_look * at) * GIB),
            Sample(30.0 * at, 0, "memory_limit_bytes", limit_gib * GIB),
        )
    ]
    facts = {"elapsed_s": 30.0 * (looks - 1), "deadline_left_s": None, **more}
    return seen(current, BIG, samples=tuple(samples), **facts)


def test_a_rise_too_steep_for_more_looks_is_met_at_the_third():
    """6 MiB/s reach 512 MiB after 85 s: there are only three samples (D8)."""
    half = on(memory=0.5, usd=0.1, kind="half")
    policy = replace(VERTICAL, warmup_s=0.0)

    two, three = (decide(rising(looks, limit_gib=0.5, current=half), policy) for looks in (2, 3))

    assert two.action == "keep"
    assert (three.action, three.target) == ("move", BIG)
    assert "memory will be full in 20 s" in three.reason


def test_the_time_to_the_limit_goes_by_the_nodes_own_limit():
    """The machine has 32 GiB, but the node is OOM-killed at 4 (D8)."""
    got = decide(rising(8, limit_gib=4.0, per_look=0.4, first=1.0, current=OD), VERTICAL)

    assert got.numbers["time_to_out_of_memory_s"] == pytest.approx(15.0)


def test_at_the_limit_of_the_spec_the_way_out_is_named():
    """No machine gives more than resources.limits.memory: the stage stays, and the reason names it (D8)."""
    policy = replace(VERTICAL, memory_cap_gib=4.0)

    got = decide(rising(8, limit_gib=4.0, per_look=0.4, first=1.0, current=OD), policy)

    assert got.action == "keep"
    assert "memory will be full in 15 s, and resources.limits.memory allows 4 GiB; raise it" in got.reason


def test_the_limit_of_the_spec_is_the_policys_cap():
    """The cap is the pod's memory limit (D8)."""
    body = {"version": "v1", "name": "s", "entrypoint": ["x"], "resources": {"limits": {"memory": "512Mi"}}}
    spec = EnvSpec.from_dict({**body, "scaling": {"policy": "vertical"}})

    assert policy_of(spec).memory_cap_gib == 0.5


def test_no_rise_no_forecast():
    """A sawtooth has no time to out-of-memory."""
    assert time_to_limit([(float(at), float(at % 4)) for at in range(40)], 100.0) is None
    assert time_to_limit([(float(at), float(at)) for at in range(40)], 100.0) == pytest.approx(61.0)


def test_the_gpu_is_never_changed():
    """A machine with more memory but other GPUs is not a candidate."""
    other = Allocation(replace(BIG.offer, gpu_name="A100", instance_type="other"), 1)

    got = decide(replace(using(lambda _at: 31.0), candidates=(other,)), VERTICAL)

    assert got.action == "keep"


@pytest.mark.parametrize("policy", [DEADLINE, PHASES, VERTICAL], ids=lambda policy: policy.name)
def test_missing_facts_keep_with_a_reason_and_every_check_can_be_replayed(policy):
    """Nothing is known: keep, name the reason, and repeat the decision from the record."""
    blind = Observation(OD, candidates=(SPOT, EIGHT, BIG))

    got = decide(blind, policy)
    check = Check.from_dict(Check(blind, policy, got).to_dict())

    assert got.action == "keep"
    assert got.reason
    assert replay(check) == got
    assert got.reason in explain(check)


def test_a_forecast_can_be_a_condition():
    """GPU above 85 % and still above in five minutes: it falls too fast for that."""
    rule = ThresholdRule("gpu_utilization", above=85.0, below=None, samples=3, ahead_s=300.0)
    policy = Policy("threshold", max_nodes=2, stabilization_s=0.0, rules=(rule,))

    def now(values):
        looks = enumerate(values)
        samples = tuple(Sample(9_940.0 + 30 * at, 0, "gpu0_utilization_percent", v) for at, v in looks)
        return seen(OD, on(nodes=2), samples=samples, deadline_left_s=None)

    assert decide(now([90.0, 91.0, 92.0]), policy).action == "move"
    assert decide(now([99.0, 93.0, 87.0]), policy).action == "keep"


@pytest.mark.parametrize(("load", "nodes", "spot"), [(95.0, 5, 3), (10.0, 3, 1), (10.0, 2, 0)])
def test_rules_change_the_spot_nodes_of_a_mixed_allocation(load, nodes, spot):
    """Two nodes stay on demand; without any on spot the allocation is not mixed."""
    here = Allocation(OD.offer, 4, rest=SPOT.offer, rest_nodes=2)
    step = abs(nodes - here.nodes)
    samples = tuple(
        Sample(9_900.0 + 30 * at, node, "gpu0_utilization_percent", load)
        for at in range(4)
        for node in range(here.nodes)
    )
    rules = (ThresholdRule("gpu_utilization", step=step),)
    policy = Policy("threshold", max_nodes=8, stabilization_s=0.0, rules=rules)

    got = decide(seen(here, samples=samples, deadline_left_s=None), policy)

    assert (got.action, got.target) == (
        "move", Allocation(OD.offer, nodes, rest=SPOT.offer if spot else None, rest_nodes=spot)
    )  # fmt: skip


def test_all_of_several_conditions_can_be_asked_for():
    """The GPU is busy and memory is not: ``any`` scales out, ``all`` keeps."""
    rules = tuple(
        ThresholdRule(name, above=80.0, below=None, samples=1) for name in ("gpu_utilization", "queue")
    )
    policy = Policy("threshold", max_nodes=2, stabilization_s=0.0, rules=rules)
    samples = (Sample(10_000.0, 0, "gpu0_utilization_percent", 90.0), Sample(10_000.0, 0, "queue", 10.0))
    facts = seen(OD, on(nodes=2), samples=samples, deadline_left_s=None)

    assert decide(facts, policy).action == "move"
    assert decide(facts, replace(policy, match="all")).action == "keep"


@pytest.mark.parametrize(
    ("gpu", "queue", "nodes"),
    [
        (90.0, 90.0, 3),  # both ask for more
        (90.0, 50.0, 2),
        (10.0, 10.0, 1),  # both ask for fewer
        (10.0, 50.0, 2),
        (10.0, 90.0, 2),
        (50.0, 50.0, 2),
    ],
)
def test_all_are_those_of_one_direction(gpu, queue, nodes):
    """A spec has a rule for out and one for in; the rule for in has no say in scaling out."""
    spec = EnvSpec.from_dict(
        {
            "version": "v1",
            "name": "train",
            "num_nodes": 2,
            "scaling": {
                "policy": "threshold", "match": "all", "min_nodes": 1, "max_nodes": 4, "stabilization": "0s",
                "rules": [
                    {"metric": metric, bound: value, "for": "1 samples"}
                    for metric in ("gpu_utilization", "queue")
                    for bound, value in (("above", 80), ("below", 40))
                ],
            },
        }
    )  # fmt: skip
    samples = tuple(
        Sample(10_000.0, node, metric, value)
        for node in range(2)
        for metric, value in (("gpu0_utilization_percent", gpu), ("queue", queue))
    )
    facts = seen(on(nodes=2), samples=samples, deadline_left_s=None)

    assert decide(facts, policy_of(spec)).target.nodes == nodes


def test_the_interval_between_checkpoints_is_dalys():
    """A save of a minute and a loss in ten hours: 34.5 min by Young, a minute less by Daly's terms."""
    young = math.sqrt(2 * 60 * 36_000)

    assert checkpoint_interval_s(60, 0.1) == pytest.approx(
        young * (1 + math.sqrt(60 / 72_000) / 3) - 60, rel=1e-3
    )
    assert checkpoint_interval_s(60, 0) is None
    assert checkpoint_interval_s(30_000, 0.1) == 36_000


@given(save=st.floats(1, 1e4), rate=st.floats(1e-3, 100))
def test_more_losses_never_lengthen_the_interval(save, rate):
    """It is shorter when losses are twice as frequent."""
    assert checkpoint_interval_s(save, 2 * rate) <= checkpoint_interval_s(save, rate) + 1e-6


def test_a_price_above_its_recent_level_raises_the_risk():
    """The zone's own level decides, within bounds; an unknown price gives 1 (feature B7)."""
    assert price_risk(1.02, [1.0] * 9) == pytest.approx(1.25, abs=0.01)
    assert price_risk(0.9, [1.0] * 9) == 0.5
    assert price_risk(9.0, [1.0] * 9) == 4.0
    assert price_risk(1.0, []) == 1.0
    assert price_risk(None, [1.0] * 9) == 1.0
    assert price_aware_interval_s(60, 0.1, 1.1, [1.0] * 9) < 0.65 * checkpoint_interval_s(60, 0.1)


def test_a_move_keeps_the_least_speed():
    """Half the speed for a third of the price pays; a min_speed of 0.6 forbids it, 0.5 does not."""
    slow = on("spot", usd=1.0, zone="b")
    speeds = {OD.name: Speed(1.0, 0.0, "measured", 3600.0), slow.name: Speed(0.5, 0.0, "measured", 3600.0)}
    facts = seen(OD, slow, deadline_left_s=None, speeds=speeds)
    policy = Policy("cost-to-finish", stabilization_s=0.0)

    assert decide(facts, policy).target == slow
    assert decide(facts, replace(policy, min_speed=0.5)).target == slow
    held = decide(facts, replace(policy, min_speed=0.6))
    assert held.action == "keep"
    assert "50% as fast as the fastest known, min_speed is 60%" in held.reason


def test_safety_goes_before_the_least_speed():
    """min_speed does not block a deadline's urgent move to on-demand."""
    facts = seen(SPOT, OD, left_h=8.175)

    assert decide(facts, replace(DEADLINE, min_speed=1.0)).target == OD
