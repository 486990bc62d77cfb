"""How fast a job runs where it was not measured: Pollux's step, the roofline, memory, input."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envscaler_airflow.catalog.packaged import gpu_facts, job, jobs
from envscaler_airflow.errors import SpecError
from envscaler_airflow.planning import Goal, Knowledge, Requirements
from envscaler_airflow.planning.jobs import Footprint, Job, job_model, known_steps
from envscaler_airflow.planning.market import Search, search
from envscaler_airflow.planning.offers import InstanceType
from envscaler_airflow.planning.table import Row, build_table
from envscaler_airflow.planning.throughput import Gpu, Step, Timing, fit_step, minimise, roofline_s

OLD = Gpu("OLD", 16, 300, {"fp32": 10, "fp16": 60}, 32)
NEW = Gpu("NEW", 80, 1500, {"fp32": 20, "fp16": 300, "tf32": 150}, 600, has_direct_link=True)
GPUS = {"OLD": OLD, "NEW": NEW}
STEP = Step(0.05, 0.004, 0.02, 0.002, 0.4, 0.002, 2.0)
SMALL = Job(
    "small", "", "samples", 1e9, 1e9, "fp16", "OLD", STEP, Footprint(1e8, 16, 1e8), 64, 4096, is_measured=True
)


def kind(gpu="OLD", gpus=1, vcpus=64.0):
    """A machine with GPUs of GPUS."""
    return InstanceType("c", f"{gpu}x{gpus}", vcpus, 64, gpu, gpus, GPUS[gpu].memory_gb)


def test_a_step_is_computing_and_synchronising():
    """0.05 + 0.004 x 50 = 0.25 s; with 0.02 s of sync on 2 GPUs and overlap 2, sqrt(0.25^2 + 0.02^2)."""
    assert STEP.seconds(50) == pytest.approx(0.25)
    assert STEP.seconds(50, 2, 1) == pytest.approx(math.hypot(0.25, 0.02))
    assert STEP.seconds(50, 4, 2) == pytest.approx(math.hypot(0.25, 0.4 + 0.002 * 2))
    assert replace(STEP, overlap=1.0).seconds(50, 2, 1) == pytest.approx(0.27)


@given(local=st.floats(1, 1e4), gpus=st.integers(1, 64), overlap=st.floats(1, 10))
def test_a_step_takes_no_less_than_its_longer_part_and_no_more_than_both(local, gpus, overlap):
    """This applies to any overlap."""
    step = replace(STEP, overlap=overlap)
    parts = step.compute_s(local), step.sync_s(gpus)

    assert max(parts) * (1 - 1e-9) <= step.seconds(local, gpus) <= sum(parts) * (1 + 1e-9)


def test_a_fit_finds_the_step_that_made_the_timings():
    """From a prior wrong by up to two times, with 2 % noise: within 5 % where measured (feature B4)."""
    rng = random.Random(1)
    places = [(local, gpus, 1) for local in (8, 32, 128) for gpus in (1, 2, 4)] + [(32, 8, 2), (128, 8, 2)]
    timings = [Timing(*place, STEP.seconds(*place) * math.exp(rng.gauss(0, 0.02))) for place in places]

    got = fit_step(timings, Step(0.1, 0.002, 0.04, 0.001, 0.2, 0.002, 1.2))

    for place in places:
        assert got.seconds(*place) == pytest.approx(STEP.seconds(*place), rel=0.05)


def test_a_fit_to_one_timing_stays_near_its_prior_elsewhere():
    """Twice as slow on one GPU: predictions for unmeasured counts do not change much."""
    got = fit_step([Timing(32, 1, 1, 2 * STEP.seconds(32))], STEP)

    assert got.seconds(32) == pytest.approx(2 * STEP.seconds(32), rel=0.1)
    assert got.sync_s(4, 2) == pytest.approx(STEP.sync_s(4, 2), rel=0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_timing_that_is_none_is_refused(bad):
    """A torn status is not a valid speed."""
    with pytest.raises(ValueError, match="step_s must be finite and > 0"):
        fit_step([Timing(1, 1, 1, bad)], STEP)
    with pytest.raises(ValueError, match="none given"):
        fit_step([], STEP)


def test_minimise_finds_the_bottom_of_a_curved_valley():
    """Rosenbrock's function has its least value at (1, 1)."""
    got = minimise(lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2, [-1.0, 1.0])

    assert got == pytest.approx([1.0, 1.0], abs=0.01)


def test_the_roofline_is_memory_or_compute():
    """1 GB at 0.8 of 300 GB/s; 1 TFLOP at 0.45 of 60 TFLOP/s; TF32 falls back to FP32."""
    assert roofline_s(OLD, flops=1, moved_bytes=1e9, precision="fp16") == pytest.approx(1 / 240)
    assert roofline_s(OLD, flops=1e12, moved_bytes=1, precision="fp16") == pytest.approx(1 / 27)
    assert roofline_s(OLD, flops=1e12, moved_bytes=1, precision="tf32") == pytest.approx(1 / 4.5)
    assert roofline_s(OLD, flops=1e12, moved_bytes=1, precision="fp8") == pytest.approx(1 / 27)


def test_a_job_moves_to_another_gpu_by_its_datasheet():
    """Five times the bandwidth: a fifth of the time per sample, and an uncertain speed marked as such."""
    known = known_steps(SMALL, GPUS)
    model = job_model(SMALL, GPUS, batch=64)

    assert known["NEW"].step.sample_s == pytest.approx(STEP.sample_s / 5)
    old, new = model(kind("OLD"), 1), model(kind("NEW"), 1)
    assert (old.source, new.source) == ("fitted", "datasheet")
    assert new.mean > 2 * old.mean
    assert new.relative_stdev > old.relative_stdev
    assert model(InstanceType("c", "cpu", 8, 32), 1) is None
    assert model(InstanceType("c", "odd", 8, 32, "ODD", 1, 16), 1) is None


def test_uncertainty_grows_with_the_distance_from_what_was_measured():
    """Measured on 2, then 4, 8 and 16 GPUs."""
    timings = {"NEW": [Timing(32, 2, 1, 0.1)]}
    model = job_model(SMALL, GPUS, measured=timings, batch=64)

    spreads = [model(kind("NEW", gpus), 1).relative_stdev for gpus in (2, 4, 8, 16)]

    assert spreads[0] == pytest.approx(0.03)
    assert spreads == sorted(spreads)
    assert model(kind("NEW", 2), 1).source == "fitted"


def test_what_datasheets_were_wrong_by_counts_half_elsewhere():
    """Twice as slow as predicted on one GPU: 1.4 times as slow on the third, which is unmeasured."""
    gpus = {**GPUS, "MID": replace(NEW, name="MID", bandwidth_gb_s=800)}
    before = known_steps(SMALL, gpus)
    told = before["NEW"].step.seconds(32)

    after = known_steps(SMALL, gpus, {"NEW": [Timing(32, 1, 1, 2 * told)]})

    assert after["MID"].step.sample_s == pytest.approx(math.sqrt(2) * before["MID"].step.sample_s)
    assert after["OLD"] == before["OLD"]


def test_a_larger_batch_trains_less_a_sample_where_noise_is_small():
    """Noise 1: a doubled batch makes 4/3 steps of progress, not 2."""
    assert replace(SMALL, noise=1.0).gain(128) == pytest.approx(4 / 3)
    assert SMALL.gain(128) == 2.0


def test_few_cpus_make_a_job_wait_for_its_input():
    """0.01 CPU seconds a sample: 4 vCPUs, one of them reserved for the GPU, read 300 samples a second."""
    model = job_model(replace(SMALL, input_cpu_s=0.01, step=Step(0.0001, 0.0001)), GPUS, batch=64)

    assert model(kind(vcpus=4.0), 1).mean == pytest.approx(300)
    assert model(kind(vcpus=8.0), 1).mean == pytest.approx(700)
    assert job_model(SMALL, GPUS, batch=64)(kind(gpus=4, vcpus=1.0), 1).mean == pytest.approx(
        job_model(SMALL, GPUS, batch=64)(kind(gpus=4), 1).mean / 4
    )


def test_memory_is_weights_gradients_optimiser_and_activations():
    """1e8 parameters x 16 bytes = 1.6 GB of 14.88 that can be used: 132 samples of 0.1 GB."""
    part = SMALL.footprint

    assert part.local_batch(16, 1) == pytest.approx(132.8)
    assert replace(part, is_sharded=True).static_bytes(8) == pytest.approx(0.2e9)
    assert part.local_batch(1, 1) == 0


def test_a_7b_full_fine_tune_is_not_put_on_a_t4():
    """112 GB of parameters and state do not fit on eight; its LoRA fits on one L4."""
    full, lora = job("llm-7b-full"), job("llm-7b-lora")
    t4 = InstanceType("aws", "g4dn.metal", 96, 384, "T4", 8, 16, "x86_64")
    l4, a100 = (
        t4._replace(gpu_name="L4", gpus=1, gpu_memory_gb=24),
        t4._replace(gpu_name="A100-80GB", gpu_memory_gb=80),
    )
    model = job_model(full, gpu_facts())

    assert (
        "llm-7b-full needs 16.1 GB on each of 8 GPUs, 14.9 of a T4 can be used" in model.misfit(t4, 1).reason
    )
    assert model(t4, 1) is None
    assert model.misfit(a100, 1) is None
    assert model(a100, 1).mean > 1000  # tokens a second
    assert job_model(lora, gpu_facts()).misfit(l4, 1) is None


def test_a_host_without_memory_for_its_gpus_is_refused():
    """Four processes do not start in 3.6 GiB."""
    host = InstanceType("gcp", "n1-highcpu-4", 4, 3.6, "T4", 4, 16)

    misfit = job_model(job("bert-base-finetune"), gpu_facts()).misfit(host, 1)

    assert misfit.reason == "has 3.6 GiB for the processes of 4 GPUs, which take 16"


def test_a_plan_with_a_job_compares_types_and_numbers():
    """The model that does not fit is rejected with its reason; nodes x type are alternatives (feature B4)."""
    rows = {
        InstanceType("aws", "g4dn.metal", 96, 384, "T4", 8, 16): [Row("r", usd=1.0)],
        InstanceType("aws", "p4de", 96, 1152, "A100-80GB", 8, 80): [Row("r", usd=27.0)],
        InstanceType("aws", "p5", 192, 2048, "H100", 8, 80): [Row("r", usd=55.0)],
    }
    model = job_model(job("llm-7b-full"), gpu_facts())
    how = Search(speed_of=model, misfit_of=model.misfit, explain=True)
    need = Requirements(gpus=1, max_nodes=2)

    got = search(need, build_table(rows), goal=Goal("cost"), knowledge=Knowledge(1e9, "tokens"), how=how)

    assert {item.allocation.name for item in got.candidates} >= {
        "aws/r/p4de/on-demand",
        "2 x aws/r/p4de/on-demand",
        "aws/r/p5/on-demand",
    }
    assert all(item.estimate.usd_low < item.estimate.usd < item.estimate.usd_high for item in got.candidates)
    assert "llm-7b-full needs" in next(r.reason for r in got.rejected if "g4dn" in r.allocation.name)


def test_an_hour_is_worth_the_cheapest_offer_that_holds_the_job():
    """The T4 machine at $1 does not count for a model that does not fit on it."""
    rows = {
        InstanceType("aws", "g4dn.metal", 96, 384, "T4", 8, 16): [Row("r", usd=1.0)],
        InstanceType("aws", "p4de", 96, 1152, "A100-80GB", 8, 80): [Row("r", usd=27.0)],
    }
    model = job_model(job("llm-7b-full"), gpu_facts())
    how = Search(speed_of=model, misfit_of=model.misfit)

    got = search(Requirements(gpus=1), build_table(rows), goal=Goal("balanced"), how=how)

    assert got.value_of_hour_usd == 27.0


def test_the_library_is_whole():
    """Every job runs on its own GPU, has a source, and round-trips through JSON unchanged."""
    assert set(jobs()) >= {"bert-base-finetune", "resnet50-imagenet", "gpt2-124m-train", "llm-7b-lora"}
    for item in jobs().values():
        facts = gpu_facts()[item.reference_gpu]
        eight = InstanceType("c", "t", 96, 1000, facts.name, 8, facts.memory_gb)
        assert item.source
        assert Job.from_dict(item.to_dict()) == item
        assert job_model(item, gpu_facts())(eight, 1).mean > 0
    with pytest.raises(SpecError, match="no job is named 'bert'; there are"):
        job("bert")


def test_every_gpu_of_the_library_has_the_memory_of_the_spec():
    """All packages use the same nominal figure."""
    from envscaler_airflow.envspec.gpus import MEMORY_GB

    assert {name: gpu.memory_gb for name, gpu in gpu_facts().items()} == {
        name: MEMORY_GB[name] for name in gpu_facts()
    }
