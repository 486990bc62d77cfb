"""Lightning.

::

    from envscaler_agent.frameworks.lightning import SessionCallback

    callback = SessionCallback()
    Trainer(callbacks=[callback]).fit(model, loader, ckpt_path=callback.restored)

A ``DataLoader`` of torch cannot save its position: Lightning restarts its epoch. So checkpoints are made only
at the ends of epochs, unless the loader can save it (``ResumableLoader``, or torchdata's
``StatefulDataLoader``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from lightning.pytorch import Callback, LightningModule, Trainer

from envscaler_agent import Session
from envscaler_agent.frameworks import ONE_TRAINING, load_random_state, save_random_state
from envscaler_agent.frameworks.torch import agree, leave_group_at_exit, telling_of_shards

_FILE = "lightning.ckpt"


class SessionCallback(Callback):
    """Reports steps, saves when that is due or requested, and ends the program when the stage moves.

    Attributes:
        session: The session that it reports to.
        restored: Path for ``fit(ckpt_path=...)``; None on a fresh start.
    """

    def __init__(self, session: Optional[Session] = None) -> None:
        """Find the checkpoint to continue from."""
        leave_group_at_exit()
        self.session = session if session is not None else Session(agree=agree)
        folder = self.session.restore()
        self.restored = str(folder / _FILE) if folder is not None else None
        self._folder = folder
        self._places: List[Any] = []
        self._loaders: List[Any] = []
        self._has_begun = False
        self._global_step = self._samples = 0

    def on_fit_start(self, *_: Any) -> None:
        """Ensure that the callback is used once. Lightning itself refuses two in one Trainer.

        Raises:
            RuntimeError: This is a second training.
        """
        if self._has_begun:
            raise RuntimeError(ONE_TRAINING)
        self._has_begun = True

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Report how long the training will be.

        Raises:
            RuntimeError: It was restored and did not continue from there.
        """
        if self.restored is not None and trainer.global_step == 0 < self.session.steps:
            raise RuntimeError(
                f"the training begins at step 0, its checkpoint is of step {self.session.steps}: "
                "write fit(..., ckpt_path=callback.restored)"
            )
        self._global_step = trainer.global_step
        self._loaders = _loaders_in(trainer.train_dataloader)
        for loader, place in zip(self._loaders, self._places):
            loader.load_state_dict(place)
        self.session.__enter__()
        steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        self.session.report(
            total_steps=steps if isinstance(steps, int) and steps > 0 else None,
            epochs=epochs if epochs is not None and epochs > 0 else None,
            micro_batches=trainer.accumulate_grad_batches,
        )
        self.session.phase("training")

    def on_train_batch_start(self, _trainer: Trainer, _module: LightningModule, batch: Any, *_: Any) -> None:
        """Restore the random generators after Lightning itself has drawn from them."""
        self._samples += _samples_of(batch)
        if self._folder is not None:
            load_random_state(self._folder, self.session.rank)
            self._folder = None

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        """Count the optimizer's step; save between steps of an epoch, if the loader knows its position."""
        if trainer.global_step == self._global_step:
            return  # during gradient accumulation
        self._global_step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.session.step(samples=self._samples or None, loss=loss)
        self._samples = 0
        if self._loaders and not trainer.is_last_batch:
            self.session.checkpoint(self._save_of(trainer))

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save at the end of an epoch, after its validation."""
        self.session.checkpoint(self._save_of(trainer), epoch_end=trainer.current_epoch + 1)

    def on_train_end(self, *_: Any) -> None:
        """Report the last numbers."""
        self.session.__exit__(None, None, None)

    def state_dict(self) -> Dict[str, Any]:
        """Return the loaders' positions: at an epoch's end Lightning does not restore them."""
        return {"loaders": [loader.state_dict() for loader in self._loaders]}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Keep the positions until the loaders exist."""
        self._places = state_dict["loaders"]

    def _save_of(self, trainer: Trainer) -> Any:
        def save(folder: Path) -> None:
            with telling_of_shards("saved"):
                try:
                    trainer.save_checkpoint(folder / _FILE)
                except RuntimeError:  # from a collective, or on every rank
                    raise
                except Exception:  # on the rank that writes: the others wait for it at the end of the save
                    trainer.strategy.barrier("Trainer.save_checkpoint")
                    raise
            save_random_state(folder, self.session.rank)  # Lightning saves none, and each rank has its own

        return save


def _loaders_in(loaders: Any) -> List[Any]:
    """Return those of a loader, or of a list or dict of loaders, that know their position."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [found for each in loaders for found in _loaders_in(each)]
    return [loaders] if hasattr(loaders, "load_state_dict") else []


def _samples_of(batch: Any) -> int:
    """Samples of a batch: the length of the first tensor in it, 0 when there is none."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 0
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((count for count in map(_samples_of, batch) if count), 0)
    return 0
