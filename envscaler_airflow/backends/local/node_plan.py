"""What ``submit`` writes for each node: command, environment, limits and layout. Pure."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from envscaler_airflow.backends.base import AttemptRequest
from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.machine import GIB
from envscaler_airflow.backends.local.shares import asked_memory
from envscaler_airflow.backends.local.volumes import absolute_paths, host_source, mounting

DRAIN_S = 3600.0
"""Longest time for uploads after the command ended, seconds. Chosen: 100 GB at 30 MB/s."""

UPLOAD_S = 5.0
"""Part of the grace reserved for the last uploads, seconds. Chosen: as the agent does under a kubelet."""

_SLUG_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Launch:
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


def render_attempt(request: AttemptRequest, folder: PurePosixPath, launch: Launch) -> dict[str, Any]:
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
        "nodes": [_Node(request, folder / f"n{node}", node, launch).render() for node in nodes],
    }


@dataclass(frozen=True, slots=True)
class _Node:
    request: AttemptRequest
    folder: PurePosixPath
    node: int
    launch: Launch
    spec: Mapping[str, Any] = field(init=False)
    paths: PathMap = field(init=False)

    def __post_init__(self) -> None:
        spec = self.request.spec
        paths = [*(str(volume["mount_path"]) for volume in spec.get("volumes") or ())]
        paths += [str(path) for path in (spec.get("outputs") or {}).values()]
        checkpoint = (spec.get("checkpoint") or {}).get("path")
        paths += [str(checkpoint)] if checkpoint else []
        object.__setattr__(self, "spec", spec)
        saves = str(checkpoint) if checkpoint else None
        mapped = PathMap.of(paths, self.folder / files.ROOT, saves=saves, saves_root=self._saves())
        object.__setattr__(self, "paths", mapped)

    def _saves(self) -> PurePosixPath:
        """Path of the checkpoint folder: the same in every attempt, because trainings store paths."""
        return self.folder.parent.parent / f"{run_name(self.request)}{files.SAVES}" / self.folder.name

    def render(self) -> dict[str, Any]:
        command = [self.paths.argument(part) for part in self.request.command]
        saves = str(self._saves()) if (self.spec.get("checkpoint") or {}).get("path") else None
        return {"request": self._request(command), "layout": self._layout(command), "saves": saves}

    def _request(self, command: list[str]) -> dict[str, Any]:
        request = self.request
        spool = str(self.folder / files.SPOOL)
        python = [sys.executable, "-P"]
        wrapper = list(self.launch.wrapper) or [*python, "-m", "envscaler_agent"]
        sidecar = list(self.launch.sidecar) or [*python, "-m", "envscaler_airflow.sidecar"]
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
            "sidecar": [*sidecar, *self._sidecar_options(spool)],
            "env": self._env(spool),
            "secret_names": sorted(request.secret_env),
            "limits": self._limits(),
            "deadline_s": request.deadline_s,
            "grace_s": request.grace_s,
            "drain_s": self.launch.drain_s,
            "cgroups": self.launch.cgroups,
        }

    def _mounted(self) -> list[str]:
        """The command that mounts the spec's paths; [] when the spec names none."""
        options: list[str] = []
        for option, path in absolute_paths(self.spec):
            options += [option, self._local(path), path]
        if not options:
            return []
        return [*mounting(str(self.folder / files.MOUNTS)), *options, "--"]

    def _grace(self) -> str:
        """Seconds that the wrapper gives the command; the rest of the grace is for the last uploads."""
        grace_s = self.request.grace_s
        return f"{max(grace_s - UPLOAD_S, grace_s / 2):g}"

    def _sidecar_options(self, spool: str) -> list[str]:
        request = self.request
        options = {
            "spool": spool,
            "store": request.store_url,
            "prefix": request.run_prefix,
            "generation": request.generation,
            "attempt": request.attempt,
            "node": self.node,
            "nodes": request.allocation.nodes,
            "layout": self.folder / files.LAYOUT,
        }
        return [part for name, value in options.items() for part in (f"--{name}", str(value))]

    def _limits(self) -> dict[str, Any]:
        """The spec's memory limit, at most the share's; the share's where the spec has none."""
        offer = self.request.allocation.offer
        slice_bytes = int(offer.memory_gib * GIB)
        asked = asked_memory((self.spec.get("resources") or {}).get("limits") or {})
        return {
            "memory_bytes": slice_bytes if asked is None else min(asked, slice_bytes),
            "vcpus": offer.vcpus,
        }

    def _env(self, spool: str) -> dict[str, str]:
        request = self.request
        env = {name: self.paths.argument(value) for name, value in request.env.items()}
        env |= {
            "ENVSCALER_SPOOL": spool,
            "ENVSCALER_RUN": request.run_prefix,
            "ENVSCALER_GENERATION": str(request.generation),
            "ENVSCALER_ATTEMPT": str(request.attempt),
            "ENVSCALER_NODE": str(self.node),
            "ENVSCALER_NODES": str(request.allocation.nodes),
            "ENVSCALER_CPUS": str(max(1, int(request.allocation.offer.vcpus))),
        }
        for name, path in (self.spec.get("outputs") or {}).items():
            env[_variable("OUTPUT", name)] = self._local(str(path))
        for volume in self.spec.get("volumes") or ():
            env[_variable("VOLUME", volume["name"])] = self._local(str(volume["mount_path"]))
        for name, value in (self.spec.get("inputs") or {}).items():
            env[_variable("INPUT", name)] = self._input(str(value))
        checkpoint = (self.spec.get("checkpoint") or {}).get("path")
        if checkpoint:
            env["ENVSCALER_CHECKPOINT_DIR"] = self._local(str(checkpoint))
        return env

    def _input(self, uri: str) -> str:
        """The path of an input that a volume brings, else its URI."""
        for volume in self.spec.get("volumes") or ():
            if volume.get("source") == uri:
                return self._local(str(volume["mount_path"]))
        return uri

    def _local(self, path: str) -> str:
        """A path of the spec on this machine; a relative one is relative to the working directory."""
        return self.paths.path(path) if path.startswith("/") else str(self.folder / files.WORK / path)

    def _layout(self, command: list[str]) -> dict[str, Any]:
        checkpoint = (self.spec.get("checkpoint") or {}).get("path")
        return {
            "spec": self.request.spec_name,
            "work": str(self.folder / files.WORK),
            "mounts": [
                {
                    "name": volume["name"],
                    "source": host_source(volume),
                    "path": self._local(str(volume["mount_path"])),
                    "read_only": volume.get("access_mode") in ("ReadOnly", "ReadOnlyMany"),
                }
                for volume in self.spec.get("volumes") or ()
            ],
            "outputs": {
                name: self._local(str(path)) for name, path in (self.spec.get("outputs") or {}).items()
            },
            "checkpoint_path": self._local(str(checkpoint)) if checkpoint else None,
            "command": command,
            "seen_as": {local: original for original, local in self.paths.pairs},
            "store_options": self._store_options(),
        }

    def _store_options(self) -> dict[str, Any]:
        profile = self.request.store_login.profile
        options = dict(self.request.store_options) | ({"profile_name": profile} if profile else {})
        return dict(json.loads(json.dumps(options)))


def _variable(kind: str, name: str) -> str:
    """``ENVSCALER_OUTPUT_MY_MODEL`` for the output ``my-model``."""
    return f"ENVSCALER_{kind}_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
