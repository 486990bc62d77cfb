"""The elastic model on a subset of measured trainings, and the learner behind cost-to-finish."""

import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.errors import SpecError
from envscaler_airflow.scaling.explore import Learner, Measured, Shape, foreseen, gain
from envscaler_airflow.scaling.probes import Place, expected_objectives, must_save
from envscaler_airflow.simulate.compared_policies import Hpa, OrEtAl, Pollux, Stay
from envscaler_airflow.simulate.elastic import (
    Config,
    ElasticJob,
    Model,
    Step,
    best_fixed,
    elastic_optimum,
    gpu_prices,
    load_models,
    simulate_elastic,
)
from envscaler_airflow.simulate.reports import ELASTIC_POLICIES, Track, elastic_jobs, elastic_summary

DATA = Path(__file__).parents[2] / "data" / "elastic"
T4 = {"T4": 0.978}
ONE = Shape("T4", 1, 1)


@cache
def models():
    """Both models of the subset."""
    return load_models(DATA, ["T4"])


def job(name, at=1.0, *, is_long=True):
    """A job on counts of T4."""
    return Track(False, is_long, {}).job(models()[name], T4, None, at)


def test_only_packed_configurations_that_were_measured_are_taken():
    """Five T4 are a full node and one more; spread ones are omitted."""
    configs = models()["cifar10"].steps

    assert Config("T4", 2, 5) in configs
    assert all(config.nodes == math.ceil(config.gpus / 4) for config in configs)


def test_a_long_job_takes_what_the_comparison_says():
    """40 to 150 h on one T4: cifar10 40.3 h at 40 lengths."""
    run = simulate_elastic(job("cifar10"), Stay(), seed=0)

    assert run.time_h == pytest.approx(40.33 + 50 / 3600, abs=0.02)
    assert run.cost_usd == pytest.approx(run.time_h * 0.978)
    assert run.restarts == 0


@pytest.mark.parametrize("name", ["cifar10", "yolov3"])
@pytest.mark.parametrize("at", [0.25, 16.0])
def test_nothing_beats_the_optimum_by_more_than_a_fraction_of_an_epoch(name, at):
    """The optimum switches only at epoch ends; policies may switch within an epoch."""
    item = job(name, at)
    optimum = elastic_optimum(item)

    for policy in (Stay(), Hpa(), OrEtAl(), Pollux()):
        assert simulate_elastic(item, policy, seed=1).objective >= 0.97 * optimum
    assert best_fixed(item) >= 0.97 * optimum


def test_cost_to_finish_comes_near_the_optimum():
    """Two models at $4 an hour: within 12 % on average, and far ahead of the baselines."""
    track = Track(False, True, {})
    regret = {}
    for name in ("cost-to-finish", "hpa", "pollux"):
        policy = ELASTIC_POLICIES[name]()
        jobs = elastic_jobs(list(models().values()), T4, track, policy, seeds=1, values_of_hour=[4.0])
        regret[name] = elastic_summary(jobs)["mean_regret"]

    assert regret["cost-to-finish"] < 0.12
    assert regret["cost-to-finish"] < 0.7 * min(regret["hpa"], regret["pollux"])


def test_the_same_seed_gives_the_same_job():
    """Noise depends only on the seed."""
    first, again = (
        simulate_elastic(job("yolov3", is_long=False), ELASTIC_POLICIES["cost-to-finish"](), seed=3)
        for _ in "ab"
    )

    assert first == again


def test_a_gpu_without_a_price_is_refused(tmp_path):
    """The message names it and the columns."""
    path = tmp_path / "p.csv"
    path.write_text("gpu,usd_per_gpu_hour\nT4,0.5\n")

    with pytest.raises(SpecError, match="no price for H100"):
        gpu_prices(path, ["H100"])


def learner():
    """One T4, 100 samples a step: 1 s, without synchronization."""
    found = Learner(100, 6400, {"T4": 320.0, "A100": 1600.0})
    found.learn(ONE, Measured(100, 1.0, 0.0, 50.0))
    return found


def test_what_was_measured_stands():
    """The gain is 1 per second on the measured shape."""
    rate, stdev = learner().rate(ONE, 50.0)

    assert rate == pytest.approx(1.0, rel=0.2)
    assert stdev < 0.05


def test_the_unknown_is_unsure_and_becomes_sure():
    """Two nodes: uncertain before they were tried, hardly afterwards; neighbors become more certain too."""
    found, there, beside = learner(), Shape("T4", 2, 8), Shape("T4", 2, 7)
    before = found.rate(there, 50.0)[1], found.rate(beside, 50.0)[1]

    found.learn(there, Measured(800, 1.6, 0.6, 50.0))

    assert found.rate(there, 50.0)[1] < 0.2 * before[0]
    assert found.rate(beside, 50.0)[1] < before[1]


def test_a_probe_is_not_worth_it_when_little_is_left():
    """A minute of work does not pay for a restart of 50 s, an hour does."""

    def saves(work_s):
        per_s = (0.978 + 4.0) / 3600
        here = Place("one", per_s * work_s, 0.01, per_s, is_known=True)
        two = Place("two", 1.2 * per_s * work_s / 1.6, 0.3, 1.2 * per_s, is_known=False)
        return expected_objectives([here, two], here, restart_s=50.0)["two"] < here.objective

    assert not saves(60.0)
    assert saves(36_000.0)


def test_places_that_disappointed_raise_the_bar():
    """A known place for itself alone, every one of them for new places."""
    known, new = (Place(name, 1.0, 0.1, 1.0, is_known=name == "known") for name in ("known", "new"))

    assert [must_save(place, {}) for place in (known, new)] == [0.03, 0.07]
    assert must_save(known, {"known": 1.0}) == pytest.approx(4 * 0.03)
    assert must_save(known, {"other": 1.0}) == 0.03
    assert must_save(new, {"other": 1.0}) == pytest.approx(1.7 * 0.07)
    assert must_save(new, {}, (0.1, 0.1)) == 0.1


@given(batch=st.floats(1, 1e5), noise=st.floats(0, 1e6))
def test_a_step_is_never_worth_more_than_its_samples(batch, noise):
    """The gain is between 1 and the ratio of batches."""
    low, high = sorted((1.0, batch / 100))

    assert low - 1e-9 <= gain(batch, 100, noise) <= high + 1e-9


def test_noise_is_expected_to_grow():
    """It is larger over the remaining work than now; an unknown one stays unknown."""
    assert foreseen(100.0) == 160.0
    assert foreseen(None) is None


def test_what_was_measured_beats_the_model():
    """400 samples in 8 s on four GPUs, whether or not larger batches promise more: 0.5 a second of each."""
    found, four = learner(), Shape("T4", 1, 4)

    found.learn(four, Measured(400, 8.0, 0.1, 50.0))

    assert found.rate(four, 50.0)[0] == pytest.approx(gain(400, 100, 50.0) / 8.0)


def test_a_batch_that_the_noise_asks_for_and_is_not_run_does_not_fit():
    """At a noise of 5,000 twice the batch is twice the progress: it stayed at 100 because of memory.

    At a noise of 0.5 a batch of 100 is right, and gives no information about what fits.
    """
    free, full = (Learner(100, 6400, {"T4": 320.0}) for _ in "ab")
    two = Shape("T4", 1, 2)

    free.learn(ONE, Measured(100, 1.0, 0.0, 0.5))
    full.learn(ONE, Measured(100, 1.0, 0.0, 5000.0))

    assert free.rate(two, 5000.0)[0] > 1.2 * full.rate(two, 5000.0)[0]


def test_a_batch_that_is_bounded_by_the_user_says_nothing_of_memory():
    """The limit is 120: running 100 does not mean that 120 do not fit on another type."""
    found = Learner(100, 120, {"T4": 320.0, "A100": 320.0})

    found.learn(ONE, Measured(100, 1.0, 0.0, 5000.0))

    assert found.rate(Shape("A100", 1, 1), 5000.0)[0] > 1.02 * found.rate(ONE, 5000.0)[0]


def test_half_of_synchronisation_is_hidden():
    """Compute of 1 s in a step of 1.25 s leaves 0.75 s, since squares add; so half the batch takes 0.9 s."""
    found, two = learner(), Shape("T4", 1, 2)
    found.learn(ONE, Measured(50, 0.5, 0.0, 50.0))

    found.learn(two, Measured(200, 1.25, 0.25, 50.0))

    found.rate(two, 50.0)
    assert found._sync[two] == pytest.approx(0.75)


def test_a_place_that_disappointed_is_not_tried_again_and_again():
    """A training limited by its data is as fast on any count; it tries each count at most once and stops."""
    rows = (Step(100, 1.0, 0.01), Step(200, 1.9, 0.01), Step(400, 3.7, 0.01))
    steps = {Config("T4", -(-count // 4), count): rows for count in (1, 2, 4, 8)}
    flat = Model("flat", 100, 400, 50.0, steps, tuple(1000.0 * e for e in range(1, 51)), {100: (200.0,) * 50})
    item = ElasticJob(flat, tuple(steps), T4, 20.0, 1.0, Config("T4", 1, 1))

    run = simulate_elastic(item, ELASTIC_POLICIES["cost-to-finish"](), seed=1)

    assert run.restarts <= 6
    assert run.objective < 1.1 * elastic_optimum(item)
