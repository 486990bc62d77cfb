"""Hugging Face Trainer.

::

    from envscaler_agent.frameworks.transformers import SessionCallback

    callback = SessionCallback(trainer)
    trainer.train(resume_from_checkpoint=callback.restored)

The Trainer writes its own ``checkpoint-N``, with optimizer, schedule and random state, into the session's
folder: after the step's log line and evaluation, so that a resumed training does each of them exactly once.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from envscaler_agent import Session
from envscaler_agent.frameworks.torch import agree, leave_group_at_exit, telling_of_shards

_AFTER_STEP = "_maybe_log_save_evaluate"
_SAVE = "_save_checkpoint"
_BEST = "best"


class SessionCallback(TrainerCallback):
    """Reports steps, saves when that is due or requested, and ends the program when the stage moves.

    Attributes:
        session: The session that it reports to.
        restored: Path for ``train(resume_from_checkpoint=...)``; None on a fresh start.
    """

    def __init__(self, trainer: Trainer, session: Optional[Session] = None) -> None:
        """Join *trainer*.

        Raises:
            ValueError: It already has such a callback.
            RuntimeError: This release of transformers saves in another way.
        """
        if any(isinstance(item, SessionCallback) for item in trainer.callback_handler.callbacks):
            raise ValueError("this Trainer has a SessionCallback already")
        if not (hasattr(trainer, _AFTER_STEP) and hasattr(trainer, _SAVE)):
            raise RuntimeError(
                f"SessionCallback needs Trainer.{_AFTER_STEP} and {_SAVE}; this release has them no more: "
                "use one that docs/how-to/frameworks.md names"
            )
        leave_group_at_exit()
        self.session = session if session is not None else Session(agree=agree)
        folder = self.session.restore()
        self.restored = None
        if folder is not None:
            self.restored = _trainer_folder(folder)
            _lay_out_best(folder, Path(self.restored), trainer.args)
        self._trainer = trainer
        self._log_save_evaluate = getattr(trainer, _AFTER_STEP)
        setattr(trainer, _AFTER_STEP, self._after_step)
        trainer.add_callback(self)
        self._has_begun = self._is_epoch_end = False
        self._loss: Optional[float] = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Report how long the training will be.

        Raises:
            RuntimeError: It was restored and did not continue from there, or this is a second training.
        """
        if self._has_begun:
            raise RuntimeError(
                "a SessionCallback carries one training: steps of a second one, or of auto_find_batch_size's "
                "next try, could not be distinguished from the first's; make it a stage of its own"
            )
        if state.global_step != self.session.steps:
            raise RuntimeError(
                f"the training begins at step {state.global_step}, its checkpoint is of step "
                f"{self.session.steps}: write trainer.train(resume_from_checkpoint=callback.restored)"
            )
        self._has_begun = True
        self.session.__enter__()
        self.session.report(
            total_steps=state.max_steps,
            epochs=args.num_train_epochs,
            micro_batches=args.gradient_accumulation_steps,
        )
        self.session.phase("training")

    def on_log(self, *_: Any, logs: Optional[Any] = None, **__: Any) -> None:
        """Keep the loss; it is reported with the next step."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Count the step."""
        self._is_epoch_end = False
        samples = args.train_batch_size * args.gradient_accumulation_steps
        self.session.step(samples=samples, loss=self._loss, batch=samples * args.world_size)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Record that the next step belongs to the end of an epoch."""
        self._is_epoch_end = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Report the last numbers."""
        self.session.__exit__(None, None, None)

    def _after_step(self, *arguments: Any, **named: Any) -> None:
        """Do what the Trainer does after a step and at the end of an epoch; then the checkpoint."""
        self._log_save_evaluate(*arguments, **named)
        state = self._trainer.state
        is_last_of_epoch = state.epoch is not None and state.epoch == int(state.epoch)
        if self._trainer.control.should_training_stop:
            return  # no work is left to move, and a Trainer that resumes here does one step too many
        if is_last_of_epoch and not self._is_epoch_end:
            return  # the end of the epoch follows, with its evaluation
        finished = round(state.epoch) if self._is_epoch_end and state.epoch is not None else None
        self.session.checkpoint(self._save, epoch_end=finished)

    def _save(self, folder: Path) -> None:
        trainer = self._trainer
        with _saving_into(trainer.args, folder), telling_of_shards("saved"):
            getattr(trainer, _SAVE)(trainer.model, trial=None)
        best = trainer.state.best_model_checkpoint
        if trainer.args.load_best_model_at_end and trainer.args.should_save and best is not None:
            shutil.copytree(best, folder / _BEST / Path(best).name)


@contextmanager
def _saving_into(args: TrainingArguments, folder: Path) -> Iterator[None]:
    """Make the Trainer write a complete checkpoint into *folder*, and nowhere else."""
    ours = {
        "output_dir": str(folder),
        "push_to_hub": False,
        "save_only_model": False,
        "save_strategy": "no",  # otherwise it expects the step's best model here, on every rank
        "save_total_limit": None,
    }
    theirs = {name: getattr(args, name) for name in ours}
    for name, value in ours.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in theirs.items():
            setattr(args, name, value)


def _trainer_folder(folder: Path) -> str:
    found = sorted(folder.glob("checkpoint-*"))
    return str(found[0]) if found else str(folder)


def _lay_out_best(folder: Path, checkpoint: Path, args: TrainingArguments) -> None:
    """Move the best checkpoint so far to the path where ``load_best_model_at_end`` will look for it."""
    if args.local_process_index == 0:
        for best in (folder / _BEST).glob("checkpoint-*"):
            here = Path(args.output_dir) / best.name
            shutil.copytree(best, here, dirs_exist_ok=True)
            state = checkpoint / "trainer_state.json"
            body = json.loads(state.read_text(encoding="utf-8"))
            draft = state.with_suffix(".new")  # the file may be a link to the fetched one
            draft.write_text(json.dumps({**body, "best_model_checkpoint": str(here)}), encoding="utf-8")
            draft.replace(state)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
