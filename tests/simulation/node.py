"""One simulated machine: the real sidecar with its keeper, the real wrapper, and a simulated command.

The wrapper's reports, its signals and the end that it tells are the real ones; only the process that it would
start is a :class:`~tests.simulation.training.Training`. Files are real, in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envscaler_agent import spool as ex
from envscaler_agent.ending import EXIT_ORPHANED
from envscaler_agent.process import ADDRESS
from envscaler_agent.protocol import control_name
from envscaler_airflow.backends.base import AttemptRequest, NodeEnd
from envscaler_airflow.backends.local.node_main import ended_of, tell_end
from envscaler_airflow.errors import EnvScalerError
from envscaler_airflow.sidecar.context import SidecarContext, UnheededError
from envscaler_airflow.sidecar.keeper import Keeper, report_end, reported_end
from envscaler_airflow.sidecar.loop import Sidecar
from envscaler_airflow.sidecar.spool_state import AttemptNode, Layout, Memory
from envscaler_airflow.store.run import Run
from tests.simulation.kernel import Actor, Machine, World, monotonic, wall
from tests.simulation.node_processes import Ending, SimSpool, SimWrapper
from tests.simulation.training import Training

IDLE_S = {"main": 30.0}
MOST_IDLE_S = 90.0
"""Longest time between two rounds of a part of a node, seconds, by its role; MOST_IDLE_S for the others.
Chosen: what others write wakes it, and the ages that the product counts are minutes.
"""
DRAIN_S = 3600.0
"""Longest time for uploads after the command's end, seconds. Source: the local backend's."""


class Disk:
    """The folder of one world's machines, in memory."""

    def __init__(self) -> None:
        """Begin empty; what a killed process of the simulation left is removed, too."""
        self.root = Path(f"/dev/shm/envscaler-simulation-{os.getpid():07}")
        for old in self.root.parent.glob("envscaler-simulation-*"):
            pid = int(old.name.rpartition("-")[2])
            if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Remove it with the world."""
        shutil.rmtree(self.root, ignore_errors=True)

    def new(self, name: str) -> Path:
        """A new folder."""
        path = self.root / name
        path.mkdir(parents=True)
        return path


@dataclass(eq=False)
class _Process:
    """What the keeper takes for the process of the sidecar."""

    actor: Actor | None = None
    code: int | None = None

    @property
    def has_ended(self) -> bool:
        """True once it has returned or was killed."""
        return self.actor is not None and not self.actor.is_alive


class SimNode:
    """One node of an attempt on one machine.

    Attributes:
        index: Number of the node.
        name: For the timeline, ``g1-a2-n0@m3``.
        uid: Of the pod or node process.
        end: How it ended; None before, and for a machine that is lost.
        client: Its store.
        trained: ``(true time, generation, attempt, node, claim, step)`` after each round of steps.
        saves: The same with the name of a complete local save; ``restores`` with that of what was restored.
        spans: True times from the start of the command to its end.
    """

    def __init__(
        self,
        world: World,
        store: Any,
        request: AttemptRequest,
        node: int,
        machine: Machine,
        on_end: Callable[[], object],
    ) -> None:
        """Prepare the machine; nothing runs."""
        self.world, self.request, self.index, self.machine = world, request, node, machine
        self._on_end = on_end
        self.name = f"g{request.generation}-a{request.attempt}-n{node}@{machine.name}"
        self.stream = world.stream("nodes")
        self.uid = f"{self.stream.getrandbits(64):016x}"
        self.address = f"10.{self.stream.randrange(256)}.{self.stream.randrange(256)}.7:29400"
        self.folder = world.only(Disk).new(self.uid)
        self.spool_path = self.folder / "spool"
        self.checkpoint_path = self._local(request.launch.paths.checkpoint)
        self.outputs = [
            self.folder / "root" / path.lstrip("/") for path in request.launch.paths.outputs.values()
        ]
        self.client = store.client(self.name, machine)
        self.start = ex.Start()
        self.end: NodeEnd | None = None
        self.full_until = 0.0
        self.claim = 0
        self.trained: list[tuple[float, int, int, int, int, int]] = []
        self.saves: list[tuple[float, int, int, int, int, str]] = []
        self.restores: list[tuple[float, int, int, int, int, str]] = []
        self.spans: list[list[float | None]] = []
        self._is_over = False
        self._actors: dict[str, Actor] = {}
        self._dozing: dict[str, Actor] = {}
        self._stirred: set[str] = set()
        self._stirred_at: dict[str, float] = {}
        self._wrapper: SimWrapper | None = None
        self._training: Training | None = None
        self._sidecar = _Process()
        self._code: int | None = None
        self._ended_by: tuple[str, str] | None = None
        self._kill_at = self._drained_at = float("inf")
        name = control_name(request.generation, request.attempt)
        self._control = f"{request.run_prefix}/{name}"
        self._store = store

    # What the cloud does

    def begin(self) -> None:
        """Start the sidecar and the wrapper, as the machine's own process does."""
        self.spool_path.mkdir()
        self._store.watchers.append(self._notice)
        keeper = Keeper(
            ex.Spool(self.spool_path), self._start_sidecar, monotonic=self._monotonic, output="its log"
        )
        self._spawn("main", "machine", lambda: self._run(keeper))
        self._spawn("wrapper", "wrapper", self._wrap)

    def lose(self) -> None:
        """The machine is gone, with everything on it."""
        self._stop_all("machine lost")

    def cut_off(self, seconds: float) -> None:
        """Let no request to the store get through for *seconds*."""
        self.client.cut_off(seconds)

    def signal(self, grace_s: float) -> None:
        """Ask for an end within *grace_s* seconds: SIGTERM to the wrapper."""
        if self._ended_by is None:
            self._ended_by = ("killed", f"stopped; what was left after {grace_s:g} s was killed")
            self._kill_at = self.world.now + grace_s
            if self._wrapper is not None:
                self._wrapper.terminate()
        self.stir("main")

    def kill(self) -> None:
        """End everything at once."""
        self._stop_all("machine ended")

    def kill_sidecar(self) -> None:
        """The sidecar dies alone; it is started again over the same spool."""
        if self._sidecar.actor is not None:
            self.world.kill(self._sidecar.actor, "the sidecar dies alone")
            self.stir("main")

    # What its parts use

    def doze(self, role: str, seconds: float) -> None:
        """Let the current actor wait until it is stirred as *role*."""
        if role not in self._stirred:
            assert self.world.current is not None
            self._dozing[role] = self.world.current
            self.world.park(most_s=seconds)
            self._dozing.pop(role, None)
        self._stirred.discard(role)

    def stir(self, *roles: str) -> None:
        """Something changed that these parts look at."""
        for role in roles:
            self._stirred_at[role] = self.world.now
        self.nudge(*roles)

    def nudge(self, *roles: str) -> None:
        """The same for what is done in one round."""
        for role in roles:
            if role in self._dozing:
                self.world.wake(self._dozing.pop(role))
            else:
                self._stirred.add(role)

    def pace_s(self, role: str) -> float:
        """Seconds until the next round of *role*: short after a change, long when nothing happens."""
        return min(
            IDLE_S.get(role, MOST_IDLE_S), max(0.5, (self.world.now - self._stirred_at.get(role, 0.0)) / 2)
        )

    @property
    def rendezvous(self) -> str | None:
        """Where this node looks for rank 0."""
        return self.start.env.get(ADDRESS)

    def heed(self) -> None:
        """A request is in the spool."""
        self.stir("wrapper", "snapshots")
        if self._training is not None:
            self._training.heed()

    def print(self, text: str) -> None:
        """The command prints *text*."""
        if self._wrapper is not None:
            self._wrapper.hear(text)

    def write(self, path: Path, data: bytes) -> None:
        """The command writes a file, at the time of its machine's clock."""
        path.write_bytes(data)
        at = int(wall(self.world) * 1e9)
        os.utime(path, ns=(at, at))

    def note_step(self, step: int) -> None:
        """The command has done *step*."""
        self.trained.append((self.world.now, *self._who, step))

    def note_save(self, name: str) -> None:
        """A local save is complete."""
        self.saves.append((self.world.now, *self._who, name))
        self.world.note(f"saved {name}", who=self.name)
        self.nudge("heavy")

    def note_restore(self, name: str) -> None:
        """The command restored *name*."""
        self.restores.append((self.world.now, *self._who, name))
        self.world.note(f"restored {name}", who=self.name)

    def tear(self, name: str) -> None:
        """The store damages a complete checkpoint, as a fault."""
        if self.world.strikes("torn-checkpoint", name):
            self._store.tear(f"{self.request.run_prefix}/checkpoints/{name}")

    @property
    def _who(self) -> tuple[int, int, int, int]:
        return self.request.generation, self.request.attempt, self.index, self.claim

    def _local(self, path: str | None) -> Path | None:
        return None if path is None else self.folder / "root" / path.lstrip("/")

    def _monotonic(self) -> float:
        return monotonic(self.world)

    def _spawn(self, role: str, kind: str, call: Callable[[], object]) -> Actor:
        actor = self.world.spawn(kind, call, machine=self.machine, name=f"{self.name}/{role}")
        self._actors[role] = actor
        return actor

    def _notice(self, effect: Any) -> None:
        if effect.name == self._control and not self._is_over:
            self.nudge("watch")

    # The machine's own process: it keeps both running, as node main and the kubelet do

    def _run(self, keeper: Keeper) -> None:
        while True:
            keeper.keep()
            self.doze("main", max(0.1, min(self.pace_s("main"), self._kill_at - self.world.now)))
            self._look_at_sidecar(keeper)
            self._look_at_wrapper()
            now = self.world.now
            is_done = self._code is not None and (keeper.is_done or keeper.has_failed)
            if is_done or now >= self._kill_at or now >= self._drained_at:
                break
        end = tell_end(
            self._code,
            said=reported_end(ex.Spool(self.spool_path)),
            oom_kills=self._oom_kills(),
            ended_by=self._ended_by,
        )
        self.end = end
        self._stop_all("machine ended", spare=self.world.current)
        self._on_end()

    def _look_at_sidecar(self, keeper: Keeper) -> None:
        if keeper.process is None or not self._sidecar.has_ended:
            return
        keeper.died()
        if self._sidecar.code == EXIT_ORPHANED and self._code is None:
            self._ended_by = ("orphaned", "it had no owner, and its wrapper did not end after a SIGTERM")
            self.world.kill(self._actors["wrapper"], "it does not end")
            if self._training is not None:
                self._training_killed(9)

    def _look_at_wrapper(self) -> None:
        """Report the end of a wrapper that could not."""
        if self._code is not None or self._actors["wrapper"].is_alive:
            return
        self._code = (
            self._wrapper.code if self._wrapper is not None and self._wrapper.code is not None else -9
        )
        self._drained_at = self.world.now + DRAIN_S
        if self._training is not None and self._training.code is None:
            self._training_killed(9)
        self._close_span()
        spool = ex.Spool(self.spool_path)
        if reported_end(spool) is None:
            end = tell_end(self._code, oom_kills=self._oom_kills(), ended_by=self._ended_by)
            report_end(spool, ended_of(end))
        self.stir("watch", "heavy", "snapshots", "main")

    def _oom_kills(self) -> int:
        return self._training.oom_kills if self._training is not None else 0

    def _stop_all(self, why: str, spare: Actor | None = None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._store.watchers.remove(self._notice)
        if self._training is not None and self._training.code is None:
            self._training.lose()
        self._close_span()
        actors = [*self._actors.values(), *([self._sidecar.actor] if self._sidecar.actor else [])]
        for actor in actors:
            if actor is not spare and actor is not self.world.current:
                self.world.kill(actor, why)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.world.current in actors and self.world.current is not spare:
            self.world.kill(self.world.current, why)

    # The sidecar

    def _start_sidecar(self) -> Any:
        for role in ("watch", "heavy", "snapshots"):
            self._dozing.pop(role, None)
        self._sidecar = process = _Process()
        process.actor = self.world.spawn(
            "sidecar", lambda: self._serve(process), machine=self.machine, name=f"{self.name}/sidecar"
        )
        return process

    def _serve(self, process: _Process) -> None:
        process.code = 1
        try:
            Sidecar(self._context()).run()
            process.code = 0
        except UnheededError:
            process.code = EXIT_ORPHANED
        except EnvScalerError as err:
            self.world.note(f"the sidecar ends: {type(err).__name__}: {err}")
        self.stir("main")

    def _context(self) -> SidecarContext:
        request, launch = self.request, self.request.launch
        layout = launch.layout(lambda path: str(self._local(path)))
        is_elastic = launch.max_nodes is not None
        layout |= {"workdir_archive": None, "private_folder": str(self.folder / "private")}
        layout |= {"processes_per_node": launch.processes_per_node} if is_elastic else {}
        spool, nodes = SimSpool(self), request.allocation.nodes
        return SidecarContext(
            spool=spool,
            run=Run(self.client, request.run_prefix),
            who=AttemptNode(request.generation, request.attempt, self.index, nodes, claim=0),
            layout=Layout.model_validate(layout),
            memory=Memory(spool, own=self.folder / "private"),
            monotonic=self._monotonic,
            ending=Ending(self),
            uid=self.uid,
            address=self.address if self.index == 0 and max(nodes, launch.max_nodes or 0) > 1 else None,
        )

    # The wrapper and its command

    def _wrap(self) -> None:
        self._wrapper = SimWrapper(self)
        if self._ended_by is not None:
            self._wrapper.terminate()
        self._wrapper.live()
        self.stir("main")

    def start_command(self) -> Training:
        """Start the command."""
        self._training = training = Training(self)
        self.spans.append([self.world.now, None])
        self._spawn("training", "training", training.run)
        return training

    def kill_command(self, number: int) -> None:
        """Send a signal that ends the command."""
        if self._training is not None and self._training.code is None:
            self._training_killed(number)

    def _training_killed(self, number: int) -> None:
        assert self._training is not None
        self.world.kill(self._actors["training"], f"signal {number}")
        self._training.end(-number)

    def _close_span(self) -> None:
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1][1] = self.world.now
