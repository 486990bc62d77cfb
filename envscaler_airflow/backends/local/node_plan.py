"""What ``submit`` writes for each node: command, environment, limits, layout and volumes. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.local import files, mount_main
from envscaler_airflow.backends.local.machine import GIB
from envscaler_airflow.envspec.models import Volume
from envscaler_airflow.launch import Launch, Paths

DRAIN_S = 3600.0
"""Longest time for uploads after the command ended, seconds. Chosen: 100 GB at 30 MB/s."""

UPLOAD_S = 5.0
"""Part of the grace reserved for the last uploads, seconds. Chosen: as the agent does under a kubelet."""

_SLUG_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Programs:
    """How sidecar and wrapper are started, and how long uploads may take.

    Attributes:
        sidecar: Command to which the sidecar's options are appended; () for the interpreter's default.
        wrapper: Command to which ``run --spool E -- COMMAND`` is appended; () for the same default.
        drain_s: Longest time for uploads after the command ended, seconds.
        cgroups: False: only rlimits, and no cgroup scope for processes that leave session and parent.
    """

    sidecar: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    drain_s: float = DRAIN_S
    cgroups: bool = True


@dataclass(frozen=True, slots=True)
class PathMap:
    """Absolute paths of the spec and their paths on this machine, longest first."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        paths: Sequence[str],
        root: PurePosixPath,
        *,
        saves: str | None = None,
        saves_root: PurePosixPath | None = None,
    ) -> PathMap:
        """Map each absolute path ``/x/y`` to ``<root>/x/y``; relative ones are unchanged.

        *saves*, its parents and its content are below *saves_root* instead.
        """
        absolute = {posixpath.normpath(path) for path in paths if path.startswith("/")}
        ordered = sorted(absolute, key=lambda path: (-len(path), path))
        kept = _related(absolute, posixpath.normpath(saves)) if saves and saves_root else set()
        roots = {path: saves_root if saves_root and path in kept else root for path in ordered}
        return cls(tuple((path, str(roots[path] / path.lstrip("/"))) for path in ordered))

    def path(self, path: str) -> str:
        """Where *path* is on this machine: unchanged when neither it nor a parent is mapped."""
        for original, local in self.pairs:
            if path.rstrip("/") == original:
                return local
            if path.startswith(original + "/"):
                return local + path[len(original) :]
        return path

    def argument(self, text: str) -> str:
        """Rewrite ``/x/y``, ``/x/y/more``, ``--flag=/x/y`` and ``name=/x/y/more``."""
        flag, separator, value = text.partition("=")
        if separator and value.startswith("/") and re.fullmatch(r"[A-Za-z0-9_.+-]+", flag):
            return f"{flag}={self.path(value)}"
        return self.path(text)


def _related(paths: set[str], saves: str) -> set[str]:
    """Those of *paths* that are *saves*, contain it, or are in it."""
    tops = {path for path in paths if path == saves or saves.startswith(f"{path.rstrip('/')}/")}
    return {
        path for path in paths if any(path == top or path.startswith(f"{top.rstrip('/')}/") for top in tops)
    }


def run_name(request: AttemptRequest) -> str:
    """The part common to all attempts of a run: label, hash of store and run."""
    key = f"{request.store_url}\0{request.run_prefix}".encode()
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", request.run_label).strip("-")[:_SLUG_CHARACTERS] or "run"
    return f"{slug}-{hashlib.sha256(key).hexdigest()[:12]}"


def attempt_name(request: AttemptRequest) -> str:
    """Unique, safe as a file name, and readable: name of the run, generation, attempt."""
    return f"{run_name(request)}-g{request.generation}-a{request.attempt}"


def render_attempt(request: AttemptRequest, folder: PurePosixPath, programs: Programs) -> dict[str, Any]:
    """Everything that ``submit`` would write below *folder*, without secrets.

    ``submit`` and node main add what is known only then: the free CPUs and GPUs, the inherited environment.

    Raises:
        SpecError: The sidecar could not open the store.
    """
    request.store_login.check("name a profile_name instead, of ~/.aws/config of the worker's user")
    nodes = range(request.allocation.nodes)
    return {
        "name": folder.name,
        "folder": str(folder),
        "offer": request.allocation.offer.to_dict(),
        "nodes": [_Node(request, folder / f"n{node}", node, programs).render() for node in nodes],
    }


@dataclass(frozen=True, slots=True)
class _Node:
    request: AttemptRequest
    folder: PurePosixPath
    node: int
    programs: Programs
    paths: PathMap = field(init=False)

    def __post_init__(self) -> None:
        found = self.launch.paths
        named = [*(volume.mount_path for volume in found.volumes), *found.uploaded]
        root, saves = self.folder / files.ROOT, found.checkpoint
        object.__setattr__(self, "paths", PathMap.of(named, root, saves=saves, saves_root=self._saves()))

    @property
    def launch(self) -> Launch:
        return self.request.launch

    def _saves(self) -> PurePosixPath:
        """Path of the checkpoint folder: the same in every attempt, because trainings store paths."""
        return self.folder.parent.parent / f"{run_name(self.request)}{files.SAVES}" / self.folder.name

    def render(self) -> dict[str, Any]:
        command = [self.paths.argument(part) for part in self.launch.command]
        saves = str(self._saves()) if self.launch.paths.checkpoint else None
        return {"request": self._request(command), "layout": self._layout(), "saves": saves}

    def _request(self, command: list[str]) -> dict[str, Any]:
        request = self.request
        spool = str(self.folder / files.SPOOL)
        python = [sys.executable, "-P"]
        wrapper = list(self.programs.wrapper) or [*python, "-m", "envscaler_agent"]
        sidecar = list(self.programs.sidecar) or [*python, "-m", "envscaler_airflow.sidecar"]
        options = request.sidecar_options(spool, str(self.folder / files.LAYOUT), node=self.node)
        return {
            "attempt": self.folder.parent.name,
            "node": self.node,
            "nodes": request.allocation.nodes,
            "python": request.python,
            "command": command,
            "wrapper": [
                *(*wrapper, "run", "--spool", spool, "--grace", self._grace(), "--"),
                *(*self._mounted(), *command),
            ],
            "sidecar": [*sidecar, *options],
            "env": self._env(spool),
            "secret_names": sorted(request.secret_env),
            "limits": self._limits(),
            "deadline_s": request.deadline_s,
            "grace_s": request.grace_s,
            "drain_s": self.programs.drain_s,
            "cgroups": self.programs.cgroups,
        }

    def _mounted(self) -> list[str]:
        """The command that mounts the spec's paths; [] when the spec names none."""
        options: list[str] = []
        for option, path in mounted_paths(self.launch.paths):
            options += [option, self.paths.path(path), path]
        if not options:
            return []
        return [*mounting(str(self.folder / files.MOUNTS)), *options, "--"]

    def _grace(self) -> str:
        """Seconds that the wrapper gives the command; the rest of the grace is for the last uploads."""
        grace_s = self.request.grace_s
        return f"{max(grace_s - UPLOAD_S, grace_s / 2):g}"

    def _limits(self) -> dict[str, Any]:
        """The spec's memory limit, at most the share's; the share's where the spec has none."""
        offer = self.request.allocation.offer
        share_bytes = int(offer.memory_gib * GIB)
        asked = self.launch.resources.limits.memory_bytes
        return {
            "memory_bytes": share_bytes if asked is None else min(asked, share_bytes),
            "vcpus": offer.vcpus,
        }

    def _env(self, spool: str) -> dict[str, str]:
        """The spec's variables, with paths of this machine, and the backend's."""
        request = self.request
        own = request.env(spool=spool, cpus=request.allocation.offer.vcpus, local=self.paths.path)
        plain = {name: self.paths.argument(value) for name, value in self.launch.env.items()}
        return plain | own | {"ENVSCALER_NODE": str(self.node)}

    def _layout(self) -> dict[str, Any]:
        local = self.paths.path
        return self.launch.layout(local) | {
            "work": str(self.folder / files.WORK),
            "mounts": [
                {
                    "name": volume.name,
                    "source": host_source(volume),
                    "path": local(volume.mount_path),
                    "read_only": volume.is_read_only,
                }
                for volume in self.launch.paths.volumes
            ],
            "training_paths": {here: original for original, here in self.paths.pairs},
            "store_options": self._store_options(),
        }

    def _store_options(self) -> dict[str, Any]:
        profile = self.request.store_login.profile
        options = dict(self.request.store_options) | ({"profile_name": profile} if profile else {})
        return dict(json.loads(json.dumps(options)))


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
