"""A dry run: what a machine or a cluster lacks for a stage, before anything starts."""

from __future__ import annotations

from dataclasses import replace

from envscaler_airflow.backends import backend_type
from envscaler_airflow.backends.local.machine import USABLE_MEMORY
from envscaler_airflow.backends.local.volumes import volume_faults
from envscaler_airflow.envspec.loading import targets
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import GIB, Gpu, Resources
from envscaler_airflow.errors import SpecError
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.cuda import broken_software, software
from envscaler_airflow.images.needs import (
    Here,
    lacking_code,
    lacking_extras,
    lacking_inputs,
    lacking_program,
    lacking_tools,
    look_here,
)
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import install_command


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
