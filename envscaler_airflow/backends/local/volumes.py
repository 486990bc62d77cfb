"""Volumes that this machine can provide to a stage, and the folders of those that are not copied."""

from __future__ import annotations

import functools
import os
import posixpath
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from envscaler_airflow.backends.local import mount_main
from envscaler_airflow.envspec.models import Volume
from envscaler_airflow.launch import Paths

HOST = "hostPath:"


def exists(path: str) -> bool:
    """True when *path* exists here."""
    return Path(path).exists()


def volume_faults(
    volumes: Iterable[Volume],
    *,
    has_path: Callable[[str], bool] = exists,
    is_mounted: Callable[[str], bool] = os.path.ismount,
) -> list[str]:
    """Those of *volumes* that this machine lacks; one sentence each."""
    told = ((volume.name, _fault(volume, has_path, is_mounted)) for volume in volumes)
    return [f"volumes: {name}: {fault}" for name, fault in told if fault is not None]


def _fault(volume: Volume, has_path: Callable[[str], bool], is_mounted: Callable[[str], bool]) -> str | None:
    if volume.kind == "pvc":
        return f"{volume.source} is a claim of Kubernetes; write another source under targets"
    if volume.kind == "nfs" and not is_mounted(volume.mount_path):
        return f"{volume.source} is not mounted at {volume.mount_path}; mount it first"
    if volume.kind == "hostPath" and not has_path(volume.location):
        return f"{volume.location} does not exist here; make it, or name another folder under targets"
    return None


def host_source(volume: Volume) -> str:
    """The source for the sidecar: an export is where the machine has mounted it, at the spec's path."""
    return f"{HOST}{volume.mount_path}" if volume.kind == "nfs" else volume.source


def mounted_paths(paths: Paths) -> list[tuple[str, str]]:
    """``(option of mount_main.py, path)`` of mounts at the paths of the spec."""
    found = [("--bind", volume.mount_path) for volume in paths.volumes]
    found += [("--out", path) for path in paths.uploaded]
    return [(option, posixpath.normpath(path)) for option, path in found]


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
    paths: Paths, command: Sequence[str], *, why: Callable[[], str | None] = no_mounts
) -> list[str]:
    """The fault of a shell script that names paths of the spec where they are the machine's own."""
    named = mount_main.script_paths(list(command), [path for _, path in mounted_paths(paths)])
    reason = why() if named else None
    return [] if reason is None else [f"entrypoint: {mount_main.refusal(named, reason)}"]


def mount_warnings(paths: Paths, *, why: Callable[[], str | None] = no_mounts) -> list[str]:
    """What happens, on a machine without mounts, to code that opens a path of the spec itself."""
    named = [path for _, path in mounted_paths(paths)]
    reason = why() if named else None
    if reason is None:
        return []
    what = "arguments and variables that name them are rewritten, code that opens them itself fails"
    return [f"{', '.join(named)}: not mounted on this machine ({reason}): {what}; {mount_main.WAY_OUT}"]
