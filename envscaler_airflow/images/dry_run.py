"""A dry run: what a machine or a cluster lacks for a stage, before anything starts."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from envscaler_airflow.backends import backend_type
from envscaler_airflow.backends.local.machine import USABLE_MEMORY, this_machine
from envscaler_airflow.backends.local.machine import Gpu as MachineGpu
from envscaler_airflow.backends.local.node_plan import exists, volume_faults
from envscaler_airflow.envspec.loading import targets
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import GIB, Gpu, Resources
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.builders import Docker
from envscaler_airflow.images.cuda import broken_software, software
from envscaler_airflow.images.programs import find_program, run_program, uv_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import install_command, python_version
from envscaler_airflow.store.run_store import open_store

_QUERIES: dict[str, tuple[str, ...]] = {
    "dpkg-query": ("--show", "--showformat", "${db:Status-Status} ${Version}\n"),
    "rpm": ("--query", "--queryformat", "%{VERSION}-%{RELEASE}\n"),
    "apk": ("info", "--installed", "--verbose"),
}
"""Command that queries the system for one package, by program."""


def has_variable(name: str) -> bool:
    """True when the environment has *name*."""
    return name in os.environ


def installed_versions(names: Sequence[str]) -> dict[str, str] | None:
    """Version of each installed package of *names*; None if no package manager can report them."""
    found = ((path, words) for program, words in _QUERIES.items() if (path := find_program(program)))
    path, words = next(found, (None, ()))
    if path is None:
        return None
    told = {name: run_program([path, *words, name]) for name in names}
    read = {name: _version(name, done.out) for name, done in told.items() if done.code == 0}
    return {name: version for name, version in read.items() if version is not None}


def _version(name: str, told: str) -> str | None:
    """Parse ``installed 1:2.39``, ``2.39-1`` or ``name-2.39-r0``; None for a package that was removed."""
    words = told.split()
    if len(words) > 1:
        return words[1] if words[0] == "installed" else None
    return words[0].removeprefix(f"{name}-") if words else None


def has_docker() -> bool:
    """True when a docker daemon responds that can build."""
    program = find_program("docker")
    return program is not None and Docker(program).fault() is None


def has_uv() -> bool:
    """True when uv is installed, through the extra ``build`` or otherwise."""
    try:
        uv_program()
    except SpecError:
        return False
    return True


def has_program(name: str) -> bool:
    """True when a program of that name is on the path."""
    return find_program(name) is not None


def python_of(version: str) -> str | None:
    """Path of a Python of that version, ``3.11``; prefers this process's own; None without one."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    return find_program(f"python{version}")


@dataclass(frozen=True, slots=True)
class Here:
    """The facts of this machine.

    Attributes:
        cpus: Usable cores.
        memory_bytes: Memory.
        disk_bytes: Free space in the folder of runs.
        gpus: GPUs that the driver reports.
        driver: Version of the GPU driver; None without one.
        family: Family of the package manager; None if unknown.
        has_path: Returns whether a path exists.
        is_mounted: Returns whether something is mounted at a path.
        has_variable: Returns whether the environment has a variable.
        installed_versions: Returns versions of installed system packages; None if no tool reports them.
        has_docker: Returns whether a docker daemon responds.
        has_uv: Returns whether uv is installed.
        has_program: Returns whether a program is on the path.
        python_of: Returns the path of an installed Python of a version; None without one.
    """

    cpus: int
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[MachineGpu, ...] = ()
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
        """Packages of *wanted* (``git``, ``git=1:2.39``, ``git=1:2.*``) that are absent; None if unknown."""
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
    """Collect the facts of this machine."""
    machine = this_machine()
    return Here(
        cpus=len(machine.cpus),
        memory_bytes=machine.memory_bytes,
        disk_bytes=shutil.disk_usage("/var/tmp").free,  # noqa: S108  # where local runs are laid out
        gpus=machine.gpus,
        driver=machine.driver,
    )


_PROGRAMS = {"openssh-client": "ssh", "mercurial": "hg", "subversion": "svn", "breezy": "bzr"}
"""Program of each system package that fetches requirements, if its name differs."""
INSTALL_UV = "run `pip install 'envscaler-airflow[build]'`, or install uv"
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "az", "oss", "hdfs")
"""Schemes of volumes that need a package of an extra, or of the user's."""


def lacking_code(spec: EnvSpec) -> list[str]:
    """A workdir or script that does not exist, one sentence each with what to write."""
    if not spec.entrypoint:
        return ["entrypoint: is empty; write entrypoint: [python, train.py]"]
    folder = spec.resolve_path("workdir")
    if folder is not None and not Path(folder).is_dir():
        return [f"workdir: {folder} is not a folder; name the folder of the code, such as workdir: ."]
    script = _script(spec.entrypoint)
    if script is None:
        return []
    if script.is_absolute():  # a volume, or a folder of the image, may provide it
        is_brought = any(script.is_relative_to(volume.mount_path) for volume in spec.volumes)
        return [] if is_brought or script.is_file() else [_absent(script)]
    if folder is None:
        return [f"entrypoint: {script} is not shipped: the spec has no workdir; write workdir: ."]
    if not Path(folder, script).is_file():
        return [f"entrypoint: {script} is not in the workdir {folder}; {_instead(script, Path(folder))}"]
    return []


def _instead(script: Path, folder: Path) -> str:
    words = str(script).split()
    if len(words) > 1:
        return f"write each word apart: [{', '.join(words)}]"
    near = get_close_matches(str(script), [path.name for path in folder.glob("*.py")], n=1)
    return f"write {near[0]}" if near else "write its path below that folder"


def _absent(script: Path) -> str:
    return (
        f"entrypoint: {script} is not on this machine; write a path below the workdir, such as {script.name}"
    )


def lacking_program(spec: EnvSpec, requirements: Requirements, machine: Here) -> list[str]:
    """A command that is absent and looks misspelt; [] if packages or code of the stage may provide it."""
    program = spec.entrypoint[0] if spec.entrypoint else "python"
    is_brought = "/" in program or program.endswith(".py") or not requirements.is_empty
    if is_brought or _PYTHON.fullmatch(program) or machine.has_program(program):
        return []
    near = get_close_matches(program, ("python", "bash", "torchrun", "accelerate"), n=1)
    return [f"entrypoint: there is no command {program!r:.80} on this machine; write {name}" for name in near]


def lacking_inputs(spec: EnvSpec) -> list[str]:
    """Inputs that the spec uses but that were not given."""
    return [
        f"inputs: {name} is not given; add --input {name}=URI, as an earlier stage prints it"
        for name in spec.input_names
        if name not in spec.inputs
    ]


def _script(entrypoint: tuple[str, ...]) -> Path | None:
    """The Python file that the entrypoint runs; None for any other program."""
    program, *words = entrypoint
    if program.endswith(".py"):
        return Path(program)
    if _PYTHON.fullmatch(Path(program).name) is None:
        return None
    while words and words[0] in ("-u", "-O", "-B", "-E", "-s", "-I"):
        words.pop(0)
    return Path(words[0]) if words and words[0].endswith(".py") else None


def lacking_tools(spec: EnvSpec, requirements: Requirements, machine: Here) -> list[str]:
    """Absent tools that create the stage's own environment: uv, or the Python."""
    if requirements.runtime is None:
        return []
    if requirements.runtime.package_manager == "conda":
        return ["runtimes: package_manager: conda is for images; write pip or uv under targets.local"]
    absent = [name for name in requirements.programs if not machine.has_program(_PROGRAMS.get(name, name))]
    if absent:
        return [f"runtimes: requirements are fetched by {', '.join(absent)}, not installed here; install it"]
    if machine.has_uv():
        return []
    if requirements.needs_installer:
        return [f"runtimes: uv installs the packages, and it is not installed; {INSTALL_UV}"]
    version = python_version(spec)
    if machine.python_of(version) is not None:
        return []
    return [f"runtimes: Python {version} is not here, and uv, which brings it, is not either; {INSTALL_UV}"]


def local_source_faults(spec: EnvSpec) -> list[str]:
    """Volumes of a scheme that this machine cannot open, one fault each; found without any request.

    ``dry-run`` checks object stores of the extras, because another machine may have the extra.
    """
    found = []
    for index, volume in enumerate(spec.volumes):
        if volume.kind == "hdfs" and importlib.util.find_spec("pyarrow") is None:
            found.append(
                f"volumes[{index}].source: {volume.source} is HDFS, which a stage on local opens by pyarrow "
                "and a Hadoop client, and pyarrow is not installed; pip install pyarrow, write another "
                "source such as s3://bucket/path, or one for local under targets"
            )
    return found


def lacking_extras(spec: EnvSpec, store_url: str | None) -> list[str]:
    """Packages that open the run store or a volume but are not installed."""
    urls = {} if store_url is None else {"store": store_url}
    for volume in spec.volumes:
        scheme, separator, _ = str(volume.source).partition("://")
        if separator and scheme in _OBJECT_STORES:
            urls[f"volumes: {volume.name}"] = str(volume.source)
    found = []
    for name, url in urls.items():
        try:
            open_store(url)
        except SpecError as err:
            found.append(f"{name}: {err}")
    return found


def missing_on(target: str, spec: EnvSpec, store_url: str | None = None) -> list[str]:
    """List what *target* lacks for *spec*, one sentence each with the fix; [] if nothing is known to lack.

    Args:
        target: Name of a backend, ``docker`` for a container on this machine, or ``vm``.
        spec: The stage, resolved for that target.
        store_url: Run store whose packages are checked too; None skips this check.

    Raises:
        SpecError: *target* is another one.
        BackendError: The backend does not answer.
    """
    if target not in targets():
        raise SpecError(f"--target {target!r:.60}: write one of {', '.join(targets())}")
    if (missing := _WITHOUT_BACKEND.get(target)) is not None:
        return missing(spec, store_url)
    return backend_type(target).missing(spec, store_url)


def missing_here(
    spec: EnvSpec,
    requirements: Requirements | None = None,
    *,
    here: Here | None = None,
    store_url: str | None = None,
    in_container: bool = False,
) -> list[str]:
    """List what this machine lacks for *spec*; see :func:`missing_on`.

    Args:
        spec: The stage.
        requirements: Its Python packages; None reads them from the folder of the spec.
        here: This machine's facts; None collects them.
        store_url: As above.
        in_container: True for a container of docker, False for a share of the machine.
    """
    machine = here or look_here()
    wanted = read_requirements(spec) if requirements is None else requirements
    if not in_container:
        machine = replace(machine, memory_bytes=int(machine.memory_bytes * USABLE_MEMORY))
    found = [
        *lacking_inputs(spec),
        *lacks(best_fit(spec, machine), machine),
        *_chain(spec, wanted, machine),
        *lacking_volumes(spec, machine),
        *_variables(spec, machine),
    ]
    if not in_container:
        found += [*lacking_code(spec), *lacking_program(spec, wanted, machine)]
        found += [*lacking_tools(spec, wanted, machine), *missing_packages(spec, machine)]
    elif not machine.has_docker():
        found.append("docker: no daemon answers that can build; install and start docker.io")
    return [*found, *lacking_extras(spec, store_url)]


def _in_container(spec: EnvSpec, store_url: str | None) -> list[str]:
    return missing_here(spec, store_url=store_url, in_container=True)


def _on_rented(spec: EnvSpec, _store_url: str | None) -> list[str]:
    return [
        f"volumes: {volume.name}: {volume.source} is a claim of Kubernetes; write another for vm"
        for volume in spec.volumes
        if volume.kind == "pvc"
    ]


_WITHOUT_BACKEND = {"docker": _in_container, "vm": _on_rented}
"""Targets that a shell starts or rents without a backend."""


def missing_packages(spec: EnvSpec, machine: Here) -> list[str]:
    """System packages that are not installed here, with the command that installs them."""
    if not spec.system_packages:
        return []
    absent = machine.absent_packages(spec.system_packages)
    if absent is None:
        return [f"system_packages: no dpkg, rpm or apk here to ask for {', '.join(spec.system_packages)}"]
    if not absent:
        return []
    command = install_command(facts(spec.base).family, tuple(absent))
    return [f"system_packages: {', '.join(absent)} not installed; run `{command}`, or --install-system"]


def best_fit(spec: EnvSpec, machine: Here) -> Resources:
    """Of several alternatives the one of which *machine* lacks least; ties go to the first."""
    return min(spec.resources.alternatives, key=lambda need: len(lacks(need, machine)))


def lacks(need: Resources, machine: Here) -> list[str]:
    """Cores, memory, disk and GPUs of *need* that *machine* does not have, one sentence each."""
    found = []
    asked = need.requests
    if asked.cpu_cores is not None and asked.cpu_cores > machine.cpus:
        found.append(
            f"cpu: {asked.cpu} requested, {machine.cpus} available here; request less under targets.local"
        )
    if asked.memory_bytes is not None and asked.memory_bytes > machine.memory_bytes:
        has = f"{machine.memory_bytes / GIB:.1f}Gi"
        found.append(
            f"memory: {asked.memory} requested, {has} available here; request less under targets.local"
        )
    if need.disk_bytes is not None and need.disk_bytes > machine.disk_bytes:
        has = f"{machine.disk_bytes / GIB:.1f}Gi"
        found.append(
            f"disk: {need.disk_size} requested, {has} free below /var/tmp; free some, or request less"
        )
    if asked.gpu is not None and not need.cpu_fallback:
        found += _lacks_gpus(asked.gpu, machine)
    return found


def _lacks_gpus(gpu: Gpu, machine: Here) -> list[str]:
    fits = [
        item
        for item in machine.gpus
        if (not gpu.type or item.name in gpu.type)
        and (gpu.memory_gb is None or item.memory_gb >= gpu.memory_gb)
    ]
    if len(fits) >= gpu.count:
        return []
    wanted = " or ".join(gpu.type) or "GPU"
    memory = f" with {gpu.memory}" if gpu.memory is not None else ""
    has = ", ".join(item.name for item in machine.gpus) or "none"
    fix = "use another machine, or write resources: {cpu_fallback: true} to run on CPUs"
    return [f"gpu: {gpu.count} x {wanted}{memory} requested, available here: {has}; {fix}"]


def _chain(spec: EnvSpec, requirements: Requirements, machine: Here) -> list[str]:
    if not machine.gpus:
        return []
    gpu = machine.gpus[0]
    chain = software(spec, requirements).on(gpu.name, driver=machine.driver)
    return [f"cuda: {text}" for text in broken_software(chain)]


def lacking_volumes(spec: EnvSpec, machine: Here) -> list[str]:
    """Volumes that *machine* cannot provide to a process or container, one sentence each."""
    return volume_faults(spec.volumes, has_path=machine.has_path, is_mounted=machine.is_mounted)


def _variables(spec: EnvSpec, machine: Here) -> list[str]:
    references = [(item.name, item.reference) for item in spec.env if item.reference is not None]
    found = []
    for name, reference in references:
        if reference.kind != "env":
            found.append(
                f"env: {name}: {reference} cannot be resolved from a shell; write value_from: env:{name}"
            )
        elif not machine.has_variable(reference.name):
            found.append(f"env: {name}: {reference} is not set; export it")
    return found
