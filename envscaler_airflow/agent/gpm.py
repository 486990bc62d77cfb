"""Performance monitors of Hopper and later GPUs: what a kernel keeps busy, not only whether one runs.

Every name has ``gpu<index>_`` (``gpu0_mig1_`` for a MIG instance, where per cent are of the instance)
in front. Means since the last reading.

=================================== ==========================================================
metric                              meaning
=================================== ==========================================================
``sm_active_percent``               multiprocessors with work (DCGM_FI_PROF_SM_ACTIVE)
``sm_occupancy_percent``            warps in flight, of the most there can be (.._SM_OCCUPANCY)
``tensor_active_percent``           time in which tensor cores worked (.._PIPE_TENSOR_ACTIVE)
``dram_active_percent``             memory bandwidth used (.._DRAM_ACTIVE)
``pcie_transmit_bytes_per_s``       from the GPU to the host
``pcie_receive_bytes_per_s``        from the host to the GPU
``nvlink_transmit_bytes_per_s``     over all links
``nvlink_receive_bytes_per_s``      likewise
=================================== ==========================================================

Source: NVML API reference (nvml.h), section GPM; names after dcgm-exporter.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

MIB = 1024 * 1024
"""Unit of GPM's bandwidths. Source: nvml.h, NVML_GPM_METRIC_PCIE_TX_PER_SEC and its kin."""

METRICS = (
    ("sm_active_percent", "NVML_GPM_METRIC_SM_UTIL", 1),
    ("sm_occupancy_percent", "NVML_GPM_METRIC_SM_OCCUPANCY", 1),
    ("tensor_active_percent", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1),
    ("dram_active_percent", "NVML_GPM_METRIC_DRAM_BW_UTIL", 1),
    ("pcie_transmit_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    ("pcie_receive_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    ("nvlink_transmit_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    ("nvlink_receive_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
)
"""Our name, NVML's constant, and what one of its units is in ours."""
NAMES = tuple(name for name, _, _ in METRICS)

Values = Dict[str, float]


class Gpm:
    """The monitors of one GPU, or of one MIG instance: two samples, the older against the newer."""

    def __init__(self, nvml: Any, device: Any, instance: Optional[int] = None) -> None:
        """Get ready; *instance* is the GPU instance's id, *device* the whole GPU in any case.

        Raises:
            NVMLError: The driver has no such monitors.
        """
        self._nvml = nvml
        self._device = device
        self._instance = instance
        self._samples: List[Any] = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._has_older = False
        self._question, self._asked = _question(nvml)

    def read(self) -> Values:
        """Return the means since the last call; nothing at the first one.

        Raises:
            NVMLError: No sample could be taken; the next call begins anew.
        """
        has_older, self._has_older = self._has_older, False
        older, newer = self._samples
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._device, newer)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._device, self._instance, newer)
        self._samples, self._has_older = [newer, older], True
        return self._compare(older, newer) if has_older else {}

    def _compare(self, older: Any, newer: Any) -> Values:
        question = self._question
        question.sample1, question.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(question)
        found = {}
        for index, (name, unit) in enumerate(self._asked):
            metric = question.metrics[index]
            if metric.nvmlReturn == 0 and math.isfinite(metric.value):
                found[name] = metric.value * unit
        return found


def open_gpm(nvml: Any, device: Any, instance: Optional[int] = None) -> Optional[Gpm]:
    """Return the monitors of a device, None where it has none.

    Raises:
        NVMLError: It cannot be told.
        AttributeError: The module is older than GPM.
    """
    if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
        return None
    return Gpm(nvml, device, instance)


def _question(nvml: Any) -> Tuple[Any, List[Tuple[str, int]]]:
    """NVML's struct, filled in once, and what stands at each place of its answer."""
    question = nvml.c_nvmlGpmMetricsGet_t()
    question.version = nvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = len(METRICS)
    for index, (_, constant, _) in enumerate(METRICS):
        question.metrics[index].metricId = getattr(nvml, constant)
    return question, [(name, unit) for name, _, unit in METRICS]
