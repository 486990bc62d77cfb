"""Names of GPUs: what a driver says becomes what the price tables say."""

from __future__ import annotations

import re

_MEMORY_SPLIT = {"A100": (40.0, "A100-80GB"), "V100": (16.0, "V100-32GB")}
"""Models sold with two memory sizes: the smaller one in GB, and the name of the larger."""


def canonical_gpu(driver_name: str, memory_gb: float | None = None) -> str:
    """``NVIDIA A100-SXM4-80GB`` becomes ``A100-80GB``, ``Tesla T4`` becomes ``T4``.

    Args:
        driver_name: As NVML or nvidia-smi says it.
        memory_gb: Total memory of one GPU, GB; tells two sizes of a model apart when the name does not.
    """
    name = re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", driver_name.strip())
    name = re.sub(r"^(Tesla|GeForce)\s+", "", name)
    model = re.split(r"[-\s]", name)[0]
    if model in _MEMORY_SPLIT:
        smaller_gb, larger = _MEMORY_SPLIT[model]
        stated = re.search(r"(\d+)\s*GB", name)
        size = float(stated[1]) if stated else memory_gb
        return larger if size is not None and size > 1.2 * smaller_gb else model
    if model in ("RTX", "GTX", "Radeon"):
        return name
    return model
