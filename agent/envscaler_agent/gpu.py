"""GPUs through NVML, if a driver and the ``pynvml`` module are present.

Every name below has the prefix ``gpu<index>_`` (``gpu0_mig1_`` for a MIG instance, which has memory and the
metrics of :class:`Gpm`). A metric is left out when the device does not provide it.

=================================== ==========================================================
metric                              meaning
=================================== ==========================================================
``utilization_percent``             share of time in which a kernel ran (DCGM_FI_DEV_GPU_UTIL)
``memory_copy_utilization_percent`` share of time in which memory was moved (.._MEM_COPY_UTIL)
``memory_used_bytes``               frame buffer in use, by anyone
``memory_total_bytes``              frame buffer
``sm_clock_mhz``                    clock of the multiprocessors
``memory_clock_mhz``                clock of the memory
``throttle_reasons``                bit mask of NVML's clocks throttle reasons, 0 for none
``temperature_celsius``             of the chip
``power_watts``                     drawn by the board
``energy_joules``                   since the driver was loaded
``pcie_transmit_bytes_per_s``       from the GPU to the host, over 20 ms
``pcie_receive_bytes_per_s``        from the host to the GPU, over 20 ms
``nvlink_transmit_bytes_per_s``     over all links, mean since the last reading
``nvlink_receive_bytes_per_s``      over all links, mean since the last reading
``ecc_corrected_errors``            since the driver was loaded
``ecc_uncorrected_errors``          since the driver was loaded
``xid_errors``                      critical XID events since the sampler began
``last_xid``                        number of the last one
=================================== ==========================================================

On GPUs with performance monitors (Hopper and later), :class:`Gpm` adds how busy the multiprocessors, tensor
cores and memory are, and replaces the PCIe and NVLink metrics above.

Source: NVML API reference (nvml.h) of driver 535 and newer; names after dcgm-exporter.
"""

from __future__ import annotations

import ctypes
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

MIB = 1024 * 1024
"""Unit of GPM's bandwidths. Source: nvml.h, NVML_GPM_METRIC_PCIE_TX_PER_SEC and the related metrics."""

METRICS = (
    ("sm_active_percent", "NVML_GPM_METRIC_SM_UTIL", 1),
    ("sm_occupancy_percent", "NVML_GPM_METRIC_SM_OCCUPANCY", 1),
    ("tensor_active_percent", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1),
    ("dram_active_percent", "NVML_GPM_METRIC_DRAM_BW_UTIL", 1),
    ("pcie_transmit_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    ("pcie_receive_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    ("nvlink_transmit_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    ("nvlink_receive_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
)
"""This package's name, NVML's constant, and the factor from NVML's unit."""
NAMES = tuple(name for name, _, _ in METRICS)

Values = Dict[str, float]


class Gpm:
    """The monitors of one GPU, or of one MIG instance: they compare an older sample with a newer one."""

    def __init__(self, nvml: Any, device: Any, instance: Optional[int] = None) -> None:
        """Prepare; *instance* is the GPU instance's id, *device* always the whole GPU.

        Raises:
            NVMLError: The driver has no such monitors.
        """
        self._nvml = nvml
        self._device = device
        self._instance = instance
        self._samples: List[Any] = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._has_older = False
        self._question, self._asked = _question(nvml)

    def read(self) -> Values:
        """Return the means since the last call; nothing at the first one.

        Raises:
            NVMLError: No sample could be taken; the next call starts from the beginning.
        """
        has_older, self._has_older = self._has_older, False
        older, newer = self._samples
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._device, newer)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._device, self._instance, newer)
        self._samples, self._has_older = [newer, older], True
        return self._compare(older, newer) if has_older else {}

    def _compare(self, older: Any, newer: Any) -> Values:
        question = self._question
        question.sample1, question.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(question)
        found = {}
        for index, (name, unit) in enumerate(self._asked):
            metric = question.metrics[index]
            if metric.nvmlReturn == 0 and math.isfinite(metric.value):
                found[name] = metric.value * unit
        return found


def open_gpm(nvml: Any, device: Any, instance: Optional[int] = None) -> Optional[Gpm]:
    """Return the monitors of a device, None if it has none.

    Raises:
        NVMLError: It is unknown.
        AttributeError: The module is older than GPM.
    """
    if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
        return None
    return Gpm(nvml, device, instance)


def _question(nvml: Any) -> Tuple[Any, List[Tuple[str, int]]]:
    """NVML's struct, filled in once, and the metric at each place of its answer."""
    question = nvml.c_nvmlGpmMetricsGet_t()
    question.version = nvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = len(METRICS)
    for index, (_, constant, _) in enumerate(METRICS):
        question.metrics[index].metricId = getattr(nvml, constant)
    return question, [(name, unit) for name, _, unit in METRICS]


SLOW_S = 5.0
"""Time between two readings of expensive metrics: PCIe blocks for 20 ms each (nvml.h). Chosen."""
NEVER = (3, 13)
"""``NVML_ERROR_NOT_SUPPORTED`` and ``NVML_ERROR_FUNCTION_NOT_FOUND``. Source: nvml.h."""
TIMEOUT = 10
"""``NVML_ERROR_TIMEOUT``: no event has come. Source: nvml.h."""
MOST_HANGS = 2
"""Calls about one GPU that may hang before no call is made for it. Chosen: one may be that call's fault, two
are the GPU's; each costs ten seconds without any GPU's numbers.
"""
ALL_LINKS = 0xFFFFFFFF
"""Scope of NVLink counters that means the sum of all links. Source: nvml.h, NVML_FI_DEV_NVLINK_*."""
KIB = 1024
"""Unit of NVLink counters. Source: nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_*."""
KB = 1000
"""Unit of PCIe throughput. Source: nvml.h, nvmlDeviceGetPcieThroughput."""


def load_nvml() -> Any:
    """Return the initialised ``pynvml`` module, None without the module or a driver."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and brought along only into GPU images

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a broken driver raises anything; then nothing is known of GPUs
        return None
    return pynvml


def shown_gpus(environ: Mapping[str, str]) -> Optional[str]:
    """Return which GPUs a command with *environ* sees, for :func:`is_visible`; None for all.

    ``NVIDIA_VISIBLE_DEVICES`` counts only where it has UUIDs: its numbers are the host's, and a container
    with GPU 3 sees it as GPU 0.
    """
    cuda, container = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if cuda is not None:
        return cuda
    return container if container.startswith(("GPU-", "MIG-")) else None


@dataclass(frozen=True)
class Reading:
    """One NVML call: *key* identifies it, *ask* returns the metrics *names*, those that it can read."""

    key: str
    every_s: float
    names: Tuple[str, ...]
    ask: Callable[[Any, Any], Values]


@dataclass
class Device:
    """One GPU, or one MIG instance of it."""

    label: str
    handle: Any
    readings: List[Reading]
    due: Dict[str, float] = field(default_factory=dict)
    counters: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    told: Dict[str, Values] = field(default_factory=dict)

    def values(self) -> Values:
        """Return what every reading returned at its last call, without what it did not return then."""
        found: Values = {}
        for values in self.told.values():
            found.update(values)
        return found

    def forget(self, reading: Reading) -> None:
        """Never call it again."""
        self.readings = [other for other in self.readings if other is not reading]
        self.told.pop(reading.key, None)

    def prefer(self, reading: Reading, values: Values) -> None:
        """Do not call others for metrics that *reading* also provides."""
        for other in list(self.readings):
            if other is not reading and set(other.names) <= set(values):
                self.forget(other)


class Gpus:
    """All GPUs that the command can see.

    Attributes:
        call: The call that NVML is processing, e.g. ``gpu0:power``, and since when; None in between. Another
            thread uses it to find the call that hangs.
        devices: The devices that were found.
        is_searched: True once the search is complete.
    """

    def __init__(
        self,
        nvml: Any,
        *,
        visible: Optional[str] = None,
        skip: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; :meth:`find` looks for the devices.

        Args:
            nvml: The module, initialised.
            visible: As in ``CUDA_VISIBLE_DEVICES``; None for all.
            skip: Calls that hung before.
            clock: Measures how long NVML processes a call.
        """
        self.call: Optional[Tuple[str, float]] = None
        self.devices: List[Device] = []
        self.is_searched = False
        self._nvml = nvml
        self._visible = visible
        self._skip: Set[str] = set(skip)
        self._clock = clock
        self._xids = _Xids(nvml)

    def find(self) -> Gpus:
        """Find the devices; one that does not answer does not affect the others."""
        for index in range(self._ask("gpu:count", "nvmlDeviceGetCount") or 0):
            self._add(index)
        self.is_searched = True
        return self

    def sample(self, now: float) -> Values:
        """Return the metrics of all devices; slow ones from their last reading."""
        found: Values = {}
        for device in self.devices:
            for reading in list(device.readings):
                if now >= device.due.get(reading.key, now):
                    device.due[reading.key] = now + reading.every_s
                    self._read(device, reading, now)
            found.update((f"{device.label}_{name}", value) for name, value in device.values().items())
        found.update(self._guarded("gpu:xid", self._xids.poll) or {})
        return found

    def _add(self, index: int) -> None:
        label = f"gpu{index}"
        handle = self._ask(f"{label}:handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is None or self._hangs(label) >= MOST_HANGS:
            return
        uuid = self._ask(f"{label}:uuid", "nvmlDeviceGetUUID", handle)
        instances = self._instances(label, handle)
        visible = self._visible
        if not is_visible(index, _text(uuid), visible, [_text(uuid) for _, _, uuid in instances]):
            return
        monitors = self._monitors(label, handle)
        self.devices.append(Device(label, handle, [*READINGS, *monitors]))
        self._guarded(f"{label}:xid", lambda: self._xids.watch(label, handle, _text(uuid)))
        for number, instance, own in instances:
            if is_visible(-1, _text(own), visible, []) or is_visible(index, "", visible, []):
                name = f"{label}_mig{number}"
                monitors = self._monitors(name, handle, instance)
                self.devices.append(Device(name, instance, [_MEMORY, *monitors]))

    def _hangs(self, label: str) -> int:
        """How many calls about a GPU, including its instances, hung before."""
        return sum(key.startswith((f"{label}:", f"{label}_")) for key in self._skip)

    def _instances(self, label: str, handle: Any) -> List[Tuple[int, Any, Any]]:
        key = f"{label}:mig"
        mode = self._ask(key, "nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != 1:
            return []
        found = []
        for number in range(self._ask(key, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._ask(key, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if instance is not None:
                found.append((number, instance, self._ask(key, "nvmlDeviceGetUUID", instance)))
        return found

    def _monitors(self, label: str, handle: Any, instance: Any = None) -> List[Reading]:
        """The reading of performance monitors, empty without any."""

        def open_them() -> Optional[Gpm]:
            number = None if instance is None else self._nvml.nvmlDeviceGetGpuInstanceId(instance)
            return open_gpm(self._nvml, handle, number)

        found = self._guarded(f"{label}:gpm", open_them)
        return [] if found is None else [Reading("gpm", 0.0, NAMES, lambda _nvml, _handle: found.read())]

    def _read(self, device: Device, reading: Reading, now: float) -> None:
        key = f"{device.label}:{reading.key}"
        if key in self._skip:
            device.forget(reading)
            return
        self.call = (key, self._clock())
        try:
            values = _rates(device, reading.ask(self._nvml, device.handle), now)
        except AttributeError:  # an older module without it
            device.forget(reading)
        except self._nvml.NVMLError as err:
            device.told[reading.key] = {}
            if getattr(err, "value", None) in NEVER:
                device.forget(reading)
        else:
            device.told[reading.key] = values
            if reading.key == "gpm":
                device.prefer(reading, values)
        finally:
            self.call = None

    def _ask(self, key: str, name: str, *arguments: Any) -> Any:
        """Call the NVML function *name*, guarded; an older module may not have it."""
        return self._guarded(key, lambda: getattr(self._nvml, name)(*arguments))

    def _guarded(self, key: str, call: Callable[[], Any]) -> Any:
        """Return the result of *call*, None when it fails or hung before."""
        if key in self._skip:
            return None
        self.call = (key, self._clock())
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError):
            return None
        finally:
            self.call = None


def is_visible(index: int, uuid: str, visible: Optional[str], instances: Sequence[str]) -> bool:
    """Return whether CUDA would use the GPU: *visible* lists indexes, or UUIDs and their prefixes.

    A GPU is also visible when one of its MIG *instances* is. A value that cannot be parsed shows all.
    """
    if visible is None or visible.strip() in ("all", ""):
        return visible is None or visible.strip() == "all"
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if names in (["void"], ["none"], ["-1"]):
        return False
    if not all(name.isdigit() or name.startswith(("GPU-", "MIG-")) for name in names):
        return True
    own = [uuid, *instances]
    return any(
        name == str(index) if name.isdigit() else any(each.startswith(name) for each in own) for name in names
    )


class _Xids:
    """Critical errors as events: NVML does not count them."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._values: Values = {}
        self._labels: List[Tuple[str, Any, str]] = []

    def watch(self, label: str, handle: Any, uuid: str) -> bool:
        nvml = self._nvml
        if self._events is None:
            self._events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        self._values[f"{label}_xid_errors"] = 0.0
        self._labels.append((label, handle, uuid))
        return True

    def poll(self) -> Values:
        """Return the counts; takes no time when there is no event.

        While waiting for events fails, a count of zero means unknown; a larger count remains valid.
        """
        while self._labels:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as err:
                if getattr(err, "value", None) != TIMEOUT:
                    return {name: value for name, value in self._values.items() if value}
                break
            label = self._label(event.device)
            if label is not None:
                self._values[f"{label}_xid_errors"] += 1
                self._values[f"{label}_last_xid"] = float(event.eventData)
        return dict(self._values)

    def _label(self, device: Any) -> Optional[str]:
        """The GPU of an event. By the handle first: a GPU that fell off the bus has no readable UUID."""
        for label, handle, _ in self._labels:
            if _address(handle) == _address(device):
                return label
        try:
            uuid = _text(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            return None
        return next((label for label, _, known in self._labels if known and known == uuid), None)


def _address(handle: Any) -> Optional[int]:
    """The address in a handle: two handles of one GPU are different Python objects."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(uuid: Any) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid or ""


def _rates(device: Device, values: Values, now: float) -> Values:
    """Turn counters (``counted:<name>``) into rates since the last reading."""
    found = {}
    for name, value in values.items():
        if not name.startswith("counted:"):
            found[name] = value
            continue
        before = device.counters.get(name)
        device.counters[name] = (now, value)
        if before is not None and now > before[0] and value >= before[1]:
            found[name[len("counted:") :]] = (value - before[1]) / (now - before[0])
    return found


def _utilization(nvml: Any, handle: Any) -> Values:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"utilization_percent": float(rates.gpu), "memory_copy_utilization_percent": float(rates.memory)}


def _memory(nvml: Any, handle: Any) -> Values:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def _clocks(nvml: Any, handle: Any) -> Values:
    return {
        "sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
    }


def _throttle(nvml: Any, handle: Any) -> Values:
    return {"throttle_reasons": float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))}


def _temperature(nvml: Any, handle: Any) -> Values:
    return {"temperature_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}


def _power(nvml: Any, handle: Any) -> Values:
    return {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _energy(nvml: Any, handle: Any) -> Values:
    return {"energy_joules": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000}


def _pcie(nvml: Any, handle: Any) -> Values:
    sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"pcie_transmit_bytes_per_s": float(sent * KB), "pcie_receive_bytes_per_s": float(received * KB)}


def _nvlink(nvml: Any, handle: Any) -> Values:
    fields = {
        "nvlink_transmit_bytes_per_s": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "nvlink_receive_bytes_per_s": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    }
    answers = nvml.nvmlDeviceGetFieldValues(handle, [(number, ALL_LINKS) for number in fields.values()])
    return {
        f"counted:{name}": float(answer.value.ullVal * KIB)
        for name, answer in zip(fields, answers)
        if answer.nvmlReturn == 0
    }


def _ecc(nvml: Any, handle: Any) -> Values:
    def count(kind: int) -> float:
        return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))

    return {
        "ecc_corrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


_MEMORY = Reading("memory", 0.0, ("memory_used_bytes", "memory_total_bytes"), _memory)
READINGS = (
    Reading("utilization", 0.0, ("utilization_percent", "memory_copy_utilization_percent"), _utilization),
    _MEMORY,
    Reading("clocks", 0.0, ("sm_clock_mhz", "memory_clock_mhz"), _clocks),
    Reading("throttle", SLOW_S, ("throttle_reasons",), _throttle),
    Reading("temperature", SLOW_S, ("temperature_celsius",), _temperature),
    Reading("power", 0.0, ("power_watts",), _power),
    Reading("energy", SLOW_S, ("energy_joules",), _energy),
    Reading("pcie", SLOW_S, ("pcie_transmit_bytes_per_s", "pcie_receive_bytes_per_s"), _pcie),
    Reading("nvlink", SLOW_S, ("nvlink_transmit_bytes_per_s", "nvlink_receive_bytes_per_s"), _nvlink),
    Reading("ecc", SLOW_S, ("ecc_corrected_errors", "ecc_uncorrected_errors"), _ecc),
)
"""All readings, each separate: one that fails or hangs does not affect the others."""
