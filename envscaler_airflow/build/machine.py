"""What this machine has, as far as a stage asks for it."""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envscaler_airflow.backends.local.machine import Gpu, this_machine
from envscaler_airflow.backends.local.volumes import exists
from envscaler_airflow.build.builders import Docker
from envscaler_airflow.build.programs import find_program, run_program, uv_program
from envscaler_airflow.errors import SpecError

_QUERIES: dict[str, tuple[str, ...]] = {
    "dpkg-query": ("--show", "--showformat", "${db:Status-Status} ${Version}\n"),
    "rpm": ("--query", "--queryformat", "%{VERSION}-%{RELEASE}\n"),
    "apk": ("info", "--installed", "--verbose"),
}
"""How a system is asked for one package, by the program that knows."""


def has_variable(name: str) -> bool:
    """True when the environment has *name*."""
    return name in os.environ


def installed_versions(names: Sequence[str]) -> dict[str, str] | None:
    """Version of each of *names* that the system has installed; None when nobody can tell."""
    found = ((path, words) for program, words in _QUERIES.items() if (path := find_program(program)))
    path, words = next(found, (None, ()))
    if path is None:
        return None
    told = {name: run_program([path, *words, name]) for name in names}
    read = {name: _version(name, done.out) for name, done in told.items() if done.code == 0}
    return {name: version for name, version in read.items() if version is not None}


def _version(name: str, told: str) -> str | None:
    """Of ``installed 1:2.39``, ``2.39-1`` or ``name-2.39-r0``; None for what is configured away."""
    words = told.split()
    if len(words) > 1:
        return words[1] if words[0] == "installed" else None
    return words[0].removeprefix(f"{name}-") if words else None


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


def has_uv() -> bool:
    """True when uv is installed, by the extra ``build`` or otherwise."""
    try:
        uv_program()
    except SpecError:
        return False
    return True


def has_program(name: str) -> bool:
    """True when a program of that name is on the path."""
    return find_program(name) is not None


def python_of(version: str) -> str | None:
    """Path of a Python of that version, ``3.11``, this process's own first; None without one."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    return find_program(f"python{version}")


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
        installed_versions: Versions of the system packages that are there; None when no tool reports them.
        has_docker: Tells whether a docker daemon answers.
        has_uv: Tells whether uv is installed.
        has_program: Tells whether a program is on the path.
        python_of: Path of a Python of a version that is installed; None without one.
    """

    cpus: int
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    has_path: Callable[[str], bool] = field(default=exists)
    is_mounted: Callable[[str], bool] = field(default=os.path.ismount)
    has_variable: Callable[[str], bool] = field(default=has_variable)
    installed_versions: Callable[[Sequence[str]], dict[str, str] | None] = field(default=installed_versions)
    has_docker: Callable[[], bool] = field(default=has_docker)
    has_uv: Callable[[], bool] = field(default=has_uv)
    has_program: Callable[[str], bool] = field(default=has_program)
    python_of: Callable[[str], str | None] = field(default=python_of)

    def absent_packages(self, wanted: Sequence[str]) -> list[str] | None:
        """Those of *wanted* (``git``, ``git=1:2.39``, ``git=1:2.*``) that are not here; None: not known."""
        asked = {text: text.partition("=") for text in wanted}
        versions = self.installed_versions([name for name, _, _ in asked.values()])
        if versions is None:
            return None
        return [
            text
            for text, (name, _, version) in asked.items()
            if name not in versions or (version and not fnmatch.fnmatchcase(versions[name], version))
        ]


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
