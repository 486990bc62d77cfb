"""The plain manifests of a stage: an Indexed Job, and a Service for the rendezvous of nodes. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from envscaler_airflow.envspec import parse_reference, spec_hash
from envscaler_airflow.envspec.gpus import vendor_of
from envscaler_airflow.envspec.models import EnvSpec, EnvVar, Volume
from envscaler_airflow.envspec.resources import GIB, Gpu, Resources
from envscaler_airflow.images.artefacts import Artefact, comment, yaml_text
from envscaler_airflow.images.distributed import PORT, batch_env, launch_command
from envscaler_airflow.images.dockerfile import UID

GPU_MEMORY_SHARE = 0.93
"""Minimum memory that a GPU reports, as a share of the vendor's figure. Chosen: as sizing does."""

PRODUCTS: dict[str, tuple[str, ...]] = {
    "A10": ("NVIDIA-A10",),
    "A100": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "A10G": ("NVIDIA-A10G",),
    "B200": ("NVIDIA-B200",),
    "H100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"),
    "H100-NVL": ("NVIDIA-H100-NVL",),
    "H200": ("NVIDIA-H200",),
    "L4": ("NVIDIA-L4",),
    "L40": ("NVIDIA-L40",),
    "L40S": ("NVIDIA-L40S",),
    "P100": ("Tesla-P100-PCIE-16GB", "Tesla-P100-SXM2-16GB"),
    "T4": ("Tesla-T4",),
    "V100": ("Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"),
    "V100-32GB": ("Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-32GB"),
}
"""Label ``nvidia.com/gpu.product`` by canonical name: the driver's product name with dashes for spaces.

Source: NVIDIA GPU feature discovery, labels; product names as NVML reports them.
"""


def render_kubernetes(
    spec: EnvSpec, image: str, *, namespace: str | None = None, is_built: bool = True
) -> list[Artefact]:
    """Render ``job.yaml`` for ``kubectl apply -f``.

    Args:
        spec: The stage; the lower bound of ``num_nodes`` is rendered.
        image: The stage's image, or the base if no image is built.
        namespace: Namespace of the Job; None for the context's namespace.
        is_built: True for an image built from this spec, which runs as its non-root user.
    """
    documents = kubernetes_documents(spec, image, namespace=namespace, is_built=is_built)
    return [Artefact("job.yaml", comment(_notes(spec)) + yaml_text(*documents))]


def kubernetes_documents(
    spec: EnvSpec, image: str, *, namespace: str | None = None, is_built: bool = True
) -> list[dict[str, Any]]:
    """The manifests of :func:`render_kubernetes`."""
    nodes, name = spec.num_nodes.min, resource_name(spec.name)
    metadata: dict[str, Any] = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "envscaler"}
    metadata |= {"labels": labels, "annotations": {"envscaler.io/spec-hash": spec_hash(spec)}}
    pod = {"metadata": {"labels": labels}, "spec": _pod(spec, image, name, nodes=nodes, is_built=is_built)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(nodes, pod)}
    return [job] if nodes == 1 else [_service(metadata, name), job]


def _job_spec(nodes: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Job spec that ignores disruptions: only the lost pod is recreated."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": disrupted}]},
        "template": pod,
    }


def _service(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """A headless Service, so that nodes can resolve each other by name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def resource_name(name: str) -> str:
    """*name* as a DNS label of at most 52 characters, which leaves space for a pod's index."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and len(plain) <= 52:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{plain[:43].strip('-') or 'stage'}-{digest}"


def _pod(spec: EnvSpec, image: str, name: str, *, nodes: int, is_built: bool) -> dict[str, Any]:
    need = spec.resources.alternatives[0]
    mounts, volumes = _volumes(spec, need)
    container: dict[str, Any] = {"name": "main", "image": image}
    if spec.entrypoint:
        endpoint = f"{name}-0.{name}:{PORT}"
        rank = "$(JOB_COMPLETION_INDEX)" if nodes > 1 else None
        container["command"] = _escaped(launch_command(spec, nodes, endpoint=endpoint, node_rank=rank))
    container["env"] = [*(_variable(item, name) for item in spec.env), *_batch(spec, nodes)]
    container["resources"] = _resources(need)
    container["volumeMounts"] = mounts
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod: dict[str, Any] = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    if is_built:
        pod["securityContext"] = {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID}
    if nodes > 1:
        pod["subdomain"] = name
    if spec.base is not None and spec.base.credentials is not None:
        reference = parse_reference(spec.base.credentials)
        secret = reference.name if reference.kind == "secret" else f"{name}-registry"
        pod["imagePullSecrets"] = [{"name": secret}]
    if terms := _node_terms(need.requests.gpu):
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    pod |= {"containers": [_without_empty(container)], "volumes": volumes}
    return _without_empty(pod)


def _without_empty(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value not in ([], {})}


def _escaped(words: tuple[str, ...]) -> list[str]:
    """Escape the user's own ``$(NAME)``, so that Kubernetes only expands ours."""
    ours = "$(JOB_COMPLETION_INDEX)"
    return [
        word if word.endswith(f"={ours}") and word.startswith("--") else word.replace("$(", "$$(")
        for word in words
    ]


def _variable(item: EnvVar, name: str) -> dict[str, Any]:
    reference = item.reference
    if reference is None:
        return {"name": item.name, "value": (item.value or "").replace("$(", "$$(")}
    if reference.kind == "secret":
        source = {"name": reference.name, "key": reference.key}
    else:
        source = {"name": f"{name}-env", "key": item.name}
    return {"name": item.name, "valueFrom": {"secretKeyRef": source}}


def _batch(spec: EnvSpec, nodes: int) -> list[dict[str, str]]:
    return [{"name": key, "value": value} for key, value in batch_env(spec, nodes).items()]


def _resources(need: Resources) -> dict[str, Any]:
    asked, most = need.requests, need.limits
    requests = {"cpu": asked.cpu, "memory": asked.memory, "ephemeral-storage": need.disk_size}
    limits = {"cpu": most.cpu, "memory": most.memory}
    if asked.gpu is not None:
        resource = _gpu_resource(asked.gpu)
        requests[resource] = limits[resource] = str(asked.gpu.count)
    kept = {
        "requests": {key: value for key, value in requests.items() if value is not None},
        "limits": {key: value for key, value in limits.items() if value is not None},
    }
    return {key: value for key, value in kept.items() if value}


def _gpu_resource(gpu: Gpu) -> str:
    """The resource of the GPU's vendor. For Intel the driver is unknown; most GPUs use ``i915``."""
    vendor = gpu.vendor or (vendor_of(gpu.type[0]) if gpu.type else "nvidia")
    return {"amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}.get(vendor, "nvidia.com/gpu")


def _volumes(spec: EnvSpec, need: Resources) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mounts, volumes = [], []
    for index, volume in enumerate(spec.volumes):
        name = f"v{index}-{resource_name(volume.name)}"[:63].rstrip("-")
        mount: dict[str, Any] = {"name": name, "mountPath": volume.mount_path}
        if volume.is_read_only and not volume.is_copied:
            mount["readOnly"] = True
        mounts.append(mount)
        volumes.append({"name": name, **_source(volume)})
    if (shm := _shm_bytes(spec, need)) is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 (a mount point, no temporary file)
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(shm)}})
    return mounts, volumes


def _source(volume: Volume) -> dict[str, Any]:
    if volume.kind == "pvc":
        claim: dict[str, Any] = {"claimName": volume.location}
        return {"persistentVolumeClaim": claim | ({"readOnly": True} if volume.is_read_only else {})}
    if volume.kind == "nfs":
        server, _, path = volume.location.partition("/")
        return {
            "nfs": {"server": server, "path": f"/{path}"}
            | ({"readOnly": True} if volume.is_read_only else {})
        }
    if volume.kind == "hostPath":
        return {
            "hostPath": {
                "path": volume.location,
                "type": "DirectoryOrCreate" if not volume.is_read_only else "Directory",
            }
        }
    return {"emptyDir": {}}


def _shm_bytes(spec: EnvSpec, need: Resources) -> int | None:
    """The requested size, or half of the memory for GPUs or several processes. Chosen: data loaders, NCCL."""
    if need.shm_bytes is not None:
        return need.shm_bytes
    if need.requests.gpu is None and spec.processes_per_node == 1:
        return None
    memory = need.requests.memory_bytes
    return GIB if memory is None else memory // 2


def _node_terms(gpu: Gpu | None) -> list[dict[str, Any]]:
    if gpu is None or _gpu_resource(gpu) != "nvidia.com/gpu":
        return []
    terms: list[dict[str, Any]] = []
    products = [label for name in gpu.type for label in PRODUCTS.get(name, ())]
    if products:
        terms.append({"key": "nvidia.com/gpu.product", "operator": "In", "values": products})
    if gpu.memory_gb is not None:
        least = int(gpu.memory_gb * GPU_MEMORY_SHARE * 1e9 / (1 << 20))
        terms.append({"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [str(least)]})
    return terms


def _notes(spec: EnvSpec) -> list[str]:
    name = resource_name(spec.name)
    notes = [f"{spec.name}, rendered by envscaler from its spec."]
    notes += [
        f"{volume.mount_path}: `envscaler submit` copies {volume.source} in; this file alone leaves it empty"
        for volume in spec.volumes
        if volume.is_copied
    ]
    others = [item for item in spec.env if item.reference is not None and item.reference.kind != "secret"]
    notes += [
        f"{item.name}: put {item.value_from} into key {item.name} of secret {name}-env" for item in others
    ]
    return notes
