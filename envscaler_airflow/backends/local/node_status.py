"""What this machine knows about a node, and what not: an unreachable node is never dead."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.cgroups import CgroupScope
from envscaler_airflow.backends.local.machine import Identity
from envscaler_airflow.backends.local.processes import ProcessId, Survivors
from envscaler_airflow.errors import BackendError
from envscaler_airflow.run import Handle, NodeStatus
from envscaler_airflow.run.cost import UsageInterval


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of a handle, seen from *here*.

    Attributes:
        node: Index.
        folder: Its folder.
        identity: Machine, boot and process table that it was started in.
        here: This process's.
        run_id: Unique id of the start; None when the handle is older than the node.
        main, guard: Its two processes, from the handle.
    """

    node: int
    folder: Path
    identity: Identity
    here: Identity
    run_id: str | None = None
    main: ProcessId | None = None
    guard: ProcessId | None = None

    @classmethod
    def of(cls, handle: Handle, node: int, here: Identity) -> NodeView:
        """Build the view of *node*; node.json provides what the handle does not contain yet."""
        details = handle.details
        folder = files.node_folder(Path(details["folder"]), node)
        body = details["nodes"][node] or {}
        if not body:
            body = files.read_json(folder / files.NODE) or {}
        return cls(
            node=node,
            folder=folder,
            identity=Identity.from_dict(details["identity"]),
            here=here,
            run_id=body.get("id"),
            main=ProcessId.from_dict(body.get("main")),
            guard=ProcessId.from_dict(body.get("guard")),
        )

    @property
    def is_here(self) -> bool:
        """True when its process ids are valid here."""
        ours, theirs = self.here, self.identity
        same_boot = ours.is_same_host(theirs) and ours.boot_id == theirs.boot_id
        return same_boot and ours.pid_namespace == theirs.pid_namespace

    def end(self) -> dict[str, Any] | None:
        """The content of end.json for this start, else None."""
        body = files.read_json(self.folder / files.END)
        return body if body is not None and self.run_id in (None, body.get("id")) else None

    def survivors(self) -> Survivors:
        """Where to look for its processes."""
        body = files.read_json(self.folder / files.NODE) or {}
        scope = CgroupScope.from_dict(body.get("scope") or {})
        return Survivors(str(self.folder / files.SPOOL), self.guard, scope, self.main)

    def is_held(self) -> bool:
        """True when node main or its guard runs, or the attempt is being started."""
        return files.lock_state(self.folder / files.LOCK) == "held"

    def is_live(self) -> bool:
        """True when node main or its guard is seen to run, or the node is being started."""
        if self.run_id is None:
            return self.is_held()
        return any(process is not None and process.is_alive() for process in (self.main, self.guard))

    def status(self) -> NodeStatus:
        """State of the node; see :mod:`envscaler_airflow.backends.base`."""
        end = self.end()
        if end is not None:
            return _ended(self.node, end)
        if not self.is_here:
            return self._from_afar()
        if self.is_live():
            is_up = (self.folder / files.SPOOL / "start.json").exists()
            return NodeStatus(self.node, "running" if is_up else "starting")
        end = self.end()  # written between the first check and its exit
        if end is not None:
            return _ended(self.node, end)
        if self.is_held():  # unlocked before a process is seen to end; so these are only unreachable
            return NodeStatus(
                self.node, "unknown", detail="a process has its lock, but no process of it is visible"
            )
        return self._without_main()

    def _from_afar(self) -> NodeStatus:
        here, there = self.here, self.identity
        if not here.is_same_host(there):
            return NodeStatus(self.node, "unknown", detail=f"it runs on {there.host}, this is {here.host}")
        if here.boot_id != there.boot_id and here.boot_id and there.boot_id:
            return NodeStatus(self.node, "lost", reason="killed", detail=f"{there.host} was restarted")
        return NodeStatus(self.node, "unknown", detail="it runs in another PID namespace than this process")

    def _without_main(self) -> NodeStatus:
        if self.run_id is None:
            return NodeStatus(self.node, "pending", detail="not started")
        left = self.survivors().find()
        if left:
            detail = f"node main is gone, {len(left)} of its processes are not"
            return NodeStatus(self.node, "running", detail=detail)
        stop = files.read_json(self.folder / files.STOP)
        if stop is not None:
            return NodeStatus(self.node, "ended", None, 9, "killed", "stopped at once")
        return NodeStatus(self.node, "lost", reason="killed", detail="its processes are gone without an end")

    def usage(self) -> UsageInterval | None:
        """From its own start to its own end; a lost node ends when it was last seen alive.

        Raises:
            BackendError: It was started, and its records no longer exist.
        """
        body = files.read_json(self.folder / files.NODE)
        if body is None and self.run_id is not None:
            raise BackendError(f"{self.folder}: was started, and its times are gone")  # unknown, not free
        if body is None or self.run_id not in (None, body.get("id")):
            return None
        started = float(body["started"])
        end = self.end()
        if end is not None:
            return UsageInterval(self.node, started, float(end["ended"]))
        if self.status().state in ("ended", "lost"):
            return UsageInterval(
                self.node, started, max(started, _modified(self.folder / files.LOCK, started))
            )
        now = time.time() if self.is_here else None  # its own clock is this machine's
        return UsageInterval(self.node, started, None, now)


def was_started(folder: Path) -> bool:
    """True when node main has ever taken over the node, or never will."""
    return (folder / files.NODE).exists() or (folder / files.END).exists()


def _modified(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default


def _ended(node: int, end: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        node,
        "ended",
        end.get("exit_code"),
        end.get("signal"),
        str(end.get("reason", "")),
        str(end.get("detail", "")),
    )


def views(handle: Handle, here: Identity) -> list[NodeView]:
    """All nodes of *handle*.

    Raises:
        BackendError: The handle is not one of the local backend.
    """
    try:
        return [NodeView.of(handle, node, here) for node in range(len(handle.details["nodes"]))]
    except (KeyError, TypeError) as err:
        raise BackendError(f"{handle.name}: no handle of the local backend: {err!r}") from err
