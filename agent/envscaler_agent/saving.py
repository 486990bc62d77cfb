"""How a checkpoint is saved: all ranks agree on the step; its folder becomes visible at once, complete."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from envscaler_agent.errors import CheckpointError
from envscaler_agent.messages import object_or_empty
from envscaler_agent.protocol import parse_checkpoint_name
from envscaler_agent.spool import Watched, write_json

PARTIAL = ".saving-"
"""Prefix of folders that are being saved."""
FACTS = "agent.json"
"""File inside a complete folder: step, epoch, samples, world_size, global_batch, save_s."""
KEEP_LOCAL = 3
"""Complete folders kept where no sidecar removes them. Chosen: as ``checkpoint.keep``."""


def partial_folder(checkpoints: Path, name: str) -> Path:
    """Return where the checkpoint *name* is assembled."""
    return checkpoints / f"{PARTIAL}{name}"


def clear_partial(checkpoints: Path) -> None:
    """Remove what a killed save left behind."""
    if checkpoints.is_dir():
        for folder in checkpoints.glob(f"{PARTIAL}*"):
            shutil.rmtree(folder, ignore_errors=True)


def complete(checkpoints: Path, name: str, facts: Mapping[str, Any]) -> Path:
    """Sync the partial folder *name* to disk and give it its final name.

    Raises:
        OSError: Nothing is visible under the name.
    """
    partial = partial_folder(checkpoints, name)
    text = json.dumps({key: value for key, value in facts.items() if value is not None})
    (partial / FACTS).write_text(text, encoding="utf-8")
    sync_tree(partial)
    final = checkpoints / name
    partial.replace(final)
    _sync(checkpoints)
    return final


def is_empty(checkpoints: Path, name: str) -> bool:
    """True when nothing was saved into the partial folder *name*: empty folders are not a checkpoint."""
    return not any(path.is_file() for path in partial_folder(checkpoints, name).rglob("*"))


def abandon(checkpoints: Path, name: str) -> None:
    """Remove the partial folder *name*; the complete ones stay."""
    shutil.rmtree(partial_folder(checkpoints, name), ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below *folder* to disk, so that a rename cannot overtake them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_dir():
            _sync(path)
    _sync(folder)


def is_taken(checkpoints: Path, name: str) -> bool:
    """True when the checkpoint *name* is complete already, here or in the store."""
    return (checkpoints / name).exists() or (checkpoints / f"{name}.done").exists()


def waiting(checkpoints: Path) -> List[str]:
    """Return the complete checkpoints that the sidecar has not taken yet, oldest first."""
    if not checkpoints.is_dir():
        return []
    names = {entry.name for entry in os.scandir(checkpoints)}
    return sorted(name for name in names if parse_checkpoint_name(name) and f"{name}.done" not in names)


def newest(checkpoints: Path) -> Optional[Path]:
    """Return the complete folder with the highest step."""
    found = waiting(checkpoints)
    return checkpoints / max(found, key=_order) if found else None


def newest_of(checkpoints: Path, attempt: Tuple[int, int], *, after: int, most_ranks: int) -> Optional[Path]:
    """Return the newest complete folder of that attempt with a step beyond *after*, None when there is none.

    One that the sidecar has taken counts too: it does not move the newest. One that more than *most_ranks*
    ranks saved is not complete on this node.
    """
    found = []
    for entry in os.scandir(checkpoints) if checkpoints.is_dir() else ():
        key = parse_checkpoint_name(entry.name)
        if key is not None and (key[0], key[2]) == attempt and key[1] > after:
            ranks = facts_of(Path(entry.path)).get("world_size")
            if isinstance(ranks, int) and ranks <= most_ranks:
                found.append((key[1], Path(entry.path)))
    return max(found)[1] if found else None


def prune(checkpoints: Path, keep: int = KEEP_LOCAL) -> None:
    """Remove all complete folders except the newest *keep*."""
    for name in sorted(waiting(checkpoints), key=_order)[:-keep]:
        shutil.rmtree(checkpoints / name, ignore_errors=True)


def facts_of(folder: Path) -> Dict[str, Any]:
    """Return the content of ``agent.json``, {} without one."""
    try:
        return object_or_empty((folder / FACTS).read_bytes())
    except OSError:
        return {}


def _order(name: str) -> "tuple[int, int, int]":
    return parse_checkpoint_name(name) or (0, 0, 0)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


NOTHING, SAVE, DRAIN, STOP = range(4)
"""What is decided for a step: continue, save, save and exit for a drain, save and stop."""
LEAD_STEPS = 1
"""How far ahead rank 0 names the step. Ranks that reduce gradients in each step are never further apart."""
WAIT_S = 1800.0
"""Longest wait for another rank. Source: default timeout of torch.distributed's gloo backend."""
POLL_S = 0.002
"""Time between two checks of another rank's files. Chosen: little compared with a save."""
WRITE_TRIES = 30
"""Tries, a second apart, to write what other ranks wait for. Chosen: within that time a save that failed on a
full disk is removed.
"""
MAX_LEAD_STEPS = 1000
"""Longest lead for ranks that are not at the same step. Chosen: ranks further apart do not train together."""
ELSEWHERE = "was at step"
"""Message that distinguishes saves that failed because ranks were not at the same step."""

Agree = Callable[[int], int]


class Alone:
    """One rank: it decides alone.

    Attributes:
        is_first: True for the rank that completes the folder of a save.
        can_be_asked: False when saves are only possible at counted steps or epochs.
        lead_steps: How many steps ahead a save must be requested.
    """

    is_first = True
    can_be_asked = True
    lead_steps = 0

    def look(self) -> bool:
        """Return True when :meth:`decide` must be called even without a request of this rank."""
        return False

    def decide(self, step: int, want: int, *, epoch_end: bool) -> int:
        """Return what all ranks do at *step*, which all have reached."""
        del step, epoch_end
        return want

    def acknowledge(self, step: int, problem: str) -> None:
        """Report that this rank has saved its part of *step*, or why it could not."""

    def gather(self, step: int) -> List[str]:
        """Wait for all ranks of this node; return their problems."""
        del step
        return []

    def announce(self, step: int, *, is_complete: bool) -> None:
        """Report that the save of *step* is complete, or abandoned."""

    def await_outcome(self, step: int) -> bool:
        """Wait for :meth:`announce`; True when the save is complete."""
        del step
        return True


@dataclass(frozen=True)
class Verdict:
    """What rank 0 wrote last.

    Attributes:
        number: Grows with every naming of a step.
        step: *what* is executed at the first call of ``checkpoint`` at this step or after it.
        epoch_step: Newest end of an epoch that rank 0 has reached.
        settled: Number of the newest save whose outcome is known; *settled_step* is its step.
        is_complete: Its outcome.
    """

    number: int = 0
    step: int = -1
    what: int = NOTHING
    epoch_step: int = -1
    settled: int = 0
    settled_step: int = -1
    is_complete: bool = False


class Neighbours(Alone):
    """The ranks of one node, through files in the spool folder."""

    def __init__(
        self, folder: Path, rank: int, count: int, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Join *count* ranks as number *rank*; rank 0 removes what an earlier launch left."""
        self.is_first = rank == 0
        self.lead_steps = LEAD_STEPS
        self._folder = folder
        self._rank = rank
        self._count = count
        self._sleep = sleep
        self._verdict = Verdict()
        self._obeyed = 0
        self._watched = Watched(folder / "verdict.json")
        if self.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("rank-*.json"):
                path.unlink()
            self._publish(Verdict())

    def look(self) -> bool:
        """Return True when rank 0 has named a step and this rank has not done it yet."""
        if not self.is_first:
            self._follow()
        return self._verdict.what != NOTHING and self._verdict.number != self._obeyed

    def decide(self, step: int, want: int, *, epoch_end: bool) -> int:
        """Return what all ranks do at *step*."""
        if self.is_first:
            return self._lead(step, want, epoch_end=epoch_end)
        return self._obey(step, epoch_end=epoch_end)

    def acknowledge(self, step: int, problem: str) -> None:
        """Report that this rank has finished *step*."""
        body = {"number": self._obeyed, "step": step, "problem": problem}
        self._patiently(lambda: write_json(self._folder / f"rank-{self._rank}.json", body))

    def gather(self, step: int) -> List[str]:
        """Wait until all ranks have finished *step*; one that was elsewhere makes the next lead longer."""
        others = {rank: Watched(self._folder / f"rank-{rank}.json") for rank in range(1, self._count)}
        problems: List[str] = []

        def all_done() -> bool:
            for rank, watched in list(others.items()):
                said = _read(watched)
                is_other_step = self._verdict.number > 0 and said.get("number") == self._verdict.number
                if said.get("step") == step and said.get("problem"):
                    problems.append(f"rank {rank}: {said['problem']}")
                elif said.get("step") != step and is_other_step:
                    problems.append(f"rank {rank} {ELSEWHERE} {said.get('step')}, not {step}")
                    self.lead_steps = min(MAX_LEAD_STEPS, 2 * self.lead_steps + abs(said["step"] - step))
                elif said.get("step") != step:
                    continue
                del others[rank]
            return not others

        if not self._wait_for(all_done):
            problems.append(f"no answer from ranks {sorted(others)} within {WAIT_S:g} s")
        return problems

    def announce(self, step: int, *, is_complete: bool) -> None:
        """Report how the save of *step* ended."""
        now = self._verdict
        self._obeyed = now.number
        said = Verdict(now.number, now.step, NOTHING, now.epoch_step, now.number, step, is_complete)
        self._patiently(lambda: self._publish(said))

    def await_outcome(self, step: int) -> bool:
        """Wait until rank 0 has reported how the save of *step* ended."""

        def settled() -> bool:
            self._follow()
            said = self._verdict
            return said.settled_step >= step or 0 < self._obeyed <= said.settled

        return self._wait_for(settled) and self._verdict.is_complete

    def _lead(self, step: int, want: int, *, epoch_end: bool) -> int:
        named = self._verdict
        is_pending = named.what != NOTHING
        if is_pending and named.step <= step:
            return named.what
        try:
            if epoch_end:
                self._publish(replace(named, number=named.number + 1, step=step, what=want, epoch_step=step))
                return want
            if want != NOTHING and not is_pending:
                ahead = step + self.lead_steps
                self._publish(replace(named, number=named.number + 1, step=ahead, what=want))
        except OSError:  # a full disk: no rank has read it, and it stays requested
            self._verdict = named
        return NOTHING

    def _obey(self, step: int, *, epoch_end: bool) -> int:
        if epoch_end and not self._wait_for(lambda: self._follow() or self._has_verdict(step)):
            raise CheckpointError(
                f"rank {self._rank}: no verdict of rank 0 for step {step} within {WAIT_S:g} s"
            )
        verdict = self._verdict
        if verdict.what == NOTHING or verdict.number == self._obeyed or verdict.step > step:
            return NOTHING
        self._obeyed = verdict.number
        return verdict.what

    def _has_verdict(self, step: int) -> bool:
        """True when rank 0 has reached the end of the epoch at *step*, or named a step before it."""
        said = self._verdict
        is_pending = said.what != NOTHING and said.number != self._obeyed
        return said.epoch_step >= step or (is_pending and said.step <= step)

    def _follow(self) -> bool:
        """Read what rank 0 wrote; always False, so that a wait can call it first."""
        said = _read(self._watched)
        if said:
            self._verdict = Verdict(
                **{name: said[name] for name in Verdict.__dataclass_fields__ if name in said}
            )
        return False

    def _publish(self, verdict: Verdict) -> None:
        self._verdict = verdict
        write_json(self._folder / "verdict.json", dict(vars(verdict)))

    def _patiently(self, write: Callable[[], None]) -> None:
        """Write what others wait for, even on a disk that is full for a moment.

        Raises:
            OSError: It is full for longer.
        """
        for _ in range(WRITE_TRIES - 1):
            try:
                write()
            except OSError:
                self._sleep(1.0)
            else:
                return
        write()

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        for _ in range(int(WAIT_S / POLL_S)):
            if condition():
                return True
            self._sleep(POLL_S)
        return False


class _Wide(Alone):
    """Ranks on several nodes; *local* completes the save on each node."""

    def __init__(self, local: Alone) -> None:
        self.is_first = local.is_first
        self._local = local

    def acknowledge(self, step: int, problem: str) -> None:
        """Report that this rank has finished *step*."""
        self._local.acknowledge(step, problem)

    def gather(self, step: int) -> List[str]:
        """Wait for the ranks of this node."""
        return self._local.gather(step)

    def announce(self, step: int, *, is_complete: bool) -> None:
        """Report to the ranks of this node how the save ended."""
        self._local.announce(step, is_complete=is_complete)

    def await_outcome(self, step: int) -> bool:
        """Wait for the first rank of this node."""
        return self._local.await_outcome(step)


class Scheduled(_Wide):
    """No rank can be asked: only saves that every rank can count by itself are made."""

    can_be_asked = False


class Collective(_Wide):
    """Uses a broadcast that the training provides."""

    def __init__(self, agree: Agree, *, every: int, leads: bool, local: Alone) -> None:
        """Call *agree* with every *every*-th call and at epoch ends; only one rank *leads*."""
        super().__init__(local)
        self._agree = agree
        self._every = every
        self._leads = leads
        self._calls = 0
        self._meets = False

    def look(self) -> bool:
        """Return True at the calls where all ranks take part."""
        self._calls += 1
        self._meets = self._calls % self._every == 0
        return self._meets

    def decide(self, step: int, want: int, *, epoch_end: bool) -> int:
        """Return what rank 0 wants where all ranks take part; elsewhere a broadcast would block for ever."""
        del step
        if not (self._meets or epoch_end):
            return NOTHING
        return int(self._agree(want if self._leads else NOTHING))


def _read(watched: Watched) -> Dict[str, Any]:
    return object_or_empty(watched.changed() or b"")


Layout = Tuple[int, int, int, int]


def layout(
    environ: Mapping[str, str],
    *,
    rank: Optional[int],
    world_size: Optional[int],
    local_rank: Optional[int],
    nodes: int,
) -> Layout:
    """Return (rank, world size, local rank, ranks on this node): arguments, else a launcher's, else one."""
    world = _pick(world_size, environ.get("WORLD_SIZE"), 1)
    number = _pick(rank, environ.get("RANK"), 0)
    is_launched = world_size is None or environ.get("WORLD_SIZE") == str(world_size)  # then it is valid:
    said = environ.get("LOCAL_WORLD_SIZE") if is_launched else None  # nodes may have joined since the start
    here = _pick(None, said, max(1, world // max(1, nodes)))
    local = _pick(local_rank, environ.get("LOCAL_RANK") if rank is None else None, number % here)
    if not 0 <= number < world or not 0 <= local < here:
        raise ValueError(f"rank {number} of {world}, local rank {local} of {here}: a rank is below its count")
    return number, world, local, here


def _pick(argument: Optional[int], text: Optional[str], default: int) -> int:
    if argument is not None:
        return argument
    return int(text) if text is not None and text.isdigit() else default
