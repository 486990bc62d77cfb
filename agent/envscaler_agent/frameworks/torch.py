"""Plain torch: a resumable order of the data, and a checkpoint of everything that the next step needs.

::

    loader = ResumableLoader(dataset, global_batch=64)
    state = TrainingState(model=model, optimizer=optimizer, loader=loader)
    with Session(agree=agree) as session:
        state.load(session.restore())
        while loader.epoch < 3:
            for batch in loader:
                ...
                session.step(samples=len(batch), loss=loss)
                session.checkpoint(state.save, epoch_end=loader.epoch_end)
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle  # nosec B403  # its error alone
import sys
import time
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch.utils.data import DataLoader

from envscaler_agent.errors import CheckpointError
from envscaler_agent.frameworks import load_random_state, save_random_state

GLOBAL_BATCH = "ENVSCALER_GLOBAL_BATCH"
MICRO_BATCH = "ENVSCALER_MICRO_BATCH"
"""Variables of a stage with ``distributed.global_batch``: samples of a step, and of one pass of one rank."""
_PARTS = "state.pt"
_DRAIN_S = 0.2
"""Chosen: a thread that waits for the interpreter's lock to drop a collective needs microseconds."""


def agree(value: int) -> int:
    """Return rank 0's *value*: what ``Session(agree=...)`` needs where ranks run on several nodes."""
    if not torch.distributed.is_initialized():
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    box = torch.tensor([value], device=device)
    torch.distributed.broadcast(box, src=0)
    return int(box)


@lru_cache(maxsize=None)
def leave_group_at_exit() -> None:
    """Destroy gloo's process group when the program ends, unless an exception ends it.

    A thread of gloo may still use the last collective while the interpreter shuts down; it then ends a
    finished program with SIGABRT (github.com/pytorch/pytorch/issues/190489). Only the code that created the
    group can know earlier that it is no longer needed.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    # After an exception the other ranks may be stuck, and NCCL would wait for them here. An exception that a
    # launcher caught (torch.multiprocessing.spawn) leaves no trace, nor does sys.exit("reason"): so never
    # NCCL's.
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
        return
    if getattr(sys, "last_value", None) is None:
        torch.distributed.destroy_process_group()
        time.sleep(_DRAIN_S)  # any remaining reference to the group keeps its threads; no call waits for them


class ResumableLoader(DataLoader):
    """A ``DataLoader`` that knows its position, with any number of ranks.

    The order of an epoch depends only on seed and epoch. It is cut into global batches, these into micro
    batches, and each rank gets its share of every global batch. So a training that continues with another
    number of ranks uses each remaining sample once. An incomplete global batch at the end of an epoch's order
    is left out, so that every step has the same number of samples on each rank.

    Attributes:
        epoch: Epochs finished; grows when the last batch was used and the loop ends.
        position: Samples of this epoch that all ranks have used, including the batches already yielded.
        accumulation: Micro batches of this rank in a step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: Optional[int] = None,
        micro_batch: Optional[int] = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        **options: Any,
    ) -> None:
        """Begin at the first sample of epoch 0.

        Args:
            dataset: With ``__len__`` and ``__getitem__``.
            global_batch: Samples in a step, all ranks together. Default: ``ENVSCALER_GLOBAL_BATCH``.
            micro_batch: Samples that one rank processes at once. Default: ``ENVSCALER_MICRO_BATCH``, else
                this rank's whole share.
            seed: Seed of the order.
            shuffle: False: the dataset's own order.
            rank: Default: ``RANK``, else 0.
            world_size: Default: ``WORLD_SIZE``, else 1.
            options: Options of ``DataLoader``: ``num_workers``, ``collate_fn``, ...

        Raises:
            ValueError: The global batch is unknown, larger than the dataset, or does not divide.
        """
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        batch = global_batch if global_batch is not None else _number(GLOBAL_BATCH)
        if batch is None:
            raise ValueError("global_batch: not given, and ENVSCALER_GLOBAL_BATCH is not set")
        micro = micro_batch if micro_batch is not None else _number(MICRO_BATCH)
        micro = micro or max(1, batch // self.world_size)
        if batch % (micro * self.world_size):
            raise ValueError(
                f"global_batch: {batch} is not a multiple of {micro} samples x {self.world_size} ranks"
            )
        if batch > len(dataset):
            raise ValueError(f"global_batch: {batch} is more than the dataset's {len(dataset)} samples")
        self.seed, self.shuffle = seed, shuffle
        self.global_batch, self.micro_batch = batch, micro
        self.accumulation = batch // (micro * self.world_size)
        self.epoch = self.position = 0
        self._handed_out = 0
        self._steps = len(dataset) // batch
        # Use a separate generator: a loader that draws from torch's would shift every dropout after a resume.
        generator = torch.Generator()
        generator.manual_seed(seed)
        super().__init__(dataset, batch_sampler=_Order(self), generator=generator, **options)

    def __len__(self) -> int:
        """Return the micro batches that this rank gets in a whole epoch."""
        return self._steps * self.accumulation

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch; the loop's end begins the next."""
        if self._is_used_up:
            self._begin_next()
        self._handed_out = 0
        for batch in super().__iter__():
            self._handed_out += 1
            if self.is_step_end:
                self.position += self.global_batch
            yield batch
        if self._is_used_up:
            self._begin_next()

    @property
    def is_step_end(self) -> bool:
        """True when the last yielded batch is this rank's last of its global batch."""
        return self._handed_out % self.accumulation == 0

    @property
    def epoch_end(self) -> int:
        """Epochs finished when the last yielded batch is the epoch's last, else 0."""
        return self.epoch + 1 if self._is_used_up else 0

    def order(self) -> List[int]:
        """Return this rank's samples from the position on, in their order."""
        count = len(self.dataset)
        order = list(range(count))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(_mixed(self.seed, self.epoch))
            order = torch.randperm(count, generator=generator).tolist()
        share = self.global_batch // self.world_size
        begins = range(self.position, self._steps * self.global_batch, self.global_batch)
        return [
            sample
            for begin in begins
            for sample in order[begin + self.rank * share : begin + (self.rank + 1) * share]
        ]

    def state_dict(self) -> Dict[str, Any]:
        """Return the position, and what it depends on."""
        at_end = self._is_used_up
        return {
            "epoch": self.epoch + at_end,
            "position": 0 if at_end else self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.dataset),
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            CheckpointError: It is a position in another order.
        """
        for name, mine in self.state_dict().items():
            if name not in ("epoch", "position", "global_batch") and state[name] != mine:
                raise CheckpointError(
                    f"the checkpoint's data order has {name} {state[name]}, this one {mine}"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        if state["global_batch"] != self.global_batch and self.position % self.global_batch:
            raise CheckpointError(
                f"sample {self.position} of the epoch was reached with global batches of "
                f"{state['global_batch']}; it is not a multiple of {self.global_batch}"
            )
        self._handed_out = 0

    @property
    def _is_used_up(self) -> bool:
        return self.position >= self._steps * self.global_batch

    def _begin_next(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0


class _Order:
    """The batch sampler of a :class:`ResumableLoader`: read again at every ``iter``."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[List[int]]:
        order, micro = self._loader.order(), self._loader.micro_batch
        return (order[begin : begin + micro] for begin in range(0, len(order), micro))


class TrainingState:
    """All parts of a training with ``state_dict`` and ``load_state_dict``, and the random state.

    Rank 0 saves the parts, each rank its own random state. A model inside ``DistributedDataParallel`` is
    saved as the model itself, so that any other number of ranks, or a single one, can continue with it.
    """

    def __init__(self, **parts: Any) -> None:
        """Use *parts* by name: ``model=``, ``optimizer=``, ``scheduler=``, ``loader=``, ..."""
        self._parts = {name: _unwrapped(part) for name, part in parts.items()}
        self._rank = int(os.environ.get("RANK", "0"))

    def save(self, folder: Path) -> None:
        """Write what the next step depends on; for ``Session.checkpoint``.

        Raises:
            CheckpointError: :meth:`load` would refuse the content of a part's ``state_dict``.
        """
        if self._rank == 0:
            torch.save({name: part.state_dict() for name, part in self._parts.items()}, folder / _PARTS)
            _check_readable(folder / _PARTS)
        save_random_state(folder, self._rank)

    def load(self, folder: Optional[Path]) -> bool:
        """Continue from *folder*, as ``Session.restore`` returns it; False on a fresh start.

        Raises:
            CheckpointError: It was saved by a training with other parts.
        """
        if folder is None:
            return False
        allow_numpy()
        found = torch.load(folder / _PARTS, map_location="cpu", weights_only=True)
        if set(found) != set(self._parts):
            raise CheckpointError(
                f"{folder}: contains {sorted(found)}, this training is {sorted(self._parts)}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(found[name])
        load_random_state(folder, self._rank)
        return True


class ShardedState(TrainingState):
    """The same with model and optimizer as a torch distributed checkpoint: every rank writes its shards.

    For models that are sharded over ranks (FSDP), and for ranks on any number of nodes, before and after. All
    ranks must call ``save`` and ``load`` together; ``Session.checkpoint`` ensures that.
    """

    def __init__(self, model: Any, optimizer: Any, **parts: Any) -> None:
        """Use the model, its optimizer, and other parts by name."""
        super().__init__(**parts)
        self._model, self._optimizer = model, optimizer

    def save(self, folder: Path) -> None:
        """Write this rank's shards; rank 0 also the index of all of them, and the other parts.

        Raises:
            CheckpointError: A rank could not write, or a reason of :class:`TrainingState`.
        """
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes a second, and few need it

        with telling_of_shards("saved"):
            dcp.save(self._shards(), checkpoint_id=folder)
        super().save(folder)

    def load(self, folder: Optional[Path]) -> bool:
        """Read the shards that this rank needs, from any rank; False on a fresh start.

        Raises:
            CheckpointError: They cannot be read, or a reason of :class:`TrainingState`.
        """
        if folder is None:
            return False
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - as above
        from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415 - as above

        shards = self._shards()
        with telling_of_shards("read"):
            dcp.load(shards, checkpoint_id=folder)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=shards["model"],
            optim_state_dict=shards["optimizer"],
        )
        return super().load(folder)

    def _shards(self) -> Dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - as above

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


@contextmanager
def telling_of_shards(done: str) -> Iterator[None]:
    """Report shards that cannot be *done* (saved, read) by an error that costs only the checkpoint.

    Torch's error is a BaseException, which code that continues without this checkpoint does not catch.

    Raises:
        CheckpointError: In place of torch's error.
    """
    try:
        yield
    except BaseException as err:
        api = sys.modules.get("torch.distributed.checkpoint.api")  # loaded where it was raised
        if api is None or not isinstance(err, api.CheckpointException):
            raise
        why = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(err.failures.items()))
        raise CheckpointError(f"shards cannot be {done}: {why}") from err


def allow_numpy() -> None:
    """Let ``weights_only`` loads read numbers and arrays of numpy, such as a learning rate from a sweep."""
    numpy, allow = sys.modules.get("numpy"), getattr(torch.serialization, "add_safe_globals", None)
    if numpy is not None and allow is not None:
        made_by = (getattr(numpy, "_core", None) or numpy.core).multiarray  # numpy 2, else 1
        kinds = numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"] + "?"
        dtypes = [type(numpy.dtype(kind)) for kind in kinds]
        allow([made_by.scalar, getattr(made_by, "_reconstruct"), numpy.ndarray, numpy.dtype, *dtypes])  # noqa: B009 (what numpy's pickles name)


def _check_readable(path: Path) -> None:
    allow_numpy()
    unsafe = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # since torch 2.6
    found = sorted(unsafe(path)) if unsafe is not None else []
    if not found:
        return
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as err:
        raise CheckpointError(
            f"a state_dict contains {', '.join(found)}, which a restore would refuse: "
            "keep numbers, texts, lists, dicts and tensors in it"
        ) from err


def _mixed(seed: int, epoch: int) -> int:
    """Return a 32-bit seed: torch's CPU generator uses only the lower 32 bits of a larger one."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _unwrapped(part: Any) -> Any:
    is_wrapper = isinstance(part, torch.nn.parallel.DistributedDataParallel)
    return part.module if is_wrapper else part


def _number(variable: str) -> Optional[int]:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None
