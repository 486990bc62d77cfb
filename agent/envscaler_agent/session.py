"""The interface for training code: a few lines that make it safe to move.

::

    with Session(total_steps=1000) as session:
        path = session.restore()                    # None on a fresh start
        step = load(path) if path else 0
        for batch in batches(step):
            ...
            session.step(samples=len(batch), loss=loss)
            session.checkpoint(save, epoch_end=is_last_of_epoch)

Without a spool folder (a plain run on a laptop) all calls work and do nothing, unless ``local_dir`` names a
folder for checkpoints.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Type, Union

from envscaler_agent import saving
from envscaler_agent import saving as rk
from envscaler_agent import spool as ex
from envscaler_agent.ending import EXIT_DRAINED, EXIT_STOPPED
from envscaler_agent.errors import CheckpointError, ProtocolError
from envscaler_agent.progress import SLOW_PHASES, Rate
from envscaler_agent.protocol import Control, checkpoint_name

if TYPE_CHECKING:
    from typing import Self  # new in Python 3.11; only type checkers read it

Save = Callable[[Path], object]

POLL_S = 0.25
"""Time between two checks for the owner's requests. Chosen: fast enough for a user; a file's stat costs
little.
"""
WRITE_S = 1.0
"""Time between two reports. Chosen: as often as the wrapper passes them on."""
LOSS_S = 10.0
"""Time between two reads of a loss tensor. Chosen: each read makes the CPU wait for the GPU."""
AGREE_EVERY = 10
"""Calls of ``checkpoint`` between two calls of ``agree``. Chosen: a broadcast costs up to a millisecond, and
a drain that waits for ten steps is soon enough.
"""
RETRY_S = 60.0
"""Wait after a periodic save that failed. Chosen: a full disk does not become free within seconds."""
MAX_WAITING = 2
"""Complete saves that may wait for the sidecar before periodic ones are skipped. Chosen: one that is being
uploaded and a newer one.
"""
LOCAL_EVERY: Mapping[str, float] = {"seconds": 600}
"""Interval of periodic saves with ``local_dir`` and without a spool. Chosen: as ``checkpoint.every: 10m``."""
GIVEN_UP = "the first rank gave it up"
_EXITS = {rk.DRAIN: EXIT_DRAINED, rk.STOP: EXIT_STOPPED}
_COUNTS = {"step", "epoch", "total_steps", "epochs", "samples", "tokens"}
_COUNTS |= {"batch", "micro_batches", "repeated_samples"}
_WANTS = {"checkpoint": rk.SAVE, "drain": rk.DRAIN, "stop": rk.STOP}


class Session:
    """Progress, checkpoints and drains, for one rank of a training.

    Attributes:
        rank, world_size, local_rank: This rank's place.
        steps: Optimizer steps done in this generation, including restored ones.
        epoch: Epochs finished, including restored ones.
        samples: Samples used, including restored ones, over all ranks.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(
        self,
        total_steps: Optional[int] = None,
        epochs: Optional[int] = None,
        *,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        local_rank: Optional[int] = None,
        agree: Optional[rk.Agree] = None,
        spool: Union[str, Path, None] = None,
        local_dir: Union[str, Path, None] = None,
    ) -> None:
        """Determine where this rank runs.

        Args:
            total_steps: Steps that the whole training takes, including restored ones.
            epochs: Epochs that the whole training takes.
            rank: Default: ``RANK``, else 0.
            world_size: Default: ``WORLD_SIZE``, else 1.
            local_rank: Default: ``LOCAL_RANK``, else computed.
            agree: For ranks on several nodes: takes an integer, returns rank 0's (with torch: ``broadcast``
                of a tensor of one element). Called by all ranks with every tenth ``checkpoint`` and at epoch
                ends. Without it, only checkpoints every n steps or epochs are saved there, and a drain uses
                the newest of them.
            spool: Spool folder. Default: ``ENVSCALER_SPOOL``, else none.
            local_dir: Without a spool: the folder where checkpoints are kept and restored from.
        """
        self._spool = ex.Spool(spool) if spool else ex.Spool.from_env()
        self._local_dir = Path(local_dir) if local_dir and self._spool is None else None
        self._start = self._read_start()
        nodes = self._start.nodes
        place = rk.layout(os.environ, rank=rank, world_size=world_size, local_rank=local_rank, nodes=nodes)
        self.rank, self.world_size, self.local_rank, self._local_count = place
        self._ranks = self._make_ranks(agree)
        self._pid = os.getpid()
        self.steps = self.epoch = self._tokens = self._samples = self._restored_samples = 0
        self._said: Dict[str, Any] = {"total_steps": total_steps, "epochs": epochs}
        passes = os.environ.get("ENVSCALER_GRADIENT_ACCUMULATION", "")
        if passes.isdigit():
            self._said["micro_batches"] = int(passes)
        self._batch: Optional[int] = None
        self._loss: Any = None
        self._accuracy: Any = None
        self._data_s: Optional[float] = None
        self._sync_s: Optional[float] = None
        self._state: Dict[str, Any] = {"cooperates": False, "pid": self._pid}
        self._saves = self._has_samples = False
        self._last_losses: Dict[str, Any] = {}
        self._open_clockwork()

    def _open_clockwork(self) -> None:
        now = self._clock()
        writes = self._spool is not None and self.local_rank == 0
        self._beat_at = now if writes else math.inf
        self._look_at = now if self.rank == 0 and (self._spool or self._local_dir) else math.inf
        self._write_at = self._loss_at = now
        self._ask: Optional[Control] = None
        self._ask_until = self._save_s = self._slow_s = 0.0
        self._slow_since: Optional[float] = None
        self._saved_at = now
        self._saved_step = self._saved_epoch = 0
        self._rate, self._busy_rate, self._sample_rate = Rate(), Rate(), Rate()
        self._control = ex.Watched(self._spool.control) if self._spool else None
        self._request = ex.Watched(self._spool.request) if self._spool else None
        every = self._start.every if self._spool else LOCAL_EVERY if self._local_dir else None
        self._every = dict(every or {})

    # -- what the training calls ---------------------------------------------------------------

    def __enter__(self) -> Self:
        """Clear what a killed save left, and report that this is a session."""
        if self.local_rank == 0 and self._checkpoints is not None:
            saving.clear_partial(self._checkpoints)
        self._write(self._clock())
        return self

    def __exit__(
        self,
        _type: Optional[Type[BaseException]],
        _value: Optional[BaseException],
        _traceback: Optional[TracebackType],
    ) -> None:
        """Report the last numbers."""
        self._loss_at = -math.inf
        self._write(self._clock())

    def restore(self) -> Optional[Path]:
        """Return the folder of the checkpoint to continue from, None on a fresh start.

        Counts of steps, epochs and samples continue from there. A rank that is restarted inside its attempt,
        as torchrun does, continues from the newest save of the attempt if all its ranks are on one node;
        otherwise from what the sidecars of all nodes agreed on: the checkpoint of the attempt's start, or,
        since a node was replaced, the newest one.
        """
        found = self._start.restore
        path = self._newest_here()
        if path is not None:
            found = None
        elif found is not None:
            path = Path(found.path)
        else:
            return None
        facts = saving.facts_of(path)
        for name in ("step", "epoch", "samples"):
            value = getattr(found, name) if found is not None else None
            facts[name] = facts.get(name) if value is None else value
        self.steps = self._saved_step = facts["step"] or 0
        self.epoch = self._saved_epoch = facts["epoch"] or 0
        self._restored_samples = facts["samples"] or 0
        self._forget_rates()  # a jump does not count
        self._has_samples = facts["samples"] is not None
        return path

    def step(
        self,
        *,
        samples: Optional[int] = None,
        tokens: Optional[int] = None,
        loss: Any = None,
        accuracy: Any = None,
        data_s: Optional[float] = None,
        sync_s: Optional[float] = None,
        batch: Optional[int] = None,
    ) -> None:
        """Count one optimizer step; call it after each. Costs about a microsecond.

        Args:
            samples: Samples used by this rank in this step; all ranks are assumed to use as many.
            tokens: Tokens used by this rank in this step.
            loss: A number or a tensor. A tensor is read once in ten seconds.
            accuracy: Like the loss.
            data_s: Seconds of the step spent waiting for data.
            sync_s: Seconds of the step spent reducing gradients.
            batch: Global batch size, samples; default: the spec's, else samples x ranks.
        """
        self.steps += 1
        if samples is not None:
            self._samples += samples
            self._batch = samples
        if batch is not None:
            self._said["batch"] = batch
        if tokens is not None:
            self._tokens += tokens
        if loss is not None:
            self._loss = loss if loss.__class__ is float else _light(loss)
        if accuracy is not None:
            self._accuracy = accuracy if accuracy.__class__ is float else _light(accuracy)
        if data_s is not None:
            self._data_s = data_s
        if sync_s is not None:
            self._sync_s = sync_s
        now = self._clock()
        if now >= self._beat_at:
            self._beat(now)

    def phase(self, name: str) -> None:
        """Announce ``loading``, ``training``, ``evaluation`` or another name."""
        now = self._clock()
        if self._slow_since is not None:
            self._slow_s += now - self._slow_since
        self._slow_since = now if name in SLOW_PHASES else None
        self._said["phase"] = name
        self._write(now)

    def report(self, **fields: Optional[float]) -> None:
        """Report ``noise_scale``, ``micro_batches``, ``repeated_samples``, ``total_steps`` or ``epochs``.

        Raises:
            ValueError: Another name.
        """
        unknown = set(fields) - {"noise_scale", "micro_batches", "repeated_samples", "total_steps", "epochs"}
        if unknown:
            raise ValueError(f"report: unknown {sorted(unknown)}")
        self._said.update(fields)

    @property
    def samples(self) -> int:
        """Samples used in this generation by all ranks."""
        return self._restored_samples + self._samples * self.world_size

    def checkpoint(self, save: Save, *, epoch_end: Union[bool, int, None] = None) -> bool:
        """Save when that is due or requested; exit on a drain. Call it after each ``step``.

        Args:
            save: Gets an empty folder and writes everything that a restore needs: every rank its part, into
                its own files.
            epoch_end: True at the end of an epoch, or the number of epochs finished (0: not an end).

        Returns:
            True when a checkpoint was saved and training continues.

        Raises:
            SystemExit: It was saved, and the stage leaves this machine.
            CheckpointError: It could not be saved, and the stage leaves this machine.
        """
        if not self._saves:
            self._saves = True
            self._state["cooperates"] = self._ranks.can_be_asked
            counted = "steps" in self._every or "epochs" in self._every
            self._state["saves"] = bool(self._every) if self._ranks.can_be_asked else counted
            self._write(self._clock())
        at_end = bool(epoch_end)
        if at_end:
            self.epoch = self.epoch + 1 if epoch_end is True else int(epoch_end or 0)
        must_meet = self._ranks.look()
        if not (at_end or must_meet or self._ask or self._clock() >= self._look_at or self._is_counted_due()):
            return False
        want = self._want(self._clock(), at_end=at_end)
        what = self._ranks.decide(self.steps, want, epoch_end=at_end)
        if what == rk.NOTHING:
            return False
        return self._carry_out(what, save)

    # -- what is wanted ------------------------------------------------------------------------

    def _want(self, now: float, *, at_end: bool) -> int:
        """Return what rank 0 wants at this step; for other ranks what the schedule requires."""
        if self._look_at <= now < math.inf:
            self._look_at = now + POLL_S
            self._poll(now)
        due = self._is_counted_due() and (at_end or self._start.align != "epoch")
        if not self._ranks.can_be_asked:
            return rk.SAVE if due else rk.NOTHING
        if self._ask is not None and (self._ask.align != "epoch" or at_end or now >= self._ask_until):
            return _WANTS[self._ask.action]
        if self.rank == 0 and self._is_time(now) and (at_end or self._start.align != "epoch"):
            due = True
        return rk.SAVE if due and self._has_room() else rk.NOTHING

    def _is_counted_due(self) -> bool:
        steps, epochs = self._every.get("steps"), self._every.get("epochs")
        if steps is not None and self.steps + self._ranks.lead_steps - self._saved_step >= steps:
            return True
        return epochs is not None and self.epoch - self._saved_epoch >= epochs

    def _is_time(self, now: float) -> bool:
        seconds = self._every.get("seconds")
        return seconds is not None and now - self._saved_at >= seconds

    def _has_room(self) -> bool:
        if self._spool is None or len(saving.waiting(self._spool.checkpoints)) < MAX_WAITING:
            return True
        self._saved_at = self._clock()
        self._saved_step, self._saved_epoch = self.steps, self.epoch
        self._state["warning"] = (
            f"checkpoint at step {self.steps} left out: {MAX_WAITING} wait for the upload"
        )
        return False

    def _poll(self, now: float) -> None:
        """Read the requests of the owner, or of a signal to the wrapper."""
        data = self._control.changed() if self._control is not None else None
        if data is not None:
            try:
                control = Control.from_json(data, where="control.json")
            except ProtocolError as err:
                self._warn(str(err))  # keep training, refuse to move
            else:
                self._take(control, now)
        if self._request is not None and self._request.changed() is not None:
            self._take(Control(action="stop", align="now", reason="signal"), now)

    def _take(self, control: Control, now: float) -> None:
        if control.action == "run":
            self._ask = None
        elif control.action not in _WANTS:
            pass  # "hold" is for the sidecar, before the start: it requests nothing of the training
        elif self._ask is None or self._ask.action != control.action:
            self._ask, self._ask_until = control, now + control.align_timeout_s
        elif control.action == "checkpoint":
            self._ask = control

    # -- saving --------------------------------------------------------------------------------

    def _carry_out(self, what: int, save: Save) -> bool:
        goes = what in _EXITS
        problem = self._save(what, save)
        now = self._clock()
        self._saved_at = now
        if self._ask is not None and self._ask.action == "checkpoint":
            self._ask = None
        if problem is None:
            self._saved_step, self._saved_epoch = self.steps, self.epoch
            self._state.pop("warning", None)
        else:
            self._delay_retry(now)
            self._warn(f"checkpoint at step {self.steps} failed, the one before stays: {problem}")
        if not goes or (problem is not None and self._may_try_again(what, problem)):
            self._state["draining"] = False
            self._write(now)
            return problem is None
        if problem is not None and what == rk.DRAIN:
            self._write(now)
            raise CheckpointError(f"asked to stop at step {self.steps}, but the save failed: {problem}")
        self._state["drained"] = True
        self._loss_at = -math.inf
        self._write(now)
        raise SystemExit(_EXITS[what])

    def _may_try_again(self, what: int, problem: str) -> bool:
        """True when a drain failed for reasons other than a failed save of this node's first rank."""
        return what == rk.DRAIN and (problem == GIVEN_UP or rk.ELSEWHERE in problem)

    def _delay_retry(self, now: float) -> None:
        seconds = self._every.get("seconds")
        if seconds is not None:
            self._saved_at = now - max(0.0, seconds - RETRY_S)
        self._saved_step, self._saved_epoch = self.steps, self.epoch

    def _save(self, what: int, save: Save) -> Optional[str]:
        """Save this rank's part, and complete the checkpoint as the first rank; return any problem."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return None
        name = checkpoint_name(self._start.generation, self.steps, self._start.attempt)
        began = self._clock()
        is_taken = saving.is_taken(checkpoints, name)
        self._state.update(saving=True, draining=what in _EXITS)
        self._write(began)
        problem = None if is_taken else self._call(save, saving.partial_folder(checkpoints, name))
        try:
            if self._ranks.is_first and not is_taken:
                return self._complete(checkpoints, name, problem, began)
            if self._ranks.is_first:
                self._ranks.announce(self.steps, is_complete=True)
                return None
            return self._take_part(what, checkpoints, name, problem)
        finally:
            self._state["saving"] = False
            self._save_s += self._clock() - began

    def _take_part(self, what: int, checkpoints: Path, name: str, problem: Optional[str]) -> Optional[str]:
        """Report this rank's part to the first rank; before a drain, wait for the whole result."""
        if problem is not None:
            saving.abandon(checkpoints, name)  # space for the answer, if the disk is full
        self._ranks.acknowledge(self.steps, problem or "")
        if problem is None and what in _EXITS and not self._ranks.await_outcome(self.steps):
            return GIVEN_UP
        return problem

    def _complete(self, checkpoints: Path, name: str, problem: Optional[str], began: float) -> Optional[str]:
        who = f"rank {self.rank}: " if self.world_size > 1 else ""
        problems = ([who + problem] if problem else []) + self._ranks.gather(self.steps)
        if not problems:
            try:
                if self._start.node == 0 and saving.is_empty(checkpoints, name):
                    problems = ["save wrote no file into the folder that it was given"]
                else:
                    saving.complete(checkpoints, name, self._facts(began))
            except OSError as err:
                problems = [str(err)]
        if problems:
            saving.clear_partial(checkpoints)
        else:
            self._state.update(saved_step=self.steps, last_save_s=round(self._clock() - began, 3))
            if self._local_dir is not None:
                saving.prune(checkpoints)
        self._ranks.announce(self.steps, is_complete=not problems)
        return "; ".join(problems) or None

    def _call(self, save: Save, folder: Path) -> Optional[str]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save(folder)
        except Exception as err:  # noqa: BLE001 - the user's code may raise anything, and training goes on
            return f"{type(err).__name__}: {err}"
        return None

    def _facts(self, began: float) -> Dict[str, Any]:
        return {
            "step": self.steps,
            "epoch": self.epoch,
            "samples": _plain("samples", self.samples) if self._counts_samples else None,
            "world_size": self.world_size,
            "global_batch": _plain("batch", self._global_batch),
            "save_s": round(self._clock() - began, 3),
        }

    # -- saying --------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        self._beat_at = now + POLL_S
        if "first_step_at" not in self._state:
            self._state["first_step_at"] = now
            self._forget_rates()  # the first step contains the wait for other nodes, and what is compiled
        if now >= self._write_at:
            self._write(now)

    def _forget_rates(self) -> None:
        self._rate, self._busy_rate, self._sample_rate = Rate(), Rate(), Rate()

    def _write(self, now: float) -> None:
        """Replace the progress file; a full disk costs a report, never the training."""
        if self._spool is None or self.local_rank != 0 or os.getpid() != self._pid:
            return
        self._write_at = now + WRITE_S
        try:
            ex.write_json(self._spool.progress, {**self._numbers(now), **self._state, "at": now})
        except OSError:
            return

    def _numbers(self, now: float) -> Dict[str, Any]:
        self._rate.add(now, self.steps)
        self._busy_rate.add(now - self._save_s - self._slow_s, self.steps)
        self._sample_rate.add(now, self.samples)
        busy = self._busy_rate.per_s()
        numbers = dict(self._said)
        numbers.update(
            step=self.steps,
            epoch=self.epoch,
            samples=self.samples if self._counts_samples else None,
            tokens=self._tokens * self.world_size if self._tokens else None,
            batch=self._global_batch,
            save_s=round(self._save_s, 3),
            step_time_s=1 / busy if busy else None,
            data_time_s=_number(self._data_s),
            sync_time_s=_number(self._sync_s),
            steps_per_s=self._rate.per_s(),
            samples_per_s=self._sample_rate.per_s() if self._counts_samples else None,
        )
        numbers.update(self._losses(now))
        return {name: _plain(name, value) for name, value in numbers.items()}

    def _losses(self, now: float) -> Dict[str, Any]:
        if now >= self._loss_at or self._loss.__class__ is float:
            self._loss_at = now + LOSS_S
            loss, accuracy = _number(self._loss), _number(self._accuracy)
            is_nan = None if self._loss is None else loss is None
            self._last_losses = {"loss": loss, "loss_is_nan": is_nan, "accuracy": accuracy}
        return self._last_losses

    def _warn(self, text: str) -> None:
        """Report it to the owner and in the log; no ``warnings.warn``, which some turn into errors."""
        self._state["warning"] = text[:500]
        sys.stderr.write(f"envscaler: {text}\n")

    # -- where it runs -------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Optional[Path]:
        return self._spool.checkpoints if self._spool is not None else self._local_dir

    @property
    def _counts_samples(self) -> bool:
        return self._has_samples or self._samples > 0

    @property
    def _global_batch(self) -> Optional[int]:
        said: Optional[int] = self._said.get("batch") or self._start.global_batch
        if said is None and self._batch is not None:
            return self._batch * self.world_size
        return said

    def _read_start(self) -> ex.Start:
        if self._spool is None:
            return ex.Start()
        try:
            return ex.parse_start(self._spool.start.read_bytes())
        except FileNotFoundError:
            return ex.Start()

    def _newest_here(self) -> Optional[Path]:
        """The newest save of this attempt, if it is newer than the start and this node has all of it."""
        if self._local_dir is not None:
            return saving.newest(self._local_dir)
        if self._spool is None or self.world_size > self._local_count:
            return None
        start = self._start
        began = start.restore.step if start.restore is not None else None
        return saving.newest_of(
            self._spool.checkpoints,
            (start.generation, start.attempt),
            after=-1 if began is None else began,
            most_ranks=self._local_count,
        )

    def _make_ranks(self, agree: Optional[rk.Agree]) -> rk.Alone:
        local = rk.Alone()
        if self._local_count > 1 and self._spool is not None:
            launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            local = rk.Neighbours(self._spool.ranks / launch, self.local_rank, self._local_count)
        if self.world_size == self._local_count:
            return local
        if agree is not None:
            return rk.Collective(agree, every=AGREE_EVERY, leads=self.rank == 0, local=local)
        sys.stderr.write(
            "envscaler: ranks on several nodes and no agree=: this training cannot be asked to stop\n"
        )
        return rk.Scheduled(local)


def _light(value: Any) -> Any:
    """Return *value* without its autograd graph: a loss kept until later must not keep activations."""
    detach = getattr(value, "detach", None)
    return detach() if detach is not None else value


def _plain(name: str, value: Any) -> Any:
    """Return a JSON value: a numpy or torch count as an integer, anything but a number as None."""
    if value is None or value.__class__ in (int, bool, str):
        return value
    number = _number(value)
    return number if number is None or name not in _COUNTS else int(number)


def _number(value: Any) -> Optional[float]:
    """Return a finite float, None for anything else."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None
