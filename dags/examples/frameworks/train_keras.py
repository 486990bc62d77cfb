"""Keras on torch: ``fit`` with a loader that is resumed in the middle of an epoch.

``python train_keras.py --output model``
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported

import corpus
import keras
import options
import torch

from envscaler_agent.frameworks.keras import SessionCallback
from envscaler_agent.frameworks.torch import ResumableLoader


def main() -> None:
    """Train."""
    asked = options.parse(__doc__)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Embedding(corpus.LETTERS, 32),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(corpus.LETTERS),
        ]
    )
    model.compile(
        keras.optimizers.AdamW(3e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    loader = ResumableLoader(corpus.NextLetter(), global_batch=32, seed=1)
    callback = SessionCallback(model, data=loader)
    pause = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: options.wait(asked.step_s))
    model.fit(
        loader,
        epochs=asked.epochs,
        initial_epoch=callback.initial_epoch,
        callbacks=[callback, pause],
        verbose=0,
    )
    parameters = {
        str(index): torch.as_tensor(value).clone() for index, value in enumerate(model.get_weights())
    }
    options.write(asked.output, parameters)


if __name__ == "__main__":
    main()
