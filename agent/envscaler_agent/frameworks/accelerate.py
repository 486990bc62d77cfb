"""Accelerate.

::

    from envscaler_agent.frameworks.accelerate import AcceleratedSession

    with AcceleratedSession(accelerator, loader) as session:      # after accelerator.prepare
        while session.epoch < 3:
            for batch in session.batches():
                ...                                               # backward and optimizer.step as before
                session.step(loss=loss)                           # once for each batch
            ...                                                   # evaluate

``accelerator.save_state`` writes model, optimizer, scheduler and random states of every rank; the session
adds the position in the epoch. The code after an epoch's loop runs before the end of the epoch is saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Type

from accelerate import Accelerator

from envscaler_agent import Session
from envscaler_agent.errors import CheckpointError
from envscaler_agent.frameworks import random_state, set_random_state
from envscaler_agent.frameworks.torch import (
    agree,
    allow_numpy,
    leave_group_at_exit,
    telling_of_shards,
)

if TYPE_CHECKING:
    from typing import Self  # new in Python 3.11; only type checkers read it


class AcceleratedSession:
    """Yields the rest of each epoch, counts steps, saves, and exits when the stage moves.

    Attributes:
        session: The session that it reports to.
        epoch: Epochs finished.
        batch: Batches of this epoch that each rank has used.
    """

    def __init__(self, accelerator: Accelerator, loader: Any, session: Optional[Session] = None) -> None:
        """Continue from the checkpoint, if there is one. Everything must be prepared, including *loader*.

        Raises:
            ValueError: *loader* was not prepared, or its dataset has no order that can be resumed.
            CheckpointError: The used part of the epoch does not divide over these ranks.
        """
        if not hasattr(loader, "total_batch_size"):
            raise ValueError(
                "AcceleratedSession: loader must be what accelerator.prepare returned, of a dataset with "
                "__getitem__ (an IterableDataset has no place that could be saved)"
            )
        leave_group_at_exit()
        self.session = session if session is not None else Session(agree=agree)
        self.epoch = self.batch = 0
        self._accelerator, self._loader = accelerator, loader
        self._at_epoch_begin: Dict[str, Any] = {}
        self._restored: Optional[Dict[str, Any]] = None
        self._owes_epoch_end = False
        folder = self.session.restore()
        if folder is not None:
            allow_numpy()
            accelerator.load_state(str(folder))
            accelerator.step = 0  # passes since a step: with other ranks the number would differ
            self._restored = self._place_in(folder)
            self.epoch, self.batch = self._restored["epoch"], self._restored["batch"]

    def __enter__(self) -> Self:
        """Begin to report."""
        self.session.__enter__()
        self.session.report(micro_batches=self._accelerator.gradient_accumulation_steps)
        self.session.phase("training")
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        """Report the last numbers."""
        self.session.__exit__(kind, error, trace)

    def batches(self) -> Iterator[Any]:
        """Yield the rest of this epoch; first save the end of the previous one, if due or requested.

        Raises:
            SystemExit: The checkpoint is saved and the stage leaves this machine.
        """
        if self._owes_epoch_end:
            self._owes_epoch_end = False
            self.session.checkpoint(self._save, epoch_end=self.epoch)
        if self._restored is not None and self.batch:
            self._set(self._restored["at_epoch_begin"])
        self._at_epoch_begin = self._get()
        loader = self._loader
        if self.batch:
            loader = self._accelerator.skip_first_batches(loader, self.batch)
        self._loader.iteration = loader.iteration = self.epoch  # seedable samplers derive the order from it
        if self._restored is not None and not self.batch:
            self._set(self._restored["now"])
            self._restored = None
        for batch in loader:
            if self._restored is not None:  # skipping has used the generators
                self._set(self._restored["now"])
                self._restored = None
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0
        self._owes_epoch_end = True

    def step(self, *, samples: Optional[int] = None, loss: Any = None) -> None:
        """Count the batch; save when that is due or requested.

        During gradient accumulation nothing is counted or saved.

        Args:
            samples: Samples of this rank in the whole step. Default: what the loader yields.
            loss: A number or a tensor.

        Raises:
            SystemExit: The checkpoint is saved and the stage leaves this machine.
        """
        accelerator = self._accelerator
        if not accelerator.sync_gradients:
            return
        usual = self._loader.total_batch_size * accelerator.gradient_accumulation_steps
        self.session.step(
            samples=usual // accelerator.num_processes if samples is None else samples,
            loss=loss,
            batch=usual,
        )
        if self.batch < len(self._loader):
            self.session.checkpoint(self._save)

    def _place_in(self, folder: Path) -> Dict[str, Any]:
        """Return this rank's position; with another number of ranks, the one with the same samples left.

        The ranks get batches in turn, so n batches of each of two ranks are the first 2 n of a single rank.
        """
        mine, first = self._file(folder, self.session.rank), self._file(folder, 0)
        place: Dict[str, Any] = json.loads((mine if mine.exists() else first).read_text(encoding="utf-8"))
        used, ranks = place["batch"] * place["ranks"], self._accelerator.num_processes
        if used % ranks:
            raise CheckpointError(
                f"{folder}: {used} batches of the epoch are used, no multiple of {ranks} ranks"
            )
        return {**place, "batch": used // ranks}

    def _save(self, folder: Path) -> None:
        naming = self._accelerator.project_configuration
        is_automatic, naming.automatic_checkpoint_naming = naming.automatic_checkpoint_naming, False
        try:
            with telling_of_shards("saved"):
                self._accelerator.save_state(str(folder))
        finally:
            naming.automatic_checkpoint_naming = is_automatic
        place = {
            "epoch": self.epoch,
            "batch": self.batch,
            "ranks": self._accelerator.num_processes,
            "at_epoch_begin": self._at_epoch_begin,
            "now": self._get(),
        }
        self._file(folder, self.session.rank).write_text(json.dumps(place), encoding="utf-8")

    def _file(self, folder: Path, rank: int) -> Path:
        return folder / f"place-{rank:05d}.json"

    def _get(self) -> Dict[str, Any]:
        """Return the random state, including that of the generator that draws the order."""
        generator = self._generator()
        order = generator.get_state().tolist() if generator is not None else None
        return {**random_state(), "order": order}

    def _set(self, state: Dict[str, Any]) -> None:
        set_random_state(state)
        generator = self._generator()
        if generator is not None and state["order"] is not None:
            import torch  # noqa: PLC0415 - only where there is such a generator

            generator.set_state(torch.tensor(state["order"], dtype=torch.uint8))

    def _generator(self) -> Any:
        """Return the generator of the order: with several ranks the one that accelerate synchronizes."""
        sampler = self._loader.get_sampler()
        found = (
            getattr(self._loader, "synchronized_generator", None),
            getattr(sampler, "generator", None),
            self._loader.generator,
        )
        return next((generator for generator in found if generator is not None), None)
