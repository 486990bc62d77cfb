"""Properties that every decision has, for any observation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed, Speedup, estimate
from envscaler_airflow.scaling import (
    Check,
    Observation,
    PhaseNeed,
    Policy,
    Sample,
    ThresholdRule,
    decide,
    replay,
    validate,
)

KINDS = ("a", "b", "c")


def allocation(kind: str, nodes: int, usd_per_hour: float | None) -> Allocation:
    """*nodes* machines of one *kind*."""
    offer = Offer(
        cloud="aws",
        region="r",
        instance_type=kind,
        capacity_type="on-demand",
        vcpus=4,
        memory_gib=16,
        usd_per_hour=usd_per_hour,
    )
    return Allocation(offer, nodes)


prices = st.none() | st.floats(0, 100)
allocations = st.builds(allocation, st.sampled_from(KINDS), st.integers(1, 4), prices)
speeds = st.builds(Speed, mean=st.floats(1e-3, 1e4), stdev=st.floats(0, 1e3), seconds=st.floats(0, 1e4))
policies = st.builds(
    Policy,
    name=st.sampled_from(["cost-to-finish", "threshold"]),
    min_nodes=st.integers(1, 2),
    max_nodes=st.integers(2, 4),
    value_of_hour=st.floats(0, 100),
    tolerance=st.none() | st.floats(0, 0.5),
    cooldown_s=st.sampled_from([None, 3600.0]),
    min_epochs_between=st.sampled_from([None, 1]),
    stabilization_s=st.sampled_from([0.0, 60.0]),
    recommend_only=st.booleans(),
    rules=st.just((ThresholdRule("m"), ThresholdRule("n", above=50, below=None, samples=1))),
)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """Any possible observation, in which most facts are often unknown."""
    here, others = draw(allocations), draw(st.lists(allocations, max_size=5))
    names = st.sampled_from(sorted({item.name for item in [here, *others]}))
    checks, metric = draw(st.integers(0, 4)), st.floats(0, 100)
    samples = tuple(
        Sample(570.0 + 10 * check, node, name, draw(metric))
        for check in range(checks)
        for node in range(here.nodes)
        for name in ("m", "n")
    )
    return Observation(
        current=here,
        candidates=tuple(others),
        elapsed_s=600,
        health=draw(st.sampled_from(["ok", "ok", "ok", "stalled", "unknown"])),
        phase=draw(st.sampled_from(["running", "running", "running", "setup"])),
        units_done=draw(st.none() | st.floats(0, 1e6)),
        units_total=draw(st.none() | st.floats(0, 1e6)),
        speeds=draw(st.dictionaries(names, speeds, max_size=4)),
        speedups=tuple(
            draw(st.lists(st.builds(Speedup, names, names, st.floats(0.1, 10), st.floats(0, 3)), max_size=4))
        ),
        overheads=draw(st.builds(Overheads, st.floats(0, 1e4), st.floats(0, 1e3))),
        samples=samples,
        spent_usd=draw(st.none() | st.floats(0, 100)),
        budget_usd=draw(st.none() | st.floats(0, 1000)),
        deadline_left_s=draw(st.none() | st.floats(-1e4, 1e6)),
        since_move_s=draw(st.none() | st.floats(0, 7200)),
        since_move_epochs=draw(st.none() | st.integers(0, 2)),
        pending=draw(st.none() | st.none() | st.just("a request")),
        free_nodes=draw(st.dictionaries(st.sampled_from(["aws/r/a/on-demand"]), st.integers(0, 3))),
        wanted=draw(st.dictionaries(names, st.floats(0, 600), max_size=2)),
    )


@st.composite
def movable(draw: st.DrawFn) -> Observation:
    """All required facts are known, so that moves are common."""
    seen = draw(observations())
    candidates = (*seen.candidates, draw(allocations), draw(allocations))
    names = {item.name for item in [seen.current, *candidates]}
    return replace(
        seen,
        current=replace(
            seen.current, offer=replace(seen.current.offer, usd_per_hour=draw(st.floats(0.1, 100)))
        ),
        health="ok",
        phase="running",
        pending=None,
        units_done=draw(st.floats(0, 1e5)),
        units_total=1e6,
        speeds={name: Speed(draw(st.floats(0.01, 100)), 0.001, "measured", 60) for name in sorted(names)},
        overheads=draw(st.builds(Overheads, st.floats(0, 100))),
        spent_usd=0.0,
        budget_usd=draw(st.none() | st.floats(0, 1e5)),
        since_move_s=None,
        since_move_epochs=None,
        free_nodes={},
    )


cases = observations() | movable()
eager = policies.map(
    lambda policy: replace(policy, name="cost-to-finish", stabilization_s=0, recommend_only=False)
)


@given(cases, policies)
def test_a_move_is_within_every_limit(seen, policy):
    """Nodes, free capacity, cooldown, one action at a time, health; budget unless it saves."""
    got = decide(seen, policy)

    assert got.reason
    if got.action == "keep":
        assert got.target == seen.current
        return
    assert got.action == ("recommend" if policy.recommend_only else "move")
    assert policy.min_nodes <= got.target.nodes <= policy.max_nodes
    assert got.target.name != seen.current.name
    assert (seen.health, seen.phase, seen.pending) == ("ok", "running", None)
    by_stakes = 0 if policy.name == "cost-to-finish" else 3600
    cooldown_s = by_stakes if policy.cooldown_s is None else policy.cooldown_s
    assert seen.since_move_s is None or seen.since_move_s >= cooldown_s
    assert seen.since_move_epochs != 0 or (by_stakes == 0 and policy.min_epochs_between is None)
    free = seen.free_nodes.get(got.target.offer.name)
    held = seen.current.nodes if got.target.offer == seen.current.offer else 0
    assert free is None or got.target.nodes - held <= free
    assert 600 - got.wanted[got.target.name] >= policy.stabilization_s


@given(cases, policies)
def test_a_move_never_breaks_the_budget(seen, policy):
    """Nine times of ten it ends within the budget, or it costs less than staying."""
    got = decide(seen, replace(policy, name="cost-to-finish"))

    if got.action != "keep" and seen.budget_usd is not None:
        moving, staying = got.numbers["moving"][got.target.name], got.numbers["staying"]
        left = seen.budget_usd - seen.spent_usd
        assert moving["usd_high"] <= left or moving["usd"] < staying["usd"]


@given(cases, policies)
def test_a_move_by_cost_beats_staying_by_the_tolerance(seen, policy):
    """Without a deadline, only the expected objective decides, by at least what was stated."""
    got = decide(replace(seen, deadline_left_s=None), replace(policy, name="cost-to-finish"))

    if got.action != "keep":
        moving, staying = got.numbers["moving"][got.target.name], got.numbers["staying"]
        assert moving["expected"] < (1 - moving["must_save"]) * staying["objective"]
        assert moving["must_save"] >= (policy.tolerance or 0.0)


@given(cases, policies, st.randoms(use_true_random=False))
def test_the_order_of_offers_does_not_matter(seen, policy, random):
    """Candidates, statements and samples come in any order."""
    mixed = [list(seen.candidates), list(seen.speedups), list(seen.samples)]
    assume(len({item.name for item in seen.candidates}) == len(seen.candidates))
    for items in mixed:
        random.shuffle(items)

    candidates, speedups, samples = (tuple(items) for items in mixed)
    other = replace(seen, candidates=candidates, speedups=speedups, samples=samples)

    assert decide(other, policy) == decide(seen, policy)


@given(cases, policies)
def test_a_recorded_check_gives_the_recorded_decision(seen, policy):
    """The check round-trips through JSON without NaN, and the decision is repeated."""
    check = Check(seen, policy, decide(seen, policy))

    again = Check.from_dict(json.loads(json.dumps(check.to_dict(), allow_nan=False)))

    assert again == check
    assert replay(again) == check.decision


@given(movable(), eager | policies)
def test_what_was_decided_is_validated_on_the_same_facts(seen, policy):
    """An owner with the same facts accepts it (feature B10)."""
    got = decide(seen, policy)
    if got.action != "move":
        return

    again = validate(seen, policy, got.target)

    assert (again.action, again.target) == ("move", got.target)


@given(movable(), eager, st.floats(0, 1))
def test_a_lower_price_never_undoes_a_move(seen, policy, factor):
    """Monotone in price: if the target of a move is cheaper, the stage still moves there."""
    got = decide(seen, policy)
    if got.action != "move" or got.target.offer == seen.current.offer:
        return
    price = got.target.offer.usd_per_hour

    cheaper = Allocation(replace(got.target.offer, usd_per_hour=price * factor), got.target.nodes)
    rest = tuple(item for item in seen.candidates if item.name != cheaper.name)

    assert decide(replace(seen, candidates=(*rest, cheaper)), policy).target == cheaper


@given(cases, policies, st.floats(1, 10))
def test_a_higher_price_never_makes_a_move(seen, policy, factor):
    """Monotone in price: if the others cost more, a stage that stays still stays."""
    policy, seen = replace(policy, name="cost-to-finish"), replace(seen, deadline_left_s=None)
    assume(decide(seen, policy).action == "keep")

    dearer = tuple(
        Allocation(
            replace(item.offer, usd_per_hour=item.offer.usd_per_hour and item.offer.usd_per_hour * factor),
            item.nodes,
        )
        for item in seen.candidates
        if item.offer.instance_type != seen.current.offer.instance_type
    )

    assert decide(replace(seen, candidates=dearer), policy).action == "keep"


@given(
    prior=st.floats(0.5, 3),
    truth=st.floats(0.5, 3),
    price=st.floats(0.5, 3),
    value=st.sampled_from([0.0, 1.0, 10.0]),
    noise=st.lists(st.floats(0.9, 1.1), min_size=40, max_size=40),
)
def test_a_stationary_noisy_job_does_not_flap(prior, truth, price, value, noise):
    """Speeds within 10 % of the truth, no cooldown: at most one move out and back."""
    small, large = allocation("a", 1, 1.0), allocation("b", 1, price)
    true = {small.name: 1.0, large.name: truth}
    policy = Policy(
        value_of_hour=value, stabilization_s=0, cooldown_s=0, min_epochs_between=0, tolerance=0.25
    )
    here, measured, moves = small, {}, 0

    for check, wobble in enumerate(noise):
        mean = true[here.name] * wobble
        measured[here.name] = Speed(mean, 0.05 * mean, "measured", 60)
        seen = Observation(
            current=here,
            candidates=(small, large),
            units_done=1000.0 * check,
            units_total=1e5,
            speeds=measured,
            speedups=(Speedup(large.name, small.name, prior, 0.1),),
            moves=moves,
        )
        got = decide(seen, policy)
        if got.action == "move":
            here, moves = got.target, moves + 1

    assert moves <= 2


@given(st.lists(st.floats(30, 90), min_size=30, max_size=30), st.integers(1, 8))
def test_a_stationary_noisy_load_does_not_flap(load, nodes):
    """Noise around one load (60 per node at *nodes*): after the first change, no moves back and forth."""
    policy = Policy(
        name="threshold", max_nodes=16, stabilization_s=0, cooldown_s=0, rules=(ThresholdRule("m"),)
    )
    here, rounds, turns, last = allocation("a", nodes, 1.0), [], 0, 0

    for check, noise in enumerate(load):
        value = (60 + (noise - 60) / 10) * nodes / here.nodes
        rounds.append((10.0 * check, min(100.0, value)))
        samples = tuple(Sample(at, node, "m", item) for at, item in rounds[-3:] for node in range(here.nodes))
        got = decide(Observation(current=here, elapsed_s=10.0 * check, samples=samples), policy)
        if got.action == "move":
            way = 1 if got.target.nodes > here.nodes else -1
            turns, last, here, rounds = turns + (way == -last), way, got.target, []

    assert turns == 0


@given(
    units=st.floats(0, 1e6),
    speed=speeds,
    price=st.floats(0, 100),
    value=st.floats(0, 100),
    rate=st.floats(0, 1),
    extra=st.builds(
        Overheads,
        st.floats(0, 1e4),
        st.floats(0, 1e3),
        st.floats(0, 60),
        st.none() | st.floats(60, 3600),
    ),
)
def test_an_estimate_holds_together(units, speed, price, value, rate, extra):
    """Low, expected and high are in order; parts add up; the objective follows its formula."""
    got = estimate(
        units,
        speed,
        usd_per_hour=price,
        value_of_hour=value,
        overheads=extra,
        interruptions_per_hour=rate,
    )

    assert 0 <= got.hours_low <= got.hours <= got.hours_high
    parts = got.start_s + got.train_s + got.checkpoint_s + got.interruption_s
    assert parts == pytest.approx(got.hours * 3600, rel=1e-6, abs=1e-6)
    assert got.objective == pytest.approx(price * got.hours + value * got.hours)


any_policy = st.builds(
    lambda policy, name: replace(policy, name=name),
    policies,
    st.sampled_from(["cost-to-finish", "deadline", "phase", "threshold", "vertical"]),
).map(
    lambda policy: replace(
        policy,
        phases=(PhaseNeed("loading", nodes=1), PhaseNeed("training", nodes=3), PhaseNeed("eval", nodes=2)),
    )
)


@st.composite
def any_case(draw):
    """Inputs of every policy: phases, growing memory, spot and on-demand."""
    found = draw(cases)
    capacity = st.sampled_from(["spot", "on-demand"])

    def sold(item):
        return replace(item, offer=replace(item.offer, capacity_type=draw(capacity)))

    here = sold(found.current)
    level, slope = draw(st.floats(0, 20)) * 2**30, draw(st.floats(0, 1)) * 2**30
    memory = tuple(
        Sample(600.0 - 15 * back, node, "memory_bytes", level + slope * (40 - back))
        for back in range(draw(st.integers(0, 40)))
        for node in range(here.nodes)
    )
    phases = st.none() | st.sampled_from(["loading", "training", "eval", "other"])
    return replace(
        found,
        current=here,
        candidates=tuple(sold(item) for item in found.candidates),
        samples=(*found.samples, *memory),
        training_phase=draw(phases),
        next_phase=draw(phases),
        next_phase_in_s=draw(st.none() | st.floats(0, 1e4)),
        phase_lasts_s=draw(st.dictionaries(st.just("training"), st.floats(0, 1e5))),
    )


@given(any_case(), any_policy)
def test_no_policy_leaves_the_limits_or_moves_without_a_reason(seen, policy):
    """Urgent moves too: nodes, free capacity, health, phase, one action at a time, budget."""
    got = decide(seen, policy)

    assert got.reason
    if got.action == "keep":
        assert got.target == seen.current
        return
    assert policy.min_nodes <= got.target.nodes <= policy.max_nodes
    assert got.target.name != seen.current.name
    assert (seen.health, seen.phase, seen.pending) == ("ok", "running", None)
    free = seen.free_nodes.get(got.target.offer.name)
    held = seen.current.nodes if got.target.offer == seen.current.offer else 0
    assert free is None or got.target.nodes - held <= free
    assert seen.budget_usd is None or seen.spent_usd is not None


@given(any_case(), any_policy, st.randoms(use_true_random=False))
def test_for_no_policy_the_order_of_offers_matters(seen, policy, random):
    """Candidates and samples come in any order; the recorded check gives the recorded decision."""
    assume(len({item.name for item in seen.candidates}) == len(seen.candidates))
    candidates, samples = list(seen.candidates), list(seen.samples)
    random.shuffle(candidates)
    random.shuffle(samples)
    got = decide(seen, policy)

    assert decide(replace(seen, candidates=tuple(candidates), samples=tuple(samples)), policy) == got
    check = Check(seen, policy, got)
    assert replay(Check.from_dict(json.loads(json.dumps(check.to_dict(), allow_nan=False)))) == got


@given(any_case(), any_policy)
def test_every_policy_keeps_when_nothing_is_known(seen, policy):
    """No metric, no speed, no phase, no deadline: keep, and name the reason."""
    blind = replace(
        seen, samples=(), speeds={}, speedups=(), training_phase=None, next_phase=None,
        deadline_left_s=None, units_done=None, wanted={},
    )  # fmt: skip

    got = decide(blind, policy)

    assert got.action == "keep"
    assert got.reason
