"""Which nodes an offer's pods may run on, by the labels and taints of each kind of cluster. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envscaler_airflow.backends.kubernetes import names
from envscaler_airflow.backends.kubernetes.cluster_settings import Settings
from envscaler_airflow.catalog.accelerators import GPU_PRODUCT, resource_of
from envscaler_airflow.catalog.nodes import GPU_TAINTS, SPOT_LABELS, SPOT_TAINTED
from envscaler_airflow.envspec.gpus import vendor_of
from envscaler_airflow.envspec.resources import GIB, MOST_OVER_REQUEST, Resources
from envscaler_airflow.planning.offers import Offer

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
ARCH = "kubernetes.io/arch"
UNLABELLED = "node"
"""Instance type of nodes that do not report theirs: any node is accepted."""
BY_GPU = "gpu."
"""Prefix of the instance type of nodes that only name their GPU: ``gpu.NVIDIA-H100-PCIe``."""
LOST_AFTER_S = 60
"""How long a pod stays bound to a node that does not answer. Source: issue of the backend; default is 300."""

_OF_ATTEMPT = (names.RUN, names.GENERATION, names.ATTEMPT)
_ARCHES = {"x86_64": "amd64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class Spot:
    """How one kind of cluster marks its spot nodes.

    Source: EKS managed node groups (capacityType); Karpenter well-known labels; GKE Spot VMs; AKS spot
    node pools, which also taint them.
    """

    key: str
    value: str
    taint: bool = False


SPOT: Mapping[str, Spot] = {
    name: Spot(key, value, taint=name in SPOT_TAINTED) for name, (key, value) in SPOT_LABELS.items()
}

NOTICE_S: Mapping[str, int] = {"eks": 120, "karpenter": 120, "gke": 30, "aks": 30}
"""How long before the end of a spot node its cloud announces it, seconds.

Source: Amazon EC2, Spot Instance interruption notices (two minutes); Google Compute Engine, Spot VMs
(30 s); Azure, Spot Virtual Machines (30 s).
"""
LONGEST_NOTICE_S = max(NOTICE_S.values())
LEAST_GRACE_S = 30
"""Shortest time from SIGTERM to SIGKILL, seconds. Source: Kubernetes' default."""


def any_node(resources: Resources, settings: Settings, *, is_spot: bool) -> Offer:
    """An offer of any nodes that have what *resources* request, to show an attempt before one is chosen."""
    asked, most, gpu = resources.requests, resources.limits, resources.requests.gpu
    name, unit = None, "cpu"
    if gpu is not None:
        name = gpu.type[0] if gpu.type else {"amd": "AMD", "intel": "Intel"}.get(gpu.vendor or "", "NVIDIA")
        unit = "i915" if vendor_of(name) == "intel" else "gpu"  # Intel's most common driver; others exist
    whole = most.memory_bytes or MOST_OVER_REQUEST * (asked.memory_bytes or GIB)
    return Offer(
        cloud="kubernetes",
        region=settings.region,
        instance_type=f"{UNLABELLED}:{unit}-{asked.gpu_count}",
        capacity_type="spot" if is_spot else "on-demand",
        vcpus=asked.cpu_cores or most.cpu_cores or 1.0,
        memory_gib=whole / GIB,
        gpu_name=name,
        gpus=asked.gpu_count,
    )


def node_type(offer: Offer) -> str:
    """Instance type of the offer's nodes, without the share: ``g5.12xlarge`` of ``g5.12xlarge:gpu-1``."""
    return offer.instance_type.partition(":")[0]


def gpu_resource(offer: Offer, settings: Settings) -> str | None:
    """The resource that pods of the offer request as GPUs; None without GPU."""
    if offer.gpu_name is None:
        return None
    chosen = settings.node_class(offer)
    if chosen is not None and chosen.gpu_resource is not None:
        return chosen.gpu_resource
    unit = offer.instance_type.partition(":")[2].rpartition("-")[0]
    return resource_of("gpu" if chosen is not None or not unit else unit, offer.gpu_name)


def affinity(offer: Offer, settings: Settings) -> dict[str, Any]:
    """Required node affinity of the offer; {} when any node is accepted.

    Terms are alternatives, each complete in itself, so every term repeats what all conventions need.
    """
    chosen = settings.node_class(offer)
    common: list[dict[str, Any]] = []
    if chosen is not None:
        common = [_in(key, value) for key, value in sorted(chosen.node_selector.items())]
    elif node_type(offer).startswith(BY_GPU):
        common.append(_in(GPU_PRODUCT, node_type(offer).removeprefix(BY_GPU)))
    elif node_type(offer) != UNLABELLED:
        common.append(_in(INSTANCE_TYPE, node_type(offer)))
    if offer.zone is not None:
        common.append(_in(ZONE, offer.zone))
    if offer.arch in _ARCHES:
        common.append(_in(ARCH, _ARCHES[offer.arch]))
    marks = list(SPOT.values()) if settings.provider is None else [SPOT[settings.provider]]
    if offer.capacity_type == "on-demand":
        common += [{"key": mark.key, "operator": "NotIn", "values": [mark.value]} for mark in marks]
        alternatives: list[list[dict[str, Any]]] = [[]]
    else:
        alternatives = [[_in(mark.key, mark.value)] for mark in marks]
    terms = [{"matchExpressions": [*common, *one]} for one in alternatives]
    if not any(term["matchExpressions"] for term in terms):
        return {}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _in(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}


def tolerations(offer: Offer, settings: Settings) -> list[dict[str, Any]]:
    """Taints that the offer's pods tolerate, and how long they stay on a node that does not answer."""
    found: list[dict[str, Any]] = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_AFTER_S,
        }
        for state in ("not-ready", "unreachable")
    ]
    found += tolerated_taints(settings, has_gpus=bool(offer.gpus), is_spot=offer.capacity_type == "spot")
    chosen = settings.node_class(offer)
    return [*found, *(dict(one) for one in (chosen.tolerations if chosen else ()))]


def tolerated_taints(settings: Settings, *, has_gpus: bool, is_spot: bool) -> list[dict[str, Any]]:
    """Tolerations of the taints with which clusters keep other pods off such nodes."""
    found = [_bears(key, value) for key, value in GPU_TAINTS] if has_gpus else []
    if is_spot:
        marks = list(SPOT.values()) if settings.provider is None else [SPOT[settings.provider]]
        found += [_bears(mark.key, mark.value) for mark in marks if mark.taint]
    return found


def _bears(key: str, value: str | None) -> dict[str, Any]:
    if value is None:
        return {"key": key, "operator": "Exists", "effect": "NoSchedule"}
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def grace_s(offer: Offer, asked_s: float, settings: Settings) -> int:
    """Integer seconds from SIGTERM to SIGKILL: requested, at least the default, on spot within the notice."""
    most = NOTICE_S.get(settings.provider or "", LONGEST_NOTICE_S) if offer.capacity_type == "spot" else None
    asked = math.ceil(asked_s) if most is None else min(math.ceil(asked_s), most)
    return max(LEAST_GRACE_S, asked)


def placement(labels: Mapping[str, str], nodes: int, settings: Settings) -> dict[str, Any]:
    """How the nodes of one attempt, with pods labelled *labels*, are placed together or apart; {} for any."""
    if nodes == 1 or settings.cluster_spread == "none":
        return {}
    ours = {"labelSelector": {"matchLabels": {name: labels[name] for name in _OF_ATTEMPT}}}
    if settings.cluster_spread == "zone":
        term = {"weight": 100, "podAffinityTerm": {**ours, "topologyKey": ZONE}}
        return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}}
    spread = {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway", **ours}
    return {"topologySpreadConstraints": [spread]}
