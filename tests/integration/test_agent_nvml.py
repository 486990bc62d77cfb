"""GPU sampling through the real pynvml and a driver library that follows a script."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from fakes import nvml as fake

from envscaler_agent import gpu
from envscaler_agent.gpu import NEVER, READINGS, Gpus, load_nvml
from envscaler_agent.sampler import GpuThread

MIB = 1 << 20
BUSY = {"utilization_percent": 90, "memory_copy_utilization_percent": 40}
MEMORY = {"memory_used_bytes": 1 << 30, "memory_total_bytes": 80 << 30}
PLAIN = {
    **BUSY,
    **MEMORY,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 2619,
    "throttle_reasons": 4,
    "temperature_celsius": 60,
    "power_watts": 250.5,
    "energy_joules": 5,
    "pcie_transmit_bytes_per_s": 100_000,
    "pcie_receive_bytes_per_s": 101_000,
    "ecc_corrected_errors": 0,
    "ecc_uncorrected_errors": 0,
    "xid_errors": 0,
}
FUNCTIONS = {
    "utilization": "nvmlDeviceGetUtilizationRates",
    "memory": "nvmlDeviceGetMemoryInfo",
    "clocks": "nvmlDeviceGetClockInfo",
    "throttle": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "temperature": "nvmlDeviceGetTemperature",
    "power": "nvmlDeviceGetPowerUsage",
    "energy": "nvmlDeviceGetTotalEnergyConsumption",
    "pcie": "nvmlDeviceGetPcieThroughput",
    "nvlink": "nvmlDeviceGetFieldValues",
    "ecc": "nvmlDeviceGetTotalEccErrors",
}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library, built once."""
    if not os.environ.get("CI") and shutil.which("gcc") is None:
        pytest.skip("needs gcc; CI installs it")
    return fake.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library, tmp_path):
    """One GPU, until its script is replaced."""
    return fake.Driver(library, tmp_path / "gpus")


@pytest.fixture
def nvml(driver, monkeypatch):
    """The real pynvml on it."""
    return driver.load(monkeypatch)


def of(label, values):
    """Metrics of one device without their prefix."""
    return {name[len(label) + 1 :]: value for name, value in values.items() if name.startswith(label + "_")}


def own(label, values):
    """Metrics of a GPU without those of its instances."""
    return {name: value for name, value in of(label, values).items() if not name.startswith("mig")}


def test_reads_a_gpu_through_the_real_module(nvml):
    """Every struct, constant and unit as in nvml.h."""
    assert of("gpu0", Gpus(nvml).find().sample(0)) == PLAIN


def test_reads_eight_gpus(driver, nvml):
    """Each has its own numbers."""
    driver.say("gpus 8", "set power 5 300000")

    got = Gpus(nvml).find().sample(0)

    assert [got[f"gpu{index}_utilization_percent"] for index in range(8)] == [*range(90, 98)]
    assert got["gpu5_power_watts"] == 300
    assert got["gpu7_power_watts"] == 250.5


@pytest.mark.parametrize("code", [*range(1, 31), 999])
@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.key)
def test_one_failing_question_takes_only_its_own_numbers(driver, nvml, reading, code):
    """After any error its metrics are unknown, not 0; the others are known; then it is queried again."""
    driver.say("gpus 2", "set nvlink * 1000", f"fail {FUNCTIONS[reading.key]} 0 {code}")
    gpus = Gpus(nvml).find()
    before = gpus.sample(0)
    driver.say("gpus 2", "set nvlink * 9000", f"fail {FUNCTIONS[reading.key]} 0 {code}")
    failing = gpus.sample(10)
    driver.say("gpus 2", "set nvlink * 9000")
    gpus.sample(20)
    driver.say("gpus 2", "set nvlink * 9000")
    healed = gpus.sample(30)

    rates = dict.fromkeys(gpu.NAMES[-2:], 8000 * 1024 / 10)
    expected = {**PLAIN, **rates}
    for name in reading.names:
        del expected[name]
    assert {name: before["gpu0_" + name] for name in expected if name not in rates} == {
        name: value for name, value in expected.items() if name not in rates
    }
    assert of("gpu0", failing) == expected
    assert of("gpu1", failing) == {
        **PLAIN,
        **rates,
        "utilization_percent": 91,
    }
    assert (set(reading.names) <= set(of("gpu0", healed))) is (code not in NEVER)


@pytest.mark.parametrize("code", [*range(1, 31), 999])
def test_a_driver_that_does_not_start_is_no_error(driver, monkeypatch, nvml, code):
    """After that nothing is known of GPUs."""
    driver.say(f"fail nvmlInitWithFlags * {code}")

    assert load_nvml() is None


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceRegisterEvents",
        "nvmlEventSetCreate",
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
    ],
)
def test_a_failure_while_looking_for_gpus_loses_no_gpu(driver, nvml, function):
    """Only what depends on it is missing: events, instances or monitors."""
    driver.say("gpm 0", f"fail {function} * 999")

    got = of("gpu0", Gpus(nvml).find().sample(0))

    assert {name: value for name, value in got.items() if name != "xid_errors"} == {
        name: value for name, value in PLAIN.items() if name != "xid_errors"
    }


def test_a_gpu_that_cannot_be_opened_takes_no_other_with_it(driver, nvml):
    """GPU 0 has no metrics, rather than zeros."""
    driver.say("gpus 2", "fail nvmlDeviceGetHandleByIndex_v2 0 15")

    got = Gpus(nvml).find().sample(0)

    assert of("gpu0", got) == {}
    assert of("gpu1", got)["utilization_percent"] == 91


def test_a_gpu_that_falls_off_the_bus_is_unknown_and_said_why(driver, nvml):
    """XID 79 comes when a GPU no longer answers; it is counted for that GPU."""
    driver.say("gpus 2")
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    driver.say("gpus 2", "xid 1 79", "lost 1")
    got = gpus.sample(10)

    assert of("gpu1", got) == {"xid_errors": 1, "last_xid": 79}
    assert of("gpu0", got) == PLAIN


def test_no_count_is_said_while_events_cannot_be_waited_for(driver, nvml):
    """No observed event does not mean that none occurred; observed ones still count."""
    driver.say("gpus 2", "xid 1 48")
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    driver.say("gpus 2", "xid 1 48", "fail nvmlEventSetWait_v2 * 15")
    got = gpus.sample(1)

    assert "gpu0_xid_errors" not in got
    assert (got["gpu1_xid_errors"], got["gpu1_last_xid"]) == (1, 48)


def test_a_counter_that_begins_anew_leaves_no_old_rate(driver, nvml):
    """NVLink counters restart with the driver; the previous rate is not repeated."""
    rates = []
    gpus = Gpus(nvml).find()
    for now, count in ((0, 0), (10, 10_000), (20, 5), (30, 1005)):
        driver.say(f"set nvlink 0 {count}")
        rates.append(gpus.sample(now).get("gpu0_nvlink_receive_bytes_per_s"))

    assert rates == [None, 1000 * 1024, None, 100 * 1024]


def test_instances_of_a_cut_gpu_are_told_apart(driver, nvml):
    """Memory and monitors of each; the whole GPU has no utilisation in that case."""
    driver.say("mig 0 2", "gpm 0")
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    got = gpus.sample(1)

    assert of("gpu0_mig1", got) == {
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 10 << 30,
        "sm_active_percent": 1,
        "sm_occupancy_percent": 1.5,
        "tensor_active_percent": 2.5,
        "dram_active_percent": 5,
        "pcie_transmit_bytes_per_s": 10 * MIB,
        "pcie_receive_bytes_per_s": 10.5 * MIB,
        "nvlink_transmit_bytes_per_s": 30.5 * MIB,
        "nvlink_receive_bytes_per_s": 30 * MIB,
    }
    assert "gpu0_mig2_memory_used_bytes" not in got
    assert "gpu0_utilization_percent" not in got
    assert got["gpu0_sm_active_percent"] == 2


def test_only_the_instance_that_the_command_sees_counts(driver, nvml):
    """Found by its UUID; the GPU around it is reported as a whole."""
    driver.say("gpus 2", "mig 0 2")

    got = Gpus(nvml, visible="MIG-0-1").find().sample(0)

    assert {name.split("_memory")[0] for name in got if "memory_used" in name} == {"gpu0", "gpu0_mig1"}


def test_monitors_tell_what_is_busy_from_the_second_sample_on(driver, nvml):
    """Monitors compare two samples; PCIe and NVLink then come from them, without separate queries."""
    driver.say("gpm 0", "set nvlink 0 1000")
    gpus = Gpus(nvml).find()
    first, second = gpus.sample(0), gpus.sample(1)

    assert {name for name in gpu.NAMES if "gpu0_" + name in first} == {
        "pcie_transmit_bytes_per_s",
        "pcie_receive_bytes_per_s",
    }
    assert own("gpu0", second) == {
        **PLAIN,
        "sm_active_percent": 2,
        "sm_occupancy_percent": 3,
        "tensor_active_percent": 5,
        "dram_active_percent": 10,
        "pcie_transmit_bytes_per_s": 20 * MIB,
        "pcie_receive_bytes_per_s": 21 * MIB,
        "nvlink_transmit_bytes_per_s": 61 * MIB,
        "nvlink_receive_bytes_per_s": 60 * MIB,
    }
    assert "pcie" not in {reading.key for reading in gpus.devices[0].readings}


def test_a_monitor_without_an_answer_is_unknown_alone(driver, nvml):
    """Metric 5, tensor cores; NaN is invalid as well (20, PCIe), which is then queried as before."""
    driver.say("gpm 0", "metric 5 3", "set 20 0 nan")
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    got = gpus.sample(1)

    assert "gpu0_tensor_active_percent" not in got
    assert got["gpu0_sm_active_percent"] == 2
    assert got["gpu0_pcie_transmit_bytes_per_s"] == 100_000


def test_monitors_begin_anew_after_a_failure(driver, nvml):
    """A sample that was not taken is not compared."""
    gpus = None
    seen = []
    for now, trouble in enumerate(["", "", "fail nvmlGpmSampleGet 0 999", "", ""]):
        driver.say("gpm 0", trouble)
        gpus = gpus or Gpus(nvml).find()
        seen.append(gpus.sample(now).get("gpu0_sm_active_percent"))

    assert seen == [None, 2, None, None, 2]


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUUID"])
def test_a_call_that_hangs_is_named_and_left_out_by_the_next(driver, nvml, function):
    """The log names it while the driver blocks the thread; GPU 1 and the rest of GPU 0 are still read."""
    driver.say("gpus 2", f"hang {function} 0")
    now = [0.0]
    sick = GpuThread(interval_s=1, visible=None, skip=[], load=lambda: nvml, clock=lambda: now[0])
    thread = threading.Thread(target=sick.run, args=(lambda _: sick._gpus.devices.clear(),), daemon=True)
    thread.start()
    give_up = time.monotonic() + 10
    while (sick._gpus is None or sick._gpus.call is None) and time.monotonic() < give_up:
        time.sleep(0.01)
    give_up = time.monotonic() + 10
    named = None
    while named is None and time.monotonic() < give_up:
        now[0] += 1
        time.sleep(0.01)
        named = sick.hangs_at(now[0])
    assert thread.is_alive()

    got = Gpus(nvml, skip=[named]).find().sample(0)

    driver.say("gpus 2")
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert named == {"nvmlDeviceGetPowerUsage": "gpu0:power", "nvmlDeviceGetUUID": "gpu0:uuid"}[function]
    assert got["gpu0_utilization_percent"] == 90
    assert got["gpu1_power_watts"] == 250.5
    assert ("gpu0_power_watts" in got) is (named != "gpu0:power")


def test_a_gpu_on_which_two_questions_hung_is_left_alone(driver, nvml):
    """Each further query would delay all metrics by ten seconds."""
    driver.say("gpus 2")

    got = Gpus(nvml, skip=["gpu0:power", "gpu0:ecc"]).find().sample(0)

    assert of("gpu0", got) == {}
    assert of("gpu1", got)["power_watts"] == 250.5


TRAINING = """
import pathlib, sys, time
last = time.monotonic()
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
    now = time.monotonic()
    print(now - last, flush=True)
    last = now
"""


def wrapped(driver, folder, is_enough, **environ):
    """Metrics of a training that prints its delays of a twentieth of a second, until there are enough."""
    root, end = folder / "spool", folder / "end"
    root.mkdir()
    session = {"generation": 1, "attempt": 1, "sample_interval_s": 0.2}
    (root / "start.json").write_text(json.dumps({"schema": "2.0", "session": session}))
    agent = [sys.executable, "-m", "envscaler_agent", "run", "--spool", str(root), "--"]
    training = subprocess.Popen(
        [*agent, sys.executable, "-c", TRAINING, str(end)],
        env={**os.environ, **driver.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 60
    while not is_enough(metrics(root)) and training.poll() is None and time.monotonic() < give_up:
        time.sleep(0.1)
    end.touch()
    out, _ = training.communicate(timeout=20)
    assert training.returncode == 0
    return metrics(root), [float(line) for line in out.split()]


def metrics(root):
    """Samples so far, without an incomplete line."""
    try:
        text = b"".join(path.read_bytes() for path in sorted((root / "metrics").glob("0*")))
    except FileNotFoundError:  # a chunk was closed meanwhile
        return metrics(root)
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def has(name):
    """Whether any sample has a metric."""
    return lambda samples: any(name in sample for sample in samples)


def test_the_sampler_finds_the_driver_by_itself(driver, tmp_path):
    """In its own process below the wrapper, through the loader's path, as in any GPU image (feature C2)."""
    driver.say("gpus 3", "gpm 2")

    samples, _ = wrapped(driver, tmp_path, has("gpu2_sm_active_percent"), CUDA_VISIBLE_DEVICES="0,2")

    told = next(sample for sample in samples if "gpu2_sm_active_percent" in sample)
    assert {name.split("_")[0] for name in told if name.startswith("gpu")} == {"gpu0", "gpu2"}
    assert (told["gpu0_power_watts"], told["gpu2_sm_active_percent"]) == (250.5, 4)


def test_a_container_that_was_given_gpu_3_sees_it_as_gpu_0(driver, tmp_path):
    """The runtime names the host's GPU; the driver inside knows one GPU, number 0."""
    samples, _ = wrapped(driver, tmp_path, has("gpu0_power_watts"), NVIDIA_VISIBLE_DEVICES="3")

    assert has("gpu0_power_watts")(samples)


@pytest.mark.timeout(100)
def test_a_driver_that_hangs_stops_neither_training_nor_other_samples(driver, tmp_path):
    """Ten seconds of a stuck call: the training continues, and the machine is sampled all the time.

    After that the other GPU, and the rest of this one, are known, and the metric of the stuck query is not.
    """
    driver.say("gpus 2", "hang nvmlDeviceGetPowerUsage 0")

    samples, turns = wrapped(driver, tmp_path, has("gpu1_power_watts"))

    waited = [sample for sample in samples if "cpu_seconds" in sample and "gpu1_power_watts" not in sample]
    told = next(sample for sample in samples if "gpu1_power_watts" in sample)
    assert len(waited) > 20  # of 50 in ten seconds
    assert len(turns) > 50  # of 200
    assert (told["gpu0_utilization_percent"], told["gpu1_power_watts"]) == (90, 250.5)
    assert not has("gpu0_power_watts")(samples)


def test_a_machine_without_a_driver_is_sampled_without_gpus(driver, tmp_path):
    """A driver that does not load: no metrics of GPUs."""
    driver.say("fail nvmlInitWithFlags * 9")

    samples, _ = wrapped(driver, tmp_path, lambda found: len(found) > 5)

    assert has("cpu_seconds")(samples)
    assert [name for sample in samples for name in sample if name.startswith("gpu")] == []
