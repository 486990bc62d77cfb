"""The environment for learned policies agrees with the simulator, and a recorded run can be replayed."""

import math
import sys
from dataclasses import replace

import pytest
from fakes.policies import bring_propose, forgotten

from envscaler_airflow.owner.policies import policies_of
from envscaler_airflow.planning import Allocation, Estimate, Offer, Overheads, Speed, Speedup
from envscaler_airflow.scaling import Check, Observation, Policy, Proposal, Want, decide
from envscaler_airflow.scaling.deadline import ON_DEMAND, SpotJob
from envscaler_airflow.scaling.deadline.policy import DEADLINE
from envscaler_airflow.scaling.registry import all_policies
from envscaler_airflow.simulate.compared_policies import OnDemand, UniformProgress
from envscaler_airflow.simulate.elastic import Config, ElasticJob, Model, Step, simulate_elastic
from envscaler_airflow.simulate.env import ElasticEnv, SpotEnv
from envscaler_airflow.simulate.reports import replay_run
from envscaler_airflow.simulate.spot import simulate_spot
from envscaler_airflow.store.run import Run
from envscaler_airflow.store.run_store import open_store

JOB = SpotJob(40, 600.0, 4 * 3600.0, 720.0, 3.0, 1.0)
ZONES = {"z": [1, 1, 1, 0, 0, 1, 1, 0] * 5}


def test_an_episode_costs_what_the_simulator_says():
    """The answers of Uniform Progress, step by step: the rewards add up to minus the cost (feature D9)."""
    run = simulate_spot(JOB, ZONES, UniformProgress())
    env = SpotEnv(lambda _random: (JOB, ZONES))
    seen, _ = env.reset(seed=1)
    total, is_done = 0.0, False

    for answer in run.answers:
        assert not is_done
        seen, reward, is_done, _, info = env.step([None, ON_DEMAND, "z"].index(answer))
        assert info["answer"] == answer
        total += reward

    assert is_done
    assert total == pytest.approx(-run.cost_usd)
    assert seen["work_left_s"] == 0


def test_the_guard_overrules_a_policy_that_only_waits():
    """The job finishes in time for any actions of a learner."""
    env = SpotEnv(lambda _random: (JOB, ZONES))
    seen, _ = env.reset(seed=1)
    is_done = False

    while not is_done:
        seen, _, is_done, _, _ = env.step(0)

    assert seen["ticks_left"] >= 0


def test_the_same_seed_begins_the_same_episode():
    """The draws depend only on the seed."""
    env = SpotEnv(lambda random: (replace(JOB, spot_usd=random.random()), ZONES))

    first, again = env.reset(seed=5)[0], env.reset(seed=5)[0]

    assert first == again


def local(cpus, usd):
    """A share of this machine."""
    return Allocation(Offer("local", "", f"cpu-{cpus}", "on-demand", cpus, 4.0, usd_per_hour=usd), 1)


def checks():
    """Three recorded checks under cost-to-finish: twice as fast at the same price."""
    small, large = local(1, 1.0), local(2, 1.0)
    seen = Observation(
        small, candidates=(large,), units_done=0.0, units_total=36_000.0, overheads=Overheads(10.0),
        speeds={small.name: Speed(1.0, 0.0, "measured", 600.0)},
        speedups=(Speedup(large.name, small.name, 2.0, 0.0),),
    )  # fmt: skip
    policy = Policy(value_of_hour=1.0, stabilization_s=0.0)
    for at in range(3):
        now = replace(seen, elapsed_s=60.0 * at, units_done=60.0 * at)
        yield Check(now, policy, decide(now, policy))


def test_a_recorded_run_replays_as_it_was():
    """With the same policy nothing differs and nothing is counterfactual."""
    report = replay_run(checks())

    assert report["summary"] == {
        "checks": 3, "different": 0, "counterfactual": 0, "first_different_s": None,
    }  # fmt: skip


def test_another_policy_is_labelled_from_its_first_other_decision_on():
    """Under vertical the stage would have stayed: everything after that is counterfactual (feature D9)."""
    report = replay_run(checks(), "vertical")

    assert report["summary"]["different"] == 3
    assert [row["counterfactual"] for row in report["jobs"]] == [True, True, True]
    assert all(row["replayed"] == "keep" for row in report["jobs"])


def test_our_policies_are_found_by_name():
    """Policies of other packages are listed with them."""
    assert {"cost-to-finish", "deadline", "phase", "threshold", "vertical"} <= set(all_policies())


FLAT = Model(
    "flat",
    100,
    400,
    50.0,
    {Config("T4", 1, n): (Step(100 * n, 1.0, 0.1),) for n in (1, 2, 4)},
    (2000.0, 4000.0),
    {100: (50.0, 50.0)},
)
TRAINING = ElasticJob(FLAT, tuple(FLAT.steps), {"T4": 1.0}, 4.0, 1.0, Config("T4", 1, 1))


class ToFour:
    """Moves once, to four GPUs."""

    def begin(self, job):
        """Nothing to store."""

    def choose(self, view):
        """Return four GPUs."""
        return Config("T4", 1, 4)


def test_an_elastic_episode_costs_what_the_simulator_says():
    """One minute on one GPU, then four: the rewards add up to minus the objective."""
    run = simulate_elastic(TRAINING, ToFour(), seed=1)
    env = ElasticEnv(lambda _random: TRAINING)
    seen, told = env.reset(seed=1)
    total, is_done = -told["objective"], False

    while not is_done:
        assert set(seen) >= {"action", "work_left", "usd_per_hour", "noise_scale"}
        seen, reward, is_done, _, info = env.step(2)
        total += reward

    assert total == pytest.approx(-run.objective)
    assert info["restarts"] == run.restarts == 1
    assert seen["work_left"] == pytest.approx(0.0)


def test_the_same_seed_begins_the_same_elastic_episode():
    """Noise depends only on the seed."""
    env = ElasticEnv(lambda _random: TRAINING)

    assert env.reset(seed=3) == env.reset(seed=3)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package with a policy and a simulated one, installed on Python's path."""
    (tmp_path / "greedy_mover.py").write_text(
        "from envscaler_airflow.scaling import Proposal, ScalingPolicy, Want, outlook\n"
        "from envscaler_airflow.simulate.compared_policies import OnDemand\n"
        "def propose(seen, policy):\n"
        "    view = outlook(seen, policy)\n"
        "    return Proposal(tuple(Want(i, 'more', view.staying, view.moving(i)) for i in seen.others()))\n"
        "mover = ScalingPolicy('mover', propose, simulated=OnDemand)\n"
        "deadline = ScalingPolicy('deadline', propose)\n"
    )
    meta = tmp_path / "greedy_mover-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy-mover\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(
        "[envscaler_airflow.policies]\nmover = greedy_mover:mover\ndeadline = greedy_mover:deadline\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten():
        yield
    sys.modules.pop("greedy_mover", None)


@pytest.mark.usefixtures("plugin")
def test_a_policy_of_another_package_runs_behind_the_same_guards():
    """It requests everything; nodes, pending requests and recommend-only still limit it."""
    known = all_policies()
    offer = Offer("aws", "r", "m5", "on-demand", vcpus=4, memory_gib=16, usd_per_hour=1.0)
    one, two, nine = (Allocation(offer, nodes) for nodes in (1, 2, 9))
    seen = Observation(current=one, candidates=(two,), elapsed_s=600.0)
    policy = Policy("mover", max_nodes=4, stabilization_s=0.0)

    assert decide(seen, policy, policies=known).target == two
    assert decide(replace(seen, candidates=(nine,)), policy, policies=known).action == "keep"
    assert decide(replace(seen, pending="a request"), policy, policies=known).action == "keep"
    assert decide(seen, replace(policy, recommend_only=True), policies=known).action == "recommend"


def _wants(seen, **facts):
    """One move to two nodes."""
    return Proposal((Want(**{"target": seen.candidates[0], "reason": "why", **facts}),))


NONSENSE = {
    "no proposal": lambda _seen: None,
    "a NaN": lambda _seen: Proposal(numbers={"x": math.nan}),
    "too much": lambda _seen: Proposal(numbers={"x": "x" * (1 << 20)}),
    "no target": lambda seen: _wants(seen, target=None),
    "a name": lambda seen: _wants(seen, target="m5"),
    "no reason": lambda seen: _wants(seen, reason=None),
    "no estimate": lambda seen: _wants(seen, moving="cheap"),
    "an estimate of NaN": lambda seen: _wants(seen, moving=Estimate(math.nan, 1, 1, 0, 0, 0, 0)),
    "money back": lambda seen: _wants(seen, moving=Estimate(1, 1, 1, 0, 0, 0, 0, -9, -9, -9)),
    "another machine": lambda seen: _wants(
        seen,
        target=Allocation(Offer("aws", "r", "t3", "on-demand", vcpus=1, memory_gib=1, usd_per_hour=0.0)),
        moving=Estimate(1, 1, 1, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0),
    ),
    "an error": lambda seen: seen.nothing,
    "an exit": lambda _seen: sys.exit(3),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_of_another_package_moves_nothing_and_is_named(said, monkeypatch, tmp_path):
    """Neither the check nor its record breaks, and a negative estimate does not pass a budget."""
    offer = Offer("aws", "r", "m5", "on-demand", vcpus=4, memory_gib=16, usd_per_hour=1.0)
    here, two = (Allocation(offer, nodes) for nodes in (1, 2))
    seen = Observation(here, candidates=(two,), elapsed_s=600.0, budget_usd=1.0, spent_usd=5.0)
    policy = Policy("odd", max_nodes=4, stabilization_s=0.0)
    with forgotten():
        bring_propose(monkeypatch, odd=lambda seen, _policy: said(seen))
        got = decide(seen, policy, policies=policies_of(Run(open_store(f"file://{tmp_path}"), "run")))

    assert got.action == "keep"
    assert "policy 'odd' (odd:policy)" in got.reason
    check = Check(seen, policy, got)
    assert Check.from_dict(check.to_dict()) == check


@pytest.mark.usefixtures("plugin")
def test_a_package_cannot_replace_a_policy_of_ours():
    """The name ``deadline`` still refers to ours; its simulated policy is found too."""
    known = all_policies()

    assert known["deadline"] is DEADLINE
    assert known["mover"].simulated is OnDemand
