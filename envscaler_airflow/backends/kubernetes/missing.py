"""What a cluster lacks for a stage, by kubectl: a shell that checks a spec needs no client library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.kubernetes.cluster_offers import (
    Capacity,
    derived_offers,
    is_usable,
    kinds_of,
)
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.catalog.accelerators import Accelerator
from envscaler_airflow.envspec import parse_reference
from envscaler_airflow.envspec.gpus import MEMORY_GB, is_share
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.envspec.resources import GIB, Gpu, Resources
from envscaler_airflow.errors import BackendError
from envscaler_airflow.images.programs import Output, find_program, run_program
from envscaler_airflow.scaling.from_spec import speedup_warning

Kubectl = Callable[[list[str]], Output]

_KEYS = "{{range $key, $value := .data}}{{$key}}\n{{end}}"
"""Template that prints the keys of a secret but not its values."""
_ABSENT = ("notfound", "not found")


def speedup_warnings(spec: EnvSpec) -> list[str]:
    """Of names in ``scaling.speedup`` that match no offer of the cluster's nodes. Raises BackendError."""
    if spec.scaling is None or not spec.scaling.speedup:
        return []
    warning = speedup_warning(spec, derived_offers(_nodes(_kubectl()), Settings()))
    return [] if warning is None else [warning]


def missing_on_cluster(spec: EnvSpec, kubectl: Kubectl | None = None) -> list[str]:
    """List what the cluster lacks for *spec*, one sentence each with the fix; [] if nothing is known to lack.

    Args:
        spec: The stage, resolved for a cluster.
        kubectl: Queries the cluster; None uses the installed program with its current context.

    Raises:
        BackendError: The cluster cannot be queried.
    """
    kubectl = kubectl or _kubectl()
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


def _kubectl() -> Kubectl:
    program = find_program("kubectl")
    if program is None:
        raise BackendError("kubectl is not installed; install it to ask the cluster")
    return lambda words: run_program([program, *words], timeout_s=60)


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


def _lacks_secret(kubectl: Kubectl, name: str, keys: set[str]) -> list[str]:
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


def _exists(kubectl: Kubectl, words: list[str]) -> bool:
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


def _lacks_nodes(spec: EnvSpec, kubectl: Kubectl) -> list[str]:
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


def _nodes(kubectl: Kubectl) -> list[dict[str, Any]]:
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
