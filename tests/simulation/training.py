"""The training code of a simulated node, and the ranks of an attempt that advance together.

Cooperating code uses the real ``Session``; code that knows nothing of us writes a saver's folder. The spec's
variables choose the program, see :meth:`Program.of`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envscaler_agent.ending import EXIT_DRAINED, EXIT_STOPPED
from envscaler_agent.protocol import checkpoint_name
from envscaler_agent.saving import Collective
from envscaler_agent.session import Session
from tests.simulation.kernel import Violation

if TYPE_CHECKING:
    from tests.simulation.node import SimNode

ROUND_S = 180.0
"""Longest time between two calls of ``checkpoint``, simulated seconds. Chosen: a request cuts it short."""
PEER_S = (5.0, 90.0)
"""How long ranks hang before they notice that a peer is gone, seconds. Chosen."""
JOIN_S = 600.0
"""Longest wait for the other ranks before the first step. Source: torchrun's default ``join_timeout``."""
COLLECTIVE_S = 1800.0
"""Longest wait for them in a step. Source: default of ``torch.distributed.init_process_group`` with gloo."""
CLEAN = (0, EXIT_DRAINED, EXIT_STOPPED)
NEVER_CAME = (
    'Traceback (most recent call last):\n  File "torchrun"\n'
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
)
NO_RENDEZVOUS = (
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: "
    "The connection to the C10d store has failed."
)
USER_ERROR = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: labels out of range'
CUDA_MEMORY = (
    'Traceback (most recent call last):\n  File "train.py"\ntorch.OutOfMemoryError: CUDA out of memory'
)
PEER_GONE = (
    'Traceback (most recent call last):\n  File "train.py"\n'
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
)


@dataclass(frozen=True)
class Program:
    """What the training code does.

    Attributes:
        style: ``session``: cooperates. ``saver``: writes folders as the Trainer does; SIGTERM ends it.
        steps: Of the whole training.
        step_s: Seconds of a step of one node; several nodes share the work.
        save_s: Seconds of a save.
        every_s: Seconds between the saves of a ``saver``.
        start_s: Seconds until the first step: imports and data.
    """

    style: str = "session"
    steps: int = 1000
    step_s: float = 7.0
    save_s: float = 4.0
    every_s: float = 600.0
    start_s: float = 20.0

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Program:
        """Read ``SIM_STYLE``, ``SIM_STEPS`` and so on."""
        default = cls()
        found = {name: env.get(f"SIM_{name.upper()}") for name in cls.__dataclass_fields__}
        return cls(
            **{name: type(getattr(default, name))(text) for name, text in found.items() if text is not None}
        )


class Restart(Exception):  # noqa: N818  (it is no error)
    """A rank joined or left: the launcher starts the worker again."""


class PeerGoneError(Exception):
    """A collective operation failed: a rank is gone."""


class Gang:
    """The ranks of one attempt: each step needs all of them, so that all have done the same ones.

    Attributes:
        nodes: How many take part; of an elastic training those that are there.
        members: Those that are there, by node.
        address: Where rank 0 waits for the others; None while it is not there.
        deaf_until: True time until which no rank looks at requests, seconds since the epoch.
    """

    def __init__(self, nodes: int, step_s: float, *, is_elastic: bool) -> None:
        """Begin without ranks; a step of one rank takes *step_s* seconds."""
        self.nodes, self.is_elastic = nodes, is_elastic
        self.members: dict[int, Training] = {}
        self.address: str | None = None
        self.deaf_until = 0.0
        self._one_s = step_s
        self._began, self._count, self._round, self._pace_s = 0.0, 0, -1, 1.0
        self._arrived: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._number = 0
        self._has_begun = False

    @property
    def step_s(self) -> float:
        """Seconds of a step with all ranks that take part."""
        return float(self._one_s / max(1, len(self.members)) ** 0.9)

    @property
    def _is_whole(self) -> bool:
        return bool(self.members) and (self.is_elastic or len(self.members) == self.nodes)

    def join(self, rank: Training) -> None:
        """Let *rank* take part; the others begin again, as a launcher lets them.

        Those that look for rank 0 at another address than that of a new one have lost it, and end.
        """
        if self._has_begun:
            self._interrupt(Restart)
        self.members[rank.node.index] = rank
        if rank.node.index == 0:
            self.address = rank.node.address
            others = [one for one in self.members.values() if one.node.rendezvous != self.address]
            self._interrupt(PeerGoneError, [one for one in others if one is not rank])

    def leave(self, rank: Training, *, is_clean: bool, is_noticed: bool) -> None:
        """*rank* has ended or is gone.

        After a *clean* end the others end too, at the same step. Otherwise they hang, or fail once that is
        noticed; an elastic training goes on without it. Without rank 0, where all meet, all of them fail.
        """
        index = rank.node.index
        if self.members.get(index) is not rank:
            return
        now = rank.node.world.now
        if not is_clean:
            self._count = min(self._count, int((now - self._began) / self._pace_s))
        del self.members[index]
        if index == 0:
            self.address = None
        if is_clean:
            left = list(self.members.values())
            rank.node.world.spawn(
                "network",
                lambda: self._interrupt(PeerGoneError, left),
                machine=rank.node.machine,
                after_s=PEER_S[1],
                name=f"{rank.node.name}/peers",
            )
        elif index == 0:
            self._interrupt(PeerGoneError)
        elif self.is_elastic:
            self._interrupt(Restart)
        elif is_noticed:
            self._interrupt(PeerGoneError)

    def _interrupt(self, why: type[Exception], ranks: Iterable[Training] | None = None) -> None:
        """Raise *why* in those of *ranks* (default: all) that are there; one that lost its peers ends."""
        found = [one for one in self.members.values() if ranks is None or one in ranks]
        if not found:
            return
        self._arrived.clear()
        self._has_begun = False
        for other in found:
            if not isinstance(other.interrupt, PeerGoneError):
                other.interrupt = why()
            other.node.nudge("training")

    def meet(self, rank: Training, value: Any) -> Any:
        """Wait for all ranks; returns the value of the lowest one."""
        number, index = self._number, rank.node.index
        if self.members.get(index) is not rank:
            raise PeerGoneError  # another machine has taken its place
        self._arrived[index] = value
        if self._is_whole and self._arrived.keys() == self.members.keys():
            self._results = {number: self._arrived[min(self._arrived)]}
            self._arrived, self._number, self._has_begun = {}, number + 1, True
            for other in self.members.values():
                other.node.nudge("training")
        until = rank.node.world.now + (COLLECTIVE_S if self._has_begun else JOIN_S)
        while self._number == number:
            rank.doze(until - rank.node.world.now)
            if self.members.get(index) is not rank:
                raise PeerGoneError
            if self._number == number and rank.node.world.now >= until:
                raise PeerGoneError(PEER_GONE if self._has_begun else NEVER_CAME)
        return self._results[number]

    def advance(self, rank: Training, count: int) -> int:
        """Do at most *count* steps together; returns how many."""
        world = rank.node.world
        count = self.meet(rank, count)
        if self._round != self._number:
            self._round, self._count, self._began = self._number, count, world.now
            self._pace_s = self.step_s
        began = self._began
        while (left := began + self._count * self._pace_s - world.now) > 1e-6:
            rank.doze(left)
        return self._count

    def cut_short(self, now: float) -> None:
        """End the round at the next step: rank 0 has a request to look at."""
        self._count = min(self._count, int((now - self._began) / self._pace_s) + 1)
        for rank in self.members.values():
            rank.node.nudge("training")


class Gangs:
    """All gangs of a world, by run and attempt."""

    def __init__(self) -> None:
        """Begin without any."""
        self._gangs: dict[tuple[str, int, int], Gang] = {}

    def of(self, node: SimNode, program: Program) -> Gang:
        """The gang that *node* belongs to."""
        request = node.request
        key = (request.run_prefix, request.generation, request.attempt)
        if key not in self._gangs:
            is_elastic = request.launch.max_nodes is not None
            self._gangs[key] = Gang(request.allocation.nodes, program.step_s, is_elastic=is_elastic)
        return self._gangs[key]


class Training:
    """The command on one node: its launcher and one rank.

    Attributes:
        node: Where it runs.
        code: Exit code, or minus the signal, once it has ended.
        interrupt: What it raises at its next chance.
        oom_kills: Kills of the kernel for memory.
        stale_until: True time until which no new numbers are reported, seconds since the epoch.
    """

    def __init__(self, node: SimNode) -> None:
        """Prepare; nothing runs."""
        self.node = node
        self.program = Program.of(node.request.launch.env)
        self.gang = node.world.only(Gangs).of(node, self.program)
        self.code: int | None = None
        self.interrupt: Exception | None = None
        self.oom_kills = 0
        self.stale_until = 0.0
        self._step = 0

    def run(self) -> None:
        """Live until the end of the command."""
        self.node.world.sleep(self.program.start_s)
        if not self._finds_rank_0():
            self.node.print(NO_RENDEZVOUS)
            self.end(1)
            return
        self.gang.join(self)
        while self.code is None:
            try:
                self.end(self._train())
            except Restart:
                self.node.world.note(f"the launcher starts its worker again at step {self._step}")
            except PeerGoneError as err:
                self.node.print(str(err) or PEER_GONE)
                self.end(1)

    def _finds_rank_0(self) -> bool:
        """Wait for rank 0 where its node said that it is; False when it does not come."""
        if self.node.index == 0 or self.gang.nodes == 1:
            return True
        said = self.node.rendezvous
        return self.node.world.wait(lambda: self.gang.address == said, every_s=5.0, most_s=JOIN_S)

    def end(self, code: int) -> None:
        """The command has ended."""
        self.code = code
        self.gang.leave(self, is_clean=code in CLEAN, is_noticed=True)
        self.node.stir("wrapper")

    def lose(self) -> None:
        """The machine is gone, without a word to the other ranks."""
        self.gang.leave(self, is_clean=False, is_noticed=self.node.stream.random() < 0.5)

    def doze(self, seconds: float) -> None:
        """Wait, and raise what came meanwhile."""
        self.node.doze("training", seconds)
        if self.interrupt is not None:
            why, self.interrupt = self.interrupt, None
            if isinstance(why, PeerGoneError):
                self.node.world.sleep(self.node.stream.uniform(*PEER_S))
            raise why

    def heed(self) -> None:
        """Something was written that rank 0 looks at between two steps."""
        if self.node.index == min(self.gang.members, default=-1) and self.program.style == "session":
            self.gang.cut_short(self.node.world.now)

    # One life of the worker

    def _train(self) -> int:
        worker = _Cooperating(self) if self.program.style == "session" else _Knowing(self)
        self._step = worker.restore()
        first = self.gang.meet(self, self._step)
        if worker.is_told_step and first != self._step:
            raise Violation(
                f"ranks-agree: node {self.node.index} restored step {self._step}, rank 0 step {first}"
            )
        self._step = first
        self.node.note_step(self._step)
        while self._step < self.program.steps:
            count = self.gang.advance(self, self._most(worker))
            code = self._mishap()
            if code is not None:
                return code
            self._step += count
            self.node.note_step(self._step)
            left = (
                worker.after(count, self._step)
                if count and self.node.world.now >= self.gang.deaf_until
                else None
            )
            if left is not None:
                return left
        return worker.finish()

    def _most(self, worker: _Worker) -> int:
        due_s = max(1.0, min(ROUND_S, worker.due_s()))
        return min(self.program.steps - self._step, max(1, math.ceil(due_s / self.gang.step_s)))

    def _mishap(self) -> int | None:
        """A fault of the training strikes: its exit code, None without one."""
        node, world = self.node, self.node.world
        if world.strikes("train-error", node.name):
            node.print(USER_ERROR)
            return 1
        if world.strikes("train-cuda-memory", node.name):
            node.print(CUDA_MEMORY)
            return 1
        if world.strikes("train-host-memory", node.name):
            self.oom_kills += 1
            return -9
        if world.strikes("train-segfault", node.name):
            return -11
        if world.strikes("train-stall", node.name):
            self._stall(node.stream.choice((300.0, 1800.0, 86400.0)))
        if world.strikes("train-deaf", node.name):
            self.gang.deaf_until = world.now + node.stream.uniform(100.0, 4000.0)
        if world.strikes("train-stale", node.name):
            self.stale_until = world.now + node.stream.uniform(300.0, 4000.0)
        if world.strikes("disk-full", node.name):
            node.full_until = world.now + node.stream.uniform(30.0, 1200.0)
        return None

    def _stall(self, seconds: float) -> None:
        until = self.node.world.now + seconds
        while (left := until - self.node.world.now) > 0:
            self.doze(left)


class _Worker:
    """How one kind of code restores, saves and ends."""

    is_told_step = True

    def __init__(self, training: Training) -> None:
        self.training, self.node = training, training.node

    def restore(self) -> int:
        """Load the newest save; returns its step."""
        raise NotImplementedError

    def due_s(self) -> float:
        """Seconds until it wants to save."""
        raise NotImplementedError

    def after(self, count: int, step: int) -> int | None:
        """*count* steps were done; an exit code if it leaves."""
        raise NotImplementedError

    def finish(self) -> int:
        """All steps were done."""
        for path in self.node.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.node.write(path, b"model after %d steps" % self.training.program.steps)
        return 0

    def losses(self) -> float:
        """The loss that it reports; NaN after a fault."""
        return math.nan if self.node.world.strikes("train-nan", self.node.name) else 0.5

    def check_room(self) -> None:
        """Refuse to write to a full disk. Raises OSError."""
        if self.node.world.now < self.node.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Cooperating(_Worker):
    """Uses the library: the real Session."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        node, gang = self.node, training.gang
        self.session = Session(
            total_steps=training.program.steps,
            rank=node.index,
            world_size=gang.nodes,
            local_rank=0,
            agree=lambda want: int(gang.meet(training, want)),
            spool=node.spool_path,
        )
        if isinstance(self.session._ranks, Collective):
            self.session._ranks._every = 1  # each round stands for ten calls and more
        self.session.__enter__()

    def restore(self) -> int:
        path = self.session.restore()
        if path is not None:
            found = {read_state(item)["step"] for item in sorted(path.glob("rank-*.state"))}
            if found != {self.session.steps}:
                raise Violation(f"restore: {path.name} contains steps {found}, not {self.session.steps}")
            self.node.note_restore(path.name)
        return self.session.steps

    def due_s(self) -> float:
        every = self.session._every.get("seconds", math.inf)
        return float(every - (self.session._clock() - self.session._saved_at))

    def after(self, count: int, step: int) -> int | None:
        session = self.session
        session.steps += count - 1
        session._samples += 8 * (count - 1)
        is_stale = self.node.world.now < self.training.stale_until
        session._beat_at = math.inf if is_stale else session._write_at
        session.step(samples=8, loss=self.losses())
        try:
            is_saved = session.checkpoint(self._save)
        except SystemExit as err:
            self._note_save(step)
            return int(err.code or 0)
        except (Restart, PeerGoneError):
            raise
        except Exception as err:  # noqa: BLE001  # as an interpreter prints what the training does not catch
            self.node.print(f"Traceback (most recent call last):\n  x\n{type(err).__name__}: {err}")
            return 1
        if is_saved:
            self._note_save(step)
        return None

    def _note_save(self, step: int) -> None:
        who = self.node.request
        name = checkpoint_name(who.generation, step, who.attempt)
        if (self.node.spool_path / "checkpoints" / name).exists():
            self.node.note_save(name)

    def _save(self, folder: Path) -> None:
        self.node.world.sleep(self.training.program.save_s)
        self.check_room()
        self.node.write(folder / f"rank-{self.node.index}.state", state_of(self.node, self.session.steps))

    def finish(self) -> int:
        self.session.__exit__(None, None, None)
        return super().finish()


class _Knowing(_Worker):
    """Knows only its own saver: ``checkpoint-N`` folders with a mark that is written last."""

    is_told_step = False  # rank 0 loads and tells the others

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._saved_at = self.node.world.now

    @property
    def _saves(self) -> bool:
        return self.node.index == 0 and self.node.checkpoint_path is not None

    def _folders(self) -> list[tuple[int, Path]]:
        path = self.node.checkpoint_path
        found = path.glob("checkpoint-*") if path is not None and path.is_dir() else ()
        return sorted((int(one.name.rpartition("-")[2]), one) for one in found)

    def restore(self) -> int:
        if not self._saves:
            return 0
        for step, folder in reversed(self._folders()):
            if (folder / "trainer_state.json").exists():
                state, told = read_state(folder / "rank.state"), self.node.start.restore
                if state["step"] != step:
                    raise Violation(f"restore: {folder.name} contains step {state['step']}")
                if told is not None and told.step is not None and step < told.step:
                    raise Violation(f"restore: {told.name} is of step {told.step}, its folder of {step}")
                if told is not None and told.step == step and told.name is not None:
                    self.node.note_restore(told.name)
                return step
        return 0

    def due_s(self) -> float:
        return self._saved_at + self.training.program.every_s - self.node.world.now

    def after(self, count: int, step: int) -> int | None:
        if self.node.world.now >= self.training.stale_until:
            self.node.print(f"{{'loss': {self.losses()}}} step {step} of {self.training.program.steps}")
        if self._saves and self.due_s() <= 0:
            try:
                self._save(step)
            except OSError as err:
                self.node.print(f"Traceback (most recent call last):\n  x\nOSError: {err}")
                return 1
        return None

    def _save(self, step: int) -> None:
        node = self.node
        assert node.checkpoint_path is not None
        folder = node.checkpoint_path / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        self.check_room()
        node.write(folder / "rank.state", state_of(node, step))
        node.write(folder / "training_args.bin", b"args")
        node.world.sleep(self.training.program.save_s)
        if node.world.strikes("train-torn-save", node.name):
            self._saved_at = node.world.now
            return
        node.write(folder / "trainer_state.json", json.dumps({"global_step": step}).encode())
        self._saved_at = node.world.now
        for _, old in self._folders()[:-2]:
            shutil.rmtree(old)


def state_of(node: SimNode, step: int) -> bytes:
    """What a rank saves."""
    who = node.request
    body = {"step": step, "generation": who.generation, "attempt": who.attempt, "node": node.index}
    return json.dumps(body).encode()


def read_state(path: Path) -> dict[str, int]:
    """What a rank saved."""
    body: dict[str, int] = json.loads(path.read_bytes())
    return body
