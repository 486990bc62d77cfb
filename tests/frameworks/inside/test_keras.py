"""Keras with a session: what is saved, when, and which errors occur."""

from __future__ import annotations

import json
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch

from envscaler_agent.ending import EXIT_DRAINED
from envscaler_agent.frameworks.keras import SessionCallback
from envscaler_agent.frameworks.torch import ResumableLoader

X = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model():
    """Dropout, Adam and one layer; the same at every start."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.1), loss="mse")
    return made


def loader():
    """Six batches of four an epoch."""
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return ResumableLoader(rows, global_batch=4)


def fit(rig, *, with_loader, epochs=3, callbacks=()):
    """A training; its model and callback."""
    made = model()
    data = loader() if with_loader else None
    callback = SessionCallback(made, data=data, session=rig.session())
    arguments = (data,) if with_loader else (X, Y, 4)
    made.fit(
        *arguments,
        epochs=epochs,
        initial_epoch=callback.initial_epoch,
        callbacks=[*callbacks, callback],
        verbose=0,
    )
    return made, callback


def resume(rig, name):
    """Let the next session resume from the checkpoint *name*."""
    body = json.loads(rig.spool.start.read_bytes())
    body["restore"] = {"path": str(rig.spool.checkpoints / name), "name": name}
    body["session"]["attempt"] += 1
    rig.spool.start.write_text(json.dumps(body))


def same(one, other):
    """True when all weights are equal to the bit."""
    return all(np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True))


@pytest.mark.parametrize(("with_loader", "every"), [(True, 4), (True, 6), (True, 13), (False, 6)])
def test_a_resume_ends_with_the_same_weights(rig_every, with_loader, every):
    """Within an epoch with a loader, at its end with arrays that ``fit`` shuffles: equal to the bit."""
    rig = rig_every(every)
    whole, _ = fit(rig, with_loader=with_loader)
    name = rig.names()[0]
    resume(rig, name)
    again, callback = fit(rig, with_loader=with_loader)

    assert name == f"g1-step-{every:08d}-a2"
    assert same(again, whole)
    assert callback.session.steps == 18


def test_arrays_are_saved_at_the_ends_of_epochs_alone(rig_every):
    """``fit`` draws their order itself and does not report its position."""
    rig = rig_every(4)
    fit(rig, with_loader=False, epochs=2)

    assert rig.names() == ["g1-step-00000006-a2", "g1-step-00000012-a2"]


def test_asked_to_leave_it_saves_and_ends(rig):
    """``SystemExit`` with the protocol's code, through ``fit``."""
    rig.ask("drain")

    with pytest.raises(SystemExit) as left:
        fit(rig, with_loader=True)

    assert left.value.code == EXIT_DRAINED
    assert rig.names() == ["g1-step-00000001-a2"]


def test_asked_to_leave_at_the_last_step_it_resumes_to_an_end(rig):
    """The last epoch's end is saved; a resume from there has nothing left to do."""

    def ask(batch, _logs=None, **_):
        if batch == 5:
            rig.ask("drain")
            rig.now += 10

    asks = keras.callbacks.LambdaCallback(on_train_batch_begin=ask)
    with pytest.raises(SystemExit):
        fit(rig, with_loader=True, epochs=1, callbacks=[asks])
    resume(rig, "g1-step-00000006-a2")
    again, callback = fit(rig, with_loader=True, epochs=1)

    assert callback.initial_epoch == 1
    assert again.optimizer.iterations == 6


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_training(rig_every, monkeypatch):
    """The training continues, and the next checkpoint is saved."""
    rig = rig_every(5)
    save, calls = keras.Model.save_weights, []

    def full(self, *arguments, **named):
        calls.append(int(self.optimizer.iterations))
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        save(self, *arguments, **named)

    monkeypatch.setattr(keras.Model, "save_weights", full)
    fit(rig, with_loader=True)

    assert calls == [5, 10, 15]
    assert rig.names() == ["g1-step-00000010-a2", "g1-step-00000015-a2"]


def test_what_a_callback_cannot_carry_is_refused(rig):
    """A model that is not compiled, one of another callback, and a second training."""
    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="build and compile"):
        SessionCallback(bare, session=rig.session())
    with pytest.raises(ValueError, match="another model"):
        model().fit(X, Y, verbose=0, callbacks=[SessionCallback(model(), session=rig.session())])
    made, callback = fit(rig, with_loader=False)
    with pytest.raises(RuntimeError, match="carries one training"):
        made.fit(X, Y, verbose=0, callbacks=[callback])


def test_a_restored_training_that_does_not_resume_is_refused(rig_every):
    """``fit`` without ``initial_epoch`` would repeat epochs."""
    rig = rig_every(6)
    fit(rig, with_loader=False)
    resume(rig, rig.names()[0])
    made = model()

    with pytest.raises(RuntimeError, match=r"write .*initial_epoch="):
        made.fit(X, Y, 4, epochs=3, verbose=0, callbacks=[SessionCallback(made, session=rig.session())])
