"""cgroups of a node: real limits, and a scope that no process leaves by forking.

Every hierarchy that permits it gets ``envscaler/<node>/main`` (node main, its guard, the sidecar) and
``envscaler/<node>/training`` (wrapper and command, with the limits). The groups are at the hierarchy's root
where that is allowed, because below the group of an Airflow worker they would end with it. Version 1, version
2 and both at once work. Where no group can be created, the scope is empty, ``limits_note`` gives the reason,
and the caller uses rlimits.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envscaler_airflow.planning.record import Record

Part = Literal["main", "training"]

_PARENT = "envscaler"
_CPU_PERIOD_US = 100_000
"""The kernel's own default period of the CPU quota: Documentation/scheduler/sched-bwc.rst."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the training of a node may use.

    Attributes:
        memory_bytes: Memory of all its processes together; None: no limit.
        vcpus: CPU time, in CPUs; None: no limit.
    """

    memory_bytes: int | None = None
    vcpus: float | None = None


@dataclass(frozen=True, slots=True)
class CgroupScope(Record):
    """The cgroup folders of one node, one for each hierarchy.

    Attributes:
        groups: The node's folder in each hierarchy.
        unified: The group that can be killed in one operation (version 2); ``""`` without.
        memory: The folder that limits memory and counts kills; ``""`` without.
        limits: The limits in force: ``memory``, ``cpu`` to how.
        notes: What is not available, and why.
    """

    groups: tuple[str, ...] = ()
    unified: str = ""
    memory: str = ""
    limits: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def join(self, part: Part) -> None:
        """Put the calling process, and everything that it will start, into the scope."""
        for group in self.groups:
            Path(group, part, "cgroup.procs").write_text("0", encoding="ascii")  # 0: the writing process

    def pids(self, *parts: Part) -> set[int]:
        """Processes in the scope (in *parts*, or in all)."""
        found: set[int] = set()
        for group in self.groups:
            for part in parts or ("main", "training"):
                for file in Path(group, part).rglob("cgroup.procs"):
                    with suppress(OSError, ValueError):
                        found.update(int(line) for line in file.read_text(encoding="ascii").split())
        return found - {0}

    def kill(self, part: Part | None = None) -> None:
        """SIGKILL every process in *part*, or in the whole scope, in one operation where the kernel can."""
        if self.unified:
            with suppress(OSError):
                Path(self.unified, part or "", "cgroup.kill").write_text("1", encoding="ascii")

    def oom_kills(self) -> int | None:
        """How often the kernel's OOM killer acted in the limited group; None when it does not count."""
        if not self.memory:
            return None
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                text = Path(self.memory, name).read_text(encoding="ascii")
                counts = dict(line.split() for line in text.splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
        return None

    def leave(self) -> None:
        """Move the calling process back to where the scope was created, so that the scope can be removed."""
        for group in self.groups:
            with suppress(OSError):
                (Path(group).parent.parent / "cgroup.procs").write_text("0", encoding="ascii")

    def limits_said(self, asked: Mapping[str, Any]) -> str:
        """One human-readable line: the limits in force, and those that are not available."""
        memory = self.limits.get("memory", "rlimit" if hasattr(resource, "RLIMIT_DATA") else "none")
        cpu = self.limits.get("cpu", "affinity")
        said = f"memory {asked['memory_bytes']} bytes by {memory}, {asked['vcpus']:g} CPUs by {cpu}"
        return "; ".join((said, *self.notes))

    def remove(self) -> None:
        """Remove the folders; those that still have a process stay."""
        for group in self.groups:
            for folder in sorted(Path(group).rglob("*"), reverse=True):
                if folder.is_dir():
                    with suppress(OSError):
                        folder.rmdir()
            for folder in (Path(group), Path(group).parent):
                with suppress(OSError):
                    folder.rmdir()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup hierarchy.

    Attributes:
        path: Where it is mounted.
        controllers: What it controls; for version 2 the available ones.
        is_unified: True for version 2.
        own: The calling process's group in it, ``/`` for the root.
    """

    path: Path
    controllers: frozenset[str]
    is_unified: bool
    own: str


def hierarchies(mounts: str, own: str) -> list[Hierarchy]:
    """Hierarchies of *mounts* (/proc/self/mounts) with this process's groups (/proc/self/cgroup)."""
    groups = {}
    for line in own.splitlines():
        _, names, group = line.split(":", 2)
        groups[names] = group
    found = []
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append(Hierarchy(Path(path), _offered(Path(path)), True, groups.get("", "/")))
        elif kind == "cgroup":
            parts = set(options.split(","))
            group = next((g for names, g in groups.items() if set(names.split(",")) & parts and names), "/")
            found.append(Hierarchy(Path(path), frozenset(parts & {"memory", "cpu"}), False, group))
    return [one for one in found if one.is_unified or one.controllers]


def _offered(path: Path) -> frozenset[str]:
    try:
        names = (path / "cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return frozenset()
    return frozenset(names) & {"memory", "cpu"}


def build_scope(name: str, limits: Limits, *, proc: Path = Path("/proc/self")) -> CgroupScope:
    """Create the groups of node *name* and set its limits; missing rights or kernel features never raise."""
    notes: list[str] = []
    try:
        mounted = hierarchies(
            (proc / "mounts").read_text(encoding="utf-8"), (proc / "cgroup").read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as err:
        return CgroupScope(notes=(f"no cgroups: {err}",))
    groups, held, unified, memory = [], {}, "", ""
    for hierarchy in mounted:
        group = _make_group(hierarchy, name, notes)
        if group is None:
            continue
        groups.append(str(group))
        unified = str(group) if hierarchy.is_unified and (group / "cgroup.kill").exists() else unified
        held.update(_set_limits(hierarchy, group / "training", limits, notes))
        if "memory" in hierarchy.controllers and _counts_kills(group / "training"):
            memory = str(group / "training")
    return CgroupScope(tuple(groups), unified, memory, held, tuple(notes))


def _counts_kills(group: Path) -> bool:
    return (group / "memory.events").exists() or (group / "memory.oom_control").exists()


def _make_group(hierarchy: Hierarchy, name: str, notes: list[str]) -> Path | None:
    """The node's group at the root of the hierarchy, else below this process's group, else None."""
    reason = ""
    for parent in dict.fromkeys((hierarchy.path, hierarchy.path / hierarchy.own.lstrip("/"))):
        group = parent / _PARENT / name
        try:
            _make_rooms(group)
            if hierarchy.is_unified:
                _delegate(hierarchy, (parent, parent / _PARENT, group), notes)
        except OSError as err:
            reason = str(err)
            continue
        return group
    notes.append(f"no group in {hierarchy.path}: {reason}")
    return None


def _make_rooms(group: Path) -> None:
    for attempt in range(3):
        try:
            for part in ("main", "training"):
                (group / part).mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # the end of another node removed the empty parent in between
            if attempt == 2:
                raise
        else:
            return


def _delegate(hierarchy: Hierarchy, parents: tuple[Path, ...], notes: list[str]) -> None:
    """Delegate memory and cpu of version 2 to the node's group, where the kernel permits it."""
    for controller in sorted(hierarchy.controllers):
        for parent in parents:
            try:
                (parent / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
            except OSError as err:
                notes.append(f"no {controller} control in {parent}: {err.strerror}")
                break


def _set_limits(hierarchy: Hierarchy, group: Path, limits: Limits, notes: list[str]) -> dict[str, str]:
    held = {}
    if "memory" in hierarchy.controllers and limits.memory_bytes is not None:
        name = "memory.max" if hierarchy.is_unified else "memory.limit_in_bytes"
        if _write(group / name, str(limits.memory_bytes), notes):
            held["memory"] = "cgroup2" if hierarchy.is_unified else "cgroup1"
            swap = "memory.swap.max" if hierarchy.is_unified else "memory.memsw.limit_in_bytes"
            value = "0" if hierarchy.is_unified else str(limits.memory_bytes)
            if (group / swap).exists():
                _write(group / swap, value, notes)
    if "cpu" in hierarchy.controllers and limits.vcpus is not None:
        quota = max(1000, int(limits.vcpus * _CPU_PERIOD_US))
        if hierarchy.is_unified:
            is_set = _write(group / "cpu.max", f"{quota} {_CPU_PERIOD_US}", notes)
        else:
            is_set = _write(group / "cpu.cfs_quota_us", str(quota), notes)
        if is_set:
            held["cpu"] = "cgroup2" if hierarchy.is_unified else "cgroup1"
    return held


def _write(path: Path, value: str, notes: list[str]) -> bool:
    try:
        path.write_text(value, encoding="ascii")
    except OSError as err:
        notes.append(f"{path}: {err.strerror}")
        return False
    return True
