"""Lightning with a session: what is saved, when, and which errors occur."""

from __future__ import annotations

import json

import lightning
import pytest
import torch

from envscaler_agent.ending import EXIT_DRAINED
from envscaler_agent.frameworks.lightning import SessionCallback
from envscaler_agent.frameworks.torch import ResumableLoader


class Line(lightning.LightningModule):
    """Four weights with dropout, a schedule by epochs, and one by the validation loss."""

    def __init__(self):
        """The same at every start."""
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.validated = []

    def training_step(self, batch, _index):
        """Loss."""
        return self.layer(torch.nn.functional.dropout(batch, 0.5)).square().mean()

    def validation_step(self, batch, _index):
        """Record the step."""
        self.validated.append(self.global_step)
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        """Slower after each epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]


ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))


def fit(callbacks, *, loader=None, restored=None, epochs=3, **options):
    """Six steps of four rows an epoch, on the CPU."""
    module = Line()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    loader = loader if loader is not None else ResumableLoader(ROWS, global_batch=4)
    trainer.fit(module, loader, torch.utils.data.DataLoader(ROWS[:4], batch_size=4), ckpt_path=restored)
    return module


def resumed(rig, name):
    """A callback that resumes from the checkpoint *name*."""
    body = json.loads(rig.spool.start.read_bytes())
    body["restore"] = {"path": str(rig.spool.checkpoints / name), "name": name}
    body["session"]["attempt"] += 1
    rig.spool.start.write_text(json.dumps(body))
    return SessionCallback(rig.session())


@pytest.mark.parametrize("every", [4, 6, 12, 13])
def test_a_resume_ends_with_the_same_weights(rig_every, every):
    """Within an epoch and at its end, with schedule and validations: equal to the bit."""
    rig = rig_every(every)
    whole = fit([SessionCallback(rig.session())])
    name = rig.names()[0]
    callback = resumed(rig, name)
    again = fit([callback], restored=callback.restored)

    assert name == f"g1-step-{every:08d}-a2"
    assert torch.equal(again.layer.weight, whole.layer.weight)
    assert whole.validated == [6, 12, 18]
    assert again.validated == [step for step in whole.validated if step > every]  # none twice, none missing


def test_a_loader_without_a_place_is_saved_at_the_ends_of_epochs_alone(rig_every):
    """Lightning would restart its epoch: samples would be used twice."""
    rig = rig_every(4)
    fit([SessionCallback(rig.session())], loader=torch.utils.data.DataLoader(ROWS, batch_size=4), epochs=2)

    assert rig.names() == ["g1-step-00000006-a2", "g1-step-00000012-a2"]


def test_accumulated_gradients_count_as_one_step(rig):
    """Two batches a step: three steps an epoch, of eight samples."""
    fit([SessionCallback(rig.session())], accumulate_grad_batches=2)

    progress = rig.said().progress
    assert (progress.step, progress.samples, progress.batch) == (9, 72, 8)
    assert (progress.total_steps, progress.epochs, progress.micro_batches) == (9, 3, 2)


def test_asked_to_leave_it_saves_and_ends(rig):
    """``SystemExit`` with the protocol's code, through Lightning's loop."""
    rig.ask("drain")

    with pytest.raises(SystemExit) as left:
        fit([SessionCallback(rig.session())])

    assert left.value.code == EXIT_DRAINED
    assert rig.names() == ["g1-step-00000001-a2"]


def test_asked_to_leave_at_the_last_step_it_resumes_to_an_end(rig):
    """The last epoch's end is saved; a resume from there has nothing left to do."""

    class AskAtTheEnd(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 17:
                rig.ask("drain")
                rig.now += 10

    with pytest.raises(SystemExit):
        fit([AskAtTheEnd(), SessionCallback(rig.session())])
    whole = fit([])
    callback = resumed(rig, "g1-step-00000018-a2")
    again = fit([callback], restored=callback.restored)

    assert torch.equal(again.layer.weight, whole.layer.weight)


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_training(rig_every, monkeypatch, full_disk):
    """The training continues, and the next checkpoint is saved."""
    rig = rig_every(5)
    save, calls = lightning.Trainer.save_checkpoint, []

    def full(self, *arguments, **named):
        calls.append(self.global_step)
        if len(calls) == 1:
            raise full_disk
        save(self, *arguments, **named)

    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", full)
    fit([SessionCallback(rig.session())])

    assert calls == [5, 10, 15]
    assert rig.names() == ["g1-step-00000010-a2", "g1-step-00000015-a2"]


def test_two_callbacks_in_one_trainer_are_refused(rig):
    """Each step would count twice. Lightning itself refuses, as long as our callback has a state."""
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `SessionCallback`"):
        fit([SessionCallback(rig.session()), SessionCallback(rig.session())])


def test_a_second_training_is_refused(rig):
    """Its step 3 and that of the first training could not be distinguished."""
    callback = SessionCallback(rig.session())
    fit([callback])

    with pytest.raises(RuntimeError, match="carries one training"):
        fit([callback])


def test_a_restored_training_that_does_not_resume_is_refused(rig_every):
    """``fit`` without ``ckpt_path`` would silently start from the beginning."""
    rig = rig_every(5)
    fit([SessionCallback(rig.session())])

    with pytest.raises(RuntimeError, match=r"write .*ckpt_path="):
        fit([resumed(rig, rig.names()[0])])
