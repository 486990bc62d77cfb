"""Keras 3, on any backend.

::

    from envscaler_agent.frameworks.keras import SessionCallback

    callback = SessionCallback(model)
    model.fit(x, y, epochs=20, initial_epoch=callback.initial_epoch, callbacks=[callback])

``fit`` draws an epoch's order itself and cannot save its position in it, so checkpoints are made at the ends
of epochs. Checkpoints between two steps need the torch backend and ``SessionCallback(model, data=loader)``,
where *loader* is a ``ResumableLoader`` that is also passed to ``fit``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import keras

from envscaler_agent import Session
from envscaler_agent.frameworks import ONE_TRAINING, load_random_state, save_random_state

_WEIGHTS = "model.weights.h5"
_PLACE = "place.json"


class SessionCallback(keras.callbacks.Callback):
    """Reports steps, saves when that is due or requested, and ends the program when the stage moves.

    Attributes:
        session: The session that it reports to.
        initial_epoch: For ``fit(initial_epoch=...)``; 0 on a fresh start.
    """

    def __init__(self, model: keras.Model, *, data: Any = None, session: Optional[Session] = None) -> None:
        """Continue from the checkpoint, if there is one. *model* must be built and compiled.

        Raises:
            ValueError: The model is not built or not compiled.
        """
        super().__init__()
        if not model.built or getattr(model, "optimizer", None) is None:
            raise ValueError("SessionCallback: build and compile the model before")
        self.session = session if session is not None else Session()
        self.initial_epoch = 0
        self._carried, self._data = model, data
        self._has_begun = False
        self._folder = self.session.restore()
        if self._folder is not None:
            self._load(self._folder)
        self._begin = data.state_dict() if data is not None else None

    def _load(self, folder: Path) -> None:
        place = json.loads((folder / _PLACE).read_text(encoding="utf-8"))
        self.initial_epoch = place["epoch"]
        if not self._carried.optimizer.built:
            self._carried.optimizer.build(self._carried.trainable_variables)
        self._carried.load_weights(str(folder / _WEIGHTS))
        if self._data is not None:
            self._data.load_state_dict(place["data"])

    def on_train_begin(self, *_: Any) -> None:
        """Report how long the training will be.

        Raises:
            ValueError: It is the ``fit`` of another model.
            RuntimeError: This is a second training.
        """
        if self.model is not self._carried:
            raise ValueError("SessionCallback: fit of another model than it was made for")
        if self._has_begun:
            raise RuntimeError(ONE_TRAINING)
        self._has_begun = True
        if self._data is not None:
            self._data.load_state_dict(self._begin)  # fit may have read a batch to learn its shape
            # The rest of an epoch is shorter than an epoch: keras warns of it, but it is correct.
            warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)
        self.session.__enter__()
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        self.session.report(epochs=epochs, total_steps=epochs * steps if epochs and steps else None)
        self.session.phase("training")

    def on_epoch_begin(self, epoch: int, *_: Any) -> None:
        """Restore the random generators before the first epoch's order is drawn.

        Raises:
            RuntimeError: It was restored and does not continue from there.
        """
        if self._folder is None:
            return
        if epoch != self.initial_epoch:
            raise RuntimeError(
                f"the training begins with epoch {epoch}, its checkpoint with {self.initial_epoch}: "
                "write fit(..., initial_epoch=callback.initial_epoch)"
            )
        load_random_state(self._folder, self.session.rank)
        self._folder = None

    def on_train_batch_end(self, _batch: int, logs: Optional[Mapping[str, Any]] = None) -> None:
        """Count the step; save between two steps of an epoch if the data knows its position."""
        samples = self._data.global_batch // self._data.world_size if self._data is not None else None
        self.session.step(samples=samples, loss=(logs or {}).get("loss"))
        if self._data is not None and not self._data.epoch_end:
            self.session.checkpoint(lambda folder: self._save(folder, self._data.epoch))

    def on_epoch_end(self, epoch: int, *_: Any) -> None:
        """Save at the end of an epoch, after its validation."""
        self.session.checkpoint(lambda folder: self._save(folder, epoch + 1), epoch_end=epoch + 1)

    def on_train_end(self, *_: Any) -> None:
        """Report the last numbers."""
        self.session.__exit__(None, None, None)

    def _save(self, folder: Path, epoch: int) -> None:
        save_random_state(folder, self.session.rank)
        if self.session.rank != 0:
            return
        self._carried.save_weights(str(folder / _WEIGHTS))
        place: Dict[str, Any] = {"epoch": epoch}
        if self._data is not None:
            place["data"] = self._data.state_dict()
        (folder / _PLACE).write_text(json.dumps(place), encoding="utf-8")
