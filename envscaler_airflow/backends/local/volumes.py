"""Which volumes this machine can provide to a stage, and where the ones are that are not copied."""

from __future__ import annotations

import functools
import os
import posixpath
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.local import mount_main

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
    """The parts of *volumes* (a resolved spec's JSON) that this machine lacks; one sentence each."""
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
    """The source for the sidecar: an export is where the machine has mounted it, at the spec's path."""
    source: str | None = volume.get("source")
    return f"{HOST}{volume['mount_path']}" if source is not None and source.startswith("nfs:") else source


def absolute_paths(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(option of mounted.py, path)`` of the absolute paths that a resolved spec's JSON names."""
    found = [("--bind", str(volume["mount_path"])) for volume in spec.get("volumes") or ()]
    found += [("--out", str(path)) for path in (spec.get("outputs") or {}).values()]
    checkpoint = (spec.get("checkpoint") or {}).get("path")
    found += [("--out", str(checkpoint))] if checkpoint else []
    return [(option, posixpath.normpath(path)) for option, path in found if path.startswith("/")]


def mounting(root: str) -> list[str]:
    """The command that mounts; it uses this interpreter and nothing of the stage's environment."""
    return [sys.executable, "-I", "-S", mount_main.__file__, "--root", root]


@functools.cache
def no_mounts() -> str | None:
    """Why this machine allows no mount namespaces; None when it does. Checked once, by creating one."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*mounting(folder), "--", "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else (done.stderr.strip() or "no mount namespaces")


def mount_faults(
    spec: Mapping[str, Any], command: Sequence[str], *, why: Callable[[], str | None] = no_mounts
) -> list[str]:
    """The fault of a shell script that names paths of the spec where they are the machine's own."""
    named = mount_main.script_paths(list(command), [path for _, path in absolute_paths(spec)])
    reason = why() if named else None
    return [] if reason is None else [f"entrypoint: {mount_main.refusal(named, reason)}"]


def mount_warnings(spec: Mapping[str, Any], *, why: Callable[[], str | None] = no_mounts) -> list[str]:
    """What happens, on a machine without mounts, to code that opens a path of the spec itself."""
    paths = [path for _, path in absolute_paths(spec)]
    reason = why() if paths else None
    if reason is None:
        return []
    what = "arguments and variables that name them are rewritten, code that opens them itself fails"
    return [f"{', '.join(paths)}: not mounted on this machine ({reason}): {what}; {mount_main.WAY_OUT}"]
