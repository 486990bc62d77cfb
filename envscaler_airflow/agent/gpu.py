"""GPUs through NVML, where a driver and the ``pynvml`` module are there.

Every name below has ``gpu<index>_`` in front (``gpu0_mig1_`` for a MIG instance, which has memory
only). Each is left out when the device cannot tell it.

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
``nvlink_receive_bytes_per_s``      likewise
``ecc_corrected_errors``            since the driver was loaded
``ecc_uncorrected_errors``          likewise
``xid_errors``                      critical XID events since the sampler began
``last_xid``                        number of the last one
=================================== ==========================================================

Source: NVML API reference (nvml.h) of driver 535 and newer; names after dcgm-exporter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

SLOW_S = 5.0
"""Between two readings of what costs more: PCIe blocks for 20 ms each (nvml.h). Chosen."""
NEVER = (3, 13)
"""``NVML_ERROR_NOT_SUPPORTED`` and ``NVML_ERROR_FUNCTION_NOT_FOUND``. Source: nvml.h."""
ALL_LINKS = 0xFFFFFFFF
"""Scope of NVLink counters that means the sum of all links. Source: nvml.h, NVML_FI_DEV_NVLINK_*."""
KIB = 1024
"""Unit of NVLink counters. Source: nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_*."""
KB = 1000
"""Unit of PCIe throughput. Source: nvml.h, nvmlDeviceGetPcieThroughput."""

Values = Dict[str, float]


def load_nvml() -> Any:
    """Return the initialised ``pynvml`` module, None where there is no module or no driver."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and brought along only into GPU images

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a broken driver raises anything; then nothing is known of GPUs
        return None
    return pynvml


@dataclass(frozen=True)
class Reading:
    """One NVML question: *key* names it, *ask* gives metrics without their prefix."""

    key: str
    every_s: float
    ask: Callable[[Any, Any], Values]


@dataclass
class Device:
    """One GPU, or one MIG instance of it."""

    label: str
    handle: Any
    readings: List[Reading]
    due: Dict[str, float] = field(default_factory=dict)
    counters: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    values: Values = field(default_factory=dict)

    def forget(self, reading: Reading) -> None:
        """Never ask it again."""
        self.readings = [other for other in self.readings if other is not reading]


class Gpus:
    """All GPUs that the command can see.

    Attributes:
        doing: The question that NVML is working on, e.g. ``gpu0:power``; "" in between. Another
            thread tells by it which question hangs.
    """

    def __init__(self, nvml: Any, *, visible: Optional[str] = None, skip: Sequence[str] = ()) -> None:
        """Find the devices.

        Args:
            nvml: The module, initialised.
            visible: As ``CUDA_VISIBLE_DEVICES`` says it; None for all.
            skip: Questions that hung before.
        """
        self.doing = ""
        self._nvml = nvml
        self._skip: Set[str] = set(skip)
        self._xids = _Xids(nvml)
        self.devices: List[Device] = []
        for index in range(self._ask("gpu:count", "nvmlDeviceGetCount") or 0):
            self._add(index, visible)

    def sample(self, now: float) -> Values:
        """Return the metrics of all devices; slow ones as they were last read."""
        found: Values = {}
        for device in self.devices:
            for reading in list(device.readings):
                if now >= device.due.get(reading.key, now):
                    device.due[reading.key] = now + reading.every_s
                    self._read(device, reading, now)
            found.update((f"{device.label}_{name}", value) for name, value in device.values.items())
        found.update(self._guarded("gpu:xid", self._xids.poll) or {})
        return found

    def _add(self, index: int, visible: Optional[str]) -> None:
        label = f"gpu{index}"
        handle = self._ask(f"{label}:handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return
        uuid = self._ask(f"{label}:uuid", "nvmlDeviceGetUUID", handle)
        instances = self._instances(label, handle)
        if not is_visible(index, _text(uuid), visible, [_text(uuid) for _, _, uuid in instances]):
            return
        self.devices.append(Device(label, handle, list(READINGS)))
        self._guarded(f"{label}:xid", lambda: self._xids.watch(label, handle))
        for number, instance, uuid in instances:
            if is_visible(-1, _text(uuid), visible, []) or is_visible(index, "", visible, []):
                self.devices.append(Device(f"{label}_mig{number}", instance, [_MEMORY]))

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

    def _read(self, device: Device, reading: Reading, now: float) -> None:
        key = f"{device.label}:{reading.key}"
        if key in self._skip:
            device.forget(reading)
            return
        self.doing = key
        try:
            values = reading.ask(self._nvml, device.handle)
        except AttributeError:  # an older module that does not know it
            device.forget(reading)
        except self._nvml.NVMLError as err:
            if getattr(err, "value", None) in NEVER:
                device.forget(reading)
            for name in _NAMES[reading.key]:
                device.values.pop(name, None)
        else:
            device.values.update(_rates(device, values, now))
        finally:
            self.doing = ""

    def _ask(self, key: str, name: str, *arguments: Any) -> Any:
        """Call the NVML function *name*, guarded; an older module may not have it."""
        return self._guarded(key, lambda: getattr(self._nvml, name)(*arguments))

    def _guarded(self, key: str, call: Callable[[], Any]) -> Any:
        """Return what *call* returns, None when it fails or hung before."""
        if key in self._skip:
            return None
        self.doing = key
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError):
            return None
        finally:
            self.doing = ""


def is_visible(index: int, uuid: str, visible: Optional[str], instances: Sequence[str]) -> bool:
    """Tell whether CUDA would use the GPU: *visible* lists indexes, or UUIDs and beginnings of them.

    A GPU is seen too when one of its MIG *instances* is. What cannot be understood shows all.
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
    """Critical errors as events: NVML keeps no count of them."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._values: Values = {}
        self._labels: List[Tuple[str, Any]] = []

    def watch(self, label: str, handle: Any) -> bool:
        nvml = self._nvml
        if self._events is None:
            self._events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        self._values[f"{label}_xid_errors"] = 0.0
        self._labels.append((label, nvml.nvmlDeviceGetUUID(handle)))
        return True

    def poll(self) -> Values:
        """Return the counts; takes no time when there is no event."""
        while self._labels:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # NVML_ERROR_TIMEOUT: none
                break
            label = self._label(event)
            self._values[f"{label}_xid_errors"] = self._values.get(f"{label}_xid_errors", 0.0) + 1
            self._values[f"{label}_last_xid"] = float(event.eventData)
        return dict(self._values)

    def _label(self, event: Any) -> str:
        if len(self._labels) > 1:
            uuid = self._nvml.nvmlDeviceGetUUID(event.device)
            for label, known in self._labels:
                if known == uuid:
                    return label
        return self._labels[0][0]


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
        for name, answer in zip(fields, answers)  # noqa: B905 - Python 3.8 has no strict=
        if answer.nvmlReturn == 0
    }


def _ecc(nvml: Any, handle: Any) -> Values:
    def count(kind: int) -> float:
        return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))

    return {
        "ecc_corrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


_MEMORY = Reading("memory", 0.0, _memory)
READINGS = (
    Reading("utilization", 0.0, _utilization),
    _MEMORY,
    Reading("clocks", 0.0, _clocks),
    Reading("throttle", SLOW_S, _throttle),
    Reading("temperature", SLOW_S, _temperature),
    Reading("power", 0.0, _power),
    Reading("energy", SLOW_S, _energy),
    Reading("pcie", SLOW_S, _pcie),
    Reading("nvlink", SLOW_S, _nvlink),
    Reading("ecc", SLOW_S, _ecc),
)
"""All questions, each on its own: one that fails or hangs takes no other with it."""
_NAMES = {
    "utilization": ("utilization_percent", "memory_copy_utilization_percent"),
    "memory": ("memory_used_bytes", "memory_total_bytes"),
    "clocks": ("sm_clock_mhz", "memory_clock_mhz"),
    "throttle": ("throttle_reasons",),
    "temperature": ("temperature_celsius",),
    "power": ("power_watts",),
    "energy": ("energy_joules",),
    "pcie": ("pcie_transmit_bytes_per_s", "pcie_receive_bytes_per_s"),
    "nvlink": ("nvlink_transmit_bytes_per_s", "nvlink_receive_bytes_per_s"),
    "ecc": ("ecc_corrected_errors", "ecc_uncorrected_errors"),
}
