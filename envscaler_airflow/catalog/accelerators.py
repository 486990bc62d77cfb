"""GPUs of a cluster's node, by the resource name under which pods request them. Pure.

A device plugin offers whole GPUs, shares of them (time slicing, MPS) or partitions (MIG, AMD's compute
partitions). One node may offer several of these under different names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from envscaler_airflow.envspec.gpus import MEMORY_GB, canonical, vendor_of

_LARGER = {"A100": "A100-80GB", "V100": "V100-32GB"}
"""Models sold with two memory sizes: the smaller one under the model's name, and the name of the larger."""
_INSTINCT = re.compile(r"MI\d+[A-Z]?\Z")
"""A model of AMD Instinct, whose boards have names such as ``MI250X OAM``."""


def canonical_gpu(driver_name: str, memory_gb: float | None = None) -> str:
    """``NVIDIA A100-SXM4-80GB`` becomes ``A100-80GB``, ``Tesla T4`` becomes ``T4``.

    Args:
        driver_name: Name that NVML or nvidia-smi reports.
        memory_gb: Total memory of one GPU, GB; distinguishes two sizes of a model when the name does not.
    """
    name = re.sub(r"^((NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct)\s+)+", "", driver_name.strip())
    words = re.split(r"[-\s]", name)
    found = canonical(name) or canonical(name.replace(" ", "")) or canonical(words[0])
    found = found or (words[0] if _INSTINCT.match(words[0]) else name)
    if found in _LARGER and not re.search(r"\d+\s*GB", name):
        fits = memory_gb is None or memory_gb <= 1.2 * MEMORY_GB[found]
        return found if fits else _LARGER[found]
    return found


def nominal_memory_gb(name: str, measured_gb: float) -> float:
    """The vendor's figure for a canonical name; the measured value for an unknown name."""
    return float(MEMORY_GB.get(name, round(measured_gb, 1)))


GPU_PRODUCT = "nvidia.com/gpu.product"
"""Source: NVIDIA GPU feature discovery."""
UNNAMED_GPU = "GPU"
"""Name of a GPU without a label for it: GPU feature discovery is not installed on the node."""
_UNNAMED = {"nvidia": UNNAMED_GPU, "amd": "AMD-GPU", "intel": "Intel-GPU"}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "nvidia": (
        GPU_PRODUCT,
        "cloud.google.com/gke-accelerator",
        "karpenter.k8s.aws/instance-gpu-name",
        "k8s.amazonaws.com/accelerator",
        "kubernetes.azure.com/accelerator-name",
    ),
    "amd": (
        "amd.com/gpu.product-name",
        "beta.amd.com/gpu.product-name",
        "karpenter.k8s.aws/instance-gpu-name",
        "kubernetes.azure.com/accelerator-name",
    ),
    "intel": ("gpu.intel.com/product",),
}
"""Labels that contain the model's name.

Source: GPU feature discovery; AMD GPU Operator, node labeller; Intel device plugins, NFD rules; GKE;
Karpenter; EKS; AKS.
"""
_MIB = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
_GB = ("amd.com/gpu.vram", "beta.amd.com/gpu.vram")
_SHARED = "-SHARED"
_STRATEGY = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")
_SHARES = ("nvidia.com/gpu.replicas", "cloud.google.com/gke-max-shared-clients-per-gpu")
"""Labels for how a device plugin shares one GPU between pods (time slicing or MPS), and between how many.

Source: NVIDIA device plugin for Kubernetes, "Shared access to GPUs", and GPU feature discovery; GKE, "Share
GPUs with multiple workloads". A pod gets one share even if it requests more: the plugin refuses more, or
grants no more time.
"""
_REAL_GPUS = (
    "nvidia.com/gpu.count",
    "karpenter.k8s.aws/instance-gpu-count",
    "eks.amazonaws.com/instance-gpu-count",
    "cloud.google.com/gke-accelerator-count",
)
"""GPUs of the machine, regardless of the count of its device plugin. With MIG the first label counts
partitions.
"""
_INTEL_COUNT = re.compile(r"gpu\.intel\.com/device-id\.[0-9a-f-]+\.count\Z")
"""The same for Intel, with one label per model. Source: Intel device plugins, NFD rules."""
_PARTITION = "cloud.google.com/gke-gpu-partition-size"
_AMD_PARTITION = ("amd.com/gpu.compute-memory-partition", "amd.com/compute-partition")
_MIG = re.compile(r"(\d+)g\.(\d+)gb", re.IGNORECASE)
"""A MIG profile: number of compute slices of MIG, and GB. Source: NVIDIA Multi-Instance GPU user guide."""
_MIG_SLICES = 7
"""Number of compute slices of MIG in one GPU. Source: the same guide."""
_XPX = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4, "cpx": 8}
"""Number of parts of a GPU by AMD's compute partition. Source: AMD, MI300X compute and memory partition
modes.
"""
_RESOURCE = re.compile(
    r"(?P<domain>nvidia\.com)/(?P<slice>gpu|gpu\.shared|mig-(?P<mig>\d+g\.\d+gb(?:\.me(?:\.all)?)?)(?:\.shared)?)\Z"
    r"|(?P<amd>amd\.com)/(?P<amd_slice>gpu|(?P<xpx>[sdtqc]px)_nps\d)\Z"
    r"|(?P<intel>gpu\.intel\.com)/(?P<intel_slice>i915|xe)\Z"
)
"""Resources of GPUs.

Source: NVIDIA device plugin (``renameByDefault``, MIG strategies single and mixed); AMD GPU device plugin
(``resource_naming_strategy: mixed``); Intel GPU device plugin.
"""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The GPU, share or partition that a pod gets as one unit of a resource.

    Attributes:
        resource: Name under which pods request it: ``nvidia.com/mig-1g.5gb``.
        count: Units that can be allocated on the node.
        name: Canonical name; a share or a partition has its own name.
        memory_gb: Nominal memory; None if unknown.
        of_gpu: Fraction of one GPU's price that a unit costs; 1 for a whole GPU.
        is_single: True if a pod gets at most one unit even if it requests more.
    """

    resource: str
    count: int
    name: str
    memory_gb: float | None = None
    of_gpu: float = 1.0
    is_single: bool = False

    @property
    def per_pod(self) -> int:
        """Largest number of units that a pod gets."""
        return min(1, self.count) if self.is_single else self.count

    @property
    def is_plain(self) -> bool:
        """True for the resource that all device plugins of its vendor offer by default."""
        return self.resource.endswith("/gpu")


def is_gpu_resource(name: str) -> bool:
    """True for the name of a resource that consists of GPUs, or of shares or partitions of them."""
    return _RESOURCE.match(name) is not None


def unit_name(resource: str) -> str:
    """The resource without its vendor: ``gpu``, ``gpu.shared``, ``mig-1g.5gb``, ``cpx_nps4``, ``i915``."""
    return resource.partition("/")[2]


def resource_of(unit: str, gpu_name: str) -> str:
    """The resource from which :func:`unit_name` made *unit*; ``gpu`` belongs to the GPU's vendor.

    Raises:
        ValueError: *unit* does not belong to any of these resources.
    """
    domains = {"nvidia": "nvidia.com", "amd": "amd.com", "intel": "gpu.intel.com"}
    first = domains[vendor_of(gpu_name)]
    for domain in dict.fromkeys((first, *domains.values())):
        if is_gpu_resource(f"{domain}/{unit}"):
            return f"{domain}/{unit}"
    raise ValueError(f"{unit!r:.60} is not a GPU resource; write one such as nvidia.com/gpu")


def accelerators(
    labels: Mapping[str, str], allocatable: Mapping[str, object], amount: Callable[[object], float]
) -> tuple[Accelerator, ...]:
    """The GPUs of a node, by resource: whole ones first, then by name.

    Args:
        labels: Labels of the node.
        allocatable: ``allocatable`` of the node's status.
        amount: Reads a quantity; returns 0 for anything else.
    """
    matches = ((_RESOURCE.match(name), int(amount(text))) for name, text in allocatable.items())
    found = [_read(match, count, labels) for match, count in matches if match is not None and count > 0]
    return tuple(sorted(found, key=lambda one: (-one.of_gpu, one.resource)))


def _read(match: re.Match[str], count: int, labels: Mapping[str, str]) -> Accelerator:
    resource = match.group()
    if match["mig"]:
        return _mig(resource, count, match["mig"], labels)
    if match["amd"]:
        return _amd(resource, count, match["xpx"] or _amd_partition(labels), labels)
    if match["intel"]:
        return _intel(resource, count, labels)
    return _nvidia(resource, count, labels)


# -- NVIDIA


def _nvidia(resource: str, count: int, labels: Mapping[str, str]) -> Accelerator:
    """Whole GPUs, shares of them, or MIG partitions that are offered as GPUs (strategy ``single``, GKE)."""
    name, memory = _whole(labels, "nvidia")
    profile = labels.get(_PARTITION) or name.partition("-MIG-")[2]
    if profile:
        name, memory = _named_slice(labels, profile)
    shares = _shares(resource, count, labels)
    of_gpu = _mig_part(profile) if profile else 1.0
    if shares == 1:
        return Accelerator(resource, count, name, memory, of_gpu)
    memory = None if memory is None else round(memory / shares, 2)
    return Accelerator(resource, count, f"{name}-shared", memory, of_gpu / shares, is_single=True)


def _mig(resource: str, count: int, profile: str, labels: Mapping[str, str]) -> Accelerator:
    """MIG partitions under their own resource name (strategy ``mixed``), and shares of those."""
    name, memory = _named_slice(labels, profile)
    text = labels.get(f"{resource.removesuffix('.shared')}.replicas", "")
    shares = int(text) if text.isdigit() else 1
    if shares < 2 and not resource.endswith(".shared"):
        return Accelerator(resource, count, name, memory, _mig_part(profile))
    shares = max(2, shares)
    memory = None if memory is None else round(memory / shares, 2)
    return Accelerator(resource, count, f"{name}-shared", memory, _mig_part(profile) / shares, is_single=True)


def _named_slice(labels: Mapping[str, str], profile: str) -> tuple[str, float | None]:
    """``A100-MIG-1g.5gb`` and 5 GB."""
    name, found = _whole(labels, "nvidia")[0].partition("-MIG-")[0], _MIG.match(profile)
    return f"{canonical_gpu(name)}-MIG-{profile}", float(found.group(2)) if found else None


def _mig_part(profile: str) -> float:
    found = _MIG.match(profile)
    return min(1.0, int(found.group(1)) / _MIG_SLICES) if found else 1.0


def _shares(resource: str, count: int, labels: Mapping[str, str]) -> int:
    """Number of pods that share each GPU of the resource."""
    reported = int(text) if (text := first_label(labels, _SHARES)) and text.isdigit() else 1
    strategy = first_label(labels, _STRATEGY)
    real = int(text) if (text := first_label(labels, _REAL_GPUS)) and text.isdigit() else None
    product = labels.get(GPU_PRODUCT, "")
    is_shared = resource.endswith(".shared") or product.endswith(_SHARED)
    is_shared = is_shared or strategy in ("time-slicing", "time-sharing", "mps")
    is_more = real is not None and count > real > 0 and "-MIG-" not in product and _PARTITION not in labels
    if not is_shared and not is_more:
        return max(1, reported)
    by_count = count // real if real and count > real else 2
    return reported if reported > 1 else by_count


# -- AMD and Intel


def _amd(resource: str, count: int, partition: str, labels: Mapping[str, str]) -> Accelerator:
    name, memory = _whole(labels, "amd")
    parts = _XPX.get(partition, 1)
    if parts == 1:
        return Accelerator(resource, count, name, memory)
    memory = None if memory is None else round(memory / parts, 2)
    return Accelerator(resource, count, f"{name}-{partition.upper()}", memory, 1 / parts)


def _amd_partition(labels: Mapping[str, str]) -> str:
    """Partition mode of GPUs that the plugin still counts as ``amd.com/gpu``: ``cpx``; "" for whole ones."""
    return (first_label(labels, _AMD_PARTITION) or "").lower().partition("_")[0]


def _intel(resource: str, count: int, labels: Mapping[str, str]) -> Accelerator:
    name, memory = _whole(labels, "intel")
    real = sum(int(text) for label, text in labels.items() if _INTEL_COUNT.match(label) and text.isdigit())
    if not 0 < real < count:
        return Accelerator(resource, count, name, memory)
    return Accelerator(resource, count, f"{name}-shared", None, real / count, is_single=True)


def _whole(labels: Mapping[str, str], vendor: str) -> tuple[str, float | None]:
    """Name and memory of a whole GPU of *vendor*."""
    label = first_label(labels, _NAMES[vendor])
    measured = _measured_gb(labels, vendor)
    if label is None:
        return _UNNAMED[vendor], measured
    text = label.removesuffix(_SHARED)
    if vendor != "nvidia":
        text = text.replace("_", " ")
    name = canonical_gpu(text, measured)
    if vendor == "intel" and vendor_of(name) != vendor:
        name = f"Intel-{name.replace(' ', '-')}"
    if measured is None:
        return name, MEMORY_GB.get(name)
    return name, nominal_memory_gb(name, measured)


def _measured_gb(labels: Mapping[str, str], vendor: str) -> float | None:
    if vendor == "amd":
        text = first_label(labels, _GB) or ""
        return float(text[:-1]) if re.fullmatch(r"\d{1,6}G", text) else None
    mib = first_label(labels, _MIB) if vendor == "nvidia" else None
    # Discovery reports MiB, about 81,000 for a GPU of 80 GB.
    return round(float(mib) * 1.048576 / 1000, 1) if mib and re.fullmatch(r"\d+", mib) else None


def first_label(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Value of the first of *names* that the node has."""
    return next((labels[name] for name in names if labels.get(name)), None)
