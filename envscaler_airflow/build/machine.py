"""What this machine has, as far as a stage asks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.backends.local.machine import Gpu, this_machine
from envscaler_airflow.backends.local.volumes import exists
from envscaler_airflow.build.builders import Docker
from envscaler_airflow.build.programs import find_program, run_program


def has_variable(name: str) -> bool:
    """True when the environment has *name*."""
    return name in os.environ


def absent_packages(names: Sequence[str]) -> list[str] | None:
    """Those of *names* that the system does not have installed; None when nobody can tell."""
    asked = {
        "dpkg-query": ["--show", "--showformat", "${db:Status-Status}"],
        "rpm": ["--query"],
        "apk": ["info", "-e"],
    }
    for program, words in asked.items():
        path = find_program(program)
        if path is not None:
            done = {name: run_program([path, *words, name.partition("=")[0]]) for name in names}
            return [
                name
                for name, told in done.items()
                if told.code != 0 or (program == "dpkg-query" and told.out.strip() != "installed")
            ]
    return None


def driver_version() -> str | None:
    """Version of the GPU driver; None without one."""
    try:
        import pynvml  # noqa: PLC0415 (only where a driver may be)
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def has_docker() -> bool:
    """True when a docker daemon answers that can build."""
    program = find_program("docker")
    return program is not None and Docker(program).fault() is None


@dataclass(frozen=True, slots=True)
class Here:
    """This machine.

    Attributes:
        cpus: Cores that can be used.
        memory_bytes: Memory.
        disk_bytes: Free space where runs are laid out.
        gpus: GPUs that the driver shows.
        driver: Its version; None without one.
        family: Package manager; None when it is not known.
        has_path: Tells whether a path exists.
        is_mounted: Tells whether something is mounted at a path.
        has_variable: Tells whether the environment has a variable.
        absent_packages: Tells which system packages are not installed; None when nobody can tell.
        has_docker: Tells whether a docker daemon answers.
    """

    cpus: int
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    has_path: Callable[[str], bool] = field(default=exists)
    is_mounted: Callable[[str], bool] = field(default=os.path.ismount)
    has_variable: Callable[[str], bool] = field(default=has_variable)
    absent_packages: Callable[[Sequence[str]], list[str] | None] = field(default=absent_packages)
    has_docker: Callable[[], bool] = field(default=has_docker)


def look_here() -> Here:
    """Look at this machine."""
    machine = this_machine()
    return Here(
        cpus=len(machine.cpus),
        memory_bytes=machine.memory_bytes,
        disk_bytes=shutil.disk_usage("/var/tmp").free,  # noqa: S108 (where local runs are laid out)
        gpus=machine.gpus,
        driver=driver_version(),
    )
