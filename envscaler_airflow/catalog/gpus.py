"""Names of GPUs: what a driver says becomes what the price tables and specs say."""

from __future__ import annotations

import re

from envscaler_airflow.spec.gpus import MEMORY_GB, canonical

_LARGER = {"A100": "A100-80GB", "V100": "V100-32GB"}
"""Models sold with two memory sizes: the smaller by its name, and the name of the larger."""
_INSTINCT = re.compile(r"MI\d+[A-Z]?\Z")
"""A model of AMD Instinct, whose boards are named ``MI250X OAM``."""


def canonical_gpu(driver_name: str, memory_gb: float | None = None) -> str:
    """``NVIDIA A100-SXM4-80GB`` becomes ``A100-80GB``, ``Tesla T4`` becomes ``T4``.

    Args:
        driver_name: As NVML or nvidia-smi says it.
        memory_gb: Total memory of one GPU, GB; tells two sizes of a model apart when the name does not.
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
    """The vendor's figure for a canonical name, what was measured for one that is not known."""
    return float(MEMORY_GB.get(name, round(measured_gb, 1)))
