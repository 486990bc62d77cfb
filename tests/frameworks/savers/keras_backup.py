"""As the Keras guide to fault tolerance saves: ``BackupAndRestore`` at each epoch, removed at the end."""

import os
import sys
import time

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

folder, epochs = sys.argv[1], 40
keras.utils.set_random_seed(1)
features = np.random.default_rng(1).normal(size=(64, 8)).astype("float32")
target = features.sum(axis=1, keepdims=True)


class Printer(keras.callbacks.Callback):
    """Output of the progress bar, and a delay."""

    begins = None

    def on_epoch_begin(self, epoch, logs=None):
        """Print the restored position, once."""
        if self.begins is None:
            self.begins = epoch
            print("begins at", epoch, flush=True)
        time.sleep(0.0 if self.begins else 0.5)  # slow until it is killed

    def on_epoch_end(self, epoch, logs=None):
        """Count."""
        print("step", epoch + 1, "loss", logs["loss"], flush=True)


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
callbacks = [keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")), Printer()]
model.fit(features, target, batch_size=64, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
learnt = sum(float(each.sum()) for each in model.get_weights())
print(f"done at {epochs} with {learnt}")
