"""The chain of wheel, CUDA, driver, GPU architecture and GPU memory: finds every broken link."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from packaging.requirements import Requirement

from envscaler_airflow.envspec.gpus import MEMORY_GB
from envscaler_airflow.envspec.models import EnvSpec
from envscaler_airflow.images.bases import facts
from envscaler_airflow.images.requirement_files import Requirements
from envscaler_airflow.images.venv import python_version

CAPABILITY: dict[str, float] = {
    "A10": 8.6, "A100": 8.0, "A100-80GB": 8.0, "A10G": 8.6, "A40": 8.6, "A6000": 8.6, "B200": 10.0,
    "B300": 10.3, "GH200": 9.0, "H100": 9.0, "H100-NVL": 9.0, "H200": 9.0, "K80": 3.7, "L4": 8.9, "L40": 8.9,
    "L40S": 8.9, "M60": 5.2, "P100": 6.0, "P4": 6.1, "P40": 6.1, "RTX2080Ti": 7.5, "RTX3090": 8.6,
    "RTX4090": 8.9, "RTX5090": 12.0, "RTX6000": 7.5, "RTX6000Ada": 8.9, "RTXPRO4500": 12.0,
    "RTXPRO6000": 12.0, "T4": 7.5, "T4g": 7.5, "V100": 7.0, "V100-32GB": 7.0,
}  # fmt: skip
"""Compute capability by canonical name. Source: NVIDIA, CUDA GPU Compute Capability."""

MIN_DRIVER: dict[int, int] = {11: 450, 12: 525, 13: 580}
"""Minimum driver branch by CUDA major. Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility."""

ARCHITECTURES: dict[str, tuple[float, float]] = {
    "11.7": (3.7, 8.6), "11.8": (3.7, 9.0), "12.1": (5.0, 9.0), "12.4": (5.0, 9.0), "12.6": (5.0, 9.0),
    "12.8": (7.5, 12.0), "12.9": (7.0, 12.0), "13.0": (7.5, 12.0), "13.2": (7.5, 12.0),
}  # fmt: skip
"""Minimum and maximum compute capability with kernels in PyTorch's wheels of a CUDA version.

Source: pytorch/pytorch RELEASE.md, "PyTorch CUDA Support Matrix", and .ci/manywheel/build_cuda.sh.
"""

WHEELS: dict[str, tuple[str, ...]] = {
    "2.0": ("11.7", "11.8"), "2.1": ("12.1", "11.8"), "2.2": ("12.1", "11.8"), "2.3": ("12.1", "11.8"),
    "2.4": ("12.1", "11.8", "12.4"), "2.5": ("12.4", "11.8", "12.1"), "2.6": ("12.4", "11.8", "12.6"),
    "2.7": ("12.6", "11.8", "12.8"), "2.8": ("12.8", "12.6", "12.9"), "2.9": ("12.8", "12.6", "13.0"),
    "2.10": ("12.8", "12.6", "13.0"),
}  # fmt: skip
"""CUDA versions with wheels of a PyTorch version; the first is that of the default index.

Source: pytorch/pytorch RELEASE.md, "PyTorch CUDA Support Matrix"; PyTorch, Previous Versions.
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """The known parts of the chain; None is unknown and breaks no link.

    Attributes:
        torch: PyTorch's version.
        cuda: CUDA version for which it, or the base, is built.
        gpu: Canonical name of the GPU.
        driver: The machine's driver, such as ``535.104.05``.
    """

    torch: str | None = None
    cuda: str | None = None
    gpu: str | None = None
    driver: str | None = None

    def on(self, gpu: str, *, driver: str | None = None) -> Chain:
        """Return the same software on a GPU of this name."""
        return replace(self, gpu=gpu, driver=driver)


def software(spec: EnvSpec, requirements: Requirements) -> Chain:
    """PyTorch and CUDA of the stage: pinned versions first, then the base's."""
    known = facts(spec.base)
    pinned = requirements.pinned("torch", python_version(spec))
    torch = _version_of(pinned) or known.provides.get("torch")
    if torch is None:
        return Chain(cuda=known.cuda)
    if torch == known.provides.get("torch"):
        return Chain(torch=torch, cuda=known.cuda)
    address = pinned.url if pinned is not None and pinned.url is not None else None
    return Chain(torch=torch, cuda=_wheel_cuda(torch, [address] if address else requirements.index_urls))


def _version_of(pinned: Requirement | None) -> str | None:
    """The version that a pin names, or the version in the name of the wheel at its address."""
    if pinned is None:
        return None
    if pinned.url is not None:
        wheel = re.search(r"/torch-([0-9][^-/]*)-[^/]*\.whl", unquote(pinned.url))
        return wheel[1] if wheel else None
    return next(item.version for item in pinned.specifier if item.operator in ("==", "==="))


def _wheel_cuda(torch: str, urls: Sequence[str]) -> str | None:
    """From the local version (``+cu118``), or the newest of the indexes *urls*, or the default index."""
    if match := re.search(r"\+cu([0-9]{2})([0-9]+)", torch):
        return f"{match[1]}.{match[2]}"
    found = [match for url in urls if (match := re.search(r"/cu([0-9]{2})([0-9]+)(?=/|\Z)", url))]
    if found:
        major, minor = max((int(match[1]), int(match[2])) for match in found)
        return f"{major}.{minor}"
    if re.search(r"\+(cpu|rocm|xpu)", torch) or any(
        re.search(r"/(cpu|rocm[0-9.]*|xpu)(?=/|\Z)", url) for url in urls
    ):
        return None
    wheels = WHEELS.get(_minor(torch))
    return wheels[0] if wheels else None


def broken_links(chain: Chain, spec: EnvSpec) -> list[str]:
    """Each link of *chain* that is broken for *spec*, with the fix."""
    return broken_software(chain) + _memory(chain, spec)


def broken_software(chain: Chain) -> list[str]:
    """The broken links between wheel, CUDA, driver and architecture."""
    found = []
    capability = CAPABILITY.get(chain.gpu or "")
    bounds = ARCHITECTURES.get(_minor(chain.cuda)) if chain.cuda is not None else None
    if chain.cuda is not None and bounds is not None and capability is not None:
        low, high = bounds
        if capability < low or int(capability) > int(high):  # kernels also run on later minors of their major
            what = f"torch {chain.torch} built for CUDA {chain.cuda}" if chain.torch else f"CUDA {chain.cuda}"
            found.append(
                f"{what} has no kernels for {chain.gpu} (compute capability {capability:g}); "
                f"{_versions_for(capability)}"
            )
    if chain.cuda is not None and chain.driver is not None:
        least = MIN_DRIVER.get(int(chain.cuda.partition(".")[0]))
        has = int(re.sub(r"[^0-9].*", "", chain.driver) or 0)
        if least is not None and has < least:
            found.append(
                f"CUDA {chain.cuda} needs driver {least} or newer, the machine has {chain.driver}; "
                f"upgrade it, or use CUDA {_cuda_for_driver(has)}"
            )
    return found


def software_faults(spec: EnvSpec, requirements: Requirements) -> Callable[[str], str | None] | None:
    """Return a function that tells why the software cannot use a GPU of a name; None if nothing is known."""
    chain = software(spec, requirements)
    if chain.cuda is None:
        return None

    @functools.cache
    def told(gpu: str) -> str | None:
        return next(iter(broken_software(chain.on(gpu))), None)

    return told


def broken_for(spec: EnvSpec, chain: Chain) -> list[str]:
    """Links that break on every GPU that the spec allows; [] if at least one GPU works."""
    names = [
        name for need in spec.resources.alternatives if need.requests.gpu for name in need.requests.gpu.type
    ]
    broken = [broken_links(chain.on(name), spec) for name in names]
    return [link for links in broken for link in links] if broken and all(broken) else []


def _memory(chain: Chain, spec: EnvSpec) -> list[str]:
    gpu = spec.resources.alternatives[0].requests.gpu
    has = MEMORY_GB.get(chain.gpu or "")
    if gpu is None or gpu.memory_gb is None or has is None or has >= gpu.memory_gb:
        return []
    return [f"{chain.gpu} has {has:g} GB, gpu.memory asks for {gpu.memory}; choose another type, or less"]


def _versions_for(capability: float) -> str:
    cudas = [
        cuda
        for cuda, (low, high) in ARCHITECTURES.items()
        if low <= capability and int(capability) <= int(high)
    ]
    if not cudas:
        return "no wheel in the table has any"
    torches = [version for version, built in WHEELS.items() if set(built) & set(cudas)]
    some = (
        f"torch {torches[0]} to {torches[-1]}"
        if len(torches) > 1
        else f"torch {torches[0]}"
        if torches
        else "torch"
    )
    return f"{some} for CUDA {', '.join(cudas)} have them"


def _cuda_for_driver(branch: int) -> str:
    fitting = [major for major, least in MIN_DRIVER.items() if least <= branch]
    return f"{max(fitting)}.x" if fitting else "of an older base"


def _minor(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])
