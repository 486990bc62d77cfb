"""The local backend: attempts as processes of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from envscaler_agent.process import ADDRESS as RENDEZVOUS
from envscaler_airflow.backends.base import (
    AttemptRequest,
    AttemptStatus,
    Backend,
    Injection,
    NodeEnd,
    NodeFault,
)
from envscaler_airflow.backends.local import files
from envscaler_airflow.backends.local.machine import Machine, this_machine
from envscaler_airflow.backends.local.node_plan import (
    Programs,
    attempt_name,
    mount_faults,
    render_attempt,
    volume_faults,
)
from envscaler_airflow.backends.local.node_status import NodeView, views, was_started
from envscaler_airflow.backends.local.processes import (
    ProcessId,
    fill_memory,
    find_program,
    kill_all,
    node_env,
    prefer_for_kill,
    restore_scores,
    training_of,
    training_pythonpath,
)
from envscaler_airflow.backends.local.shares import (
    Claim,
    Slots,
    allocation_shortfalls,
    is_shared,
    nodes_that_fit,
    share_offers,
    shortfalls,
)
from envscaler_airflow.errors import BackendError, CapacityError, NoOfferError, refuse
from envscaler_airflow.local_files import remove_tree
from envscaler_airflow.planning.offers import Offer
from envscaler_airflow.run import Handle
from envscaler_airflow.run.cost import UsageInterval
from envscaler_airflow.sidecar.context import AWAY_S

START_PATIENCE_S = 30.0
"""Longest wait for node main to report its process id. Chosen: a hundred times the usual, for a loaded
machine.
"""
RELEASE_PATIENCE_S = 5.0
"""Longest wait for the guard of an ended node. Chosen: the same."""

_POLL_S = 0.02
_SUBMIT_LOCK = "submit.lock"
_RELEASED = ".released"
_TOMBSTONE_S = 30 * 86400.0
"""How long the name of a released attempt is kept, so that no late repeat restarts it. Chosen."""


def default_root() -> Path:
    """``/var/tmp/envscaler-<uid>``: survives a restart of the machine, unlike /tmp."""
    return Path(f"/var/tmp/envscaler-{os.getuid()}")  # noqa: S108  # make_root checks its owner


class LocalBackend:
    """Runs attempts on this machine.

    Satisfies :class:`~envscaler_airflow.backends.base.Backend`. Any process of the same user on the same
    machine can repeat every call; no state is in memory.
    """

    name = "local"

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        machine: Machine | None = None,
        programs: Programs | None = None,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        """Use *root* for attempts; touch nothing yet.

        Args:
            root: Folder of all attempts; None: :func:`default_root`.
            machine: The capacity to offer; None: this machine's.
            programs: How sidecar and wrapper are started; None: those of this package.
            prices: USD per hour by share (``cpu-2``), in place of shadow prices.
        """
        self.root = Path(root or default_root()).resolve()  # the agent's form of the path
        self._machine = machine
        self._programs = programs or Programs()
        self._prices = prices

    @property
    def machine(self) -> Machine:
        """The capacity that is offered here."""
        return self._machine or this_machine()

    def offers(self) -> tuple[Offer, ...]:
        """Shares of this machine at shadow prices; see :func:`~.shares.share_offers`."""
        return share_offers(self.machine, self._prices)

    def free_nodes(self, offers: Iterable[Offer], *, without: Handle | None = None) -> dict[str, int]:
        """Nodes of each offer that fit on this machine now, by its name; *without* does not count as running.

        Shared offers are not counted and are left out. Raises BackendError.
        """
        if not self.root.exists():  # nothing ran here yet
            taken = []
        else:
            taken = [
                claim
                for claim in Slots(self.root, self.machine).live()
                if without is None or claim.attempt != without.name
            ]
        return {
            offer.name: nodes_that_fit(offer, machine=self.machine, taken=taken)
            for offer in offers
            if offer.cloud == self.name and not is_shared(offer)
        }

    def render(self, request: AttemptRequest) -> dict[str, Any]:
        """What ``submit`` would write, as JSON without secrets."""
        folder = PurePosixPath(self.root) / attempt_name(request)
        return render_attempt(request, folder, self._programs)

    def submit(self, request: AttemptRequest) -> Handle:
        """Start the attempt, finish an interrupted start, or adopt a running or ended one.

        Raises:
            CapacityError: Other attempts use what it needs.
            NoOfferError: The machine does not have what it requests.
            SpecError: A volume that this machine cannot provide, or a script that would write into its
                folders.
            BackendError: A process could not be started, or the attempt was released.
        """
        offer = request.allocation.offer
        if offer.cloud != "local":
            raise BackendError(f"{offer.name}: is not a share of this machine")
        launch = request.launch
        refuse(volume_faults(launch.paths.volumes) + mount_faults(launch.paths, launch.command))
        missing = shortfalls(launch.resources, self.machine)
        missing += [m for m in allocation_shortfalls(request.allocation, self.machine) if m not in missing]
        if missing:
            raise NoOfferError(f"{request.run_label}: {'; '.join(missing)}")
        try:
            return self._submit(request)
        except OSError as err:
            raise BackendError(f"{request.run_label}: {err}", transient=True) from err

    def _submit(self, request: AttemptRequest) -> Handle:
        files.make_root(self.root)
        folder = self.root / attempt_name(request)
        while True:
            if (self.root / _RELEASED / folder.name).exists():
                raise BackendError(f"{folder.name}: this attempt has ended and was released")
            folder.mkdir(mode=0o700, exist_ok=True)
            try:
                with files.locked(folder / _SUBMIT_LOCK):
                    _Start(self, request, folder).finish()
                    return self.handle(folder, request.allocation.nodes)
            except FileNotFoundError:
                if folder.exists():
                    raise  # otherwise another process removed it while this one waited for its lock

    def find(self, request: AttemptRequest) -> Handle | None:
        """The handle when any node of the attempt was started, else None."""
        folder = self.root / attempt_name(request)
        nodes = request.allocation.nodes
        started = any(was_started(files.node_folder(folder, node)) for node in range(nodes))
        return self.handle(folder, nodes) if started else None

    def attempts(self) -> Iterator[Handle]:
        """Every attempt below the root that was started and is not released, to find orphans."""
        if not self.root.is_dir():
            return
        for folder in sorted(self.root.iterdir()):
            nodes = len(list(folder.glob("n*/" + files.REQUEST))) if folder.is_dir() else 0
            if nodes:
                yield self.handle(folder, nodes)

    def observe(self, handle: Handle) -> AttemptStatus:
        """State of every node, as far as it is known on this machine."""
        return AttemptStatus(tuple(view.status() for view in self._views(handle)))

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Request a graceful stop from node main within *grace_s* seconds; 0 kills everything immediately.

        On another machine this does nothing: there the owner's control file makes the request.
        """
        for view in self._views(handle):
            if not view.folder.is_dir() or view.end() is not None:
                continue
            with suppress(OSError):  # a full disk must not keep anything alive
                files.write_json(view.folder / files.STOP, {"grace_s": grace_s, "requested": time.time()})
            if not view.is_here:
                continue
            if grace_s <= 0 or not view.is_live():
                kill_all(view.survivors(), spare={os.getpid()})
            elif view.main is not None:
                view.main.signal(signal.SIGTERM)

    def take_away(self, handle: Handle, *, nodes: tuple[int, ...] | None = None) -> None:
        """Kill *nodes* (None: all) without notice, as a spot interruption would."""
        for view in self._views(handle):
            if view.is_here and (nodes is None or view.node in nodes):
                survivors = view.survivors()
                found = survivors.find(spare={os.getpid()})  # without main, an orphan's descent is unknown
                if view.main is not None and view.main.is_alive():  # first: it would report the others' end
                    view.main.signal(signal.SIGKILL)
                for process in found:
                    process.signal(signal.SIGKILL)
                kill_all(survivors, spare={os.getpid()})

    def obstacle(self, handle: Handle, fault: NodeFault, *, node: int) -> str:
        """Why *fault* cannot be injected into *node* from this process; "" if it can."""
        found = [view for view in self._views(handle) if view.node == node]
        if not found:
            return f"the attempt has no node {node}"
        view, scope = found[0], found[0].survivors().scope
        if not view.is_here:
            return f"node {node} runs on {view.identity.host}, in a process table that is not visible here"
        if view.end() is not None or not view.is_live():
            return f"node {node} does not run"
        if fault == "oom" and not (scope.memory and "memory" in scope.limits):
            return (
                f"no cgroup limits the memory of node {node}: {'; '.join(scope.notes) or 'no limit is set'}"
            )
        return ""

    def inject(self, handle: Handle, fault: NodeFault, *, node: int) -> Injection:
        """Break *node* by signals to its processes, or by a process that fills its memory.

        Raises:
            BackendError: There is an obstacle, or the process to signal does not run.
        """
        if obstacle := self.obstacle(handle, fault, node=node):
            raise BackendError(f"{fault}: {obstacle}")
        view = self._views(handle)[node]
        survivors, request = view.survivors(), files.read_json(view.folder / files.REQUEST) or {}
        if fault == "lose-node":
            self.take_away(handle, nodes=(node,))
            return Injection(f"killed every process of node {node}, as the loss of its machine would")
        role = "sidecar" if fault in ("kill-sidecar", "store-away") else "wrapper"
        process = find_program(survivors, request.get(role) or [""])
        if process is None:
            raise BackendError(f"{fault}: the {role} of node {node} does not run now")
        if fault == "stall":
            return _stall(process, node)
        if fault == "oom":
            scores = prefer_for_kill(training_of(process))
            hog = fill_memory(survivors.scope)
            did = f"process {hog.pid} fills the memory of node {node}, so the training is killed"
            return Injection(did, undo=partial(_end, hog, scores))
        process.signal(signal.SIGKILL if fault == "kill-sidecar" else signal.SIGUSR1)
        if fault == "kill-sidecar":
            return Injection(f"killed the sidecar of node {node} (process {process.pid})")
        return Injection(f"the sidecar of node {node} gets no answer from the store", lasts_s=AWAY_S)

    def usage(self, handle: Handle) -> tuple[UsageInterval, ...]:
        """One interval for each node that was started, by node main's timestamps."""
        return tuple(found for view in self._views(handle) if (found := view.usage()) is not None)

    def release(self, handle: Handle) -> None:
        """Remove the folder and cgroups of an ended attempt; one that runs or is unknown stays."""
        is_over = self.observe(handle).is_over
        folder = Path(handle.details["folder"])
        if not is_over or folder.name != handle.name or not (folder / _SUBMIT_LOCK).exists():
            return
        with files.locked(folder / _SUBMIT_LOCK):
            until = time.monotonic() + RELEASE_PATIENCE_S
            while any(view.is_held() for view in self._views(handle)):
                if time.monotonic() > until:
                    return
                time.sleep(_POLL_S)
            for view in self._views(handle):
                if view.is_here:
                    view.survivors().scope.remove()
            self._bury(folder)

    def end_leftovers(self, claim: Claim) -> None:
        """Kill the remains of a node whose main and guard died together; its share becomes free again."""
        handle = self.handle(self.root / claim.attempt, claim.node + 1)
        view = self._views(handle)[claim.node]
        if view.is_here and view.run_id is not None and view.end() is None:
            kill_all(view.survivors(), spare={os.getpid()})

    def _bury(self, folder: Path) -> None:
        """Write a tombstone, then remove the folder; the next call removes what an interrupted one leaves."""
        tombstones = self.root / _RELEASED
        tombstones.mkdir(exist_ok=True)
        (tombstones / folder.name).touch()
        with suppress(FileNotFoundError):
            remove_tree(folder)
        run = folder.name.rpartition("-g")[0]
        if not any(self.root.glob(f"{run}-g*-a*")):
            with suppress(OSError):
                remove_tree(self.root / f"{run}{files.SAVES}")
        for tombstone in tombstones.iterdir():
            with suppress(OSError):
                if time.time() - tombstone.stat().st_mtime > _TOMBSTONE_S:
                    tombstone.unlink()

    def _views(self, handle: Handle) -> list[NodeView]:
        return views(handle, self.machine.identity)

    def handle(self, folder: Path, nodes: int) -> Handle:
        """The handle of the attempt in *folder*, with what node main has recorded so far."""
        bodies = [
            files.read_json(files.node_folder(folder, node) / files.NODE) or {} for node in range(nodes)
        ]
        identity = next((body["identity"] for body in bodies if body), self.machine.identity.to_dict())
        kept = ("id", "main", "guard")
        details = {
            "folder": str(folder),
            "identity": identity,
            "nodes": [{name: body.get(name) for name in kept} if body else {} for body in bodies],
        }
        return Handle(self.name, folder.name, details)


class _Start:
    """One ``submit`` under the attempt's lock: starts each node that was not started before."""

    def __init__(self, backend: LocalBackend, request: AttemptRequest, folder: Path) -> None:
        self._backend = backend
        self._request = request
        self._folder = folder
        self._rendered = backend.render(request)["nodes"]
        self._locks: dict[int, int] = {}

    def finish(self) -> None:
        """Start the missing nodes; all nodes get their shares, or none is started."""
        try:
            self._take_locks()
            if not self._locks:
                return
            self._claim()
            for node in list(self._locks):
                self._spawn(node)
        finally:
            for fd in self._locks.values():
                os.close(fd)

    def _take_locks(self) -> None:
        """Lock every node that was never started; wait for nodes that are starting now."""
        for node in range(self._request.allocation.nodes):
            folder = files.node_folder(self._folder, node)
            folder.mkdir(mode=0o700, exist_ok=True)
            until = time.monotonic() + START_PATIENCE_S
            while not was_started(folder):
                fd = files.try_lock(folder / files.LOCK)
                if fd is not None:
                    self._locks[node] = fd
                    break
                if time.monotonic() > until:
                    raise BackendError(f"{folder}: is locked and does not start", transient=True)
                time.sleep(_POLL_S)
            if was_started(folder) and node in self._locks:
                os.close(self._locks.pop(node))  # it started and ended between the two checks

    def _claim(self) -> None:
        slots = Slots(self._backend.root, self._backend.machine, on_dead=self._backend.end_leftovers)
        request = self._request
        try:
            claims = slots.claim(self._folder.name, request.allocation, self._locks, run=request.run_prefix)
        except CapacityError:
            if len(self._locks) == request.allocation.nodes:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._clear_saves(claims)
        pythonpath = training_pythonpath(request.launch.command, request.python, self._backend.root)
        rendezvous = self._rendezvous()
        for node, claim in claims.items():
            folder = files.node_folder(self._folder, node)
            moment = {
                "id": uuid.uuid4().hex,
                "cpus": claim.cpus,
                "gpus": claim.gpus,
                "pythonpath": pythonpath,
            }
            body = self._rendered[node]["request"]
            files.write_json(folder / files.LAYOUT, self._rendered[node]["layout"])
            files.write_json(folder / files.REQUEST, {**body, "env": {**body["env"], **rendezvous}, **moment})

    def _clear_saves(self, nodes: Iterable[int]) -> None:
        """Empty the run's checkpoint folders once no process of an earlier attempt can write there."""
        folders = [saves for node in nodes if (saves := self._rendered[node].get("saves"))]
        if not folders:
            return
        until = time.monotonic() + START_PATIENCE_S
        while (held := self._held_by_earlier()) is not None:
            if time.monotonic() > until:
                raise BackendError(f"{held} of the same run has not ended yet", transient=True)
            time.sleep(_POLL_S)
        for saves in folders:
            with suppress(OSError):
                remove_tree(saves)

    def _held_by_earlier(self) -> str | None:
        run = self._folder.name.rpartition("-g")[0]
        for other in self._folder.parent.glob(f"{run}-g*-a*"):
            if other != self._folder:
                for lock in other.glob(f"n*/{files.LOCK}"):
                    if files.lock_state(lock) == "held":
                        return other.name
        return None

    def _rendezvous(self) -> dict[str, str]:
        """The rendezvous of the processes of several nodes: a free port for this attempt only.

        An interrupted submit may have given it to some nodes already; the others get the same one.
        """
        nodes = self._request.allocation.nodes
        if nodes == 1 and self._request.launch.max_nodes is None:
            return {}
        for node in range(nodes):
            told = files.read_json(files.node_folder(self._folder, node) / files.REQUEST) or {}
            if RENDEZVOUS in told.get("env", {}):
                return {RENDEZVOUS: told["env"][RENDEZVOUS]}
        return {RENDEZVOUS: f"127.0.0.1:{_free_port()}"}

    def _spawn(self, node: int) -> None:
        folder = files.node_folder(self._folder, node)
        fd = self._locks[node]
        module = "envscaler_airflow.backends.local.node_main"
        command = [sys.executable, "-P", "-m", module, str(folder), "--lock-fd", str(fd)]
        keys = self._request.store_login.variables
        env = node_env(os.environ, self._request.secret_env, str(folder / files.SPOOL), keys)
        try:
            with (folder / "node.log").open("ab") as log:
                subprocess.run(
                    command,
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(fd,),
                    start_new_session=True,
                    timeout=START_PATIENCE_S,
                    check=True,
                )
        except (OSError, subprocess.SubprocessError) as err:
            raise self._burn(node, f"node main cannot be started: {err}") from err
        os.close(self._locks.pop(node))
        until = time.monotonic() + START_PATIENCE_S
        while not (folder / files.NODE).exists():
            if time.monotonic() > until or files.lock_state(folder / files.LOCK) == "free":
                raise self._burn(node, _last_line(folder / "node.log") or "node main did not start")
            time.sleep(_POLL_S)

    def _burn(self, failed: int, reason: str) -> BackendError:
        """Leave no partial attempt: stop the nodes that run, and record that the others will never start."""
        nodes = range(self._request.allocation.nodes)
        self._backend.stop(self._backend.handle(self._folder, len(nodes)), grace_s=0)
        folders = [files.node_folder(self._folder, node) for node in nodes]
        if any((folder / files.NODE).exists() for folder in folders):
            for folder in folders:
                if not was_started(folder):
                    end = NodeEnd(None, None, "setup-failed", reason)
                    files.write_json(folder / files.END, {"id": None, **asdict(end)})
        return BackendError(f"{self._folder.name} n{failed}: {reason}", transient=True)


def _stall(wrapper: ProcessId, node: int) -> Injection:
    """Suspend the training below *wrapper*."""
    found = training_of(wrapper)
    for process in found:
        process.signal(signal.SIGSTOP)

    def resume() -> None:
        for process in found:
            process.signal(signal.SIGCONT)

    pids = " ".join(str(process.pid) for process in found)
    return Injection(f"suspended the training of node {node} (SIGSTOP)", resume, f"kill -CONT {pids}")


def _end(hog: subprocess.Popen[bytes], scores: Mapping[ProcessId, str]) -> None:
    hog.kill()
    hog.wait()
    restore_scores(scores)


def _free_port() -> int:
    """A port that no process listens on now. If another program takes it first, the rendezvous fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


if TYPE_CHECKING:
    _conforms: Backend = LocalBackend()
