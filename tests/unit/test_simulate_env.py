"""The environment for learned policies agrees with the simulator, and a recorded run can be replayed."""

from dataclasses import replace

import pytest

from envscaler_airflow.planning import Allocation, Offer, Overheads, Speed, Speedup
from envscaler_airflow.scaling import Check, Observation, Policy, decide
from envscaler_airflow.scaling.deadline import ON_DEMAND, SpotJob
from envscaler_airflow.scaling.registry import all_policies
from envscaler_airflow.simulate.env import SpotEnv
from envscaler_airflow.simulate.recorded import replay_run
from envscaler_airflow.simulate.references import UniformProgress
from envscaler_airflow.simulate.spot import simulate_spot

JOB = SpotJob(40, 600.0, 4 * 3600.0, 720.0, 3.0, 1.0)
ZONES = {"z": [1, 1, 1, 0, 0, 1, 1, 0] * 5}


def test_an_episode_costs_what_the_simulator_says():
    """The answers of Uniform Progress, step by step: the rewards add up to minus the cost."""
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
    """Whatever a learner tries, the job is done in time."""
    env = SpotEnv(lambda _random: (JOB, ZONES))
    seen, _ = env.reset(seed=1)
    is_done = False

    while not is_done:
        seen, _, is_done, _, _ = env.step(0)

    assert seen["ticks_left"] >= 0


def test_the_same_seed_begins_the_same_episode():
    """Draws come from the seed."""
    env = SpotEnv(lambda random: (replace(JOB, spot_usd=random.random()), ZONES))

    first, again = env.reset(seed=5)[0], env.reset(seed=5)[0]

    assert first == again


def local(cpus, usd):
    """A slice of this machine."""
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
    """The same policy: nothing differs and nothing is counterfactual."""
    report = replay_run(checks())

    assert report["summary"] == {
        "checks": 3, "different": 0, "counterfactual": 0, "first_different_s": None,
    }  # fmt: skip


def test_another_policy_is_labelled_from_its_first_other_decision_on():
    """Under vertical the stage would have stayed: all that follows is counterfactual."""
    report = replay_run(checks(), "vertical")

    assert report["summary"]["different"] == 3
    assert [row["counterfactual"] for row in report["jobs"]] == [True, True, True]
    assert all(row["replayed"] == "keep" for row in report["jobs"])


def test_our_policies_are_found_by_name():
    """What other packages bring stands beside them."""
    assert {"cost-to-finish", "deadline", "phase", "threshold", "vertical"} <= set(all_policies())
