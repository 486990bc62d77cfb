"""The identity and the resources of this machine."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envscaler_airflow.catalog.accelerators import canonical_gpu, nominal_memory_gb
from envscaler_airflow.planning.record import Record

GIB = float(1 << 30)
USABLE_MEMORY = 0.9
"""Fraction of the memory that is offered in shares. Chosen: the rest is for the system and Airflow."""

_UNLIMITED = 1 << 60
"""cgroup v1 represents "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class Identity(Record):
    """Which machine, boot and process table a process id belongs to.

    Attributes:
        host: Host name.
        machine_id: Id of the installed system; ``""`` when it has none.
        boot_id: Id of this boot; ``""`` when the system does not say.
        pid_namespace: Id of the process table of the process ids; ``""`` when there is only one.
    """

    host: str
    machine_id: str = ""
    boot_id: str = ""
    pid_namespace: str = ""

    def is_same_host(self, other: Identity) -> bool:
        """True when both are known to be the same installed system."""
        return self.host == other.host and self.machine_id == other.machine_id


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine.

    Attributes:
        index: Its number for CUDA_VISIBLE_DEVICES in PCI order.
        name: Canonical name.
        memory_gb: Nominal memory, GB.
    """

    index: int
    name: str
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that are offered here.

    Attributes:
        cpus: CPUs that this process may use, by their numbers.
        memory_bytes: Memory of the machine, or of the container that this process is in.
        gpus: GPUs that the driver shows.
        arch: ``x86_64`` or ``arm64``.
        identity: See :class:`Identity`.
        driver: Version of the GPU driver; None without one.
    """

    cpus: tuple[int, ...]
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    arch: str = "x86_64"
    identity: Identity = Identity("")
    driver: str | None = None

    def __post_init__(self) -> None:
        """Refuse a machine without CPUs or memory."""
        if not self.cpus or self.memory_bytes <= 0:
            raise ValueError(f"a machine has CPUs and memory, got {self.cpus!r}, {self.memory_bytes!r}")

    @property
    def usable_memory_bytes(self) -> int:
        """Memory for all shares together."""
        return int(self.memory_bytes * USABLE_MEMORY)


@cache
def this_machine() -> Machine:
    """This machine's resources, read once per process."""
    gpus, driver = _gpus()
    return Machine(
        cpus=_cpus(),
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        driver=driver,
        arch="arm64" if platform.machine() in ("arm64", "aarch64") else "x86_64",
        identity=this_identity(),
    )


def this_identity() -> Identity:
    """Host, boot and PID namespace of this process."""
    return Identity(
        host=socket.gethostname(),
        machine_id=_text("/etc/machine-id"),
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _cpus() -> tuple[int, ...]:
    """CPUs of this process's affinity, no more than a container's quota allows."""
    if hasattr(os, "sched_getaffinity"):
        cpus = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cpus = tuple(range(os.cpu_count() or 1))
    quota = _cpu_quota()
    return cpus[: max(1, round(quota))] if quota is not None else cpus


def _cpu_quota() -> float | None:
    text = _text("/sys/fs/cgroup/cpu.max")
    if text and not text.startswith("max"):
        quota, period = text.split()
        return int(quota) / int(period)
    quota, period = (_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{part}_us") for part in ("quota", "period"))
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _memory_bytes() -> int:
    import psutil  # noqa: PLC0415  # only where stages run as processes

    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(path)
        if text.isdigit() and 0 < int(text) < _UNLIMITED:
            total = min(total, int(text))
    return total


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """What NVML shows, and the driver's version; none without a driver."""
    import pynvml  # noqa: PLC0415  # slow; only needed to detect GPUs

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None
    try:
        found = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return found, _said(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return (), None
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    total_gb = nvml.nvmlDeviceGetMemoryInfo(device).total / 1e9
    name = canonical_gpu(_said(nvml.nvmlDeviceGetName(device)), total_gb)
    return Gpu(index, name, nominal_memory_gb(name, total_gb))


def _said(text: bytes | str) -> str:
    """Text of NVML, which older versions of its package return as bytes."""
    return text.decode() if isinstance(text, bytes) else text
