"""Unit tests of GPU sampling against a scripted NVML: a failing or hanging call affects no other."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from envscaler_agent import gpu
from envscaler_agent.gpu import Gpus, is_visible, shown_gpus
from envscaler_agent.sampler import CALL_S, INIT_S, STALE_S, GpuThread


class NVMLError(Exception):
    """The error that pynvml raises."""

    def __init__(self, value):
        """Take NVML's error number."""
        super().__init__(value)
        self.value = value


class Nvml:
    """Two GPUs with recognizable numbers; *broken* maps a function to an NVML error number."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVML's name

    def __init__(self, *, count=2, mig=0, broken=None):
        """Make *count* GPUs, the first one split into *mig* instances."""
        self.count, self.mig = count, mig
        self.broken = broken or {}
        self.calls = []
        self.links = 0
        self.xids = []

    def __getattr__(self, name):
        """Answer a call, or raise what it is scripted to raise."""
        answer = self.answers().get(name)
        if answer is None:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.broken:
                raise NVMLError(self.broken[name])
            return answer(*arguments)

        return call

    def answers(self):
        """Return the answer of each function."""
        return {
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"MIG-{handle}" if handle >= 10 else f"GPU-{handle}",
            "nvmlDeviceGetMigMode": lambda handle: [int(self.mig > 0 and handle == 0), 0],
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=90 + handle, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2**30, total=2**34),
            "nvmlDeviceGetClockInfo": lambda handle, kind: 1000 * kind,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4,
            "nvmlDeviceGetTemperature": lambda handle, kind: 60,
            "nvmlDeviceGetPowerUsage": lambda handle: 250_500,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 5_000,
            "nvmlDeviceGetPcieThroughput": lambda handle, way: 100 + way,
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, which: kind,
            "nvmlEventSetCreate": lambda: "set",
            "nvmlDeviceRegisterEvents": lambda handle, kind, events: None,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.instance,
            "nvmlDeviceGetFieldValues": self.fields,
            "nvmlEventSetWait_v2": self.wait,
        }

    def instance(self, handle, number):
        """Return instances at the first places, and none after."""
        if number >= self.mig:
            raise NVMLError(6)
        return 10 + number

    def fields(self, handle, fields):
        """Return a counter in KiB for each field."""
        assert [scope for _, scope in fields] == [gpu.ALL_LINKS] * 2
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.links)) for _ in fields]

    def wait(self, events, timeout_ms):
        """Return the next event, or time out."""
        if not self.xids:
            raise NVMLError(10)
        handle, number = self.xids.pop(0)
        return SimpleNamespace(device=handle, eventData=number)


def first(values):
    """Return the metrics of GPU 0 without their prefix."""
    return {name[5:]: value for name, value in values.items() if name.startswith("gpu0_")}


def test_reads_what_a_gpu_tells():
    """Units: bytes, MHz, degrees, watts, joules; rates are unknown at the first reading."""
    got = first(Gpus(Nvml()).find().sample(0))

    assert got == {
        "utilization_percent": 90,
        "memory_copy_utilization_percent": 40,
        "memory_used_bytes": 2**30,
        "memory_total_bytes": 2**34,
        "sm_clock_mhz": 1000,
        "memory_clock_mhz": 2000,
        "throttle_reasons": 4,
        "temperature_celsius": 60,
        "power_watts": 250.5,
        "energy_joules": 5,
        "pcie_transmit_bytes_per_s": 100_000,
        "pcie_receive_bytes_per_s": 101_000,
        "ecc_corrected_errors": 0,
        "ecc_uncorrected_errors": 1,
        "xid_errors": 0,
    }


def test_every_metric_is_in_the_table():
    """Users read the table in the docstring."""
    nvml = Nvml()
    gpus = Gpus(nvml).find()
    gpus.sample(0)
    nvml.xids = [(0, 79)]
    nvml.links = 1

    named = set(re.findall(r"^``(\w+)``", gpu.__doc__, re.MULTILINE))

    assert set(first(gpus.sample(10))) == named


def test_nvlink_counters_become_rates():
    """1000 KiB in ten seconds."""
    nvml = Nvml()
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    nvml.links = 1000

    assert first(gpus.sample(10))["nvlink_transmit_bytes_per_s"] == 102_400


def test_every_gpu_is_read():
    """GPU 1 is busier."""
    got = Gpus(Nvml()).find().sample(0)

    assert (got["gpu0_utilization_percent"], got["gpu1_utilization_percent"]) == (90, 91)


def test_what_is_not_supported_is_asked_once():
    """Error 3 is permanent; everything else is still read."""
    nvml = Nvml(broken={"nvmlDeviceGetPowerUsage": 3})
    gpus = Gpus(nvml).find()

    for now in range(5):
        got = gpus.sample(now)

    assert "gpu0_power_watts" not in got
    assert got["gpu0_utilization_percent"] == 90
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 2  # once for each GPU


def test_what_fails_now_is_unknown_now_and_asked_again():
    """Error 15, the GPU is lost: the sampler repeats no old number."""
    nvml = Nvml()
    gpus = Gpus(nvml).find()
    gpus.sample(0)

    nvml.broken["nvmlDeviceGetUtilizationRates"] = 15
    assert "gpu0_utilization_percent" not in gpus.sample(1)

    del nvml.broken["nvmlDeviceGetUtilizationRates"]
    assert gpus.sample(2)["gpu0_utilization_percent"] == 90


def test_costly_questions_are_asked_less_often():
    """PCIe blocks for 20 ms: every 5 s; utilization every second."""
    nvml = Nvml(count=1)
    gpus = Gpus(nvml).find()

    for now in range(10):
        gpus.sample(now)

    assert nvml.calls.count("nvmlDeviceGetUtilizationRates") == 10
    assert nvml.calls.count("nvmlDeviceGetPcieThroughput") == 2 * 2


def test_an_older_module_is_no_error():
    """The sampler calls a function that pynvml lacks only once."""

    class Old(Nvml):
        """An NVML without energy counters."""

        def answers(self):
            """Return every answer but that one."""
            return {name: call for name, call in super().answers().items() if "Energy" not in name}

    got = Gpus(Old()).find().sample(0)

    assert "gpu0_energy_joules" not in got
    assert got["gpu0_power_watts"] == 250.5


def test_critical_errors_are_counted_for_their_gpu():
    """XID 79 twice and 48 once on GPU 1."""
    nvml = Nvml()
    gpus = Gpus(nvml).find()
    nvml.xids = [(1, 79), (1, 79), (1, 48)]

    gpus.sample(0)
    got = gpus.sample(1)

    assert nvml.calls.count("nvmlDeviceRegisterEvents") == 2
    assert nvml.calls.count("nvmlEventSetCreate") == 1
    assert (got["gpu0_xid_errors"], got["gpu1_xid_errors"], got["gpu1_last_xid"]) == (0, 3, 48)


def test_mig_instances_have_memory():
    """Two instances of GPU 0, and the GPU as a whole."""
    got = Gpus(Nvml(mig=2)).find().sample(0)

    assert got["gpu0_mig1_memory_used_bytes"] == 2**30
    assert "gpu0_mig2_memory_used_bytes" not in got
    assert "gpu0_mig1_utilization_percent" not in got


def test_questions_that_hung_are_left_out():
    """GPU 0's power query hung in the previous child, so the sampler skips it."""
    nvml = Nvml()

    got = Gpus(nvml, skip=["gpu0:power"]).find().sample(0)

    assert "gpu0_power_watts" not in got
    assert got["gpu1_power_watts"] == 250.5
    assert got["gpu0_utilization_percent"] == 90


def test_no_gpu_is_no_error():
    """A driver without devices."""
    assert Gpus(Nvml(count=0)).find().sample(0) == {}
    assert Gpus(Nvml(broken={"nvmlDeviceGetCount": 999})).find().sample(0) == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, True),
        ("all", True),
        ("1,0", True),
        ("1", False),
        ("", False),
        ("-1", False),
        ("void", False),
        ("GPU-aaa", True),
        ("GPU-b", False),
        ("MIG-xyz", True),
        ("MIG-nnn", False),
        ("what is this", True),
    ],
)
def test_only_gpus_that_the_command_sees_count(visible, expected):
    """GPU 0 with UUID GPU-aaab and one instance MIG-xyz."""
    assert is_visible(0, "GPU-aaab", visible, ["MIG-xyz"]) is expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "all"}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "3"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-a,GPU-b"),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-a"}, "MIG-a"),
    ],
)
def test_numbers_of_the_host_mean_nothing_in_a_container(environ, expected):
    """CUDA's own list counts; the container runtime's list counts only by UUID."""
    assert shown_gpus(environ) == expected


def test_real_nvml_knows_every_name():
    """nvidia-ml-py has each function and constant of the module, and its error class has ``value``."""
    import pynvml

    source = Path(gpu.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", source)) | set(re.findall(r'"(nvml[A-Z]\w+)"', source))

    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert pynvml.NVMLError(gpu.NEVER[0]).value == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert gpu.NEVER[1] == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_without_a_driver_nothing_is_known():
    """This machine may have none; then the module is missing, without an exception."""
    thread = GpuThread(interval_s=1, visible=None, skip=[], load=lambda: None)

    thread.run(sleep=pytest.fail)

    assert thread.values(1e9) == {}
    assert thread.hangs_at(1e9) is None


def test_a_call_that_hangs_is_named_after_ten_seconds():
    """Ten seconds for one call: a round of many slow calls does not count.

    After it returned, none is named.
    """
    thread = GpuThread(interval_s=1, visible=None, skip=[], load=Nvml, clock=lambda: 0.0)
    thread._gpus = Gpus(Nvml()).find()

    thread._gpus.call = ("gpu0:power", 100.0)
    assert thread.hangs_at(100 + CALL_S) is None
    assert thread.hangs_at(100 + CALL_S + 0.1) == "gpu0:power"

    thread._gpus.call = None
    assert thread.hangs_at(1e9) is None


def test_a_gpu_that_never_opens_is_named_after_a_minute():
    """The GPU, not the driver: the next sampler reads the others."""
    thread = GpuThread(interval_s=1, visible=None, skip=[], load=Nvml, clock=lambda: 0.0)
    thread._gpus = Gpus(Nvml())

    thread._gpus.call = ("gpu1:handle", 0.0)

    assert thread.hangs_at(INIT_S) is None
    assert thread.hangs_at(INIT_S + 1) == "gpu1:handle"
    assert [device.label for device in Gpus(Nvml(), skip=["gpu1:handle"]).find().devices] == ["gpu0"]


def test_a_driver_that_never_loads_is_named_after_a_minute():
    """Then this attempt has no GPUs."""
    thread = GpuThread(interval_s=1, visible=None, skip=[], load=Nvml, clock=lambda: 0.0)

    assert thread.hangs_at(INIT_S) is None
    assert thread.hangs_at(INIT_S + 1) == "gpu:init"

    again = GpuThread(interval_s=1, visible=None, skip=["gpu:init"], load=pytest.fail, clock=lambda: 0.0)
    again.start()
    assert again.hangs_at(1e9) is None


def test_old_values_are_not_repeated():
    """A sample from half a minute ago is not current."""
    now = [0.0]
    nvml = Nvml(count=1)
    thread = GpuThread(interval_s=1, visible=None, skip=[], load=lambda: nvml, clock=lambda: now[0])

    def stop(_):
        thread._gpus.devices.clear()

    thread.run(stop)

    assert thread.values(1.0)["gpu0_utilization_percent"] == 90
    assert thread.values(STALE_S) == {}
