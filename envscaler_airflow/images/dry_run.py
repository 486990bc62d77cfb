"""A dry run: what a machine or a cluster lacks for a stage, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envscaler_airflow.backends.local.machine import USABLE_MEMORY
from envscaler_airflow.backends.local.volumes import volume_faults
from envscaler_airflow.envspec import parse_reference
from envscaler_airflow.envspec.gpus import MEMORY_GB, is_share
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import GIB, Gpu, Resources
from envscaler_airflow.errors import BackendError, SpecError
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
from envscaler_airflow.images.programs import Output, find_program, run_program
from envscaler_airflow.images.requirement_files import Requirements, read_requirements
from envscaler_airflow.images.venv import install_command

if TYPE_CHECKING:
    from envscaler_airflow.backends.kubernetes.cluster_offers import Capacity
    from envscaler_airflow.catalog.accelerators import Accelerator
    from envscaler_airflow.planning.offers import Offer

TARGETS = ("local", "docker", "kubernetes", "vm")
"""Targets that :func:`missing_on` can check."""
_KEYS = "{{range $key, $value := .data}}{{$key}}\n{{end}}"
"""Template that prints the keys of a secret but not its values."""
_ABSENT = ("notfound", "not found")


def missing_on(
    target: str,
    spec: EnvSpec,
    requirements: Requirements | None = None,
    *,
    here: Here | None = None,
    kubectl: Callable[[list[str]], Output] | None = None,
    store_url: str | None = None,
) -> list[str]:
    """List what *target* lacks for *spec*, one sentence each with the fix; [] if nothing is known to lack.

    Args:
        target: ``local``, ``docker``, ``kubernetes`` or ``vm``.
        spec: The stage, resolved for that target.
        requirements: Its Python packages; None reads them from the folder of the spec.
        here: This machine's facts; None collects them.
        kubectl: Queries the cluster; None uses the installed program with its current context.
        store_url: Run store whose packages are checked too; None skips this check.

    Raises:
        SpecError: *target* is another one.
        BackendError: The cluster cannot be queried.
    """
    if target not in TARGETS:
        raise SpecError(f"--target {target!r:.60}: write one of {', '.join(TARGETS)}")
    if target == "kubernetes":
        return _on_cluster(spec, kubectl or _kubectl())
    if target == "vm":
        return _on_rented(spec)
    found = [*lacking_inputs(spec), *_here(target, spec, requirements, here or look_here())]
    return [*found, *lacking_extras(spec, store_url)]


def cluster_offers(kubectl: Callable[[list[str]], Output] | None = None) -> tuple[Offer, ...]:
    """Offers of the nodes of kubectl's cluster, based on their node objects.

    Raises:
        BackendError: The cluster cannot be queried.
    """
    from envscaler_airflow.backends.kubernetes.cluster_offers import derived_offers  # noqa: PLC0415 (only who asks a cluster)
    from envscaler_airflow.backends.kubernetes.settings import Settings  # noqa: PLC0415 (as above)

    return derived_offers(_nodes(kubectl or _kubectl()), Settings())


def _on_rented(spec: EnvSpec) -> list[str]:
    return [
        f"volumes: {volume.name}: {volume.source} is a claim of Kubernetes; write another for vm"
        for volume in spec.volumes
        if volume.kind == "pvc"
    ]


def _here(target: str, spec: EnvSpec, requirements: Requirements | None, machine: Here) -> list[str]:
    if target == "local":  # where shares of it are allocated
        machine = replace(machine, memory_bytes=int(machine.memory_bytes * USABLE_MEMORY))
    wanted = read_requirements(spec) if requirements is None else requirements
    found = [
        *lacks(best_fit(spec, machine), machine),
        *_chain(spec, wanted, machine),
        *lacking_volumes(spec, machine),
        *_variables(spec, machine),
    ]
    if target == "local":
        found += [*lacking_code(spec), *lacking_program(spec, wanted, machine)]
        found += lacking_tools(spec, wanted, machine)
        return found + missing_packages(spec, machine)
    if not machine.has_docker():
        found.append("docker: no daemon answers that can build; install and start docker.io")
    return found


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
        found.append(f"cpu: {asked.cpu} asked for, {machine.cpus} here; ask for less under targets.local")
    if asked.memory_bytes is not None and asked.memory_bytes > machine.memory_bytes:
        has = f"{machine.memory_bytes / GIB:.1f}Gi"
        found.append(
            f"memory: {asked.memory} asked for, {has} to be had here; ask for less under targets.local"
        )
    if need.disk_bytes is not None and need.disk_bytes > machine.disk_bytes:
        has = f"{machine.disk_bytes / GIB:.1f}Gi"
        found.append(
            f"disk: {need.disk_size} asked for, {has} free below /var/tmp; free some, or ask for less"
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
    return [f"gpu: {gpu.count} x {wanted}{memory} asked for, here: {has}; {fix}"]


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


def _kubectl() -> Callable[[list[str]], Output]:
    program = find_program("kubectl")
    if program is None:
        raise BackendError("kubectl is not installed; install it to ask the cluster")
    return lambda words: run_program([program, *words], timeout_s=60)


def _on_cluster(spec: EnvSpec, kubectl: Callable[[list[str]], Output]) -> list[str]:
    found = _lacks_nodes(spec, kubectl)
    for volume in spec.volumes:
        if volume.kind != "pvc" or volume.is_made:
            continue
        if not _exists(kubectl, ["get", "pvc", volume.location, "-o", "name"]):
            found.append(
                f"volumes: {volume.name}: no claim {volume.location}; make it in the namespace of the stage"
            )
    for secret, keys in _secrets(spec).items():
        found += _lacks_secret(kubectl, secret, keys)
    return found


def _secrets(spec: EnvSpec) -> dict[str, set[str]]:
    """The keys that a pod needs of each of the cluster's secrets, by the secret's name."""
    found: dict[str, set[str]] = {}
    for item in spec.env:
        reference = item.reference
        if reference is not None and reference.kind == "secret":
            found.setdefault(reference.name, set()).update({reference.key} if reference.key else ())
    if spec.base is not None and spec.base.credentials is not None:
        reference = parse_reference(spec.base.credentials)
        if reference.kind == "secret":
            found.setdefault(reference.name, set())
    return found


def _lacks_secret(kubectl: Callable[[list[str]], Output], name: str, keys: set[str]) -> list[str]:
    done = kubectl(["get", "secret", name, "-o", f"go-template={_KEYS}"])
    if done.code != 0:
        _raise_unless_absent(done)
        return [
            f"secret {name} does not exist; run `kubectl create secret generic {name} --from-literal=KEY=...`"
        ]
    there = set(done.out.split())
    return [
        f"secret {name} has no key {key}; it has {', '.join(sorted(there)) or 'none'}"
        for key in sorted(keys - there)
    ]


def _exists(kubectl: Callable[[list[str]], Output], words: list[str]) -> bool:
    done = kubectl(words)
    if done.code != 0:
        _raise_unless_absent(done)
    return done.code == 0


def _raise_unless_absent(done: Output) -> None:
    if not any(word in done.err.lower() for word in _ABSENT):
        raise BackendError(f"the cluster cannot be asked: {_last_line(done.err)}", transient=True)


def _last_line(text: str) -> str:
    """The last line of kubectl's output; the lines above it log each try."""
    return text.strip().rpartition("\n")[2]


def _lacks_nodes(spec: EnvSpec, kubectl: Callable[[list[str]], Output]) -> list[str]:
    from envscaler_airflow.backends.kubernetes.cluster_offers import is_usable, kinds_of  # noqa: PLC0415 (only who asks a cluster)

    items = [item for item in _nodes(kubectl) if is_usable(item)]
    nodes = [_Node(kind.gpu, capacity) for item in items for kind, capacity in kinds_of(item).items()]
    # Pods of a stage may share a node, and a cluster may grow: one node that fits is enough to start.
    if any(node.fits(need) for need in spec.resources.alternatives for node in nodes):
        return []
    need = spec.resources.alternatives[0].requests
    parts = [f"{need.cpu} cores" if need.cpu else "", need.memory or "", _gpu_text(need.gpu)]
    text = ", ".join(part for part in parts if part) or "anything"
    wanted = f"{spec.num_nodes.min} x ({text})"
    return [f"nodes: none of {len(items)} fits {wanted}; add a node pool that does, or ask for less"]


def _nodes(kubectl: Callable[[list[str]], Output]) -> list[dict[str, Any]]:
    done = kubectl(["get", "nodes", "-o", "json"])
    if done.code != 0:
        raise BackendError(f"the cluster cannot be asked: {_last_line(done.err)}", transient=True)
    return list(json.loads(done.out).get("items", []))


def _gpu_text(gpu: Gpu | None) -> str:
    if gpu is None:
        return ""
    memory = "" if gpu.memory is None else f" with {gpu.memory}"
    return f"{gpu.count} x {' or '.join(gpu.type) or 'GPU'}{memory}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a cluster: its GPUs as its labels report them, and what a training can allocate on it."""

    gpu: Accelerator | None
    capacity: Capacity

    def fits(self, need: Resources) -> bool:
        asked, gpu = need.requests, need.requests.gpu
        if asked.cpu_cores is not None and asked.cpu_cores > self.capacity.vcpus:
            return False
        if asked.memory_bytes is not None and asked.memory_bytes > self.capacity.memory_gib * GIB:
            return False
        if gpu is None or need.cpu_fallback:
            return True
        if self.gpu is None or gpu.count > (1 if self.gpu.is_single else self.capacity.gpus):
            return False
        if is_share(self.gpu.name):
            return self.gpu.name in gpu.type
        has_gb = MEMORY_GB.get(self.gpu.name)
        if has_gb is None:  # their memory is unknown
            return True
        is_large = gpu.memory_gb is None or has_gb >= gpu.memory_gb
        return is_large and (not gpu.type or self.gpu.name in gpu.type)
