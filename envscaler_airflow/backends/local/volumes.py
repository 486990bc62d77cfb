"""Which volumes a stage can have on this machine, and where it finds those that are not copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HOST = "hostPath:"


def exists(path: str) -> bool:
    """True when *path* exists here."""
    return Path(path).exists()


def volume_faults(
    volumes: Iterable[Mapping[str, Any]],
    *,
    has_path: Callable[[str], bool] = exists,
    is_mounted: Callable[[str], bool] = os.path.ismount,
) -> list[str]:
    """What this machine lacks of *volumes*, as a resolved spec's JSON has them; one sentence each."""
    told = ((volume["name"], _fault(volume, has_path, is_mounted)) for volume in volumes)
    return [f"volumes: {name}: {fault}" for name, fault in told if fault is not None]


def _fault(
    volume: Mapping[str, Any], has_path: Callable[[str], bool], is_mounted: Callable[[str], bool]
) -> str | None:
    source, mount_path = volume.get("source") or "", volume["mount_path"]
    if source.startswith("pvc:"):
        return f"{source} is a claim of Kubernetes; write another source under targets"
    if source.startswith("nfs:") and not is_mounted(mount_path):
        return f"{source} is not mounted at {mount_path}; mount it first"
    folder = "/" + source.removeprefix(HOST).lstrip("/")
    if source.startswith(HOST) and not has_path(folder):
        return f"{folder} does not exist here; make it, or name another folder under targets"
    return None


def host_source(volume: Mapping[str, Any]) -> str | None:
    """What the courier is told: an export lies where the machine has mounted it, at the spec's own path."""
    source: str | None = volume.get("source")
    return f"{HOST}{volume['mount_path']}" if source is not None and source.startswith("nfs:") else source
